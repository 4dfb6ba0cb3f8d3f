"""Scores of private test rows, from one noisy vector of counts that the plan has charged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dpkfc.app.datasets.examples import Examples
from dpkfc.app.owndata.bounds import norm_of
from dpkfc.app.recipes.objective import NOTHING_KNOWN, Judged
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.scores import Floats, Score, Scores
from dpkfc.app.toml import ConfigError
from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.state import own_pass

PURPOSE = "scores"
BINS = 20
_BINS_OF_CONFIDENCE = 15
# Fractions are multiples of this, so that float64 adds them without rounding.
_PARTS = 2.0**20
_DRAWS = 1000
INTERVALS = "95 % intervals from 1,000 draws of the known noise and of the rows; all is public"


# A form of counts says what one row adds to a vector (`add`, with the largest L2 norm `norm`), and
# which scores follow from sums `[B, n]` (`count`, `figures`, `guesses`, `confusion`). The vectors
# are private until noise is added.


@dataclass(frozen=True)
class TwoClasses:
    """Counts by class and bin of the probability of the second class; one row adds 1 to one."""

    threshold: float = 0.5
    norm: float = 1.0

    @property
    def _edges(self) -> Floats:
        return np.unique([*np.linspace(0, 1, BINS + 1), self.threshold])

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row with outputs `[K]` adds `[n]`; zeros for an unknown label."""
        edges = self._edges
        counts = np.zeros((2, len(edges) - 1))
        if label in (0, 1):
            share = 1 / (1 + math.exp(min(700.0, outputs[0] - outputs[1])))
            place = int(np.searchsorted(edges, share, side="right")) - 1
            counts[int(label), min(place, counts.shape[1] - 1)] = 1.0
        return counts.ravel()

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(totals.sum(1))

    def _split(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        """Return counts of both classes `[B, bins]`, and the middle of each bin."""
        edges = self._edges
        first, second = np.moveaxis(totals.reshape(len(totals), 2, -1), 1, 0)
        return first, second, (edges[1:] + edges[:-1]) / 2

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        first, second, middle = self._split(totals)
        all_rows = totals.sum(1)
        is_second = middle >= self.threshold
        below = first.cumsum(1) - first / 2
        pairs = first.sum(1) * second.sum(1)
        losses = first @ -np.log(1 - middle) + second @ -np.log(middle)
        gaps = second - middle * (first + second)
        return {
            "accuracy": (first @ ~is_second + second @ is_second) / all_rows,
            "AUROC": (second * below).sum(1) / pairs,
            f"log loss ({BINS} bins)": losses / all_rows,
            f"calibration error ({BINS} bins)": np.abs(gaps).sum(1) / all_rows,
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        first, second, _ = self._split(totals)
        return {
            **_class_guesses(np.stack([first.sum(1), second.sum(1)], axis=1)),
            "AUROC": np.full(len(totals), 0.5),
        }

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        first, second, middle = self._split(totals[None])
        is_second = middle >= self.threshold
        rows = [[counts @ ~is_second, counts @ is_second] for counts in (first[0], second[0])]
        return np.array(rows)


@dataclass(frozen=True)
class SeveralClasses:
    """Counts by class and answer, by probability of the own class, and by confidence.

    One row adds 1 to a count of each part.
    """

    classes: int
    norm: float = norm_of(3)

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row adds."""
        confusion = np.zeros((self.classes, self.classes))
        own, confidence = np.zeros(BINS), np.zeros((2, _BINS_OF_CONFIDENCE))
        if label in range(self.classes):
            shares = np.exp(outputs - np.logaddexp.reduce(outputs))
            answer = int(outputs.argmax())
            confusion[int(label), answer] = 1.0
            own[min(int(shares[int(label)] * BINS), BINS - 1)] = 1.0
            place = min(int(shares[answer] * _BINS_OF_CONFIDENCE), _BINS_OF_CONFIDENCE - 1)
            confidence[int(answer == label), place] = 1.0
        return np.concatenate([confusion.ravel(), own, confidence.ravel()])

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(self._parts(totals)[0].sum((1, 2)))

    def _parts(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        size = self.classes**2
        confusion = totals[:, :size].reshape(-1, self.classes, self.classes)
        confidence = totals[:, size + BINS :].reshape(-1, 2, _BINS_OF_CONFIDENCE)
        return confusion, totals[:, size : size + BINS], confidence

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        confusion, own, confidence = self._parts(totals)
        middle = (np.arange(BINS) + 0.5) / BINS
        wrong, right = confidence[:, 0], confidence[:, 1]
        of_bin = (np.arange(_BINS_OF_CONFIDENCE) + 0.5) / _BINS_OF_CONFIDENCE
        gaps = right - of_bin * (wrong + right)
        return {
            "accuracy": np.trace(confusion, axis1=1, axis2=2) / confusion.sum((1, 2)),
            f"log loss ({BINS} bins)": own @ -np.log(middle) / own.sum(1),
            f"calibration error ({BINS} bins)": np.abs(gaps).sum(1) / confidence.sum((1, 2)),
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        return _class_guesses(self._parts(totals)[0].sum(2))

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        return self._parts(totals[None])[0][0]


def _class_guesses(counts: Floats) -> dict[str, Floats]:
    """Return the scores of the best constant guess from rows of each class `[B, K]`."""
    counts = counts.clip(min=0.0)
    shares = counts / counts.sum(1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return {"accuracy": shares.max(1), f"log loss ({BINS} bins)": -(shares * logs).sum(1)}


@dataclass(frozen=True)
class Numbers:
    """The number of rows, and sums of errors and targets with their squares, each in [0, 1].

    Outputs and targets are between −1 and 1.

    Attributes:
        unit: half the range of the target.
    """

    unit: float
    norm: float = norm_of(5)

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row adds."""
        if math.isnan(label):
            return np.zeros(5)
        target = (min(1.0, max(-1.0, label)) + 1) / 2
        error = abs((float(outputs[0].clip(-1, 1)) + 1) / 2 - target)
        values = np.array([1.0, error, error**2, target, target**2])
        return np.asarray(np.floor(values * _PARTS) / _PARTS)

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(totals[:, 0])

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        count, absolute, squared, target, squares = totals.T
        spread = squares - target**2 / count
        return {
            "R²": 1 - squared / spread,
            "mean absolute error": 2 * self.unit * absolute / count,
            "root mean squared error": 2 * self.unit * np.sqrt(squared / count),
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        count, _, _, target, squares = totals.T
        spread = np.sqrt(squares / count - (target / count) ** 2)
        return {
            "R²": np.zeros(len(totals)),
            "root mean squared error": 2 * self.unit * spread,
        }

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        return np.zeros((0, 0))


CountForm = TwoClasses | SeveralClasses | Numbers

# --------------------------------------------------------------------------------------------------


def make_form(recipe: Recipe, config: RunConfig) -> CountForm:
    """Return how test rows of a recipe are counted.

    Raises:
        ConfigError: settings that do not go together, units of several records, or a task without
            scores.
    """
    if config.run.eval_on != "test" or config.run.patience or config.privacy.noise_multiplier:
        raise ConfigError(
            "private_scores takes a part of epsilon for the test split: leave out patience,"
            " noise_multiplier and eval_on = 'validation'"
        )
    if recipe.max_records_per_unit is not None:
        raise ConfigError(
            f"private_scores bounds what one record adds, and {recipe.title[:40]!r} has units of"
            " several; leave it out"
        )
    if recipe.task.scores is None or (recipe.num_classes == 1 and not recipe.task.unit):
        raise ConfigError(
            "private_scores is for classes, or a number with bounds on a linear scale, and"
            f" {recipe.title[:40]!r} has neither; leave it out"
        )
    if recipe.num_classes == 1:
        return Numbers(recipe.task.unit)
    threshold = config.data.threshold
    return TwoClasses(threshold) if recipe.num_classes == 2 else SeveralClasses(recipe.num_classes)


def judge(form: CountForm, scores: Scores) -> Judged:
    """Return score and mean loss as the task of a recipe has them."""
    values = {score.name: score.value for score in scores.scores}
    if isinstance(form, Numbers):
        absolute, root = values["mean absolute error"], values["root mean squared error"]
        if absolute is None or root is None:
            return NOTHING_KNOWN
        return Judged(1 - absolute / (2 * form.unit), root**2)
    accuracy, loss = values["accuracy"], values[f"log loss ({BINS} bins)"]
    return NOTHING_KNOWN if accuracy is None or loss is None else Judged(accuracy, loss)


@torch.no_grad()
def count_rows(form: CountForm, model: nn.Module, examples: Examples) -> Floats:
    """Return the sum of what the rows add, each evaluated alone. PRIVATE.

    Args:
        form: of the counts.
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
    """
    device = next(model.parameters()).device
    labels = examples[1].cpu().double().tolist()
    total: Floats | float = 0.0
    with evaluation_mode(model):
        for row, label in enumerate(labels):
            # What the model remembers of a row must not reach the next one.
            with own_pass(model):
                outputs = model(examples[0][row : row + 1].clone().to(device))
            values = outputs[0].double().cpu().numpy()
            total = total + form.add(np.nan_to_num(values, posinf=1e6, neginf=-1e6), label)
    return np.asarray(total)


def noisy_scores(form: CountForm, noisy: Floats, stddev: float) -> Scores:
    """Return the scores that follow from a noisy sum. It looks at nothing private.

    Args:
        form: of the counts.
        noisy: the released sum `[n]`; NaN where it was lost.
        stddev: of its noise.
    """
    generator = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        rows = form.count(noisy[None])[0]
        shares = np.clip(noisy / max(rows, 1.0), 0.0, 1.0)
        spread = np.sqrt(stddev**2 + max(rows, 1.0) * shares * (1 - shares))
        draws = noisy + spread * generator.normal(size=(_DRAWS, len(noisy)))
        values, drawn = form.figures(noisy[None]), form.figures(draws)
        guesses = form.guesses(noisy[None])
    confusion = np.nan_to_num(form.confusion(noisy)).clip(min=0).round().astype(int)
    return Scores(
        examples=max(0, round(float(np.nan_to_num(rows)))),
        unlabelled=0,
        scores=tuple(_score(name, values, drawn, guesses) for name in values),
        confusion=tuple(tuple(counts) for counts in confusion.tolist()),
        intervals=INTERVALS,
    )


def _score(
    name: str,
    values: Mapping[str, Floats],
    drawn: Mapping[str, Floats],
    guesses: Mapping[str, Floats],
) -> Score:
    most = 1.0 if name in ("accuracy", "AUROC", "R²") else math.inf
    least = -math.inf if name == "R²" else 0.0

    def inside(number: float) -> float:
        return min(most, max(least, number))

    value = float(values[name][0])
    guess = float(guesses[name][0]) if name in guesses else None
    if guess is not None and not math.isfinite(guess):
        guess = None
    known = drawn[name][np.isfinite(drawn[name])]
    if not math.isfinite(value) or not len(known):
        return Score(name=name, value=None, guess=guess)
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    if name.startswith("calibration"):
        # Noise adds to it, in a draw as in the release.
        low, high = 2 * value - high, 2 * value - low
    return Score(name=name, value=inside(value), low=inside(low), high=inside(high), guess=guess)
