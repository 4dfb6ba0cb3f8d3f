"""Statistical tests of samples that should be independent standard normal numbers.

Samples are noise over its standard deviation. The tests are two-sided: too much noise is a fault
too. Each has a false-alarm probability of at most ALPHA, which its thresholds and windows share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats

from dpkfc.audit.findings import Finding
from dpkfc.audit.p_values import ALPHA, Floats, p_value_finding, two_sided

SORTED = 400_000  # most samples that are sorted
Samples = Floats
THRESHOLDS = (3.0, 3.5, 4.0, 4.5)  # standard deviations
EXCESS_PAIRS = 4  # float32 noise has 0.9 of the expected pairs
FINGERPRINT = 3  # consecutive samples


def _chi_square_p_values(sums: ArrayLike, freedom: ArrayLike) -> Floats:
    """Return the two-sided p-values of sums of squared standard normal numbers."""
    lower = stats.chi2.cdf(sums, freedom)
    return two_sided(lower, stats.chi2.sf(sums, freedom))


def _largest_score(tests: int) -> float:
    """Return the score that the largest of `tests` independent scores exceeds with ALPHA."""
    tail = ALPHA / (2 * tests)
    return float(stats.norm.isf(tail))


def _largest_product_score(tests: int, count: ArrayLike) -> Floats:
    """Return `_largest_score` for mean products of `count` pairs of normal numbers.

    A product of two normal numbers has heavier tails than a normal number. Small counts therefore
    get the exponential bound.
    """
    score = _largest_score(tests)
    limits: Floats = score * np.maximum(1.0, score / np.sqrt(count))
    return limits


def _subsample(samples: Samples) -> Samples:
    """Return at most about SORTED of the samples `[n]`, evenly spaced."""
    return samples.ravel()[:: max(1, samples.size // SORTED)]


def check_tails(samples: Samples) -> Finding:
    """Compare the number of samples beyond each threshold with its binomial distribution.

    Args:
        samples: noise over its standard deviation, in any shape.

    Source:
        The exact two-sided binomial test, on each side. ALPHA is divided by the number of
        thresholds and sides.
    """
    counts = []
    p_values = []
    size = samples.size
    for threshold in THRESHOLDS:
        probability = float(stats.norm.sf(threshold))
        both_sides = 0
        for side in (samples, -samples):
            count = int(np.count_nonzero(side > threshold))
            both_sides += count
            lower = stats.binom.cdf(count, size, probability)
            upper = stats.binom.sf(count - 1, size, probability)
            p_values.append(float(two_sided(lower, upper)))
        expected = 2 * probability * size
        counts.append(f"{both_sides:,} beyond {threshold:g} ({expected:,.1f} expected)")
    detail = f"{size:,} samples: {', '.join(counts)}"
    return p_value_finding("noise tails", min(p_values), len(p_values), detail)


def collision_rate(epsilon: float, grid: float = 0.0) -> float:
    """Return the probability that two standard normal samples of finite precision are equal.

    Args:
        epsilon: relative spacing of the floating-point type, such as 2^-23 for float32.
        grid: absolute spacing in standard deviations; 0 for samples without a grid.

    Source:
        The integral of the squared normal density times the spacing. It is 1 / (2 √π) for a
        constant spacing. For a floating-point type it is 1 / (2 π) at most, because the spacing at
        x is epsilon · |x| at most.
    """
    by_type = epsilon / (2 * math.pi)
    by_grid = grid / (2 * math.sqrt(math.pi))
    return by_type + by_grid


EXACT_RATE = collision_rate(float(np.finfo(np.float64).eps))


def check_granularity(samples: Samples, rate: float) -> Finding:
    """Count pairs of equal samples: noise that is rounded to few values has too many.

    Args:
        samples: noise over its standard deviation, in any shape; SORTED of them are compared.
        rate: probability that two samples are equal, from `collision_rate`.
    """
    compared = _subsample(samples)
    values, counts = np.unique(compared, return_counts=True)
    equal = float(np.sum(counts * (counts - 1.0)) / 2)
    pairs = compared.size * (compared.size - 1) / 2
    expected = rate * pairs
    limit = float(stats.poisson.isf(ALPHA, EXCESS_PAIRS * expected)) + 1
    return Finding(
        check="noise granularity",
        measured=f"{equal:,.0f} pairs of equal samples",
        bound=f"at most {limit:,.0f}",
        passed=equal <= limit,
        detail=f"{values.size:,} distinct values of {compared.size:,}; {expected:,.2g} pairs "
        "expected of the released type",
    )


def check_repeats(samples: Samples) -> Finding:
    """Search all releases for equal runs of consecutive samples, up to their signs.

    Args:
        samples: noise `[releases, d]`, one release a row.
    """
    width = min(FINGERPRINT, samples.shape[1])
    prints = _fingerprints(samples, width)
    order = np.sort(prints, axis=None)
    following = order[1:]
    repeated = np.unique(following[following == order[:-1]])
    where = ""
    if repeated.size:
        steps, _ = np.nonzero(prints == repeated[0])
        first = np.unique(steps)[:2]
        where = f"; first: steps {', '.join(map(str, first))}"
    return Finding(
        check="noise fingerprints",
        measured=f"{repeated.size:,} repeated",
        bound="none",
        passed=not repeated.size,
        detail=f"{prints.size:,} runs of {width} samples in {len(samples):,} releases{where}",
    )


def _fingerprints(samples: Samples, width: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of every `width` consecutive magnitudes `[releases, d - width + 1]`."""
    bits = np.abs(samples).view(np.uint64)
    count = bits.shape[1] - width + 1
    prints = np.zeros((len(bits), count), dtype=np.uint64)
    for offset in range(width):
        prints ^= bits[:, offset : offset + count]
        _mix(prints)
    return prints


def _mix(x: NDArray[np.uint64]) -> None:
    """Permute 64-bit numbers in place; all bits of a result depend on all bits of a number.

    Source:
        The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)


def check_windows(samples: Samples) -> Finding:
    """Test the variance in windows of 1, 2, 4, … steps from either end of the run.

    Args:
        samples: noise over its standard deviation `[releases, d]`.
    """
    steps, size = samples.shape
    squares = np.square(samples).sum(1)
    # The squares of the steps from a to b − 1 sum to sums[b] − sums[a].
    sums = np.concatenate([[0.0], np.cumsum(squares)])
    worst = 1.0
    where = ""
    tests = 0
    length = 1
    while length <= steps:
        forwards = np.arange(length, steps + 1, length)
        backwards = np.arange(steps, length - 1, -length)
        ends = np.concatenate([forwards, backwards])
        totals = sums[ends] - sums[ends - length]
        freedom = length * size
        p_values = _chi_square_p_values(totals, freedom)
        lowest = int(np.argmin(p_values))
        tests += ends.size
        # Negated, so that a value that is not a number counts as the worst.
        if not p_values[lowest] >= worst:
            worst = float(p_values[lowest])
            ratio = math.sqrt(totals[lowest] / freedom)
            end = ends[lowest]
            where = f"steps {end - length} to {end - 1} with {ratio:.4f} × accounted"
        length *= 2
    detail = (
        f"variance in {tests:,} windows of 1 to {length // 2:,} steps, {size:,} samples a step; "
        f"worst: {where}"
    )
    return p_value_finding("noise over the steps", worst, tests, detail)


def judge_noise(
    samples: Sequence[Samples],
    entries: Mapping[str, int] | None = None,
    rate: float = EXACT_RATE,
) -> list[Finding]:
    """Test releases `[d]` of pure noise, each over its standard deviation.

    The tests cover mean, variance (of all numbers, each parameter, each entry and each release),
    shape, tails, granularity, repetition within a release, and correlation between releases.

    Args:
        samples: the releases.
        entries: parameter name to its number of entries, in order; None for one parameter.
        rate: probability that two numbers are equal; by default for float64.
    """
    numbers = np.concatenate(samples)
    return [
        _check_mean(numbers, len(samples)),
        _check_scale(numbers),
        _check_every_variance(samples, entries or {"all": samples[0].size}),
        _check_shape(numbers),
        check_tails(numbers),
        check_granularity(numbers, rate),
        _check_repetition_within(samples),
        _check_repetition_between(samples),
        _check_consecutive(samples),
    ]


def _check_mean(numbers: Samples, releases: int) -> Finding:
    score = numbers.mean() * math.sqrt(numbers.size)
    limit = _largest_score(1)
    return Finding(
        check="noise mean",
        measured=f"{score:+.2f} standard errors",
        bound=f"within ± {limit:.2f}",
        passed=bool(abs(score) <= limit),
        detail=f"{numbers.size:,} numbers, {releases} releases",
    )


def _check_scale(numbers: Samples) -> Finding:
    limit = _largest_score(1) * math.sqrt(0.5 / numbers.size)
    ratio = math.sqrt(float(np.mean(numbers**2)))
    return Finding(
        check="noise scale",
        measured=f"{ratio:.5f} × accounted",
        bound=f"1 ± {limit:.5f}",
        passed=abs(ratio - 1) <= limit,
        detail="root mean square over what the event accounts for; less is a leak, more is waste",
    )


def _check_every_variance(samples: Sequence[Samples], entries: Mapping[str, int]) -> Finding:
    """Test the variance of each release, parameter and entry.

    The variance of all numbers hides a single parameter without noise.
    """
    squares = np.square(np.stack(samples))
    count, size = squares.shape
    names = list(entries)
    lengths = np.array(list(entries.values()))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    by_entry = squares.sum(0)
    by_parameter = np.add.reduceat(by_entry, starts)
    by_release = squares.sum(1)
    sums = np.concatenate([by_entry, by_parameter, by_release])
    # One degree of freedom for each number in a sum.
    numbers = (np.full(size, count), count * lengths, np.full(count, size))
    p_values = _chi_square_p_values(sums, np.concatenate(numbers))
    worst = int(np.argmin(p_values))
    if worst < size:
        parameter = int(np.searchsorted(ends, worst, side="right"))
        where = f"a number of '{names[parameter]}'"
    elif worst < size + len(entries):
        where = f"'{names[worst - size]}'"
    else:
        where = f"release {worst - size - len(entries)}"
    detail = (
        f"variance of each of {size:,} numbers, {len(entries):,} parameters and {count:,} "
        f"releases; worst: {where}"
    )
    return p_value_finding("noise everywhere", float(p_values[worst]), p_values.size, detail)


def _check_shape(numbers: Samples) -> Finding:
    """Test the distance from the normal distribution, on as many numbers as sort quickly."""
    compared = _subsample(numbers)
    distance = float(stats.kstest(compared, "norm").statistic)
    exponent = -math.log(ALPHA / 2)
    limit = math.sqrt(exponent / (2 * compared.size))
    return Finding(
        check="noise shape",
        measured=f"distance {distance:.5f}",
        bound=f"at most {limit:.5f}",
        passed=distance <= limit,
        detail=f"Kolmogorov-Smirnov on {compared.size:,} numbers",
    )


def autocorrelate(samples: Iterable[Samples]) -> Samples:
    """Return the sum over releases of their products with themselves, by distance `[d]`."""
    total: Samples = np.zeros(1)
    for x in samples:
        products = signal.correlate(x, x, method="fft")
        total = total + products[x.size - 1 :]
    return total


def _check_repetition_within(samples: Sequence[Samples]) -> Finding:
    """Test the autocorrelation of releases: a repeated block correlates with itself."""
    size = samples[0].size
    total = autocorrelate(samples)
    pairs = np.arange(size, 0, -1) * len(samples)
    scores = np.abs(total[1:]) / np.sqrt(pairs[1:])
    limits = _largest_product_score(max(1, size - 1), pairs[1:])
    excess = float(np.max(scores / limits, initial=0.0))
    return Finding(
        check="no repetition inside a release",
        measured=f"{excess:.2f} × limit",
        bound="at most 1",
        passed=excess <= 1,
        detail="autocorrelation at every distance, over all releases",
    )


def _check_repetition_between(samples: Sequence[Samples]) -> Finding:
    """Test the correlation of every two releases."""
    table = np.stack(samples)
    count, size = table.shape
    products = table @ table.T / math.sqrt(size)
    np.fill_diagonal(products, 0.0)
    pairs = max(1, count * (count - 1) // 2)
    return _correlation_finding(
        "no repetition between releases",
        float(np.max(np.abs(products))),
        float(_largest_product_score(pairs, size)),
        f"{pairs:,} pairs, those across a resumed checkpoint included",
    )


def _check_consecutive(samples: Sequence[Samples]) -> Finding:
    """Test the pooled correlation of releases with those just before them.

    Pooling finds correlations that are too weak to show in one pair.
    """
    scores = []
    for lag in range(1, min(4, len(samples))):
        following = zip(samples, samples[lag:], strict=False)
        products = sum(float(x @ y) for x, y in following)
        count = samples[0].size * (len(samples) - lag)
        scores.append(abs(products) / math.sqrt(count))
    return _correlation_finding(
        "independence of following releases",
        max(scores, default=0.0),
        _largest_score(3),
        "lags 1 to 3, all releases together",
    )


def _correlation_finding(check: str, worst: float, limit: float, detail: str) -> Finding:
    return Finding(
        check=check,
        measured=f"{worst:.2f} standard errors",
        bound=f"at most {limit:.2f}",
        passed=worst <= limit,
        detail=detail,
    )
