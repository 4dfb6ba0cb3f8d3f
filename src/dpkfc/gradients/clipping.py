"""Clip factors and clipped sums: one scalar an example, over the norm of all its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import check_one_of, check_positive
from dpkfc.gradients.layers import MATRICES, Calls, Layer
from dpkfc.gradients.rules import joined_calls
from dpkfc.linalg.blocks import AnyBlock, defer_flags, raise_precision, read_flags
from dpkfc.linalg.metric import (
    EMBEDDING,
    Eigenbasis,
    Elementwise,
    Entry,
    Metric,
    NamedTensors,
    Span,
    Subspace,
)
from dpkfc.linalg.norms import InputCache, LayerNorms, per_example_norms

CLIPPINGS = ("flat", "normalised", "automatic", "per_layer")
SPLIT = ("embedding", "embedding_residual")
"""Clippings of a gradient that is split along a basis (GEP), each part with a clip of its own."""
_LEAST = torch.finfo(torch.float32).tiny  # smallest factor in full precision


def contribution_bound(clipping: str, max_grad_norm: float) -> float:
    """Return the largest norm that one example may contribute to the sum after clipping.

    Args:
        clipping: flat, normalised, automatic, per_layer, embedding or embedding_residual.
        max_grad_norm: C.

    Returns:
        C for flat, automatic and per-layer clipping (C / √L for each of L layers), 1 for normalised
        clipping (De et al. 2022: clipped, then divided by C). Each part of a split gradient is
        divided by its own norm: 1 for the embedding alone, √2 for embedding and residual.

    Raises:
        ValueError: an unknown clipping, a C that is not positive and finite, or a C for a split
            gradient.
    """
    check_one_of("clipping", clipping, CLIPPINGS + SPLIT)
    check_positive("max_grad_norm", max_grad_norm)
    if clipping in SPLIT and max_grad_norm != 1:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} has no meaning with clipping='{clipping}', whose norms "
            "the preconditioner holds; leave max_grad_norm at 1"
        )
    if clipping == "embedding_residual":
        return math.sqrt(2)
    return 1.0 if clipping in ("embedding", "normalised") else max_grad_norm


def clip_factors(
    norms: Tensor, max_grad_norm: float, clipping: str = "flat", automatic_gamma: float = 0.01
) -> Tensor:
    """Return the factor c of each example, so that c · norm never exceeds `contribution_bound`.

    Args:
        norms: upper bounds of the per-example gradient norms `[N]`, in the preconditioned space.
        max_grad_norm: C.
        clipping: flat: min(1, C / n) (Abadi et al. 2016); normalised: min(1 / C, 1 / n) (De et al.
            2022); automatic: C / (n + γ) (Bu et al. 2023).
        automatic_gamma: γ of automatic clipping.

    Returns:
        Factors `[N]`. The factor is zero for an example whose norm is not finite, or so large that
        its factor is not a normal number of float32. Rounded up, such a factor would let more than
        C through.

    Raises:
        ValueError: as `contribution_bound`; γ not positive.
    """
    contribution_bound(clipping, max_grad_norm)
    check_positive("automatic_gamma", automatic_gamma)
    if clipping == "per_layer":
        raise ValueError(
            "per_layer clipping has one factor a layer; clip each layer with C / √L and "
            "clipping='flat'"
        )
    if clipping in SPLIT:
        raise ValueError(
            f"{clipping} clipping has one factor a part; clip each part with its own norm and "
            "clipping='flat'"
        )
    if clipping == "automatic":
        factors = max_grad_norm / (norms + automatic_gamma)
    else:
        factors = (max_grad_norm / norms).clamp(max=1.0)
    if clipping == "normalised":
        factors = factors / max_grad_norm
    is_counted = torch.isfinite(norms) & (factors >= _LEAST)
    return torch.where(is_counted, factors, torch.zeros_like(factors))


# --------------------------------------------------------------------------------------------------
# Embedding and residual of per-example gradients along a public basis L, each with its own clip.
#
#     w = Lᵀ g,   r = g − L w,   ‖r‖² = ‖g‖² − ‖w‖²,   Σ c r = Σ c g − L Σ c w
#
# The residual needs only the inner products with the k directions: no residual is formed. They are
# bᵀ L_j a for one position. Otherwise they come from gradients that were formed for their norms, or
# are formed in chunks.
#
# In floating point the difference of the squares cancels. For computed w = Lᵀ g + e and
# ‖Lᵀ L − I‖ <= η the residual that enters the sum has a square of exactly
# ‖g‖² − ‖w‖² + 2 w·e + w·(Lᵀ L − I) w. It is clipped by an upper bound of that,
# ‖g‖² − (1 − η) ‖w‖² + 2 ‖w‖ ‖e‖. With u the unit roundoff, p entries, γ = min(p, 4 √p) u (Higham
# and Mary 2019) and M the sum of the norms of T terms, ‖e‖ <= γ ‖L‖_F ‖g‖ + 2 T u M a layer. The
# second term appears only where the gradient is formed once more for the sum.


def split_for(metric: Metric, clipping: str) -> Split | None:
    """Return what splits gradients along the basis of a metric, or None for a metric without one.

    Raises:
        ValueError: metric and clipping do not belong together, so that the plan's sensitivity would
            be wrong.
    """
    if not isinstance(metric, Subspace):
        if clipping in SPLIT:
            raise ValueError(
                f"clipping='{clipping}' needs the basis of a preconditioner such as "
                "curvature.gep.GEP(...)"
            )
        return None
    if clipping != metric.clipping:
        raise ValueError(
            f"this basis is clipped with clipping='{metric.clipping}', not '{clipping}'"
        )
    return Split(metric)


class Split:
    """The two clips and sums of ONE logical batch.

    Args:
        basis: along which gradients are split.
    """

    def __init__(self, basis: Subspace) -> None:
        self._basis = basis
        # The clipped, scaled sum of w `[K]`.
        self._embedding: Tensor | float = 0.0
        # The sum of w with the factors of the residual `[K]`.
        self._removed: Tensor | float = 0.0

    def clip(
        self, blocks: Mapping[str, AnyBlock], layer_norms: Mapping[str, Tensor], norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the clipped embeddings of one micro-batch, and return the factors of its gradients.

        Args:
            blocks: layer name to its contribution, as its clipped sum will be taken of it.
            layer_norms: upper bounds of the norms of each layer's gradient `[N]`.
            norms: of the whole gradient.

        Returns:
            (the larger of ‖w‖ / S₁ and ‖r‖ / S₂ `[N]`, NaN where a gradient is not finite; factors
            of the gradients `[N]`, zero where the residual is dropped).
        """
        basis = self._basis
        norms = norms.double()
        w = norms.new_zeros(len(norms), basis.width)
        error = 8 * torch.finfo(torch.float64).eps * norms
        for name, block in blocks.items():
            span = basis.spans.get(name)
            if span is not None:
                w[:, span.columns] += block.inner_products(span)
                gain = 1 + basis.defect
                error = error + block.product_error(span, layer_norms[name], gain)
        finite = torch.isfinite(norms) & torch.isfinite(w).all(1)
        w = w.masked_fill(~finite.unsqueeze(1), 0.0)
        norms = norms.masked_fill(~finite, math.nan)
        w_norms = w.norm(dim=1) + 0 * norms
        factors = clip_factors(w_norms, basis.embedding_norm) * basis.embedding_scale
        self._embedding = self._embedding + factors @ w
        relative = w_norms / basis.embedding_norm
        if basis.residual_norm is None:
            return relative, torch.zeros_like(relative)
        removed = (1 - basis.defect) * w_norms.square()
        squares = norms.square() - removed + 2 * w_norms * error
        residuals = squares.clamp(min=0).sqrt()
        factors = clip_factors(residuals, basis.residual_norm) * basis.residual_scale
        self._removed = self._removed + factors @ w
        return torch.maximum(relative, residuals / basis.residual_norm), factors

    @property
    def keeps_residual(self) -> bool:
        """Return whether gradients are summed at all."""
        return self._basis.residual_norm is not None

    def result(self, sums: Mapping[str, Tensor], layers: Sequence[Layer]) -> NamedTensors:
        """Return the stacked clipped sum: the embedding under its own name, and the residuals.

        Args:
            sums: parameter name to the sum of gradients with the factors of `clip`.
            layers: of the model.
        """
        like = next(iter(sums.values()))
        is_wide = any(x.dtype == torch.float64 for x in sums.values())
        dtype = torch.float64 if is_wide else torch.float32
        zeros = like.new_zeros(self._basis.width, dtype=torch.float64)
        embedding = zeros + self._embedding
        stacked = {EMBEDDING: embedding.to(dtype)}
        if not self.keeps_residual:
            return stacked
        stacked.update(sums)
        removed = zeros + self._removed
        in_subspace = spread(self._basis, layers, lambda span: span.combine(removed))
        for name, x in in_subspace.items():
            stacked[name] = sums[name] - x.to(sums[name].dtype)
        return stacked


def spread(
    basis: Subspace,
    layers: Sequence[Layer],
    value: Callable[[Span], Tensor | NamedTensors],
) -> NamedTensors:
    """Return a value of every layer's rows of a basis, as parameter name to tensor.

    Layers without rows are absent.

    Args:
        basis: the basis.
        layers: of the model.
        value: `Span.combine` of an embedding, or `Span.diagonal`.
    """
    tensors: NamedTensors = {}
    for layer in layers:
        span = basis.spans.get(layer.name)
        if span is not None:
            tensors.update(split_sum(layer, value(span)))
    return tensors


# --------------------------------------------------------------------------------------------------
# The clipped sum of a logical batch, micro-batch by micro-batch.
#
# Norms are taken in the metric, each example is clipped once over all layers, unwhitened sums are
# accumulated, and every layer's sum is whitened once at the end. Any split into micro-batches gives
# the same sum.


@dataclass(frozen=True)
class Groups:
    """Rows of a batch that are ONE example of the mechanism: one gradient, one norm, one clip.

    A privacy unit with k records, or one example in k augmented views, is k consecutive rows whose
    losses carry weights. Any rows after the first `count · size` are padding.

    Attributes:
        count: groups U.
        size: rows a group k.
    """

    count: int
    size: int = 1


@dataclass(frozen=True)
class Clip:
    """How an example is clipped, see `clip_factors`.

    Attributes:
        max_grad_norm: C.
        clipping: as in `clip_factors`. "per_layer" clips each of L layers to C / √L.
        automatic_gamma: γ of automatic clipping.
        methods: layer name to its norm method, see `norms.per_example_norms`.
    """

    max_grad_norm: float
    clipping: str = "flat"
    automatic_gamma: float = 0.01
    methods: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def full_precision() -> Iterator[None]:
    """Take norms and sums in the precision that their bounds assume.

    The body runs without autocast, TF32 and bfloat16 inside float32. Whatever was set through
    torch's older switches (`allow_tf32`, `set_float32_matmul_precision`) or its newer ones
    (`fp32_precision`), on the CPU too, is restored afterwards.
    """
    with (
        ExitStack() as undo,
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        operations = [x for x in _backend_operations() if hasattr(x, "fp32_precision")]
        before = [x.fp32_precision for x in operations]
        for operation, value in zip(operations, before, strict=True):
            undo.callback(_restore_precision, operation, value)
        _switch_off_older(undo)
        for operation in operations:
            operation.fp32_precision = "ieee"
        yield


def _backend_operations() -> Iterator[Any]:
    backends: Any = torch.backends
    yield backends.cuda.matmul
    for backend in (backends.cudnn, backends.mkldnn):
        for name in ("matmul", "conv", "rnn"):
            if hasattr(backend, name):
                yield getattr(backend, name)


def _switch_off_older(undo: ExitStack) -> None:
    """Set the older switches, which torch can read only where no newer one differs from them."""
    cudnn: Any = torch.backends.cudnn
    with suppress(RuntimeError):
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    with suppress(RuntimeError):
        undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        cudnn.allow_tf32 = False


def _restore_precision(operation: Any, value: str) -> None:
    """Restore a precision; an operation that took its backend's precision does so again."""
    operation.fp32_precision = "none"
    if operation.fp32_precision != value:
        operation.fp32_precision = value


class ClippedSummer:
    """Accumulates Σ c_n U g_n over the micro-batches of ONE logical batch.

    Args:
        layers: every layer of the model.
        metric: layer name to map. An absent layer keeps the identity.
        clip: the clip, taken over all layers together in the preconditioned space.
    """

    def __init__(self, layers: Sequence[Layer], metric: Metric, clip: Clip) -> None:
        self._layers = tuple(layers)
        self._metric = metric
        self._clip = clip
        self._split = split_for(metric, clip.clipping)
        # Keys: (layer, whether the sum is whitened already).
        self._sums: dict[tuple[str, bool], Any] = {}

    @full_precision()
    def add(self, calls: Calls, batch_size: int, groups: Groups | None = None) -> Tensor:
        """Clip and add one micro-batch; the recorded calls are consumed.

        Args:
            calls: from `Tape.backward`.
            batch_size: rows in the micro-batch.
            groups: rows that are clipped together as one example, and padding. None: each row is
                one example.

        Returns:
            Upper bounds of the norms in the metric `[N]`, float64. PRIVATE: without noise.

        Raises:
            ValueError: a layer whose inputs do not lead with the batch, or a metric of the wrong
                kind.
        """
        groups = groups or Groups(batch_size)
        layer_norms, blocks, all_finite = self._norms(calls, batch_size, groups)
        squares = [x.square() for x in layer_norms.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        if self._split is None:
            factors = self._factors(layer_norms, norms)
        else:
            unkeyed = {name: block for (name, _), block in blocks.items()}
            norms, factor = self._split.clip(unkeyed, layer_norms, norms)
            del unkeyed
            factors = dict.fromkeys(layer_norms, factor)
            all_finite = False
        finite = torch.isfinite(norms)
        excluded = None if all_finite or bool(finite.all()) else ~finite
        if self._split is None or self._split.keeps_residual:
            for key in list(blocks):
                # Each block is freed as soon as its sum is taken.
                self._add(key, blocks.pop(key).weighted_sum(factors[key[0]], excluded))
        return norms

    def _norms(
        self, calls: Calls, batch_size: int, groups: Groups
    ) -> tuple[NamedTensors, dict[tuple[str, bool], AnyBlock], bool]:
        """Return norms `[N]` by layer, the blocks to sum, and whether all norms are finite."""
        results: dict[str, LayerNorms] = {}
        cache = InputCache()
        with defer_flags() as flags:
            for layer in self._layers:
                name = layer.name
                if name not in calls:
                    continue
                block = joined_calls(layer, calls.pop(name), batch_size)
                block = block.merge_rows(groups.count, groups.size)
                method = self._clip.methods.get(name)
                entry = self._metric.get(name)
                results[name] = per_example_norms(block, entry, method, cache)
                del block
        if not results:
            raise ValueError("no layer of the model was called by loss_fn")
        norms, all_finite = _resolve_flags(results, flags)
        blocks = {(name, x.whitened): x.block for name, x in results.items()}
        return norms, blocks, all_finite

    def _factors(self, layer_norms: Mapping[str, Tensor], norms: Tensor) -> NamedTensors:
        """Return clip factors `[N]` of each layer, zero where the whole gradient is not finite."""
        clip = self._clip
        if clip.clipping != "per_layer":
            factors = clip_factors(norms, clip.max_grad_norm, clip.clipping, clip.automatic_gamma)
            return dict.fromkeys(layer_norms, factors)
        layer_bound = clip.max_grad_norm / math.sqrt(len(self._layers))
        finite = torch.isfinite(norms)
        return {name: clip_factors(x, layer_bound) * finite for name, x in layer_norms.items()}

    def _add(self, key: tuple[str, bool], value: Any) -> None:
        total = self._sums.get(key)
        if total is None:
            self._sums[key] = value
        elif isinstance(total, dict):
            self._sums[key] = {role: total[role] + value[role] for role in total}
        else:
            total += value

    @full_precision()
    def result(self) -> NamedTensors:
        """Return the whitened clipped sum, zeros where no gradient came.

        Returns:
            Parameter name to a tensor of the parameter's shape. Along a basis it is the stacked sum
            of scaled embeddings (under their own name) and residuals.
        """
        sums: NamedTensors = {}
        for layer in self._layers:
            total = self._layer_sum(layer)
            if total is not None:
                sums.update(split_sum(layer, total))
                continue
            for role, name in layer.parameters.items():
                p = layer.tensor(role)
                zeros = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                sums[name] = raise_precision(zeros)
        # In one order, whether or not a layer was called: processes add their sums entry by entry.
        names = [name for layer in self._layers for name in layer.parameters.values()]
        ordered = {name: sums[name] for name in names}
        if self._split is None:
            return ordered
        return self._split.result(ordered, self._layers)

    def _layer_sum(self, layer: Layer) -> Any:
        """Return the whitened sum of a layer, None where no gradient came."""
        entry = self._metric.get(layer.name)
        whitened = self._sums.get((layer.name, True))
        plain = self._sums.get((layer.name, False))
        if plain is None:
            return whitened
        if isinstance(plain, dict):
            return plain if entry is None else entry.apply_roles(plain)
        if entry is not None and not entry.is_identity:
            plain = map_groups(layer, plain, entry.apply)
        return plain if whitened is None else plain + whitened


def _resolve_flags(
    results: Mapping[str, LayerNorms], flags: Sequence[Tensor]
) -> tuple[NamedTensors, bool]:
    """Return norms `[N]` in float64 by layer, and whether all are known to be finite.

    The host usually waits for a GPU once.
    """
    norms = {name: x.norms.double() for name, x in results.items()}
    are_finite = [x.isfinite().all() for x in norms.values()]
    *unsure, all_finite = read_flags([*flags, torch.stack(are_finite).all()])
    if not any(unsure):
        return norms, all_finite
    for name, x in results.items():
        if x.recompute is not None:
            norms[name] = x.recompute().double()
    return norms, False


# --------------------------------------------------------------------------------------------------
# Matrices of layers: weight and bias in the form of the clipped sum.


def map_groups(layer: Layer, matrix: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of `[..., d_out, d_in]` to a layer's matrix.

    An embedding's matrix is transposed, and groups of a convolution are apart.
    """
    if layer.rule == "embedding":
        return work(matrix.T).T
    by_group = matrix.view(layer.groups, -1, matrix.shape[-1])
    return work(by_group).reshape(matrix.shape)


def matrix_of(layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's weight and bias as the matrix that `split_sum` cuts, the bias last."""
    columns = []
    if "weight" in layer.parameters:
        weight = tensors[layer.parameters["weight"]]
        columns.append(weight.T if layer.transposed else weight.flatten(1))
    if "bias" in layer.parameters:
        columns.append(tensors[layer.parameters["bias"]].unsqueeze(1))
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]


def split_sum(layer: Layer, value: Tensor | NamedTensors) -> Mapping[str, Tensor]:
    """Cut a layer's sum, for example a matrix `[d_out, d_in (+1)]`, into tensors by parameter."""
    if isinstance(value, dict):
        return {layer.parameters[role]: tensor for role, tensor in value.items()}
    result: NamedTensors = {}
    if "weight" in layer.parameters:
        shape = layer.tensor("weight").shape
        columns = value[:, :-1] if "bias" in layer.parameters else value
        columns = columns.T if layer.transposed else columns
        result[layer.parameters["weight"]] = columns.reshape(shape)
    if "bias" in layer.parameters:
        result[layer.parameters["bias"]] = value[:, -1].contiguous()
    return result


def diagonal_metric(layers: Sequence[Layer], scales: Mapping[str, Tensor]) -> Metric:
    """Return the map `z = scale ⊙ g`.

    Args:
        layers: of the model.
        scales: parameter name to positive factors of its shape. The groups of a convolution share
            the mean of theirs.

    Returns:
        One entry a layer: without rotations for matrix-shaped layers (the bias is the last column),
        by role for others.
    """
    return {layer.name: _diagonal_entry(layer, scales) for layer in layers}


def _diagonal_entry(layer: Layer, scales: Mapping[str, Tensor]) -> Entry:
    if layer.rule not in MATRICES:
        return Elementwise({role: scales[full] for role, full in layer.parameters.items()})
    matrix = matrix_of(layer, scales)
    if layer.rule == "embedding":
        return Eigenbasis(matrix.T.contiguous())
    by_group = matrix.view(layer.groups, -1, matrix.shape[-1])
    return Eigenbasis(by_group.mean(0))
