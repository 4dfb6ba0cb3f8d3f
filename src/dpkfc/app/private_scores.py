"""Scores of private test rows, from one noisy vector of counts that the plan has charged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from dpkfc.app.count_forms import BINS, CountForm, Numbers, SeveralClasses, TwoClasses
from dpkfc.app.datasets.examples import Examples
from dpkfc.app.recipes.objective import NOTHING_KNOWN, Judged
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.scores import OF_NOISY_SCORES, Floats, Score, Scores
from dpkfc.app.toml import ConfigError
from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.state import own_pass

PURPOSE = "scores"
_DRAWS = 1000


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
            finite = np.nan_to_num(values, posinf=1e6, neginf=-1e6)
            total = total + form.add(finite, label)
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
        # The variance of a count: of the noise, and of a binomial number of rows.
        trials = max(rows, 1.0)
        shares = np.clip(noisy / trials, 0.0, 1.0)
        spread = np.sqrt(stddev**2 + trials * shares * (1 - shares))
        draws = noisy + spread * generator.normal(size=(_DRAWS, len(noisy)))
        values = form.figures(noisy[None])
        drawn = form.figures(draws)
        guesses = form.guesses(noisy[None])
        # A share of rows says nothing where their number may be zero.
        if not np.quantile(form.count(draws), 0.025) > 0:
            values = {name: np.array([math.nan]) for name in values}
            guesses = {}
    confusion = np.nan_to_num(form.confusion(noisy)).clip(min=0).round().astype(int)
    return Scores(
        examples=max(0, round(float(np.nan_to_num(rows)))),
        unlabelled=0,
        scores=tuple(_score(name, values, drawn, guesses) for name in values),
        confusion=tuple(tuple(counts) for counts in confusion.tolist()),
        intervals=OF_NOISY_SCORES,
    )


def _score(
    name: str,
    values: Mapping[str, Floats],
    drawn: Mapping[str, Floats],
    guesses: Mapping[str, Floats],
) -> Score:
    most = 1.0 if name.startswith(("accuracy", "AUROC", "R²", "calibration")) else math.inf
    least = -math.inf if name == "R²" else 0.0

    def clamp(number: float) -> float:
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
    low, high = clamp(low), clamp(high)
    # Where anything is possible, a value says nothing.
    shown = None if (low, high) == (least, most) else clamp(value)
    return Score(name=name, value=shown, low=low, high=high, guess=guess)
