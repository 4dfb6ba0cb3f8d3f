"""Norms in an eigenbasis metric.

`z = scale ⊙ (Q_outᵀ g Q_in)` is rotated back, which changes no norm. With one position the norm
factors, ‖z‖² = (b̃ ⊙ b̃)ᵀ scale² (ã ⊙ ã) for ã = Q_inᵀ a and b̃ = Q_outᵀ b (DP-NGD, Algorithm 2).
With several positions it does not, since a scale for every entry is not a Kronecker product:
gradients are formed in chunks.

Where all but k input directions share one scale (a floor on the eigenvalues makes them equal),
only those k are rotated: ‖z‖² = ‖scale ⊙ (Q_outᵀ g Q_k)‖² + rest² ‖g (I − Q_k Q_kᵀ)‖². Both terms
are sums of squares, so nothing cancels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.linalg.blocks import AnyBlock, ConvBlock, MaterializedGradients, Outer, roundoff
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.linear_norms import (
    bound_from_above,
    gram_norms,
    is_kept,
    materialised_norms,
    rounding_of_second_pass,
)
from dpkfc.linalg.magnitudes import bound_magnitudes
from dpkfc.linalg.metric import Eigenbasis
from dpkfc.linalg.norm_bounds import (
    LayerNorms,
    MatrixBlock,
    add_groups,
    count_rotation_units,
    matrix_norms,
)
from dpkfc.linalg.norm_methods import is_materialised
from dpkfc.linalg.row_norms import exact_row_norms


def eigenbasis_norms(block: MatrixBlock, metric: Eigenbasis) -> LayerNorms:
    """Return norms where every entry has its own scale.

    With one position they come from squares, otherwise from materialised gradients.
    """
    if metric.rest is not None:
        return _low_rank_norms(block, metric, metric.rest)
    has_one_position = block.dimensions[0] == 1 and block.groups == 1
    if isinstance(block, Outer) and has_one_position:
        magnitudes, positions = bound_magnitudes(block)
        # With one position the magnitude is the norm of the gradient itself.
        slack = rounding_of_second_pass(block, metric, magnitudes, magnitudes, positions)
        norms = eigenbasis_norms_of_one_position(block, metric)
        return LayerNorms(norms + slack, block)
    return materialised_norms(block, metric)


def eigenbasis_norms_of_one_position(block: Outer, metric: Eigenbasis) -> Tensor:
    """Return ‖z_n‖ `[N]` in float64 of a block with one position and one group, rounded up.

    Rows are scaled to unit length and the scale to its largest entry first, so that squares neither
    overflow nor vanish. All terms are squares, so nothing cancels. The result is off by a fraction
    of (d_in + d_out) units of roundoff, and by the errors of the two rotations, which are bounded
    apart.
    """
    a = block.explicit().a[:, 0]
    b = block.b[:, 0]
    u = roundoff(b)
    norms_a = exact_row_norms(a)
    norms_b = exact_row_norms(b)
    unit_a = _unit_rows(a, norms_a)
    unit_b = _unit_rows(b, norms_b)
    rotated_b, rotated_a, _ = metric.map_factors(unit_b, unit_a)
    largest = metric.operator_norm
    relative_scale = metric.scale / largest
    terms = rotated_b.square() @ relative_scale.square()
    terms *= rotated_a.square()
    fraction = terms.double().sum(1).sqrt()
    d_out, d_in = metric.scale.shape
    fraction *= 1 + (d_in + d_out + 8) * u
    fraction += count_rotation_units(d_out, d_in, metric) * u
    return fraction * largest * norms_a * norms_b


def _unit_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Return rows of unit length. Zero and NaN stay what they are."""
    divisors = norms.clamp(min=1e-300).unsqueeze(1)
    return (rows / divisors).to(rows.dtype)


def _low_rank_norms(block: MatrixBlock, metric: Eigenbasis, rest: float) -> LayerNorms:
    """Return norms where a few directions are rotated and the others share the scale `rest`."""

    def measure(g: Tensor) -> Tensor:
        inside, outside = metric.split_low_rank(g)
        return torch.hypot(matrix_norms(inside), matrix_norms(outside))

    _, d_in, d_out = block.dimensions
    summed: AnyBlock = block
    if not is_materialised(d_in, d_out, isinstance(block, ConvBlock)):
        inside, outside = _split_rows(block.outer().explicit(), metric)
        outside_norms = gram_norms(outside, InputCache()) * rest
        norms = torch.hypot(inside, outside_norms)
    elif isinstance(block, ConvBlock) and is_kept(block, metric):
        g = block.per_example()
        summed = MaterializedGradients(g, block.groups)
        norms = measure(g)
    else:
        norms = block.map_examples(lambda part: measure(part.per_example()), block.num_entries)
    norms = add_groups(norms, block.groups)
    magnitudes, _ = bound_magnitudes(block)
    norms = bound_from_above(norms, magnitudes, block, metric)
    return LayerNorms(norms, summed)


def _split_rows(block: Outer, metric: Eigenbasis) -> tuple[Tensor, Outer]:
    """Split rows along the columns of a low-rank Q_in.

    Returns:
        Norms `[N * groups]` of what is rotated and scaled, and the rows of the orthogonal
        complement, not scaled yet.
    """
    along, complement = metric.split_inputs(block.a)
    b = block.b
    if metric.output is not None:
        b = b @ metric.output
    inside = (b.mT @ along) * metric.scale
    return matrix_norms(inside), replace(block, a=complement)
