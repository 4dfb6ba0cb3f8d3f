"""The low bits of releases: they must not depend on the batch.

Two batches are released many times under the secret noise. They differ in examples and in size, and their gradients are
small. So the noise decides the low bits of every released number, and each bit has the same frequency for both batches.
The test finds bits that follow the batch. It does not find the weak dependence of floating-point noise on the sum, which only
noise="rounded" removes (Mironov 2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.noise_samples import ALPHA
from dpkfc.assurance.subject import Subject, scripted, unmoved, watched
from dpkfc.assurance.verdict import Finding

__all__ = ["low_bits"]

RELEASES = 48  # of each batch
LARGEST = 32  # rows
ENTRIES = 20_000  # of a release, from the beginning of every parameter
BITS = {torch.float64: 16, torch.float32: 8}  # of 52 and of 23
Counts = NDArray[np.int64]


def low_bits(subject: Subject, *, progress: Callable[[int, int], None] | None = None) -> Finding:
    """Compare how often each low bit of each entry is set in releases of two batches.

    Args:
        subject: what is audited.
        progress: called with (releases done, of all).

    Source:
        Fisher's exact test for every bit, with ALPHA divided by their number.
    """
    large = min(LARGEST, max(2, math.ceil(2 * subject.plan.expected_batch_size)))
    canaries, count = Canaries(), len(subject.dataset[-1])
    for number in range(1 + large):
        canaries.add("loss × 1e-4", tuple(x[number % count] for x in subject.dataset), 1e-4)
    rows = [subject.size + number for number in range(1 + large)]
    script = [rows[:1], rows[1:]] * RELEASES
    ones: list[Counts] = []
    for number, bits in enumerate(_bits(subject, canaries, script)):
        if number < 2:
            ones.append(bits.astype(np.int64))
        else:
            ones[number % 2] += bits
        if progress is not None:
            progress(number + 1, len(script))
    p_values = _p_values()[ones[0], ones[1]]
    limit = ALPHA / p_values.size
    worst = float(p_values.min())
    entry = int(np.argmin(p_values))
    return Finding(
        check="low bits", measured=f"p = {worst:.2g}", bound=f"at least {limit:.1g}", passed=worst >= limit,
        detail=f"{p_values.size:,} bits, {RELEASES} releases each of a batch of 1 and of {large} examples; worst: bit {entry}",
    )  # fmt: skip


def _bits(subject: Subject, canaries: Canaries, script: list[list[int]]) -> Iterator[NDArray[np.bool_]]:
    """Yield the low bits of every release `[bits]`, at fixed weights and a fixed metric."""
    plan = scripted(unmoved(subject.plan), script, subject.size + len(canaries.names))
    units = canaries.units(subject)
    session, walk = watched(subject, plan, canaries.dataset(subject), units=units, verify=False, still=True)
    loss = canaries.loss(subject)
    with session:
        for batch in session.batches():
            session.step(batch, loss)
            walk.handed.clear()
            tensors = session.take().gradients
            total = sum(x.numel() for x in tensors.values())
            parts = [x.flatten()[: math.ceil(ENTRIES * x.numel() / total)] for x in tensors.values()]
            yield np.concatenate([_low_bits(x) for x in parts])


def _low_bits(x: Tensor) -> NDArray[np.bool_]:
    """Return the low mantissa bits of floating-point numbers `[n]` as `[n · bits]`."""
    bits = BITS[x.dtype]
    whole = x.detach().cpu().numpy().view(np.uint64 if x.dtype == torch.float64 else np.uint32)
    return ((whole[:, None] >> np.arange(bits, dtype=whole.dtype)) & 1).astype(bool).ravel()


def _p_values() -> NDArray[np.float64]:
    """Return Fisher's two-sided p-value for every pair of counts `[RELEASES + 1, RELEASES + 1]`."""
    counts = np.arange(RELEASES + 1)
    one, other = np.meshgrid(counts, counts, indexing="ij")
    low = stats.hypergeom.cdf(one, 2 * RELEASES, one + other, RELEASES)
    high = stats.hypergeom.sf(one - 1, 2 * RELEASES, one + other, RELEASES)
    return np.minimum(1.0, 2 * np.minimum(low, high))
