"""The law of the noise, on releases of the session that ships under its secret stream.

Every step is given examples whose gradients are zero, so that a release is noise alone. Its entries, over what the plan says
their standard deviation is, must be independent standard normal numbers: within a release, between releases, and between a
run and the one that continues it from a checkpoint. Every test is two-sided: too much noise is a fault too.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

from dpkfc.audit.canaries import Canaries
from dpkfc.audit.harness import Finding, Subject, Watched, accounted_noise, scripted, unmoved, watched
from dpkfc.config import Plan
from dpkfc.privacy.mechanism import ROUNDED, Released, grid_of
from dpkfc.privacy.rng import SamplingStream

if TYPE_CHECKING:
    import dp_accounting

# --------------------------------------------------------------------------------------------------
# Tests of noise samples: tails, granularity, repeated values, and variance in windows of steps.
#
# Every test has a false-alarm probability of at most ALPHA, with its thresholds and windows counted
# together.

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


# --------------------------------------------------------------------------------------------------

EXACT = collision_rate(float(np.finfo(np.float64).eps))
NUMBERS = 4_000_000  # drawn in all: the standard deviation is then known to 0.035 %
KEPT = 400_000  # of the numbers that are sorted
WIDEST = 1_000_000  # numbers of a release that are looked at; of more, the beginning of every parameter
LOST = 3  # releases between the checkpoint and the crash


def noise_law(
    subject: Subject, *, steps: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Draw releases of pure noise and judge them.

    Half of them come from a session that goes on from a checkpoint, behind which another one had gone a few steps further.
    Both begin with the same state of every global generator. The scale is that of the event that is accounted for.

    Args:
        subject: what is audited.
        steps: releases; by default as many as give four million numbers, between 40 and 500.
        progress: called with (steps done, of all).
    """
    canaries = Canaries()
    for _ in range(4):
        canaries.add("zero", tuple(x[0] for x in subject.dataset), factor=0.0)
    size = sum(p.numel() for p in subject.model().parameters() if p.requires_grad)
    steps = steps or max(40, min(500, NUMBERS // max(1, size)))
    zero = [subject.size + i for i in range(4)]
    script = [zero if k % 2 else [] for k in range(steps)]  # noise once a batch: also for one in two micro-batches
    plan = scripted(subject.plan, script, subject.size + 4, micro=subject.fewest_rows)
    plan = replace(plan, config=replace(plan.config, postprocess=(), readout="whitened"))
    stddev = (accounted_noise(plan.event) or plan.noise_multiplier) * plan.sensitivity / plan.expected_batch_size
    drawn: list[Samples] = []
    parts: dict[str, int] = {}
    rate = 0.0
    for released in _releases(subject, canaries, plan, steps):
        parts = parts or _parts(released)
        rate = rate or _rate(plan, released)
        drawn.append(standardised(released, stddev, parts))
        if progress is not None:
            progress(len(drawn), steps)
    return judge_noise(drawn, parts, rate)


def _rate(plan: Plan, released: Released) -> float:
    """Return the probability that two entries are equal, for the coarsest type of the release."""
    tensors = released.gradients.values()
    coarsest = max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)
    return collision_rate_of(plan, coarsest, sum(x.numel() for x in tensors))


def _releases(subject: Subject, canaries: Canaries, plan: Plan, steps: int) -> Iterator[Released]:
    """Those of a session that is lost a few steps behind its checkpoint, and of the one that goes on from there."""
    loss, data, units = canaries.loss(subject), canaries.dataset(subject), canaries.units(subject)
    saved = steps // 2
    restart, done = _globals(), 0
    with tempfile.TemporaryDirectory() as folder:
        for part in range(2):
            options: dict[str, Any] = {"units": units, "verify": False, "ledger_path": f"{folder}/ledger.jsonl"}
            restart()
            session, _ = watched(subject, plan, data, **options)
            with session:
                if part:
                    session.restore(f"{folder}/checkpoint")
                for batch in session.batches():
                    session.step(batch, loss)
                    done += 1
                    yield session.take()
                    if not part and done == saved:
                        session.save(f"{folder}/checkpoint")
                    if not part and done == saved + LOST:
                        break


def _globals() -> Callable[[], None]:
    """Puts every global generator back to where it is now: noise that is drawn from one of them then comes twice."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restart() -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restart


def _parts(released: Released) -> dict[str, int]:
    """How many numbers of every parameter are looked at."""
    total = sum(x.numel() for x in released.gradients.values())
    return {name: min(x.numel(), -(-WIDEST * x.numel() // total)) for name, x in released.gradients.items()}


def standardised(released: Released, stddev: float, parts: Mapping[str, int] | None = None) -> Samples:
    """Entries of a release over their standard deviation `[d]`: all, or the first so many of every parameter."""
    pieces = [x.detach().flatten()[: parts[name] if parts else None] for name, x in released.gradients.items()]
    return (torch.cat([x.double() for x in pieces]) / stddev).cpu().numpy()


def judge_noise(
    drawn: Sequence[Samples], parts: Mapping[str, int] | None = None, rate: float = EXACT
) -> list[Finding]:
    """Tests on releases `[d]` of pure noise, each over its standard deviation.

    Mean, variance (both sides, of all numbers, of each parameter, of each number), shape, tails, granularity, repetition
    within a release at any distance, and correlation between any two of them.

    Args:
        drawn: the releases.
        parts: parameter name to how many of the numbers are its own, in order; None for one parameter.
        rate: probability that two numbers are equal; by default that of float64.
    """
    numbers = np.concatenate(drawn)
    count = numbers.size
    return [
        _normal_score("noise mean", numbers.mean() * math.sqrt(count), f"{count:,} numbers, {len(drawn)} releases"),
        _variance(numbers),
        _everywhere(drawn, parts or {"all": drawn[0].size}),
        _shape(numbers),
        check_tails(numbers),
        check_granularity(numbers, rate),
        _within(drawn),
        _between(drawn),
        _following(drawn),
    ]


def _normal_score(check: str, score: float, detail: str) -> Finding:
    limit = float(stats.norm.isf(ALPHA / 2))
    return Finding(
        check=check, measured=f"{score:+.2f} standard errors", bound=f"within ± {limit:.2f}", passed=abs(score) <= limit,
        detail=detail,
    )  # fmt: skip


def _variance(numbers: Samples) -> Finding:
    count = numbers.size
    limit = float(stats.norm.isf(ALPHA / 2)) * math.sqrt(0.5 / count)
    ratio = math.sqrt(float(np.mean(numbers**2)))
    return Finding(
        check="noise scale", measured=f"{ratio:.5f} × accounted", bound=f"1 ± {limit:.5f}", passed=abs(ratio - 1) <= limit,
        detail="root mean square over what the event accounts for; less is a leak, more is waste",
    )  # fmt: skip


def _everywhere(drawn: Sequence[Samples], parts: Mapping[str, int]) -> Finding:
    """The variance of each release, each parameter and each number: one of them without noise is lost among all."""
    squares = np.square(np.stack(drawn))
    count, size = squares.shape
    ends = np.cumsum(list(parts.values()))
    numbers = squares.sum(0)
    sums = np.concatenate([numbers, np.add.reduceat(numbers, [0, *ends[:-1]]), squares.sum(1)])
    freedom = np.concatenate([np.full(size, count), count * np.array(list(parts.values())), np.full(count, size)])
    p = 2 * np.minimum(stats.chi2.cdf(sums, freedom), stats.chi2.sf(sums, freedom))
    worst, limit = int(np.argmin(p)), ALPHA / p.size
    if worst < size:
        where = f"a number of '{list(parts)[int(np.searchsorted(ends, worst, side='right'))]}'"
    else:
        where = f"'{list(parts)[worst - size]}'" if worst < size + len(parts) else f"release {worst - size - len(parts)}"
    return Finding(
        check="noise everywhere", measured=f"p = {p[worst]:.2g}", bound=f"at least {limit:.1g}", passed=bool(p[worst] >= limit),
        detail=f"variance of each of {size:,} numbers, {len(parts):,} parameters and {count:,} releases; worst: {where}",
    )  # fmt: skip


def _shape(numbers: Samples) -> Finding:
    """Kolmogorov's distance from the normal law, on as many numbers as can be sorted quickly."""
    some = numbers[:: max(1, numbers.size // KEPT)]
    distance = float(stats.kstest(some, "norm").statistic)
    limit = math.sqrt(-math.log(ALPHA / 2) / (2 * some.size))
    return Finding(
        check="noise shape", measured=f"distance {distance:.5f}", bound=f"at most {limit:.5f}", passed=distance <= limit,
        detail=f"Kolmogorov-Smirnov on {some.size:,} numbers",
    )  # fmt: skip


def _within(drawn: Sequence[Samples]) -> Finding:
    """A block that comes twice in a release, at any distance, correlates with itself there."""
    size = drawn[0].size
    length = 1 << (2 * size - 1).bit_length()
    total: Samples = np.zeros(size)
    for x in drawn:
        spectrum = np.fft.rfft(x, length)
        total += np.fft.irfft(np.abs(spectrum) ** 2, length)[:size]
    pairs = np.arange(size, 0, -1) * len(drawn)
    scores = np.abs(total[1:]) / np.sqrt(pairs[1:])
    # a product of two normal numbers has heavier tails than a normal one: short overlaps are given the exponential bound
    limit = _extreme(max(1, size - 1)) * np.maximum(1.0, _extreme(max(1, size - 1)) / np.sqrt(pairs[1:]))
    excess = float(np.max(scores / limit)) if size > 1 else 0.0
    return Finding(
        check="no repetition inside a release", measured=f"{excess:.2f} × limit", bound="at most 1", passed=excess <= 1,
        detail="autocorrelation at every distance, over all releases",
    )  # fmt: skip


def _between(drawn: Sequence[Samples]) -> Finding:
    """The correlation of every two releases."""
    table = np.stack(drawn)
    size, count = table.shape[1], len(drawn)
    products = table @ table.T / math.sqrt(size)
    np.fill_diagonal(products, 0.0)
    pairs = max(1, count * (count - 1) // 2)
    limit = _extreme(pairs) * max(1.0, _extreme(pairs) / math.sqrt(size))
    worst = float(np.max(np.abs(products))) if count > 1 else 0.0
    return Finding(
        check="no repetition between releases", measured=f"{worst:.2f} standard errors", bound=f"at most {limit:.2f}",
        passed=worst <= limit, detail=f"{pairs:,} pairs, those across a resumed checkpoint included",
    )  # fmt: skip


def _following(drawn: Sequence[Samples]) -> Finding:
    """The correlation of each release with those just before it, pooled: finds what is too weak to show in one pair."""
    scores = []
    for lag in range(1, min(4, len(drawn))):
        products = sum(float(x @ y) for x, y in zip(drawn, drawn[lag:], strict=False))
        scores.append(abs(products) / math.sqrt(drawn[0].size * (len(drawn) - lag)))
    limit, worst = _extreme(3), max(scores, default=0.0)
    return Finding(
        check="independence of following releases", measured=f"{worst:.2f} standard errors", bound=f"at most {limit:.2f}",
        passed=worst <= limit, detail="lags 1 to 3, all releases together",
    )  # fmt: skip


def _extreme(tests: int) -> float:
    """The score that the largest of so many independent ones passes with probability ALPHA."""
    return float(stats.norm.isf(ALPHA / (2 * tests)))


# --------------------------------------------------------------------------------------------------
# The noise of a whole run: the session releases sums of zeros, as often as the plan has steps.
#
# No batch is read and no gradient is taken, so thousands of steps cost about a second. Faults that
# need many steps show here: noise that repeats after some draws, and noise that weakens in the
# course of a run.

RUN_NUMBERS = 2_000_000  # samples in all
MOST = 10_000  # releases
NARROWEST = 16  # samples of a release


def noise_run(
    subject: Subject, *, numbers: int = RUN_NUMBERS, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Draw the noise of every step of a plan and test its tails, granularity, repeats and variance over the steps.

    Args:
        subject: what is audited. Of a plan with more than MOST steps the first MOST are drawn.
        numbers: samples over all steps.
        progress: called with (steps done, of all).

    Returns:
        One finding a test. Each has a false-alarm probability of at most 1e-9.
    """
    steps = min(MOST, subject.plan.steps)
    size = max(NARROWEST, numbers // steps)
    canaries = Canaries()
    canaries.add("no loss", tuple(x[0] for x in subject.dataset), 0.0)
    plan = scripted(subject.plan, [[]] * steps, subject.size + 1)
    session, _ = watched(subject, plan, canaries.dataset(subject), units=canaries.units(subject), verify=False)
    zeros = torch.zeros(size, dtype=_type_of(session), device=session.device)
    stddev = (accounted_noise(plan.event) or plan.noise_multiplier) * plan.sensitivity / plan.expected_batch_size
    samples = np.empty((steps, size))
    outside = 0
    with session:
        for step in range(steps):
            release = session.release_sum(zeros)
            outside += _count_outside(plan, release)
            samples[step] = release.double().cpu().numpy() / stddev
            if progress is not None:
                progress(step + 1, steps)
    findings = [
        check_tails(samples),
        check_granularity(samples, collision_rate_of(plan, zeros.dtype, size)),
        check_repeats(samples),
        check_windows(samples),
    ]
    if plan.noise == ROUNDED:
        findings.append(
            Finding(
                check="noise grid", measured=f"{outside:,} samples outside", bound="none", passed=not outside,
                detail=f"{samples.size:,} samples of noise='rounded' against the multiples of its grid",
            )
        )  # fmt: skip
    return findings


def _type_of(session: Watched) -> torch.dtype:
    """Return float64 where a trained parameter has it, and float32 elsewhere."""
    types = {p.dtype for p in session.model.parameters() if p.requires_grad}
    return torch.float64 if torch.float64 in types else torch.float32


def _count_outside(plan: Plan, release: Tensor) -> int:
    """Count entries that are not multiples of the grid of rounded noise, up to the rounding of their own type."""
    if plan.noise != ROUNDED:
        return 0
    spacing = grid_of(plan.sensitivity, release.numel(), plan.stddev) / plan.expected_batch_size
    nearest = ((release.double() / spacing).round() * spacing).to(release.dtype)
    return int((nearest != release).sum())


# --------------------------------------------------------------------------------------------------
# The low bits of releases: they must not depend on the batch.
#
# Two batches are released many times under the secret noise. They differ in examples and in size,
# and their gradients are small. So the noise decides the low bits of every released number, and
# each bit has the same frequency for both batches. The test finds bits that follow the batch. It
# does not find the weak dependence of floating-point noise on the sum, which only noise="rounded"
# removes (Mironov 2012).

RELEASES = 48  # of each batch
LARGEST = 32  # rows
ENTRIES = 20_000  # of a release, from the beginning of every parameter
BITS = {torch.float64: 16, torch.float32: 8}  # of 52 and of 23
Counts = NDArray[np.int64]


def low_bits(subject: Subject, *, progress: Callable[[int, int], None] | None = None) -> Finding:
    """Compare how often each low bit of each entry is set in releases of two batches.

    Args:
        subject: what is audited.
        progress: called with (releases done, of all).

    Source:
        Fisher's exact test for every bit, with ALPHA divided by their number.
    """
    large = min(LARGEST, max(2, math.ceil(2 * subject.plan.expected_batch_size)))
    canaries, count = Canaries(), len(subject.dataset[-1])
    for number in range(1 + large):
        canaries.add("loss × 1e-4", tuple(x[number % count] for x in subject.dataset), 1e-4)
    rows = [subject.size + number for number in range(1 + large)]
    script = [rows[:1], rows[1:]] * RELEASES
    ones: list[Counts] = []
    for number, bits in enumerate(_bits(subject, canaries, script)):
        if number < 2:
            ones.append(bits.astype(np.int64))
        else:
            ones[number % 2] += bits
        if progress is not None:
            progress(number + 1, len(script))
    p_values = _p_values()[ones[0], ones[1]]
    limit = ALPHA / p_values.size
    worst = float(p_values.min())
    entry = int(np.argmin(p_values))
    return Finding(
        check="low bits", measured=f"p = {worst:.2g}", bound=f"at least {limit:.1g}", passed=worst >= limit,
        detail=f"{p_values.size:,} bits, {RELEASES} releases each of a batch of 1 and of {large} examples; worst: bit {entry}",
    )  # fmt: skip


def _bits(subject: Subject, canaries: Canaries, script: list[list[int]]) -> Iterator[NDArray[np.bool_]]:
    """Yield the low bits of every release `[bits]`, at fixed weights and a fixed metric."""
    plan = scripted(unmoved(subject.plan), script, subject.size + len(canaries.names))
    units = canaries.units(subject)
    session, walk = watched(subject, plan, canaries.dataset(subject), units=units, verify=False, still=True)
    loss = canaries.loss(subject)
    with session:
        for batch in session.batches():
            session.step(batch, loss)
            walk.handed.clear()
            tensors = session.take().gradients
            total = sum(x.numel() for x in tensors.values())
            parts = [x.flatten()[: math.ceil(ENTRIES * x.numel() / total)] for x in tensors.values()]
            yield np.concatenate([_low_bits(x) for x in parts])


def _low_bits(x: Tensor) -> NDArray[np.bool_]:
    """Return the low mantissa bits of floating-point numbers `[n]` as `[n · bits]`."""
    bits = BITS[x.dtype]
    whole = x.detach().cpu().numpy().view(np.uint64 if x.dtype == torch.float64 else np.uint32)
    return ((whole[:, None] >> np.arange(bits, dtype=whole.dtype)) & 1).astype(bool).ravel()


def _p_values() -> NDArray[np.float64]:
    """Return Fisher's two-sided p-value for every pair of counts `[RELEASES + 1, RELEASES + 1]`."""
    counts = np.arange(RELEASES + 1)
    one, other = np.meshgrid(counts, counts, indexing="ij")
    low = stats.hypergeom.cdf(one, 2 * RELEASES, one + other, RELEASES)
    high = stats.hypergeom.sf(one - 1, 2 * RELEASES, one + other, RELEASES)
    return np.minimum(1.0, 2 * np.minimum(low, high))


# --------------------------------------------------------------------------------------------------
# The law of the sampler, on batches that a plan's own sampler draws from its own stream.
#
# Every certified event is about the same kind of draw: a size from a known distribution (Binomial,
# that cut at a maximum, or a constant), then a uniform subset of that size, anew at every step. The
# distribution is read off the event that is accounted for, not off the sampler that is tested.
# Every test is two-sided where both sides exist; p-values are exact, from moments that are exact,
# or upper bounds.

ALPHA = 1e-9  # of one test; a battery has about sixteen
MOST_STEPS, LEAST_STEPS = 4000, 400  # of an audit
INCLUSIONS = 2e8  # inclusions that an audit decides in all
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
        import dp_accounting

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
    steps = steps or int(min(MOST_STEPS, max(LEAST_STEPS, INCLUSIONS / n)))
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
