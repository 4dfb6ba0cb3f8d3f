"""Tests of noise samples: tails, granularity, repeated values, and variance in windows of steps.

Every test has a false-alarm probability of at most ALPHA, with its thresholds and windows counted together.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan
from dpkfc.privacy.grid import ROUNDED, grid_of

__all__ = [
    "ALPHA",
    "THRESHOLDS",
    "check_granularity",
    "check_repeats",
    "check_tails",
    "check_windows",
    "collision_rate",
    "collision_rate_of",
]

ALPHA = 1e-9  # false alarms of one test
THRESHOLDS = (3.0, 3.5, 4.0, 4.5)  # standard deviations
SORTED = 400_000  # samples in which equal values are counted
SLACK = 4  # over the expected number of equal pairs; float32 noise has 0.9 of it
RUN = 3  # consecutive samples in a fingerprint
Samples = NDArray[np.float64]


def check_tails(samples: Samples) -> Finding:
    """Compare the number of samples beyond each threshold, on each side, with its binomial distribution.

    Args:
        samples: noise over its standard deviation, in any shape.

    Source:
        The exact two-sided binomial test, with ALPHA divided by the number of thresholds and sides.
    """
    counts, p_values = [], []
    for threshold in THRESHOLDS:
        probability = float(stats.norm.sf(threshold))
        both = 0
        for side in (samples, -samples):
            count = int(np.count_nonzero(side > threshold))
            both += count
            low, high = stats.binom.cdf(count, samples.size, probability), stats.binom.sf(count - 1, samples.size, probability)
            p_values.append(min(1.0, 2 * min(low, high)))
        counts.append(f"{both:,} beyond {threshold:g} ({2 * probability * samples.size:,.1f} expected)")
    limit = ALPHA / len(p_values)
    return Finding(
        check="noise tails", measured=f"p = {min(p_values):.2g}", bound=f"at least {limit:.1g}", passed=min(p_values) >= limit,
        detail=f"{samples.size:,} samples: {', '.join(counts)}",
    )  # fmt: skip


def collision_rate(epsilon: float, grid: float = 0.0) -> float:
    """Return the probability that two standard normal samples of finite precision are equal.

    Args:
        epsilon: relative spacing of the floating-point type, such as 2^-23 for float32.
        grid: absolute spacing in standard deviations; 0 for samples without a grid.

    Source:
        The integral of the squared normal density times the spacing. It is 1 / (2 √π) for a constant spacing. For a
        floating-point type it is 1 / (2 π) at most, because the spacing at x is epsilon · |x| at most.
    """
    return epsilon / (2 * math.pi) + grid / (2 * math.sqrt(math.pi))


def collision_rate_of(plan: Plan, dtype: torch.dtype, size: int) -> float:
    """Return the probability that two entries of a release of pure noise are equal.

    Args:
        plan: decides the standard deviation and, for noise="rounded", the grid.
        dtype: of the release.
        size: entries of the release.
    """
    grid = 0.0
    if plan.noise == ROUNDED:
        grid = grid_of(plan.sensitivity, size, plan.stddev) / plan.stddev
    return collision_rate(torch.finfo(dtype).eps, grid)


def check_granularity(samples: Samples, rate: float) -> Finding:
    """Count pairs of equal samples: noise that is rounded to few values has too many.

    Args:
        samples: noise over its standard deviation, in any shape; SORTED of them are compared.
        rate: probability that two samples are equal, from `collision_rate`.
    """
    some = samples.ravel()[:: max(1, samples.size // SORTED)]
    values, counts = np.unique(some, return_counts=True)
    equal = float(np.sum(counts * (counts - 1.0)) / 2)
    pairs = some.size * (some.size - 1) / 2
    limit = float(stats.poisson.isf(ALPHA, SLACK * rate * pairs)) + 1
    return Finding(
        check="noise granularity", measured=f"{equal:,.0f} pairs of equal samples", bound=f"at most {limit:,.0f}",
        passed=equal <= limit,
        detail=f"{values.size:,} distinct values of {some.size:,}; {rate * pairs:,.2g} pairs expected of the released type",
    )  # fmt: skip


def check_repeats(samples: Samples) -> Finding:
    """Search all releases for the same few consecutive samples, at any two places and with either sign.

    Args:
        samples: noise `[releases, d]`, of which every release is one row.
    """
    width = min(RUN, samples.shape[1])
    prints = _fingerprints(samples, width)
    order = np.sort(prints, axis=None)
    repeated = np.unique(order[1:][order[1:] == order[:-1]])
    where = ""
    if repeated.size:
        steps = sorted({int(step) for step in np.nonzero(prints == repeated[0])[0]})
        where = f"; first: steps {', '.join(map(str, steps[:2]))}"
    return Finding(
        check="noise fingerprints", measured=f"{repeated.size:,} repeated", bound="none", passed=not repeated.size,
        detail=f"{prints.size:,} runs of {width} samples in {len(samples):,} releases{where}",
    )  # fmt: skip


def _fingerprints(samples: Samples, width: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of every `width` consecutive magnitudes `[releases, d - width + 1]`."""
    bits = np.abs(samples).view(np.uint64)
    count = bits.shape[1] - width + 1
    prints = np.zeros((len(bits), count), dtype=np.uint64)
    for offset in range(width):
        prints = _mix(prints ^ bits[:, offset : offset + count])
    return prints


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a permutation of 64-bit numbers in which every output bit depends on all input bits.

    Source:
        The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_windows(samples: Samples) -> Finding:
    """Test the variance in windows of 1, 2, 4, … steps from either end of the run, on both sides.

    Args:
        samples: noise over its standard deviation `[releases, d]`.
    """
    squares = np.square(samples).sum(1)
    steps, size = samples.shape
    sums = np.concatenate([[0.0], np.cumsum(squares)])
    worst, where, tests = 1.0, "", 0
    length = 1
    while length <= steps:
        backwards = np.arange(steps, length - 1, -length)
        ends = np.concatenate([np.arange(length, steps + 1, length), backwards])
        totals = sums[ends] - sums[ends - length]
        p_values = 2 * np.minimum(stats.chi2.cdf(totals, length * size), stats.chi2.sf(totals, length * size))
        lowest = int(np.argmin(p_values))
        tests += ends.size
        if not p_values[lowest] >= worst:
            worst = float(p_values[lowest])
            ratio = math.sqrt(totals[lowest] / (length * size))
            where = f"steps {ends[lowest] - length} to {ends[lowest] - 1} with {ratio:.4f} × accounted"
        length *= 2
    return Finding(
        check="noise over the steps", measured=f"p = {worst:.2g}", bound=f"at least {ALPHA / tests:.1g}",
        passed=worst >= ALPHA / tests,
        detail=f"variance in {tests:,} windows of 1 to {length // 2:,} steps, {size:,} samples a step; worst: {where}",
    )  # fmt: skip
