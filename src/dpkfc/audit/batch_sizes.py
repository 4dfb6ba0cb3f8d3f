"""Check sums over batches of several sizes under frozen noise.

Batches have random sizes up to twice the expected one, and one of more than 127 rows. A release
is (sum of clipped contributions + noise) / expected batch size. Under frozen noise three
properties follow for every size of a batch:

    a batch whose examples have no loss is released as the empty batch is, to the last bit
    the contributions of the two halves of a batch add up to the contribution of the batch
    an example moves the release by the sensitivity at most, in any row

The first property shows a divisor, a noise scale, or bits of the release that follow the realised
size. The second shows a divisor of the sum alone, rows that are not clipped, and rows that are
mixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dpkfc.audit.changes import Change, release_changes
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, ignore_progress
from dpkfc.audit.replay import Batches, Replay, Worst, subtract
from dpkfc.audit.step_canaries import Canaries
from dpkfc.federated.sums import total_norm

SMALLEST, MANY, MOST = 4, 160, 256  # rows of a batch
RANDOM = 2  # sizes that are sampled


@dataclass
class _Departures:
    """Departures over all sizes: of zero sums, of halves, and of single examples."""

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
) -> Iterator[Change]:
    """Yield what each batch adds to the empty one."""
    empty: Batches = [[]] * len(script)
    departures = Replay()
    changes = release_changes(subject, canaries, empty, script, departures)
    for number, change in enumerate(changes):
        if change is None:
            raise RuntimeError(f"a step made no release: {'; '.join(departures.uncounted)}"[:160])
        progress(number + 1, len(script))
        yield change


def _judge(size: int, changes: Iterator[Change], departures: _Departures) -> None:
    """Read the sums of one size and record the largest departures."""
    departures.unequal += total_norm(next(changes).sums) != 0
    whole = next(changes)
    rest = whole.sums
    for _ in range(2):
        rest = subtract(rest, next(changes).sums)
    departures.additive.note(total_norm(rest), f"{size} rows", whole.tolerance_of_sizes(size))
    tolerance = whole.tolerance_of_equal_sizes(size)
    for place in _places(size):
        added = subtract(next(changes).sums, whole.sums)
        departures.moved.note(total_norm(added), f"row {place} of {size}", tolerance)
