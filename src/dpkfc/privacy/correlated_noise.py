"""Correlate the noise of consecutive steps, so that a part of it cancels in the sum of the steps.

    release_t = sum_t + stddev · w_t,    w = C⁻¹ z,    z independent N(0, 1)

C is a lower triangular Toeplitz matrix with the coefficients c_0, …, c_{bands−1} of a square
root: c_k is proportional to binom(2k, k) / 4ᵏ, and a column has norm 1. One band is independent
noise.

Multiplied by C the releases are C · sums + stddev · z. A record that takes part in one step appears
in `bands` rows, with norm C of the clip at most. If it takes part at most once in `bands` following
steps, its rows never overlap: each time costs as much as one step with independent noise.

C w = z, row by row, makes the next w from one draw and the `bands` − 1 vectors before it:

    w_t = (z_t − Σ_{0<k<bands} c_k · w_{t−k}) / c_0

Source: Choquette-Choo et al. 2023 (arXiv 2306.08153); coefficients: Fichtenberger et al. 2022
(arXiv 2202.11205), banded: Kalinin and Lampert 2024 (arXiv 2405.13763).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpkfc.privacy.gaussian_pairs import Floats

# The search goes from one number of bands to the next by this factor, and ends where the predicted
# error is so much larger than the smallest.
_RATIO = 1.25
_WORSE = 1.1


@dataclass(frozen=True)
class BandedNoise:
    """The correlation of the noise of a run.

    Attributes:
        bands: diagonals of C, >= 1; 1 is independent noise.
    """

    bands: int

    @cached_property
    def coefficients(self) -> Floats:
        """Return c `[bands]`, the first column of C; its norm is 1."""
        k = np.arange(1, self.bands)
        column = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
        normed: Floats = column / np.linalg.norm(column)
        return normed

    def invert(self, steps: int) -> Floats:
        """Return the first column of C⁻¹ `[steps]`: w_t = Σ_j column[j] · z_{t−j}."""
        from scipy.signal import lfilter

        impulse = np.zeros(steps)
        impulse[0] = 1.0
        column: Floats = lfilter([1.0], self.coefficients, impulse)
        return column

    def variance(self, draws: int) -> float:
        """Return the variance of w in its release number `draws`, counted from 1."""
        return float(np.sum(self.invert(draws) ** 2))

    def error(self, steps: int) -> float:
        """Return the predicted error: the root mean square of the noise in the sums of steps.

        It is in units of `stddev`, over all sums of the first t steps for t up to `steps`.
        """
        in_sums = np.cumsum(self.invert(steps))
        remaining = np.arange(steps, 0, -1)
        return math.sqrt(float(remaining @ in_sums**2) / steps)


class Recursion:
    """The last `bands` − 1 vectors of w, from which a draw makes the next one.

    They have the type of the draws, and sums are made in float64. So C w differs from z by the last
    rounding of each number of w, and this difference does not grow with the steps.

    Args:
        correlation: of the noise.
        size: numbers in a vector.
        dtype: float32 or float64.

    Attributes:
        draws: of which the vectors are made.
    """

    def __init__(self, correlation: BandedNoise, size: int, dtype: DTypeLike) -> None:
        self.draws = 0
        self._coefficients = correlation.coefficients
        self._last = np.empty((max(1, correlation.bands - 1), size), dtype)

    def advance(self, z: NDArray[Any]) -> None:
        """Replace the next draw z `[size]` by the next w, and keep it."""
        rows = len(self._last)
        total, term = z.astype(np.float64), np.empty(len(z))
        for k in range(1, min(self.draws + 1, len(self._coefficients))):
            row = self._last[(self.draws - k) % rows]
            total -= np.multiply(row, self._coefficients[k], out=term, dtype=np.float64)
        z[:] = total / self._coefficients[0]
        self._last[self.draws % rows] = z
        self.draws += 1


def choose_bands(least: int, most: int, steps: int, estimate_noise: Callable[[int], float]) -> int:
    """Return the number of bands with the smallest predicted error; fewer bands where equal.

    Args:
        least: the fewest bands, 1 to compare with independent noise.
        most: the most bands, >= least.
        steps: of the run.
        estimate_noise: maps bands to the noise multiplier that keeps the target (ε, δ).
    """
    best, smallest = least, math.inf
    bands = least
    while bands <= most:
        error = estimate_noise(bands) * BandedNoise(bands).error(steps)
        if error < smallest:
            best, smallest = bands, error
        if error > _WORSE * smallest:
            break
        bands = max(bands + 1, round(_RATIO * bands))
    return best
