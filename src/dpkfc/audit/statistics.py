"""Statistical tests of the noise and of the sampler, on the session that ships with secret streams.

Every step of a noise test gets examples without a gradient, so a release is noise alone. Divided by
the standard deviation of the plan, its entries must be independent standard normal numbers: within
a release, between releases, and across a checkpoint. Tests are two-sided: too much noise is a fault
too. Every test has a false-alarm probability of at most ALPHA, which its thresholds and windows
share.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import signal, sparse, special, stats
from torch import Tensor

from dpkfc.audit.canaries import Canaries
from dpkfc.audit.harness import (
    Finding,
    Progress,
    Subject,
    accounted_noise,
    coarsest_spacing,
    ignore_progress,
)
from dpkfc.config import Plan
from dpkfc.distributed.context import flatten, widest_dtype
from dpkfc.privacy.mechanism import Released
from dpkfc.privacy.releases import ROUNDED, grid_of
from dpkfc.privacy.rng import SamplingStream
from dpkfc.rng_state import all_states, restore_all_states

if TYPE_CHECKING:
    import dp_accounting

ALPHA = 1e-9
SORTED = 400_000  # most samples that are sorted
Floats = NDArray[np.float64]
Samples = Floats
Integers = NDArray[np.int64]


def _two_sided(lower: ArrayLike, upper: ArrayLike) -> Floats:
    """Return the two-sided p-value for the probabilities of the two tails."""
    p_values: Floats = np.minimum(1.0, 2 * np.minimum(lower, upper))
    return p_values


def _chi_square_p_values(sums: ArrayLike, freedom: ArrayLike) -> Floats:
    """Return the two-sided p-values of sums of squared standard normal numbers."""
    lower = stats.chi2.cdf(sums, freedom)
    return _two_sided(lower, stats.chi2.sf(sums, freedom))


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


def _p_value_finding(check: str, p_value: float, tests: int, detail: str) -> Finding:
    """Return the finding on the smallest of `tests` p-values."""
    limit = ALPHA / tests
    return Finding(
        check=check,
        measured=f"p = {p_value:.2g}",
        bound=f"at least {limit:.1g}",
        passed=p_value >= limit,
        detail=detail,
    )


def _count_leading_entries(released: Released, most: int) -> dict[str, int]:
    """Return how many leading entries of every parameter are tested, about `most` in all."""
    sizes = {name: x.numel() for name, x in released.gradients.items()}
    total = sum(sizes.values())
    counts = {}
    for name, size in sizes.items():
        counts[name] = min(size, math.ceil(most * size / total))
    return counts


def _accounted_stddev(plan: Plan) -> float:
    """Return the standard deviation of a release according to the event that is accounted for."""
    noise_multiplier = accounted_noise(plan.event) or plan.noise_multiplier
    return noise_multiplier * plan.sensitivity / plan.expected_batch_size


# -- tests of noise samples ------------------------------------------------------------------------

THRESHOLDS = (3.0, 3.5, 4.0, 4.5)  # standard deviations
EXCESS_PAIRS = 4  # float32 noise has 0.9 of the expected pairs
FINGERPRINT = 3  # consecutive samples


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
            p_values.append(float(_two_sided(lower, upper)))
        expected = 2 * probability * size
        counts.append(f"{both_sides:,} beyond {threshold:g} ({expected:,.1f} expected)")
    detail = f"{size:,} samples: {', '.join(counts)}"
    return _p_value_finding("noise tails", min(p_values), len(p_values), detail)


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


def _collision_rate_of(plan: Plan, tensors: Collection[Tensor]) -> float:
    """Return the probability that two entries of a release of pure noise are equal.

    Args:
        plan: decides the standard deviation and, for noise="rounded", the grid.
        tensors: of the release.
    """
    grid = 0.0
    if plan.noise == ROUNDED:
        size = sum(x.numel() for x in tensors)
        grid = grid_of(plan.sensitivity, size, plan.stddev)
        grid /= plan.stddev
    return collision_rate(coarsest_spacing(tensors), grid)


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
    return _p_value_finding("noise over the steps", worst, tests, detail)


# -- releases of pure noise ------------------------------------------------------------------------

NUMBERS = 4_000_000  # stddev known to 0.035 %
MOST_ENTRIES = 1_000_000  # of a release
LOST_STEPS = 3  # between checkpoint and crash


def check_noise(
    subject: Subject, *, steps: int | None = None, progress: Progress = ignore_progress
) -> list[Finding]:
    """Test the distribution of releases of pure noise, across a crash and a restart.

    The first session runs a few steps beyond its checkpoint and is lost. The second one continues
    from the checkpoint. Both begin with the same state of every global generator. The scale is
    that of the event that is accounted for.

    Args:
        subject: what is audited.
        steps: releases; by default as many as give four million numbers, between 40 and 500.
        progress: called with (steps done, of all).
    """
    canaries = Canaries()
    for _ in range(4):
        canaries.add("zero", subject.example(0), factor=0.0)
    size = sum(p.numel() for p in subject.model().parameters() if p.requires_grad)
    if not steps:
        enough = NUMBERS // max(1, size)
        steps = max(40, min(500, enough))
    # Two micro-batches alternate with empty batches: noise must be added once a batch.
    zeros = list(range(subject.size, subject.size + 4))
    script = ([[], zeros] * steps)[:steps]
    stddev = _accounted_stddev(subject.plan)
    samples: list[Samples] = []
    entries: dict[str, int] = {}
    rate = 0.0
    for released in _release_across_restart(subject.bare, canaries, script):
        if not samples:
            entries = _count_leading_entries(released, MOST_ENTRIES)
            rate = _collision_rate_of(subject.plan, released.gradients.values())
        samples.append(standardize(released, stddev, entries))
        progress(len(samples), steps)
    return judge_noise(samples, entries, rate)


def _release_across_restart(
    subject: Subject, canaries: Canaries, script: list[list[int]]
) -> Iterator[Released]:
    """Yield releases of a session that crashes after its checkpoint, and of its continuation."""
    loss = canaries.loss(subject)
    saved = len(script) // 2
    # Noise that comes from a global generator is then repeated.
    states = all_states()
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        for is_continued in (False, True):
            restore_all_states(states)
            session, _ = canaries.open_session(
                subject,
                script,
                micro=subject.fewest_rows,
                ledger_path=f"{folder}/ledger.jsonl",
            )
            with session:
                if is_continued:
                    session.restore(f"{folder}/checkpoint")
                for batch in session.batches():
                    session.step(batch, loss)
                    done += 1
                    yield session.take()
                    if not is_continued and done == saved:
                        session.save(f"{folder}/checkpoint")
                    if not is_continued and done == saved + LOST_STEPS:
                        break


def standardize(
    released: Released, stddev: float, entries: Mapping[str, int] | None = None
) -> Samples:
    """Return the entries of a release over their standard deviation `[d]`.

    Args:
        released: the release.
        stddev: of its noise.
        entries: how many leading entries of every parameter are taken; None takes all.
    """
    tensors = released.gradients
    if entries is not None:
        tensors = {name: x.flatten()[: entries[name]] for name, x in tensors.items()}
    numbers = flatten(tensors, torch.float64) / stddev
    return numbers.cpu().numpy()


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
        rate: probability that two numbers are equal; by default that of float64.
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
        passed=abs(score) <= limit,
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
    return _p_value_finding("noise everywhere", float(p_values[worst]), p_values.size, detail)


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


# -- the noise of a whole run ----------------------------------------------------------------------
#
# The session releases sums of zeros, as often as the plan has steps. It reads no batch and takes no
# gradient, so thousands of steps take about a second. This shows noise that repeats after some
# draws, and noise that weakens during a run.

RUN_NUMBERS = 2_000_000  # samples in all
MOST_RELEASES = 10_000
FEWEST_SAMPLES = 16  # of a release


def check_run_noise(
    subject: Subject, *, numbers: int = RUN_NUMBERS, progress: Progress = ignore_progress
) -> list[Finding]:
    """Test tails, granularity, repeats and variance of the noise of every step of a plan.

    Args:
        subject: what is audited. The first MOST_RELEASES steps of its plan are sampled.
        numbers: samples over all steps.
        progress: called with (steps done, of all).

    Returns:
        One finding a test. Each has a false-alarm probability of at most 1e-9.
    """
    steps = min(MOST_RELEASES, subject.plan.steps)
    size = max(FEWEST_SAMPLES, numbers // steps)
    canaries = Canaries()
    canaries.add("no loss", subject.example(0), 0.0)
    plan = subject.plan
    session, _ = canaries.open_session(subject, [[]] * steps)
    zeros = torch.zeros(size, dtype=widest_dtype(session._parameters), device=session.device)
    stddev = _accounted_stddev(plan)
    samples = np.empty((steps, size))
    outside = 0
    with session:
        for step in range(steps):
            release = session.release_sum(zeros)
            outside += _count_outside_grid(plan, release)
            samples[step] = release.double().cpu().numpy() / stddev
            progress(step + 1, steps)
    findings = [
        check_tails(samples),
        check_granularity(samples, _collision_rate_of(plan, [zeros])),
        check_repeats(samples),
        check_windows(samples),
    ]
    if plan.noise == ROUNDED:
        finding = Finding(
            check="noise grid",
            measured=f"{outside:,} samples outside",
            bound="none",
            passed=not outside,
            detail=f"{samples.size:,} samples of noise='rounded' against the multiples of its grid",
        )
        findings.append(finding)
    return findings


def _count_outside_grid(plan: Plan, release: Tensor) -> int:
    """Count entries that are not multiples of the grid of rounded noise, up to their rounding."""
    if plan.noise != ROUNDED:
        return 0
    size = release.numel()
    grid_of_sum = grid_of(plan.sensitivity, size, plan.stddev)
    spacing = grid_of_sum / plan.expected_batch_size
    multiples = (release.double() / spacing).round()
    nearest = (multiples * spacing).to(release.dtype)
    return int((nearest != release).sum())


# -- the low bits of releases ----------------------------------------------------------------------
#
# Two batches are released many times under the secret noise. They differ in examples and in size,
# and their gradients are small. So the noise decides the low bits of every released number, and
# each bit has the same frequency for both batches. The test finds bits that follow the batch. It
# does not find the weak dependence of floating-point noise on the sum, which only noise="rounded"
# removes (Mironov 2012).

RELEASES = 48  # of each batch
MOST_ROWS = 32
BIT_ENTRIES = 20_000  # of a release
BITS = {torch.float64: 16, torch.float32: 8}  # of 52 and of 23


def check_low_bits(subject: Subject, *, progress: Progress = ignore_progress) -> Finding:
    """Compare how often each low bit of each entry is set in releases of two batches.

    Args:
        subject: what is audited.
        progress: called with (releases done, of all).

    Source:
        Fisher's exact test for every bit, with ALPHA divided by their number.
    """
    twice = math.ceil(2 * subject.plan.expected_batch_size)
    size = min(MOST_ROWS, max(2, twice))
    canaries = Canaries()
    examples = len(subject.dataset[-1])
    rows = []
    for number in range(1 + size):
        canaries.add("loss × 1e-4", subject.example(number % examples), 1e-4)
        rows.append(subject.size + number)
    script = [rows[:1], rows[1:]] * RELEASES
    counts: list[Integers] = []
    for number, bits in enumerate(_release_low_bits(subject, canaries, script)):
        if number < 2:
            counts.append(bits.astype(np.int64))
        else:
            counts[number % 2] += bits
        progress(number + 1, len(script))
    p_values = _fisher_p_values()[counts[0], counts[1]]
    detail = (
        f"{p_values.size:,} bits, {RELEASES} releases each of a batch of 1 and of {size} examples; "
        f"worst: bit {int(np.argmin(p_values))}"
    )
    return _p_value_finding("low bits", float(p_values.min()), p_values.size, detail)


def _release_low_bits(
    subject: Subject, canaries: Canaries, script: list[list[int]]
) -> Iterator[NDArray[np.bool_]]:
    """Yield the low bits of every release `[bits]`, at fixed weights and a fixed metric."""
    for released in canaries.release_still(subject, script):
        parts = []
        for name, count in _count_leading_entries(released, BIT_ENTRIES).items():
            entries = released.gradients[name].flatten()
            parts.append(_low_bits(entries[:count]))
        yield np.concatenate(parts)


def _low_bits(x: Tensor) -> NDArray[np.bool_]:
    """Return the low mantissa bits of floating-point numbers `[n]` as `[n · bits]`."""
    floats = x.detach().cpu().numpy()
    numbers = floats.view(f"u{floats.itemsize}")
    shifts = np.arange(BITS[x.dtype], dtype=numbers.dtype)
    bits = (numbers[:, None] >> shifts) & 1
    return bits.astype(bool).ravel()


def _fisher_p_values() -> Floats:
    """Return Fisher's two-sided p-value for every pair of counts `[RELEASES + 1, RELEASES + 1]`."""
    counts = np.arange(RELEASES + 1)
    one, other = np.meshgrid(counts, counts, indexing="ij")
    law = stats.hypergeom(2 * RELEASES, one + other, RELEASES)
    return _two_sided(law.cdf(one), law.sf(one - 1))


# -- the sampler -----------------------------------------------------------------------------------
#
# The plan's own sampler draws batches from its own stream. Every certified event describes the same
# kind of draw: a size from a known distribution (Binomial, truncated Binomial, or a constant), then
# a uniform subset of that size, anew at every step. The distribution comes from the event that is
# accounted for, not from the sampler that is tested. P-values are exact, from exact moments, or
# upper bounds.

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
    return [_p_value_finding(f"sampler: {name}", p, 1, detail) for name, p in p_values.items()]


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
    total_score = deviations.sum() / math.sqrt(steps * variance)
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
    return float(_two_sided(lower, upper))


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


def _tally(batches: Batches) -> Counter[bytes]:
    """Count batches by their members."""
    tally: Counter[bytes] = Counter()
    for batch in batches:
        members = np.sort(batch).astype(np.int64)
        tally[members.tobytes()] += 1
    return tally


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
    p_value = _two_sided(gamma.cdf(value), gamma.sf(value))
    return float(p_value)


def _count_p_value(count: int, mean: float, variance: float) -> float:
    """Return the two-sided p-value of a count.

    The count is nearly normal if it is large and nearly a Poisson number if it is small.
    """
    if variance <= 0:
        return float(math.isclose(count, mean, rel_tol=1e-9, abs_tol=1e-9))
    lower = stats.poisson.cdf(count, mean)
    upper = stats.poisson.sf(count - 1, mean)
    exact = _two_sided(lower, upper)
    score = (count - mean) / math.sqrt(variance)
    return max(float(exact), _normal_p_value(score))
