"""Per-example gradient norms in a metric, each an upper bound of the exact norm.

Three methods give the same number: rank-one (one position), Gram (T×T products, no gradient formed) and materialised
(gradients formed in chunks). A cost rule picks one per layer and shape. In floating point, Gram norms can come out far
too small when positions cancel, so every method adds a bound on its own rounding error: the result is never below the
exact norm beyond the last bits, and a clipped example never exceeds its bound.

With unit roundoff u, sides U_A and U_G, ã = U_A a and b̃ = U_G b:

* the sum over positions loses at most (T + d_in + d_out) u Σ_t ‖a_t‖‖b_t‖ in norm, its square root-free form for Gram;
* whitening a row loses at most λ √d u ‖U‖ ‖row‖ with λ = 4 in the probabilistic model of Higham and Mary (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpkfc.blocks import Lookup, Outer, PerExample
from dpkfc.gradients.conv import ConvBlock
from dpkfc.gradients.rules import AnyBlock
from dpkfc.metric import Dense, Diagonal, Elementwise, Identity, Kronecker, LowRank, Side

__all__ = ["Choice", "Formed", "LayerNorms", "choose_method", "per_example_norms"]

_CHUNK_ELEMENTS = 1 << 24
_IDENTITY = Kronecker()


@dataclass(frozen=True)
class Choice:
    """The norm method of a layer for a shape, with the two costs (multiplications an example) it was chosen by."""

    method: str
    gram_cost: float
    materialised_cost: float

    @property
    def reason(self) -> str:
        """Why, in one phrase."""
        if self.method == "rank-one":
            return "one position: the norm is a product of two vector norms"
        low, high = sorted((self.gram_cost, self.materialised_cost))
        return f"{low:.3g} against {high:.3g} multiplications an example"


@dataclass(frozen=True)
class Formed:
    """Per-example gradients that were formed for their norms and are small enough to keep for the sum.

    Attributes:
        gradients: unwhitened `[N * groups, d_out, d_in]`.
        groups: groups of a grouped convolution.
    """

    gradients: Tensor
    groups: int


@dataclass(frozen=True)
class LayerNorms:
    """Norms of one layer and what the clipped sum is to be taken of.

    Attributes:
        norms: upper bounds `[N]`.
        block: the block itself, or the gradients formed from it.
    """

    norms: Tensor
    block: AnyBlock | Formed


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
    positions: int, d_in: int, d_out: int, metric: Kronecker = _IDENTITY, *, keeps: bool = False, patches: bool = False
) -> Choice:
    """Pick the cheapest norm method for a layer shape.

    Args:
        positions: shared axis T.
        d_in: input features, homogeneous coordinate included.
        d_out: output features.
        metric: the layer's map; its sides decide what whitening costs.
        keeps: materialised gradients are small enough to keep, which saves the product of the clipped sum.
        patches: forming `a` costs a copy (convolutions).
    """
    cost_in, cost_out = side_cost(metric.input, d_in), side_cost(metric.output, d_out)
    gram = positions * (cost_in + cost_out) + positions**2 * (d_in + d_out) + patches * positions * d_in * 8.0
    formed = positions * d_in * d_out * (0.0 if keeps else 1.0) + d_out * cost_in + d_in * cost_out
    if positions == 1:
        return Choice("rank-one", cost_in + cost_out + d_in + d_out, formed)
    return Choice("gram" if gram <= formed else "materialised", gram, formed)


def per_example_norms(block: AnyBlock, metric: Kronecker | Elementwise | None, method: str | None = None) -> LayerNorms:
    """Upper bounds of ‖U_G g_n U_A‖ for every example of a block.

    Args:
        block: one layer's contribution.
        metric: the layer's map, None for the identity.
        method: rank-one, gram or materialised to overrule the cost rule (tests and benchmarks).

    Returns:
        Norms `[N]`, NaN or infinite where the example's gradient is; at least the exact norm up to the last bits.

    Raises:
        ValueError: a metric of the wrong kind or size for the block.
    """
    match block:
        case PerExample():
            return LayerNorms(_elementwise_norms(block, metric), block)
        case Lookup():
            return LayerNorms(_lookup_norms(block, _kronecker(metric)), block)
    metric = _kronecker(metric)
    t, d_in, d_out, keeps = _shape(block)
    method = method or choose_method(t, d_in, d_out, metric, keeps=keeps, patches=isinstance(block, ConvBlock)).method
    if method == "materialised":
        return _materialised_norms(block, metric, keeps)
    outer = block.outer() if isinstance(block, ConvBlock) else block
    norms = _rank_one_norms(outer, metric) if method == "rank-one" else _gram_norms(outer, metric)
    return LayerNorms(_over_groups(norms, outer.groups), block)


def _kronecker(metric: Kronecker | Elementwise | None) -> Kronecker:
    if metric is None:
        return _IDENTITY
    if not isinstance(metric, Kronecker):
        raise ValueError("this layer needs a Kronecker metric, but the preconditioner holds an elementwise one")
    return metric


def _shape(block: Outer | ConvBlock) -> tuple[int, int, int, bool]:
    """(T, d_in, d_out, whether gradients are no larger than twice the activations that the tape holds anyway)."""
    if isinstance(block, ConvBlock):
        held = (block.x.numel() + block.b.numel()) / max(1, block.batch_size * block.groups)
        return block.positions, block.d_in, block.d_out, block.d_in * block.d_out <= 2 * held
    t, d_in, d_out = block.a.shape[1], block.a.shape[2], block.b.shape[2]
    return t, d_in, d_out, d_in * d_out <= t * (d_in + d_out)


def _over_groups(norms: Tensor, groups: int) -> Tensor:
    return norms if groups == 1 else norms.view(-1, groups).square().sum(1).sqrt()


def _roundoff(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps / 2


def _row_norms(x: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """(U x, upper bounds of ‖U x_t‖) for rows x `[M, T, d]`."""
    y = side.apply(x)
    norms = torch.linalg.vector_norm(y, dim=-1)
    u = _roundoff(x)
    if not isinstance(side, (Identity, Diagonal)):
        slack = 4 * math.sqrt(x.shape[-1]) * u * side.bound
        norms = norms + slack * torch.linalg.vector_norm(x, dim=-1)
    return y, norms * (1 + 2 * math.sqrt(x.shape[-1]) * u)


def _rank_one_norms(block: Outer, metric: Kronecker) -> Tensor:
    _, a = _row_norms(block.a, metric.input)
    _, b = _row_norms(block.b, metric.output)
    return (a * b)[:, 0]


def _gram_norms(block: Outer, metric: Kronecker) -> Tensor:
    t, size = block.a.shape[1], block.a.shape[2] + block.b.shape[2]
    pieces = []
    for rows in _chunks(block.a.shape[0], t * t):
        a, a_norms = _row_norms(block.a[rows], metric.input)
        b, b_norms = _row_norms(block.b[rows], metric.output)
        square = (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(b, b.transpose(1, 2))).sum((1, 2))
        # Σ‖ã‖‖b̃‖ with and without each row's rounding error: the difference is what whitening may have lost.
        bound = (a_norms * b_norms).sum(1)
        plain = (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)).sum(1)
        norms = (square.clamp(min=0) + (t + size) * _roundoff(a) * bound.square()).sqrt()
        pieces.append(norms + (bound - plain).clamp(min=0) + 0 * square)  # NaN in the Gram stays NaN
    return torch.cat(pieces)


def _materialised_norms(block: Outer | ConvBlock, metric: Kronecker, keeps: bool) -> LayerNorms:
    t, d_in, d_out, _ = _shape(block)
    whole = block.per_example() if keeps else None
    unit = _roundoff(block.b)
    pieces = []
    for rows in _chunks(block.batch_size, d_in * d_out * block.groups):
        part = _examples(block, rows)
        g = part.per_example() if whole is None else whole[rows.start * block.groups : rows.stop * block.groups]
        norms = torch.linalg.vector_norm(metric.whiten(g).flatten(1), dim=1)
        gain = metric.input.bound * metric.output.bound
        if not metric.is_identity:
            slack = 4 * (math.sqrt(d_in) + math.sqrt(d_out)) * unit * gain
            norms = norms + slack * torch.linalg.vector_norm(g.flatten(1), dim=1)
        norms = _over_groups(norms, block.groups) * (1 + 2 * math.sqrt(d_in * d_out) * unit)
        pieces.append(norms + t * unit * gain * _magnitudes(part))
    return LayerNorms(torch.cat(pieces), block if whole is None else Formed(whole, block.groups))


def _magnitudes(block: Outer | ConvBlock) -> Tensor:
    """Upper bounds `[N]` of Σ_t ‖a_t‖‖b_t‖ (over groups too)."""
    if isinstance(block, ConvBlock):
        return block.magnitudes()
    sums = (torch.linalg.vector_norm(block.a, dim=-1) * torch.linalg.vector_norm(block.b, dim=-1)).sum(1)
    return sums.view(-1, block.groups).sum(1)


def _examples(block: Outer | ConvBlock, rows: slice) -> Outer | ConvBlock:
    if isinstance(block, ConvBlock):
        return replace(block, x=block.x[rows], b=block.b[rows])
    grouped = slice(rows.start * block.groups, rows.stop * block.groups)
    return Outer(block.a[grouped], block.b[grouped], block.groups)


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def _lookup_norms(block: Lookup, metric: Kronecker) -> Tensor:
    """Rows with the same id add up before the norm is taken: a Gram matrix masked to equal ids."""
    b, b_norms = _row_norms(block.b, metric.output)
    if isinstance(metric.input, Diagonal):
        scale = metric.input.scale[block.ids]
        b, b_norms = b * scale.unsqueeze(-1), b_norms * scale.abs()
    elif isinstance(metric.input, Identity):
        b, b_norms = b * metric.input.factor, b_norms * metric.input.bound
    else:
        raise ValueError("the input side of an embedding must be diagonal or the identity")
    t, d = b.shape[1:]
    pieces = []
    for rows in _chunks(b.shape[0], t * t):
        same = (block.ids[rows].unsqueeze(2) == block.ids[rows].unsqueeze(1)).to(b.dtype)
        square = (torch.bmm(b[rows], b[rows].transpose(1, 2)) * same).sum((1, 2))
        bound = torch.einsum("nt,nts,ns->n", b_norms[rows], same, b_norms[rows])
        plain = torch.linalg.vector_norm(b[rows], dim=-1)
        whitening = (bound - torch.einsum("nt,nts,ns->n", plain, same, plain)).clamp(min=0)
        pieces.append((square.clamp(min=0) + (t + d) * _roundoff(b) * bound + whitening + 0 * square).sqrt())
    return torch.cat(pieces)


def _elementwise_norms(block: PerExample, metric: Kronecker | Elementwise | None) -> Tensor:
    if isinstance(metric, Kronecker) and not metric.is_identity:
        raise ValueError("this layer needs an elementwise metric, but the preconditioner holds a Kronecker one")
    scale = metric.scale if isinstance(metric, Elementwise) else {}
    total: Tensor | None = None
    size = 0
    for role, g in block.grads.items():
        z = g * scale[role] if role in scale else g
        square = z.flatten(1).square().sum(1)
        total = square if total is None else total + square
        size += z[0].numel() if z.shape[0] else 0
    assert total is not None
    return total.sqrt() * (1 + 2 * math.sqrt(size) * _roundoff(total))
