"""Draw a Poisson batch by the distances between its examples, at a cost of the batch alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

# The probability of one example, given all others, is below q by this much before rounding, and
# never above q after it (docs/accounting.md).
_MARGIN = 2.0**-46
_SMALLEST_RATE = 2.0**-40


def draw_by_gaps(size: int, rate: float, generator: np.random.Generator) -> Indices:
    """Return the examples of one Poisson batch, increasing, at a cost of the batch alone.

    The distance to the next sampled example is geometric. A distance that would be larger than a
    block is drawn again from the end of the block, which has the same law and keeps the digits of
    rare distances.

    Args:
        size: number of examples N.
        rate: q in (0, 1].
        generator: of uniform 64-bit integers.

    Raises:
        ValueError: a rate below 2⁻⁴⁰, at which rounding could be seen.
    """
    if rate == 1:
        return np.arange(size)
    if rate < _SMALLEST_RATE:
        raise ValueError(f"sample_rate is {rate:.3g}; batches can be drawn for 1e-12 or more")
    decay = -math.log1p(-(rate - _MARGIN))
    block = max(1, math.floor(1 / decay))
    ends_in_block = -math.expm1(-decay * block)
    drawn = []
    position = 0
    while position < size:
        expected = (size - position) * rate / ends_in_block
        bits = generator.integers(
            0, 2**64, math.ceil(expected + 6 * math.sqrt(expected) + 8), dtype=np.uint64
        )
        gaps, is_sampled = _gaps(bits, decay, block)
        ends = position + np.cumsum(gaps)
        drawn.append(ends[is_sampled] - 1)
        position = int(ends[-1])
    examples = np.concatenate(drawn)
    return examples[: np.searchsorted(examples, size)]


def _gaps(bits: NDArray[np.uint64], decay: float, block: int) -> tuple[Indices, NDArray[np.bool_]]:
    """Return geometric distances `[n]` of at most a block, and whether an example is at their end.

    Args:
        bits: uniform integers `[n]`.
        decay: -log(1 - q).
        block: most examples that one distance passes.
    """
    # Small numbers keep all their digits, and so do small distances.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-64
    with np.errstate(divide="ignore"):
        skipped = np.floor(-np.log1p(-uniform) / decay)
    gaps = np.minimum(skipped, block - 1).astype(np.int64) + 1
    return gaps, skipped < block
