"""Test whether the low bits of releases follow the batch.

Two batches are released many times under the secret noise. They differ in examples and in size,
and their gradients are small. So the noise decides the low bits of every released number, and
each bit has the same frequency for both batches. The test finds bits that follow the batch. It
does not find the weak dependence of floating-point noise on the sum, which only noise="rounded"
removes (Mironov 2012).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, ignore_progress
from dpkfc.audit.noise_tests import count_leading_entries
from dpkfc.audit.p_values import Floats, Integers, p_value_finding, two_sided
from dpkfc.audit.step_canaries import Canaries

RELEASES = 48  # of each batch
MOST_ROWS = 32
BIT_ENTRIES = 20_000  # of a release
BITS = {torch.float64: 16, torch.float32: 8}  # of 52 and of 23


def check_low_bits(subject: Subject, *, progress: Progress = ignore_progress) -> Finding:
    """Compare how often each low bit of each entry is set in releases of two batches.

    Args:
        subject: what is audited.
        progress: called with (releases done, of all).

    Source:
        Fisher's exact test for every bit, with ALPHA divided by their number.
    """
    twice = math.ceil(2 * subject.plan.expected_batch_size)
    size = min(MOST_ROWS, max(2, twice))
    canaries = Canaries()
    examples = len(subject.dataset[-1])
    rows = []
    for number in range(1 + size):
        canaries.add("loss × 1e-4", subject.example(number % examples), 1e-4)
        rows.append(subject.size + number)
    script = [rows[:1], rows[1:]] * RELEASES
    counts: list[Integers] = []
    for number, bits in enumerate(_release_low_bits(subject, canaries, script)):
        if number < 2:
            counts.append(bits.astype(np.int64))
        else:
            counts[number % 2] += bits
        progress(number + 1, len(script))
    p_values = _fisher_p_values()[counts[0], counts[1]]
    detail = (
        f"{p_values.size:,} bits, {RELEASES} releases each of a batch of 1 and of {size} examples; "
        f"worst: bit {int(np.argmin(p_values))}"
    )
    return p_value_finding("low bits", float(p_values.min()), p_values.size, detail)


def _release_low_bits(
    subject: Subject, canaries: Canaries, script: list[list[int]]
) -> Iterator[NDArray[np.bool_]]:
    """Yield the low bits of every release `[bits]`, at fixed weights and a fixed metric."""
    for released in canaries.release_still(subject, script):
        parts = []
        for name, count in count_leading_entries(released, BIT_ENTRIES).items():
            entries = released.gradients[name].flatten()
            parts.append(_low_bits(entries[:count]))
        yield np.concatenate(parts)


def _low_bits(x: Tensor) -> NDArray[np.bool_]:
    """Return the low mantissa bits of floating-point numbers `[n]` as `[n · bits]`."""
    floats = x.detach().cpu().numpy()
    numbers = floats.view(f"u{floats.itemsize}")
    shifts = np.arange(BITS[x.dtype], dtype=numbers.dtype)
    bits = (numbers[:, None] >> shifts) & 1
    return bits.astype(bool).ravel()


def _fisher_p_values() -> Floats:
    """Return Fisher's two-sided p-value for every pair of counts `[RELEASES + 1, RELEASES + 1]`."""
    counts = np.arange(RELEASES + 1)
    one, other = np.meshgrid(counts, counts, indexing="ij")
    law = stats.hypergeom(2 * RELEASES, one + other, RELEASES)
    return two_sided(law.cdf(one), law.sf(one - 1))
