"""Batches of random sizes up to twice the expected one, and of more than 127 rows, against the additive law of a sum.

A release is (sum of clipped contributions + noise) / expected batch size. Under frozen noise three properties follow. They
hold whatever the size of a batch is.

    a batch whose examples have no loss is released as the empty batch is, to the last bit
    the contributions of the two halves of a batch add up to the contribution of the batch
    an example moves the release by the sensitivity at most, in the first, the middle and the last row

The first property shows a divisor, a noise scale, or bits of the release that follow the realised size. The second shows
a divisor of the sum alone, rows that are not clipped, and rows that are mixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.replay import SIZES, Replay, World, resolution
from dpkfc.assurance.shares import ROUNDING
from dpkfc.assurance.subject import Subject, unmoved
from dpkfc.assurance.verdict import Finding
from dpkfc.privacy.mechanism import Released

__all__ = ["batch_sizes", "random_sizes"]

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
        rest = _difference(rest, next(sums)[0])
    departures.additive = max(departures.additive, (_norm(rest), f"{size} rows"))
    for place in batch.places:
        distance = _norm(_difference(next(sums)[0], whole))
        departures.moved = max(departures.moved, (distance, f"row {place} of {size}"))


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Sums:
    return {name: x - other[name] for name, x in one.items()}


def _norm(sums: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all tensors, infinite where an entry is not finite."""
    norm = math.sqrt(sum(float(x.square().sum()) for x in sums.values()))
    return norm if math.isfinite(norm) else math.inf
