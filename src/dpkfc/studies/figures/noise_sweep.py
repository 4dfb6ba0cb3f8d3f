"""Linear regression under more and more noise: no filter, a low-pass filter and DiSK at the same learning rates (DiSK, Fig. 6a).

The paper prints no number of this figure and neither its rates nor its data, and says that DiSK has the lowest loss at all noise
levels. A filter changes which rate is best, so every method is run at every rate, and beside them each stands at its own best.
Examples are clipped as in every run here, noise is given as a multiple of that bound, and validation examples are the judge.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpkfc.studies.cell import Plain, Run

__all__ = ["METHODS", "NOISES", "RATES", "Point", "best", "cells", "points"]

RECIPE = "linear-regression"
METHODS = ("dp-sgd", "doppler", "disk")
NOISES = (1.0, 4.0, 16.0, 64.0)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = 4
_SHARED: Mapping[str, Plain] = {"momentum": 0.0, "accountant": "rdp", "validation_size": 2000, "evaluate_every": 1_000_000}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """What the runs of one method, rate and noise came to.

    Attributes:
        method: as of `dpkfc train --method`.
        lr: learning rate.
        noise: noise multiplier σ.
        mean: of the mean squared errors, over runs.
        std: of them, the sample's.
        runs: how many.
    """

    method: str
    lr: float
    noise: float
    mean: float
    std: float
    runs: int


def cells(small: bool = False) -> list[Run]:
    """One run a method, rate, noise multiplier and repetition; the noise of each is its own."""
    rates, noises, seeds = (RATES[1:3], NOISES[1:3], 1) if small else (RATES, NOISES, SEEDS)
    more: Mapping[str, Plain] = {"smoke": True} if small else {}
    return [
        Run.of(RECIPE, method, {**_SHARED, **more, "lr": lr, "noise_multiplier": noise}, seed=seed, evaluate_on="validation")
        for seed, noise, lr, method in itertools.product(range(seeds), noises, rates, METHODS)
    ]


def points(rows: Iterable[Row]) -> list[Point]:
    """Mean and deviation over repetitions; a run whose loss was not finite takes its point away."""
    found: dict[tuple[str, float, float], list[float | None]] = {}
    for row in rows:
        run = row["run"]
        key = (run["method"], run["settings"]["lr"], run["settings"]["noise_multiplier"])
        found.setdefault(key, []).append(row.get("loss"))
    made = []
    for key, values in found.items():
        losses = [value for value in values if value is not None]
        if len(losses) == len(values):
            std = statistics.stdev(losses) if len(losses) > 1 else 0.0
            made.append(Point(*key, mean=statistics.mean(losses), std=std, runs=len(losses)))
    return sorted(made, key=lambda one: (METHODS.index(one.method), one.lr, one.noise))


def best(found: Sequence[Point]) -> list[Point]:
    """Of every method and noise the point with the lowest mean."""
    keys = dict.fromkeys((one.method, one.noise) for one in found)
    return [min((one for one in found if (one.method, one.noise) == key), key=lambda one: one.mean) for key in keys]
