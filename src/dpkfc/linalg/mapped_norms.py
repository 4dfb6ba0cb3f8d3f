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
    norms = [plain.new_zeros(0)]
    one_sided = replace(metric, output=Identity())
    for rows in chunks(len(g), math.prod(g.shape[1:]), _MAPPED):
        if is_projected:
            z = metric.output.apply_left(g[rows])
            norms.append(_project(z, row_norms(z.flatten(1)), one_sided))
        else:
            norms.append(_map(g[rows], metric))
    return torch.cat(norms)


def _map(g: Tensor, metric: Kronecker) -> Tensor:
    z = metric.apply(g)
    return row_norms(z.flatten(1))


def _project(g: Tensor, plain: Tensor, metric: Kronecker) -> Tensor:
    """Return norms from coordinates; those that nearly cancel are computed from mapped matrices."""
    into, output = metric.input, metric.output
    assert isinstance(into, LowRank)
    weights = into.square_excess()
    inside = into.project(g)
    squares = into.tail**2 * plain.square() + inside.double().square().sum(1) @ weights
    _, d_out, d_in = g.shape
    units = 8 * math.sqrt(d_in)
    defect = into.defect
    if isinstance(output, Identity):
        squares *= output.factor**2
    else:
        assert isinstance(output, LowRank)
        rows = into.tail**2 * row_norms(output.project_left(g)).square()
        rows += output.project_left(inside).double().square() @ weights
        squares = output.tail**2 * squares + rows @ output.square_excess()
        # The norms of the rows are rounded up by 66 units.
        units = 2 * units + 8 * math.sqrt(d_out) + 132
        defect += output.defect
    fraction = units * roundoff(g) + 4 * defect
    rounding = fraction * (metric.operator_norm * plain).square()
    unsure = is_unsure(squares, rounding, torch.zeros_like(squares), _MOST) & (plain != 0)
    if unsure.any():
        squares[unsure] = _map(g[unsure], metric).square()
    # The same fraction on both sides of the limit, so that no bound jumps there.
    return root(squares, torch.minimum(rounding, _MOST * squares))
