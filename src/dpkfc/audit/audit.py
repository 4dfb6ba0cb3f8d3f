"""The white-box audit of one training step: everything that can be checked without training."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkfc import checkpoint
from dpkfc.audit.canaries import Canaries
from dpkfc.audit.harness import Finding, Subject, Watched, accounting, failed, scripted, unmoved, watched
from dpkfc.audit.neighbors import (
    RUNS,
    SIZES,
    Replay,
    World,
    distance,
    prepared_canaries,
    replay,
    resolution,
    two_worlds,
)
from dpkfc.audit.statistics import low_bits, noise_law, noise_run, sampler_law
from dpkfc.config import Plan
from dpkfc.privacy.accounting import event_to_dict
from dpkfc.privacy.ledger import LedgerError, verify
from dpkfc.privacy.mechanism import Released

# --------------------------------------------------------------------------------------------------
# The order of charge and release, and what the ledger says of a run while it is made.


def charges(subject: Subject) -> list[Finding]:
    """Run a few steps and read the ledger from the disk after each; then let a charge fail and see that nothing gets out."""
    canaries = Canaries()
    canaries.add("as it is", tuple(x[0] for x in subject.dataset))
    script = [[0, subject.size], [], [0], [0, subject.size]]
    plan = scripted(subject.plan, [*script, [0]], subject.size + 1)
    loss, data, units = canaries.loss(subject), canaries.dataset(subject), canaries.units(subject)
    behind: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        session, walk = watched(subject, plan, data, units=units, ledger_path=path, verify=False)
        with session:
            batches = session.batches()
            for step, _ in enumerate(script):
                session.step(next(batches), loss)
                behind += [] if _charged(path) == len(session.released) == step + 1 else [f"behind step {step}"]
            walk.handed = {}
            got_out = _step_without_a_ledger(session, next(batches), loss)
            got_out = got_out or ("the optimizer was handed something" if walk.handed else "")
        entries = verify(path).releases
    stated = all(
        math.isclose(entry["stddev"], plan.stddev)
        and math.isclose(entry["noise_multiplier"], plan.noise_multiplier)
        and entry["event"] == event_to_dict(plan.event)
        for entry in entries
    )
    late = f", not equal {behind[0]}" if behind else ""
    return [
        Finding(
            check="ledger",
            measured=f"{len(entries)} charges for {len(session.released)} releases{late}",
            bound="equal after every step, with the plan's event and noise",
            passed=len(entries) == len(session.released) == len(script) and not behind and stated,
            detail="read back from the file while it was written, hash chain verified",
        ),
        Finding(
            check="charge before release",
            measured=got_out or "nothing got out",
            bound="nothing gets out",
            passed=not got_out,
            detail="a step whose charge cannot be written",
        ),
    ]


def _charged(path: Path) -> int:
    """Releases in the file, as a process would find it that starts after a crash."""
    try:
        return len(verify(path).releases)
    except LedgerError:
        return 0


class _Broken:
    """Stands for a ledger whose disk is full; all but the charge is that of the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def charge(self, *args: Any, **kwargs: Any) -> int:
        raise LedgerError("the disk is full (audit)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _step_without_a_ledger(session: Watched, batch: Any, loss: Any) -> str:
    """What a step did although it could not be charged; "" where it did nothing."""
    before, drawn, real = len(session.released), session.noise_draws, session.ledger
    session._pipeline.ledger = _Broken(real)  # type: ignore[assignment]
    try:
        session.step(batch, loss)
    except LedgerError:
        if len(session.released) > before:
            return "a release got out"
        return "noise was drawn" if session.noise_draws > drawn else ""
    finally:
        session._pipeline.ledger = real
    return "a release got out"


# --------------------------------------------------------------------------------------------------
# What a checkpoint says of the data: nothing that releases do not say.
#
# Two sessions walk along the same weights over different examples. With no post-processing, whose
# states are made of releases, what they write must be equal to the bit.

STEPS = 3
OWN = ("ledger_head", "torch_rng")  # the time at which a ledger began; the state of the repeatable mode


def checkpoints(subject: Subject) -> Finding:
    """Save both sessions after a few steps, and compare what they wrote."""
    canaries = Canaries()
    canaries.add("loss × 1e4", tuple(x[-1] for x in subject.dataset), 1e4)
    bare = replace(subject, plan=replace(subject.plan, config=replace(subject.plan.config, postprocess=(), readout="whitened")))
    rows = list(range(min(4, max(1, subject.size // 2))))
    scripts = ([rows] * STEPS, [[*rows[1:], subject.size]] * STEPS)
    state, found = torch.get_rng_state(), []
    for script in scripts:
        torch.set_rng_state(state)
        with tempfile.TemporaryDirectory() as folder, World(bare, canaries, script) as world:
            for _ in script:
                world.session.step(next(world.batches), world.loss)
            world.session.save(f"{folder}/checkpoint")
            tensors, meta = checkpoint.read(f"{folder}/checkpoint")
        preconditioner = subject.plan.config.preconditioner
        if preconditioner is not None and preconditioner.uses_past_releases:  # the releases differ
            tensors = {group: held for group, held in tensors.items() if group not in ("past", "preconditioner")}
        found.append({"tensors": tensors, "meta": {name: x for name, x in meta.items() if name not in OWN}})
    where = _difference(found[0], found[1])
    return Finding(
        check="checkpoint",
        measured=f"'{where}' differs" if where else "equal to the bit",
        bound="equal for different data and equal weights",
        passed=not where,
        detail=f"after {STEPS} steps, without post-processing",
    )


def _difference(one: Any, other: Any, where: str = "") -> str:
    """The path of the first value that differs, "" where none does."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{where}/{sorted(map(str, one.keys() ^ other.keys()))[0]}"
        return next((d for name in one if (d := _difference(one[name], other[name], f"{where}/{name}"))), "")
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()) else where
    return "" if type(one) is type(other) and one == other else where


# --------------------------------------------------------------------------------------------------
# An example's share is its own: what it adds to a sum is the same whoever is beside it.
#
# The sum is one over examples, each clipped by itself. So a canary must add the same to a batch of
# others as to a batch of nobodies (examples without a loss), but for the rounding of the sum. That
# is sharper than the bound on the distance: a neighbour that moves the norms of others by a
# hundredth (a slack that follows the longest of a batch, a precision that follows the largest
# number) stays inside the bound of most pairs, and shows here in each.
#
# All four batches of a comparison have as many rows, so that the forward pass takes the same
# kernels.

BESIDE = 16  # others in a batch
ROUNDING = 2.0**13  # units of rounding by which a share may follow the order in which the sum is taken


def shares(
    subject: Subject, canaries: Canaries | None = None, *, progress: Callable[[int, int], None] | None = None
) -> Finding:
    """Compare what every canary adds to a batch of others with what it adds to one of nobodies.

    Args:
        subject: what is audited.
        canaries: by default all there are; one without a loss must be among them.
        progress: called with (canaries done, of all).

    Raises:
        ValueError: no canary is without a loss.
    """
    canaries = canaries or prepared_canaries(subject)
    if canaries.zero is None:
        raise ValueError("one of the canaries must be without a loss: it stands for nobody")
    nobody = subject.size + canaries.zero
    others = list(range(min(BESIDE, max(1, subject.size // 2))))
    tried = [number for number in range(len(canaries.names)) if number != canaries.zero]
    company = ([nobody] * len(others), others)
    places = (len(others), 0, len(others) // 2)  # of the canary among the rows: last, first, middle
    without = [_insert(beside, places[k % 3], nobody) for k in range(len(tried)) for beside in company]
    with_it = [
        _insert(beside, places[k % 3], subject.size + number) for k, number in enumerate(tried) for beside in company
    ]
    worst, where, tolerance = 0.0, "", 0.0
    added = _added(subject, canaries, without, with_it)
    for k, number in enumerate(tried):
        (alone, bound), (beside, _) = next(added), next(added)
        moved = distance(alone, beside)
        tolerance = max(tolerance, bound)
        if not moved <= worst:  # also where it is not a number
            worst, where = (moved if math.isfinite(moved) else math.inf), canaries.names[number]
        if progress is not None:
            progress(k + 1, len(tried))
    return Finding(
        check="shares",
        measured=f"{worst:.2e} × sensitivity",
        bound=f"at most {tolerance:.1e}",
        passed=worst <= tolerance,
        detail=f"what each of {len(tried)} canaries adds beside {len(others)} others, against what it adds beside nobody; "
        f"worst: {where}",
    )


def _insert(rows: list[int], place: int, unit: int) -> list[int]:
    """Return the rows with one more unit at a place."""
    return [*rows[:place], unit, *rows[place:]]


def _added(
    subject: Subject, canaries: Canaries, without: list[list[int]], with_it: list[list[int]]
) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
    """What the canary changed about each batch, in units of the sensitivity, and what rounding may do to it."""
    still = replace(subject, plan=unmoved(subject.plan))
    seen, state = Replay(), torch.get_rng_state()  # the same random numbers (augmentation) in every batch
    with World(still, canaries, without, still=True) as one, World(still, canaries, with_it, still=True) as other:
        for _ in without:
            released: list[Released | None] = []
            for world in (one, other):
                torch.set_rng_state(state)
                released.append(world.step("", seen))
            plan = one.session.plan
            unit = plan.expected_batch_size / plan.sensitivity
            if released[0] is None or released[1] is None:
                yield {"": torch.tensor(math.nan)}, 0.0
                continue
            before, after = released[0].gradients, released[1].gradients
            coarsest = max(torch.finfo(x.dtype).eps for x in before.values())
            bound = ROUNDING * coarsest + 2 * resolution(plan, before)
            yield {name: unit * (after[name].double() - x.double()) for name, x in before.items()}, bound


# --------------------------------------------------------------------------------------------------
# Batches of random sizes up to twice the expected one, and of more than 127 rows, against the
# additive law of a sum.
#
# A release is (sum of clipped contributions + noise) / expected batch size. Under frozen noise
# three properties follow. They hold whatever the size of a batch is.
#
#     a batch whose examples have no loss is released as the empty batch is, to the last bit
#     the contributions of the two halves of a batch add up to the contribution of the batch
#     an example moves the release by the sensitivity at most, in the first, the middle and the last row
#
# The first property shows a divisor, a noise scale, or bits of the release that follow the realised
# size. The second shows a divisor of the sum alone, rows that are not clipped, and rows that are
# mixed.

SMALLEST, MANY, MOST = 4, 160, 256  # rows of a batch
RANDOM = 2  # sizes that are sampled
Sums = dict[str, Tensor]


@dataclass
class _Rows:
    """Units of one size's batches.

    Attributes:
        silent: units without a loss, as many as the size.
        company: units with their own loss, in order; silent units stand in the first, the middle and the last row.
        places: the three rows with silent units.
        loud: the unit whose gradient is far above the clip.
    """

    silent: list[int]
    company: list[int]
    places: tuple[int, int, int]
    loud: int

    def without(self, part: slice) -> list[int]:
        """Return the company with silent units in a part of it."""
        rows = list(self.company)
        rows[part] = self.silent[part]
        return rows

    def with_loud(self, place: int) -> list[int]:
        """Return the company with the loud unit in one row."""
        rows = list(self.company)
        rows[place] = self.loud
        return rows


@dataclass
class _Departures:
    """Largest departures over all sizes, with the place of each."""

    unequal: list[str] = field(default_factory=list)
    additive: tuple[float, str] = (0.0, "")
    moved: tuple[float, str] = (0.0, "")
    additive_tolerance: float = 0.0
    moved_tolerance: float = 0.0


@dataclass(frozen=True)
class _Tolerance:
    """What rounding may do to a sum, in units of the sensitivity.

    Attributes:
        rounding: relative spacing of the coarsest type of the release.
        resolution: what rounding may move a release by.
    """

    rounding: float
    resolution: float

    def of_equal_kernels(self, rows: int) -> float:
        """Return the tolerance of batches that have the same number of rows."""
        return 1e-5 + 4 * rows * self.rounding + 3 * self.resolution

    def of_other_kernels(self, rows: int) -> float:
        """Return the tolerance of batches of different sizes, whose passes may round each contribution differently."""
        return max(1.0, rows / max(SIZES)) * (ROUNDING * self.rounding + 3 * self.resolution)


def random_sizes(expected: float) -> tuple[int, ...]:
    """Sample batch sizes above the expected one and up to twice of it, and add one of more than 127 rows.

    Args:
        expected: batch size of the plan. No size exceeds 256.
    """
    largest = min(MOST, max(SMALLEST, math.ceil(2 * expected)))
    smallest = max(SMALLEST, min(math.ceil(expected), largest - 1))
    sizes = {random.SystemRandom().randint(smallest, largest) for _ in range(RANDOM)}
    return (*sorted(sizes), max(MANY, largest))


def batch_sizes(
    subject: Subject, *, sizes: Sequence[int] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Release batches of several sizes under frozen noise and test what their sums have in common.

    Args:
        subject: what is audited.
        sizes: rows of the batches, each at least 4; by default `random_sizes`.
        progress: called with (batches done, of all).
    """
    sizes = random_sizes(subject.plan.expected_batch_size) if sizes is None else sizes
    canaries, batches = _make_canaries(subject, max(sizes)), []
    for size in sizes:
        batches.append(_rows(subject, size, max(sizes)))
    masks = subject.augment is not None
    script = [rows for batch in batches for rows in _script(batch, masks)]
    departures = _Departures()
    sums = _sums(subject, canaries, script, progress)
    for size, batch in zip(sizes, batches, strict=True):
        _judge(size, batch, sums, departures)
    tried = ", ".join(map(str, sizes))
    additive, where = departures.additive
    moved, place = departures.moved
    return [
        Finding(
            check="release of a zero sum",
            measured=f"{len(departures.unequal)} sizes differ",
            bound="none",
            passed=not departures.unequal,
            detail=f"batches of {tried} rows without a loss against the empty batch, to the last bit",
        ),
        Finding(
            check="sum of two halves",
            measured=f"{additive:.2e} × sensitivity",
            bound=f"at most {departures.additive_tolerance:.1e}",
            passed=additive <= departures.additive_tolerance,
            detail=f"a batch against its halves, for {tried} rows; worst: {where}",
        ),
        Finding(
            check="sensitivity of large batches",
            measured=f"{moved:.6f} × sensitivity",
            bound=f"at most 1 + {departures.moved_tolerance:.1e}",
            passed=moved <= 1 + departures.moved_tolerance,
            detail=f"an example in the first, middle and last of {tried} rows; worst: {place}",
        ),
    ]


def _make_canaries(subject: Subject, most: int) -> Canaries:
    """Return `most` examples without a loss, `most` examples as they are, and one example far above the clip."""
    canaries, count = Canaries(), len(subject.dataset[-1])
    for number in range(most):
        canaries.add("no loss", tuple(x[number % count] for x in subject.dataset), 0.0)
    for number in range(most):
        canaries.add("as it is", tuple(x[(number + 1) % count] for x in subject.dataset))
    last = tuple(x[count - 1] for x in subject.dataset)
    canaries.add("loss × 1e4", tuple(-3 * x if x.is_floating_point() else x for x in last), 1e4)
    return canaries


def _rows(subject: Subject, size: int, most: int) -> _Rows:
    silent = [subject.size + number for number in range(size)]
    company = [subject.size + most + number for number in range(size)]
    places = (0, size // 2, size - 1)
    for place in places:
        company[place] = silent[place]
    return _Rows(silent, company, places, subject.size + 2 * most)


def _script(batch: _Rows, masks: bool) -> list[list[int]]:
    """Return the batches of one size, in the order in which `_judge` reads them.

    Args:
        batch: units of the size.
        masks: silence a half instead of leaving it out. All rows then keep their random numbers of augmentation.
    """
    half = len(batch.company) // 2
    first, second = batch.company[:half], batch.company[half:]
    if masks:
        first, second = batch.without(slice(half, None)), batch.without(slice(0, half))
    return [batch.silent, batch.company, first, second, *(batch.with_loud(place) for place in batch.places)]


def _sums(
    subject: Subject, canaries: Canaries, script: list[list[int]], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[Sums, _Tolerance]]:
    """Yield what each batch adds to the empty one, in units of the sensitivity, with the tolerance of rounding."""
    still = replace(subject, plan=unmoved(subject.plan))
    seen, state = Replay(), torch.get_rng_state()
    empty: list[list[int]] = [[]] * len(script)
    with World(still, canaries, empty, still=True) as one, World(still, canaries, script, still=True) as other:
        plan = one.session.plan
        unit = plan.expected_batch_size / plan.sensitivity
        for number in range(len(script)):
            releases: list[Released | None] = []
            for world in (one, other):
                torch.set_rng_state(state)
                releases.append(world.step("", seen))
            if releases[0] is None or releases[1] is None:
                raise RuntimeError(f"a step made no release: {'; '.join(seen.uncounted)}"[:160])
            before, after = releases[0].gradients, releases[1].gradients
            rounding = max(torch.finfo(x.dtype).eps for x in before.values())
            if progress is not None:
                progress(number + 1, len(script))
            sums = {name: unit * (after[name].double() - x.double()) for name, x in before.items()}
            yield sums, _Tolerance(rounding, resolution(plan, before))


def _judge(size: int, batch: _Rows, sums: Iterator[tuple[Sums, _Tolerance]], departures: _Departures) -> None:
    """Read the sums of one size and note the largest departures."""
    silent, _ = next(sums)
    if not _norm(silent) == 0:
        departures.unequal.append(f"{size}")
    whole, tolerance = next(sums)
    departures.additive_tolerance = max(departures.additive_tolerance, tolerance.of_other_kernels(size))
    departures.moved_tolerance = max(departures.moved_tolerance, tolerance.of_equal_kernels(size))
    rest = whole
    for _ in range(2):
        rest = _size_difference(rest, next(sums)[0])
    departures.additive = max(departures.additive, (_norm(rest), f"{size} rows"))
    for place in batch.places:
        distance = _norm(_size_difference(next(sums)[0], whole))
        departures.moved = max(departures.moved, (distance, f"row {place} of {size}"))


def _size_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Sums:
    return {name: x - other[name] for name, x in one.items()}


def _norm(sums: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all tensors, infinite where an entry is not finite."""
    norm = math.sqrt(sum(float(x.square().sum()) for x in sums.values()))
    return norm if math.isfinite(norm) else math.inf


# --------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict on a step.

    Attributes:
        findings: one a check.
        plan_hash: of the plan that was audited.
        canaries: how many were used.
        seconds: it took.
        date: when, UTC.
    """

    findings: tuple[Finding, ...]
    plan_hash: str
    canaries: int
    seconds: float
    date: str

    @property
    def passed(self) -> bool:
        """Whether every check held. That is no proof of privacy; one that fails disproves it."""
        return not failed(self.findings)

    def describe(self) -> dict[str, Any]:
        """Plain values for the card."""
        return {
            "passed": self.passed,
            "date": self.date,
            "plan_hash": self.plan_hash,
            "canaries": self.canaries,
            "seconds": round(self.seconds, 1),
            "findings": [finding.describe() for finding in self.findings],
        }


def audit_step(subject: Subject, *, runs: int = RUNS, progress: Progress | None = None) -> Audit:
    """Audit the step of a plan: sensitivity, shares, batch sizes, metric, hand-over, noise, two worlds, sampler, ledger.

    Args:
        subject: plan, model, examples and loss.
        runs: releases of each of the two worlds.
        progress: called with (name of the check, done, of all).

    Raises:
        ValueError: a plan without noise, or with a repeatable stream; a forward pass that is random.
    """
    plan = subject.plan
    if plan.noise_multiplier == 0:
        raise ValueError("the plan adds no noise: there is no guarantee to audit")
    if plan.test_mode:
        raise ValueError("the plan is in test mode, in which noise can be repeated: audit it without test_mode_seed")
    started = time.perf_counter()

    def said(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(name, done, of)

    canaries = prepared_canaries(subject)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "neighbour replay": lambda: replay(subject, canaries, progress=said("neighbour replay")).findings(),
        "shares": lambda: [shares(subject, canaries, progress=said("shares of examples"))],
        "batch sizes": lambda: batch_sizes(subject, progress=said("batch sizes")),
        "law of the noise": lambda: noise_law(subject, progress=said("law of the noise")),
        "noise of a run": lambda: noise_run(subject, progress=said("noise of a run")),
        "low bits": lambda: [low_bits(subject, progress=said("low bits"))],
        "two worlds": lambda: [two_worlds(subject, canaries, runs=runs, progress=said("two worlds")).finding()],
        "ledger": lambda: charges(subject),
        "checkpoint": lambda: [checkpoints(subject)],
        "sampler": lambda: _sampling(plan),
        "accounting": lambda: accounting(plan),
    }
    found = [finding for name, check in checks.items() for finding in _tried(name, check)]
    return Audit(
        findings=tuple(found),
        plan_hash=plan.hash,
        canaries=len(canaries.names),
        seconds=time.perf_counter() - started,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _tried(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check found; that it could not be run to its end is a finding too."""
    try:
        return list(check())
    except RuntimeError as error:
        return [Finding(check=name, measured="could not be ended", bound="can be", passed=False, detail=str(error))]


def _sampling(plan: Plan) -> Iterator[Finding]:
    """The sampler's own law; one that has no certified event fails by its name."""
    if plan.sampler.certified:
        found = sampler_law(plan)
        yield from failed(found)
        if found and not failed(found):
            names = ", ".join(finding.check.removeprefix("sampler: ") for finding in found)
            bound = f"p {found[0].bound} in each"
            yield Finding(
                check="sampler", measured=f"{len(found)} tests held", bound=bound, passed=True,
                detail=f"{found[0].detail}: {names}",
            )  # fmt: skip
        return
    yield Finding(
        check="sampler", measured=type(plan.sampler).__name__, bound="a sampler whose event is proved", passed=False,
        detail="; ".join(plan.caveats),
    )  # fmt: skip
