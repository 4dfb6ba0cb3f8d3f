"""Percentile intervals of a score by the bootstrap: sums over examples drawn with replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpkfc.app.scores import LEVEL, Floats, Score

DRAWS = 1000
# Sums over so many examples are drawn as Gaussian numbers: their law is close, and time counts.
_MANY = 20_000
_CHUNK = 50
# Examples whose columns memory holds at once.
_ROWS = 1 << 16
# Maps some of the examples to what they add to sums `[n, c]`.
Columns = Callable[[slice], Floats]


def order_examples(outputs: Floats, labels: Any) -> tuple[Floats, Any]:
    """Return examples in an order that follows from themselves, so that draws follow from them too.

    Args:
        outputs: `[N]` or `[N, K]`.
        labels: `[N]`.
    """
    if len(labels) >= _MANY:
        return outputs, labels
    order = np.lexsort((outputs.reshape(len(labels), -1)[:, 0], labels))
    return outputs[order], labels[order]


def mean_of_sums(totals: Floats, n: int) -> Floats:
    """Return means `[B]` from sums `[B, 1]` over n examples."""
    means: Floats = totals[:, 0] / n
    return means


def bootstrap(
    name: str,
    count: int,
    columns: Columns,
    statistic: Callable[[Floats, int], Floats],
    guess: float | None = None,
) -> Score:
    """Return a statistic of sums over examples with its percentile interval.

    Args:
        name: of the score.
        count: examples N.
        columns: what some examples add to the sums `[n, c]`.
        statistic: maps sums `[B, c]` and N to values `[B]`.
        guess: of the best constant guess.
    """
    total = sum(columns(rows).sum(axis=0) for rows in slices(count))
    (value,) = statistic(np.asarray(total)[None], count).tolist()
    if not math.isfinite(value):
        return Score(name=name, value=None, guess=guess)
    # A public seed: the same examples have the same interval.
    generator = np.random.default_rng(0)
    draw = _draw_gaussian_sums if count >= _MANY else _draw_sums
    values = np.concatenate([statistic(sums, count) for sums in draw(columns, count, generator)])
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail]).tolist()
    return Score(name=name, value=value, low=low, high=high, guess=guess)


def slices(count: int) -> Iterator[slice]:
    """Yield all examples, some at a time: numbers that follow from each would take memory."""
    for start in range(0, count, _ROWS):
        yield slice(start, start + _ROWS)


def _draw_sums(columns: Columns, count: int, generator: np.random.Generator) -> Iterator[Floats]:
    """Yield sums `[B, c]` over as many examples as there are, drawn with replacement."""
    added = columns(slice(0, count))
    offsets = count * np.arange(_CHUNK)[:, None]
    for _ in range(DRAWS // _CHUNK):
        rows = generator.integers(count, size=(_CHUNK, count)) + offsets
        times = np.bincount(rows.ravel(), minlength=_CHUNK * count).reshape(_CHUNK, count)
        yield times.astype(np.float64) @ added


def _draw_gaussian_sums(
    columns: Columns, count: int, generator: np.random.Generator
) -> Iterator[Floats]:
    """Yield sums `[B, c]` with the mean and the covariance that drawn examples would give."""
    total = np.asarray(sum(columns(rows).sum(axis=0) for rows in slices(count)))
    size = len(total)
    mean = total / count
    products = np.zeros((size, size))
    for rows in slices(count):
        centred = columns(rows) - mean
        products += centred.T @ centred
    variances, directions = np.linalg.eigh(products)
    deviations = np.sqrt(variances.clip(min=0.0))
    numbers = deviations * generator.normal(size=(DRAWS, size))
    yield total + numbers @ directions.T
