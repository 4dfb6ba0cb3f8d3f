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
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpkfc.blocks import Formed, Lookup, Outer, PerExample, Tied
from dpkfc.gradients.conv import AnyBlock, ConvBlock
from dpkfc.gradients.eigen import (
    as_plain_lookup,
    formed_squares,
    parted_norms,
    parted_rows,
    rank_one_norms,
    rank_one_turning,
)
from dpkfc.gradients.gram import SURE, chunks, gram_norms, lookup_squares, magnitudes_of_rows, roundoff
from dpkfc.gradients.lengths import lengths, within_reach
from dpkfc.gradients.methods import Choice, choose_method, is_formed
from dpkfc.gradients.reread import Reread
from dpkfc.gradients.tied import tied_costs, tied_norms
from dpkfc.metric import Diagonal, Eigenbasis, Elementwise, Entry, Identity, Kronecker

__all__ = ["LayerNorms", "choice_for", "per_example_norms"]

_KEPT = 1 << 16  # entries of a gradient in an eigenbasis up to which it is kept for the sum
_IDENTITY = Kronecker()


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
