"""Measure what single examples add to a sum.

What an example adds to a sum does not depend on the other examples of the batch. The sum is one
over examples, each clipped by itself. So a canary must add the same to a batch of others as to a
batch of examples without a loss, up to the rounding of the sum. This is sharper than the bound on
the distance. A neighbour that moves the norms of others by a hundredth stays inside that bound
for most pairs, and shows here for each. (Examples are a slack that follows the longest example of
a batch, or a precision that follows the largest number.)

All four batches of a comparison have as many rows, so the forward pass takes the same kernels.
"""

from __future__ import annotations

import math

from dpkfc.audit.changes import release_changes
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, ignore_progress
from dpkfc.audit.replay import Replay, Worst, distance, first_units, insert_unit, three_places
from dpkfc.audit.step_canaries import Canaries

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
    others = first_units(subject, OTHERS)
    places = three_places(others)
    numbers = [number for number in range(len(canaries.names)) if number != canaries.zero]
    without = []
    with_it = []
    for k, number in enumerate(numbers):
        place = places[k % 3]
        for company in ([silent] * len(others), others):
            without.append(insert_unit(company, place, silent))
            with_it.append(insert_unit(company, place, subject.size + number))
    result = Worst()
    changes = release_changes(subject, canaries, without, with_it, Replay())
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
