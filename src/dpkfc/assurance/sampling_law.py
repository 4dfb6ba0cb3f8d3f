"""The law of the sampler, on batches that a plan's own sampler draws from its own stream.

Every certified event is about the same kind of draw: a size from a known distribution (Binomial, that cut at a maximum, or a
constant), then a uniform subset of that size, anew at every step. The distribution is read off the event that is accounted
for, not off the sampler that is tested. Every test is two-sided where both sides exist; p-values are exact, from moments that
are exact, or upper bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import dp_accounting
import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan
from dpkfc.privacy.rng import SamplingStream

__all__ = ["ALPHA", "Sizes", "draw_batches", "sampler_battery", "sampler_law"]

ALPHA = 1e-9  # of one test; a battery has about sixteen
MOST_STEPS, LEAST_STEPS = 4000, 400  # of an audit
NUMBERS = 2e8  # inclusions that an audit decides in all
_BINS, _IN_A_BIN = 12, 25

Batches = Sequence[NDArray[np.int64]]


@dataclass(frozen=True)
class Sizes:
    """The distribution of the size of a batch, whose members are then a uniform subset.

    Attributes:
        dataset_size: N >= 2.
        mass: probability of every size `[N + 1]`.
    """

    dataset_size: int
    mass: NDArray[np.float64]

    @classmethod
    def of(cls, event: dp_accounting.DpEvent, dataset_size: int) -> Sizes:
        """What an event says of the batches.

        Raises:
            ValueError: an event that is not about batches, or one of another data set.
        """
        every = np.arange(dataset_size + 1)
        if isinstance(event, dp_accounting.GaussianDpEvent):
            return cls(dataset_size, (every == dataset_size).astype(float))
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            return cls(dataset_size, stats.binom.pmf(every, dataset_size, event.sampling_probability))
        if getattr(event, "dataset_size", getattr(event, "source_dataset_size", None)) != dataset_size:
            raise ValueError(f"the event {event} says nothing of batches from {dataset_size} examples")
        if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            mass = stats.binom.pmf(every, dataset_size, event.sampling_probability)
            most = min(dataset_size, event.truncated_batch_size)
            mass[most] = stats.binom.sf(most - 1, dataset_size, event.sampling_probability)
            mass[most + 1 :] = 0.0
            return cls(dataset_size, mass)
        return cls(dataset_size, (every == event.sample_size).astype(float))

    def moment(self, power: int) -> float:
        """Central moment of the size; the mean for the first."""
        every = np.arange(self.dataset_size + 1)
        return float(self.mass @ every) if power == 1 else float(self.mass @ (every - self.mean) ** power)

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
        """Sum of the squares of the N² covariances of the indicators of the examples: Σ² of two independent batches."""
        n, q = self.dataset_size, self.rate
        together = (self.variance + self.mean**2 - self.mean) / (n * (n - 1))
        return float(n * (q * (1 - q)) ** 2 + n * (n - 1) * (together - q * q) ** 2)


def draw_batches(plan: Plan, steps: int, stream: SamplingStream | None = None) -> Batches:
    """Batches of the plan's sampler, by default from a new stream of the plan (secret, but for a plan in test mode)."""
    stream = stream or plan.sampling_stream()
    return [np.asarray(plan.draw(step, stream)) for step in range(steps)]


def sampler_law(plan: Plan, *, steps: int | None = None, stream: SamplingStream | None = None) -> list[Finding]:
    """Draw batches from two streams of a plan and judge them.

    Args:
        plan: of the run.
        steps: batches from each stream; by default as many as decide 2·10⁸ inclusions, between 400 and 4,000.
        stream: the first stream; by default a new one.
    """
    n = plan.dataset_size
    if n < 2:
        return []
    steps = steps or int(min(MOST_STEPS, max(LEAST_STEPS, NUMBERS / n)))
    batches = draw_batches(plan, steps, stream)
    beside = None if plan.test_mode else draw_batches(plan, steps)
    values = sampler_battery(batches, Sizes.of(plan.event, n), beside)
    detail = f"{steps:,} batches of {n:,} examples"
    return [
        Finding(check=f"sampler: {name}", measured=f"p = {p:.2g}", bound=f"at least {ALPHA:g}", passed=p >= ALPHA, detail=detail)
        for name, p in values.items()
    ]


def sampler_battery(batches: Batches, law: Sizes, beside: Batches | None = None) -> dict[str, float]:
    """p-values of what the law implies, by name.

    Args:
        batches: indices of every batch, in the order of the steps; at least two batches.
        law: of the size, for a data set of at least two examples.
        beside: batches of another stream (rank, session), which must be independent of the first.

    Returns:
        Name of the test to its p-value; 0 where a batch is impossible.
    """
    n, drawn = law.dataset_size, _Drawn.of(batches)
    if not drawn.is_possible(n) or np.any(law.mass[np.minimum(drawn.sizes, n)] == 0):
        return {"possible batches": 0.0}
    values = {"possible batches": 1.0, **_of_sizes(drawn.sizes, law), **_of_examples(drawn, law)}
    values |= {"neighbouring examples": _neighbours(drawn, n), "halves of the data set": _halves(drawn, n)}
    values["following batches"] = _overlap(drawn.part(0, -1), drawn.part(1, None), n)
    values["equal batches"] = _equal(batches, law)
    if beside is not None:
        values["another stream"] = _overlap(drawn, _Drawn.of(beside), n)
        values["equal batches in another stream"] = _equal(batches, law, beside)
    return values


@dataclass(frozen=True)
class _Drawn:
    """Batches behind each other: the step and the example of every inclusion, in order, and the size of every batch."""

    step: NDArray[np.int64]
    example: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, batches: Batches) -> _Drawn:
        sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
        step, example = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(batches).astype(np.int64)
        order = np.lexsort((example, step))
        return cls(step, example[order], sizes)

    def part(self, begin: int, end: int | None) -> _Drawn:
        """Some of the batches, numbered from 0."""
        first, last, _ = slice(begin, end).indices(len(self.sizes))
        inside = (self.step >= first) & (self.step < last)
        return _Drawn(self.step[inside] - first, self.example[inside], self.sizes[first:last])

    @property
    def ascents(self) -> NDArray[np.int64]:
        """From each example of a batch to the next one of the same batch."""
        return np.diff(self.example)[np.diff(self.step) == 0]

    def is_possible(self, dataset_size: int) -> bool:
        """Whether no batch holds an example twice, or one that does not exist."""
        return bool(
            np.all(self.ascents > 0) and np.all(self.example >= 0) and np.all(self.example < dataset_size)
        )


def _of_sizes(sizes: NDArray[np.int64], law: Sizes) -> dict[str, float]:
    steps, mean, variance = len(sizes), law.mean, law.variance
    if variance < 1e-9:  # one size, which every batch has been found to have
        return {}
    away = sizes - mean
    largest, smallest = int(sizes.max()), int(sizes.min())
    above, below = float(law.mass[largest + 1 :].sum()), float(law.mass[:smallest].sum())
    return {
        "total": _normal(away.sum() / math.sqrt(steps * variance)),
        "variance of sizes": _gamma(float((away**2).sum()), steps * variance, steps * (law.moment(4) - variance**2)),
        "distribution of sizes": _fit(sizes, law),
        "largest batch": _both(1 - _once(above, steps), _once(above + float(law.mass[largest]), steps)),
        "smallest batch": _both(1 - _once(below, steps), _once(below + float(law.mass[smallest]), steps)),
        "empty batches": float(stats.binomtest(int((sizes == 0).sum()), steps, min(1.0, law.mass[0])).pvalue),
        "sizes of following batches": _normal((away[1:] * away[:-1]).sum() / (variance * math.sqrt(steps - 1))),
    }


def _of_examples(drawn: _Drawn, law: Sizes) -> dict[str, float]:
    """How often each example was drawn: too unevenly, too evenly, one far too rarely or too often."""
    n, steps, q = law.dataset_size, len(drawn.sizes), law.rate
    if q >= 1:
        return {}
    counts = np.bincount(drawn.example, minlength=n)
    spread = float(np.square(counts - steps * q).sum())
    # of the sum over steps t, u of the products of centred indicators: equal steps, then different ones
    variance = steps * (1 - 2 * q) ** 2 * law.variance + 2 * steps * (steps - 1) * law.squared_covariances
    often = stats.binom(steps, q)
    return {
        "inclusion": _gamma(spread, steps * n * q * (1 - q), variance),
        "example drawn least": min(1.0, n * float(often.cdf(counts.min()))),
        "example drawn most": min(1.0, n * float(often.sf(counts.max() - 1))),
    }


def _overlap(first: _Drawn, second: _Drawn, n: int) -> float:
    """Examples that two batches share, summed over pairs of batches; given their sizes, each pair is hypergeometric."""
    shared = np.intersect1d(first.step * n + first.example, second.step * n + second.example, assume_unique=True).size
    a, b = first.sizes.astype(float), second.sizes.astype(float)
    variance = a * b * (n - a) * (n - b) / (n * n * (n - 1))
    return _count(shared, float((a * b / n).sum()), float(variance.sum()))


def _neighbours(drawn: _Drawn, n: int) -> float:
    """Pairs of examples i, i + 1 in one batch, the last and the first included.

    A batch of s has s less the number of its runs, and given s that number is hypergeometric.
    """
    inner = drawn.sizes[(drawn.sizes > 0) & (drawn.sizes < n)].astype(float)
    if n < 3 or not inner.size:
        return 1.0
    ends = [np.bincount(drawn.step[drawn.example == end], minlength=len(drawn.sizes)) for end in (0, n - 1)]
    together = int((drawn.ascents == 1).sum()) + int(ends[0] @ ends[1]) - n * int((drawn.sizes == n).sum())
    rest = n - inner
    mean = inner * (inner - 1) / (n - 1)
    variance = inner * rest * (inner - 1) * (rest - 1) / ((n - 1) ** 2 * (n - 2))
    return _count(together, float(mean.sum()), float(variance.sum()))


def _halves(drawn: _Drawn, n: int) -> float:
    """The spread of how a batch divides over even and odd examples: pairs that come together or avoid each other."""
    even, sizes = (n + 1) // 2, drawn.sizes
    counts = np.bincount(drawn.step[drawn.example % 2 == 0], minlength=len(sizes))
    squares = float(np.square(counts - sizes * even / n).sum())
    mean = variance = 0.0
    for size, count in Counter(sizes.tolist()).items():
        found = np.arange(max(0, size - (n - even)), min(size, even) + 1)
        mass, away = stats.hypergeom.pmf(found, n, even, size), (found - size * even / n) ** 2
        mean += count * float(mass @ away)
        variance += count * (float(mass @ away**2) - float(mass @ away) ** 2)
    return _gamma(squares, mean, variance)


def _equal(batches: Batches, law: Sizes, beside: Batches | None = None) -> float:
    """A bound of the probability of so many equal pairs of batches: their expected number over the number found."""
    n, steps = law.dataset_size, len(batches)
    tallies = [Counter(np.sort(b).astype(np.int64).tobytes() for b in side) for side in (batches, beside or ())]
    if beside is None:
        found, pairs = sum(k * (k - 1) // 2 for k in tallies[0].values()), steps * (steps - 1) / 2
    else:
        found, pairs = sum(k * tallies[1][key] for key, k in tallies[0].items()), steps * len(beside)
    every = np.arange(n + 1)
    choices = special.gammaln(n + 1) - special.gammaln(every + 1) - special.gammaln(n - every + 1)
    with np.errstate(divide="ignore"):
        expected = pairs * float(np.exp(2 * np.log(law.mass) - choices).sum())
    return min(1.0, expected / found) if found else 1.0


def _fit(sizes: NDArray[np.int64], law: Sizes) -> float:
    """Pearson's test over up to a dozen classes of sizes, about equally probable."""
    steps, below = len(sizes), np.cumsum(law.mass)
    edges, last = [], 0.0
    for share in np.linspace(0, 1, min(_BINS, max(2, steps // _IN_A_BIN)) + 1)[1:-1]:
        edge = int(np.searchsorted(below, share))
        if below[edge] - last > _IN_A_BIN / steps and 1 - below[edge] > _IN_A_BIN / steps:
            edges.append(edge)
            last = below[edge]
    if not edges:
        return 1.0
    expected = np.diff([0.0, *below[edges], 1.0]) * steps
    found = np.bincount(np.searchsorted(edges, sizes), minlength=len(expected))
    return float(stats.chi2.sf(float(np.square(found - expected) @ (1 / expected)), len(edges)))


def _once(chance: float, steps: int) -> float:
    """Probability that something of this chance happens in at least one of the steps."""
    return 1.0 if chance >= 1 else -math.expm1(steps * math.log1p(-chance))


def _both(lower: float, upper: float) -> float:
    return min(1.0, 2 * min(lower, upper))


def _normal(score: float) -> float:
    return float(2 * stats.norm.sf(abs(score)))


def _gamma(value: float, mean: float, variance: float) -> float:
    """Two-sided, under the gamma distribution of this mean and variance: a scaled χ²."""
    if variance <= 0:
        return 1.0 if math.isclose(value, mean, rel_tol=1e-9, abs_tol=1e-9) else 0.0
    law = stats.gamma(mean * mean / variance, scale=variance / mean)
    return _both(float(law.cdf(value)), float(law.sf(value)))


def _count(found: int, mean: float, variance: float) -> float:
    """Two-sided, for a count that is nearly normal where it is large and nearly a Poisson number where it is rare."""
    if variance <= 0:
        return float(math.isclose(found, mean, rel_tol=1e-9, abs_tol=1e-9))
    rare = _both(float(stats.poisson.cdf(found, mean)), float(stats.poisson.sf(found - 1, mean)))
    return max(rare, _normal((found - mean) / math.sqrt(variance)))

