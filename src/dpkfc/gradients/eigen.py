"""Norms in an eigenbasis metric: `z = scale ⊙ (Q_outᵀ g Q_in)`, rotated back, which changes no norm.

With one position the norm factors, ‖z‖² = (b̃ ⊙ b̃)ᵀ scale² (ã ⊙ ã) for ã = Q_inᵀ a and b̃ = Q_outᵀ b (DP-NGD, Algorithm 2).
With several it does not, since a scale of its own for every entry is no Kronecker product: gradients are formed in chunks.

Where all but k input directions share one scale (a floor on the eigenvalues makes them equal), only those k are turned to:
‖z‖² = ‖scale ⊙ (Q_outᵀ g Q_k)‖² + rest² ‖g (I − Q_k Q_kᵀ)‖². Both are sums of squares, so nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Lookup, Outer, Tied
from dpkfc.gradients.lengths import lengths
from dpkfc.metric import Eigenbasis

__all__ = ["as_plain_lookup", "formed_squares", "parted_norms", "parted_rows", "rank_one_norms", "rank_one_turning"]


def rank_one_norms(block: Outer, metric: Eigenbasis) -> Tensor:
    """‖z_n‖ `[N]` in float64 of a block with one position and one group, rounded up.

    Rows are brought to unit length and the scale to its largest entry first, so that squares neither overflow nor vanish:
    tiny inputs beside huge output gradients keep their norm. All terms are squares, so nothing cancels: the result is off
    by a share of (d_in + d_out) units of roundoff, and by those of the two rotations, which are bounded beside it.
    """
    a, b = block.explicit().a[:, 0], block.b[:, 0]
    long_a, long_b = _length(a), _length(b)
    rotated_a = _rotated(a, long_a, metric.input).square()
    rotated_b = _rotated(b, long_b, metric.output).square()
    bound, (d_out, d_in) = metric.bound, metric.scale.shape
    squares = ((rotated_b @ (metric.scale / bound).square()) * rotated_a).double().sum(1)
    u = torch.finfo(b.dtype).eps / 2
    share = squares.sqrt() * (1 + (d_in + d_out + 8) * u) + rank_one_turning(d_out, d_in, metric) * u
    return share * bound * long_a * long_b


def rank_one_turning(d_out: int, d_in: int, metric: Eigenbasis) -> float:
    """Units of roundoff, as a share of the gradient's own length, that turning into the basis may cost."""
    rotations = (metric.input is not None) + (metric.output is not None)
    return 4 * (rotations * math.sqrt(d_in + d_out) + 1)


def parted_norms(g: Tensor, metric: Eigenbasis) -> Tensor:
    """‖z‖ `[N]` in float64 of formed gradients `[N, d_out, d_in]`, in a metric of a few directions and the rest."""
    inside, outside = metric.parted(g)
    return torch.hypot(lengths(inside.flatten(1)), lengths(outside.flatten(1)))


def parted_rows(rows: Outer, metric: Eigenbasis) -> tuple[Tensor, Outer]:
    """Lengths `[N * groups]` of what is turned and scaled, and the rows of what is left, not scaled yet.

    Args:
        rows: a block.
        metric: with a few directions and the rest.
    """
    assert metric.input is not None
    explicit = rows.explicit()
    turned = explicit.a @ metric.input
    b = explicit.b if metric.output is None else explicit.b @ metric.output
    inside = (b.mT @ turned) * metric.scale
    return lengths(inside.flatten(1)), replace(explicit, a=explicit.a - turned @ metric.input.T)


def _length(rows: Tensor) -> Tensor:
    """Length of every row `[N]` in float64."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _rotated(rows: Tensor, lengths: Tensor, basis: Tensor | None) -> Tensor:
    """Rows of unit length (zero and NaN stay what they are) in a basis."""
    unit = (rows / lengths.clamp(min=1e-300).unsqueeze(1)).to(rows.dtype)
    return unit if basis is None else unit @ basis


def as_plain_lookup(block: Lookup, metric: Eigenbasis) -> Lookup:
    """A lookup whose gradients have the norms that those of `block` have in the metric.

    Raises:
        ValueError: a metric that rotates the rows of a table.
    """
    if metric.input is not None:
        raise ValueError("the input side of an embedding cannot be rotated; use a diagonal one")
    b = block.b if metric.output is None else block.b @ metric.output
    return replace(block, b=b * metric.scale.T[block.ids])


def formed_squares(block: Tied, metric: Eigenbasis, chunks: Callable[[int, int], Iterator[slice]]) -> Tensor:
    """‖z_n‖² `[N]` in float64 of a tied table, whose gradients `[V, d]` are formed a few examples at a time."""
    rows, columns = block.outer.b.shape[2], block.outer.a.shape[2]
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for part in chunks(block.batch_size, rows * columns):
        lookup = replace(block.lookup, ids=block.lookup.ids[part], b=block.lookup.b[part])
        g = Tied(lookup, replace(block.outer, a=block.outer.a[part], b=block.outer.b[part])).per_example()
        pieces.append(metric.whiten(g).double().flatten(1).square().sum(1))
    return torch.cat(pieces)
