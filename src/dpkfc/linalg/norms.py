"""Per-example gradient norms in a metric, each an upper bound of the norm of what is summed.

Three methods give the same number: rank-one (one position), Gram (T×T products, no gradient formed)
and materialised (gradients formed in chunks). A rule on the widths of a layer picks one. Whitened
rows or gradients that had to be formed for the norm are kept. The clipped sum is taken of those
very numbers.

The bound of an example may not depend on other examples. A longer neighbour pads all rows of a
micro-batch. If that moved bounds, it would move contributions too, and the sum by more than the
sensitivity. So the method never follows T, and positions whose output gradient is zero do not enter
the slack. Where rounding could move a norm by more than a small fraction, it is recomputed in
float64.

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
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpkfc.linalg.blocks import (
    TINY,
    AnyBlock,
    ConvBlock,
    Lookup,
    MaterializedGradients,
    Outer,
    PerExample,
    Tied,
    chunks,
    dot_rounding,
    exact_row_norms,
    is_any_set,
    limit_inputs,
    roundoff,
    row_norms,
    sum_squares,
)
from dpkfc.linalg.metric import Eigenbasis, Entry, Identity, Kronecker

SURE = 2.0**-8
"""Fraction of a norm that rounding may move. Beyond it the norm is computed in float64."""
_IDENTITY = Kronecker()
MatrixBlock = Outer | ConvBlock
MatrixMap = Kronecker | Eigenbasis


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


def rank_one_norms(block: Outer, metric: Eigenbasis) -> Tensor:
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
    a = _unit_rows(a, norms_a)
    b = _unit_rows(b, norms_b)
    b, a, _ = metric.map_factors(b, a)
    bound = metric.operator_norm
    relative_scale = metric.scale / bound
    terms = b.square() @ relative_scale.square()
    terms *= a.square()
    fraction = terms.double().sum(1).sqrt()
    d_out, d_in = metric.scale.shape
    fraction *= 1 + (d_in + d_out + 8) * u
    fraction += rank_one_rotation_error(d_out, d_in, metric) * u
    return fraction * bound * norms_a * norms_b


def rank_one_rotation_error(d_out: int, d_in: int, metric: Eigenbasis) -> float:
    """Return what rotating may cost in units of roundoff, as a fraction of the gradient's norm."""
    rotations = (metric.input is not None) + (metric.output is not None)
    return 4 * (rotations * math.sqrt(d_in + d_out) + 1)


def low_rank_norms(g: Tensor, metric: Eigenbasis) -> Tensor:
    """Return ‖z‖ `[N]` in float64 of gradients `[N, d_out, d_in]`, in a low-rank eigenbasis."""
    inside, outside = metric.split_low_rank(g)
    return torch.hypot(_matrix_norms(inside), _matrix_norms(outside))


def _matrix_norms(z: Tensor, groups: int = 1) -> Tensor:
    """Return upper bounds of ‖z‖ `[N]` of gradients `[N * groups, ...]`."""
    return _add_groups(row_norms(z.flatten(1)), groups)


def split_rows(block: Outer, metric: Eigenbasis) -> tuple[Tensor, Outer]:
    """Split rows along the columns of a low-rank Q_in.

    Returns:
        Norms `[N * groups]` of what is rotated and scaled, and the rows of the orthogonal
        complement, not scaled yet.
    """
    assert metric.input is not None
    explicit = block.explicit()
    rotated = explicit.a @ metric.input
    b = explicit.b
    if metric.output is not None:
        b = b @ metric.output
    inside = (b.mT @ rotated) * metric.scale
    complement = explicit.a - rotated @ metric.input.T
    return _matrix_norms(inside), replace(explicit, a=complement)


def _unit_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Return rows of unit length. Zero and NaN stay what they are."""
    divisors = norms.clamp(min=1e-300).unsqueeze(1)
    return (rows / divisors).to(rows.dtype)


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

_SMALL_TABLE = 1 << 14  # entries of a table that is formed
_CANCELS = 2.0**-3  # slack over square that needs float64


def tied_choice(block: Tied, metric: Kronecker) -> Choice:
    """Return the norm method of a tied weight, which the widths alone decide."""
    s = block.lookup.ids.shape[1]
    t, d = block.outer.a.shape[1:]
    v = block.lookup.num_rows
    row = metric.input.cost(d) or d
    whitening = (s + t) * row + t * v
    products = s * s * d + t * t * (v + d) + s * t * d
    gram = whitening + products
    materialised = t * v * d + v * row + v * d
    method = "materialised" if v * d <= _SMALL_TABLE else "gram"
    return Choice(method, gram, materialised)


def tied_norms(block: Tied, metric: Kronecker, method: str) -> LayerNorms:
    """Return the norms of ‖U_out g_n U_in‖ and the block to sum.

    Args:
        block: the uses of the weight.
        metric: input side over d, output side over V.
        method: gram or materialised.

    Raises:
        ValueError: an output side that is neither diagonal nor the identity.
    """
    if not metric.output.is_diagonal:
        raise ValueError(
            "the output side of a tied embedding runs over its rows and must be diagonal or the "
            f"identity, not {type(metric.output).__name__}"
        )
    if method == "materialised":
        norms = _materialised_tied_norms(block, metric)
        return LayerNorms(norms, block)
    rows = _whiten_tied(block, metric)
    norms = _gram_tied_norms(rows)
    return LayerNorms(norms, rows, True)


def _whiten_tied(block: Tied, metric: Kronecker) -> Tied:
    """Return the rows `o[id] U_in c`, `U_in a` and `o b`."""
    if metric.is_identity:
        return block
    a = metric.input.apply(block.outer.a)
    b = metric.output.apply(block.outer.b)
    c = metric.input.apply(block.lookup.b)
    c = metric.output.apply_at(c, block.lookup.ids)
    return Tied(replace(block.lookup, b=c), Outer(a, b))


def _gram_tied_norms(block: Tied) -> Tensor:
    s = block.lookup.ids.shape[1]
    t, d = block.outer.a.shape[1:]
    v = block.lookup.num_rows
    tiny = torch.finfo(block.like.dtype).tiny
    units = dot_rounding(d) + dot_rounding(v) + 4
    rounding = units * roundoff(block.like)

    def bound(part: Tied) -> Tensor:
        magnitudes, rows_together = _tied_magnitudes(part)
        square = _tied_gram_squares(part)
        slack = rounding * magnitudes.square()
        # Products of tiny rows may vanish, and are multiplied with those of huge rows.
        sizes = rows_together + part.count_uses()
        lost = (d + v) * tiny * sizes.square()
        # Where positions cancel, rounding follows the shapes, and with them the other examples.
        unsure = _is_unsure(square, slack, lost, _CANCELS)
        unsure &= magnitudes > 0
        if part.outer.b.dtype == torch.float32 and is_any_set(unsure):
            square[unsure] = _tied_gram_squares(part.select(unsure).double())
        return _root(square, slack)

    return block.map_examples(bound, (s + t) ** 2)


def _root(square: Tensor, slack: Tensor) -> Tensor:
    """Return upper bounds of norms from squares and what rounding may take from them."""
    # Adding 0 · square keeps NaN in a Gram matrix.
    return (square.clamp(min=0) + slack + 0 * square).sqrt()


def _tied_gram_squares(block: Tied) -> Tensor:
    """Return ‖g_n‖² `[n]`, added in float64."""
    a = block.outer.a
    b = block.outer.b
    c = block.lookup.b
    lookup_products = torch.bmm(c, c.mT) * block.lookup.find_same_ids()
    squares = _sum_products(lookup_products)
    outer_products = torch.bmm(a, a.mT)
    outer_products *= torch.bmm(b, b.mT)
    squares += _sum_products(outer_products)
    mixed_products = torch.bmm(a, c.mT)
    mixed_products *= block.read_outputs()
    return squares + 2 * _sum_products(mixed_products)


def _sum_products(x: Tensor) -> Tensor:
    return x.sum((1, 2), dtype=torch.float64)


def _materialised_tied_norms(block: Tied, metric: Kronecker) -> Tensor:
    """Return norms of gradients that are formed in chunks; the sum comes from one product."""
    d = block.outer.a.shape[2]
    v = block.lookup.num_rows
    unit = roundoff(block.outer.b) * metric.input.operator_norm * metric.output.operator_norm
    terms = 2 * math.sqrt(v * d)
    if not metric.is_identity:
        terms = 4 * (math.sqrt(d) + math.sqrt(v)) + terms

    def bound(part: Tied) -> Tensor:
        g = part.per_example()
        plain = exact_row_norms(g.flatten(1))
        norms = plain
        if not metric.is_identity:
            z = metric.apply(g)
            norms = exact_row_norms(z.flatten(1))
        magnitudes = _tied_magnitudes(part)[0]
        positions = part.count_uses()
        slack = positions * magnitudes + terms * plain
        # Positions may cancel so far that the norm depends on their order.
        order = positions.double().sqrt() / SURE * magnitudes
        least = torch.where(positions > 1, unit * order, 0.0)
        return torch.maximum(norms + unit * slack, least)

    return block.map_examples(bound, v * d)


def _tied_magnitudes(block: Tied) -> tuple[Tensor, Tensor]:
    """Return Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖ and Σ_s ‖c_s‖ + Σ_t (‖a_t‖ + ‖b_t‖), each `[N]`."""
    c = exact_row_norms(block.lookup.b).sum(1)
    b = exact_row_norms(block.outer.b)
    inputs = block.outer.a
    a = exact_row_norms(inputs)
    a = limit_inputs(a, inputs)
    return c + (a * b).sum(1), c + (a + b).sum(1)


def _eigenbasis_tied_norms(block: Tied, metric: Eigenbasis) -> Tensor:
    def square(part: Tied) -> Tensor:
        return sum_squares(metric.apply(part.per_example()).flatten(1))

    norms = block.map_examples(square, block.num_entries).sqrt()
    magnitudes, positions = block.outer.magnitudes()
    lookup_norms = row_norms(block.lookup.b)
    magnitudes += lookup_norms.sum(1)
    uses = positions + (lookup_norms > 0).sum(1)
    terms = uses + 8 * math.sqrt(block.d_in + block.d_out)
    slack = terms * roundoff(block.outer.b) * metric.operator_norm * magnitudes
    return norms + slack


# --------------------------------------------------------------------------------------------------
# The method by which the norms of a layer are computed: by a rule on its widths, or as it is told.

METHODS = ("gram", "materialised")
"""Methods that a layer with several positions can be told to use."""
_NARROW = 32  # narrower side that is materialised
_SMALL = 1 << 18  # entries of a convolution that is


@dataclass(frozen=True)
class Choice:
    """The norm method of a layer for a shape, with the two costs that decided it.

    Costs are multiplications an example. `only` is the reason where there is no other method.
    """

    method: str
    gram_cost: float = 0.0
    materialised_cost: float = 0.0
    only: str = ""

    @property
    def reason(self) -> str:
        """Return the reason in one phrase: the cost of the method, and of the other one."""
        if self.only:
            return self.only
        cost, other_cost = self.gram_cost, self.materialised_cost
        if self.method == "materialised":
            cost, other_cost = other_cost, cost
        return f"{cost:.2g} (else {other_cost:.2g})"


def choose_method(
    positions: int, d_in: int, d_out: int, metric: Kronecker = _IDENTITY, *, patches: bool = False
) -> Choice:
    """Pick the norm method of a layer.

    Only the widths decide, so that an example's bound cannot follow the length of others.

    Args:
        positions: shared axis T. With one position the norm is a product, whatever the widths.
        d_in: input features, homogeneous coordinate included.
        d_out: output features.
        metric: the layer's map. Its sides decide what whitening costs.
        patches: a convolution, where forming `a` costs a copy.
    """
    cost_in = metric.input.cost(d_in)
    cost_out = metric.output.cost(d_out)
    products = positions * (cost_in + cost_out) + positions**2 * (d_in + d_out)
    gram = products + patches * positions * d_in * 8.0
    materialised = positions * d_in * d_out + d_out * cost_in + d_in * cost_out
    if positions == 1:
        rank_one = cost_in + cost_out + d_in + d_out
        return Choice("rank-one", rank_one, materialised, "one position")
    method = "materialised" if is_materialised(d_in, d_out, patches) else "gram"
    return Choice(method, gram, materialised)


def is_materialised(d_in: int, d_out: int, patches: bool) -> bool:
    """Return whether gradients of these widths (of a convolution: `patches`) are formed."""
    if patches:
        return d_in * d_out <= _SMALL
    return min(d_in, d_out) <= _NARROW


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
        known = None
        for storage, other, results in self._results:
            if other == place and not storage.expired():
                known = results
                break
        if known is not None and key in known:
            return known[key]
        result = compute()
        if result.numel() > _SHARED_ENTRIES:
            return result
        if known is None:
            known = {}
            storage = StorageWeakRef(rows.untyped_storage())
            self._results = [(storage, place, known), *self._results[: _TENSORS - 1]]
        known[key] = result
        return result


# --------------------------------------------------------------------------------------------------
# Squared norms through Gram matrices, each a function of its own example and correct in its first
# two digits.
#
# What rounding may take from a square is bounded with it. Where the bound is more than a small
# fraction of the square, the rows of that example, and of it alone, are recomputed in float64.

_DEPTH = 256  # columns multiplied in float32
_FLOAT32 = torch.finfo(torch.float32)


def gram_norms(block: Outer, cache: InputCache | None = None) -> Tensor:
    """Return upper bounds of ‖Σ_t b_t a_tᵀ‖ `[N * groups]` in float64.

    Args:
        block: the rows.
        cache: results that other layers have computed from the same inputs.
    """
    positions, d_in, d_out = block.dimensions
    pieces = [block.b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(block.a.shape[0], positions * positions):
        part = replace(block, a=block.a[rows], b=block.b[rows])
        square, magnitudes, moved = _gram_squares(part, cache or InputCache())
        largest = magnitudes.square()
        square = torch.where(moved == 1, largest, square)
        terms = moved + (d_in + d_out)
        rounding = terms * roundoff(block.a) * largest
        pieces.append(_root(square, rounding))
    return torch.cat(pieces)


def _gram_squares(block: Outer, cache: InputCache) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖Σ_t b_t a_tᵀ‖², Σ_t ‖a_t‖‖b_t‖ and the positions with a gradient, `[n]`."""
    ones = block.homogeneous
    into = cache.get_or_compute(block.a, ("norms", ones), lambda: block.input_squares().sqrt())
    inputs = cache.get_or_compute(block.a, ("products", ones), lambda: _input_products(block))
    out = row_norms(block.b)
    outputs = _row_products(block.b)
    magnitudes = (into * out).sum(1)
    positions = (out > 0).sum(1)
    square = (inputs * outputs).sum((1, 2)).double()
    if block.b.dtype != torch.float32:
        return square, magnitudes, positions
    most = _DEPTH + 2
    widths = (min(block.d_in, most), min(block.d_out, most))
    size = sum(widths) + 2 * math.log2(block.a.shape[1]) + 8
    # Products of tiny rows may vanish, and are multiplied with those of huge rows.
    terms = size + block.d_in + block.d_out
    row_sizes = into.sum(1) + out.sum(1) + positions
    lost = terms * _FLOAT32.tiny * row_sizes.square()
    rounding = size * roundoff(block.b) * magnitudes.square()
    unsure = _is_unsure(square, rounding, lost) & (magnitudes > 0)
    if is_any_set(unsure):
        rows = unsure.nonzero()[:, 0]
        closer = _gram_rounding(inputs[rows], outputs[rows], into[rows], out[rows], widths)
        rows = rows[_is_unsure(square[rows], closer, lost[rows])]
        if len(rows):
            part = replace(block, a=block.a[rows], b=block.b[rows])
            square[rows] = _gram_squares(part.double(), InputCache())[0]
    return square, magnitudes, positions


def _is_unsure(
    square: Tensor,
    rounding: Tensor,
    lost: Tensor,
    most: float = SURE,
) -> Tensor:
    """Return which squares rounding, or products that vanish, may have moved too far.

    They may move a square by the fraction `most`.
    """
    # False for NaN.
    is_sure = rounding <= most * square
    return ~is_sure | (square <= lost / most)


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


def _gram_rounding(
    inputs: Tensor, outputs: Tensor, into: Tensor, out: Tensor, widths: tuple[int, int]
) -> Tensor:
    """Return an upper bound `[n]` of the rounding of the sum of inputs ⊙ outputs.

    Entries of one factor are off by d u of the norms that they come from, which counts by the size
    of the other factor. Here d is the depth of a piece where rows are long. Adding costs the depth
    of the sum.
    """
    a = inputs.abs().double()
    b = outputs.abs().double()
    of_inputs = torch.einsum("ns,nst,nt->n", into, b, into)
    of_outputs = torch.einsum("ns,nst,nt->n", out, a, out)
    depth = 2 * math.log2(inputs.shape[1]) + 8
    of_sum = depth * (a * b).sum((1, 2))
    units = widths[0] * of_inputs + widths[1] * of_outputs + of_sum
    return _FLOAT32.eps / 2 * units


def lookup_squares(block: Lookup) -> tuple[Tensor, Tensor]:
    """Return ‖Σ_t e(id_t) b_tᵀ‖² and what rounding may take from it, `[n]` in float64."""
    b = block.b
    same = block.find_same_ids()
    norms = row_norms(b)
    products = torch.bmm(b, b.mT) * same
    square = products.sum((1, 2)).double()
    magnitudes = torch.einsum("nt,nts,ns->n", norms, same.double(), norms)
    terms = (norms > 0).sum(1) + block.d_out
    slack = terms * roundoff(b) * magnitudes
    unsure = ~(slack <= SURE * square) | (square < TINY)
    unsure &= magnitudes > 0
    if b.dtype == torch.float32 and is_any_set(unsure):
        part = block.select(unsure)
        square[unsure] = lookup_squares(replace(part, b=part.b.double()))[0]
    return square, slack


# --------------------------------------------------------------------------------------------------

_KEPT = 1 << 16  # entries of a gradient kept for the sum


@dataclass(frozen=True)
class LayerNorms:
    """Norms of one layer and the block that the clipped sum is to be taken of.

    Attributes:
        norms: upper bounds `[N]`.
        block: the block itself, its whitened rows, or the gradients formed from it.
        whitened: whether `block` is in the coordinates of the metric already.
        recompute: computes the norms once more, from what `block` holds, where a deferred flag
            turned out to be set.
    """

    norms: Tensor
    block: AnyBlock
    whitened: bool = False
    recompute: Callable[[], Tensor] | None = None


def choice_for(block: AnyBlock, entry: Entry | None) -> Choice:
    """Return the norm method that `per_example_norms` takes for a block.

    An entry that is no Kronecker product counts as the identity.
    """
    metric = entry if isinstance(entry, Kronecker) else _IDENTITY
    match block:
        case PerExample():
            return Choice("materialised", only="small or irregular")
        case Lookup():
            return Choice("lookup", only="of rows that were read")
        case MaterializedGradients():
            return Choice("materialised", only="used outside its layer too")
        case Tied():
            return tied_choice(block, metric)
    return choose_method(*block.dimensions, metric, patches=isinstance(block, ConvBlock))


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
    result = _compute_norms(block, metric, method, cache)
    summed = result.block
    if isinstance(summed, MaterializedGradients):
        return result
    entry = None if result.whitened else metric
    return replace(result, recompute=lambda: _compute_norms(summed, entry, method).norms)


def _compute_norms(
    block: AnyBlock, metric: Entry | None, method: str | None, cache: InputCache | None = None
) -> LayerNorms:
    if isinstance(block, PerExample):
        norms = _elementwise_norms(block, metric)
        return LayerNorms(norms, block)
    if isinstance(block, MaterializedGradients):
        return _formed_norms(block, metric)
    if isinstance(metric, Eigenbasis):
        return _eigenbasis_norms(block, metric)
    sides = _IDENTITY if metric is None else metric
    if not isinstance(sides, Kronecker):
        raise ValueError(
            "this layer needs a Kronecker metric, but the preconditioner holds an elementwise one"
        )
    if isinstance(block, Lookup):
        norms = _lookup_norms(block, sides)
        return LayerNorms(norms, block)
    method = method or choice_for(block, sides).method
    if isinstance(block, Tied):
        return tied_norms(block, sides, method)
    if method == "materialised":
        return _materialised_norms(block, sides)
    return _row_norms_of_block(block, sides, method == "rank-one", cache or InputCache())


def _formed_norms(block: MaterializedGradients, metric: Entry | None) -> LayerNorms:
    """Return norms of gradients that are materialised already, of the numbers that are summed."""
    z = block.gradients
    if isinstance(metric, MatrixMap) and not metric.is_identity:
        z = metric.apply(z.mT).mT if block.crosswise else metric.apply(z)
    norms = _matrix_norms(z, block.groups)
    fraction_lost = 2 * math.sqrt(block.num_entries) * roundoff(z)
    norms *= 1 + fraction_lost
    return LayerNorms(norms, replace(block, gradients=z), True)


def _row_norms_of_block(
    block: MatrixBlock, metric: Kronecker, is_rank_one: bool, cache: InputCache
) -> LayerNorms:
    """Return norms from whitened rows, without materialised gradients."""
    explicit = block.outer()
    rows = _whiten_rows(explicit, metric, cache)

    norms = _rank_one_norms(rows) if is_rank_one else gram_norms(rows, cache)
    norms = _add_groups(norms, rows.groups)
    if isinstance(block, Outer):
        return LayerNorms(norms, rows, True)
    # Patches are larger than the image: the sum is taken of the image again.
    plain = norms / max(metric.operator_norm, 1e-30)
    slack = _rounding_of_second_pass(block, metric, plain)
    if not metric.is_identity:
        # Rounding is relative to ‖g‖, which may be far above its part along a flat direction.
        magnitudes = explicit.magnitudes()[0]
        slack += _rounding_of_whitening(block, metric, magnitudes)
    return LayerNorms(norms + slack, block)


def _eigenbasis_norms(block: Outer | Lookup | Tied | ConvBlock, metric: Eigenbasis) -> LayerNorms:
    """Return norms where every entry has its own scale.

    With one position they come from squares, otherwise from materialised gradients.
    """
    if isinstance(block, Lookup):
        norms = _eigenbasis_lookup_norms(block, metric)
        return LayerNorms(norms, block)
    if isinstance(block, Tied):
        norms = _eigenbasis_tied_norms(block, metric)
        return LayerNorms(norms, block)
    if metric.rest is not None:
        return _low_rank_layer_norms(block, metric)
    if isinstance(block, Outer) and block.a.shape[1] == 1 and block.groups == 1:
        # With one position the magnitude is the norm of the gradient itself.
        slack = _rounding_of_second_pass(block, metric, block.magnitudes()[0])
        norms = rank_one_norms(block, metric)
        return LayerNorms(norms + slack, block)
    return _materialised_norms(block, metric)


def _eigenbasis_lookup_norms(block: Lookup, metric: Eigenbasis) -> Tensor:
    slack = 0.0
    if metric.output is not None:
        slack = 8 * math.sqrt(block.d_out) * metric.operator_norm * roundoff(block.b)
    norms = _lookup_norms(block.scale_rows(metric), _IDENTITY)
    magnitudes = torch.linalg.vector_norm(block.b, dim=-1).sum(1)
    return norms + slack * magnitudes


def _low_rank_layer_norms(block: MatrixBlock, metric: Eigenbasis) -> LayerNorms:
    """Return norms where a few directions are rotated and the others share one scale."""
    assert metric.rest is not None
    _, d_in, d_out = block.dimensions
    summed: AnyBlock = block
    if not is_materialised(d_in, d_out, isinstance(block, ConvBlock)):
        inside, outside = split_rows(block.outer(), metric)
        norms = torch.hypot(inside, gram_norms(outside) * metric.rest)
    elif isinstance(block, ConvBlock) and _is_kept(block, metric):
        summed = MaterializedGradients(block.per_example(), block.groups)
        norms = low_rank_norms(summed.gradients, metric)
    else:
        norms = block.map_examples(
            lambda part: low_rank_norms(part.per_example(), metric), block.num_entries
        )
    norms = _add_groups(norms, block.groups)
    magnitudes = block.magnitudes()[0]
    norms = _round_up(norms, block.b, magnitudes, block, metric)
    return LayerNorms(norms, summed)


def _materialised_norms(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    if _is_kept(block, metric):
        return _compute_kept_norms(block, metric)
    return _formed_twice_norms(block, metric)


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
        return d_in * d_out <= _KEPT
    return is_materialised(d_in, d_out, False)


def _add_groups(norms: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return norms
    by_group = norms.view(-1, groups)
    return by_group.square().sum(1).sqrt()


def _whiten_rows(block: Outer, metric: Kronecker, cache: InputCache) -> Outer:
    """Return the rows ã = U_in a and b̃ = U_out b.

    The column of ones stays implied where the input side is the identity.
    """
    sides = metric.merge_scalar()
    b = sides.output.apply(block.b)
    if sides.input == Identity():
        return replace(block, b=b)
    whiten = sides.input.apply_homogeneous if block.homogeneous else sides.input.apply
    # Layers may share a side.
    factor = 1.0 if sides is metric else metric.output.operator_norm
    key = (id(metric.input), factor, block.homogeneous)
    a = cache.get_or_compute(block.a, key, lambda: whiten(block.a))
    return Outer(a, b, block.groups)


def _rank_one_norms(block: Outer) -> Tensor:
    """Return norms of one position.

    They are rounded up as by the method that takes the layer where a neighbour has more positions.
    """
    _, d_in, d_out = block.dimensions
    u = roundoff(block.b)
    if is_materialised(d_in, d_out, False):
        into = exact_row_norms(block.a[:, 0])
        into = limit_inputs(into, block.a)
        squares = into.square() + block.homogeneous
        out = exact_row_norms(block.b[:, 0])
        fraction_lost = 2 * math.sqrt(d_in * d_out) * u
        return squares.sqrt() * out * (1 + fraction_lost)
    fraction_lost = (1 + d_in + d_out) * u
    magnitudes = block.row_magnitudes()[0]
    return magnitudes * math.sqrt(1 + fraction_lost)


def _compute_kept_norms(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
    """Return norms of gradients that are formed and whitened once, and kept for the sum."""
    z = block.per_example()
    plain = _matrix_norms(z, block.groups)
    if not metric.is_identity:
        size = math.prod(z.shape[1:])
        # A few at a time: the products need no second copy of all.
        for rows in chunks(len(z), 64 * size):
            metric.apply_(z[rows])
    norms = _matrix_norms(z, block.groups)
    norms = _round_up(norms, z, plain, block, metric)
    summed = MaterializedGradients(z, block.groups)
    return LayerNorms(norms, summed, True)


def _formed_twice_norms(block: MatrixBlock, metric: MatrixMap) -> LayerNorms:
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
        return _round_up(norms, z, plain, part, metric)

    norms = block.map_examples(bound, block.num_entries)
    return LayerNorms(norms, block)


def _rotate(block: MatrixBlock, metric: Eigenbasis) -> Tensor:
    """Return gradients in the eigenbasis `[N * groups, d_out, d_in]`.

    Rows are rotated before they are summed where that is less work. The bound is the same either
    way, so that an example's bound does not follow the length of others.
    """
    positions, d_in, d_out = block.dimensions
    into = (metric.input is not None) * d_in
    out = (metric.output is not None) * d_out
    cost_of_rows = positions * (into**2 + out**2)
    cost_of_gradients = d_in * d_out * (into + out)
    if cost_of_rows >= cost_of_gradients:
        return metric.rotate(block.per_example())
    rows = block.outer().explicit()
    b, a, _ = metric.map_factors(rows.b, rows.a)
    return b.mT @ a


def _round_up(
    norms: Tensor, z: Tensor, plain: Tensor, block: MatrixBlock, metric: MatrixMap
) -> Tensor:
    """Return upper bounds `[N]`.

    They count what a second pass may add, also where this batch needs no second pass: in another
    batch the same example may be formed twice. Positions may cancel so far that the norm depends on
    their order. Then the bound is what cancelled.

    Args:
        norms: ‖z‖ `[N]`, not rounded up.
        z: the mapped gradients, for their type.
        plain: ‖g‖ `[N]`, or an upper bound.
        block: what is summed.
        metric: its map.
    """
    _, d_in, d_out = block.dimensions
    size = 2 * math.sqrt(d_in * d_out)
    slack: Tensor | float = 0.0
    if isinstance(metric, Eigenbasis):
        size = d_in + d_out + 8  # as with one position
        units = rank_one_rotation_error(d_out, d_in, metric)
        magnitudes, _ = block.magnitudes()
        rotation = units * roundoff(block.b) * metric.operator_norm * magnitudes
        slack = _rounding_of_second_pass(block, metric, plain) + rotation
    elif isinstance(block, ConvBlock) or not _is_kept(block, metric):
        # Rows are kept by their widths, so in every batch.
        whitening = _rounding_of_whitening(block, metric, plain)
        slack = _rounding_of_second_pass(block, metric, plain) + whitening
    norms = norms * (1 + size * roundoff(z)) + slack
    if isinstance(block, ConvBlock):
        return norms  # images of one size keep the order
    magnitudes, positions = block.magnitudes()
    unit = roundoff(z) / SURE * metric.operator_norm
    order = positions.double().sqrt() * unit
    least = torch.where(positions > 1, order * magnitudes, 0.0)
    return torch.maximum(norms, least)


def _rounding_of_second_pass(block: MatrixBlock, metric: MatrixMap, plain: Tensor) -> Tensor:
    """Return how far the norm in the whitened sum can be from the norm computed here.

    Args:
        block: what is summed.
        metric: its map.
        plain: ‖g‖ `[N]`, in float64 whatever the sum is computed in.
    """
    _, d_in, d_out = block.dimensions
    magnitudes, positions = block.magnitudes()
    size = 2 * math.sqrt(d_in * d_out)
    if isinstance(metric, Eigenbasis):
        # Rotated and rotated back. The gain is that of the flattest direction.
        size = 8 * (math.sqrt(d_in) + math.sqrt(d_out))
    terms = positions * magnitudes + size * plain
    return roundoff(block.b) * metric.operator_norm * terms


def _rounding_of_whitening(block: MatrixBlock, metric: Kronecker, plain: Tensor) -> Tensor | float:
    """Return how far mapping the sum can move an example's part of it.

    Args:
        block: what is summed.
        metric: its map.
        plain: ‖g‖ `[N]`, or an upper bound.
    """
    if metric.is_identity:
        return 0.0
    _, d_in, d_out = block.dimensions
    units = 4 * (math.sqrt(d_in) + math.sqrt(d_out))
    return units * roundoff(block.b) * metric.operator_norm * plain


def _lookup_norms(block: Lookup, metric: Kronecker) -> Tensor:
    """Return norms by a Gram matrix masked to equal ids, whose rows add before the norm."""
    b = metric.output.apply(block.b)
    b = metric.input.apply_at(b, block.ids)
    positions, d = b.shape[1:]
    whitening = 0.0
    if not isinstance(metric.output, Identity):
        whitening = 4 * math.sqrt(d) * metric.output.operator_norm
    whitened = replace(block, b=b)
    pairs = positions * positions
    norms = whitened.map_examples(lambda part: _root(*lookup_squares(part)), pairs)
    plain = row_norms(block.b).sum(1) * metric.input.operator_norm
    return norms + whitening * roundoff(b) * plain


def _elementwise_norms(block: PerExample, metric: Entry | None) -> Tensor:
    if isinstance(metric, Kronecker) and not metric.is_identity:
        raise ValueError(
            "this layer needs an elementwise metric, but the preconditioner holds a Kronecker one"
        )
    mapped = block.grads if metric is None else metric.apply_roles(block.grads)
    squares = []
    for z in mapped.values():
        # An axis more: a parameter may have no axis of its own.
        norms = _matrix_norms(z.unsqueeze(-1))
        squares.append(norms.square())
    fraction_lost = 2 * math.sqrt(block.num_entries) * roundoff(block.like)
    total = reduce(torch.add, squares)
    return total.sqrt() * (1 + fraction_lost)
