"""Norms in an eigenbasis metric: `z = scale ⊙ (Q_outᵀ g Q_in)`, rotated back, which changes no norm.

With one position the norm factors, ‖z‖² = (b̃ ⊙ b̃)ᵀ scale² (ã ⊙ ã) for ã = Q_inᵀ a and b̃ = Q_outᵀ b (DP-NGD, Algorithm 2).
With several it does not, since a scale of its own for every entry is no Kronecker product: gradients are formed in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Lookup, Outer, Tied
from dpkfc.metric import Eigenbasis, Kronecker

__all__ = ["as_plain_lookup", "formed_squares", "rank_one_squares"]


def rank_one_squares(block: Outer, metric: Eigenbasis) -> Tensor:
    """‖z_n‖² `[N]` in float64 of a block with one position and one group, rounded up.

    All terms are squares, so nothing cancels: the result is off by a share of (d_in + d_out) units of roundoff, and by
    those of the two rotations, which are bounded beside it.
    """
    a, b = block.explicit().a[:, 0], block.b[:, 0]
    rotated_a = (a if metric.input is None else a @ metric.input).square()
    rotated_b = (b if metric.output is None else b @ metric.output).square()
    squares = ((rotated_b @ metric.scale.square()) * rotated_a).double().sum(1)
    size, u = sum(metric.scale.shape), torch.finfo(b.dtype).eps / 2
    rotations = (metric.input is not None) + (metric.output is not None)
    lengths = a.double().norm(dim=1) * b.double().norm(dim=1) * metric.bound
    slack = 4 * rotations * math.sqrt(size) * u * lengths
    return (squares.sqrt() * (1 + (size + 8) * u) + slack).square()


def as_plain_lookup(block: Lookup, metric: Eigenbasis) -> Lookup:
    """A lookup whose gradients have the norms that those of `block` have in the metric.

    Raises:
        ValueError: a metric that rotates the rows of a table.
    """
    if metric.input is not None:
        raise ValueError("the input side of an embedding cannot be rotated; use a diagonal one")
    b = block.b if metric.output is None else block.b @ metric.output
    return replace(block, b=b * metric.scale.T[block.ids])


def formed_squares(block: Tied, metric: Eigenbasis | Kronecker, chunks: Callable[[int, int], object]) -> Tensor:
    """‖z_n‖² `[N]` in float64 of a tied table, whose gradients `[V, d]` are formed a few examples at a time."""
    rows, columns = block.outer.b.shape[2], block.outer.a.shape[2]
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for part in chunks(block.batch_size, rows * columns):  # type: ignore[attr-defined]
        lookup = replace(block.lookup, ids=block.lookup.ids[part], b=block.lookup.b[part])
        g = Tied(lookup, replace(block.outer, a=block.outer.a[part], b=block.outer.b[part])).per_example()
        pieces.append(metric.whiten(g).double().flatten(1).square().sum(1))
    return torch.cat(pieces)
