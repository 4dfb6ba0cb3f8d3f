"""Statistical tests of the noise, on the session that ships with secret streams.

Every step of a noise test gets examples without a gradient, so a release is noise alone. Divided by
the standard deviation of the plan, its entries must be independent standard normal numbers: within
a release, between releases, and across a checkpoint. Tests are two-sided: too much noise is a fault
too. Every test has a false-alarm probability of at most ALPHA, which its thresholds and windows
share.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats
from torch import Tensor

from dpkfc.audit.charges import accounted_noise
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, coarsest_spacing, ignore_progress
from dpkfc.audit.p_values import ALPHA, Floats, p_value_finding, two_sided
from dpkfc.audit.step_canaries import Canaries
from dpkfc.config import Plan
from dpkfc.distributed.context import flatten, widest_dtype
from dpkfc.privacy.grid import ROUNDED, grid_of
from dpkfc.privacy.mechanism import Released
from dpkfc.rng_state import all_states, restore_all_states

SORTED = 400_000  # most samples that are sorted
Samples = Floats


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


def count_leading_entries(released: Released, most: int) -> dict[str, int]:
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
    return p_value_finding("noise over the steps", worst, tests, detail)


# -- releases of pure noise ------------------------------------------------------------------------

NUMBERS = 4_000_000  # stddev known to 0.035 %
MOST_ENTRIES = 1_000_000  # of a release
LOST_STEPS = 3  # between checkpoint and crash


def check_noise(
    subject: Subject, *, steps: int | None = None, progress: Progress = ignore_progress
) -> list[Finding]:
    """Test the distribution of releases of pure noise, across a crash and a restart.

    The first session runs a few steps beyond its checkpoint and is lost. The second one continues
    from the checkpoint. Both begin with the same state of every global generator. The scale comes
    from the event that is accounted for.

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
            entries = count_leading_entries(released, MOST_ENTRIES)
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
