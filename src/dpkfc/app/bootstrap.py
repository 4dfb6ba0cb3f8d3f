"""Percentile intervals of a score by the bootstrap: sums over examples drawn with replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from dpkfc.app.scores import LEVEL, Floats, Score

DRAWS = 1000
# Sums over so many examples are drawn as Gaussian numbers: their law is close, and time counts.
_MANY = 20_000
_CHUNK = 50


def mean_of_sums(totals: Floats, n: int) -> Floats:
    """Return means `[B]` from sums `[B, 1]` over n examples."""
    means: Floats = totals[:, 0] / n
    return means


def bootstrap(
    name: str,
    columns: Floats,
    statistic: Callable[[Floats, int], Floats],
    guess: float | None = None,
) -> Score:
    """Return a statistic of sums over examples with its percentile interval.

    Args:
        name: of the score.
        columns: what each example adds to the sums `[N, c]`.
        statistic: maps sums `[B, c]` and N to values `[B]`.
        guess: of the best constant guess.
    """
    count = len(columns)
    (value,) = statistic(columns.sum(axis=0)[None], count).tolist()
    if not math.isfinite(value):
        return Score(name=name, value=None, guess=guess)
    # A public seed: the same examples have the same interval.
    generator = np.random.default_rng(0)
    draw = _draw_gaussian_sums if count >= _MANY else _draw_sums
    values = np.concatenate([statistic(sums, count) for sums in draw(columns, generator)])
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail]).tolist()
    return Score(name=name, value=value, low=low, high=high, guess=guess)


def _draw_sums(columns: Floats, generator: np.random.Generator) -> Iterator[Floats]:
    """Yield sums `[B, c]` over as many examples as there are, drawn with replacement."""
    count = len(columns)
    offsets = count * np.arange(_CHUNK)[:, None]
    for _ in range(DRAWS // _CHUNK):
        rows = generator.integers(count, size=(_CHUNK, count)) + offsets
        times = np.bincount(rows.ravel(), minlength=_CHUNK * count).reshape(_CHUNK, count)
        yield times.astype(np.float64) @ columns


def _draw_gaussian_sums(columns: Floats, generator: np.random.Generator) -> Iterator[Floats]:
    """Yield sums `[B, c]` with the mean and the covariance that drawn examples would give."""
    count, width = columns.shape
    centred = columns - columns.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred)
    numbers = generator.normal(size=(DRAWS, width)) * np.sqrt(variances.clip(min=0.0))
    yield columns.sum(axis=0) + numbers @ directions.T
