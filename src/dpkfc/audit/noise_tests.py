"""Test the noise of the session that ships, with secret streams.

Every step of a noise test gets examples without a gradient, so a release is noise alone. Divided by
the standard deviation that the event accounts for, its entries must be independent standard normal
numbers: within a release, between releases, and across a checkpoint.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from dpkfc.audit.charges import accounted_noise
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, coarsest_spacing, ignore_progress
from dpkfc.audit.noise_samples import (
    Samples,
    check_granularity,
    check_repeats,
    check_tails,
    check_windows,
    collision_rate,
    judge_noise,
)
from dpkfc.audit.step_canaries import Canaries
from dpkfc.config import Plan
from dpkfc.distributed.context import flatten, widest_dtype
from dpkfc.privacy.grid import ROUNDED, grid_of
from dpkfc.privacy.mechanism import Released
from dpkfc.rng_state import all_states, restore_all_states

NUMBERS = 4_000_000  # stddev known to 0.035 %
MOST_ENTRIES = 1_000_000  # of a release
LOST_STEPS = 3  # between checkpoint and crash
RUN_NUMBERS = 2_000_000  # samples in all
MOST_RELEASES = 10_000
FEWEST_SAMPLES = 16  # of a release


def count_leading_entries(released: Released, most: int) -> dict[str, int]:
    """Return how many leading entries of every parameter are tested, about `most` in all."""
    sizes = {name: x.numel() for name, x in released.gradients.items()}
    total = sum(sizes.values())
    counts = {}
    for name, size in sizes.items():
        counts[name] = min(size, math.ceil(most * size / total))
    return counts


def _accounted_stddev(plan: Plan) -> float:
    """Return the standard deviation of a release according to the event that is accounted for."""
    noise_multiplier = accounted_noise(plan.event) or plan.noise_multiplier
    return noise_multiplier * plan.sensitivity / plan.expected_batch_size


def _collision_rate_of(plan: Plan, tensors: Collection[Tensor]) -> float:
    """Return the probability that two entries of a release of pure noise are equal.

    Args:
        plan: decides the standard deviation and, for noise="rounded", the grid.
        tensors: of the release.
    """
    grid = 0.0
    if plan.noise == ROUNDED:
        size = sum(x.numel() for x in tensors)
        grid = grid_of(plan.sensitivity, size, plan.stddev)
        grid /= plan.stddev
    return collision_rate(coarsest_spacing(tensors), grid)


def check_noise(
    subject: Subject, *, steps: int | None = None, progress: Progress = ignore_progress
) -> list[Finding]:
    """Test the distribution of releases of pure noise, across a crash and a restart.

    The first session runs a few steps beyond its checkpoint and is lost. The second one continues
    from the checkpoint. Both begin with the same state of every global generator. The scale comes
    from the event that is accounted for.

    Args:
        subject: what is audited.
        steps: releases; by default as many as give four million numbers, between 40 and 500.
        progress: called with (steps done, of all).
    """
    canaries = Canaries()
    for _ in range(4):
        canaries.add("zero", subject.example(0), factor=0.0)
    size = sum(p.numel() for p in subject.model().parameters() if p.requires_grad)
    if not steps:
        enough = NUMBERS // max(1, size)
        steps = max(40, min(500, enough))
    # Two micro-batches alternate with empty batches: noise must be added once a batch.
    zeros = list(range(subject.size, subject.size + 4))
    script = ([[], zeros] * steps)[:steps]
    stddev = _accounted_stddev(subject.plan)
    samples: list[Samples] = []
    entries: dict[str, int] = {}
    rate = 0.0
    for released in _release_across_restart(subject.bare, canaries, script):
        if not samples:
            entries = count_leading_entries(released, MOST_ENTRIES)
            rate = _collision_rate_of(subject.plan, released.gradients.values())
        samples.append(standardize(released, stddev, entries))
        progress(len(samples), steps)
    return judge_noise(samples, entries, rate)


def _release_across_restart(
    subject: Subject, canaries: Canaries, script: list[list[int]]
) -> Iterator[Released]:
    """Yield releases of a session that crashes after its checkpoint, and of its continuation."""
    loss = canaries.loss(subject)
    saved = len(script) // 2
    # Noise that comes from a global generator is then repeated.
    states = all_states()
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        for is_continued in (False, True):
            restore_all_states(states)
            session, _ = canaries.open_session(
                subject,
                script,
                micro=subject.fewest_rows,
                ledger_path=f"{folder}/ledger.jsonl",
            )
            with session:
                if is_continued:
                    session.restore(f"{folder}/checkpoint")
                for batch in session.batches():
                    session.step(batch, loss)
                    done += 1
                    yield session.take()
                    if not is_continued and done == saved:
                        session.save(f"{folder}/checkpoint")
                    if not is_continued and done == saved + LOST_STEPS:
                        break


def standardize(
    released: Released, stddev: float, entries: Mapping[str, int] | None = None
) -> Samples:
    """Return the entries of a release over their standard deviation `[d]`.

    Args:
        released: the release.
        stddev: of its noise.
        entries: how many leading entries of every parameter are taken; None takes all.
    """
    tensors = released.gradients
    if entries is not None:
        tensors = {name: x.flatten()[: entries[name]] for name, x in tensors.items()}
    numbers = flatten(tensors, torch.float64) / stddev
    return numbers.cpu().numpy()


def check_run_noise(
    subject: Subject, *, numbers: int = RUN_NUMBERS, progress: Progress = ignore_progress
) -> list[Finding]:
    """Test tails, granularity, repeats and variance of the noise of every step of a plan.

    The session releases sums of zeros, as often as the plan has steps. It reads no batch and takes
    no gradient, so thousands of steps take about a second. This shows noise that repeats after some
    draws, and noise that weakens during a run.

    Args:
        subject: what is audited. The first MOST_RELEASES steps of its plan are sampled.
        numbers: samples over all steps.
        progress: called with (steps done, of all).

    Returns:
        One finding a test. Each has a false-alarm probability of at most 1e-9.
    """
    steps = min(MOST_RELEASES, subject.plan.steps)
    size = max(FEWEST_SAMPLES, numbers // steps)
    canaries = Canaries()
    canaries.add("no loss", subject.example(0), 0.0)
    plan = subject.plan
    session, _ = canaries.open_session(subject, [[]] * steps)
    zeros = torch.zeros(size, dtype=widest_dtype(session._parameters), device=session.device)
    stddev = _accounted_stddev(plan)
    samples = np.empty((steps, size))
    outside = 0
    with session:
        for step in range(steps):
            release = session.release_sum(zeros)
            outside += _count_outside_grid(plan, release)
            samples[step] = release.double().cpu().numpy() / stddev
            progress(step + 1, steps)
    findings = [
        check_tails(samples),
        check_granularity(samples, _collision_rate_of(plan, [zeros])),
        check_repeats(samples),
        check_windows(samples),
    ]
    if plan.noise == ROUNDED:
        finding = Finding(
            check="noise grid",
            measured=f"{outside:,} samples outside",
            bound="none",
            passed=not outside,
            detail=f"{samples.size:,} samples of noise='rounded' against the multiples of its grid",
        )
        findings.append(finding)
    return findings


def _count_outside_grid(plan: Plan, release: Tensor) -> int:
    """Count entries that are not multiples of the grid of rounded noise, up to their rounding."""
    if plan.noise != ROUNDED:
        return 0
    size = release.numel()
    grid_of_sum = grid_of(plan.sensitivity, size, plan.stddev)
    spacing = grid_of_sum / plan.expected_batch_size
    multiples = (release.double() / spacing).round()
    nearest = (multiples * spacing).to(release.dtype)
    return int((nearest != release).sum())
