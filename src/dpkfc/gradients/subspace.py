"""Embedding and residual of per-example gradients along a public basis L, each with a clip of its own.

    w = Lᵀ g,   r = g − L w,   ‖r‖² = ‖g‖² − ‖w‖²,   Σ c r = Σ c g − L Σ c w

so that the residual needs the inner products with the k directions alone: no residual is formed. They are bᵀ L_j a for one
position, and otherwise taken of gradients that were formed for their norms, or are formed in chunks.

In floating point the difference of the squares cancels. For computed w = Lᵀ g + e and ‖Lᵀ L − I‖ <= η the residual that
enters the sum has a square of exactly ‖g‖² − ‖w‖² + 2 w·e + w·(Lᵀ L − I) w. It is clipped by an upper bound of that,
‖g‖² − (1 − η) ‖w‖² + 2 ‖w‖ ‖e‖. With u the unit roundoff, p entries, γ = min(p, 4 √p) u (Higham and Mary 2019) and M the sum
of the lengths of T terms, ‖e‖ <= γ ‖L‖_F ‖g‖ + 2 T u M a layer, the second term only where the gradient is formed once more
for the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Formed, Lookup, Outer, PerExample, Tied
from dpkfc.gradients.clipping import SPLIT, clip_factors
from dpkfc.gradients.conv import AnyBlock, ConvBlock
from dpkfc.gradients.layers import Layer
from dpkfc.metric import Metric
from dpkfc.subspace import EMBEDDING, Span, Subspace

__all__ = ["Split", "inner_products", "split_for", "spread"]

_CHUNK_ELEMENTS = 1 << 24
Held = AnyBlock
Cut = Callable[[Layer, Tensor | dict[str, Tensor]], Mapping[str, Tensor]]


def split_for(metric: Metric, clipping: str) -> Split | None:
    """What splits gradients along the basis in a metric; None for a metric without one.

    Raises:
        ValueError: metric and clipping do not belong together, so that the plan's sensitivity would be another's.
    """
    if not isinstance(metric, Subspace):
        if clipping in SPLIT:
            raise ValueError(f"clipping='{clipping}' needs the basis of a preconditioner such as curvature.gep.GEP(...)")
        return None
    if clipping != metric.clipping:
        raise ValueError(f"this basis is clipped with clipping='{metric.clipping}', not '{clipping}'")
    return Split(metric)


class Split:
    """The two clips and sums of ONE logical batch.

    Args:
        basis: along which gradients are split.
    """

    def __init__(self, basis: Subspace) -> None:
        self._basis = basis
        self._embedded: Tensor | None = None  # the clipped, scaled sum of w `[K]`
        self._removed: Tensor | None = None  # the sum of w with the factors of the residual `[K]`

    def clip(self, blocks: Mapping[str, Held], own: Mapping[str, Tensor], norms: Tensor) -> tuple[Tensor, Tensor]:
        """Add the clipped embeddings of one micro-batch, and say with which factors its gradients are to be summed.

        Args:
            blocks: layer name to what it contributes, as its clipped sum will be taken of it.
            own: upper bounds of the norms of each layer's gradient `[N]`.
            norms: of the whole gradient.

        Returns:
            (the larger of ‖w‖ / S₁ and ‖r‖ / S₂ `[N]`, NaN where a gradient is not finite; factors of the gradients `[N]`, zero
            where the residual is dropped).
        """
        basis = self._basis
        w = norms.new_zeros(len(norms), basis.width, dtype=torch.float64)
        error = 8 * torch.finfo(torch.float64).eps * norms.double()
        for name, block in blocks.items():
            span = basis.spans.get(name)
            if span is not None:
                w[:, span.columns] += inner_products(block, span)
                error = error + _error(block, span, own[name], 1 + basis.defect)
        finite = torch.isfinite(norms) & torch.isfinite(w).all(1)
        w = w.masked_fill(~finite.unsqueeze(1), 0.0)
        norms = norms.double().masked_fill(~finite, math.nan)
        lengths = w.norm(dim=1) + 0 * norms
        first = clip_factors(lengths, basis.embedding_norm) * basis.embedding_scale
        self._embedded = _added(self._embedded, first @ w)
        found = lengths / basis.embedding_norm
        if basis.residual_norm is None:
            return found, torch.zeros_like(found)
        left = norms.square() - (1 - basis.defect) * lengths.square() + 2 * lengths * error
        residuals = left.clamp(min=0).sqrt()
        second = clip_factors(residuals, basis.residual_norm) * basis.residual_scale
        self._removed = _added(self._removed, second @ w)
        return torch.maximum(found, residuals / basis.residual_norm), second

    @property
    def keeps_residual(self) -> bool:
        """Whether gradients are summed at all."""
        return self._basis.residual_norm is not None

    def result(self, sums: Mapping[str, Tensor], layers: Sequence[Layer], cut: Cut) -> dict[str, Tensor]:
        """The stacked clipped sum: the embedding under a name of its own, and each parameter's residual.

        Args:
            sums: parameter name to the sum of gradients with the factors of `clip`.
            layers: of the model.
            cut: a layer and its sum to parameter name and tensor.
        """
        like = next(iter(sums.values()))
        widest = torch.float64 if any(x.dtype == torch.float64 for x in sums.values()) else torch.float32
        none = like.new_zeros(self._basis.width, dtype=torch.float64)
        found = {EMBEDDING: (none if self._embedded is None else self._embedded).to(widest)}
        if not self.keeps_residual:
            return found
        removed = none if self._removed is None else self._removed
        along = spread(self._basis, layers, lambda span: span.combine(removed), cut)
        return found | {name: x - along[name].to(x.dtype) if name in along else x for name, x in sums.items()}


def _added(held: Tensor | None, value: Tensor) -> Tensor:
    return value if held is None else held + value


def spread(
    basis: Subspace, layers: Sequence[Layer], value: Callable[[Span], Tensor | dict[str, Tensor]], cut: Cut
) -> dict[str, Tensor]:
    """Something that every layer's rows of a basis give, as parameter name to tensor; layers without rows are absent.

    Args:
        basis: whose layers they are.
        layers: of the model.
        value: `Span.combine` of an embedding, or `Span.diagonal`.
        cut: a layer and its sum to parameter name and tensor.
    """
    found: dict[str, Tensor] = {}
    for layer in layers:
        if layer.name in basis.spans:
            found.update(cut(layer, value(basis.spans[layer.name])))
    return found


def inner_products(block: Held, span: Span) -> Tensor:
    """⟨L_j, g_n⟩ over one layer, `[N, k]` in float64."""
    if isinstance(block, Lookup):
        return _lookup_products(block, span.vectors[""])
    if isinstance(block, Outer) and block.groups == 1 and block.a.shape[1] == 1:
        return _rank_one_products(block, span.vectors[""])
    flat = {role: v.reshape(span.rank, -1).T for role, v in span.vectors.items()}
    pieces = [next(iter(flat.values())).new_zeros(0, span.rank, dtype=torch.float64)]
    for part in _formed(block):
        products = [(g @ flat[role].to(g.dtype)).double() for role, g in part.items()]
        pieces.append(torch.stack(products).sum(0))
    return torch.cat(pieces)


def _lookup_products(block: Lookup, vectors: Tensor) -> Tensor:
    """Rows of the directions are gathered where the table was read: Σ_t L_j[id_t] · b_t."""
    (n, t), d = block.ids.shape, block.b.shape[-1]
    pieces = [block.b.new_zeros(0, len(vectors), dtype=torch.float64)]
    for rows in _chunks(n, len(vectors) * t * d):
        gathered = vectors.to(block.b.dtype)[:, block.ids[rows]]
        pieces.append(torch.einsum("kntd,ntd->nk", gathered, block.b[rows]).double())
    return torch.cat(pieces)


def _rank_one_products(block: Outer, vectors: Tensor) -> Tensor:
    """With one position bᵀ L_j a: the rows L_j a are far fewer numbers than the gradients."""
    a, b = block.explicit().a[:, 0], block.b[:, 0]
    k, d_out, d_in = vectors.shape
    pieces = [b.new_zeros(0, k, dtype=torch.float64)]
    for rows in _chunks(len(b), k * d_out):
        mapped = (a[rows] @ vectors.to(a.dtype).view(k * d_out, d_in).T).view(-1, k, d_out)
        pieces.append(torch.bmm(mapped, b[rows].unsqueeze(2))[:, :, 0].double())
    return torch.cat(pieces)


def _formed(block: Outer | Tied | PerExample | ConvBlock | Formed) -> Iterator[dict[str, Tensor]]:
    """Role to gradients of some of the examples `[n, numel]`, "" for the matrix of weight and bias."""
    match block:
        case PerExample():
            yield {role: g.reshape(len(g), math.prod(g.shape[1:])) for role, g in block.grads.items()}
        case Formed():
            size = block.groups * math.prod(block.gradients.shape[1:])
            yield {"": block.gradients.reshape(len(block.gradients) // block.groups, size)}
        case _:
            size = _size(block)
            for rows in _chunks(block.batch_size, size):
                yield {"": _examples(block, rows).per_example().reshape(-1, size)}


def _examples(block: Outer | Tied | ConvBlock, rows: slice) -> Outer | Tied | ConvBlock:
    match block:
        case ConvBlock():
            return block.examples(rows)
        case Tied():
            lookup = replace(block.lookup, ids=block.lookup.ids[rows], b=block.lookup.b[rows])
            return Tied(lookup, replace(block.outer, a=block.outer.a[rows], b=block.outer.b[rows]))
        case Outer():
            several = slice(rows.start * block.groups, rows.stop * block.groups)
            return replace(block, a=block.a[several], b=block.b[several])


def _size(block: Outer | Tied | ConvBlock) -> int:
    """Entries of one example's gradient."""
    match block:
        case Tied():
            return block.lookup.num_rows * block.outer.d_in
        case ConvBlock():
            return block.groups * block.d_out * block.d_in
        case Outer():
            return block.groups * block.b.shape[-1] * block.d_in


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def _error(block: Held, span: Span, norms: Tensor, gain: float) -> Tensor:
    """Upper bound `[N]` of ‖w − Lᵀ g‖ over one layer, g being what the clipped sum is taken of."""
    size = sum(v[0].numel() for v in span.vectors.values())
    match block:
        case PerExample():
            return _dot(size) * max(_unit(g) for g in block.grads.values()) * span.length * norms
        case Formed():
            return _dot(size) * _unit(block.gradients) * span.length * norms
        case Lookup():
            terms, magnitudes = _own(block.b), _lengths(block.b).sum(1)
            rounding = torch.minimum(terms * block.b.shape[-1], 4 * (terms * block.b.shape[-1]).sqrt())
            return _unit(block.b) * (rounding * span.length + 2 * terms * gain) * magnitudes
        case ConvBlock():
            terms, unit = block.own_positions(), _unit(block.b)
            magnitudes = block.magnitudes(terms)
        case Tied():
            terms = _own(block.lookup.b) + _own(block.outer.b)
            magnitudes, unit = _lengths(block.lookup.b).sum(1) + _magnitudes(block.outer), _unit(block.outer.b)
        case Outer():
            terms, magnitudes, unit = _own(block.b).view(-1, block.groups).amax(1), _magnitudes(block), _unit(block.b)
    return unit * (_dot(size) * span.length * norms + 2 * terms * gain * magnitudes)


def _own(b: Tensor) -> Tensor:
    """Positions of each example that have a gradient, for rows `[N, T, d]`: `[N]` in float64."""
    return (b != 0).any(-1).sum(1).double()


def _unit(x: Tensor) -> float:
    """Unit roundoff of a tensor's type."""
    return torch.finfo(x.dtype).eps / 2


def _dot(length: int) -> float:
    return min(float(length), 4 * math.sqrt(length))


def _lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _magnitudes(block: Outer) -> Tensor:
    """Σ_t ‖a_t‖ ‖b_t‖ over groups too, `[N]`."""
    inputs = (_lengths(block.a).square() + float(block.homogeneous)).sqrt()
    return (inputs * _lengths(block.b)).sum(1).view(-1, block.groups).sum(1)
