"""How sensitive accuracy is to settings.

Made are maps over clipping norm and learning rate, and the importance of each setting.

Cells are plain private runs on a grid. A validation split judges them, never a test set.
Importance is the share of the variance of accuracy that the mean over the other settings explains
(a first-order index of Sobol). The paper ranks by the absolute rank correlation, which misses a
setting whose best value lies inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dpkfc.app.tuning.runs import Plain, Run

Row = Mapping[str, Any]

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
CLIPS = (0.1, 0.3, 1.0, 3.0, 10.0)
LANDSCAPE_METHODS = ("dp-sgd", "dp-kfc")
NAMES = {"lr": "learning rate", "max_grad_norm": "clipping norm"}
# This text is in committed results.
LANDSCAPE_NOT_PRIVATE = (
    "NOT PRIVATE: accuracies on examples cut from the private training set, which no ε protects; "
    "every run has its own ε, and looking at all of them is in none."
)


def landscape_cells(
    recipe: str, settings: Mapping[str, Plain], *, small: bool = False
) -> list[Run]:
    """Return the grid of both methods, SGD for both, judged on a validation split."""
    rates = LEARNING_RATES[1:3] if small else LEARNING_RATES
    clips = CLIPS[:2] if small else CLIPS
    shared: dict[str, Plain] = {
        "optimizer": "sgd",
        "validation_size": 287 if recipe == "digits" else 5000,
        **settings,
    }
    return [
        Run.make(
            recipe, method, {**shared, "lr": lr, "max_grad_norm": clip}, evaluate_on="validation"
        )
        for method, lr, clip in itertools.product(LANDSCAPE_METHODS, rates, clips)
    ]


def importance(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    """Return the fraction of the variance of accuracy that each setting explains alone.

    Args:
        rows: of finished runs on a grid, with `run.settings` and `accuracy`.
        names: of settings; a setting that does not vary has no importance.
    """
    accuracies = np.array([row["accuracy"] for row in rows])
    settings = [row["run"]["settings"] for row in rows]
    variance = accuracies.var()
    explained = {}
    for name in names:
        values = np.array([of_run.get(name) for of_run in settings])
        means = [accuracies[values == value].mean() for value in set(values)]
        if len(means) > 1 and variance > 0:
            explained[name] = float(np.var(means) / variance)
    return explained


def tabulate(
    rows: Iterable[Row],
) -> tuple[list[float], list[float], list[list[float]]]:
    """Return learning rates, clipping norms, and accuracy by norm and rate; NaN without a run.

    Args:
        rows: of one recipe and method.
    """
    found = {}
    for row in rows:
        settings = row["run"]["settings"]
        found[float(settings["lr"]), float(settings["max_grad_norm"])] = row["accuracy"]
    rates, clips = (sorted(set(values)) for values in zip(*found, strict=True))
    table = [[found.get((rate, clip), math.nan) for rate in rates] for clip in clips]
    return rates, clips, table


def plateau(rows: Iterable[Row]) -> float:
    """Return the fraction of runs whose accuracy is within two points of the best."""
    accuracies = [row["accuracy"] for row in rows]
    least = max(accuracies) - 0.02
    return sum(accuracy >= least for accuracy in accuracies) / len(accuracies)
