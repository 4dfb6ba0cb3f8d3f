"""Audits from outside a training: of one step, white-box, and of federated clients and servers.

The audit of a step checks charges, checkpoints, the step on neighbouring batches and on batches of
many sizes, and whether two worlds can be distinguished.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from dpkfc import checkpoint
from dpkfc.audit.attacks import gaussian_mu_lower
from dpkfc.audit.canaries import Canaries, make_canaries
from dpkfc.audit.harness import (
    Finding,
    Progress,
    Script,
    Subject,
    WatchedSession,
    check_accounting,
    coarsest_spacing,
    first_difference,
    ignore_progress,
    select_failed,
)
from dpkfc.audit.statistics import (
    autocorrelate,
    check_low_bits,
    check_noise,
    check_run_noise,
    check_sampler,
    standardize,
)
from dpkfc.config import Plan
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.distributed.context import flatten
from dpkfc.federated.messages import Message, add_prefix, select_prefix, total_norm
from dpkfc.federated.plan import FederatedPlan
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.accounting import event_to_dict
from dpkfc.privacy.integration import gaussian_epsilon
from dpkfc.privacy.ledger import LedgerError, verify
from dpkfc.privacy.mechanism import Released
from dpkfc.privacy.releases import ROUNDED

# -- neighbour replay ------------------------------------------------------------------------------
#
# Neighbour replay runs the step that ships on two neighbouring batches with the same frozen noise.
# The difference of the two releases is what one example can change. Times the divisor it may not
# exceed the sensitivity of the plan. The noise stays on, so noise whose size or place follows the
# data shows as well. Two sessions walk along the same weights. Step by step they take a batch S,
# and S with one canary more. (If neighbours differ by replacement, the canary replaces an example.)
# Replay also checks that
#
#     the metric is the same for both batches,
#     weights and buffers are the same for both, because the optimizer follows its own path,
#     what the optimizer gets follows from the release alone,
#     each step makes exactly one release and one charge, also on an empty batch.

SIZES = (0, 1, 3, 7, 16)  # of the batch that a canary joins
SEED = 20_240_607
# The units of a batch, and of the batches of a script.
Units = list[int]
Batches = list[Units]
Sums = dict[str, Tensor]
# A name, the units of a batch, and those of its neighbour.
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
    """Yield a name, the units of a batch, and those of its neighbour.

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
            places = _three_places(base)
            row = places[(number + k) % 3]
            without = base
            if replaces:
                replaced = (number + 1 + k) % len(canaries.names)
                without = _insert(base, row, first + replaced)
            elif subject.augment is not None and base and zero is not None:
                without = _insert(base, row, first + zero)
            where = f"{name}, next to {len(base)}, row {row}"
            yield where, without, _insert(base, row, first + number)
    control = _first_units(subject, 5)
    yield "control: equal batches", control, list(control)


def _three_places(rows: Sequence[int]) -> tuple[int, int, int]:
    """Return where a unit joins a batch: in the last, the first or the middle row."""
    return len(rows), 0, len(rows) // 2


def _first_units(subject: Subject, most: int) -> Units:
    """Return up to so many units of the first half of the examples."""
    half = max(1, subject.size // 2)
    return list(range(min(most, half)))


def _insert(rows: Units, place: int, unit: int) -> Units:
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
    return total_norm(_subtract(one, other))


def _subtract(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Sums:
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
    if name.startswith("control") or name == "warm-up":
        result.control = max(result.control, moved)
        moved = 0.0
    result.note(moved, name, 1e-5 + resolution(plan, one.gradients))


# -- charges and releases --------------------------------------------------------------------------


def check_charges(subject: Subject) -> list[Finding]:
    """Check the order of charge and release, and the ledger after every step.

    A few steps run, and the ledger is read from the disk after each. Then a charge fails, and
    nothing may get out.
    """
    canaries = Canaries()
    canaries.add("as it is", subject.example(0))
    script = [[0, subject.size], [], [0], [0, subject.size]]
    loss = canaries.loss(subject)
    late = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        session, walk = canaries.open_session(subject, [*script, [0]], ledger_path=path)
        with session:
            batches = session.batches()
            for step, _ in enumerate(script):
                session.step(next(batches), loss)
                is_equal = _count_charges(path) == len(session.released) == step + 1
                if not is_equal and not late:
                    late = f", not equal behind step {step}"
            walk.gradients = {}
            leak = _step_without_ledger(session, next(batches), loss)
            if not leak and walk.gradients:
                leak = "the optimizer was handed something"
        charges = verify(path).releases
    is_stated = all(_states_plan(charge, subject.plan) for charge in charges)
    is_complete = len(charges) == len(session.released) == len(script)
    return [
        Finding(
            check="ledger",
            measured=f"{len(charges)} charges for {len(session.released)} releases{late}",
            bound="equal after every step, with the plan's event and noise",
            passed=is_complete and not late and is_stated,
            detail="read back from the file while it was written, hash chain verified",
        ),
        Finding(
            check="charge before release",
            measured=leak or "nothing got out",
            bound="nothing gets out",
            passed=not leak,
            detail="a step whose charge cannot be written",
        ),
    ]


def _states_plan(charge: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a charge has the event and the noise of a plan."""
    return (
        math.isclose(charge["stddev"], plan.stddev)
        and math.isclose(charge["noise_multiplier"], plan.noise_multiplier)
        and charge["event"] == event_to_dict(plan.event)
    )


def _count_charges(path: Path) -> int:
    """Count the releases that a process would find in the file after a crash."""
    try:
        return len(verify(path).releases)
    except LedgerError:
        return 0


class _FullDisk:
    """A ledger whose charge fails as on a full disk."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def charge(self, *args: Any, **kwargs: Any) -> int:
        raise LedgerError("the disk is full (audit)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


def _step_without_ledger(session: WatchedSession, batch: Any, loss: Any) -> str:
    """Return what a step did although it could not be charged, "" if it did nothing."""
    releases = len(session.released)
    draws = session.noise_draws
    ledger = session.ledger
    session._pipeline.ledger = _FullDisk(ledger)  # type: ignore[assignment]
    try:
        session.step(batch, loss)
    except LedgerError:
        if len(session.released) > releases:
            return "a release got out"
        return "noise was drawn" if session.noise_draws > draws else ""
    finally:
        session._pipeline.ledger = ledger
    return "a release got out"


# -- checkpoints -----------------------------------------------------------------------------------
#
# A checkpoint says nothing about the data that the releases do not say. Two sessions walk along the
# same weights over different examples. Post-processing is off, because its state is made of
# releases. Then the checkpoints of both must be equal to the bit.

STEPS = 3
# The time at which a ledger began, and the state of the repeatable mode.
IGNORED = ("ledger_head", "torch_rng")


def check_checkpoints(subject: Subject) -> Finding:
    """Compare the checkpoints of two sessions over different examples."""
    canaries = Canaries()
    canaries.add("loss × 1e4", subject.example(-1), 1e4)
    rows = _first_units(subject, 4)
    state = torch.get_rng_state()
    contents = []
    for batch in (rows, [*rows[1:], subject.size]):
        torch.set_rng_state(state)
        script = [batch] * STEPS
        with (
            tempfile.TemporaryDirectory() as folder,
            World(subject.bare, canaries, script) as world,
        ):
            for _ in script:
                world.session.step(next(world.batches), world.loss)
            world.session.save(f"{folder}/checkpoint")
            tensors, meta = checkpoint.read(f"{folder}/checkpoint")
        meta = {name: x for name, x in meta.items() if name not in IGNORED}
        contents.append({"tensors": tensors, "meta": meta})
    where = first_difference(contents[0], contents[1])
    return Finding(
        check="checkpoint",
        measured=f"'{where}' differs" if where else "equal to the bit",
        bound="equal for different data and equal weights",
        passed=not where,
        detail=f"after {STEPS} steps, without post-processing",
    )


# -- changes of a sum under frozen noise -----------------------------------------------------------

# Units of rounding by which a contribution may follow the order of summation.
ROUNDING = 2.0**13


@dataclass(frozen=True)
class _Change:
    """The difference of two releases under frozen noise, in units of the sensitivity.

    Attributes:
        sums: the difference, by parameter.
        rounding: relative spacing of the coarsest type of the release.
        resolution: how far rounding may move a release.
    """

    sums: Sums
    rounding: float
    resolution: float

    def tolerance_of_shares(self) -> float:
        """Return the tolerance of one contribution among others."""
        return ROUNDING * self.rounding + 2 * self.resolution

    def tolerance_of_equal_sizes(self, rows: int) -> float:
        """Return the tolerance of batches that have the same number of rows."""
        return 1e-5 + 4 * rows * self.rounding + 3 * self.resolution

    def tolerance_of_sizes(self, rows: int) -> float:
        """Return the tolerance of batches of different sizes.

        Their passes may take different kernels, which round each contribution differently.
        """
        factor = max(1.0, rows / max(SIZES))
        return factor * (ROUNDING * self.rounding + 3 * self.resolution)


def _release_changes(
    subject: Subject,
    canaries: Canaries,
    script: Batches,
    other_script: Batches,
    departures: Replay,
) -> Iterator[_Change | None]:
    """Yield by how much each batch of the second script differs from that of the first.

    Weights and metric are constant. Every batch has the same random numbers (augmentation).

    Args:
        subject: what is audited.
        canaries: among its examples.
        script: units of every batch.
        other_script: units of as many other batches.
        departures: takes the steps that made no release, for which None is yielded.
    """
    state = torch.get_rng_state()
    with (
        World(subject, canaries, script, still=True) as one,
        World(subject, canaries, other_script, still=True) as other,
    ):
        plan = one.session.plan
        unit = plan.expected_batch_size / plan.sensitivity
        for _ in script:
            torch.set_rng_state(state)
            release = one.step("", departures)
            torch.set_rng_state(state)
            other_release = other.step("", departures)
            if release is None or other_release is None:
                yield None
                continue
            before = release.gradients
            changes = _subtract(other_release.gradients, before)
            sums = {name: unit * x for name, x in changes.items()}
            rounding = coarsest_spacing(before.values())
            yield _Change(sums, rounding, resolution(plan, before))


# -- contributions ---------------------------------------------------------------------------------
#
# What an example adds to a sum does not depend on the other examples of the batch. The sum is one
# over examples, each clipped by itself. So a canary must add the same to a batch of others as to a
# batch of examples without a loss, up to the rounding of the sum. This is sharper than the bound on
# the distance. A neighbour that moves the norms of others by a hundredth stays inside that bound
# for most pairs, and shows here for each. (Examples are a slack that follows the longest example of
# a batch, or a precision that follows the largest number.)
#
# All four batches of a comparison have as many rows, so the forward pass takes the same kernels.

OTHERS = 16  # in a batch


def check_contributions(
    subject: Subject, canaries: Canaries, *, progress: Progress = ignore_progress
) -> Finding:
    """Compare what every canary adds to a batch of others and to a batch without losses.

    Args:
        subject: what is audited.
        canaries: of `prepare_canaries`, or some of them; one without a loss must be among them.
        progress: called with (canaries done, of all).

    Raises:
        ValueError: every canary has a loss.
    """
    if canaries.zero is None:
        raise ValueError("every canary has a loss: add one with factor=0, which fills batches")
    silent = subject.size + canaries.zero
    others = _first_units(subject, OTHERS)
    places = _three_places(others)
    numbers = [number for number in range(len(canaries.names)) if number != canaries.zero]
    without = []
    with_it = []
    for k, number in enumerate(numbers):
        place = places[k % 3]
        for company in ([silent] * len(others), others):
            without.append(_insert(company, place, silent))
            with_it.append(_insert(company, place, subject.size + number))
    result = Worst()
    changes = _release_changes(subject, canaries, without, with_it, Replay())
    for k, number in enumerate(numbers):
        alone = next(changes)
        among_others = next(changes)
        moved = math.nan
        tolerance = 0.0
        if alone is not None and among_others is not None:
            moved = distance(alone.sums, among_others.sums)
            tolerance = alone.tolerance_of_shares()
        result.note(moved, canaries.names[number], tolerance)
        progress(k + 1, len(numbers))
    return Finding(
        check="shares",
        measured=f"{result.worst:.2e} × sensitivity",
        bound=f"at most {result.tolerance:.1e}",
        passed=result.worst <= result.tolerance,
        detail=f"what each of {len(numbers)} canaries adds next to {len(others)} others, "
        f"against what it adds next to nobody; worst: {result.where}",
    )


# -- batch sizes -----------------------------------------------------------------------------------
#
# Batches have random sizes up to twice the expected one, and one of more than 127 rows. A release
# is (sum of clipped contributions + noise) / expected batch size. Under frozen noise three
# properties follow for every size of a batch:
#
#     a batch whose examples have no loss is released as the empty batch is, to the last bit
#     the contributions of the two halves of a batch add up to the contribution of the batch
#     an example moves the release by the sensitivity at most, in any row
#
# The first property shows a divisor, a noise scale, or bits of the release that follow the realised
# size. The second shows a divisor of the sum alone, rows that are not clipped, and rows that are
# mixed.

SMALLEST, MANY, MOST = 4, 160, 256  # rows of a batch
RANDOM = 2  # sizes that are sampled


@dataclass
class _Departures:
    """Departures over all sizes: those of zero sums, of halves, and of single examples."""

    unequal: int = 0
    additive: Worst = field(default_factory=Worst)
    moved: Worst = field(default_factory=Worst)


def random_sizes(expected: float) -> tuple[int, ...]:
    """Sample batch sizes from the expected one to twice of it, and add one of over 127 rows.

    Args:
        expected: batch size of the plan. No size exceeds 256.
    """
    once = math.ceil(expected)
    twice = math.ceil(2 * expected)
    largest = min(MOST, max(SMALLEST, twice))
    smallest = max(SMALLEST, min(once, largest - 1))
    source = random.SystemRandom()
    sizes = {source.randint(smallest, largest) for _ in range(RANDOM)}
    return (*sorted(sizes), max(MANY, largest))


def check_batch_sizes(
    subject: Subject, *, sizes: Sequence[int] | None = None, progress: Progress = ignore_progress
) -> list[Finding]:
    """Check properties of sums on batches of several sizes under frozen noise.

    Args:
        subject: what is audited.
        sizes: rows of the batches, each at least 4; by default `random_sizes`.
        progress: called with (batches done, of all).
    """
    if sizes is None:
        sizes = random_sizes(subject.plan.expected_batch_size)
    most = max(sizes)
    canaries = _make_canaries(subject, most)
    script = []
    for size in sizes:
        script += _batches_of_size(subject, size, most)
    departures = _Departures()
    changes = _changes_from_empty(subject, canaries, script, progress)
    for size in sizes:
        _judge(size, changes, departures)
    rows = ", ".join(map(str, sizes))
    additive = departures.additive
    moved = departures.moved
    return [
        Finding(
            check="release of a zero sum",
            measured=f"{departures.unequal} sizes differ",
            bound="none",
            passed=not departures.unequal,
            detail=f"batches of {rows} rows without a loss against the empty batch, "
            "to the last bit",
        ),
        Finding(
            check="sum of two halves",
            measured=f"{additive.worst:.2e} × sensitivity",
            bound=f"at most {additive.tolerance:.1e}",
            passed=additive.worst <= additive.tolerance,
            detail=f"a batch against its halves, for {rows} rows; worst: {additive.where}",
        ),
        Finding(
            check="sensitivity of large batches",
            measured=f"{moved.worst:.6f} × sensitivity",
            bound=f"at most 1 + {moved.tolerance:.1e}",
            passed=moved.worst <= 1 + moved.tolerance,
            detail=f"an example in the first, middle and last of {rows} rows; worst: {moved.where}",
        ),
    ]


def _make_canaries(subject: Subject, most: int) -> Canaries:
    """Make `most` examples without a loss, `most` unchanged ones, and one far above the clip."""
    canaries = Canaries()
    count = len(subject.dataset[-1])
    for number in range(most):
        canaries.add("no loss", subject.example(number % count), 0.0)
    for number in range(most):
        canaries.add("as it is", subject.example((number + 1) % count))
    loud = list(subject.example(count - 1))
    for i, x in enumerate(loud):
        if x.is_floating_point():
            loud[i] = -3 * x
    canaries.add("loss × 1e4", tuple(loud), 1e4)
    return canaries


def _places(size: int) -> tuple[int, int, int]:
    """Return the rows in which an example is tried."""
    return 0, size // 2, size - 1


def _batches_of_size(subject: Subject, size: int, most: int) -> Batches:
    """Return the batches of one size, in the order in which `_judge` reads them.

    They are units without a loss, a company of units, its two halves, and the company with a unit
    whose gradient is far above the clip in one row. In these rows the company has no loss.
    """
    first = subject.size
    silent = list(range(first, first + size))
    company = list(range(first + most, first + most + size))
    loud = first + 2 * most
    places = _places(size)
    for place in places:
        company[place] = silent[place]
    half = size // 2
    halves = [company[:half], company[half:]]
    if subject.augment is not None:
        # All rows keep their random numbers of augmentation.
        halves = [halves[0] + silent[half:], silent[:half] + halves[1]]
    with_loud = [[*company[:place], loud, *company[place + 1 :]] for place in places]
    return [silent, company, *halves, *with_loud]


def _changes_from_empty(
    subject: Subject, canaries: Canaries, script: Batches, progress: Progress
) -> Iterator[_Change]:
    """Yield what each batch adds to the empty one."""
    empty: Batches = [[]] * len(script)
    departures = Replay()
    changes = _release_changes(subject, canaries, empty, script, departures)
    for number, change in enumerate(changes):
        if change is None:
            raise RuntimeError(f"a step made no release: {'; '.join(departures.uncounted)}"[:160])
        progress(number + 1, len(script))
        yield change


def _judge(size: int, changes: Iterator[_Change], departures: _Departures) -> None:
    """Read the sums of one size and record the largest departures."""
    departures.unequal += total_norm(next(changes).sums) != 0
    whole = next(changes)
    rest = whole.sums
    for _ in range(2):
        rest = _subtract(rest, next(changes).sums)
    departures.additive.note(total_norm(rest), f"{size} rows", whole.tolerance_of_sizes(size))
    tolerance = whole.tolerance_of_equal_sizes(size)
    for place in _places(size):
        added = _subtract(next(changes).sums, whole.sums)
        departures.moved.note(total_norm(added), f"row {place} of {size}", tolerance)


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
        lower = 0.0
        if self.mu_lower:
            lower = gaussian_epsilon(1 / self.mu_lower, self.delta)
        claimed = gaussian_epsilon(1 / self.mu_claimed, self.delta)
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
    canaries: Canaries,
    *,
    runs: int,
    alpha: float = ALPHA,
    progress: Progress = ignore_progress,
) -> DistinguishingTest:
    """Release a batch with and without a canary, `runs` times each, and bound μ.

    The metric of one refresh is used throughout, and the weights are constant. The canary is the
    one that moves a release farthest. If neighbours differ by replacement, it replaces
    "loss × -1e4".

    Args:
        subject: what is audited.
        canaries: of `prepare_canaries`, or some of them.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
        progress: called with (releases done, of all).

    Raises:
        ValueError: no canary moves a release.
    """
    base = _first_units(subject, BATCH)
    without = base
    if subject.plan.neighbouring_relation == REPLACE_ONE:
        without = [*base, subject.size + canaries.names.index("loss × -1e4")]
    number, pattern = _find_farthest(subject, canaries, base, without)
    with_it = [*base, subject.size + number]
    scanned = list(_release_samples(subject, canaries, [without] * SCANNED))
    lags = _find_lags(scanned)
    sizes = [p.numel() for p in subject.model().parameters() if p.requires_grad]
    directions = _make_directions(pattern, sizes, lags)
    scores = []
    for part, rows in enumerate((without, with_it)):
        components = []
        for sample in _release_samples(subject, canaries, [rows] * runs):
            components.append(directions @ sample)
            progress(part * runs + len(components), 2 * runs)
        scores.append(np.stack(components))
    one, other = scores
    first = runs // 4
    rest = runs - first
    weights, threshold = _learn_discriminant(one[:first], other[:first])
    false_positives = int(np.sum(one[first:] @ weights > threshold))
    false_negatives = int(np.sum(other[first:] @ weights <= threshold))
    mu = gaussian_mu_lower(false_positives, rest, false_negatives, rest, alpha)
    claimed = 1 / subject.plan.noise_multiplier
    return DistinguishingTest(mu, claimed, subject.plan.delta, runs, alpha)


def _find_farthest(
    subject: Subject, canaries: Canaries, base: Units, without: Units
) -> tuple[int, Samples]:
    """Return the canary that moves a release farthest under frozen noise, and the difference."""
    count = len(canaries.names)
    with_canary = [[*base, subject.size + number] for number in range(count)]
    ones = _release_samples(subject, canaries, [without] * count, seed=SEED)
    others = _release_samples(subject, canaries, with_canary, seed=SEED)
    best = 0
    pattern = np.zeros(0)
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        moved = np.nan_to_num(other - one)
        if np.linalg.norm(moved) > (1 + 1e-6) * np.linalg.norm(pattern):
            best = number
            pattern = moved
    if not pattern.any():
        raise ValueError(
            "no canary moves a release; check that the loss depends on the example, or give other"
            " canaries"
        )
    return best, pattern


def _release_samples(
    subject: Subject, canaries: Canaries, script: Sequence[Units], seed: int | None = None
) -> Iterator[Samples]:
    """Yield releases over the standard deviation of their noise, all at the same weights."""
    plan = subject.plan
    stddev = plan.stddev / plan.expected_batch_size
    for released in canaries.release_still(subject, script, seed):
        yield standardize(released, stddev)


def _find_lags(samples: Sequence[Samples]) -> Units:
    """Return the distances at which releases correlate with themselves most.

    Without a fault they are arbitrary.
    """
    centred = np.stack(samples) - np.mean(samples, 0)
    size = centred.shape[1]
    total = autocorrelate(centred)
    pairs = np.arange(size - 1, 0, -1)
    scores = np.abs(total[1:]) / np.sqrt(pairs)
    order = np.argsort(scores)[::-1]
    return [int(index) + 1 for index in order[:LAGS]]


def _make_directions(pattern: Samples, sizes: Units, lags: Sequence[int]) -> Samples:
    """Return unit vectors `[k, d]`.

    They hold the pattern in each group of parameters, and the pattern as far as it can be moved by
    a lag, in its place and moved.
    """
    d = pattern.size
    directions = []
    if sum(sizes) != d:
        sizes = [d]
    start = 0
    for size in sizes:
        directions.append(_restrict(pattern, slice(start, start + size)))
        start += size
    for lag in lags:
        beginning = _restrict(pattern, slice(0, d - lag))
        end = _restrict(pattern, slice(lag, d))
        directions += [beginning, np.roll(beginning, lag)]
        directions += [end, np.roll(end, -lag)]
    stacked = np.stack(directions)
    norms = np.linalg.norm(stacked, axis=1, keepdims=True)
    is_kept = norms[:, 0] > 1e-9 * norms.max()
    return stacked[is_kept] / norms[is_kept]


def _restrict(pattern: Samples, places: slice) -> Samples:
    """Return the pattern with zeros outside some places."""
    part = np.zeros(pattern.size)
    part[places] = pattern[places]
    return part


def _learn_discriminant(without: Samples, with_it: Samples) -> tuple[Samples, float]:
    """Return Fisher's linear discriminant `[k]`, and the middle between the two means."""
    covariances = np.cov(without.T) + np.cov(with_it.T)
    covariance = np.atleast_2d(covariances / 2)
    size = len(covariance)
    ridge = 1e-9 * np.trace(covariance) / size * np.eye(size)
    mean_without = without.mean(0)
    mean_with = with_it.mean(0)
    weights = np.linalg.solve(covariance + ridge, mean_with - mean_without)
    threshold = weights @ (mean_with + mean_without) / 2
    return weights, float(threshold)


# -- the whole audit -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict on a step.

    Attributes:
        findings: one a check.
        plan_hash: of the audited plan.
        canaries: how many were used.
        seconds: duration.
        date: in UTC.
    """

    findings: tuple[Finding, ...]
    plan_hash: str
    canaries: int
    seconds: float
    date: str

    @property
    def passed(self) -> bool:
        """Whether every check held.

        An audit that holds does not prove privacy; one that fails disproves it.
        """
        return not select_failed(self.findings)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card."""
        return {
            "passed": self.passed,
            "date": self.date,
            "plan_hash": self.plan_hash,
            "canaries": self.canaries,
            "seconds": round(self.seconds, 1),
            "findings": [finding.describe() for finding in self.findings],
        }


def audit_step(
    subject: Subject,
    *,
    runs: int = RUNS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Audit:
    """Audit the training step of a plan.

    The checks cover sensitivity, contributions, batch sizes, metric, the optimizer's gradients,
    noise, distinguishability, sampler, ledger, checkpoint and accounting.

    Args:
        subject: plan, model, examples and loss.
        runs: releases with and without a canary in the distinguishing test.
        progress: called with (name of the check, done, of all).

    Raises:
        ValueError: a plan without noise or with a repeatable stream; a random forward pass.

    Example:
        >>> subject = Subject(plan=plan, model=make_model, dataset=(x, y), loss_fn=loss_fn)
        >>> audit = audit_step(subject)
        >>> print(audit.passed, [f.check for f in audit.findings if not f.passed])
        True []
    """
    plan = subject.plan
    if plan.noise_multiplier == 0:
        raise ValueError("the plan adds no noise: there is no guarantee to audit")
    if plan.test_mode:
        raise ValueError("the plan is in test mode with repeatable noise: drop test_mode_seed")
    started = time.perf_counter()

    def report(name: str) -> Progress:
        if progress is None:
            return ignore_progress
        return partial(progress, name)

    canaries = prepare_canaries(subject)
    checks: dict[str, Callable[[Progress], Iterable[Finding]]] = {
        "neighbour replay": lambda p: replay(subject, canaries, progress=p).findings(),
        "contributions": lambda p: [check_contributions(subject, canaries, progress=p)],
        "batch sizes": lambda p: check_batch_sizes(subject, progress=p),
        "noise distribution": lambda p: check_noise(subject, progress=p),
        "noise of a run": lambda p: check_run_noise(subject, progress=p),
        "low bits": lambda p: [check_low_bits(subject, progress=p)],
        "two worlds": lambda p: [
            distinguish_neighbors(subject, canaries, runs=runs, progress=p).finding()
        ],
        "ledger": lambda p: check_charges(subject),
        "checkpoint": lambda p: [check_checkpoints(subject)],
        "sampler": lambda p: _summarize_sampler(plan),
        "accounting": lambda p: check_accounting(plan),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += list(check(report(name)))
        except RuntimeError as error:
            finding = Finding(
                check=name,
                measured="could not be ended",
                bound="can be",
                passed=False,
                detail=str(error),
            )
            findings.append(finding)
    return Audit(
        findings=tuple(findings),
        plan_hash=plan.hash,
        canaries=len(canaries.names),
        seconds=time.perf_counter() - started,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _summarize_sampler(plan: Plan) -> list[Finding]:
    """Return the failed tests of a certified sampler, or one finding that all held.

    A sampler without a certified event fails by its name.
    """
    if not plan.sampler.certified:
        finding = Finding(
            check="sampler",
            measured=type(plan.sampler).__name__,
            bound="a sampler whose event is proved",
            passed=False,
            detail="; ".join(plan.caveats),
        )
        return [finding]
    findings = check_sampler(plan)
    failed = select_failed(findings)
    if failed or not findings:
        return failed
    names = ", ".join(finding.check.removeprefix("sampler: ") for finding in findings)
    summary = Finding(
        check="sampler",
        measured=f"{len(findings)} tests held",
        bound=f"p {findings[0].bound} in each",
        passed=True,
        detail=f"{findings[0].detail}: {names}",
    )
    return [summary]


# --------------------------------------------------------------------------------------------------
# Checks of federated clients and servers from outside.
#
# They see messages as an adversary would. So they hold for every client, including one that an
# engine wraps. Run them on random records of the right shapes: they spend the releases of the given
# plan.


ALARM = 1e-6  # false alarms of one check
_CODE = (
    "module",
    "function",
    "builtin_function_or_method",
    "code",
    "frame",
    "getset_descriptor",
)


class Answers(Protocol):
    """A client, or anything that answers like a client."""

    def answer(self, message: Mapping[str, Any]) -> Message: ...  # noqa: D102


def round_message(contract: str, number: int, theta: Mapping[str, Tensor]) -> Message:
    """Return the message of a round that a server without metric and control variates sends."""
    prefixed = add_prefix("theta", theta)
    return {"kind": "round", "round": number, "contract": contract, **prefixed}


def check_client_noise(
    plan: FederatedPlan,
    clients: Sequence[Answers],
    contract: str,
    theta: Mapping[str, Tensor],
    pairs: int = 20,
) -> list[Finding]:
    """Check that clients add the planned noise, independently, and enough for t − m of them.

    The same parameters are sent twice. The data cancel in the difference of two answers, which
    leaves noise of variance 2 share².

    Args:
        plan: with full participation, one release a round and messages in the clear.
        clients: to be checked.
        contract: of the plan.
        theta: parameters of the model.
        pairs: answers compared for each client; 2 · `pairs` rounds of budget are spent.

    Raises:
        ValueError: masked messages, or a plan whose answers also differ by sampling.
    """
    config = plan.config
    if config.privacy.masked or config.example_rate < 1 or plan.per_round != 1:
        raise ValueError(
            "audit the same shares with TrustedServer('clients'), full participation and "
            "LocalGradient()"
        )
    noise = [_noise_of(client, contract, theta, pairs) for client in clients]
    variances = [float(x.square().mean()) for x in noise]
    size = noise[0].numel()
    return [
        _check_variance(plan, variances, size),
        _check_independence(noise),
        _check_survivors(plan, variances, size),
    ]


def _noise_of(client: Answers, contract: str, theta: Mapping[str, Tensor], pairs: int) -> Tensor:
    """Return the noise of a client from the differences of its answers, with variance share²."""
    sums = []
    for number in range(2 * pairs):
        answer = client.answer(round_message(contract, number, theta))
        if answer["kind"] == "sum":
            sums.append(flatten(select_prefix(answer, "sum"), torch.float64))
    pairs_of_sums = zip(sums[::2], sums[1::2], strict=False)
    differences = torch.stack([a - b for a, b in pairs_of_sums])
    return differences.flatten() / math.sqrt(2)


def _check_variance(plan: FederatedPlan, variances: Sequence[float], size: int) -> Finding:
    """Apply a two-sided χ² test to each client's noise."""
    alarm = ALARM / (2 * len(variances))
    quantiles = stats.chi2.ppf([alarm, 1 - alarm], size)
    low, high = quantiles / size
    ratios = []
    for variance in variances:
        if plan.client_stddev > 0:
            ratios.append(variance / plan.client_stddev**2)
        else:
            ratios.append(1.0 if variance == 0 else math.inf)
    wrong = [i for i, ratio in enumerate(ratios) if not low <= ratio <= high]
    return Finding(
        check="variance of the noise",
        measured=f"{min(ratios):.4g} to {max(ratios):.4g} × the share's",
        bound=f"{low:.4g} to {high:.4g}",
        passed=not wrong,
        detail=f"wrong: {wrong}",
    )


def _check_independence(noise: Sequence[Tensor]) -> Finding:
    """Check the largest correlation of two clients, over all pairs.

    Absent noise counts as fully correlated.
    """
    pairs = list(combinations(range(len(noise)), 2))
    tests = 2 * max(1, len(pairs))
    score = float(stats.norm.isf(ALARM / tests))
    bound = score / math.sqrt(noise[0].numel())
    worst = 0.0
    clients = (0, 0)
    for i, j in pairs:
        scale = float(noise[i].norm() * noise[j].norm())
        product = abs(float(noise[i] @ noise[j]))
        correlation = 1.0
        if scale > 0:
            correlation = product / scale
        worst, clients = max((worst, clients), (correlation, (i, j)))
    return Finding(
        check="independence of the noise",
        measured=f"correlation {worst:.3g}",
        bound=f"at most {bound:.3g}",
        passed=worst <= bound,
        detail=f"of clients {clients}",
    )


def _check_survivors(plan: FederatedPlan, variances: Sequence[float], size: int) -> Finding:
    """Compare the noise of the t − m clients that add least with what the guarantee needs."""
    config = plan.config
    check = "noise of the survivors"
    if config.privacy.noise_by == "server":
        return Finding(check=check, measured="the server adds it", bound="none", passed=True)
    honest = 1 if config.privacy.has_full_noise else config.survivors - config.known_shares
    smallest = sorted(variances)[:honest]
    stddev = math.sqrt(sum(smallest))
    standard_error = math.sqrt(0.5 / (size * honest))
    slack = 1 - stats.norm.isf(ALARM) * standard_error * 2
    return Finding(
        check=check,
        measured=f"stddev {stddev:.4g}",
        bound=f"at least {plan.stddev:.4g}",
        passed=stddev >= plan.stddev * slack,
        detail=f"{honest} clients that add least",
    )


def check_record_bound(plan: FederatedPlan, answer: Message, neighbour: Message) -> Finding:
    """Check how far one record moves a client's message.

    Two clients in test mode with the same number share their noise, so it cancels.

    Args:
        plan: in test mode.
        answer: of a client with the record.
        neighbour: of the same client without the record, or with another record in its place under
            "replace_one".
    """
    one = select_prefix(answer, "sum")
    other = select_prefix(neighbour, "sum")
    bound = plan.config.sensitivity * (1 + 1e-5)
    measured = "a client did not answer"
    is_bounded = False
    if one and one.keys() == other.keys():
        moved = distance(one, other)
        measured = f"moves the sum by {moved:.6g}"
        is_bounded = moved <= bound
    return Finding(
        check="one record", measured=measured, bound=f"at most {bound:.6g}", passed=is_bounded
    )


def check_kept_messages(roots: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that no client's sum is reachable from a server, its log records or its files.

    Args:
        roots: objects to search: server, records of rounds, log records, tensors of a checkpoint.
        messages: what clients sent.
    """
    sums: list[Tensor] = []
    for message in messages:
        sums += select_prefix(message, "sum").values()
    skipped = type, str, bytes, int, float, logging.Logger
    seen: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, skipped) or type(item).__name__ in _CODE:
            continue
        seen.add(id(item))
        if not isinstance(item, Tensor):
            todo.extend(gc.get_referents(item))
        elif any(_is_copy(item, x) for x in sums):
            return _leftover_finding(False, f"the sum of one client, of shape {tuple(item.shape)}")
    return _leftover_finding(True, f"{len(seen)} objects hold no sum of a single client")


def _is_copy(x: Tensor, message: Tensor) -> bool:
    """Return whether a tensor is a message, or equals one that is not all zero."""
    if x is message:
        return True
    if x.shape != message.shape or x.dtype != message.dtype:
        return False
    return bool((x == message).all()) and bool(message.any())


def _leftover_finding(passed: bool, measured: str) -> Finding:
    return Finding(
        check="what the server keeps", measured=measured, bound="no client's sum", passed=passed
    )
