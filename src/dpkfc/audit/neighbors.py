"""Neighbour replay: the step that ships, run on two neighbouring batches with the same frozen noise.

What the two releases differ by is what one example can change; times the divisor it may not exceed the sensitivity of the
plan. The noise stays on, so that noise whose size or place follows the data shows as well. Two sessions walk side by side
along the same weights and take, step by step, a batch S and S with one canary more (or one canary in the place of an
example, where that is what neighbours are). Beside the distance it is checked that

    the metric is the same in both worlds,
    weights and buffers are the same in both worlds, although the data are not: the optimizer walks a path of its own,
    what the optimizer, and a preconditioner made from past releases, is handed follows from the release alone,
    each step makes exactly one release and one charge, also on an empty batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.audit.attacks import gaussian_epsilon, gaussian_mu_lower
from dpkfc.audit.canaries import Canaries, make_canaries
from dpkfc.audit.harness import Finding, Script, Subject, failed, scripted, unmoved, watched
from dpkfc.audit.statistics import standardised
from dpkfc.config import Plan
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.mechanism import ROUNDED, Released

SIZES = (0, 1, 3, 7, 16)  # of the batch that a canary joins
SEED = 20_240_607
Pair = tuple[str, list[int], list[int]]


@dataclass
class Replay:
    """What the replays came to.

    Attributes:
        pairs: neighbouring batches compared.
        worst: largest distance over sensitivity, and the pair it was found at.
        tolerance: what rounding may add to 1.
        control: largest distance of equal batches, which must be 0.
        metrics, moved, handed, uncounted: pairs whose metric differed, whose weights or buffers differed afterwards, whose
            optimizer was handed something that does not follow from the release, and that did not make one release and one
            charge.
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
        """One line a check."""
        return [
            Finding(
                check="sensitivity",
                measured=f"{self.worst:.6f} × sensitivity",
                bound=f"at most 1 + {self.tolerance:.1e}",
                passed=self.worst <= 1 + self.tolerance,
                detail=f"{self.pairs} neighbouring batches under frozen noise; worst: {self.where}",
            ),
            _none("metric", self.metrics, "the metric is the same for neighbouring data"),
            _none("weights", self.moved, "nothing but releases moves weights and buffers, and no gradient stays behind"),
            _none("hand-over", self.handed, "what the optimizer is handed follows from the release alone"),
            _none("one release and one charge a step", self.uncounted, "every batch, the empty one included"),
        ]


def _none(check: str, where: Sequence[str], detail: str) -> Finding:
    worst = f"; first: {where[0]}" if where else ""
    return Finding(
        check=check, measured=f"{len(where)} departures", bound="none", passed=not where, detail=detail + worst
    )


def prepared_canaries(subject: Subject) -> Canaries:
    """Canaries for the metric that the subject's first step would use."""
    empty = Canaries()
    empty.add("none", tuple(x[0] for x in subject.dataset))
    with World(subject, empty, [[]]) as world:
        world.session.step(next(world.batches), world.loss)
        return make_canaries(subject, world.session.layers, world.session.metric)


def replay(
    subject: Subject,
    canaries: Canaries | None = None,
    *,
    sizes: Sequence[int] | None = None,
    until_failed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Run all pairs, the whole list in one go, and part of it again in the smallest micro-batches.

    Args:
        subject: what is audited.
        canaries: by default all there are.
        sizes: of the batches that they join.
        until_failed: stop at the first check that does not hold.
        progress: called with (pairs done, of all).

    Raises:
        ValueError: the forward pass is random, so that two runs cannot be compared.
    """
    canaries = canaries or prepared_canaries(subject)
    found = Replay()
    pairs = list(_pairs(subject, canaries, SIZES if sizes is None else sizes))
    random.Random(SEED).shuffle(pairs)  # refreshes of the metric then meet canaries and sizes of all kinds
    some = pairs[:: max(1, len(pairs) // 40)]
    total = len(pairs) + len(some)
    for micro, chosen in ((None, pairs), (subject.fewest_rows, some)):
        for chunk in _chunks(subject, chosen):
            for _ in _walk_through(subject, canaries, chunk, micro, found):
                if progress is not None:
                    progress(found.pairs, total)
                if until_failed and failed(found.findings()):
                    return found
    if found.control > found.tolerance and not (found.moved or found.metrics or found.uncounted):
        raise ValueError(
            f"two runs on the same batch differ by {found.control:.2g} × sensitivity although the noise is frozen: the forward "
            "pass is random (functional dropout?). Switch that off in the model that is audited"
        )
    return found


def _pairs(subject: Subject, canaries: Canaries, sizes: Sequence[int]) -> Iterator[Pair]:
    """(name, units of the one batch, units of the other).

    Where examples are augmented at random, a unit without a loss stands in the canary's place in the one batch, so that the
    examples that both share are changed by the same random numbers. The canary is in the last, the first or the middle row:
    a step that mixes one half of a batch into the other changes different rows for each.
    """
    first, half = subject.size, max(1, subject.size // 2)
    replaces, zero = subject.plan.neighbouring_relation == REPLACE_ONE, canaries.zero
    for number, name in enumerate(canaries.names):
        for k, size in enumerate(sizes):
            base = [(number + 3 * j) % half for j in range(min(size, half))]
            base = list(dict.fromkeys(base))
            other = first + (number + 1 + k) % len(canaries.names)
            rest = [other] if replaces else []
            if subject.augment is not None and base and zero is not None and not replaces:
                rest = [first + zero]
            row = (len(base), 0, len(base) // 2)[(number + k) % 3]
            where = f"{name}, beside {len(base)}, row {row}"
            yield where, [*base[:row], *rest, *base[row:]], [*base[:row], first + number, *base[row:]]
    yield "control: equal batches", list(range(min(5, half))), list(range(min(5, half)))


def _chunks(subject: Subject, pairs: list[Pair]) -> Iterator[list[Pair]]:
    """A metric that is made from past releases differs once releases do: there each pair has sessions of its own."""
    preconditioner = subject.plan.config.preconditioner
    if preconditioner is None or not preconditioner.uses_past_releases:
        yield pairs
        return
    common: Pair = ("warm-up", [0, 1], [0, 1])
    for pair in pairs[:: max(1, len(pairs) // 50)]:
        yield [common, common, common, pair]


def _walk_through(
    subject: Subject, canaries: Canaries, pairs: list[Pair], micro: int | None, found: Replay
) -> Iterator[None]:
    """One pair after another; `found` takes what they show."""
    scripts = ([one for _, one, _ in pairs], [other for _, _, other in pairs])
    with World(subject, canaries, scripts[0], micro) as one, World(subject, canaries, scripts[1], micro) as other:
        for name, _, _ in pairs:
            state = torch.get_rng_state()
            taken = [one.step(name, found)]
            torch.set_rng_state(state)
            taken.append(other.step(name, found))
            if taken[0] is not None and taken[1] is not None:
                _compare(one.session.plan, taken[0], taken[1], name, found)
            if one.session.digest != other.session.digest:
                found.metrics.append(name)
            moved = one.session.differs_from(other.session)
            if moved:
                found.moved.append(f"{name} ('{moved}')")
            found.pairs += 1
            yield
            if one.stopped or other.stopped:
                return


class World:
    """One of two sessions that walk side by side, and what follows from its releases.

    Args:
        subject: what is audited.
        canaries: among its examples.
        script: units of every batch.
        micro: rows of a micro-batch; None leaves the plan's own.
        still: the weights stay where they are.
    """

    def __init__(
        self, subject: Subject, canaries: Canaries, script: Script, micro: int | None = None, *, still: bool = False
    ) -> None:
        size = subject.size + len(canaries.names)
        plan = scripted(subject.plan, script, size, seed=SEED, micro=micro)
        self.session, self.walk = watched(
            subject, plan, canaries.dataset(subject), still=still, units=canaries.units(subject), verify=False
        )
        self.batches, self.loss, self.stopped = self.session.batches(), canaries.loss(subject), False
        self._chain = PostprocessPipeline(plan.config.postprocess, plan.config.readout)
        self._preconditioner = plan.config.preconditioner
        self._past: Mapping[str, Tensor] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def step(self, name: str, found: Replay) -> Released | None:
        """One step and its release, once it is known that what is handed over follows from it."""
        session, charged = self.session, self.session.steps_done
        session.released.clear()
        try:
            session.step(next(self.batches), self.loss)
        except Exception as error:  # that it stopped is seen from outside
            found.uncounted.append(f"{name} ({type(error).__name__}: {error})")
            self.stopped = True
            return None
        if (len(session.released), session.steps_done - charged) != (1, 1):
            found.uncounted.append(name)
        if session.left_behind:
            found.moved.append(f"{name} (a gradient of '{session.left_behind}')")
        if not session.released:
            return None
        released = session.released[-1]
        if not self._follows(released):
            found.handed.append(name)
        return released

    def _follows(self, released: Released) -> bool:
        update = self._chain.apply(released, self.session.metric, self.session.layers).gradients
        followed = _equal(self.walk.handed, update)
        if self._preconditioner is not None and self._preconditioner.uses_past_releases:
            self._past = self._preconditioner.observe(released, self._past)
            followed = followed and _equal(self.session.past, self._past)
        return followed


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name].to(x.dtype)) for name, x in one.items())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Euclidean, over all tensors together."""
    return math.sqrt(sum(float((x.double() - other[name].double()).square().sum()) for name, x in one.items()))


def resolution(plan: Plan, gradients: Mapping[str, Tensor]) -> float:
    """What rounding may move a release by, in units of the sensitivity, for sums of up to `SIZES` units."""
    coarsest = max(torch.finfo(x.dtype).eps for x in gradients.values())
    count = sum(x.numel() for x in gradients.values())
    grid = 2.0**-18 if plan.noise == ROUNDED else 0.0  # four sums, each rounded to a share of 2^-20
    return coarsest * (plan.noise_multiplier * math.sqrt(count) + max(SIZES)) + grid


def _compare(plan: Plan, one: Released, other: Released, name: str, found: Replay) -> None:
    far = distance(one.gradients, other.gradients) * plan.expected_batch_size / plan.sensitivity
    found.tolerance = max(found.tolerance, 1e-5 + resolution(plan, one.gradients))
    if name.startswith("control") or name == "warm-up":
        found.control = max(found.control, far)
    elif not far <= found.worst:  # also where it is not a number
        found.worst, found.where = (far if math.isfinite(far) else math.inf), name


# --------------------------------------------------------------------------------------------------
# Two worlds: how well does anything tell releases with one more example from releases without it?
#
# The same batch is released many times under the secret noise stream, with a canary and without.
# The score of a release is learned: its components along the canary's own direction in every
# parameter group, and along the same pattern moved to where the noise looks most like itself (noise
# that is shared between places cancels there), weighed by the inverse of their covariance. Weights
# and threshold are learned on a quarter of the releases; errors on the others bound μ of the
# trade-off curve from below. A release without sampling may have μ = 1 / noise_multiplier at most.

ALPHA, RUNS, BATCH = 1e-3, 1500, 4
LOOKED, LAGS = 24, 2  # releases in which repetition is looked for; distances that are tried
Samples = NDArray[np.float64]


@dataclass(frozen=True)
class TwoWorlds:
    """What the scores say.

    Attributes:
        mu_lower: lower bound of μ, at confidence 1 − alpha.
        mu_claimed: 1 / noise_multiplier.
        delta: at which both are turned into ε.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
    """

    mu_lower: float
    mu_claimed: float
    delta: float
    runs: int
    alpha: float = ALPHA

    def finding(self) -> Finding:
        """As a line of the verdict."""
        lower, claimed = (gaussian_epsilon(mu, self.delta) for mu in (self.mu_lower, self.mu_claimed))
        return Finding(
            check="two worlds",
            measured=f"μ ≥ {self.mu_lower:.3f} (ε ≥ {lower:.2f} of one release without sampling)",
            bound=f"μ ≤ {self.mu_claimed:.3f} (ε ≤ {claimed:.2f} of one release without sampling)",
            passed=self.mu_lower <= self.mu_claimed,
            detail=f"{self.runs:,} releases a world, learned score, wrong with probability {self.alpha:g} at most",
        )


def two_worlds(
    subject: Subject,
    canaries: Canaries | None = None,
    *,
    runs: int = RUNS,
    alpha: float = ALPHA,
    progress: Callable[[int, int], None] | None = None,
) -> TwoWorlds:
    """Release a batch with and without a canary, `runs` times each, and bound μ.

    The metric of one refresh is used throughout, and the weights stay where they are.

    Args:
        subject: what is audited.
        canaries: by default all there are; the one that moves a release farthest is used, in the place of "loss × -1e4" where
            neighbours are examples replaced.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
        progress: called with (releases done, of all).
    """
    canaries = canaries or prepared_canaries(subject)
    base = list(range(min(BATCH, max(1, subject.size // 2))))
    replaces = subject.plan.neighbouring_relation == REPLACE_ONE
    without = [*base, subject.size + canaries.names.index("loss × -1e4")] if replaces else base
    number, pattern = _farthest(subject, canaries, base, without)
    with_it = [*base, subject.size + number]
    views = _views(pattern, _groups(subject), _lags(list(_releases(subject, canaries, [without] * LOOKED))))
    scores = []
    for part, rows in enumerate((without, with_it)):
        found = []
        for k, z in enumerate(_releases(subject, canaries, [rows] * runs)):
            found.append(views @ z)
            if progress is not None:
                progress(part * runs + k + 1, 2 * runs)
        scores.append(np.stack(found))
    first = runs // 4
    direction, threshold = _learned(scores[0][:first], scores[1][:first])
    false_positives = int(np.sum(scores[0][first:] @ direction > threshold))
    false_negatives = int(np.sum(scores[1][first:] @ direction <= threshold))
    mu = gaussian_mu_lower(false_positives, runs - first, false_negatives, runs - first, alpha)
    return TwoWorlds(mu, 1 / subject.plan.noise_multiplier, subject.plan.delta, runs, alpha)


def _farthest(subject: Subject, canaries: Canaries, base: list[int], without: list[int]) -> tuple[int, Samples]:
    """The canary that moves a release farthest, and by what, under frozen noise."""
    others = [[*base, subject.size + number] for number in range(len(canaries.names))]
    worlds = [_releases(subject, canaries, script, seed=SEED) for script in ([without] * len(others), others)]
    best, pattern = 0, np.zeros(0)
    for number, (one, other) in enumerate(zip(*worlds, strict=True)):
        moved = np.nan_to_num(other - one)
        if not pattern.size or np.linalg.norm(moved) > (1 + 1e-6) * np.linalg.norm(pattern):
            best, pattern = number, moved
    return best, pattern


def _releases(
    subject: Subject, canaries: Canaries, script: Sequence[list[int]], seed: int | None = None
) -> Iterator[Samples]:
    """Releases over the standard deviation of their noise, all at the same weights."""
    plan = scripted(unmoved(subject.plan), script, subject.size + len(canaries.names), seed=seed)
    session, walk = watched(
        subject, plan, canaries.dataset(subject), units=canaries.units(subject), verify=False, still=True
    )
    loss = canaries.loss(subject)
    with session:
        for batch in session.batches():
            session.step(batch, loss)
            walk.handed.clear()
            yield standardised(session.take(), plan.stddev / plan.expected_batch_size)


def _groups(subject: Subject) -> list[int]:
    return [p.numel() for p in subject.model().parameters() if p.requires_grad]


def _lags(drawn: Sequence[Samples]) -> list[int]:
    """The distances at which releases correlate with themselves most; of honest noise any."""
    centred = np.stack(drawn) - np.mean(drawn, 0)
    size = centred.shape[1]
    length = 1 << (2 * size - 1).bit_length()
    total = np.fft.irfft(np.square(np.abs(np.fft.rfft(centred, length))).sum(0), length)[1:size]
    scores = np.abs(total) / np.sqrt(np.arange(size - 1, 0, -1))
    return [int(lag) + 1 for lag in np.argsort(scores)[::-1][:LAGS]]


def _views(pattern: Samples, sizes: list[int], lags: Sequence[int]) -> Samples:
    """Unit vectors `[k, d]`: the pattern in each group of parameters, and as far as it can be moved, in its place and moved."""
    d, found = pattern.size, []
    ends = np.cumsum(sizes) if sum(sizes) == d else np.array([d])
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = np.zeros(d)
        part[start:end] = pattern[start:end]
        found.append(part)
    for lag in lags:
        for kept, way in ((slice(0, d - lag), lag), (slice(lag, d), -lag)):
            part = np.zeros(d)
            part[kept] = pattern[kept]
            found += [part, np.roll(part, way)]
    lengths = [np.linalg.norm(x) for x in found]
    most = max(lengths)
    return np.stack([x / n for x, n in zip(found, lengths, strict=True) if n > 1e-9 * most])


def _learned(without: Samples, with_it: Samples) -> tuple[Samples, float]:
    """Fisher's linear discriminant `[k]` and the middle between the two means."""
    covariance = np.atleast_2d((np.cov(without.T) + np.cov(with_it.T)) / 2)
    ridge = 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    direction = np.linalg.solve(covariance + ridge, with_it.mean(0) - without.mean(0))
    return direction, float(direction @ (with_it.mean(0) + without.mean(0)) / 2)
