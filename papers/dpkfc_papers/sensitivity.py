"""How sensitive accuracy is to settings.

Made are maps over clipping norm and learning rate, and the importance of each setting.

Cells are plain private runs on a grid. A validation split judges them, never a test set.
Importance is the share of the variance of accuracy that the mean over the other settings explains
(a first-order index of Sobol). The paper ranks by the absolute rank correlation, which misses a
setting whose best value lies inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpkfc.app.html.groups import collect
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


@dataclass(frozen=True, kw_only=True)
class SensitivityMap:
    """Accuracy of a method over two of its settings.

    Attributes:
        name: for example the task.
        method: of the runs.
        x: the setting that runs across.
        x_values: its values, from left to right.
        y: the setting that runs upwards.
        y_values: its values, the lowest line first.
        values: accuracies in [0, 1], a row for each value of `y`; None where a run is missing.
        measured_on: the set of the accuracies: "validation" or "test".
        note: a remark on the map.
    """

    name: str
    method: str
    x: str
    x_values: Sequence[float]
    y: str
    y_values: Sequence[float]
    values: Sequence[Sequence[float | None]]
    measured_on: str
    note: str = ""


def maps(rows: Sequence[Row]) -> list[SensitivityMap]:
    """Return accuracy over learning rate and clipping norm, with the importance of both.

    Each recipe and method has a map.
    """
    members = collect(rows, lambda row: (row["run"]["recipe"], row["run"]["method"]))
    return [_map(recipe, method, group) for (recipe, method), group in members.items()]


def _map(recipe: str, method: str, rows: Sequence[Row]) -> SensitivityMap:
    settings = [row["run"]["settings"] for row in rows]
    rates = sorted({float(one["lr"]) for one in settings})
    clips = sorted({float(one["max_grad_norm"]) for one in settings})
    values: list[list[float | None]] = [[None] * len(rates) for _ in clips]
    for row, one in zip(rows, settings, strict=True):
        line = clips.index(one["max_grad_norm"])
        column = rates.index(one["lr"])
        values[line][column] = row["accuracy"]
    explained = []
    for name, fraction in importance(rows, NAMES).items():
        explained.append(f"{NAMES[name]} {100 * fraction:.0f} %")
    note = f"{100 * plateau(rows):.0f} % of the cells are within 2 points of the best."
    if explained:
        note += f" Share of the variance that a setting explains alone: {'; '.join(explained)}."
    return SensitivityMap(
        name=f"{recipe}, ε = {max(row['epsilon'] for row in rows):.2f}",
        method=method,
        x=NAMES["lr"],
        x_values=rates,
        y=NAMES["max_grad_norm"],
        y_values=clips,
        values=values,
        measured_on=rows[0]["measured_on"],
        note=note,
    )


def plateau(rows: Iterable[Row]) -> float:
    """Return the fraction of runs whose accuracy is within two points of the best."""
    accuracies = [row["accuracy"] for row in rows]
    least = max(accuracies) - 0.02
    return sum(accuracy >= least for accuracy in accuracies) / len(accuracies)
