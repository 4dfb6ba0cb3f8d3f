"""An example's share is its own: what it adds to a sum is the same whoever is beside it.

The sum is one over examples, each clipped by itself. So a canary must add the same to a batch of others as to a batch of
nobodies (examples without a loss), but for the rounding of the sum. That is sharper than the bound on the distance: a
neighbour that moves the norms of others by a hundredth (a slack that follows the longest of a batch, a precision that follows
the largest number) stays inside the bound of most pairs, and shows here in each.

All four batches of a comparison have as many rows, so that the forward pass takes the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.replay import Replay, World, distance, prepared_canaries, resolution
from dpkfc.assurance.subject import Subject, unmoved
from dpkfc.assurance.verdict import Finding
from dpkfc.privacy.mechanism import Released

__all__ = ["shares"]

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
