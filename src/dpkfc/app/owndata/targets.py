"""What is learned from a user's own data: classes, or a number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.app.class_scores import choose_classes
from dpkfc.app.datasets.examples import Examples, choose_rows
from dpkfc.app.number_scores import score_numbers
from dpkfc.app.owndata.cells import NumberForm, canonical, fold_text
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.decoding import Texts, distinct
from dpkfc.app.owndata.records import UNKNOWN
from dpkfc.app.owndata.scales import from_share
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.recipes.objective import (
    CLASSIFICATION,
    NOTHING_KNOWN,
    Judged,
    Objective,
    model_outputs,
    squared_error,
)
from dpkfc.app.scores import Scores

_CHUNK = 250
# Records by what is counted and the column.
Counts = dict[tuple[str, str], int]


def target_of(schema: Schema) -> Classes | Number:
    """Return the target of a schema: how it is encoded, learned, judged and predicted."""
    if schema.target_bounds:
        least, greatest = schema.target_bounds
        number_form = NumberForm(schema.decimal, schema.thousands)
        return Number(
            schema.target, least, greatest, schema.missing, number_form, scale=schema.target_scale
        )
    return Classes(schema.classes)


LIKE_A_CLASS = "a class but for case, blanks, accents' form or a full stop"
ONE_CLASS = "of one class, and none of another"


def _fold(text: str) -> str:
    """Return a text without what people overlook between a label and a class."""
    return fold_text(canonical(text)).strip(" \t\n.,;:'\"")


@dataclass(frozen=True)
class Classes:
    """One of public classes. Its label is a number, `UNKNOWN` for any other value."""

    names: tuple[str, ...]
    likelihood: str = "categorical"
    task: Objective = CLASSIFICATION

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.names)

    def encode(self, texts: Texts) -> tuple[np.ndarray, Counts]:
        """Return class numbers int64 `[N]`, and what their owner has to know of them.

        That is how many texts are nearly a class, and how many are of the only class that occurs.
        """
        number_of = {canonical(name): number for number, name in enumerate(self.names)}
        nearly = {_fold(name) for name in self.names}
        codes, known = distinct(texts)
        numbers = np.full(len(known), UNKNOWN, np.int64)
        is_near = np.zeros(len(known), bool)
        for code, text in enumerate(known):
            if text is not None:
                numbers[code] = number_of.get(canonical(text), UNKNOWN)
                is_near[code] = numbers[code] == UNKNOWN and _fold(text) in nearly
        labels = numbers[codes]
        counts = {(LIKE_A_CLASS, "labels"): int(is_near[codes].sum())}
        if len(np.unique(labels[labels != UNKNOWN])) == 1:
            counts[ONE_CLASS, "labels"] = int((labels != UNKNOWN).sum())
        return labels, {what: count for what, count in counts.items() if count}

    def answer(self, outputs: Tensor, threshold: float = 0.5) -> dict[str, list[str]]:
        """Return the class that a public threshold chooses, and the probabilities of all."""
        scores = outputs.softmax(1)
        best = choose_classes(outputs, threshold).tolist()
        columns = {"class": [self.names[number] for number in best]}
        for name, shares in zip(self.names, scores.T.tolist(), strict=True):
            columns[f"p({name})"] = [f"{share:.6f}" for share in shares]
        return columns

    def describe(self) -> dict[str, tuple[str, str]]:
        """Return the names of the classes."""
        return {"classes": (", ".join(self.names), "named by the user, not read from rows")}


@dataclass(frozen=True)
class Number:
    """A number. Its label is clamped to the bounds and mapped to −1 to 1, NaN where it is missing.

    Attributes:
        name: of the column.
        least, greatest: public bounds.
        missing: texts that mean a missing value.
        number_form: how numbers are written.
        scale: "log" where errors count as factors.
    """

    name: str
    least: float
    greatest: float
    missing: tuple[str, ...]
    number_form: NumberForm = NumberForm()
    scale: str = ""
    likelihood: str = "gaussian"
    outputs: int = 1

    def encode(self, texts: Texts) -> tuple[np.ndarray, Counts]:
        """Return scaled numbers float32 `[N]`, and how many were clamped."""
        column = Column(
            kind="number",
            bounds=(self.least, self.greatest),
            missing=self.missing,
            decimal=self.number_form.decimal,
            thousands=self.number_form.thousands,
            scale=self.scale,
        )
        encoded = column.encode(texts)
        labels = np.where(encoded.is_missing, np.nan, encoded.features[:, 0])
        count = int(encoded.is_unexpected.sum())
        return labels.astype(np.float32), {("outside of bounds", self.name): count}

    def answer(self, outputs: Tensor) -> dict[str, list[str]]:
        """Return the predicted number in its own unit, inside of the bounds."""
        numbers = self.to_unit(outputs.squeeze(1))
        return {self.name: [f"{number:.6g}" for number in numbers.tolist()]}

    def to_unit(self, scaled: Tensor) -> np.ndarray:
        """Return numbers from −1 to 1 in the unit of the target, inside of the bounds."""
        share = (scaled.detach().cpu().double().clamp(-1, 1) + 1) / 2
        return from_share(share.numpy(), self.least, self.greatest, self.scale)

    def describe(self) -> dict[str, tuple[str, str]]:
        """Return the bounds, and what an output stands for."""
        text = (
            f"{self.name}, clamped to {self.least:g} to {self.greatest:g}; outputs −1 to 1 of the"
            f" model stand for it{', on a log scale' if self.scale else ''}"
        )
        return {"target": (text, "bounds are stated by the user, not read from rows")}

    @property
    def task(self) -> Objective:
        """Squared error, and errors in the unit of the target."""
        return Objective(
            loss=squared_error,
            judge=self._judge,
            score="1 − mean absolute error ÷ range",
            mean_loss="mean squared error",
            also=self._errors,
            scores=self._score,
            unit=0.0 if self.scale else (self.greatest - self.least) / 2,
        )

    def _score(self, model: nn.Module, examples: Examples) -> Scores:
        """Return all scores in the unit of the target."""
        predicted = self._predict(model, examples[0])
        return score_numbers(predicted, self.to_unit(examples[1]))

    def _predict(self, model: nn.Module, inputs: Tensor) -> np.ndarray:
        outputs = [output.squeeze(1).cpu() for output in model_outputs(model, inputs, _CHUNK)]
        return self.to_unit(torch.cat(outputs))

    def _judge(self, model: nn.Module, examples: Examples) -> Judged:
        """Return score and mean squared error in the unit of the target, of known targets."""
        is_known = ~examples[1].isnan()
        if not is_known.any():
            return NOTHING_KNOWN
        predicted = self._predict(model, choose_rows(examples[0], is_known))
        errors = predicted - self.to_unit(examples[1][is_known])
        score = 1 - float(np.abs(errors).mean()) / (self.greatest - self.least)
        return Judged(score, float((errors**2).mean()))

    def _errors(self, judged: Judged) -> dict[str, float]:
        return {
            "mean absolute error": (1 - judged.accuracy) * (self.greatest - self.least),
            "root mean squared error": judged.loss**0.5,
        }
