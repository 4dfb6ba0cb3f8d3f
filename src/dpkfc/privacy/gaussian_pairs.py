"""A sum with Gaussian noise, with some units in the data and without them.

Each of k units is in the batch with probability q and then moves the sum by 1:

    P = Σ_j w_j N(j, σ²),  w_j = binom(k, j) q^j (1 − q)^(k − j)      with the units
    Q = N(0, σ²)                                                      without them
    L(x) = log P(x) / Q(x) = log Σ_j w_j exp(j (x − j / 2) / σ²)      the privacy loss

L rises with x, so an interval of losses is an interval of x. For one unit this is the pair that
dominates a step with Poisson sampling (Zhu, Dong and Wang 2022), for several units the one that
dominates it for groups (Schuchardt et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STEPS = 10  # of the coarse integration in a standard deviation
_MOST_STEPS = 20_000
_ROUNDING = 1e-14
_MOST_ITERATIONS = 100


@dataclass(frozen=True)
class Pair:
    """A pair of distributions, which public chance chooses for a release.

    Attributes:
        weight: the probability that it is chosen.
        rate: q.
        stddev: σ.
        units: k.
    """

    weight: float
    rate: float
    stddev: float
    units: int = 1

    @cached_property
    def log_weights(self) -> list[float]:
        """Return log w_j for j = 0 … k."""
        k = self.units
        log_rate = math.log(self.rate)
        log_absence = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        logs = [k * log_absence]
        for j in range(1, k):
            log_choices = math.log(math.comb(k, j))
            logs.append(log_choices + j * log_rate + (k - j) * log_absence)
        return [*logs, k * log_rate]

    def _log_terms(self, x: Floats) -> list[Floats]:
        """Return the logarithms of the terms of P(x) / Q(x) for j = 1 … k."""
        scores = [j * (x - j / 2) / self.stddev**2 for j in range(1, self.units + 1)]
        return [w + score for w, score in zip(self.log_weights[1:], scores, strict=True)]

    def losses(self, x: Floats) -> Floats:
        """Return L at each x."""
        total: Floats = np.full(x.shape, self.log_weights[0])
        for term in self._log_terms(x):
            total = np.logaddexp(total, term)
        return total

    def places(self, losses: Floats) -> Floats:
        """Return the x of each loss, -∞ for losses at or below the least one, log w_0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # log(exp(loss) - w_0) without cancellation: what the terms from j = 1 on have to be.
            rest = np.log(-np.expm1(np.minimum(self.log_weights[0] - losses, 0.0)))
        wanted = losses + rest
        # One term alone would be as large a little further on: log w_j + j (x - j / 2) / σ².
        x: Floats = np.full(losses.shape, np.inf)
        for j in range(1, self.units + 1):
            score = (wanted - self.log_weights[j]) / j
            alone = score * self.stddev**2 + j / 2
            x = np.minimum(x, alone)
        if self.units > 1:
            is_finite = np.isfinite(x)
            x[is_finite] = self._descend(x[is_finite], wanted[is_finite])
        return x

    def _descend(self, x: Floats, wanted: Floats) -> Floats:
        """Return the x at which the sum of the terms from j = 1 on has these logarithms.

        Newton's method from above: the logarithm of the sum is convex and rises.
        """
        shifts = np.arange(1, self.units + 1)
        for _ in range(_MOST_ITERATIONS):
            terms = np.stack(self._log_terms(x))
            total = scipy.special.logsumexp(terms, axis=0)
            slope = shifts @ np.exp(terms - total) / self.stddev**2
            step = (total - wanted) / slope
            x = x - step
            rounding = _ROUNDING * (np.abs(x) + self.stddev)
            if np.all(np.abs(step) <= rounding):
                break
        return x

    def log_masses(self, x: Floats) -> tuple[Floats, Floats]:
        """Return log masses under P and under Q: below the first x, between them, above the last.

        Args:
            x: rising `[n]`.

        Returns:
            Two vectors `[n + 1]`.
        """
        without = _log_masses(x / self.stddev)
        present = self.log_weights[1] + _log_masses((x - 1) / self.stddev)
        for j in range(2, self.units + 1):
            shifted = self.log_weights[j] + _log_masses((x - j) / self.stddev)
            present = np.logaddexp(present, shifted)
        if self.rate < 1:
            present = np.logaddexp(present, self.log_weights[0] + without)
        return present, without

    def cumulants(self, powers: Floats, far: float) -> Floats:
        """Return log E exp(power · L) under Q, by a coarse integration.

        Args:
            powers: `[n]`.
            far: standard deviations beyond which nothing counts.
        """
        reach = far * self.stddev
        # L changes over σ², the density over σ.
        size = (self.units + 2 * reach) / min(self.stddev, self.stddev**2) * _STEPS
        x = np.linspace(-reach, self.units + reach, math.ceil(min(size, _MOST_STEPS)))
        cell = (x[1] - x[0]) / self.stddev / math.sqrt(2 * math.pi)
        half_squares = 0.5 * (x / self.stddev) ** 2
        exponents = np.multiply.outer(powers, self.losses(x)) - half_squares
        largest = exponents.max(axis=1, keepdims=True)
        sums = np.exp(exponents - largest).sum(axis=1)
        return np.asarray(largest[:, 0] + np.log(sums * cell))


def _log_masses(edges: Floats) -> Floats:
    """Return log masses of N(0, 1) below the first edge, between the edges, and above the last.

    Differences of the smaller tails keep their digits.
    """
    tails = scipy.special.log_ndtr(-np.abs(edges))
    left, right = tails[:-1], tails[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(left, right)
        inner = larger + np.log(-np.expm1(np.minimum(left, right) - larger))
        around = np.log1p(-np.exp(left) - np.exp(right))
    is_around = (edges[:-1] <= 0) & (edges[1:] > 0)
    ends = scipy.special.log_ndtr(np.array([edges[0], -edges[-1]]))
    return np.concatenate([ends[:1], np.where(is_around, around, inner), ends[1:]])


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return ε of the Gaussian mechanism, the root of its closed form for δ.

    δ(ε) = Φ(μ / 2 − ε / μ) − e^ε Φ(−μ / 2 − ε / μ), with μ = 1 / noise multiplier.

    Source:
        Balle and Wang (2018).
    """
    mu = 1 / noise_multiplier

    def excess(epsilon: float) -> float:
        place = epsilon / mu
        above = scipy.special.log_ndtr(mu / 2 - place)
        below = epsilon + scipy.special.log_ndtr(-mu / 2 - place)
        # The difference is never 0: rounding may make them equal.
        gap = min(below - above, -1e-300)
        log_delta = above + math.log(-math.expm1(gap))
        return float(log_delta) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root = scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12)
    return float(root)
