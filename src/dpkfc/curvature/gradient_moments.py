"""Second moments of gradients, entry by entry, for diagonal metrics.

    example    v = 1/N Σ_n g_n²                     diagonal of the Fisher information
    batch      v = 1/M Σ_m (1/B Σ_(n in m) g_n)²    squares of mini-batch means, as in RMSProp

Moments of a matrix-shaped layer have the layout of its metric: `[d_out, d_in]` with the bias in the
last column, averaged over the groups of a convolution, `[d, V]` for an embedding and `[V, d]` for a
tied table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dpkfc.linalg.blocks import Block, accumulation_dtype
from dpkfc.linalg.metric import Eigenbasis, Elementwise
from dpkfc.tensors import NamedTensors, Tensors

MATRIX_ROLE = "weight"  # role of a matrix-shaped layer


@dataclass(frozen=True)
class Sums:
    """Sums of gradients of one layer, or of their squares; both add up over micro-batches.

    Attributes:
        kind: outer, lookup, tied or elementwise, as in `LayerFactors`.
        values: float64. Role to `[groups, d_out, d_in]`, `[V, d]` of a table, or the shape of the
            parameter; of moments in the layout above, only `weight` for matrix-shaped layers.
        count: gradients that were added or squared.
        dtype: of the layer's gradients.
    """

    kind: str
    values: NamedTensors
    count: int
    dtype: torch.dtype

    def __add__(self: _Added, other: _Added) -> _Added:
        """Return the sums of both."""
        values = {role: x + other.values[role] for role, x in self.values.items()}
        return replace(self, values=values, count=self.count + other.count)

    def square(self, size: int) -> Moments:
        """Return the moments of one mini-batch: the square of its mean gradient.

        Args:
            size: examples of the mini-batch.

        Raises:
            ValueError: a gradient that is not finite.
        """
        squares = {role: (x / size).square() for role, x in self.values.items()}
        return _moments(self.kind, squares, 1, self.dtype)


_Added = TypeVar("_Added", bound=Sums)


@dataclass(frozen=True)
class Moments(Sums):
    """Sum of squares of one layer over `count` gradients."""

    @property
    def mean(self) -> Tensors:
        """v, float64."""
        return {role: x / self.count for role, x in self.values.items()}

    @property
    def spectrum(self) -> Tensors:
        """v as one vector a role, on the CPU."""
        return {role: x.flatten().cpu() for role, x in self.mean.items()}

    def entry(self, scale: NamedTensors) -> Eigenbasis | Elementwise:
        """Return the diagonal map with these factors, in the layout of `values`."""
        typed = {}
        for role, x in scale.items():
            factors = x.to(self.dtype)
            typed[role] = factors.contiguous()
        if self.kind == "elementwise":
            return Elementwise(typed)
        return Eigenbasis(typed[MATRIX_ROLE])


def summed_gradients(block: Block) -> Sums:
    """Return the sum of one layer's gradients over the examples of a block."""
    with torch.no_grad():
        sums = block.explicit().sum_gradients()
    return Sums(block.kind, _by_role(sums), block.batch_size, accumulation_dtype(block.like))


def squared_gradients(block: Block) -> Moments:
    """Return the squares of every example's gradient, added over one micro-batch.

    Args:
        block: one layer's contribution, in the per-example scale.

    Raises:
        ValueError: a gradient that is not finite.
    """
    with torch.no_grad():
        squares = block.explicit().sum_squares()
    return _moments(block.kind, _by_role(squares), block.batch_size, accumulation_dtype(block.like))


def _moments(kind: str, squares: NamedTensors, count: int, dtype: torch.dtype) -> Moments:
    """Return moments in their layout from squares in the layout of the gradients."""
    if kind == "outer":
        mean = squares[MATRIX_ROLE].mean(0)
        squares = {MATRIX_ROLE: mean}
    elif kind == "lookup":
        squares = {MATRIX_ROLE: squares[MATRIX_ROLE].T}
    for x in squares.values():
        if not torch.isfinite(x).all():
            raise ValueError("NaN or infinity in the layer's gradients on the probe")
    return Moments(kind, squares, count, dtype)


def _by_role(gradients: Tensor | Tensors) -> Tensors:
    if isinstance(gradients, dict):
        return gradients
    return {MATRIX_ROLE: gradients}
