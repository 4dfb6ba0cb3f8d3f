"""Norms of mapped matrices, without the product where a side scales few directions apart.

With U = tail · I + V diag(scale − tail) Vᵀ and orthonormal V, the square is
‖g U‖² = tail² ‖g‖² + Σ_k (scale_k² − tail²) ‖g v_k‖². The coordinates g V are half of the work for
g U, and no second g is written. With a low rank on both sides Wᵀ g counts likewise.

Where g lies mostly along directions of small scale, terms cancel. With u the unit roundoff and
λ = 4 as in `norms`, the coordinates lose λ √d u ‖g‖, and a square 2 λ √d u ‖U‖² ‖g‖². This is
added to every square. Where it is more than a small fraction of one, that matrix is mapped, and
the fraction is added.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.linalg.blocks import chunks, roundoff
from dpkfc.linalg.deferred_flags import is_on_accelerator
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.norm_bounds import is_unsure, root
from dpkfc.linalg.row_norms import row_norms
from dpkfc.linalg.sides import Identity, LowRank

_MAPPED = 1 << 18  # entries of gradients that are mapped at once
_MOST = 2.0**-10  # fraction of a square that its rounding may be


def mapped_norms(g: Tensor, plain: Tensor, metric: Kronecker) -> Tensor:
    """Return ‖U_out g U_in‖ `[n]` in float64, each of its own matrix.

    Args:
        g: matrices `[n, d_out, d_in]`.
        plain: upper bounds of ‖g‖ `[n]`.
        metric: the map.
    """
    if metric.is_identity:
        return plain
    is_projected = isinstance(metric.input, LowRank) and not is_on_accelerator(g)
    if is_projected and isinstance(metric.output, Identity | LowRank):
        return _project(g, plain, metric)
    # An empty batch has no parts.
    norms = [plain.new_zeros(0)]
    only_input = replace(metric, output=Identity())
    entries = math.prod(g.shape[1:])
    for rows in chunks(len(g), entries, _MAPPED):
        part = g[rows]
        if is_projected:
            # The output side has no coordinates to take norms of, so it is applied first.
            mapped = metric.output.apply_left(part)
            norms_of_mapped = row_norms(mapped.flatten(1))
            norms.append(_project(mapped, norms_of_mapped, only_input))
        else:
            norms.append(_map(part, metric))
    return torch.cat(norms)


def _map(g: Tensor, metric: Kronecker) -> Tensor:
    """Return the norms of matrices `[n, d_out, d_in]` after both sides were applied."""
    z = metric.apply(g)
    return row_norms(z.flatten(1))


def _project(g: Tensor, plain: Tensor, metric: Kronecker) -> Tensor:
    """Return norms from coordinates; those that nearly cancel are computed from mapped matrices.

    The input side has a low rank. The output side has one too, or is a multiple of the identity.
    """
    v_side, w_side = metric.input, metric.output
    assert isinstance(v_side, LowRank)
    _, d_out, d_in = g.shape
    v_excess = v_side.square_excess()
    # Coordinates g V of the rows of g, `[n, d_out, k]`.
    coordinates = v_side.project(g)
    along_v = coordinates.double().square().sum(1) @ v_excess
    squares = v_side.tail**2 * plain.square() + along_v
    units = 8 * math.sqrt(d_in)
    defect = v_side.defect
    if isinstance(w_side, Identity):
        squares *= w_side.factor**2
    else:
        assert isinstance(w_side, LowRank)
        # ‖wᵀ g U_in‖² of every direction w of the output side, by the same formula.
        directions = w_side.project_left(g)
        along_w = v_side.tail**2 * row_norms(directions).square()
        along_w += w_side.project_left(coordinates).double().square() @ v_excess
        squares = w_side.tail**2 * squares + along_w @ w_side.square_excess()
        # The norms of the directions are rounded up by 66 units.
        units = 2 * units + 8 * math.sqrt(d_out) + 132
        defect += w_side.defect
    fraction = units * roundoff(g) + 4 * defect
    largest_square = (metric.operator_norm * plain).square()
    rounding = fraction * largest_square
    nothing_lost = torch.zeros_like(squares)
    unsure = is_unsure(squares, rounding, nothing_lost, _MOST) & (plain != 0)
    if unsure.any():
        squares[unsure] = _map(g[unsure], metric).square()
    # The same fraction on both sides of the limit, so that no bound jumps there.
    return root(squares, torch.minimum(rounding, _MOST * squares))
