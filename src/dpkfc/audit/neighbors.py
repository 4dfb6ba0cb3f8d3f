"""Tests on neighbouring batches: replay under frozen noise, and a distinguishing test.

Neighbour replay runs the step that ships on two neighbouring batches with the same frozen noise.
The difference of the two releases is what one example can change. Times the divisor it may not
exceed the sensitivity of the plan. The noise stays on, so noise whose size or place follows the
data shows as well. Two sessions walk along the same weights. Step by step they take a batch S, and
S with one canary more. (If neighbours differ by replacement, the canary replaces an example.)
Replay also checks that

    the metric is the same for both batches,
    weights and buffers are the same for both, because the optimizer follows its own path,
    what the optimizer gets follows from the release alone, and so does the history of a
        preconditioner that is made from past releases,
    each step makes exactly one release and one charge, also on an empty batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.audit.attacks import gaussian_epsilon, gaussian_mu_lower
from dpkfc.audit.canaries import Canaries, make_canaries
from dpkfc.audit.harness import (
    Finding,
    Progress,
    Script,
    Subject,
    freeze_preconditioner,
    script_plan,
    select_failed,
)
from dpkfc.audit.statistics import standardize
from dpkfc.config import Plan
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.mechanism import ROUNDED, Released

# -- neighbour replay ------------------------------------------------------------------------------

SIZES = (0, 1, 3, 7, 16)  # of the batch that a canary joins
SEED = 20_240_607
Pair = tuple[str, list[int], list[int]]


@dataclass
class Replay:
    """The result of the replays.

    Attributes:
        pairs: neighbouring batches compared.
        worst: largest distance over sensitivity.
        where: the pair with the largest distance.
        tolerance: what rounding may add to 1.
        control: largest distance of equal batches, which must be 0.
        metrics: pairs whose metric differed.
        moved: pairs whose weights or buffers differed afterwards.
        handed: pairs whose optimizer got something that does not follow from the release.
        uncounted: pairs that did not make one release and one charge.
    """

    pairs: int = 0
    worst: float = 0.0
    where: str = ""
    tolerance: float = 0.0
    control: float = 0.0
    metrics: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)

    def findings(self) -> list[Finding]:
        """Return one finding a check."""
        sensitivity = Finding(
            check="sensitivity",
            measured=f"{self.worst:.6f} × sensitivity",
            bound=f"at most 1 + {self.tolerance:.1e}",
            passed=self.worst <= 1 + self.tolerance,
            detail=f"{self.pairs} neighbouring batches under frozen noise; worst: {self.where}",
        )
        return [
            sensitivity,
            _departures_finding(
                "metric", self.metrics, "the metric is the same for neighbouring data"
            ),
            _departures_finding(
                "weights",
                self.moved,
                "nothing but releases moves weights and buffers, and no gradient stays behind",
            ),
            _departures_finding(
                "hand-over",
                self.handed,
                "what the optimizer is handed follows from the release alone",
            ),
            _departures_finding(
                "one release and one charge a step",
                self.uncounted,
                "every batch, the empty one included",
            ),
        ]


def _departures_finding(check: str, departures: Sequence[str], detail: str) -> Finding:
    if departures:
        detail += f"; first: {departures[0]}"
    return Finding(
        check=check,
        measured=f"{len(departures)} departures",
        bound="none",
        passed=not departures,
        detail=detail,
    )


def prepare_canaries(subject: Subject) -> Canaries:
    """Make the canaries for the metric that the subject's first step would use."""
    empty = Canaries()
    empty.add("none", subject.example(0))
    with World(subject, empty, [[]]) as world:
        world.session.step(next(world.batches), world.loss)
        return make_canaries(subject, world.session.layers, world.session.metric)


def replay(
    subject: Subject,
    canaries: Canaries | None = None,
    *,
    sizes: Sequence[int] | None = None,
    until_failed: bool = False,
    progress: Progress | None = None,
) -> Replay:
    """Run all pairs, then part of them again in the smallest micro-batches.

    Args:
        subject: what is audited.
        canaries: by default all of `prepare_canaries`.
        sizes: of the batches that canaries join.
        until_failed: stop at the first check that does not hold.
        progress: called with (pairs done, of all).

    Raises:
        ValueError: the forward pass is random, so two runs cannot be compared.
    """
    canaries = canaries or prepare_canaries(subject)
    result = Replay()
    pairs = list(_neighbouring_pairs(subject, canaries, SIZES if sizes is None else sizes))
    # In random order, refreshes of the metric meet canaries and sizes of all kinds.
    random.Random(SEED).shuffle(pairs)
    repeated = pairs[:: max(1, len(pairs) // 40)]
    total = len(pairs) + len(repeated)
    for micro, chosen in ((None, pairs), (subject.fewest_rows, repeated)):
        for chunk in _chunks(subject, chosen):
            for _ in _replay_pairs(subject, canaries, chunk, micro, result):
                if progress is not None:
                    progress(result.pairs, total)
                if until_failed and select_failed(result.findings()):
                    return result
    is_explained = result.moved or result.metrics or result.uncounted
    if result.control > result.tolerance and not is_explained:
        raise ValueError(
            f"two runs on one batch differ by {result.control:.2g} × sensitivity under frozen "
            "noise: the forward pass is random. Switch that off (functional dropout?)"
        )
    return result


def _neighbouring_pairs(
    subject: Subject, canaries: Canaries, sizes: Sequence[int]
) -> Iterator[Pair]:
    """Yield a name, the units of a batch, and those of its neighbour.

    If examples are augmented at random, a unit without a loss takes the canary's place in the
    first batch. The same random numbers then change the examples that both batches share. The
    canary is in the last, the first or the middle row: a step that mixes one half of a batch into
    the other changes different rows for each.
    """
    first, half = subject.size, max(1, subject.size // 2)
    replaces, zero = subject.plan.neighbouring_relation == REPLACE_ONE, canaries.zero
    for number, name in enumerate(canaries.names):
        for k, size in enumerate(sizes):
            base = [(number + 3 * j) % half for j in range(min(size, half))]
            base = list(dict.fromkeys(base))
            places = (len(base), 0, len(base) // 2)
            row = places[(number + k) % 3]
            replaced: list[int] = []
            if replaces:
                replaced = [first + (number + 1 + k) % len(canaries.names)]
            elif subject.augment is not None and base and zero is not None:
                replaced = [first + zero]
            where = f"{name}, next to {len(base)}, row {row}"
            without = [*base[:row], *replaced, *base[row:]]
            yield where, without, [*base[:row], first + number, *base[row:]]
    control = list(range(min(5, half)))
    yield "control: equal batches", control, list(control)


def _chunks(subject: Subject, pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Yield lists of pairs that share two sessions.

    A metric that is made from past releases differs as soon as releases do. Each pair then has its
    own sessions.
    """
    preconditioner = subject.plan.config.preconditioner
    if preconditioner is None or not preconditioner.uses_past_releases:
        yield pairs
        return
    common: Pair = ("warm-up", [0, 1], [0, 1])
    for pair in pairs[:: max(1, len(pairs) // 50)]:
        yield [common, common, common, pair]


def _replay_pairs(
    subject: Subject, canaries: Canaries, pairs: list[Pair], micro: int | None, result: Replay
) -> Iterator[None]:
    """Run one pair after another, and add what they show to the result."""
    without = [pair[1] for pair in pairs]
    with_it = [pair[2] for pair in pairs]
    with (
        World(subject, canaries, without, micro) as one,
        World(subject, canaries, with_it, micro) as other,
    ):
        for name, _, _ in pairs:
            state = torch.get_rng_state()
            release = one.step(name, result)
            torch.set_rng_state(state)
            other_release = other.step(name, result)
            if release is not None and other_release is not None:
                _compare(one.session.plan, release, other_release, name, result)
            if one.session.digest != other.session.digest:
                result.metrics.append(name)
            if moved := one.session.differs_from(other.session):
                result.moved.append(f"{name} ('{moved}')")
            result.pairs += 1
            yield
            if one.is_stopped or other.is_stopped:
                return


class World:
    """One of two sessions that walk along the same weights, with checks of its releases.

    Args:
        subject: what is audited.
        canaries: among its examples.
        script: units of every batch.
        micro: rows of a micro-batch; None leaves the plan's own.
        still: keep the weights constant.
    """

    def __init__(
        self,
        subject: Subject,
        canaries: Canaries,
        script: Script,
        micro: int | None = None,
        *,
        still: bool = False,
    ) -> None:
        size = subject.size + len(canaries.names)
        plan = script_plan(subject.plan, script, size, seed=SEED, micro=micro)
        self.session, self.walk = canaries.open_session(subject, plan, still=still, verify=False)
        self.batches = self.session.batches()
        self.loss = canaries.loss(subject)
        self.is_stopped = False
        self._chain = PostprocessPipeline(plan.config.postprocess, plan.config.readout)
        self._preconditioner = plan.config.preconditioner
        self._past: Mapping[str, Tensor] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def step(self, name: str, result: Replay) -> Released | None:
        """Take one step, add departures to the result, and return the release."""
        session, charged = self.session, self.session.steps_done
        session.released.clear()
        try:
            session.step(next(self.batches), self.loss)
        except Exception as error:
            # An outsider sees that the step stopped, so every exception is a departure.
            result.uncounted.append(f"{name} ({type(error).__name__}: {error})")
            self.is_stopped = True
            return None
        if (len(session.released), session.steps_done - charged) != (1, 1):
            result.uncounted.append(name)
        if session.remaining_gradient:
            result.moved.append(f"{name} (a gradient of '{session.remaining_gradient}')")
        if not session.released:
            return None
        released = session.released[-1]
        if not self._follows_from(released):
            result.handed.append(name)
        return released

    def _follows_from(self, released: Released) -> bool:
        """Return whether the optimizer's gradients and the history follow from the release."""
        session = self.session
        update = self._chain.apply(released, session.metric, session.layers).gradients
        follows = _are_equal(self.walk.gradients, update)
        preconditioner = self._preconditioner
        if preconditioner is not None and preconditioner.uses_past_releases:
            self._past = preconditioner.observe(released, self._past)
            follows = follows and _are_equal(session.past, self._past)
        return follows


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(torch.equal(x, other[name].to(x.dtype)) for name, x in one.items())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance over all tensors together."""
    squares = 0.0
    for name, x in one.items():
        difference = x.double() - other[name].double()
        squares += float(difference.square().sum())
    return math.sqrt(squares)


def resolution(plan: Plan, gradients: Mapping[str, Tensor]) -> float:
    """Return how far rounding may move a release, in units of the sensitivity.

    The figure holds for sums of up to `max(SIZES)` units.
    """
    coarsest = max(torch.finfo(x.dtype).eps for x in gradients.values())
    count = sum(x.numel() for x in gradients.values())
    # Four sums, each rounded to a fraction of 2^-20.
    grid = 2.0**-18 if plan.noise == ROUNDED else 0.0
    return coarsest * (plan.noise_multiplier * math.sqrt(count) + max(SIZES)) + grid


def _compare(plan: Plan, one: Released, other: Released, name: str, result: Replay) -> None:
    """Add the distance of two releases to the result."""
    moved = distance(one.gradients, other.gradients) * plan.expected_batch_size / plan.sensitivity
    result.tolerance = max(result.tolerance, 1e-5 + resolution(plan, one.gradients))
    if name.startswith("control") or name == "warm-up":
        result.control = max(result.control, moved)
    elif not moved <= result.worst:
        # Negated, so that a distance that is not a number counts.
        result.worst = moved if math.isfinite(moved) else math.inf
        result.where = name


# -- the distinguishing test -----------------------------------------------------------------------
#
# The same batch is released many times under the secret noise stream, with a canary and without.
# The score of a release is learned from its components along two sets of directions. The first is
# the canary's own direction in every parameter group. The second is the same pattern, moved to
# where the noise looks most like itself: noise that two places share cancels there. The inverse of
# their covariance weighs the components. A quarter of the releases gives weights and threshold.
# Errors on the others bound μ of the trade-off curve from below. A release without sampling may
# have μ = 1 / noise_multiplier at most.

ALPHA, RUNS, BATCH = 1e-3, 1500, 4
SCANNED = 24  # releases that are searched for repetition
LAGS = 2  # distances with most repetition
Samples = NDArray[np.float64]


@dataclass(frozen=True)
class DistinguishingTest:
    """The bound of the distinguishing test.

    Attributes:
        mu_lower: lower bound of μ, at confidence 1 − alpha.
        mu_claimed: 1 / noise_multiplier.
        delta: at which both are converted to ε.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
    """

    mu_lower: float
    mu_claimed: float
    delta: float
    runs: int
    alpha: float = ALPHA

    def finding(self) -> Finding:
        """Return one line for the table of an audit."""
        lower = gaussian_epsilon(self.mu_lower, self.delta)
        claimed = gaussian_epsilon(self.mu_claimed, self.delta)
        return Finding(
            check="two worlds",
            measured=f"μ ≥ {self.mu_lower:.3f} (ε ≥ {lower:.2f} of one release without sampling)",
            bound=f"μ ≤ {self.mu_claimed:.3f} (ε ≤ {claimed:.2f} of one release without sampling)",
            passed=self.mu_lower <= self.mu_claimed,
            detail=f"{self.runs:,} releases a world, learned score, "
            f"wrong with probability {self.alpha:g} at most",
        )


def distinguish_neighbors(
    subject: Subject,
    canaries: Canaries | None = None,
    *,
    runs: int = RUNS,
    alpha: float = ALPHA,
    progress: Progress | None = None,
) -> DistinguishingTest:
    """Release a batch with and without a canary, `runs` times each, and bound μ.

    The metric of one refresh is used throughout, and the weights are constant. The canary is the
    one that moves a release farthest. If neighbours differ by replacement, it replaces
    "loss × -1e4".

    Args:
        subject: what is audited.
        canaries: by default all of `prepare_canaries`.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
        progress: called with (releases done, of all).
    """
    canaries = canaries or prepare_canaries(subject)
    base = list(range(min(BATCH, max(1, subject.size // 2))))
    without = base
    if subject.plan.neighbouring_relation == REPLACE_ONE:
        without = [*base, subject.size + canaries.names.index("loss × -1e4")]
    number, pattern = _find_farthest(subject, canaries, base, without)
    with_it = [*base, subject.size + number]
    lags = _find_lags(list(_release_samples(subject, canaries, [without] * SCANNED)))
    sizes = [p.numel() for p in subject.model().parameters() if p.requires_grad]
    directions = _make_directions(pattern, sizes, lags)
    scores = []
    for part, rows in enumerate((without, with_it)):
        components = []
        for k, sample in enumerate(_release_samples(subject, canaries, [rows] * runs)):
            components.append(directions @ sample)
            if progress is not None:
                progress(part * runs + k + 1, 2 * runs)
        scores.append(np.stack(components))
    first = runs // 4
    weights, threshold = _learn_discriminant(scores[0][:first], scores[1][:first])
    false_positives = int(np.sum(scores[0][first:] @ weights > threshold))
    false_negatives = int(np.sum(scores[1][first:] @ weights <= threshold))
    mu = gaussian_mu_lower(false_positives, runs - first, false_negatives, runs - first, alpha)
    claimed = 1 / subject.plan.noise_multiplier
    return DistinguishingTest(mu, claimed, subject.plan.delta, runs, alpha)


def _find_farthest(
    subject: Subject, canaries: Canaries, base: list[int], without: list[int]
) -> tuple[int, Samples]:
    """Return the canary that moves a release farthest under frozen noise, and the difference."""
    with_canary = [[*base, subject.size + number] for number in range(len(canaries.names))]
    ones = _release_samples(subject, canaries, [without] * len(with_canary), seed=SEED)
    others = _release_samples(subject, canaries, with_canary, seed=SEED)
    best, pattern = 0, np.zeros(0)
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        moved = np.nan_to_num(other - one)
        farthest = (1 + 1e-6) * np.linalg.norm(pattern)
        if not pattern.size or np.linalg.norm(moved) > farthest:
            best, pattern = number, moved
    return best, pattern


def _release_samples(
    subject: Subject, canaries: Canaries, script: Sequence[list[int]], seed: int | None = None
) -> Iterator[Samples]:
    """Yield releases over the standard deviation of their noise, all at the same weights."""
    frozen = freeze_preconditioner(subject.plan)
    plan = script_plan(frozen, script, subject.size + len(canaries.names), seed=seed)
    session, walk = canaries.open_session(subject, plan, verify=False, still=True)
    loss = canaries.loss(subject)
    with session:
        for batch in session.batches():
            session.step(batch, loss)
            walk.gradients.clear()
            yield standardize(session.take(), plan.stddev / plan.expected_batch_size)


def _find_lags(samples: Sequence[Samples]) -> list[int]:
    """Return the distances at which releases correlate with themselves most.

    Without a fault they are arbitrary.
    """
    centred = np.stack(samples) - np.mean(samples, 0)
    size = centred.shape[1]
    length = 1 << (2 * size - 1).bit_length()
    spectra = np.abs(np.fft.rfft(centred, length))
    total = np.fft.irfft(np.square(spectra).sum(0), length)[1:size]
    pairs = np.arange(size - 1, 0, -1)
    scores = np.abs(total) / np.sqrt(pairs)
    largest = np.argsort(scores)[::-1][:LAGS]
    return [int(index) + 1 for index in largest]


def _make_directions(pattern: Samples, sizes: list[int], lags: Sequence[int]) -> Samples:
    """Return unit vectors `[k, d]`.

    They hold the pattern in each group of parameters, and the pattern as far as it can be moved by
    a lag, in its place and moved.
    """
    d = pattern.size
    directions = []
    ends = np.cumsum(sizes) if sum(sizes) == d else np.array([d])
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        directions.append(_restrict(pattern, slice(start, end)))
    for lag in lags:
        beginning, end = _restrict(pattern, slice(0, d - lag)), _restrict(pattern, slice(lag, d))
        directions += [beginning, np.roll(beginning, lag)]
        directions += [end, np.roll(end, -lag)]
    norms = [np.linalg.norm(x) for x in directions]
    largest = max(norms)
    kept = []
    for x, length in zip(directions, norms, strict=True):
        if length > 1e-9 * largest:
            kept.append(x / length)
    return np.stack(kept)


def _restrict(pattern: Samples, places: slice) -> Samples:
    """Return the pattern with zeros outside some places."""
    part = np.zeros(pattern.size)
    part[places] = pattern[places]
    return part


def _learn_discriminant(without: Samples, with_it: Samples) -> tuple[Samples, float]:
    """Return Fisher's linear discriminant `[k]`, and the middle between the two means."""
    covariance = np.atleast_2d((np.cov(without.T) + np.cov(with_it.T)) / 2)
    ridge = 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    mean_without, mean_with = without.mean(0), with_it.mean(0)
    weights = np.linalg.solve(covariance + ridge, mean_with - mean_without)
    return weights, float(weights @ (mean_with + mean_without) / 2)
