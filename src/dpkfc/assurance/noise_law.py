"""The law of the noise, on releases of the session that ships under its secret stream.

Every step is given examples whose gradients are zero, so that a release is noise alone. Its entries, over what the plan says
their standard deviation is, must be independent standard normal numbers: within a release, between releases, and between a
run and the one that continues it from a checkpoint. Every test is two-sided: too much noise is a fault too.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from dpkfc.assurance.accounting import accounted_noise
from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.noise_samples import ALPHA, check_granularity, check_tails, collision_rate, collision_rate_of
from dpkfc.assurance.subject import Subject, scripted, watched
from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan
from dpkfc.privacy.mechanism import Released

__all__ = ["ALPHA", "judge_noise", "noise_law", "standardised"]

EXACT = collision_rate(float(np.finfo(np.float64).eps))
NUMBERS = 4_000_000  # drawn in all: the standard deviation is then known to 0.035 %
KEPT = 400_000  # of the numbers that are sorted
WIDEST = 1_000_000  # numbers of a release that are looked at; of more, the beginning of every parameter
LOST = 3  # releases between the checkpoint and the crash
Samples = NDArray[np.float64]


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
