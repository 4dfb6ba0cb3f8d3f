"""Run the step that ships on two neighbouring batches with the same frozen noise.

The difference of the two releases is what one example can change. Times the divisor it may not
exceed the sensitivity of the plan. The noise stays on, so noise whose size or place follows the
data shows as well. Two sessions walk along the same weights. Step by step they take a batch S,
and S with one canary more. (If neighbours differ by replacement, the canary replaces an example.)
Replay also checks that

    the metric is the same for both batches,
    weights and buffers are the same for both, because the optimizer follows its own path,
    what the optimizer gets follows from the release alone,
    each step makes exactly one release and one charge, also on an empty batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkfc.audit.findings import Finding, select_failed
from dpkfc.audit.harness import Progress, Script, Subject, coarsest_spacing, ignore_progress
from dpkfc.audit.step_canaries import Canaries, make_canaries
from dpkfc.config import Plan
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.federated.sums import total_norm
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.grid import ROUNDED
from dpkfc.privacy.mechanism import Released

SIZES = (0, 1, 3, 7, 16)  # of the batch that a canary joins
SEED = 20_240_607
# The units of a batch, and of the batches of a script.
Units = list[int]
Batches = list[Units]
Sums = dict[str, Tensor]
# A name, the units of a batch, and the units of its neighbour.
Pair = tuple[str, Units, Units]


@dataclass
class Worst:
    """The largest distance that a check has seen, in units of the sensitivity.

    Attributes:
        worst: the distance; infinite for one that is not finite.
        where: its place.
        tolerance: what rounding may add.
    """

    worst: float = 0.0
    where: str = ""
    tolerance: float = 0.0

    def note(self, moved: float, where: str, tolerance: float) -> None:
        """Take one more distance."""
        self.tolerance = max(self.tolerance, tolerance)
        # Negated, so that a distance that is not a number counts.
        if not moved <= self.worst:
            self.worst = moved if math.isfinite(moved) else math.inf
            self.where = where


@dataclass
class Replay(Worst):
    """The result of the replays.

    Attributes:
        pairs: neighbouring batches compared.
        control: largest distance of equal batches, which must be 0.
        metrics: pairs whose metric differed.
        moved: pairs whose weights or buffers differed afterwards.
        handed: pairs whose optimizer got something that does not follow from the release.
        uncounted: pairs that did not make one release and one charge.
    """

    pairs: int = 0
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
    canaries: Canaries,
    *,
    sizes: Sequence[int] | None = None,
    until_failed: bool = False,
    progress: Progress = ignore_progress,
) -> Replay:
    """Run all pairs, then part of them again in the smallest micro-batches.

    Args:
        subject: what is audited.
        canaries: of `prepare_canaries`, or some of them.
        sizes: of the batches that canaries join.
        until_failed: stop at the first check that does not hold.
        progress: called with (pairs done, of all).

    Raises:
        ValueError: the forward pass is random, so two runs cannot be compared.
    """
    result = Replay()
    pairs = list(_neighbouring_pairs(subject, canaries, sizes or SIZES))
    # In random order, refreshes of the metric meet canaries and sizes of all kinds.
    random.Random(SEED).shuffle(pairs)
    repeated = pairs[:: max(1, len(pairs) // 40)]
    total = len(pairs) + len(repeated)
    for micro, chosen in ((None, pairs), (subject.fewest_rows, repeated)):
        for _ in _replay_pairs(subject, canaries, chosen, micro, result):
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
    """Yield a name, the units of a batch, and the units of its neighbour.

    If examples are augmented at random, a unit without a loss takes the canary's place in the
    first batch. The same random numbers then change the examples that both batches share. The
    canary is in the last, the first or the middle row: a step that mixes one half of a batch into
    the other changes different rows for each.
    """
    first = subject.size
    half = max(1, subject.size // 2)
    replaces = subject.plan.neighbouring_relation == REPLACE_ONE
    zero = canaries.zero
    for number, name in enumerate(canaries.names):
        for k, size in enumerate(sizes):
            units = [(number + 3 * j) % half for j in range(min(size, half))]
            base = list(dict.fromkeys(units))
            places = three_places(base)
            row = places[(number + k) % 3]
            without = base
            if replaces:
                replaced = (number + 1 + k) % len(canaries.names)
                without = insert_unit(base, row, first + replaced)
            elif subject.augment is not None and base and zero is not None:
                without = insert_unit(base, row, first + zero)
            where = f"{name}, next to {len(base)}, row {row}"
            yield where, without, insert_unit(base, row, first + number)
    control = first_units(subject, 5)
    yield "control: equal batches", control, list(control)


def three_places(rows: Sequence[int]) -> tuple[int, int, int]:
    """Return where a unit joins a batch: in the last, the first or the middle row."""
    return len(rows), 0, len(rows) // 2


def first_units(subject: Subject, most: int) -> Units:
    """Return up to so many units of the first half of the examples."""
    half = max(1, subject.size // 2)
    return list(range(min(most, half)))


def insert_unit(rows: Units, place: int, unit: int) -> Units:
    """Return the rows with one more unit at a place."""
    return [*rows[:place], unit, *rows[place:]]


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
            moved = one.session.differs_from(other.session)
            if moved:
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
        self.session, self.walk = canaries.open_session(
            subject, script, seed=SEED, micro=micro, still=still
        )
        self.batches = self.session.batches()
        self.loss = canaries.loss(subject)
        self.is_stopped = False
        config = subject.plan.config
        self._chain = PostprocessPipeline(config.postprocess, config.readout)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def step(self, name: str, result: Replay) -> Released | None:
        """Take one step, add departures to the result, and return the release."""
        session = self.session
        charged = session.steps_done
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
        """Return whether the optimizer's gradients follow from the release."""
        session = self.session
        update = self._chain.apply(released, session.metric, session.layers)
        return _are_equal(self.walk.gradients, update.gradients)


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if one.keys() != other.keys():
        return False
    for name, x in one.items():
        y = other[name].to(x.dtype)
        if not torch.equal(x, y):
            return False
    return True


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance over all tensors together."""
    return total_norm(subtract(one, other))


def subtract(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Sums:
    """Return the differences of tensors of the same names, in float64."""
    return {name: x.double() - other[name].double() for name, x in one.items()}


def resolution(plan: Plan, gradients: Mapping[str, Tensor]) -> float:
    """Return how far rounding may move a release, in units of the sensitivity.

    The figure holds for sums of up to `max(SIZES)` units.
    """
    count = sum(x.numel() for x in gradients.values())
    noise = plan.noise_multiplier * math.sqrt(count)
    rounding = coarsest_spacing(gradients.values()) * (noise + max(SIZES))
    if plan.noise == ROUNDED:
        # Four sums, each rounded to a fraction of 2^-20.
        rounding += 2.0**-18
    return rounding


def _compare(
    plan: Plan,
    one: Released,
    other: Released,
    name: str,
    result: Replay,
) -> None:
    """Add the distance of two releases to the result."""
    unit = plan.expected_batch_size / plan.sensitivity
    moved = unit * distance(one.gradients, other.gradients)
    if name.startswith("control"):
        result.control = max(result.control, moved)
        moved = 0.0
    result.note(moved, name, 1e-5 + resolution(plan, one.gradients))
