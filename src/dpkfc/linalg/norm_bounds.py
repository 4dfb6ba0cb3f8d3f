"""What the norms of all kinds of layers share: their result, and bounds from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Outer
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.row_norms import row_norms

MatrixBlock = Outer | ConvBlock
MatrixMap = Kronecker | Eigenbasis
IDENTITY = Kronecker()
MAX_ROUNDING_FRACTION = 2.0**-8
"""Fraction of a norm that rounding may move. Beyond it the norm is computed in float64."""


@dataclass(frozen=True)
class LayerNorms:
    """Norms of one layer and the block that the clipped sum is to be taken of.

    Attributes:
        norms: upper bounds `[N]`.
        block: the block itself, its whitened rows, or the gradients formed from it.
        whitened: whether `block` is in the coordinates of the metric already.
        recompute: returns the norms again, in float64 where that is needed. It is called if a
            flag on a GPU that was not read in time turns out to be True.
    """

    norms: Tensor
    block: AnyBlock
    whitened: bool = False
    recompute: Callable[[], Tensor] | None = None


def is_unsure(
    square: Tensor, rounding: Tensor, lost: Tensor, most: float = MAX_ROUNDING_FRACTION
) -> Tensor:
    """Return which squares may be off by more than the fraction `most`.

    Args:
        square: computed.
        rounding: what rounding may have moved it by.
        lost: what products that are too small for float32 may have taken from it.
        most: fraction of the square.
    """
    # False for NaN, and where all are zero.
    return ~(rounding + lost < most * square)


def root(square: Tensor, slack: Tensor) -> Tensor:
    """Return upper bounds of norms from squares and what rounding may take from them."""
    # A negative square is rounding, but NaN stays NaN.
    positive = square.clamp(min=0)
    return (positive + slack + 0 * square).sqrt()


def matrix_norms(z: Tensor, groups: int = 1) -> Tensor:
    """Return upper bounds of ‖z‖ `[N]` of gradients `[N * groups, ...]`."""
    norms = row_norms(z.flatten(1))
    return add_groups(norms, groups)


def add_groups(norms: Tensor, groups: int) -> Tensor:
    """Return the norms of examples `[N]` from the norms of their groups `[N * groups]`."""
    if groups == 1:
        return norms
    by_group = norms.view(-1, groups)
    return by_group.square().sum(1).sqrt()


def count_rotation_units(d_out: int, d_in: int, metric: Eigenbasis) -> float:
    """Return what rotating may cost in units of roundoff, as a fraction of the gradient's norm."""
    rotations = (metric.input is not None) + (metric.output is not None)
    units = rotations * math.sqrt(d_in + d_out)
    return 4 * (units + 1)
