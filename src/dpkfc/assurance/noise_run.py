"""The noise of a whole run: the session releases sums of zeros, as often as the plan has steps.

No batch is read and no gradient is taken, so thousands of steps cost about a second. Faults that need many steps show here:
noise that repeats after some draws, and noise that weakens in the course of a run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpkfc.assurance.accounting import accounted_noise
from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.noise_samples import (
    check_granularity,
    check_repeats,
    check_tails,
    check_windows,
    collision_rate_of,
)
from dpkfc.assurance.subject import Subject, Watched, scripted, watched
from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan
from dpkfc.privacy.grid import ROUNDED, grid_of

__all__ = ["noise_run"]

NUMBERS = 2_000_000  # samples in all
MOST = 10_000  # releases
NARROWEST = 16  # samples of a release


def noise_run(
    subject: Subject, *, numbers: int = NUMBERS, progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Draw the noise of every step of a plan and test its tails, granularity, repeats and variance over the steps.

    Args:
        subject: what is audited. Of a plan with more than MOST steps the first MOST are drawn.
        numbers: samples over all steps.
        progress: called with (steps done, of all).

    Returns:
        One finding a test. Each has a false-alarm probability of at most 1e-9.
    """
    steps = min(MOST, subject.plan.steps)
    size = max(NARROWEST, numbers // steps)
    canaries = Canaries()
    canaries.add("no loss", tuple(x[0] for x in subject.dataset), 0.0)
    plan = scripted(subject.plan, [[]] * steps, subject.size + 1)
    session, _ = watched(subject, plan, canaries.dataset(subject), units=canaries.units(subject), verify=False)
    zeros = torch.zeros(size, dtype=_type_of(session), device=session.device)
    stddev = (accounted_noise(plan.event) or plan.noise_multiplier) * plan.sensitivity / plan.expected_batch_size
    samples = np.empty((steps, size))
    outside = 0
    with session:
        for step in range(steps):
            release = session.release_sum(zeros)
            outside += _count_outside(plan, release)
            samples[step] = release.double().cpu().numpy() / stddev
            if progress is not None:
                progress(step + 1, steps)
    findings = [
        check_tails(samples),
        check_granularity(samples, collision_rate_of(plan, zeros.dtype, size)),
        check_repeats(samples),
        check_windows(samples),
    ]
    if plan.noise == ROUNDED:
        findings.append(
            Finding(
                check="noise grid", measured=f"{outside:,} samples outside", bound="none", passed=not outside,
                detail=f"{samples.size:,} samples of noise='rounded' against the multiples of its grid",
            )
        )  # fmt: skip
    return findings


def _type_of(session: Watched) -> torch.dtype:
    """Return float64 where a trained parameter has it, and float32 elsewhere."""
    types = {p.dtype for p in session.model.parameters() if p.requires_grad}
    return torch.float64 if torch.float64 in types else torch.float32


def _count_outside(plan: Plan, release: Tensor) -> int:
    """Count entries that are not multiples of the grid of rounded noise, up to the rounding of their own type."""
    if plan.noise != ROUNDED:
        return 0
    spacing = grid_of(plan.sensitivity, release.numel(), plan.stddev) / plan.expected_batch_size
    nearest = ((release.double() / spacing).round() * spacing).to(release.dtype)
    return int((nearest != release).sum())
