"""Test the distribution of the batches that a sampler draws.

The plan's own sampler draws batches from its own stream. Every certified event describes the same
kind of draw: a size from a known distribution (Binomial, truncated Binomial, or a constant), then
a uniform subset of that size, anew at every step. The distribution comes from the event that is
accounted for, not from the sampler that is tested. P-values are exact, from exact moments, or
upper bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse, special, stats

from dpkfc.audit.findings import Finding
from dpkfc.audit.p_values import Floats, Integers, p_value_finding, two_sided
from dpkfc.config import Plan
from dpkfc.privacy.rng import SamplingStream

if TYPE_CHECKING:
    import dp_accounting

MOST_STEPS, LEAST_STEPS = 4000, 400  # of an audit
INCLUSIONS = 2e8  # that an audit decides in all
_MOST_CLASSES = 12  # of sizes
_FEWEST_IN_CLASS = 25  # expected batches
Batches = Sequence[Integers]


@dataclass(frozen=True)
class SizeDistribution:
    """The distribution of the size of a batch, whose members are a uniform subset.

    Attributes:
        dataset_size: N >= 2.
        mass: probability of every size `[N + 1]`.
    """

    dataset_size: int
    mass: Floats

    @classmethod
    def from_event(cls, event: dp_accounting.DpEvent, dataset_size: int) -> SizeDistribution:
        """Return the distribution that an event implies.

        Raises:
            ValueError: the event does not describe batches of this data set.
        """
        import dp_accounting

        sizes = np.arange(dataset_size + 1)
        if isinstance(event, dp_accounting.GaussianDpEvent):
            is_possible = sizes == dataset_size
            return cls(dataset_size, is_possible.astype(float))
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            mass = stats.binom.pmf(sizes, dataset_size, event.sampling_probability)
            return cls(dataset_size, mass)
        event_size = getattr(event, "dataset_size", getattr(event, "source_dataset_size", None))
        if event_size != dataset_size:
            raise ValueError(
                f"the event {event} describes no batches of {dataset_size} examples: pass the "
                "event and size of one plan"
            )
        if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            rate = event.sampling_probability
            mass = stats.binom.pmf(sizes, dataset_size, rate)
            most = min(dataset_size, event.truncated_batch_size)
            mass[most] = stats.binom.sf(most - 1, dataset_size, rate)
            mass[most + 1 :] = 0.0
            return cls(dataset_size, mass)
        is_possible = sizes == event.sample_size
        return cls(dataset_size, is_possible.astype(float))

    def moment(self, power: int) -> float:
        """Return a central moment of the size; the mean for the first."""
        values = np.arange(self.dataset_size + 1)
        if power == 1:
            return float(self.mass @ values)
        deviations = values - self.mean
        return float(self.mass @ deviations**power)

    @cached_property
    def mean(self) -> float:
        """Mean size."""
        return self.moment(1)

    @cached_property
    def variance(self) -> float:
        """Variance of the size; 0 for batches of one size."""
        return self.moment(2)

    @property
    def rate(self) -> float:
        """Probability with which one example is in a batch."""
        return self.mean / self.dataset_size

    @cached_property
    def squared_covariances(self) -> float:
        """Sum of the squares of the N² covariances of the indicators of the examples."""
        n = self.dataset_size
        q = self.rate
        pairs = n * (n - 1)
        # Probability that two different examples are in one batch.
        both = (self.variance + self.mean**2 - self.mean) / pairs
        variance = q * (1 - q)
        covariance = both - q * q
        return float(n * variance**2 + pairs * covariance**2)


def draw_batches(plan: Plan, steps: int, stream: SamplingStream | None = None) -> Batches:
    """Draw batches with a plan's sampler, by default from a new stream of the plan.

    The new stream is secret unless the plan is in test mode.
    """
    stream = stream or plan.sampling_stream()
    batches = []
    for step in range(steps):
        batch = plan.draw(step, stream)
        batches.append(np.asarray(batch))
    return batches


def check_sampler(plan: Plan, *, steps: int | None = None) -> list[Finding]:
    """Test the distribution of batches from two streams of a plan.

    Args:
        plan: of the run.
        steps: batches from each stream; by default as many as decide 2·10⁸ inclusions, between 400
            and 4,000.
    """
    n = plan.dataset_size
    if n < 2:
        return []
    if not steps:
        enough = max(LEAST_STEPS, INCLUSIONS / n)
        steps = int(min(MOST_STEPS, enough))
    batches = draw_batches(plan, steps)
    # In test mode a second stream would repeat the first.
    other_batches = None if plan.test_mode else draw_batches(plan, steps)
    sizes = SizeDistribution.from_event(plan.event, n)
    p_values = compute_p_values(batches, sizes, other_batches)
    detail = f"{steps:,} batches of {n:,} examples"
    return [p_value_finding(f"sampler: {name}", p, 1, detail) for name, p in p_values.items()]


def compute_p_values(
    batches: Batches, distribution: SizeDistribution, other_batches: Batches | None = None
) -> dict[str, float]:
    """Compute the p-values of all tests of a sampler.

    Args:
        batches: indices of every batch, in the order of the steps; at least two batches.
        distribution: of the size, for a data set of at least two examples.
        other_batches: batches of another stream (rank, session), which must be independent of the
            first.

    Returns:
        Name of the test to its p-value; 0 if a batch is impossible.
    """
    n = distribution.dataset_size
    inclusions = _collect_inclusions(batches, n)
    if inclusions is None:
        return {"possible batches": 0.0}
    sizes = inclusions.sum(1)
    if np.any(distribution.mass[sizes] == 0):
        return {"possible batches": 0.0}
    p_values = {"possible batches": 1.0}
    p_values |= _test_sizes(sizes, distribution)
    p_values |= _test_examples(inclusions.sum(0), len(batches), distribution)
    p_values["neighbouring examples"] = _test_neighbours(inclusions)
    p_values["halves of the data set"] = _test_halves(inclusions)
    p_values["following batches"] = _test_overlap(inclusions[:-1], inclusions[1:])
    p_values["equal batches"] = _test_equal_batches(batches, distribution)
    if other_batches is not None:
        other_inclusions = _collect_inclusions(other_batches, n)
        if other_inclusions is None:
            return {"possible batches": 0.0}
        p_values["another stream"] = _test_overlap(inclusions, other_inclusions)
        p_values["equal batches in another stream"] = _test_equal_batches(
            batches, distribution, other_batches
        )
    return p_values


def _collect_inclusions(batches: Batches, dataset_size: int) -> sparse.csr_array | None:
    """Return which batch holds which example, as ones `[steps, dataset_size]`.

    Returns:
        None if a batch holds an example twice, or one that does not exist.
    """
    sizes = [len(batch) for batch in batches]
    examples = np.concatenate(batches).astype(np.int64)
    if np.any((examples < 0) | (examples >= dataset_size)):
        return None
    steps = np.repeat(np.arange(len(sizes)), sizes)
    ones = np.ones(examples.size, dtype=np.int64)
    shape = (len(sizes), dataset_size)
    # Equal places are added up.
    inclusions = sparse.csr_array((ones, (steps, examples)), shape=shape)
    if np.any(inclusions.data > 1):
        return None
    return inclusions


def _test_sizes(sizes: Integers, distribution: SizeDistribution) -> dict[str, float]:
    steps = len(sizes)
    mass = distribution.mass
    variance = distribution.variance
    if variance < 1e-9:
        # Every batch has the one possible size: the test of possible batches has seen that.
        return {}
    deviations = sizes - distribution.mean
    total_score = float(deviations.sum()) / math.sqrt(steps * variance)
    squares = float((deviations**2).sum())
    squares_variance = steps * (distribution.moment(4) - variance**2)
    products = (deviations[1:] * deviations[:-1]).sum()
    lag_score = products / (variance * math.sqrt(steps - 1))
    largest = int(sizes.max())
    smallest = int(sizes.min())
    above = float(mass[largest + 1 :].sum())
    below = float(mass[:smallest].sum())
    empty_batches = int((sizes == 0).sum())
    empty = stats.binomtest(empty_batches, steps, min(1.0, mass[0]))
    return {
        "total": _normal_p_value(total_score),
        "variance of sizes": _gamma_p_value(squares, steps * variance, squares_variance),
        "distribution of sizes": _test_fit(sizes, distribution),
        "largest batch": _extreme_p_value(above, float(mass[largest]), steps),
        "smallest batch": _extreme_p_value(below, float(mass[smallest]), steps),
        "empty batches": float(empty.pvalue),
        "sizes of following batches": _normal_p_value(lag_score),
    }


def _extreme_p_value(beyond: float, at: float, steps: int) -> float:
    """Return the two-sided p-value of the extreme size of all batches.

    Args:
        beyond: probability of sizes beyond the extreme one.
        at: probability of the extreme size.
        steps: number of batches.
    """
    # Sums of probabilities may exceed 1 by their rounding.
    lower = stats.binom.cdf(0, steps, min(1.0, beyond))
    upper = stats.binom.sf(0, steps, min(1.0, beyond + at))
    return float(two_sided(lower, upper))


def _test_examples(
    counts: Integers, steps: int, distribution: SizeDistribution
) -> dict[str, float]:
    """Test how often each example was sampled: too unevenly, too evenly, or one far off."""
    n = distribution.dataset_size
    q = distribution.rate
    if q >= 1:
        return {}
    expected = steps * q
    spread = float(np.square(counts - expected).sum())
    expected_spread = steps * n * q * (1 - q)
    # The variance of the sum over steps t and u of the products of centred indicators.
    at_equal_steps = steps * (1 - 2 * q) ** 2 * distribution.variance
    pairs_of_steps = steps * (steps - 1)
    variance = at_equal_steps + 2 * pairs_of_steps * distribution.squared_covariances
    binomial = stats.binom(steps, q)
    fewest = float(binomial.cdf(counts.min()))
    most = float(binomial.sf(counts.max() - 1))
    return {
        "inclusion": _gamma_p_value(spread, expected_spread, variance),
        "example drawn least": min(1.0, n * fewest),
        "example drawn most": min(1.0, n * most),
    }


def _test_overlap(first: sparse.csr_array, second: sparse.csr_array) -> float:
    """Test how many examples two batches share, summed over pairs of batches.

    Given the sizes, the number of each pair is hypergeometric.
    """
    n = first.shape[1]
    shared = int(first.multiply(second).sum())
    sizes = first.sum(1)
    other_sizes = second.sum(1)
    return _count_p_value(shared, *_hypergeometric_moments(n, sizes, other_sizes))


def _test_neighbours(inclusions: sparse.csr_array) -> float:
    """Test the number of pairs of examples i, i + 1 in one batch, on a circle.

    A batch of s examples has s minus the number of its runs. Given s that number is hypergeometric.
    """
    n = inclusions.shape[1]
    sizes = inclusions.sum(1)
    # Batches of nobody and of everybody have no random runs.
    is_inner = (sizes > 0) & (sizes < n)
    inner = sizes[is_inner]
    if n < 3 or not inner.size:
        return 1.0
    pairs = inclusions[:, 1:].multiply(inclusions[:, :-1])
    closing_pairs = inclusions[:, :1].multiply(inclusions[:, -1:])
    full_batches = int((sizes == n).sum())
    adjacent = int(pairs.sum()) + int(closing_pairs.sum())
    adjacent -= n * full_batches
    return _count_p_value(adjacent, *_hypergeometric_moments(n - 1, inner, inner - 1))


def _hypergeometric_moments(
    population: int, marked: Integers, drawn: Integers
) -> tuple[float, float]:
    """Return mean and variance of a sum of independent hypergeometric numbers."""
    mean = marked * drawn / population
    variance = mean * (population - marked) * (population - drawn)
    variance /= population * (population - 1)
    return float(mean.sum()), float(variance.sum())


def _test_halves(inclusions: sparse.csr_array) -> float:
    """Test how batches divide over even and odd examples.

    The spread shows pairs of examples that come together or avoid each other.
    """
    n = inclusions.shape[1]
    even = (n + 1) // 2
    odd = n - even
    sizes = inclusions.sum(1)
    counts = inclusions[:, ::2].sum(1)
    squares = float(np.square(counts - sizes * even / n).sum())
    mean = variance = 0.0
    for size, repeats in Counter(sizes.tolist()).items():
        fewest = max(0, size - odd)
        most = min(size, even)
        values = np.arange(fewest, most + 1)
        mass = stats.hypergeom.pmf(values, n, even, size)
        squared_deviations = (values - size * even / n) ** 2
        first_moment = float(mass @ squared_deviations)
        second_moment = float(mass @ squared_deviations**2)
        mean += repeats * first_moment
        variance += repeats * (second_moment - first_moment**2)
    return _gamma_p_value(squares, mean, variance)


def _test_equal_batches(
    batches: Batches, distribution: SizeDistribution, other_batches: Batches | None = None
) -> float:
    """Bound the probability of this many equal pairs of batches.

    Source:
        Markov's inequality: the expected number of equal pairs over the observed number.
    """
    n = distribution.dataset_size
    steps = len(batches)
    tally = _tally(batches)
    if other_batches is None:
        equal = sum(math.comb(count, 2) for count in tally.values())
        pairs = math.comb(steps, 2)
    else:
        other_tally = _tally(other_batches)
        equal = sum(count * other_tally[key] for key, count in tally.items())
        pairs = steps * len(other_batches)
    sizes = np.arange(n + 1)
    log_subsets = -np.log(n + 1) - special.betaln(n - sizes + 1, sizes + 1)
    with np.errstate(divide="ignore"):
        log_rates = 2 * np.log(distribution.mass) - log_subsets
        expected = pairs * float(np.exp(log_rates).sum())
    if not equal:
        return 1.0
    return min(1.0, expected / equal)


def _test_fit(sizes: Integers, distribution: SizeDistribution) -> float:
    """Apply Pearson's test to at most a dozen classes of sizes of about equal probability."""
    steps = len(sizes)
    cumulative = np.cumsum(distribution.mass)
    classes = min(_MOST_CLASSES, max(2, steps // _FEWEST_IN_CLASS))
    quantiles = np.linspace(0, 1, classes + 1)[1:-1]
    least_mass = _FEWEST_IN_CLASS / steps
    edges = []
    below = 0.0
    for quantile in quantiles:
        edge = int(np.searchsorted(cumulative, quantile))
        so_far = cumulative[edge]
        if so_far - below > least_mass and 1 - so_far > least_mass:
            edges.append(edge)
            below = so_far
    if not edges:
        return 1.0
    expected = np.diff([0.0, *cumulative[edges], 1.0]) * steps
    classes_of_sizes = np.searchsorted(edges, sizes)
    counts = np.bincount(classes_of_sizes, minlength=len(expected))
    return float(stats.chisquare(counts, expected).pvalue)


def _normal_p_value(score: float) -> float:
    tail = stats.norm.sf(abs(score))
    return float(2 * tail)


def _gamma_p_value(value: float, mean: float, variance: float) -> float:
    """Return the two-sided p-value under the gamma distribution (a scaled χ²) of these moments."""
    if variance <= 0:
        return float(math.isclose(value, mean, rel_tol=1e-9, abs_tol=1e-9))
    shape = mean * mean / variance
    gamma = stats.gamma(shape, scale=variance / mean)
    p_value = two_sided(gamma.cdf(value), gamma.sf(value))
    return float(p_value)


def _count_p_value(count: int, mean: float, variance: float) -> float:
    """Return the two-sided p-value of a count.

    The count is nearly normal if it is large and nearly a Poisson number if it is small.
    """
    if variance <= 0:
        return float(math.isclose(count, mean, rel_tol=1e-9, abs_tol=1e-9))
    lower = stats.poisson.cdf(count, mean)
    upper = stats.poisson.sf(count - 1, mean)
    exact = two_sided(lower, upper)
    score = (count - mean) / math.sqrt(variance)
    return max(float(exact), _normal_p_value(score))


def _tally(batches: Batches) -> Counter[bytes]:
    """Count batches by their members."""
    tally: Counter[bytes] = Counter()
    for batch in batches:
        members = np.sort(batch).astype(np.int64)
        tally[members.tobytes()] += 1
    return tally
