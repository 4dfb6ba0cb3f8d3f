"""Bounds of numbers that a schema leaves out, found by one release of noisy counts over bins.

The bins of a column are powers of two of the magnitude, with a sign, and zero. They are the same
for every file. A record counts once in each column, or not at all where it holds no finite number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.
    from torch import Tensor

    from dpkfc.data.stored_rows import StoredRows


# Magnitudes from 2⁻²⁰ to 2⁴¹; smaller ones count as zero, larger ones as the largest.
_LEAST_POWER, _GREATEST_POWER = -20, 40
_ZERO_BIN = _GREATEST_POWER - _LEAST_POWER + 1
BINS = 2 * _ZERO_BIN + 1
# The bin of an infinite number, which is not counted.
NO_BIN = -1
DEFAULT_BOUNDS = (-1.0, 1.0)
# Most chance that the noise of any empty bin exceeds the threshold, and widens bounds.
_FALSE_ALARM = 1e-3
# Weights are multiples of this, so that float64 adds them without rounding.
_WEIGHT = 2**20
# Rows that are read at once.
_ROWS = 2**16


def bin_numbers(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each number, `NO_BIN` for infinity and NaN.

    Each number is looked at by itself.
    """
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0.0)
    _, exponents = np.frexp(finite)
    smallest = _LEAST_POWER - 1
    magnitudes = np.clip(exponents - 1, smallest, _GREATEST_POWER) - smallest
    magnitudes = np.where(finite == 0.0, 0, magnitudes)
    signs = np.sign(finite).astype(np.int64)
    bins = _ZERO_BIN + signs * magnitudes
    return np.where(is_finite, bins, NO_BIN)


def count_bins(
    inputs: Tensor | StoredRows, places: Sequence[int], units: Tensor | None = None
) -> NDArray[np.float64]:
    """Return the counts of all bins of some columns. PRIVATE.

    Args:
        inputs: encoded records `[N, width]`: a bin at each place, and an indicator of a missing
            value behind it.
        places: of the columns.
        units: the unit of each record `[N]`. A unit counts once in each column, in parts where it
            has several records.

    Returns:
        Counts `[len(places) · BINS]`. One record or unit more changes them by at most
        `norm_of(len(places))`, in the L2 norm.
    """
    weights = np.full(len(inputs), 1.0)
    if units is not None:
        _, numbers, sizes = np.unique(units.numpy(), return_inverse=True, return_counts=True)
        weights = (_WEIGHT // sizes[numbers]) / _WEIGHT
    counts = np.zeros((len(places), BINS))
    first = 0
    for rows in inputs.split(_ROWS):
        last = first + len(rows)
        for column, place in enumerate(places):
            bins = rows[:, place].numpy().astype(np.int64)
            is_present = rows[:, place + 1].numpy() == 0
            is_counted = (bins != NO_BIN) & is_present
            counted = bins[is_counted]
            counts[column] += np.bincount(counted, weights[first:last][is_counted], BINS)
        first = last
    return counts.ravel()


def norm_of(columns: int) -> float:
    """Return the most that one record or unit changes the counts of so many columns."""
    return math.nextafter(math.sqrt(columns), math.inf)


def choose_bounds(
    noisy: NDArray[np.float64], stddev: float
) -> list[tuple[tuple[float, float], str]]:
    """Return bounds for each column, and "private", or "default" where no bin rises above noise.

    Args:
        noisy: released counts `[columns · BINS]`.
        stddev: of their noise.
    """
    deviations = math.sqrt(2 * math.log(len(noisy) / _FALSE_ALARM))
    threshold = stddev * deviations
    found = []
    for column in noisy.reshape(-1, BINS):
        filled = np.flatnonzero(column > threshold)
        if not len(filled):
            found.append((DEFAULT_BOUNDS, "default"))
            continue
        least, _ = _edges_of_bin(filled[0])
        _, greatest = _edges_of_bin(filled[-1])
        if least == greatest:
            # Only zeros: any interval around them maps them to its middle.
            least, greatest = DEFAULT_BOUNDS
        found.append(((least, greatest), "private"))
    return found


def _edges_of_bin(number: int) -> tuple[float, float]:
    """Return the least and the greatest number of a bin."""
    magnitude = abs(int(number) - _ZERO_BIN) + _LEAST_POWER - 1
    if magnitude < _LEAST_POWER:
        return 0.0, 0.0
    low = math.ldexp(1.0, magnitude)
    if number > _ZERO_BIN:
        return low, 2 * low
    return -2 * low, -low
