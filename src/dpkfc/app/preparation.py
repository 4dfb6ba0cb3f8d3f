"""The values that a run needs before its first step, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from dpkfc.app.datasets.formats import ExampleSet
from dpkfc.app.methods import METHODS
from dpkfc.app.plots import Curve
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.settings import RunConfig
from dpkfc.callbacks import EarlyStopping, PrivateEarlyStopping
from dpkfc.config import Plan

LABELS = {name: method.label for name, method in METHODS.items()}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything a run needs before its first step.

    Attributes:
        config: settings.
        recipe: the task.
        data: examples.
        model: on its device, with its initial weights.
        plan: calibrated for the training set.
        start: where the initial weights come from, if not from the seed alone.
        stopping: ends the run early, None for no early end.
    """

    config: RunConfig
    recipe: Recipe
    data: ExampleSet
    model: nn.Module
    plan: Plan
    start: str = ""
    stopping: EarlyStopping | PrivateEarlyStopping | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run.

    Attributes:
        folder: the run folder.
        accuracy: of the released weights on the test or validation set, in [0, 1]; the score of a
            task without classes.
        measured_on: which of the two.
        epsilon: spent.
        steps: releases made.
        seconds: wall time of training, evaluation left out.
        interrupted: whether the run stopped before its last step.
        curve: for plots that compare runs.
        stamp: empty where ε is certified.
        score: what the task calls `accuracy`.
        loss: mean loss on the same set, None where it was not finite.
        head: of the ledger at the end, for a later check.
        errors: further figures of the task on the same set, by name.
        releases: lines of the ledger then, which are more than steps where some are for bounds.
        figures: of the schema of own data: shares that were clamped, missing or unknown. PRIVATE.
    """

    folder: Path
    accuracy: float
    measured_on: str
    epsilon: float
    steps: int
    seconds: float
    interrupted: bool
    curve: Curve
    stamp: str = ""
    score: str = "accuracy"
    loss: float | None = None
    head: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    releases: int = 0
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)
