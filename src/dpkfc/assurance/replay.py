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

import torch
from torch import Tensor

from dpkfc.assurance.canaries import Canaries, make_canaries
from dpkfc.assurance.subject import Script, Subject, scripted, watched
from dpkfc.assurance.verdict import Finding, failed
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.plan import Plan
from dpkfc.postprocess.chain import Chain
from dpkfc.privacy.grid import ROUNDED
from dpkfc.privacy.mechanism import Released

__all__ = ["SIZES", "Replay", "World", "distance", "prepared_canaries", "replay", "resolution"]

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
    if not hasattr(subject.plan.config.preconditioner, "observe"):
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
        self._chain = Chain(plan.config.postprocess, plan.config.readout)
        self._observe = getattr(plan.config.preconditioner, "observe", None)
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
        if self._observe is not None:
            self._past = self._observe(released, self._past)
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
