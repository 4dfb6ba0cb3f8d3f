"""Linear regression under more and more noise (DiSK, Fig. 6a).

No filter, a low-pass filter and DiSK run at the same learning rates.

The paper prints no number of this figure and neither its rates nor its data, and says that DiSK
has the lowest loss at all noise levels. A filter changes which rate is best, so every method is
run at every rate, and next to them each stands at its own best. Examples are clipped as in every
run here, noise is given as a multiple of that bound, and validation examples are the judge.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpkfc.app.html.groups import collect
from dpkfc.app.tuning.runs import Plain, Run

Row = Mapping[str, Any]

RECIPE = "linear-regression"
SWEEP_METHODS = ("dp-sgd", "doppler", "disk")
NOISES = (1.0, 4.0, 16.0, 64.0)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = 4
_SHARED: Mapping[str, Plain] = {
    "momentum": 0.0,
    "accountant": "rdp",
    "validation_size": 2000,
    "evaluate_every": 1_000_000,
}


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


def sweep_cells(small: bool = False) -> list[Run]:
    """Return a run for each method, rate, noise multiplier and repetition, with fresh noise."""
    rates = RATES[1:3] if small else RATES
    noises = NOISES[1:3] if small else NOISES
    seeds = 1 if small else SEEDS
    shared = dict(_SHARED)
    if small:
        shared["smoke"] = True
    runs = []
    for seed, noise, lr, method in itertools.product(range(seeds), noises, rates, SWEEP_METHODS):
        settings = {**shared, "lr": lr, "noise_multiplier": noise}
        runs.append(Run.make(RECIPE, method, settings, seed=seed, evaluate_on="validation"))
    return runs


def points(rows: Iterable[Row]) -> list[Point]:
    """Return mean and deviation over repetitions.

    A point with a run whose loss was not finite is left out.
    """

    def key(row: Row) -> tuple[str, float, float]:
        settings = row["run"]["settings"]
        return row["run"]["method"], settings["lr"], settings["noise_multiplier"]

    points = []
    for (method, lr, noise), repetitions in collect(rows, key).items():
        losses: list[Any] = [row.get("loss") for row in repetitions]
        if None in losses:
            continue
        mean = statistics.mean(losses)
        std = statistics.stdev(losses) if len(losses) > 1 else 0.0
        points.append(Point(method, lr, noise, mean, std, len(losses)))

    def order(point: Point) -> tuple[int, float, float]:
        return SWEEP_METHODS.index(point.method), point.lr, point.noise

    return sorted(points, key=order)


def best(points: Sequence[Point]) -> list[Point]:
    """Return the point with the lowest mean of every method and noise."""
    groups = collect(points, lambda point: (point.method, point.noise))
    return [min(group, key=lambda point: point.mean) for group in groups.values()]
