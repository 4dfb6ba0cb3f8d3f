"""Norms of linear layers and convolutions: from whitened rows, or of gradients that are formed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.linalg.blocks import ConvBlock, MaterializedGradients, Outer, chunks, roundoff
from dpkfc.linalg.deferred_flags import is_any_set
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.magnitudes import bound_input_norms, bound_magnitudes, bound_row_magnitudes
from dpkfc.linalg.mapped_norms import mapped_norms
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norm_bounds import (
    MAX_ROUNDING_FRACTION,
    LayerNorms,
    MatrixBlock,
    MatrixMap,
    add_groups,
    count_rotation_units,
    is_unsure,
    root,
)
from dpkfc.linalg.norm_methods import is_materialised
from dpkfc.linalg.row_norms import (
    count_pieces,
    count_terms,
    exact_row_norms,
    has_columns,
    limit_inputs,
    row_norms,
)
from dpkfc.linalg.sides import Identity, LowRank

# --------------------------------------------------------------------------------------------------
# Linear layers and convolutions from whitened rows, without materialised gradients.


def norms_from_rows(
    block: MatrixBlock, metric: Kronecker, method: str, cache: InputCache
) -> LayerNorms:
    """Return norms from whitened rows, without materialised gradients."""
    if isinstance(block, ConvBlock):
        rows = _whiten_patches(block, metric)
    else:
        rows = _whiten_rows(block, metric, cache)
    if method == "rank-one":
        norms = _kronecker_norms_of_one_position(rows)
    else:
        norms = gram_norms(rows, cache)
    norms = add_groups(norms, rows.groups)
    if isinstance(block, Outer):
        return LayerNorms(norms, rows, whitened=True)
    # Patches are larger than the image: the sum is taken of the image again.
    plain = norms / max(metric.operator_norm, 1e-30)
    magnitudes, positions = bound_magnitudes(block)
    slack = rounding_of_second_pass(block, metric, plain, magnitudes, positions)
    # Rounding is relative to ‖g‖, which may be far above its part along a flat direction.
    slack += _rounding_of_map(block, metric, magnitudes, magnitudes)
    return LayerNorms(norms + slack, block)


def _whiten_patches(block: ConvBlock, metric: Kronecker) -> Outer:
    """Return the rows ã = U_in a and b̃ = U_out b of patches, in the memory of the patches."""
    sides = metric.merge_scalar()
    rows = block.outer()
    b = sides.output.apply(rows.b)
    if isinstance(sides.input, LowRank) and has_columns(rows.a):
        coordinates = block.project_patches(sides.input.vectors)
        a = sides.input.map_columns_(rows.a.mT, coordinates).mT
    else:
        a = sides.input.apply(rows.a)
    return replace(rows, a=a, b=b)


def _whiten_rows(block: Outer, metric: Kronecker, cache: InputCache) -> Outer:
    """Return the rows ã = U_in a and b̃ = U_out b.

    The column of ones stays implied where the input side is the identity.
    """
    sides = metric.merge_scalar()
    b = sides.output.apply(block.b)
    if sides.input == Identity():
        return replace(block, b=b)
    whiten = sides.input.apply
    if block.homogeneous:
        whiten = sides.input.apply_homogeneous
    # Layers may share a side, and differ in the factor that was merged into it.
    factor = 1.0
    if sides is not metric:
        factor = metric.output.operator_norm
    key = (id(metric.input), factor, block.homogeneous)
    a = cache.get_or_compute(block.a, key, lambda: whiten(block.a))
    return Outer(a, b, block.groups)


def _kronecker_norms_of_one_position(block: Outer) -> Tensor:
    """Return norms of one position.

    They are rounded up exactly as the method for several positions would. Else a longer neighbour
    would change the bound.
    """
    _, d_in, d_out = block.dimensions
    u = roundoff(block.b)
    if not is_materialised(d_in, d_out, patches=False):
        fraction_lost = (1 + d_in + d_out) * u
        magnitudes, _ = bound_row_magnitudes(block)
        return magnitudes * math.sqrt(1 + fraction_lost)
    input_norms = exact_row_norms(block.a[:, 0])
    input_norms = limit_inputs(input_norms, block.a)
    squares = input_norms.square() + block.homogeneous
    output_norms = exact_row_norms(block.b[:, 0])
    fraction_lost = 2 * math.sqrt(d_in * d_out) * u
    return squares.sqrt() * output_norms * (1 + fraction_lost)


# Squared norms through Gram matrices, each a function of its own example and correct in its first
# two digits.
#
# What rounding may take from a square is bounded with it. Where the bound is more than a small
# fraction of the square, the rows of that example, and of it alone, are recomputed in float64.


def gram_norms(block: Outer, cache: InputCache) -> Tensor:
    """Return upper bounds of ‖Σ_t b_t a_tᵀ‖ `[N * groups]` in float64.

    Args:
        block: the rows.
        cache: results that other layers have computed from the same inputs.
    """
    positions, d_in, d_out = block.dimensions
    bounds = [block.b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(len(block.a), positions * positions):
        part = _pick_rows(block, rows)
        squares, magnitudes, position_counts = _gram_squares(part, cache)
        largest = magnitudes.square()
        squares = torch.where(position_counts == 1, largest, squares)
        terms = position_counts + (d_in + d_out)
        rounding = terms * roundoff(block.a) * largest
        bounds.append(root(squares, rounding))
    return torch.cat(bounds)


def _pick_rows(block: Outer, rows: slice | Tensor) -> Outer:
    """Return the block of some rows of `[N * groups]`."""
    a = block.a[rows]
    b = block.b[rows]
    return replace(block, a=a, b=b)


def _gram_squares(block: Outer, cache: InputCache) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖Σ_t b_t a_tᵀ‖², Σ_t ‖a_t‖‖b_t‖ and how many b_t are not 0, `[n]`."""
    a = block.a
    ones = block.homogeneous
    input_products = cache.get_or_compute(a, "products", lambda: _row_products(a))
    output_products = _row_products(block.b)
    input_norms = cache.get_or_compute(
        a, ("norms", ones), lambda: bound_input_norms(block, input_products)
    )
    output_norms = row_norms(block.b, output_products)
    magnitudes = (input_norms * output_norms).sum(1)
    position_counts = (output_norms > 0).sum(1)
    if ones:
        input_products = input_products + 1
    products = input_products * output_products
    squares = products.sum((1, 2)).double()
    if block.b.dtype != torch.float32:
        return squares, magnitudes, position_counts
    input_depth = count_terms(block.d_in)
    output_depth = count_terms(block.d_out)
    depth_sum = 2 * math.log2(a.shape[1])
    units = input_depth + output_depth + depth_sum + 8
    # Products of tiny rows may vanish, and are multiplied with products of huge rows.
    terms = units + block.d_in + block.d_out
    tiny = torch.finfo(torch.float32).tiny
    row_sizes = input_norms.sum(1) + output_norms.sum(1) + position_counts
    lost = terms * tiny * row_sizes.square()
    rounding = units * roundoff(block.b) * magnitudes.square()
    unsure = is_unsure(squares, rounding, lost) & (magnitudes > 0)
    if is_any_set(unsure):
        unsure_rows = unsure.nonzero()[:, 0]
        # Entries of one factor are off by the depth of their sums, in units of the norms that they
        # come from, which counts by the size of the other factor.
        input_sizes = input_products[unsure_rows].abs().double()
        output_sizes = output_products[unsure_rows].abs().double()
        finer_bound = input_depth * _weigh_pairs(input_norms[unsure_rows], output_sizes)
        finer_bound += output_depth * _weigh_pairs(output_norms[unsure_rows], input_sizes)
        sizes = input_sizes * output_sizes
        finer_bound += (depth_sum + 8) * sizes.sum((1, 2))
        finer_bound *= roundoff(block.b)
        unsure = is_unsure(squares[unsure_rows], finer_bound, lost[unsure_rows])
        unsure_rows = unsure_rows[unsure]
        if len(unsure_rows):
            exact = _pick_rows(block, unsure_rows).double()
            squares[unsure_rows] = _gram_squares(exact, InputCache())[0]
    return squares, magnitudes, position_counts


def _row_products(x: Tensor) -> Tensor:
    """Return inner products `[n, t, t]` of the rows of `[n, t, d]`.

    Long float32 rows are multiplied in pieces, so that few terms are added one after another.
    """
    if x.dtype != torch.float32:
        return torch.bmm(x, x.mT)
    first, *others = x.chunk(count_pieces(x.shape[2]), 2)
    products = torch.bmm(first, first.mT)
    for part in others:
        products += torch.bmm(part, part.mT)
    return products


def _weigh_pairs(norms: Tensor, sizes: Tensor) -> Tensor:
    """Return Σ_st norms_s sizes_st norms_t, `[n]`."""
    return torch.einsum("ns,nst,nt->n", norms, sizes, norms)


# --------------------------------------------------------------------------------------------------
# Linear layers and convolutions from materialised gradients.

_MAX_KEPT_ENTRIES = 1 << 16  # of one gradient that is kept for the sum
_SMALL_CONVOLUTION = 1 << 14  # entries of one gradient that is kept whatever the size of images


def materialised_norms(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    """Return norms of gradients that are formed, all at once or in chunks."""
    if block.batch_size and is_kept(block, metric):
        g = block.per_example()
        norms = _bound_gradients(block, metric, g)
        return LayerNorms(norms, MaterializedGradients(g, block.groups))

    def bound(part: MatrixBlock) -> Tensor:
        return _bound_gradients(part, metric, None)

    norms = block.map_examples(bound, block.num_entries)
    return LayerNorms(norms, block)


def _bound_gradients(block: MatrixBlock, metric: MatrixMap, g: Tensor | None) -> Tensor:
    """Return upper bounds `[N]` from the gradients of a block, None where they are not formed."""
    if isinstance(metric, Eigenbasis):
        plain, norms = _rotated_norms(block, metric, g)
    else:
        g = block.per_example() if g is None else g
        plain = row_norms(g.flatten(1))
        norms = mapped_norms(g, plain, metric)
    plain = add_groups(plain, block.groups)
    norms = add_groups(norms, block.groups)
    return bound_from_above(norms, plain, block, metric)


def _rotated_norms(
    block: MatrixBlock, metric: Eigenbasis, g: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ‖g‖ and ‖z‖ `[N * groups]`, a few gradients at a time where all are formed."""
    if g is None:
        parts: Iterable[Tensor] = [_rotate(block, metric)]
    else:
        parts = (metric.rotate(g[rows]) for rows in chunks(len(g), 64 * math.prod(g.shape[1:])))
    norms = []
    for z in parts:
        scaled = z * metric.scale
        norms.append(torch.stack([row_norms(z.flatten(1)), row_norms(scaled.flatten(1))]))
    plain, mapped = torch.cat(norms, 1)
    return plain, mapped


def is_kept(block: MatrixBlock, metric: MatrixMap) -> bool:
    """Return whether materialised gradients are kept for the sum.

    Where that follows the shapes, the bound is the same either way.
    """
    _, d_in, d_out = block.dimensions
    if is_always_kept(block, metric):
        return True
    if isinstance(block, ConvBlock):
        # No larger than twice the activations that the tape holds anyway.
        activations = block.x.numel() + block.b.numel()
        rows = max(1, block.batch_size * block.groups)
        return d_in * d_out <= 2 * (activations / rows)
    return isinstance(metric, Eigenbasis) and d_in * d_out <= _MAX_KEPT_ENTRIES


def is_always_kept(block: MatrixBlock, metric: MatrixMap) -> bool:
    """Return whether widths alone say that gradients are kept: in every batch, or in none."""
    if not isinstance(metric, Kronecker):
        return False
    if isinstance(block, ConvBlock):
        return block.num_entries <= _SMALL_CONVOLUTION
    _, d_in, d_out = block.dimensions
    return is_materialised(d_in, d_out, False)


def _rotate(block: MatrixBlock, metric: Eigenbasis) -> Tensor:
    """Return gradients in the eigenbasis `[N * groups, d_out, d_in]`.

    Rows are rotated before they are summed where that is less work. The bound is the same either
    way, so that an example's bound does not follow the length of others.
    """
    positions, d_in, d_out = block.dimensions
    input_width = (metric.input is not None) * d_in
    output_width = (metric.output is not None) * d_out
    cost_of_rows = positions * (input_width**2 + output_width**2)
    cost_of_gradients = d_in * d_out * (input_width + output_width)
    if cost_of_rows >= cost_of_gradients:
        return metric.rotate(block.per_example())
    rows = block.outer().explicit()
    b, a, _ = metric.map_factors(rows.b, rows.a)
    return b.mT @ a


def bound_from_above(
    norms: Tensor, plain_norms: Tensor, block: MatrixBlock, metric: MatrixMap
) -> Tensor:
    """Return upper bounds `[N]`.

    They count what a second pass may add, also where this batch needs no second pass: in another
    batch the same example may be formed twice. If positions cancel almost completely, the norm
    depends on their order. So with T > 1 positions of an `Outer` the bound is at least
    √T u ‖U_A‖‖U_G‖ Σ_t ‖a_t‖‖b_t‖ over `MAX_ROUNDING_FRACTION`.

    Args:
        norms: of the mapped gradients `[N]`, not rounded up.
        plain_norms: ‖g‖ `[N]`, or an upper bound.
        block: what is summed.
        metric: its map.
    """
    _, d_in, d_out = block.dimensions
    size = 2 * math.sqrt(d_in * d_out)
    if isinstance(metric, Eigenbasis):
        size = d_in + d_out + 8  # as with one position
    u = roundoff(block.b)
    norms = norms * (1 + size * u)
    is_summed_here = is_always_kept(block, metric)
    if isinstance(block, ConvBlock) and is_summed_here:
        # Images of one size keep the order.
        return norms + _rounding_of_map(block, metric, plain_norms, plain_norms)
    magnitudes, positions = bound_magnitudes(block)
    norms = norms + _rounding_of_map(block, metric, plain_norms, magnitudes)
    if not is_summed_here:
        norms += rounding_of_second_pass(block, metric, plain_norms, magnitudes, positions)
    if isinstance(block, ConvBlock):
        return norms
    unit = u / MAX_ROUNDING_FRACTION * metric.operator_norm
    order = positions.double().sqrt() * unit
    least = torch.where(positions > 1, order * magnitudes, 0.0)
    return torch.maximum(norms, least)


def rounding_of_second_pass(
    block: MatrixBlock, metric: MatrixMap, plain: Tensor, magnitudes: Tensor, positions: Tensor
) -> Tensor:
    """Return how far the norm in the whitened sum can be from the norm computed here, `[N]`.

    Args:
        block: what is summed.
        metric: its map.
        plain: ‖g‖ `[N]`, in float64 whatever the sum is computed in.
        magnitudes: Σ_t ‖a_t‖‖b_t‖ `[N]`.
        positions: with a gradient `[N]`.
    """
    _, d_in, d_out = block.dimensions
    size = 2 * math.sqrt(d_in * d_out)
    if isinstance(metric, Eigenbasis):
        # Rotated and rotated back. The gain is the flattest direction's.
        size = 8 * (math.sqrt(d_in) + math.sqrt(d_out))
    terms = positions * magnitudes + size * plain
    return roundoff(block.b) * metric.operator_norm * terms


def _rounding_of_map(
    block: MatrixBlock, metric: MatrixMap, plain: Tensor, magnitudes: Tensor
) -> Tensor | float:
    """Return how far mapping the sum can move an example's part of it, `[N]`.

    The arguments are as in `rounding_of_second_pass`. Rows are rotated before they cancel, so an
    eigenbasis counts their magnitudes.
    """
    if metric.is_identity:
        return 0.0
    _, d_in, d_out = block.dimensions
    if isinstance(metric, Eigenbasis):
        units = count_rotation_units(d_out, d_in, metric)
        sizes = magnitudes
    else:
        units = 4 * (math.sqrt(d_in) + math.sqrt(d_out))
        sizes = plain
    return units * roundoff(block.b) * metric.operator_norm * sizes
