"""How sensitive accuracy is to settings: maps over clipping norm and learning rate, and the importance of each setting.

Cells are plain private runs on a grid, or the trials of a tuning study; a validation split judges them, never a test set.
Importance is the share of the variance of accuracy that the mean over the other settings explains (a first-order index of
Sobol), beside the absolute rank correlation that the paper ranks by: that one misses a setting whose best value lies inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpkfc.report.figures import SensitivityMap
from dpkfc.studies.cell import Plain, Run

__all__ = ["NAMES", "NOT_PRIVATE", "Importance", "cells", "importance", "maps", "plateau"]

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
CLIPS = (0.1, 0.3, 1.0, 3.0, 10.0)
METHODS = ("dp-sgd", "dp-kfc")
NAMES = {"lr": "learning rate", "max_grad_norm": "clipping norm"}
NOT_PRIVATE = (
    "NOT PRIVATE: accuracies on examples cut from the private training set, which no ε protects; every run has its own ε, and "
    "looking at all of them is in none."
)


@dataclass(frozen=True)
class Importance:
    """Of one setting.

    Attributes:
        explained: share of the variance of accuracy that is explained by this setting alone, in [0, 1].
        rank_correlation: absolute, in [0, 1].
    """

    explained: float
    rank_correlation: float


def cells(recipe: str, settings: Mapping[str, Plain], *, seed: int = 0, small: bool = False) -> list[Run]:
    """The grid of both methods, SGD for both, judged on a validation split."""
    rates, clips = (LEARNING_RATES[1:3], CLIPS[:2]) if small else (LEARNING_RATES, CLIPS)
    shared: dict[str, Plain] = {"optimizer": "sgd", "validation_size": 287 if recipe == "digits" else 5000, **settings}
    return [
        Run.of(recipe, method, {**shared, "lr": lr, "max_grad_norm": clip}, seed=seed, evaluate_on="validation")
        for method, lr, clip in itertools.product(METHODS, rates, clips)
    ]


def importance(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Importance]:
    """Of each setting over runs that differ in them.

    Args:
        rows: of finished runs, with `run.settings` and `accuracy`.
        names: of settings; one that does not vary has none.
    """
    held = list(rows)
    accuracy = np.array([row["accuracy"] for row in held], dtype=float)
    found = {}
    for name in names:
        values = np.array([float(row["run"]["settings"].get(name, math.nan)) for row in held])
        if len(set(values.tolist())) < 2 or np.isnan(values).any() or accuracy.var() == 0:
            continue
        groups = _groups(values)
        means = np.array([accuracy[groups == g].mean() for g in groups])
        correlation = np.corrcoef(_ranks(values), _ranks(accuracy))[0, 1]
        found[name] = Importance(float(means.var() / accuracy.var()), float(abs(correlation)))
    return found


def _groups(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equal values together; five groups of equal size where there are more than eight values."""
    if len(set(values.tolist())) <= 8:
        return np.asarray(np.unique(values, return_inverse=True)[1])
    return np.asarray((5 * values.argsort().argsort()) // len(values))


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ranks, ties at their mean."""
    order, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def maps(rows: Sequence[Mapping[str, Any]]) -> list[SensitivityMap]:
    """Accuracy over learning rate and clipping norm, a map for each recipe and method, with the importance of both."""
    held: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        held.setdefault((row["run"]["recipe"], row["run"]["method"]), []).append(row)
    return [_map(recipe, method, of) for (recipe, method), of in held.items()]


def _map(recipe: str, method: str, rows: Sequence[Mapping[str, Any]]) -> SensitivityMap:
    rates, clips = (sorted({float(row["run"]["settings"][name]) for row in rows}) for name in NAMES)
    values: list[list[float | None]] = [[None] * len(rates) for _ in clips]
    for row in rows:
        settings = row["run"]["settings"]
        values[clips.index(settings["max_grad_norm"])][rates.index(settings["lr"])] = row["accuracy"]
    found = importance(rows, list(NAMES))
    told = "; ".join(f"{NAMES[name]} {100 * one.explained:.0f} %" for name, one in found.items())
    note = f"{100 * plateau(rows):.0f} % of the cells are within 2 points of the best."
    note += f" Share of the variance that a setting explains alone: {told}." if told else ""
    return SensitivityMap(
        name=f"{recipe}, ε = {max(row['epsilon'] for row in rows):.2f}", method=method, x=NAMES["lr"], x_values=rates,
        y=NAMES["max_grad_norm"], y_values=clips, values=values, measured_on=rows[0]["measured_on"], note=note,
    )  # fmt: skip


def plateau(rows: Iterable[Mapping[str, Any]], within: float = 0.02) -> float:
    """Share of the runs whose accuracy is within so much of the best."""
    accuracy = [row["accuracy"] for row in rows]
    return sum(a >= max(accuracy) - within for a in accuracy) / len(accuracy) if accuracy else 0.0
