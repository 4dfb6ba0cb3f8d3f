"""Per-example gradient norms in a metric, each an upper bound of the norm of what is summed.

Three methods give the same number: rank-one (one position), Gram (T×T products, no gradient formed) and materialised
(gradients formed in chunks). A rule on the widths of a layer picks one. Whitened rows or gradients that had to be formed
for the norm are kept, and the clipped sum is taken of those very numbers.

What one example counts may not depend on the others: a longer neighbour pads all rows of a micro-batch, and if that moved
their bounds, it would move their contributions too, and the sum by more than the sensitivity. So a bound is a function of
its own example: the method never follows T, positions whose output gradient is zero do not enter the slack, and where
rounding could move a norm by more than a small share it is taken again in float64.

In floating point a Gram norm can come out far too small when positions cancel, and the norm of a gradient that is formed
again for the sum can differ from the norm that clipped it. Both are covered by an explicit bound on the rounding error,
with u the unit roundoff and λ = 4 in the probabilistic model of Higham and Mary (2019):

* Gram: the squared norm loses at most (T + d_in + d_out) u (Σ_t ‖a_t‖‖b_t‖)², T counting the example's own positions;
* formed twice: the norm loses at most T u ‖U_A‖‖U_G‖ Σ_t ‖a_t‖‖b_t‖ + λ (√d_in + √d_out) u ‖U_A‖‖U_G‖‖g‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpkfc.linalg.blocks import (
    TINY,
    AnyBlock,
    ConvBlock,
    Formed,
    Lookup,
    Outer,
    PerExample,
    Tied,
    any_of,
    lengths,
    within_reach,
)
from dpkfc.linalg.metric import Dense, Diagonal, Eigenbasis, Elementwise, Entry, Identity, Kronecker, LowRank, Side

# --------------------------------------------------------------------------------------------------
# Norms in an eigenbasis metric: `z = scale ⊙ (Q_outᵀ g Q_in)`, rotated back, which changes no norm.
#
# With one position the norm factors, ‖z‖² = (b̃ ⊙ b̃)ᵀ scale² (ã ⊙ ã) for ã = Q_inᵀ a and b̃ =
# Q_outᵀ b (DP-NGD, Algorithm 2). With several it does not, since a scale of its own for every entry
# is no Kronecker product: gradients are formed in chunks.
#
# Where all but k input directions share one scale (a floor on the eigenvalues makes them equal),
# only those k are turned to: ‖z‖² = ‖scale ⊙ (Q_outᵀ g Q_k)‖² + rest² ‖g (I − Q_k Q_kᵀ)‖². Both are
# sums of squares, so nothing cancels.


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


# --------------------------------------------------------------------------------------------------
# One weight `[V, d]` used as an embedding table and as the weight of a linear layer: the norm of
# the SUM of its uses.
#
# With rows read `id_s` and gradients c_s at the embedding's output, inputs a_t and gradients b_t of
# the linear layer,
#
#     g = Σ_s e(id_s) c_sᵀ + Σ_t b_t a_tᵀ
#     ‖g‖² = Σ_{s,s'} [id_s = id_s'] c_s·c_s' + Σ_{t,t'} (a_t·a_t')(b_t·b_t') + 2 Σ_{s,t} b_t[id_s] (c_s·a_t)
#
# and no gradient of V·d entries is formed. In a metric `U_out g U_in` with diagonal U_out = diag(o)
# the same holds for `o[id_s] U_in c_s`, `U_in a_t` and `o b_t`.
#
# Rounding, with u the unit roundoff, γ_k = min(k, 4 √k) u for a dot product of length k (Higham and
# Mary 2019) and M = Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖: the squared norm loses at most (γ_d + γ_V + 4 u)
# M², entries being added up in float64. A gradient that is formed once for its norm and again for
# the sum is bounded as in `norms`.

_CHUNK_ELEMENTS = 1 << 24
_SMALL_TABLE = 1 << 14  # entries of a table up to which its gradients are formed
_SURE = 2.0**-8  # share of a norm that the order of its terms may move
_CANCELS = 2.0**-3  # slack over squared norm from which on the norm is taken in float64


def tied_costs(block: Tied, metric: Kronecker) -> tuple[str, float, float]:
    """(method, multiplications an example for Gram matrices, and for the gradient formed); the widths alone decide."""
    s, (t, d) = block.lookup.ids.shape[1], block.outer.a.shape[1:]
    v = block.lookup.num_rows
    match metric.input:
        case Dense():
            a_row = d * d
        case LowRank():
            a_row = 2 * d * metric.input.vectors.shape[1]
        case _:
            a_row = d
    gram = (s + t) * a_row + t * v + s * s * d + t * t * (v + d) + s * t * d
    formed = t * v * d + v * a_row + v * d
    return "materialised" if v * d <= _SMALL_TABLE else "gram", float(gram), float(formed)


def tied_norms(block: Tied, metric: Kronecker, method: str | None = None) -> tuple[Tensor, Tied, bool]:
    """Upper bounds of ‖U_out g_n U_in‖ `[N]`, what the clipped sum is to be taken of, and whether that is whitened.

    Args:
        block: the uses of the weight.
        metric: input side over d, output side over V.
        method: gram or materialised to overrule the cost rule.

    Raises:
        ValueError: an output side that is neither diagonal nor the identity.
    """
    if not isinstance(metric.output, (Identity, Diagonal)):
        raise ValueError(
            "the output side of a tied embedding runs over its rows and must be diagonal or the identity, not "
            f"{type(metric.output).__name__}"
        )
    if (method or tied_costs(block, metric)[0]) == "materialised":
        return _tied_formed_norms(block, metric), block, False
    rows = _whitened(block, metric)
    return _gram_norms(rows), rows, True


def _whitened(block: Tied, metric: Kronecker) -> Tied:
    """The rows `o[id] U_in c`, `U_in a` and `o b`."""
    if metric.is_identity:
        return block
    c, a = metric.input.apply(block.lookup.b), metric.input.apply(block.outer.a)
    if isinstance(metric.output, Diagonal):
        c = c * metric.output.scale[block.lookup.ids].unsqueeze(-1)
    else:
        c = metric.output.apply(c)
    return Tied(replace(block.lookup, b=c), Outer(a, metric.output.apply(block.outer.b)))


def _gram_norms(block: Tied) -> Tensor:
    s, t = block.lookup.ids.shape[1], block.outer.a.shape[1]
    info, size = torch.finfo(block.outer.b.dtype), block.outer.a.shape[2] + block.lookup.num_rows
    rounding = (_dot(block.outer.a.shape[2]) + _dot(block.lookup.num_rows) + 4) * info.eps / 2
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for rows in _chunks(block.batch_size, (s + t) ** 2):
        part = _tied_examples(block, rows)
        magnitudes, rows_together = _tied_magnitudes(part)
        square, slack = _tied_gram_squares(part), rounding * magnitudes.square()
        lost = size * info.tiny * (rows_together + _own_positions(part)).square()  # products of tiny rows, times huge ones
        # Where positions cancel, what rounding makes of them follows the shapes, and with those the other examples.
        unsure = (~(slack <= _CANCELS * square) | (square <= lost / _CANCELS)) & (magnitudes > 0)
        if part.outer.b.dtype == torch.float32 and any_of(unsure):
            square[unsure] = _tied_gram_squares(_in_double(part, unsure))
        pieces.append((square.clamp(min=0) + slack + 0 * square).sqrt())  # NaN in a Gram matrix stays NaN
    return torch.cat(pieces)


def _tied_gram_squares(block: Tied) -> Tensor:
    """‖g_n‖² `[n]`, added up in float64."""
    ids, c, a, b = block.lookup.ids, block.lookup.b, block.outer.a, block.outer.b
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    read = b.gather(2, ids.unsqueeze(1).expand(-1, a.shape[1], -1))
    return (
        _total(torch.bmm(c, c.mT) * same)
        + _total(torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT)))
        + 2 * _total(torch.bmm(a, c.mT).mul_(read))
    )


def _in_double(block: Tied, rows: Tensor) -> Tied:
    """Some of the examples in float64."""
    lookup = replace(block.lookup, ids=block.lookup.ids[rows], b=block.lookup.b[rows].double())
    return Tied(lookup, Outer(block.outer.a[rows].double(), block.outer.b[rows].double()))


def _tied_formed_norms(block: Tied, metric: Kronecker) -> Tensor:
    """Gradients formed in chunks for their norms, while the sum comes from one product over the batch."""
    d, v = block.outer.a.shape[2], block.lookup.num_rows
    unit = torch.finfo(block.outer.b.dtype).eps / 2 * metric.input.bound * metric.output.bound
    whitening = 0.0 if metric.is_identity else 4 * (math.sqrt(d) + math.sqrt(v))
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for rows in _chunks(block.batch_size, v * d):
        part = _tied_examples(block, rows)
        g = part.per_example()
        plain = _lengths(g.flatten(1))
        norms = plain if metric.is_identity else _lengths(metric.whiten(g).flatten(1))
        magnitudes, positions = _tied_magnitudes(part)[0], _own_positions(part)
        slack = positions * magnitudes + (whitening + 2 * math.sqrt(v * d)) * plain
        order = positions.double().sqrt() / _SURE * magnitudes  # cancelled so far that the norm is a matter of their order
        pieces.append(torch.maximum(norms + unit * slack, torch.where(positions > 1, unit * order, 0.0)))
    return torch.cat(pieces)


def _tied_magnitudes(block: Tied) -> tuple[Tensor, Tensor]:
    """Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖ and Σ_s ‖c_s‖ + Σ_t ‖a_t‖ + ‖b_t‖, each `[N]`."""
    c, b = _lengths(block.lookup.b).sum(1), _lengths(block.outer.b)
    a = within_reach(_lengths(block.outer.a), block.outer.a)
    return c + (a * b).sum(1), c + (a + b).sum(1)


def _own_positions(block: Tied) -> Tensor:
    """Uses of each example that have a gradient `[N]`."""
    return sum((b != 0).any(-1).sum(1) for b in (block.lookup.b, block.outer.b))  # type: ignore[return-value]


def _tied_examples(block: Tied, rows: slice) -> Tied:
    lookup = replace(block.lookup, ids=block.lookup.ids[rows], b=block.lookup.b[rows])
    return Tied(lookup, Outer(block.outer.a[rows], block.outer.b[rows]))


def _dot(length: int) -> float:
    return min(float(length), 4 * math.sqrt(length))


def _lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _total(x: Tensor) -> Tensor:
    return x.sum((1, 2), dtype=torch.float64)


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


# --------------------------------------------------------------------------------------------------
# Which way the norms of a layer are computed: by a rule on its widths, or as it is told.

METHODS = ("gram", "materialised")
"""What a layer with several positions can be told to use."""
_NARROW = 32  # the narrower side of a layer up to which gradients are formed
_SMALL = 1 << 18  # entries of a convolution's gradient up to which it is formed
_IDENTITY = Kronecker()


@dataclass(frozen=True)
class Choice:
    """The norm method of a layer for a shape, with the two costs (multiplications an example) it was chosen by."""

    method: str
    gram_cost: float
    materialised_cost: float

    @property
    def reason(self) -> str:
        """Why, in one phrase: multiplications an example of the method, and of the other."""
        if self.method == "rank-one":
            return "one position"
        chosen, other = self.gram_cost, self.materialised_cost
        if self.method == "materialised":
            chosen, other = other, chosen
        return f"{chosen:.2g} (else {other:.2g})"


def side_cost(side: Side, d: int) -> int:
    """Multiplications to map one row of width d."""
    match side:
        case Dense():
            return d * d
        case LowRank():
            return 2 * d * side.vectors.shape[1]
        case Diagonal():
            return d
        case _:
            return 0


def choose_method(
    positions: int, d_in: int, d_out: int, metric: Kronecker = _IDENTITY, *, patches: bool = False
) -> Choice:
    """Pick the norm method of a layer. Only the widths decide, so that an example's bound cannot follow the length of others.

    Args:
        positions: shared axis T; with one position the norm is a product, whatever the widths.
        d_in: input features, homogeneous coordinate included.
        d_out: output features.
        metric: the layer's map; its sides decide what whitening costs.
        patches: a convolution, where forming `a` costs a copy.
    """
    cost_in, cost_out = side_cost(metric.input, d_in), side_cost(metric.output, d_out)
    gram = positions * (cost_in + cost_out) + positions**2 * (d_in + d_out) + patches * positions * d_in * 8.0
    formed = float(positions * d_in * d_out + d_out * cost_in + d_in * cost_out)
    if positions == 1:
        return Choice("rank-one", cost_in + cost_out + d_in + d_out, formed)
    return Choice("materialised" if is_formed(d_in, d_out, patches) else "gram", gram, formed)


def is_formed(d_in: int, d_out: int, patches: bool) -> bool:
    """Whether gradients of these widths are formed for their norms; `patches` of a convolution."""
    return d_in * d_out <= _SMALL if patches else min(d_in, d_out) <= _NARROW


def check_methods(methods: Mapping[str, str], layers: Iterable[str] | None = None) -> None:
    """Raise where a layer is told to use a method that there is not, or where there is no such layer.

    Args:
        methods: layer name to method.
        layers: the names there are; None leaves them unchecked.

    Raises:
        ValueError: naming the layer and the choices.
    """
    for layer, method in methods.items():
        if method not in METHODS:
            raise ValueError(f"norm_methods: layer '{layer}' can use {' or '.join(METHODS)}, not {method!r}")
    unknown = sorted(set(methods) - set(methods if layers is None else layers))
    if unknown:
        raise ValueError(f"norm_methods names layers that the model has not: {', '.join(unknown)}; `dpkfc doctor` lists them")


# --------------------------------------------------------------------------------------------------
# What has been made of rows that the next layer reads too: queries, keys and values of one
# attention read the same tensor.
#
# Nothing is approximated by it: what is found again is what would have been made again, from the
# same memory. No rows are kept in memory for it; what was made of them is, until two other tensors
# have come.

_SHARED_ENTRIES = 1 << 21  # entries of a tensor that is kept
_TENSORS = 2  # rows, and the same rows whitened


class Reread:
    """What was made of the last two tensors of a micro-batch that were asked about."""

    def __init__(self) -> None:
        self._made: list[tuple[StorageWeakRef, Any, dict[Hashable, Tensor]]] = []

    def of(self, rows: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of these rows; where the same memory was asked about under the same key, what it made then.

        Args:
            rows: any tensor that nobody changes while the layers of one micro-batch are gone through.
            key: what is made.
            make: a function of the rows and of the key alone; nobody changes what it returns.
        """
        place = rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device
        known = next((made for of, at, made in self._made if at == place and not of.expired()), None)
        if known is not None and key in known:
            return known[key]
        made = make()
        if made.numel() > _SHARED_ENTRIES:
            return made
        if known is None:
            known = {}
            self._made = [(StorageWeakRef(rows.untyped_storage()), place, known), *self._made[: _TENSORS - 1]]
        known[key] = made
        return made


# --------------------------------------------------------------------------------------------------
# Squared norms through Gram matrices, each a function of its own example and sure of its first two
# digits.
#
# What rounding may take from a square is bounded beside it; where that is more than a small share
# of the square, the rows of that example, and of it alone, are taken again in float64.

_DEPTH = 256  # entries of rows whose products are added up in float32
SURE = 2.0**-8  # share of a squared norm that rounding may move; beyond it the norm is taken in float64
_LEAST = torch.finfo(torch.float32).tiny  # below it numbers lose bits, and then vanish


def gram_norms(block: Outer, reread: Reread | None = None) -> Tensor:
    """Upper bounds of ‖Σ_t b_t a_tᵀ‖ `[N * groups]` in float64; `reread` has what other layers have made of the same inputs."""
    t, size = block.a.shape[1], block.d_in + block.b.shape[2]
    pieces = [block.b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(block.a.shape[0], t * t):
        part = replace(block, a=block.a[rows], b=block.b[rows])
        square, magnitudes, positions = _gram_squares(part, reread or Reread())
        square = torch.where(positions == 1, magnitudes.square(), square)
        rounding = (positions + size) * roundoff(block.a) * magnitudes.square()
        pieces.append((square.clamp(min=0) + rounding + 0 * square).sqrt())  # NaN in the Gram stays NaN
    return torch.cat(pieces)


def _gram_squares(block: Outer, reread: Reread) -> tuple[Tensor, Tensor, Tensor]:
    """‖Σ_t b_t a_tᵀ‖², Σ_t ‖a_t‖‖b_t‖ and the number of positions that count, each `[n]` in float64."""
    into = reread.of(block.a, ("lengths", block.homogeneous), lambda: input_squares(block).sqrt())
    inputs = reread.of(block.a, ("products", block.homogeneous), lambda: _input_products(block))
    out, outputs = lengths(block.b), _products(block.b)
    magnitudes, positions = (into * out).sum(1), (out > 0).sum(1)
    square = (inputs * outputs).sum((1, 2)).double()
    if block.b.dtype != torch.float32:
        return square, magnitudes, positions
    widths = (min(block.d_in, _DEPTH + 2), min(block.b.shape[2], _DEPTH + 2))
    size = sum(widths) + 2 * math.log2(block.a.shape[1]) + 8
    terms = size + block.d_in + block.b.shape[2]  # products of tiny rows may vanish, and are taken times those of huge ones
    lost = terms * _LEAST * (into.sum(1) + out.sum(1) + positions).square()
    unsure = ~(size * roundoff(block.b) * magnitudes.square() <= SURE * square) | (square <= lost / SURE)
    unsure &= magnitudes > 0
    if any_of(unsure):
        rows = unsure.nonzero()[:, 0]
        closer = _gram_rounding(inputs[rows], outputs[rows], into[rows], out[rows], widths)
        rows = rows[~(closer <= SURE * square[rows]) | (square[rows] <= lost[rows] / SURE)]
        if len(rows):
            exact = replace(block, a=block.a[rows].double(), b=block.b[rows].double())
            square[rows] = _gram_squares(exact, Reread())[0]
    return square, magnitudes, positions


def _input_products(block: Outer) -> Tensor:
    """Inner products of the inputs `[n, t, t]`, with the implied coordinate."""
    products = _products(block.a)
    return products.add_(1) if block.homogeneous else products


def _products(x: Tensor) -> Tensor:
    """Inner products of the rows `[n, t, t]` of `[n, t, d]`; of long float32 rows piece by piece, which are added in float64."""
    if x.dtype != torch.float32 or x.shape[2] <= _DEPTH:
        return torch.bmm(x, x.mT)
    found = x.new_zeros(*x.shape[:2], x.shape[1], dtype=torch.float64)
    for part in x.split(_DEPTH, 2):
        found += torch.bmm(part, part.mT)
    return found


def _gram_rounding(inputs: Tensor, outputs: Tensor, into: Tensor, out: Tensor, widths: tuple[int, int]) -> Tensor:
    """Upper bound `[n]` of what rounding moves the sum of inputs ⊙ outputs by.

    Entries of the one are off by d u of the lengths that they come from, which counts by the size of the other (d is the depth
    of a piece, where rows are long); adding up costs the depth of the sum.
    """
    u, t = torch.finfo(torch.float32).eps / 2, inputs.shape[1]
    a, b = inputs.abs().double(), outputs.abs().double()
    along_in = torch.einsum("ns,nst,nt->n", into, b, into)
    along_out = torch.einsum("ns,nst,nt->n", out, a, out)
    depth = 2 * math.log2(t) + 8
    return u * (widths[0] * along_in + widths[1] * along_out + depth * (a * b).sum((1, 2)))


def input_squares(block: Outer) -> Tensor:
    """‖a_t‖² with the implied coordinate, `[N * groups, T]`."""
    return within_reach(lengths(block.a), block.a).square() + float(block.homogeneous)


def magnitudes_of_rows(block: Outer) -> tuple[Tensor, Tensor]:
    """Upper bounds of Σ_t ‖a_t‖‖b_t‖, and how many positions have a gradient, each `[N * groups]`."""
    out = lengths(block.b)
    return (input_squares(block).sqrt() * out).sum(1), (out > 0).sum(1)


def lookup_squares(ids: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t e(id_t) b_tᵀ‖² and what rounding may take from it, `[n]` in float64."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    long = lengths(b)
    square = (torch.bmm(b, b.transpose(1, 2)) * same).sum((1, 2)).double()
    products = torch.einsum("nt,nts,ns->n", long, same.double(), long)
    slack = ((long > 0).sum(1) + b.shape[-1]) * roundoff(b) * products
    unsure = (~(slack <= SURE * square) | (square < TINY)) & (products > 0)
    if b.dtype == torch.float32 and any_of(unsure):
        square[unsure] = lookup_squares(ids[unsure], b[unsure].double())[0]
    return square, slack


def roundoff(x: Tensor) -> float:
    """Unit roundoff of the type of a tensor."""
    return torch.finfo(x.dtype).eps / 2


def chunks(count: int, elements_each: int) -> Iterator[slice]:
    """Slices of 0 … count, each of which holds a bounded number of elements."""
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


# --------------------------------------------------------------------------------------------------

_KEPT = 1 << 16  # entries of a gradient in an eigenbasis up to which it is kept for the sum


@dataclass(frozen=True)
class LayerNorms:
    """Norms of one layer and what the clipped sum is to be taken of.

    Attributes:
        norms: upper bounds `[N]`.
        block: the block itself, its whitened rows, or the gradients formed from it.
        whitened: whether `block` is in the coordinates of the metric already.
        again: takes the norms once more, from what `block` holds; for those whose questions were put off (`put_off`).
    """

    norms: Tensor
    block: AnyBlock
    whitened: bool
    again: Callable[[], Tensor] | None = None


def choice_for(block: Outer | Tied | ConvBlock, metric: Kronecker) -> Choice:
    """The norm method that `per_example_norms` takes for a block."""
    if isinstance(block, Tied):
        return Choice(*tied_costs(block, metric))
    return choose_method(*_shape(block), metric, patches=isinstance(block, ConvBlock))


def per_example_norms(
    block: AnyBlock, metric: Entry | None, method: str | None = None, reread: Reread | None = None
) -> LayerNorms:
    """Upper bounds of ‖U_G g_n U_A‖ for every example of a block.

    Args:
        block: one layer's contribution.
        metric: the layer's map, None for the identity.
        method: gram or materialised to overrule the rule (layers of matrices only), the same whatever the batch holds.
        reread: of the layers of one micro-batch, what they have made of inputs that several of them read; None shares nothing.

    Returns:
        Norms `[N]`, NaN or infinite where the example's gradient is; at least the exact norm up to the last bits.

    Raises:
        ValueError: a metric of the wrong kind or size for the block.
    """
    found = _norms_of(block, metric, method, reread)
    if found.block is block:
        return replace(found, again=lambda: _norms_of(block, metric, method).norms)
    return found


def _norms_of(block: AnyBlock, metric: Entry | None, method: str | None, reread: Reread | None = None) -> LayerNorms:
    if isinstance(block, PerExample):
        return LayerNorms(_elementwise_norms(block, metric), block, False)
    if isinstance(block, Formed):
        return _materialised_norms(block, metric)
    if isinstance(metric, Eigenbasis):
        return _eigenbasis_norms(block, metric)
    sides = _kronecker(metric)
    match block:
        case Lookup():
            return LayerNorms(_lookup_norms(block, sides), block, False)
        case Tied():
            return _tied_norms(block, sides, method)
        case _:
            return _outer_norms(block, sides, method or choice_for(block, sides).method, reread or Reread())


def _materialised_norms(block: Formed, metric: Entry | None) -> LayerNorms:
    """Norms of gradients that are there already; the sum is taken of the very numbers that the norms are taken of."""
    z = block.gradients
    if isinstance(metric, (Kronecker, Eigenbasis)) and not (isinstance(metric, Kronecker) and metric.is_identity):
        z = metric.whiten(z.mT).mT if block.crosswise else metric.whiten(z)
    norms = _over_groups(lengths(z.flatten(1)), block.groups)
    size = z[0].numel() * block.groups if len(z) else 0
    return LayerNorms(norms * (1 + 2 * math.sqrt(size) * roundoff(z)), replace(block, gradients=z), True)


def _outer_norms(block: Outer | ConvBlock, metric: Kronecker, method: str, reread: Reread) -> LayerNorms:
    if method == "materialised":
        return _formed_norms(block, metric)
    plain = block.outer() if isinstance(block, ConvBlock) else block
    rows = _whitened_rows(plain, metric, reread)
    take = _rank_one_norms if method == "rank-one" else gram_norms
    norms = _over_groups(gram_norms(rows, reread) if take is gram_norms else take(rows), rows.groups)
    if isinstance(block, ConvBlock):  # patches are larger than the image: the sum is taken of the image again
        slack = _rounding_of_second_pass(block, metric, norms / max(_gain(metric), 1e-30))
        if not metric.is_identity:  # rounds relative to ‖g‖, which may be far above what a flat direction leaves of it
            slack = slack + _rounding_of_whitening(block, metric, _magnitudes(plain)[0])
        return LayerNorms(norms + slack, block, False)
    return LayerNorms(norms, rows, True, lambda: _over_groups(take(rows), rows.groups))


def _tied_norms(block: Tied, metric: Kronecker, method: str | None) -> LayerNorms:
    norms, rows, whitened = tied_norms(block, metric, method)
    return LayerNorms(norms, rows, whitened, (lambda: tied_norms(rows, _IDENTITY, "gram")[0]) if whitened else None)


def _eigenbasis_norms(block: Outer | Lookup | Tied | ConvBlock, metric: Eigenbasis) -> LayerNorms:
    """Norms where every entry has a scale of its own: by its squares for one position, formed otherwise."""
    if isinstance(block, Lookup | Tied):
        return LayerNorms(_table_norms(block, metric), block, False)
    if metric.rest is not None:
        return _parted_norms(block, metric)
    if isinstance(block, Outer) and block.a.shape[1] == 1 and block.groups == 1:
        plain = _magnitudes(block)[0]  # with one position the norm of the gradient itself
        return LayerNorms(rank_one_norms(block, metric) + _rounding_of_second_pass(block, metric, plain), block, False)
    return _formed_norms(block, metric)


def _parted_norms(block: Outer | ConvBlock, metric: Eigenbasis) -> LayerNorms:
    """Norms where a few directions are turned to and the others share one scale: no gradient is turned as a whole."""
    assert metric.rest is not None
    _, d_in, d_out = _shape(block)
    summed: AnyBlock = block
    if not is_formed(d_in, d_out, isinstance(block, ConvBlock)):
        inside, outside = parted_rows(block.outer() if isinstance(block, ConvBlock) else block, metric)
        found = torch.hypot(inside, gram_norms(outside) * metric.rest)
    elif isinstance(block, ConvBlock) and _is_kept(block, metric):
        summed = Formed(block.per_example(), block.groups)
        found = parted_norms(summed.gradients, metric)
    else:
        parts = (_examples(block, rows) for rows in chunks(block.batch_size, d_in * d_out * block.groups))
        none = block.b.new_zeros(0, dtype=torch.float64)
        found = torch.cat([none, *(parted_norms(part.per_example(), metric) for part in parts)])
    slack = _slack_of_formed(block, metric, _magnitudes(block)[0])
    return LayerNorms(_rounded_up(_over_groups(found, block.groups), block.b, slack, block, metric), summed, False)


def _formed_norms(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis) -> LayerNorms:
    return _kept_norms(block, metric) if _is_kept(block, metric) else _formed_twice_norms(block, metric)


def _is_kept(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis) -> bool:
    """Whether formed gradients are kept for the sum; where that follows the shapes, the bound is the same either way."""
    _, d_in, d_out = _shape(block)
    if isinstance(block, ConvBlock):  # no larger than twice the activations that the tape holds anyway
        held = (block.x.numel() + block.b.numel()) / max(1, block.batch_size * block.groups)
        return d_in * d_out <= 2 * held
    return d_in * d_out <= _KEPT if isinstance(metric, Eigenbasis) else is_formed(d_in, d_out, False)


def _table_norms(block: Lookup | Tied, metric: Eigenbasis) -> Tensor:
    if isinstance(block, Lookup):
        slack = 8 * math.sqrt(block.b.shape[2]) * metric.bound * roundoff(block.b) if metric.output is not None else 0.0
        plain = as_plain_lookup(block, metric)
        return _lookup_norms(plain, _IDENTITY) + slack * torch.linalg.vector_norm(block.b, dim=-1).sum(1)
    norms = formed_squares(block, metric, chunks).sqrt()
    outer, size = block.outer, block.outer.d_in + block.outer.b.shape[2]
    magnitudes, positions = _magnitudes(outer)
    looked_up = lengths(block.lookup.b)
    share = (positions + (looked_up > 0).sum(1) + 8 * math.sqrt(size)) * roundoff(outer.b)
    return norms + share * metric.bound * (magnitudes + looked_up.sum(1))


def _kronecker(metric: Entry | None) -> Kronecker:
    if metric is None:
        return _IDENTITY
    if not isinstance(metric, Kronecker):
        raise ValueError("this layer needs a Kronecker metric, but the preconditioner holds an elementwise one")
    return metric


def _shape(block: Outer | ConvBlock) -> tuple[int, int, int]:
    """(T, d_in, d_out)."""
    if isinstance(block, ConvBlock):
        return block.positions, block.d_in, block.d_out
    return block.a.shape[1], block.d_in, block.b.shape[2]


def _over_groups(norms: Tensor, groups: int) -> Tensor:
    return norms if groups == 1 else norms.view(-1, groups).square().sum(1).sqrt()


def _whitened_rows(block: Outer, metric: Kronecker, reread: Reread) -> Outer:
    """The rows ã = U_in a and b̃ = U_out b; the column of ones stays implied where the input side is the identity."""
    sides = metric.folded
    b = sides.output.apply(block.b)
    if sides.input == Identity():
        return replace(block, b=b)
    whiten = sides.input.apply_homogeneous if block.homogeneous else sides.input.apply
    by = id(metric.input), 1.0 if sides is metric else metric.output.bound, block.homogeneous  # layers may share a side
    return Outer(reread.of(block.a, by, lambda: whiten(block.a)), b, block.groups)


def _rank_one_norms(block: Outer) -> Tensor:
    """One position; rounded up as the method is that takes the same layer where a neighbour has more of them."""
    d_in, d_out, u = block.d_in, block.b.shape[2], roundoff(block.b)
    if is_formed(d_in, d_out, False):
        into, out = (torch.linalg.vector_norm(x[:, 0], dim=-1, dtype=torch.float64) for x in (block.a, block.b))
        into = (within_reach(into, block.a).square() + float(block.homogeneous)).sqrt()
        return into * out * (1 + 2 * math.sqrt(d_in * d_out) * u)
    return magnitudes_of_rows(block)[0] * math.sqrt(1 + (1 + d_in + d_out) * u)


def _kept_norms(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis) -> LayerNorms:
    """Gradients that are formed and whitened once, and kept for the sum."""
    z = block.per_example()
    slack = _slack_of_formed(block, metric, _over_groups(lengths(z.flatten(1)), block.groups))
    for rows in chunks(len(z), 64 * z[0].numel()) if len(z) and not metric.is_identity else ():
        metric.whiten_(z[rows])  # a few at a time: the products need no second copy of all
    norms = _over_groups(lengths(z.flatten(1)), block.groups)
    return LayerNorms(_rounded_up(norms, z, slack, block, metric), Formed(z, block.groups), True)


def _formed_twice_norms(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis) -> LayerNorms:
    """Large gradients: formed in chunks for their norms, while the sum comes from one product over the batch."""
    _, d_in, d_out = _shape(block)
    pieces = [block.b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(block.batch_size, d_in * d_out * block.groups):
        part = _examples(block, rows)
        g = _turned(part, metric) if isinstance(metric, Eigenbasis) else part.per_example()
        slack = _slack_of_formed(part, metric, _over_groups(lengths(g.flatten(1)), block.groups))
        z = g * metric.scale if isinstance(metric, Eigenbasis) else metric.whiten(g)
        norms = _over_groups(lengths(z.flatten(1)), block.groups)
        pieces.append(_rounded_up(norms, z, slack, part, metric))
    return LayerNorms(torch.cat(pieces), block, False)


def _turned(block: Outer | ConvBlock, metric: Eigenbasis) -> Tensor:
    """Gradients in the eigenbasis `[N * groups, d_out, d_in]`; rows are turned before they are summed where that is less work.

    The bound is the same either way, so that an example's does not follow the length of others.
    """
    positions, d_in, d_out = _shape(block)
    into, out = (metric.input is not None) * d_in, (metric.output is not None) * d_out
    if positions * (into**2 + out**2) >= d_in * d_out * (into + out):
        return metric.rotate(block.per_example())
    rows = (block.outer() if isinstance(block, ConvBlock) else block).explicit()
    a = rows.a if metric.input is None else rows.a @ metric.input
    b = rows.b if metric.output is None else rows.b @ metric.output
    return b.mT @ a


def _slack_of_formed(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis, plain: Tensor) -> Tensor | float:
    """What a second pass may add, also where this batch needs none: elsewhere the same example may be formed twice."""
    if isinstance(metric, Eigenbasis):
        _, d_in, d_out = _shape(block)
        turning = rank_one_turning(d_out, d_in, metric) * roundoff(block.b) * metric.bound
        return _rounding_of_second_pass(block, metric, plain) + turning * _magnitudes(block)[0]
    kept = isinstance(block, Outer) and _is_kept(block, metric)  # by its widths, so in every batch
    return 0.0 if kept else _rounding_of_second_pass(block, metric, plain) + _rounding_of_whitening(block, metric, plain)


def _rounded_up(
    norms: Tensor, z: Tensor, slack: Tensor | float, block: Outer | ConvBlock, metric: Kronecker | Eigenbasis
) -> Tensor:
    """Upper bounds `[N]`; where positions cancel so far that the norm is a matter of their order, by what cancelled."""
    _, d_in, d_out = _shape(block)
    size = d_in + d_out + 8 if isinstance(metric, Eigenbasis) else 2 * math.sqrt(d_in * d_out)  # as with one position
    norms = norms * (1 + size * roundoff(z)) + slack
    if isinstance(block, ConvBlock):  # images of one size: nothing changes the order
        return norms
    magnitudes, positions = _magnitudes(block)
    order = positions.double().sqrt() * (roundoff(z) / SURE * _gain(metric))
    return torch.maximum(norms, torch.where(positions > 1, order * magnitudes, 0.0))


def _gain(metric: Kronecker | Eigenbasis) -> float:
    return metric.bound if isinstance(metric, Eigenbasis) else metric.input.bound * metric.output.bound


def _rounding_of_second_pass(block: Outer | ConvBlock, metric: Kronecker | Eigenbasis, plain: Tensor) -> Tensor:
    """How far the norm of the whitened sum's share can be from the norm taken here; `plain` is ‖g‖ `[N]`."""
    _, d_in, d_out = _shape(block)
    magnitudes, positions = _magnitudes(block)
    if isinstance(metric, Eigenbasis):  # turned to and back; the gain is that of its flattest direction, so nothing to spare
        turning = 8 * (math.sqrt(d_in) + math.sqrt(d_out))
        return roundoff(block.b) * metric.bound * (positions * magnitudes + turning * plain)
    share = positions * magnitudes + 2 * math.sqrt(d_in * d_out) * plain
    return roundoff(block.b) * _gain(metric) * share  # `plain` is float64 whatever the sum is computed in


def _rounding_of_whitening(block: Outer | ConvBlock, metric: Kronecker, plain: Tensor) -> Tensor | float:
    """How far mapping the sum can move an example's share of it; `plain` is ‖g‖ `[N]`, or an upper bound."""
    _, d_in, d_out = _shape(block)
    share = 4 * (math.sqrt(d_in) + math.sqrt(d_out)) * roundoff(block.b) * _gain(metric)
    return 0.0 if metric.is_identity else share * plain


def _magnitudes(block: Outer | ConvBlock) -> tuple[Tensor, Tensor]:
    """Upper bounds `[N]` of Σ_t ‖a_t‖‖b_t‖ (over groups too), and how many positions count, `[N]`."""
    if isinstance(block, ConvBlock):
        positions = block.own_positions()
        return block.magnitudes(positions), positions
    sums, positions = magnitudes_of_rows(block)
    return sums.view(-1, block.groups).sum(1), positions.view(-1, block.groups).amax(1)


def _examples(block: Outer | ConvBlock, rows: slice) -> Outer | ConvBlock:
    if isinstance(block, ConvBlock):
        return block.examples(rows)
    grouped = slice(rows.start * block.groups, rows.stop * block.groups)
    return replace(block, a=block.a[grouped], b=block.b[grouped])


def _lookup_norms(block: Lookup, metric: Kronecker) -> Tensor:
    """Rows with the same id add up before the norm is taken: a Gram matrix masked to equal ids."""
    b = metric.output.apply(block.b)
    if isinstance(metric.input, Diagonal):
        b = b * metric.input.scale[block.ids].unsqueeze(-1)
    elif isinstance(metric.input, Identity):
        b = b * metric.input.factor
    else:
        raise ValueError("the input side of an embedding must be diagonal or the identity")
    t, d = b.shape[1:]
    whitening = 0.0 if isinstance(metric.output, Identity) else 4 * math.sqrt(d) * metric.output.bound
    pieces = [b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(b.shape[0], t * t):
        square, slack = lookup_squares(block.ids[rows], b[rows])
        raw = lengths(block.b[rows]).sum(1) * metric.input.bound
        norms = (square.clamp(min=0) + slack + 0 * square).sqrt()
        pieces.append(norms + whitening * roundoff(b) * raw)
    return torch.cat(pieces)


def _elementwise_norms(block: PerExample, metric: Entry | None) -> Tensor:
    if isinstance(metric, Kronecker) and not metric.is_identity:
        raise ValueError("this layer needs an elementwise metric, but the preconditioner holds a Kronecker one")
    scale = metric.scale if isinstance(metric, Elementwise) else {}
    total: Tensor | None = None
    size = 0
    for role, g in block.grads.items():
        z = g * scale[role] if role in scale else g
        square = lengths(z.flatten(1) if z.dim() > 1 else z.unsqueeze(1)).square()
        total = square if total is None else total + square
        size += z[0].numel() if z.shape[0] else 0
    assert total is not None
    return total.sqrt() * (1 + 2 * math.sqrt(size) * roundoff(next(iter(block.grads.values()))))
