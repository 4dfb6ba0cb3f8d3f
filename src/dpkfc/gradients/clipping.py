"""Clip factors: one scalar an example, over the norm of all its trainable parameters together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.calls import Calls
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.parametrized import Computed
from dpkfc.gradients.rules import joined_calls
from dpkfc.linalg.blocks import (
    AnyBlock,
    ConvBlock,
    Formed,
    Lookup,
    Outer,
    PerExample,
    Tied,
    answered,
    put_off,
    weighted_sum,
)
from dpkfc.linalg.metric import EMBEDDING, Eigenbasis, Elementwise, Entry, Metric, Span, Subspace
from dpkfc.linalg.norms import LayerNorms, Reread, per_example_norms

CLIPPINGS = ("flat", "normalised", "automatic", "per_layer")
_LEAST = torch.finfo(torch.float32).tiny  # smallest factor that the sum, in float32, holds to full precision
SPLIT = ("embedding", "embedding_residual")  # the parts of a gradient along a basis, clipped apart (GEP): see `subspace`


def contribution_bound(clipping: str, max_grad_norm: float) -> float:
    """The largest norm one example may contribute to the sum after clipping.

    Args:
        clipping: flat, normalised, automatic, per_layer, embedding or embedding_residual.
        max_grad_norm: C.

    Returns:
        C for flat, automatic and per-layer clipping (C / √L for each of L layers), 1 for normalised clipping (De et al.
        2022: clipped, then divided by C). Of a gradient split along a basis each part is divided by a norm of its own: 1 for
        the embedding alone, √2 for embedding and residual.

    Raises:
        ValueError: an unknown clipping, a C that is not positive and finite, or one beside the norms of a split gradient.
    """
    if clipping not in CLIPPINGS + SPLIT:
        raise ValueError(f"unknown clipping '{clipping}'; choose one of {', '.join(CLIPPINGS + SPLIT)}")
    if not 0 < max_grad_norm < float("inf"):
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}")
    if clipping in SPLIT and max_grad_norm != 1:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} has no meaning with clipping='{clipping}', which clips to the embedding_norm and the "
            "residual_norm of the preconditioner; leave max_grad_norm at 1"
        )
    if clipping in SPLIT:
        return 1.0 if clipping == "embedding" else math.sqrt(2)
    return 1.0 if clipping == "normalised" else max_grad_norm


def clip_factors(norms: Tensor, max_grad_norm: float, clipping: str = "flat", automatic_gamma: float = 0.01) -> Tensor:
    """Factor c of each example, so that c · norm never exceeds `contribution_bound`.

    Args:
        norms: upper bounds of the per-example gradient norms `[N]`, in the coordinates of the noise.
        max_grad_norm: C.
        clipping: flat: min(1, C / n) (Abadi et al. 2016); normalised: min(1 / C, 1 / n) (De et al. 2022);
            automatic: C / (n + γ) (Bu et al. 2023).
        automatic_gamma: γ of automatic clipping.

    Returns:
        Factors `[N]`; zero for an example whose norm is not finite, or so large that its factor is not a normal number of
        float32 (rounded up, it would let more than C through): such an example contributes nothing.

    Raises:
        ValueError: as `contribution_bound`; γ not positive.
    """
    contribution_bound(clipping, max_grad_norm)
    if automatic_gamma <= 0:
        raise ValueError(f"automatic_gamma must be positive, got {automatic_gamma}")
    if clipping == "per_layer":
        raise ValueError("per_layer clipping has one factor a layer; clip each layer with C / √L and clipping='flat'")
    if clipping in SPLIT:
        raise ValueError(f"{clipping} clipping has one factor a part; clip each part with its own norm and clipping='flat'")
    if clipping == "automatic":
        factors = max_grad_norm / (norms + automatic_gamma)
    else:
        factors = (max_grad_norm / norms).clamp(max=1.0)
        if clipping == "normalised":
            factors = factors / max_grad_norm
    return torch.where(torch.isfinite(norms) & (factors >= _LEAST), factors, torch.zeros_like(factors))


# --------------------------------------------------------------------------------------------------
# Embedding and residual of per-example gradients along a public basis L, each with a clip of its
# own.
#
#     w = Lᵀ g,   r = g − L w,   ‖r‖² = ‖g‖² − ‖w‖²,   Σ c r = Σ c g − L Σ c w
#
# so that the residual needs the inner products with the k directions alone: no residual is formed.
# They are bᵀ L_j a for one position, and otherwise taken of gradients that were formed for their
# norms, or are formed in chunks.
#
# In floating point the difference of the squares cancels. For computed w = Lᵀ g + e and ‖Lᵀ L − I‖
# <= η the residual that enters the sum has a square of exactly ‖g‖² − ‖w‖² + 2 w·e + w·(Lᵀ L − I)
# w. It is clipped by an upper bound of that, ‖g‖² − (1 − η) ‖w‖² + 2 ‖w‖ ‖e‖. With u the unit
# roundoff, p entries, γ = min(p, 4 √p) u (Higham and Mary 2019) and M the sum of the lengths of T
# terms, ‖e‖ <= γ ‖L‖_F ‖g‖ + 2 T u M a layer, the second term only where the gradient is formed
# once more for the sum.

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


# --------------------------------------------------------------------------------------------------
# Several rows of a batch as ONE example of the mechanism: one gradient, one norm, one clip.
#
# A privacy unit with k records (or one example in k augmented views) is k consecutive rows whose
# losses carry weights. In the normal form its gradient is `Σ_r Σ_t b_rt a_rtᵀ`: the rows' positions
# are simply concatenated, so norms and clipped sums need nothing new. Weights are factors of the
# losses and arrive in `b`.


@dataclass(frozen=True)
class Groups:
    """The first `count · size` rows of a batch, `size` consecutive rows each; any further rows are padding.

    Attributes:
        count: groups U.
        size: rows a group k.
    """

    count: int
    size: int = 1


def grouped(block: AnyBlock | Computed, groups: Groups) -> AnyBlock:
    """The block of `count` examples whose gradients are the sums over the rows of each group.

    Args:
        block: of N >= count · size rows.
        groups: which rows belong together.

    Returns:
        A block of `count` examples with `size` times the positions.
    """
    rows, k = groups.count * groups.size, groups.size
    match block:
        case PerExample():
            first = {role: g[:rows] for role, g in block.grads.items()}
            return PerExample({r: g if k == 1 else g.view(-1, k, *g.shape[1:]).sum(1) for r, g in first.items()})
        case Formed():
            g = block.gradients[: rows * block.groups]
            if k > 1:
                g = g.view(groups.count, k, block.groups, *g.shape[1:]).sum(1).flatten(0, 1)
            return replace(block, gradients=g)
        case Lookup():
            return _lookup(block, groups)
        case Tied():
            return Tied(_lookup(block.lookup, groups), _outer(block.outer, groups))
        case Computed():
            return block.mapped(partial(grouped, groups=groups)).per_example()
        case ConvBlock():
            return replace(block.examples(slice(0, rows)), views=block.views * k)
        case Outer():
            return _outer(block, groups)


def _lookup(block: Lookup, groups: Groups) -> Lookup:
    u, k = groups.count, groups.size
    (_, t), d = block.ids.shape, block.b.shape[-1]
    return replace(block, ids=block.ids[: u * k].reshape(u, k * t), b=block.b[: u * k].reshape(u, k * t, d))


def _outer(block: Outer, groups: Groups) -> Outer:
    return replace(block, a=_joined(block.a, groups, block.groups), b=_joined(block.b, groups, block.groups))


def _joined(x: Tensor, groups: Groups, channels: int) -> Tensor:
    """`[N · channels, T, d]` to `[count · channels, size · T, d]`."""
    _, t, d = x.shape
    x = x[: groups.count * groups.size * channels]
    if groups.size == 1:
        return x
    if channels == 1:
        return x.reshape(groups.count, groups.size * t, d)
    split = x.view(groups.count, groups.size, channels, t, d).transpose(1, 2)
    return split.reshape(groups.count * channels, groups.size * t, d)


# --------------------------------------------------------------------------------------------------
# The clipped sum of a logical batch, micro-batch by micro-batch.
#
# Norms are taken in the metric, each example is clipped once over all layers, unwhitened sums are
# accumulated, and every layer's sum is whitened once at the end. Any split into micro-batches gives
# the same sum.


@dataclass(frozen=True)
class Clip:
    """How an example is clipped: see `clipping.clip_factors`; "per_layer" clips each of L layers to C / √L.

    `methods` says how the norms of some layers are computed, by name; see `norms.per_example_norms`.
    """

    max_grad_norm: float
    clipping: str = "flat"
    automatic_gamma: float = 0.01
    methods: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """What clipping did to one micro-batch. PRIVATE: computed from un-noised data, for the operator's eyes only.

    Attributes:
        norms: upper bounds of the norms in the metric `[N]`.
        factors: clip factors `[N]`.
    """

    norms: Tensor
    factors: Tensor


@contextmanager
def full_precision() -> Iterator[None]:
    """Norms and sums are taken in the precision their bounds assume: no autocast, no TF32 or bfloat16 inside float32.

    Whatever was set through torch's older switches (`allow_tf32`, `set_float32_matmul_precision`) or its newer ones
    (`fp32_precision`), on the CPU too, is so again afterwards.
    """
    with ExitStack() as undo, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        operations = [x for x in _operations() if hasattr(x, "fp32_precision")]
        before = [x.fp32_precision for x in operations]
        for operation, value in zip(operations, before, strict=True):
            undo.callback(_set_back, operation, value)
        _switch_off(undo)
        for operation in operations:
            operation.fp32_precision = "ieee"
        yield


def _operations() -> Iterator[Any]:
    backends: Any = torch.backends
    yield backends.cuda.matmul
    for backend in (backends.cudnn, backends.mkldnn):
        yield from (getattr(backend, name) for name in ("matmul", "conv", "rnn") if hasattr(backend, name))


def _switch_off(undo: ExitStack) -> None:
    """The older switches, which torch can read only where nothing that the newer ones say differs from them."""
    cudnn: Any = torch.backends.cudnn
    with suppress(RuntimeError):
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    with suppress(RuntimeError):
        undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        cudnn.allow_tf32 = False


def _set_back(operation: Any, value: str) -> None:
    """An operation that takes its backend's precision goes on doing so."""
    operation.fp32_precision = "none"
    if operation.fp32_precision != value:
        operation.fp32_precision = value


class ClippedSummer:
    """Accumulates Σ c_n U g_n over the micro-batches of ONE logical batch.

    Args:
        layers: every layer of the model.
        metric: layer name to map; an absent layer keeps the identity.
        clip: the clip, taken over all layers together in the coordinates of the metric.
    """

    def __init__(self, layers: Sequence[Layer], metric: Metric, clip: Clip) -> None:
        self._layers = tuple(layers)
        self._metric = metric
        self._clip = clip
        self._split = split_for(metric, clip.clipping)
        self._sums: dict[tuple[str, bool], Tensor | dict[str, Tensor]] = {}  # (layer, whitened already)

    def add(self, calls: Calls, batch_size: int, groups: Groups | None = None) -> MicroBatch:
        """Clip and add one micro-batch; the recorded calls are consumed.

        Args:
            calls: from `Tape.backward`.
            batch_size: rows in the micro-batch.
            groups: rows that are clipped together as one example, and rows that are left out; None: each row is one.

        Returns:
            Norms and factors, private.

        Raises:
            ValueError: a layer whose inputs do not lead with the batch, or a metric of the wrong kind.
        """
        with full_precision():
            return self._add_micro_batch(calls, batch_size, groups or Groups(batch_size))

    def _add_micro_batch(self, calls: Calls, batch_size: int, groups: Groups) -> MicroBatch:
        found, reread = dict[str, LayerNorms](), Reread()
        with put_off() as questions:
            for layer in self._layers:
                if layer.name not in calls:
                    continue
                block = grouped(joined_calls(layer, calls.pop(layer.name), batch_size), groups)
                found[layer.name] = per_example_norms(
                    block, self._metric.get(layer.name), self._clip.methods.get(layer.name), reread
                )
                del block
            del reread
        if not found:
            raise ValueError("no layer of the model was called by loss_fn")
        own, all_finite = _settled(found, questions)
        blocks = {(name, x.whitened): x.block for name, x in found.items()}
        found.clear()  # each block is let go as soon as its sum is taken
        norms = torch.stack([x.square() for x in own.values()]).sum(0).sqrt()
        if self._split is None:
            factors = self._factors(own, norms)
        else:
            norms, factor = self._split.clip({name: block for (name, _), block in blocks.items()}, own, norms)
            factors, all_finite = dict.fromkeys(own, factor), False
        finite = torch.isfinite(norms)
        broken = None if all_finite or bool(finite.all()) else ~finite
        for key in list(blocks) if self._split is None or self._split.keeps_residual else ():
            self._add(key, weighted_sum(blocks.pop(key), factors[key[0]], broken))
        return MicroBatch(norms, torch.stack([*factors.values()]).min(0).values)

    def _factors(self, own: Mapping[str, Tensor], norms: Tensor) -> dict[str, Tensor]:
        """Clip factors `[N]` of each layer, zero wherever the whole gradient is not finite."""
        clip = self._clip
        if clip.clipping != "per_layer":
            return dict.fromkeys(own, clip_factors(norms, clip.max_grad_norm, clip.clipping, clip.automatic_gamma))
        share, finite = clip.max_grad_norm / math.sqrt(len(self._layers)), torch.isfinite(norms)
        return {name: clip_factors(x, share) * finite for name, x in own.items()}

    def _add(self, key: tuple[str, bool], value: Tensor | dict[str, Tensor]) -> None:
        held = self._sums.get(key)
        if held is None:
            self._sums[key] = value
        elif isinstance(held, dict) and isinstance(value, dict):
            self._sums[key] = {role: held[role] + value[role] for role in held}
        elif isinstance(held, Tensor) and isinstance(value, Tensor):
            held += value

    def result(self) -> dict[str, Tensor]:
        """The whitened clipped sum, parameter name to a tensor of the parameter's shape (zeros where nothing came).

        Along a basis it is the stacked sum of scaled embeddings (under a name of their own) and residuals.
        """
        with full_precision():
            sums = self._result()
            return sums if self._split is None else self._split.result(sums, self._layers, split_sum)

    def _result(self) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for layer in self._layers:
            entry = self._metric.get(layer.name)
            whitened, plain = self._sums.get((layer.name, True)), self._sums.get((layer.name, False))
            if whitened is None and plain is None:
                sums.update({full: _zeros(layer.tensor(role)) for role, full in layer.parameters.items()})
            elif isinstance(plain, dict):
                scale = entry.scale if isinstance(entry, Elementwise) else {}
                sums.update(split_sum(layer, {r: v * scale[r] if r in scale else v for r, v in plain.items()}))
            else:
                parts = [_whiten(layer, plain, entry)] if isinstance(plain, Tensor) else []
                parts += [whitened] if isinstance(whitened, Tensor) else []
                sums.update(split_sum(layer, parts[0] if len(parts) == 1 else parts[0] + parts[1]))
        # In one order, whether or not a layer was called: processes add their sums up entry by entry.
        return {full: sums[full] for layer in self._layers for full in layer.parameters.values()}


def _settled(found: Mapping[str, LayerNorms], questions: Sequence[Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Layer name to norms `[N]` in float64, and whether all are known to be finite; a card is waited for once, as a rule."""
    own = {name: x.norms.double() for name, x in found.items()}
    *unsure, all_finite = answered([*questions, torch.stack([x.isfinite().all() for x in own.values()]).all()])
    if any(unsure):
        own = {name: x.norms.double() if x.again is None else x.again().double() for name, x in found.items()}
    return own, all_finite and not any(unsure)


def _zeros(parameter: Tensor) -> Tensor:
    dtype = parameter.dtype if parameter.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _whiten(layer: Layer, value: Tensor, entry: Entry | None) -> Tensor:
    if entry is None or isinstance(entry, Elementwise) or entry.is_identity:
        return value
    return on_groups(layer, value, entry.whiten)


def on_groups(layer: Layer, matrix: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of `[..., d_out, d_in]` to a layer's matrix: an embedding's lies crosswise, groups are apart."""
    if layer.rule == "embedding":
        return work(matrix.T).T
    groups = getattr(layer.module, "groups", 1)
    return work(matrix.view(groups, -1, matrix.shape[-1])).reshape(matrix.shape)


def matrix_of(layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
    """A layer's weight and bias as the matrix that `split_sum` cuts: the bias is the last column."""
    columns = []
    if "weight" in layer.parameters:
        weight = tensors[layer.parameters["weight"]]
        columns.append(weight.T if layer.transposed else weight.flatten(1))
    if "bias" in layer.parameters:
        columns.append(tensors[layer.parameters["bias"]].unsqueeze(1))
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]


def split_sum(layer: Layer, value: Tensor | dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Cut a layer's sum, for example a matrix `[d_out, d_in (+1)]`, into parameter name to tensor."""
    if isinstance(value, dict):
        return {layer.parameters[role]: tensor for role, tensor in value.items()}
    matrix = value
    result: dict[str, Tensor] = {}
    if "weight" in layer.parameters:
        shape = layer.tensor("weight").shape
        columns = matrix[:, :-1] if "bias" in layer.parameters else matrix
        result[layer.parameters["weight"]] = (columns.T if layer.transposed else columns).reshape(shape)
    if "bias" in layer.parameters:
        result[layer.parameters["bias"]] = matrix[:, -1].contiguous()
    return result


# --------------------------------------------------------------------------------------------------
# A diagonal metric from one factor a parameter entry, in the layout that the norm engine reads.

_MATRICES = ("linear", "conv", "embedding", "tied")


def diagonal_metric(layers: Sequence[Layer], scales: Mapping[str, Tensor]) -> Metric:
    """The map `z = scale ⊙ g`.

    Args:
        layers: of the model.
        scales: parameter name to positive factors of its shape. The groups of a convolution share the mean of theirs.

    Returns:
        One entry a layer: without rotations for matrix-shaped layers (the bias is the last column), by role for others.
    """
    return {layer.name: _entry(layer, scales) for layer in layers}


def _entry(layer: Layer, scales: Mapping[str, Tensor]) -> Entry:
    if layer.rule not in _MATRICES:
        return Elementwise({role: scales[full] for role, full in layer.parameters.items()})
    matrix = matrix_of(layer, scales)
    if layer.rule == "embedding":
        return Eigenbasis(matrix.T.contiguous())
    groups = getattr(layer.module, "groups", 1)
    return Eigenbasis(matrix.view(groups, -1, matrix.shape[-1]).mean(0))
