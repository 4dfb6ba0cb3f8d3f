"""Measure under frozen noise by how much the releases of two scripts of batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dpkfc.audit.harness import Subject, coarsest_spacing
from dpkfc.audit.replay import SIZES, Batches, Replay, Sums, World, resolution, subtract
from dpkfc.audit.step_canaries import Canaries

# Units of rounding by which a contribution may follow the order of summation.
ROUNDING = 2.0**13


@dataclass(frozen=True)
class Change:
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


def release_changes(
    subject: Subject,
    canaries: Canaries,
    script: Batches,
    other_script: Batches,
    departures: Replay,
) -> Iterator[Change | None]:
    """Yield by how much each batch of the second script differs from the first script's batch.

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
            changes = subtract(other_release.gradients, before)
            sums = {name: unit * x for name, x in changes.items()}
            rounding = coarsest_spacing(before.values())
            yield Change(sums, rounding, resolution(plan, before))
