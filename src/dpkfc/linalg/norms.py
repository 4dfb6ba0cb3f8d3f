"""Per-example gradient norms in a metric, each an upper bound of the norm of what is summed.

`per_example_norms` takes the block of one layer and its map. Read on from there: the file is in the
order of the calls. A linear layer or a convolution has one of three methods with the same result:
rank-one (one position), Gram (T×T products, no gradient formed) and materialised (gradients formed
in chunks). A rule on the widths of a layer picks one. Whitened rows or gradients that had to be
formed for the norm are kept. The clipped sum is taken of those very numbers.

The bound of an example may not depend on other examples. A longer neighbour pads all rows of a
micro-batch. If it changed an example's bound, the contribution of that example would change, and
the sum by more than the sensitivity. So the widths of a layer alone decide between Gram and
materialised, never T. The norm of one position is rounded up as by the method for several.
Positions whose output gradient is zero do not enter the slack. Where rounding could move a norm by
more than a small fraction, it is recomputed in float64.

In floating point a Gram norm can come out far too small when positions cancel. The norm of a
gradient that is formed again for the sum can differ from the norm that clipped it. Explicit bounds
on the rounding error cover both, with u the unit roundoff and λ = 4 in the probabilistic model of
Higham and Mary (2019):

* Gram: the squared norm loses at most (T + d_in + d_out) u (Σ_t ‖a_t‖‖b_t‖)², where T counts the
  example's own positions;
* formed twice: the norm loses at most
  T u ‖U_A‖‖U_G‖ Σ_t ‖a_t‖‖b_t‖ + λ (√d_in + √d_out) u ‖U_A‖‖U_G‖‖g‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.multiprocessing.reductions import StorageWeakRef

from dpkfc.linalg.blocks import (
    AnyBlock,
    ConvBlock,
    Lookup,
    MaterializedGradients,
    Outer,
    PerExample,
    Tied,
    chunks,
    roundoff,
    rows_in_memory_order,
    sum_groups,
    sum_squares,
)
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Identity, Kronecker, Span

MatrixBlock = Outer | ConvBlock
MatrixMap = Kronecker | Eigenbasis
_IDENTITY = Kronecker()
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


def per_example_norms(
    block: AnyBlock,
    metric: Entry | None,
    method: str | None = None,
    cache: InputCache | None = None,
) -> LayerNorms:
    """Return upper bounds of ‖U_G g_n U_A‖ for every example of a block.

    Args:
        block: one layer's contribution.
        metric: the layer's map, None for the identity.
        method: gram or materialised to overrule the rule (layers of matrices only).
        cache: results for inputs that several layers of one micro-batch read. None shares nothing.

    Returns:
        Norms `[N]`, NaN or infinite where the example's gradient is. They are at least the exact
        norm up to the last bits.

    Raises:
        ValueError: a metric of the wrong kind or size for the block.
    """
    result = _compute_norms(block, metric, method, cache or InputCache())
    summed = result.block
    if isinstance(summed, MaterializedGradients):
        return result
    entry = None if result.whitened else metric

    def recompute() -> Tensor:
        return _compute_norms(summed, entry, method, InputCache()).norms

    return replace(result, recompute=recompute)


def _compute_norms(
    block: AnyBlock, metric: Entry | None, method: str | None, cache: InputCache
) -> LayerNorms:
    """Return the norms by the method of the block's kind. The arguments are the caller's."""
    if isinstance(block, PerExample):
        return LayerNorms(_elementwise_norms(block, metric), block)
    if isinstance(block, MaterializedGradients):
        return _given_gradient_norms(block, metric)
    metric = metric or _IDENTITY
    if isinstance(metric, Elementwise):
        raise ValueError(
            "this layer needs a Kronecker metric, but the preconditioner holds an elementwise one"
        )
    if isinstance(block, Lookup):
        return LayerNorms(_lookup_norms(block, metric), block)
    if isinstance(block, Tied):
        return _tied_norms(block, metric, method)
    if isinstance(metric, Eigenbasis):
        return _eigenbasis_norms(block, metric)
    method = method or choose_norm_method(block)
    if method == "materialised":
        return _materialised_norms(block, metric)
    return _norms_from_rows(block, metric, method, cache)


# --------------------------------------------------------------------------------------------------
# The method: from the widths of a layer, or as a setting names it.

METHODS = ("gram", "materialised")
"""Methods that a layer with several positions can be told to use."""
_MATERIALISED_WIDTH = 32  # of the narrower side, at most
_SMALL = 1 << 18  # entries of a materialised convolution, at most
_SMALL_TABLE = 1 << 14  # entries of a materialised tied table, at most


def choose_norm_method(block: AnyBlock) -> str:
    """Return the norm method that `per_example_norms` takes for a block.

    Only the widths decide, so that an example's bound cannot follow the length of others. With one
    position the norm is a product, whatever the widths.
    """
    match block:
        case PerExample() | MaterializedGradients():
            return "materialised"
        case Lookup():
            return "lookup"
        case Tied():
            is_small = block.d_out * block.outer.a.shape[-1] <= _SMALL_TABLE
        case _:
            positions, d_in, d_out = block.dimensions
            if positions == 1:
                return "rank-one"
            is_small = is_materialised(d_in, d_out, isinstance(block, ConvBlock))
    return "materialised" if is_small else "gram"


def is_materialised(d_in: int, d_out: int, patches: bool) -> bool:
    """Return whether gradients of these widths (of a convolution: `patches`) are formed."""
    if patches:
        return d_in * d_out <= _SMALL
    return min(d_in, d_out) <= _MATERIALISED_WIDTH


def check_methods(methods: Mapping[str, str], layers: Iterable[str] | None = None) -> None:
    """Refuse an unknown method, or a method for a layer that does not exist.

    Args:
        methods: layer name to method.
        layers: the names of all layers. None leaves the names unchecked.

    Raises:
        ValueError: naming the layer and the choices.
    """
    for layer, method in methods.items():
        if method not in METHODS:
            choices = " or ".join(METHODS)
            raise ValueError(f"norm_methods: layer '{layer}' can use {choices}, not {method!r}")
    if layers is None:
        return
    unknown = sorted(set(methods) - set(layers))
    if unknown:
        names = ", ".join(unknown)
        raise ValueError(
            f"norm_methods names layers that the model has not: {names}; `dpkfc doctor` lists them"
        )


# --------------------------------------------------------------------------------------------------
# Linear layers and convolutions from whitened rows, without materialised gradients.


def _norms_from_rows(
    block: MatrixBlock, metric: Kronecker, method: str, cache: InputCache
) -> LayerNorms:
    """Return norms from whitened rows, without materialised gradients."""
    explicit = block.outer()
    rows = _whiten_rows(explicit, metric, cache)
    if method == "rank-one":
        norms = _kronecker_norms_of_one_position(rows)
    else:
        norms = gram_norms(rows, cache)
    norms = _add_groups(norms, rows.groups)
    if isinstance(block, Outer):
        return LayerNorms(norms, rows, whitened=True)
    # Patches are larger than the image: the sum is taken of the image again.
    plain = norms / max(metric.operator_norm, 1e-30)
    slack = _rounding_of_second_pass(block, metric, plain, *bound_magnitudes(block))
    if not metric.is_identity:
        # Rounding is relative to ‖g‖, which may be far above its part along a flat direction.
        magnitudes, _ = bound_magnitudes(explicit)
        slack += _rounding_of_map(block, metric, magnitudes, magnitudes)
    return LayerNorms(norms + slack, block)


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
        magnitudes, _ = _bound_row_magnitudes(block)
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

_DEPTH = 256  # columns multiplied in float32


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
        bounds.append(_root(squares, rounding))
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
    input_norms = cache.get_or_compute(a, ("norms", ones), lambda: _bound_input_norms(block))
    input_products = cache.get_or_compute(a, ("products", ones), lambda: _input_products(block))
    output_norms = row_norms(block.b)
    output_products = _row_products(block.b)
    magnitudes = (input_norms * output_norms).sum(1)
    position_counts = (output_norms > 0).sum(1)
    products = input_products * output_products
    squares = products.sum((1, 2)).double()
    if block.b.dtype != torch.float32:
        return squares, magnitudes, position_counts
    longest = _DEPTH + 2
    input_depth = min(block.d_in, longest)
    output_depth = min(block.d_out, longest)
    depth_sum = 2 * math.log2(a.shape[1])
    units = input_depth + output_depth + depth_sum + 8
    # Products of tiny rows may vanish, and are multiplied with those of huge rows.
    terms = units + block.d_in + block.d_out
    tiny = torch.finfo(torch.float32).tiny
    row_sizes = input_norms.sum(1) + output_norms.sum(1) + position_counts
    lost = terms * tiny * row_sizes.square()
    rounding = units * roundoff(block.b) * magnitudes.square()
    unsure = _is_unsure(squares, rounding, lost) & (magnitudes > 0)
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
        unsure = _is_unsure(squares[unsure_rows], finer_bound, lost[unsure_rows])
        unsure_rows = unsure_rows[unsure]
        if len(unsure_rows):
            exact = _pick_rows(block, unsure_rows).double()
            squares[unsure_rows] = _gram_squares(exact, InputCache())[0]
    return squares, magnitudes, position_counts


def _input_products(block: Outer) -> Tensor:
    """Return inner products of the inputs `[n, t, t]`, with the implied coordinate."""
    products = _row_products(block.a)
    return products.add_(1) if block.homogeneous else products


def _row_products(x: Tensor) -> Tensor:
    """Return inner products `[n, t, t]` of the rows of `[n, t, d]`.

    Products of long float32 rows are computed in pieces, which are added in float64.
    """
    if x.dtype != torch.float32 or x.shape[2] <= _DEPTH:
        return torch.bmm(x, x.mT)
    n, positions, _ = x.shape
    products = x.new_zeros(n, positions, positions, dtype=torch.float64)
    for part in x.split(_DEPTH, 2):
        products += torch.bmm(part, part.mT)
    return products


def _weigh_pairs(norms: Tensor, sizes: Tensor) -> Tensor:
    """Return Σ_st norms_s sizes_st norms_t, `[n]`."""
    return torch.einsum("ns,nst,nt->n", norms, sizes, norms)


def _is_unsure(
    square: Tensor, rounding: Tensor, lost: Tensor, most: float = MAX_ROUNDING_FRACTION
) -> Tensor:
    """Return which squares may be off by more than the fraction `most`.

    Args:
        square: computed.
        rounding: what rounding may have moved it by.
        lost: what products that are too small for float32 may have taken from it.
        most: fraction of the square.
    """
    # False for NaN.
    is_sure = rounding <= most * square
    return ~is_sure | (square <= lost / most)


def _root(square: Tensor, slack: Tensor) -> Tensor:
    """Return upper bounds of norms from squares and what rounding may take from them."""
    # A negative square is rounding, but NaN stays NaN.
    positive = square.clamp(min=0)
    return (positive + slack + 0 * square).sqrt()


# --------------------------------------------------------------------------------------------------
# Linear layers and convolutions from materialised gradients.

_MAX_KEPT_ENTRIES = 1 << 16  # of one gradient that is kept for the sum


def _materialised_norms(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    """Return norms of gradients that are formed, all at once or in chunks."""
    if _is_kept(block, metric):
        return _norms_of_kept_gradients(block, metric)
    return _norms_of_chunks(block, metric)


def _is_kept(block: MatrixBlock, metric: MatrixMap) -> bool:
    """Return whether materialised gradients are kept for the sum.

    Where that follows the shapes, the bound is the same either way.
    """
    _, d_in, d_out = block.dimensions
    if isinstance(block, ConvBlock):
        # No larger than twice the activations that the tape holds anyway.
        activations = block.x.numel() + block.b.numel()
        rows = max(1, block.batch_size * block.groups)
        return d_in * d_out <= 2 * (activations / rows)
    if isinstance(metric, Eigenbasis):
        return d_in * d_out <= _MAX_KEPT_ENTRIES
    return is_materialised(d_in, d_out, False)


def _norms_of_kept_gradients(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    """Return norms of gradients that are formed and whitened once, and kept for the sum."""
    z = block.per_example()
    plain = _matrix_norms(z, block.groups)
    if not metric.is_identity:
        size = math.prod(z.shape[1:])
        # A few at a time: the products need no second copy of all.
        for rows in chunks(len(z), 64 * size):
            metric.apply_(z[rows])
    norms = _matrix_norms(z, block.groups)
    norms = _bound_from_above(norms, z, plain, block, metric)
    summed = MaterializedGradients(z, block.groups)
    return LayerNorms(norms, summed, whitened=True)


def _norms_of_chunks(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    """Return norms of large gradients, formed in chunks; the sum comes from one product."""

    def bound(part: MatrixBlock) -> Tensor:
        if isinstance(metric, Eigenbasis):
            g = _rotate(part, metric)
            z = g * metric.scale
        else:
            g = part.per_example()
            z = metric.apply(g)
        plain = _matrix_norms(g, block.groups)
        norms = _matrix_norms(z, block.groups)
        return _bound_from_above(norms, z, plain, part, metric)

    norms = block.map_examples(bound, block.num_entries)
    return LayerNorms(norms, block)


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


def _bound_from_above(
    mapped_norms: Tensor, mapped: Tensor, plain_norms: Tensor, block: MatrixBlock, metric: MatrixMap
) -> Tensor:
    """Return upper bounds `[N]`.

    They count what a second pass may add, also where this batch needs no second pass: in another
    batch the same example may be formed twice. If positions cancel almost completely, the norm
    depends on their order. So with T > 1 positions of an `Outer` the bound is at least
    √T u ‖U_A‖‖U_G‖ Σ_t ‖a_t‖‖b_t‖ over `MAX_ROUNDING_FRACTION`.

    Args:
        mapped_norms: norms of the mapped gradients `[N]`, not rounded up.
        mapped: a tensor of their type.
        plain_norms: ‖g‖ `[N]`, or an upper bound.
        block: what is summed.
        metric: its map.
    """
    _, d_in, d_out = block.dimensions
    magnitudes, positions = bound_magnitudes(block)
    size = 2 * math.sqrt(d_in * d_out)
    if isinstance(metric, Eigenbasis):
        size = d_in + d_out + 8  # as with one position
    norms = mapped_norms * (1 + size * roundoff(mapped))
    # Widths alone decide whether gradients of a linear layer in a Kronecker map are kept, so the
    # choice is the same in every batch.
    is_always_kept = isinstance(block, Outer) and isinstance(metric, Kronecker)
    if not (is_always_kept and _is_kept(block, metric)):
        summing = _rounding_of_second_pass(block, metric, plain_norms, magnitudes, positions)
        mapping = _rounding_of_map(block, metric, plain_norms, magnitudes)
        norms = norms + (summing + mapping)
    if isinstance(block, ConvBlock):
        return norms  # images of one size keep the order
    unit = roundoff(mapped) / MAX_ROUNDING_FRACTION * metric.operator_norm
    order = positions.double().sqrt() * unit
    least = torch.where(positions > 1, order * magnitudes, 0.0)
    return torch.maximum(norms, least)


def _rounding_of_second_pass(
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
        # Rotated and rotated back. The gain is that of the flattest direction.
        size = 8 * (math.sqrt(d_in) + math.sqrt(d_out))
    terms = positions * magnitudes + size * plain
    return roundoff(block.b) * metric.operator_norm * terms


def _rounding_of_map(
    block: MatrixBlock, metric: MatrixMap, plain: Tensor, magnitudes: Tensor
) -> Tensor | float:
    """Return how far mapping the sum can move an example's part of it, `[N]`.

    The arguments are those of `_rounding_of_second_pass`. Rows are rotated before they cancel, so
    an eigenbasis counts their magnitudes.
    """
    if metric.is_identity:
        return 0.0
    _, d_in, d_out = block.dimensions
    if isinstance(metric, Eigenbasis):
        units = _count_rotation_units(d_out, d_in, metric)
        sizes = magnitudes
    else:
        units = 4 * (math.sqrt(d_in) + math.sqrt(d_out))
        sizes = plain
    return units * roundoff(block.b) * metric.operator_norm * sizes


def _matrix_norms(z: Tensor, groups: int = 1) -> Tensor:
    """Return upper bounds of ‖z‖ `[N]` of gradients `[N * groups, ...]`."""
    norms = row_norms(z.flatten(1))
    return _add_groups(norms, groups)


def _add_groups(norms: Tensor, groups: int) -> Tensor:
    """Return the norms of examples `[N]` from those of their groups `[N * groups]`."""
    if groups == 1:
        return norms
    by_group = norms.view(-1, groups)
    return by_group.square().sum(1).sqrt()


def _given_gradient_norms(block: MaterializedGradients, metric: Entry | None) -> LayerNorms:
    """Return norms of gradients that are materialised already, of the numbers that are summed."""
    z = block.gradients
    if isinstance(metric, MatrixMap) and not metric.is_identity:
        if block.crosswise:
            z = metric.apply(z.mT).mT
        else:
            z = metric.apply(z)
    norms = _matrix_norms(z, block.groups)
    fraction_lost = 2 * math.sqrt(block.num_entries) * roundoff(z)
    norms *= 1 + fraction_lost
    summed = replace(block, gradients=z)
    return LayerNorms(norms, summed, whitened=True)


# --------------------------------------------------------------------------------------------------
# Norms in an eigenbasis metric: `z = scale ⊙ (Q_outᵀ g Q_in)`, rotated back, which changes no norm.
#
# With one position the norm factors, ‖z‖² = (b̃ ⊙ b̃)ᵀ scale² (ã ⊙ ã) for ã = Q_inᵀ a and
# b̃ = Q_outᵀ b (DP-NGD, Algorithm 2). With several positions it does not, since a scale for every
# entry is not a Kronecker product: gradients are formed in chunks.
#
# Where all but k input directions share one scale (a floor on the eigenvalues makes them equal),
# only those k are rotated: ‖z‖² = ‖scale ⊙ (Q_outᵀ g Q_k)‖² + rest² ‖g (I − Q_k Q_kᵀ)‖². Both terms
# are sums of squares, so nothing cancels.


def _eigenbasis_norms(block: MatrixBlock, metric: Eigenbasis) -> LayerNorms:
    """Return norms where every entry has its own scale.

    With one position they come from squares, otherwise from materialised gradients.
    """
    if metric.rest is not None:
        return _low_rank_norms(block, metric, metric.rest)
    has_one_position = block.dimensions[0] == 1 and block.groups == 1
    if isinstance(block, Outer) and has_one_position:
        magnitudes, positions = bound_magnitudes(block)
        # With one position the magnitude is the norm of the gradient itself.
        slack = _rounding_of_second_pass(block, metric, magnitudes, magnitudes, positions)
        norms = eigenbasis_norms_of_one_position(block, metric)
        return LayerNorms(norms + slack, block)
    return _materialised_norms(block, metric)


def eigenbasis_norms_of_one_position(block: Outer, metric: Eigenbasis) -> Tensor:
    """Return ‖z_n‖ `[N]` in float64 of a block with one position and one group, rounded up.

    Rows are scaled to unit length and the scale to its largest entry first, so that squares neither
    overflow nor vanish. All terms are squares, so nothing cancels. The result is off by a fraction
    of (d_in + d_out) units of roundoff, and by those of the two rotations, which are bounded apart.
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
    fraction += _count_rotation_units(d_out, d_in, metric) * u
    return fraction * largest * norms_a * norms_b


def _count_rotation_units(d_out: int, d_in: int, metric: Eigenbasis) -> float:
    """Return what rotating may cost in units of roundoff, as a fraction of the gradient's norm."""
    rotations = (metric.input is not None) + (metric.output is not None)
    units = rotations * math.sqrt(d_in + d_out)
    return 4 * (units + 1)


def _unit_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Return rows of unit length. Zero and NaN stay what they are."""
    divisors = norms.clamp(min=1e-300).unsqueeze(1)
    return (rows / divisors).to(rows.dtype)


def _low_rank_norms(block: MatrixBlock, metric: Eigenbasis, rest: float) -> LayerNorms:
    """Return norms where a few directions are rotated and the others share the scale `rest`."""

    def measure(g: Tensor) -> Tensor:
        inside, outside = metric.split_low_rank(g)
        return torch.hypot(_matrix_norms(inside), _matrix_norms(outside))

    _, d_in, d_out = block.dimensions
    summed: AnyBlock = block
    if not is_materialised(d_in, d_out, isinstance(block, ConvBlock)):
        inside, outside = _split_rows(block.outer().explicit(), metric)
        outside_norms = gram_norms(outside, InputCache()) * rest
        norms = torch.hypot(inside, outside_norms)
    elif isinstance(block, ConvBlock) and _is_kept(block, metric):
        g = block.per_example()
        summed = MaterializedGradients(g, block.groups)
        norms = measure(g)
    else:
        norms = block.map_examples(lambda part: measure(part.per_example()), block.num_entries)
    norms = _add_groups(norms, block.groups)
    magnitudes, _ = bound_magnitudes(block)
    norms = _bound_from_above(norms, block.b, magnitudes, block, metric)
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
    return _matrix_norms(inside), replace(block, a=complement)


# --------------------------------------------------------------------------------------------------
# Embeddings, whose rows with the same id add up before the norm.


def _lookup_norms(block: Lookup, metric: MatrixMap) -> Tensor:
    """Return norms by a Gram matrix masked to equal ids."""
    if isinstance(metric, Eigenbasis):
        return _eigenbasis_lookup_norms(block, metric)
    b = metric.output.apply(block.b)
    b = metric.input.apply_at(b, block.ids)
    whitened = replace(block, b=b)
    pairs = block.ids.shape[1] ** 2

    def bound(part: Lookup) -> Tensor:
        square, slack = _lookup_squares(part)
        return _root(square, slack)

    norms = whitened.map_examples(bound, pairs)
    if isinstance(metric.output, Identity):
        return norms
    whitening = 4 * math.sqrt(block.d_out) * metric.output.operator_norm
    magnitudes = row_norms(block.b).sum(1)
    magnitudes *= metric.input.operator_norm
    return norms + whitening * roundoff(b) * magnitudes


def _eigenbasis_lookup_norms(block: Lookup, metric: Eigenbasis) -> Tensor:
    """Return norms from rows that are scaled, with what the rotation may take."""
    norms = _lookup_norms(block.scale_rows(metric), _IDENTITY)
    if metric.output is None:
        return norms
    rotation = 8 * math.sqrt(block.d_out) * metric.operator_norm
    magnitudes = vector_norm(block.b, dim=-1)
    return norms + rotation * roundoff(block.b) * magnitudes.sum(1)


def _lookup_squares(block: Lookup) -> tuple[Tensor, Tensor]:
    """Return ‖Σ_t e(id_t) b_tᵀ‖² and what rounding may take from it, `[n]` in float64."""
    b = block.b
    same = block.find_same_ids()
    norms = row_norms(b)
    products = torch.bmm(b, b.mT) * same
    square = products.sum((1, 2)).double()
    magnitudes = torch.einsum("nt,nts,ns->n", norms, same.double(), norms)
    terms = (norms > 0).sum(1) + block.d_out
    slack = terms * roundoff(b) * magnitudes
    is_sure = (slack <= MAX_ROUNDING_FRACTION * square) & (square >= TINY)
    unsure = ~is_sure & (magnitudes > 0)
    if b.dtype == torch.float32 and is_any_set(unsure):
        exact = block.select(unsure).double()
        square[unsure] = _lookup_squares(exact)[0]
    return square, slack


# --------------------------------------------------------------------------------------------------
# One weight `[V, d]` used as an embedding table and as the weight of a linear layer: the norm of
# the SUM of its uses.
#
# With rows read `id_s` and gradients c_s at the embedding's output, inputs a_t and gradients b_t of
# the linear layer,
#
#     g = Σ_s e(id_s) c_sᵀ + Σ_t b_t a_tᵀ
#     ‖g‖² = Σ_{s,s'} [id_s = id_s'] c_s·c_s' + Σ_{t,t'} (a_t·a_t')(b_t·b_t')
#            + 2 Σ_{s,t} b_t[id_s] (c_s·a_t)
#
# and no gradient of V·d entries is formed. In a metric `U_out g U_in` with diagonal U_out = diag(o)
# the same holds for `o[id_s] U_in c_s`, `U_in a_t` and `o b_t`.
#
# Rounding, with u the unit roundoff, γ_k = min(k, 4 √k) u for a dot product of length k (Higham and
# Mary 2019) and M = Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖: the squared norm loses at most (γ_d + γ_V + 4 u)
# M², where entries are added in float64.

_TIED_ROUNDING_LIMIT = 2.0**-3  # fraction of a square; beyond it the square needs float64


def _tied_norms(block: Tied, metric: MatrixMap, method: str | None) -> LayerNorms:
    """Return the norms of ‖U_out g_n U_in‖ and the block to sum.

    Args:
        block: the uses of the weight.
        metric: input side over d, output side over V.
        method: gram or materialised, None for the rule.

    Raises:
        ValueError: an output side that is neither diagonal nor the identity.
    """
    if isinstance(metric, Eigenbasis):
        return LayerNorms(_eigenbasis_tied_norms(block, metric), block)
    if not metric.output.is_diagonal:
        raise ValueError(
            "the output side of a tied embedding runs over its rows and must be diagonal or the "
            f"identity, not {type(metric.output).__name__}"
        )
    method = method or choose_norm_method(block)
    if method == "materialised":
        return LayerNorms(_materialised_tied_norms(block, metric), block)
    rows = _whiten_tied(block, metric)
    return LayerNorms(_gram_tied_norms(rows), rows, whitened=True)


def _whiten_tied(block: Tied, metric: Kronecker) -> Tied:
    """Return the rows `o[id] U_in c`, `U_in a` and `o b`."""
    if metric.is_identity:
        return block
    a = metric.input.apply(block.outer.a)
    b = metric.output.apply(block.outer.b)
    c = metric.input.apply(block.lookup.b)
    c = metric.output.apply_at(c, block.lookup.ids)
    lookup = replace(block.lookup, b=c)
    return Tied(lookup, Outer(a, b))


def _gram_tied_norms(block: Tied) -> Tensor:
    """Return norms by products of rows; those that nearly cancel are computed in float64."""
    s = block.lookup.ids.shape[1]
    _, t, d = block.outer.a.shape
    v = block.d_out
    tiny = torch.finfo(block.like.dtype).tiny
    units = dot_rounding(d) + dot_rounding(v) + 4
    rounding = units * roundoff(block.like)

    def bound(part: Tied) -> Tensor:
        magnitudes, rows_together = _tied_magnitudes(part)
        square = _tied_gram_squares(part)
        slack = rounding * magnitudes.square()
        # Products of tiny rows may vanish, and are multiplied with those of huge rows.
        sizes = rows_together + _count_uses(part)
        lost = (d + v) * tiny * sizes.square()
        # Where positions cancel, rounding follows the shapes, and with them the other examples.
        unsure = _is_unsure(square, slack, lost, _TIED_ROUNDING_LIMIT)
        unsure &= magnitudes > 0
        if part.like.dtype == torch.float32 and is_any_set(unsure):
            exact = part.select(unsure).double()
            square[unsure] = _tied_gram_squares(exact)
        return _root(square, slack)

    return block.map_examples(bound, (s + t) ** 2)


def _tied_gram_squares(block: Tied) -> Tensor:
    """Return ‖g_n‖² `[n]`, added in float64."""
    a = block.outer.a
    b = block.outer.b
    c = block.lookup.b
    lookup_products = torch.bmm(c, c.mT)
    lookup_products *= block.lookup.find_same_ids()
    outer_products = torch.bmm(a, a.mT)
    outer_products *= torch.bmm(b, b.mT)
    mixed_products = torch.bmm(a, c.mT)
    mixed_products *= block.read_outputs()
    squares = _sum_products(lookup_products) + _sum_products(outer_products)
    return squares + 2 * _sum_products(mixed_products)


def _sum_products(x: Tensor) -> Tensor:
    """Return the sum of each matrix of `[n, s, t]`, in float64."""
    return x.sum((1, 2), dtype=torch.float64)


def _materialised_tied_norms(block: Tied, metric: Kronecker) -> Tensor:
    """Return norms of gradients that are formed in chunks; the sum comes from one product."""
    u = roundoff(block.like)
    unit = u * metric.input.operator_norm * metric.output.operator_norm
    terms = 2 * math.sqrt(block.num_entries)
    if not metric.is_identity:
        whitening = math.sqrt(block.d_in) + math.sqrt(block.d_out)
        terms = 4 * whitening + terms

    def bound(part: Tied) -> Tensor:
        g = part.per_example()
        plain = exact_row_norms(g.flatten(1))
        norms = plain
        if not metric.is_identity:
            z = metric.apply(g)
            norms = exact_row_norms(z.flatten(1))
        magnitudes, _ = _tied_magnitudes(part)
        positions = _count_uses(part)
        slack = positions * magnitudes + terms * plain
        # If positions cancel almost completely, the norm depends on their order.
        order = positions.double().sqrt() / MAX_ROUNDING_FRACTION * magnitudes
        least = torch.where(positions > 1, unit * order, 0.0)
        return torch.maximum(norms + unit * slack, least)

    return block.map_examples(bound, block.num_entries)


def _tied_magnitudes(block: Tied) -> tuple[Tensor, Tensor]:
    """Return Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖ and Σ_s ‖c_s‖ + Σ_t (‖a_t‖ + ‖b_t‖), each `[N]`."""
    inputs = block.outer.a
    a = limit_inputs(exact_row_norms(inputs), inputs)
    b = exact_row_norms(block.outer.b)
    c = exact_row_norms(block.lookup.b).sum(1)
    products = (a * b).sum(1)
    sums = (a + b).sum(1)
    return c + products, c + sums


def _count_uses(block: Tied) -> Tensor:
    """Return how many uses of each example have a gradient, `[N]`."""
    reads = _count_moved(block.lookup.b)
    return reads + _count_moved(block.outer.b)


def _eigenbasis_tied_norms(block: Tied, metric: Eigenbasis) -> Tensor:
    """Return norms of gradients that are formed and rotated in chunks."""

    def square(part: Tied) -> Tensor:
        z = metric.apply(part.per_example())
        return sum_squares(z.flatten(1))

    norms = block.map_examples(square, block.num_entries).sqrt()
    magnitudes, positions = bound_magnitudes(block.outer)
    lookup_norms = row_norms(block.lookup.b)
    magnitudes += lookup_norms.sum(1)
    uses = positions + (lookup_norms > 0).sum(1)
    rotation = 8 * math.sqrt(block.d_in + block.d_out)
    terms = uses + rotation
    slack = terms * roundoff(block.like) * metric.operator_norm * magnitudes
    return norms + slack


# --------------------------------------------------------------------------------------------------
# Gradients by role: norm layers, recurrent layers, the fallback.


def _elementwise_norms(block: PerExample, metric: Entry | None) -> Tensor:
    """Return norms over all roles, each entry times its scale."""
    if isinstance(metric, Kronecker) and not metric.is_identity:
        raise ValueError(
            "this layer needs an elementwise metric, but the preconditioner holds a Kronecker one"
        )
    mapped = block.grads
    if metric is not None:
        mapped = metric.apply_roles(mapped)
    squares = []
    for z in mapped.values():
        # An axis more: a parameter may have no axis of its own.
        norms = _matrix_norms(z.unsqueeze(-1))
        squares.append(norms.square())
    terms = 2 * math.sqrt(block.num_entries)
    fraction_lost = terms * roundoff(block.like)
    total = reduce(torch.add, squares)
    return total.sqrt() * (1 + fraction_lost)


# --------------------------------------------------------------------------------------------------
# Norms of rows.

TINY = 2.0**-80
"""Squared norms below it may have lost terms that are too small for float32."""
_SHORT = 64  # longest piece of a row that is summed in float32
_CACHED = 1 << 18  # entries whose copy in float64 stays in the caches of a processor
_REACH = 2.0**100


def row_norms(x: Tensor) -> Tensor:
    """Return upper bounds of the norms over the last axis, in float64, each of its own row.

    The sum of k squares in float32 is off by a fraction of at most (k + 2) u. Rows are therefore
    cut into short pieces, whose sums are added in float64. The bound is tight, since another method
    may bound the same example in a neighbouring batch, where it may move by rounding alone. Rows
    whose squares leave the range of float32 are recomputed in float64. On a GPU, whose values
    the host does not wait for, such rows are bounded by √d times their largest entry.
    """
    d = x.shape[-1]
    if x.dtype != torch.float32:
        return exact_row_norms(x)
    square = _add_squares_of_pieces(x)
    terms = min(d, _SHORT) + 2
    fraction_lost = terms * torch.finfo(x.dtype).eps
    norms = (square * (1 + fraction_lost)).sqrt()
    # False for NaN. Each entry may lose a square that is too small for float32.
    least = TINY * max(1.0, d / 4096)
    is_in_range = (square >= least) & (square < math.inf)
    if d and is_on_accelerator(x):
        largest = vector_norm(x, math.inf, dim=-1)
        bounds = largest.double() * math.sqrt(d)
        return torch.where(is_in_range, norms, bounds)
    if not is_in_range.all():
        unsafe = ~is_in_range
        norms[unsafe] = exact_row_norms(x[unsafe])
    return norms


def _add_squares_of_pieces(x: Tensor) -> Tensor:
    """Return the sum of squares over the last axis, in float32 within a piece of `_SHORT`."""
    whole = x.shape[-1] // _SHORT * _SHORT
    rest = x[..., whole:]
    square = vector_norm(rest, dim=-1).double().square()
    if whole:
        pieces = x[..., :whole].unflatten(-1, (-1, _SHORT))
        norms = vector_norm(pieces, dim=-1)
        square = square + sum_squares(norms)
    return square


def exact_row_norms(x: Tensor) -> Tensor:
    """Return the norms over the last axis, computed in float64."""
    is_small = x.numel() <= _CACHED or x.dtype == torch.float64
    if is_small or is_on_accelerator(x):
        return vector_norm(x, dim=-1, dtype=torch.float64)
    # A few rows at a time: a copy of all rows in float64 would leave the caches of a processor.
    d = x.shape[-1]
    rows_at_once = max(1, _CACHED // d)
    norms = []
    for rows in x.reshape(-1, d).split(rows_at_once):
        wide = rows.double()
        norms.append(vector_norm(wide, dim=-1))
    return torch.cat(norms).view(x.shape[:-1])


def limit_inputs(norms: Tensor, inputs: Tensor) -> Tensor:
    """Return norms of a layer's inputs, infinite beyond 2¹⁰⁰ in float32, which drops the example.

    The sum would multiply such inputs with output gradients times a clip factor below the least
    normal number. Their rounding would be more than the clip allows.
    """
    if inputs.dtype != torch.float32:
        return norms
    return norms.masked_fill(norms > _REACH, math.inf)


def dot_rounding(length: int) -> float:
    """Return how many units of roundoff a dot product loses (Higham and Mary 2019)."""
    return min(float(length), 4 * math.sqrt(length))


# --------------------------------------------------------------------------------------------------
# What the positions of an example add up to before they cancel, Σ_t ‖a_t‖‖b_t‖, and how many have a
# gradient.


def bound_magnitudes(block: MatrixBlock) -> tuple[Tensor, Tensor]:
    """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ and the positions with a gradient, `[N]`.

    They add up over groups. The bound of a convolution is √(Σ‖a_t‖²) √(Σ‖b_t‖²), by
    Cauchy–Schwarz.
    """
    if isinstance(block, Outer):
        sums, position_counts = _bound_row_magnitudes(block)
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


def _bound_row_magnitudes(block: Outer) -> tuple[Tensor, Tensor]:
    """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ and how many b_t are not 0, `[N * groups]`."""
    output_norms = row_norms(block.b)
    products = _bound_input_norms(block) * output_norms
    has_gradient = output_norms > 0
    return products.sum(1), has_gradient.sum(1)


def _bound_input_norms(block: Outer) -> Tensor:
    """Return upper bounds of ‖a_t‖ with the implied coordinate, `[N * groups, T]`."""
    norms = limit_inputs(row_norms(block.a), block.a)
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
            terms = _count_moved(block.b).double()
            return magnitudes, terms.view(-1, block.groups).amax(1)
        case Lookup():
            magnitudes = exact_row_norms(block.b).sum(1)
            return magnitudes, _count_moved(block.b).double()
        case Tied():
            reads, _ = _exact_magnitudes(block.lookup)
            products, _ = _exact_magnitudes(block.outer)
            return reads + products, _count_uses(block).double()
        case ConvBlock():
            return bound_magnitudes(block)
    return 0.0, 0.0


def _count_moved(b: Tensor) -> Tensor:
    """Return how many positions of rows `[N, T, d]` have a gradient, `[N]`."""
    has_gradient = (b != 0).any(-1)
    return has_gradient.sum(1)


# --------------------------------------------------------------------------------------------------
# Deferred flags: questions about the values of a GPU tensor, read all at once, so that the host
# waits for the GPU once a micro-batch and not once a layer.

_DEFERRED: ContextVar[list[Tensor] | None] = ContextVar("deferred", default=None)


def is_on_accelerator(x: Tensor) -> bool:
    """Return whether reading a number of x makes the host wait for another device."""
    return x.device.type != "cpu"


def is_any_set(flags: Tensor) -> bool:
    """Return whether any flag is set.

    Inside `defer_flags` it returns False for flags on another device and stores the question.
    """
    deferred = _DEFERRED.get()
    if deferred is None or not is_on_accelerator(flags):
        return bool(flags.any())
    deferred.append(flags.any())
    return False


@contextmanager
def defer_flags() -> Iterator[list[Tensor]]:
    """Collect the questions that `is_any_set` leaves open in the body, each one flag `[]`.

    Results of the body are valid where every flag turns out to be False.
    """
    deferred: list[Tensor] = []
    token = _DEFERRED.set(deferred)
    try:
        yield deferred
    finally:
        _DEFERRED.reset(token)


# --------------------------------------------------------------------------------------------------
# Results that neighbouring layers share.

_SHARED_ENTRIES = 1 << 21  # of a result that is stored
_TENSORS = 2  # rows, and the same rows whitened


class InputCache:
    """Results for the last two tensors of a micro-batch, which the next layer may read too.

    Queries, keys and values of one attention read the same tensor. A stored result is exactly what
    would be computed again from the same memory. The cache keeps no rows alive.
    """

    def __init__(self) -> None:
        self._results: list[tuple[StorageWeakRef, Any, dict[Hashable, Tensor]]] = []

    def get_or_compute(self, rows: Tensor, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result for these rows under a key, stored or computed.

        Args:
            rows: a tensor that does not change while the layers of one micro-batch are processed.
            key: what is computed.
            compute: a function of the rows and the key alone. Its result must not be changed.
        """
        place = (rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device)
        results: dict[Hashable, Tensor] = {}
        for storage, known_place, known in self._results:
            if known_place == place and not storage.expired():
                results = known
                break
        if key in results:
            return results[key]
        result = compute()
        if result.numel() > _SHARED_ENTRIES:
            return result
        if not results:
            storage = StorageWeakRef(rows.untyped_storage())
            self._results = [(storage, place, results), *self._results[: _TENSORS - 1]]
        results[key] = result
        return result
