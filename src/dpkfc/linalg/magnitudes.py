"""What the positions of an example add up to before they cancel, Σ_t ‖a_t‖‖b_t‖."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpkfc.linalg.blocks import (
    AnyBlock,
    ConvBlock,
    Lookup,
    Outer,
    Tied,
    roundoff,
    rows_in_memory_order,
    sum_groups,
)
from dpkfc.linalg.norm_bounds import MatrixBlock
from dpkfc.linalg.row_norms import dot_rounding, exact_row_norms, limit_inputs, row_norms
from dpkfc.linalg.subspace import Span


def bound_magnitudes(block: MatrixBlock) -> tuple[Tensor, Tensor]:
    """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ and the positions with a gradient, `[N]`.

    They add up over groups. The bound of a convolution is √(Σ‖a_t‖²) √(Σ‖b_t‖²), by
    Cauchy–Schwarz.
    """
    if isinstance(block, Outer):
        sums, position_counts = bound_row_magnitudes(block)
        by_group = position_counts.view(-1, block.groups)
        return sum_groups(sums, block.groups), by_group.amax(1)
    positions = block.count_positions()
    by_view = (block.batch_size, block.views)
    input_norms = row_norms(rows_in_memory_order(block.x))
    input_norms = limit_inputs(input_norms, block.x).view(by_view)
    input_norms = vector_norm(input_norms, dim=1)
    output_norms = row_norms(rows_in_memory_order(block.b)).view(by_view)
    output_norms = vector_norm(output_norms, dim=1)
    copies = math.prod(block.kernel)
    squares = input_norms.square() * copies * block.weight
    if block.bias:
        squares += positions
    return squares.sqrt() * output_norms, positions


def bound_row_magnitudes(block: Outer) -> tuple[Tensor, Tensor]:
    """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ and how many b_t are not 0, `[N * groups]`."""
    output_norms = row_norms(block.b)
    products = bound_input_norms(block) * output_norms
    has_gradient = output_norms > 0
    return products.sum(1), has_gradient.sum(1)


def bound_input_norms(block: Outer, products: Tensor | None = None) -> Tensor:
    """Return upper bounds of ‖a_t‖ with the implied coordinate, `[N * groups, T]`.

    Args:
        block: the rows.
        products: inner products of the inputs, where they are known.
    """
    norms = limit_inputs(row_norms(block.a, products), block.a)
    squares = norms.square() + block.homogeneous
    return squares.sqrt()


def product_error(block: AnyBlock, span: Span, norms: Tensor, gain: float) -> Tensor:
    """Return an upper bound `[N]` of the rounding of `block.inner_products(span)`.

    It counts the rounding of gradients that are formed again for the sum too.

    Args:
        block: of one layer.
        span: the directions of the products.
        norms: upper bounds of the norms of the gradients `[N]`.
        gain: upper bound of the operator norm of the basis.
    """
    magnitudes, terms = _exact_magnitudes(block)
    again = 2 * terms * gain
    if isinstance(block, Lookup):
        length = terms * block.d_out
        rounding = torch.minimum(length, 4 * length.sqrt())
        return roundoff(block.b) * (rounding * span.length + again) * magnitudes
    products = dot_rounding(span.size) * span.length * norms
    return roundoff(block.like) * (products + again * magnitudes)


def _exact_magnitudes(block: AnyBlock) -> tuple[Any, Any]:
    """Return Σ_t ‖a_t‖‖b_t‖ from norms in float64 and its terms, `[N]`.

    Both are 0 for gradients that are not formed again.
    """
    match block:
        case Outer():
            squares = exact_row_norms(block.a).square() + block.homogeneous
            products = squares.sqrt() * exact_row_norms(block.b)
            magnitudes = sum_groups(products.sum(1), block.groups)
            terms = count_moved(block.b).double()
            return magnitudes, terms.view(-1, block.groups).amax(1)
        case Lookup():
            magnitudes = exact_row_norms(block.b).sum(1)
            return magnitudes, count_moved(block.b).double()
        case Tied():
            reads, _ = _exact_magnitudes(block.lookup)
            products, _ = _exact_magnitudes(block.outer)
            return reads + products, count_uses(block).double()
        case ConvBlock():
            return bound_magnitudes(block)
    return 0.0, 0.0


def count_moved(b: Tensor) -> Tensor:
    """Return how many positions of rows `[N, T, d]` have a gradient, `[N]`."""
    has_gradient = (b != 0).any(-1)
    return has_gradient.sum(1)


def count_uses(block: Tied) -> Tensor:
    """Return how many uses of each example have a gradient, `[N]`."""
    reads = count_moved(block.lookup.b)
    return reads + count_moved(block.outer.b)
