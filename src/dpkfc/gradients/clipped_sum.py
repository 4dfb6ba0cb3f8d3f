"""The clipped sum of one logical batch: clip factors, sums, and the passes that give gradients.

An example has one factor, over the norm of all its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from dpkfc._checks import check_positive
from dpkfc.clipping import SPLIT, contribution_bound
from dpkfc.distributed.context import widest_dtype
from dpkfc.distributed.fsdp import to_local, trainable_tensors
from dpkfc.gradients.fallback import blocks_of_one, gradient_of, matrices_of
from dpkfc.gradients.internals import has_batch_in_place
from dpkfc.gradients.layers import MATRICES, Call, Calls, Layer, device_of_layers, named_tensors
from dpkfc.gradients.rules import blocks_of, joined_calls, settled
from dpkfc.gradients.state import (
    Augmentation,
    StateChangedError,
    augmented,
    check_finite,
    own_pass,
    own_variables,
    paths_of,
)
from dpkfc.gradients.tape import Tape, check_losses
from dpkfc.linalg.blocks import Block, raise_precision
from dpkfc.linalg.deferred_flags import defer_flags
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.magnitudes import product_error
from dpkfc.linalg.metric import (
    EMBEDDING,
    Metric,
    NamedTensors,
    Span,
    Subspace,
)
from dpkfc.linalg.norm_bounds import LayerNorms
from dpkfc.linalg.norms import per_example_norms
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import randomize_generators, restarter
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import Tracker

LossFn = Callable[[nn.Module, Any], Tensor]
"""Maps the model and a batch to one loss a row `[n]`."""
_LEAST = torch.finfo(torch.float32).tiny  # smallest factor in full precision


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
        ValueError: C or γ not positive and finite, or a clipping with more than one factor.
    """
    # A basis brings norms of its own, which no setting has checked.
    if not 0 < max_grad_norm < math.inf:
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}")
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
        check_positive("automatic_gamma", automatic_gamma)
        factors = max_grad_norm / (norms + automatic_gamma)
    elif clipping in ("flat", "normalised"):
        factors = (max_grad_norm / norms).clamp(max=1.0)
    else:
        raise ValueError(f"clipping={clipping!r} has no rule for its factors")
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


def subspace_clipper_of(metric: Metric, clipping: str) -> SubspaceClipper | None:
    """Return the clipper of gradients along the basis of a metric, None for one without a basis.

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
    return SubspaceClipper(metric)


class SubspaceClipper:
    """The two clips and sums, of embedding and residual, of ONE logical batch.

    Args:
        basis: along which gradients are split.
    """

    def __init__(self, basis: Subspace) -> None:
        self._basis = basis
        # The clipped, scaled sum of w `[K]`.
        self._embedding: Tensor | float = 0.0
        # The sum of w with the factors of the residual `[K]`.
        self._removed: Tensor | float = 0.0

    def clip_and_add(
        self, results: Mapping[str, LayerNorms], layer_norms: NamedTensors, norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Clip and add the embeddings of one micro-batch; return the factors of its gradients.

        Args:
            results: layer name to the block that its clipped sum will be taken of.
            layer_norms: upper bounds of the norms of each layer's gradient `[N]`.
            norms: of the whole gradient.

        Returns:
            First the larger of ‖w‖ / S₁ and ‖r‖ / S₂ `[N]`, NaN where a gradient is not finite.
            Then the factors of the gradients `[N]`, zero where the residual is dropped.
        """
        basis = self._basis
        norms = norms.double()
        w = norms.new_zeros(len(norms), basis.width)
        error = 8 * torch.finfo(torch.float64).eps * norms
        for name, result in results.items():
            span = basis.spans.get(name)
            if span is not None:
                block: Any = result.block
                w[:, span.columns] += block.inner_products(span)
                gain = 1 + basis.defect
                error = error + product_error(block, span, layer_norms[name], gain)
        wrong = ~(norms.isfinite() & w.isfinite().all(1))
        w = w.masked_fill(wrong.unsqueeze(1), 0.0)
        norms = norms.masked_fill(wrong, math.nan)
        w_norms = w.norm(dim=1) + 0 * norms
        factors = clip_factors(w_norms, basis.embedding_norm)
        factors = factors * basis.embedding_scale
        self._embedding = self._embedding + factors @ w
        relative = w_norms / basis.embedding_norm
        if basis.residual_norm is None:
            return relative, torch.zeros_like(relative)
        removed = (1 - basis.defect) * w_norms.square()
        slack = 2 * w_norms * error
        squares = norms.square() - removed + slack
        residuals = squares.clamp(min=0).sqrt()
        factors = clip_factors(residuals, basis.residual_norm)
        factors = factors * basis.residual_scale
        self._removed = self._removed + factors @ w
        return torch.maximum(relative, residuals / basis.residual_norm), factors

    @property
    def keeps_residual(self) -> bool:
        """Return whether gradients are summed at all."""
        return self._basis.residual_norm is not None

    def result(self, sums: NamedTensors, layers: Sequence[Layer]) -> NamedTensors:
        """Return the stacked clipped sum: the embedding under its own name, and the residuals.

        Args:
            sums: parameter name to the sum of gradients with the factors of `clip_and_add`.
            layers: of the model.
        """
        like = next(iter(sums.values()))
        zeros = like.new_zeros(self._basis.width, dtype=torch.float64)
        embedding = zeros + self._embedding
        stacked = {EMBEDDING: embedding.to(widest_dtype(sums))}
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
    losses carry weights. Any rows after the first `count · size` are padding. The groups of a
    convolution, `Layer.groups`, are something else.

    Attributes:
        count: number of groups U.
        size: rows of each group k.
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

    Raises:
        ValueError: as `contribution_bound`.
    """

    max_grad_norm: float
    clipping: str = "flat"
    automatic_gamma: float = 0.01
    methods: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        contribution_bound(self.clipping, self.max_grad_norm)


# The operations of torch that have a switch of their own.
_OPERATIONS: list[Any] = [torch.backends.cuda.matmul]
for _backend in (torch.backends.cudnn, torch.backends.mkldnn):
    _OPERATIONS += [getattr(_backend, name, None) for name in ("matmul", "conv", "rnn")]
_OPERATIONS = [operation for operation in _OPERATIONS if hasattr(operation, "fp32_precision")]


@contextmanager
def full_precision() -> Iterator[None]:
    """Take norms and sums in the precision that their bounds assume.

    The body runs without autocast, TF32 and bfloat16 inside float32. Whatever was set through
    torch's older switches (`allow_tf32`, `set_float32_matmul_precision`) or its newer ones
    (`fp32_precision`), on the CPU too, is restored afterwards.
    """
    cudnn: Any = torch.backends.cudnn
    with (
        ExitStack() as undo,
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        for operation in _OPERATIONS:
            undo.callback(_restore_precision, operation, operation.fp32_precision)
        # Torch can read an older switch only where no newer one differs from it.
        with suppress(RuntimeError):
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            cudnn.allow_tf32 = False
        for operation in _OPERATIONS:
            operation.fp32_precision = "ieee"
        yield


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
        self._subspace_clipper = subspace_clipper_of(metric, clip.clipping)
        # Keys: (layer, whether the sum is whitened already).
        self._sums: dict[tuple[str, bool], Any] = {}

    @full_precision()
    def add(self, calls: Calls, batch_size: int, groups: Groups | None = None) -> Tensor:
        """Clip and add one micro-batch; the recorded calls are consumed.

        Args:
            calls: from `Tape.backward` or `Tape.gradients`, or blocks of `blocks_of_one`.
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
        results, layer_norms, all_finite = self._norms(calls, batch_size, groups)
        squares = [x.square() for x in layer_norms.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        if self._subspace_clipper is None:
            factors = self._factors(layer_norms, norms)
        else:
            norms, factor = self._subspace_clipper.clip_and_add(results, layer_norms, norms)
            factors = dict.fromkeys(layer_norms, factor)
            all_finite = False
        excluded = None
        if not all_finite:
            wrong = ~norms.isfinite()
            if wrong.any():
                excluded = wrong
        if self._subspace_clipper is None or self._subspace_clipper.keeps_residual:
            for name in list(results):
                # Each block is freed before the sum of the next one is taken.
                result = results.pop(name)
                value = result.block.weighted_sum(factors[name], excluded)
                self._add((name, result.whitened), value)
        return norms

    def _norms(
        self, calls: Calls, batch_size: int, groups: Groups
    ) -> tuple[dict[str, LayerNorms], NamedTensors, bool]:
        """Return the blocks to sum and norms `[N]` by layer, and whether all norms are finite."""
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
        return results, norms, all_finite

    def _factors(self, layer_norms: NamedTensors, norms: Tensor) -> NamedTensors:
        """Return clip factors `[N]` of each layer, zero where the whole gradient is not finite."""
        clip = self._clip
        bound = clip.max_grad_norm
        if clip.clipping != "per_layer":
            common = clip_factors(norms, bound, clip.clipping, clip.automatic_gamma)
            return dict.fromkeys(layer_norms, common)
        bound = bound / math.sqrt(len(self._layers))
        is_finite = norms.isfinite()
        return {name: clip_factors(x, bound) * is_finite for name, x in layer_norms.items()}

    def _add(self, key: tuple[str, bool], value: Any) -> None:
        total = self._sums.get(key)
        if total is None:
            self._sums[key] = value
        elif isinstance(total, dict):
            add_gradients(total, value)
        else:
            total += value

    @full_precision()
    def result(self) -> NamedTensors:
        """Return the whitened clipped sum, zeros where no gradient came.

        Returns:
            Parameter name to a tensor of the parameter's shape. Along a basis it is the stacked sum
            of scaled embeddings (under their own name) and residuals.
        """
        # In one order, whether or not a layer was called: processes add their sums entry by entry.
        sums: NamedTensors = {}
        for layer in self._layers:
            total = self._layer_sum(layer)
            parts: NamedTensors = {}
            if total is None:
                for role, name in layer.parameters.items():
                    p = layer.tensor(role)
                    zeros = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                    parts[name] = raise_precision(zeros)
            else:
                parts = split_sum(layer, total)
            for name in layer.parameters.values():
                sums[name] = parts[name]
        if self._subspace_clipper is None:
            return sums
        return self._subspace_clipper.result(sums, self._layers)

    def _layer_sum(self, layer: Layer) -> Any:
        """Return the whitened sum of a layer, None where no gradient came."""
        entry = self._metric.get(layer.name)
        whitened = self._sums.get((layer.name, True))
        plain = self._sums.get((layer.name, False))
        if plain is None:
            return whitened
        if isinstance(plain, dict):
            if entry is None:
                return plain
            return entry.apply_roles(plain)
        if entry is not None and not entry.is_identity:
            plain = map_groups(layer, plain, entry.apply)
        if whitened is None:
            return plain
        return plain + whitened


def _resolve_flags(
    results: Mapping[str, LayerNorms], flags: Sequence[Tensor]
) -> tuple[NamedTensors, bool]:
    """Return norms `[N]` in float64 by layer, and whether all are known to be finite.

    The host usually waits for a GPU once.
    """
    norms = {name: x.norms.double() for name, x in results.items()}
    finite = [x.isfinite().all() for x in norms.values()]
    all_flags = [*flags, torch.stack(finite).all()]
    *unsure, all_finite = torch.stack(all_flags).tolist()
    if not any(unsure):
        return norms, all_finite
    for name, x in results.items():
        if x.recompute is not None:
            norms[name] = x.recompute().double()
    return norms, False


# --------------------------------------------------------------------------------------------------
# Matrices of layers: weight and bias in the form of the clipped sum.


def map_groups(layer: Layer, matrix: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `work` to the `[d_out, d_in]` matrix of each group of a layer.

    `work` gets all of them at once, `[..., d_out, d_in]`. An embedding has one, the transpose of
    `matrix`. The results are stacked in the shape of `matrix`.
    """
    if layer.rule == "embedding":
        return work(matrix.T).T
    by_group = matrix.view(layer.groups, -1, matrix.shape[-1])
    return work(by_group).reshape(matrix.shape)


def matrix_of(layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's weight and bias as the matrix that `split_sum` cuts, the bias last."""
    rows = {role: tensors[name].unsqueeze(0) for role, name in layer.parameters.items()}
    return matrices_of(layer, rows)[0]


def split_sum(layer: Layer, value: Tensor | NamedTensors) -> NamedTensors:
    """Cut a layer's sum, for example a matrix `[d_out, d_in (+1)]`, into tensors by parameter."""
    names = layer.parameters
    if isinstance(value, dict):
        return {names[role]: tensor for role, tensor in value.items()}
    result: NamedTensors = {}
    columns = value
    if "bias" in names:
        columns = value[:, :-1]
    if "weight" in names:
        if layer.transposed:
            columns = columns.T
        shape = layer.tensor("weight").shape
        result[names["weight"]] = columns.reshape(shape)
    if "bias" in names:
        result[names["bias"]] = value[:, -1].contiguous()
    return result


# --------------------------------------------------------------------------------------------------
# The gradient of an example by definition: plain autograd on a micro-batch of that example alone.
#
# Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same
# result.


def example_gradient(model: nn.Module, loss_fn: LossFn, batch: Any, weight: float) -> NamedTensors:
    """Return the gradient of the loss of one example.

    Args:
        model: in the mode in which it is trained.
        loss_fn: maps model and batch to losses `[1]`.
        batch: a batch of one example.
        weight: a factor of the loss.

    Returns:
        Parameter name to gradient, dense. Parameters that the loss does not use are absent.

    Raises:
        ValueError: losses of another shape; as `losses_of`.
    """
    losses = losses_of(loss_fn, model, batch)
    check_losses(losses, 1)
    return gradient_of(model, losses.sum() * weight)


def add_gradients(total: NamedTensors, gradients: NamedTensors) -> None:
    """Add gradients to the sums of others, in place."""
    for name, gradient in gradients.items():
        if name in total:
            total[name] = total[name] + gradient
        else:
            total[name] = gradient


# --------------------------------------------------------------------------------------------------
# The contribution of every layer to a loss, as curvature reads it.

_BY_INPUT = ("linear", "conv", "embedding")  # blocks that show inputs


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    For public probes: where the place of the examples is not proved, the leading axis is used.

    Under `torch.no_grad()` there is no backward pass. Linear layers, convolutions and embeddings
    then show their inputs, with zeros for output gradients. Other layers are left out.

    Args:
        model: the model. Its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.

    Returns:
        Layer name to block, formed on access. `Patched.explicit` writes out the patches of
        a convolution. `b` holds gradients of the summed losses: row n belongs to example n, not
        divided by N.

    Raises:
        ValueError: as `Tape.backward`.
    """
    is_differentiated = torch.is_grad_enabled()
    recorded = layers
    if not is_differentiated:
        recorded = [layer for layer in layers if layer.rule in _BY_INPUT]
    tape = Tape(model, recorded, lenient=True)
    with tape:
        losses = loss(model)
    tape.check_enabled()
    check_losses(losses)
    # A loss may stand for several rows, but never for a part of one.
    if tape.size % max(1, len(losses)):
        check_losses(losses, tape.size)
    calls = tape.backward(losses) if is_differentiated else tape.inputs()
    return _Contributions(layers, calls, losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is read, without the patches of a convolution."""

    def __init__(self, layers: Sequence[Layer], calls: Calls, batch_size: int) -> None:
        self._layers = {}
        for layer in layers:
            if _has_rows(layer, calls.get(layer.name), batch_size):
                self._layers[layer.name] = layer
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block: Any = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        factors: Block = block.make_factor_block()
        return factors

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _has_rows(layer: Layer, calls: Sequence[Any] | None, batch_size: int) -> bool:
    """Return whether a layer was called, and every call shows which rows belong to which example.

    A matrix that is used outside of its layer too has no rows from which a factor could be made.
    """
    if calls is None:
        return False
    is_recorded = all(isinstance(call, Call) for call in calls)
    if layer.rule in MATRICES:
        return is_recorded
    if layer.rule != "recurrent":
        return True
    return is_recorded and all(has_batch_in_place(call, batch_size) for call in calls)


# --------------------------------------------------------------------------------------------------


def unknown_row(model: nn.Module, error: BaseException) -> str | None:
    """Return a message on the embedding that was asked for a row that it does not have.

    The offending id is private data and is not repeated.

    Args:
        model: whose modules are named.
        error: an IndexError. Its traceback holds the module that was running.

    Returns:
        None where no embedding raised the error.
    """
    embedding: nn.Embedding | None = None
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Embedding):
            embedding = module
    if embedding is None:
        return None
    name = paths_of(model).get(embedding, type(embedding).__name__)
    last = embedding.num_embeddings - 1
    return (
        f"embedding '{name}' has {embedding.num_embeddings} rows, and the batch holds an id "
        f"outside 0 … {last}. For token ids compare len(tokenizer) with num_embeddings "
        "(resize_token_embeddings before the optimizer and the session are created); for position "
        "ids shorten the sequences"
    )


# --------------------------------------------------------------------------------------------------
# The passes of one logical batch.
#
# No value of a pass outlives it: the sum is built in local values. An exception in the middle of a
# pass leaves no private tensor behind, and the whole batch can be computed again.


class Rows(Protocol):
    """The rows of a micro-batch, their groups and their weights; see `data.loading.Part`."""

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def weights(self) -> NDArray[np.float64] | None: ...  # noqa: D102
    @property
    def units(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class EvaluationPoint:
    """A point where gradients are taken.

    Attributes:
        parameters: values of the parameters, None for the model's own.
        weight: a factor of the losses.
    """

    parameters: Mapping[str, Tensor] | None = None
    weight: float = 1.0


AT_MODEL_PARAMETERS = EvaluationPoint()


@contextmanager
def swap_parameters(
    layers: Sequence[Layer], parameters: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """Run the body with other values of the parameters, and restore their own to the bit."""
    if parameters is None:
        yield
        return
    tensors = named_tensors(layers)
    before = {name: p.detach().clone() for name, p in tensors.items()}
    try:
        _write(tensors, parameters)
        yield
    finally:
        _write(tensors, before)


def _write(parameters: NamedTensors, values: Mapping[str, Tensor]) -> None:
    # Autocast may have cached casts of the old values.
    torch.clear_autocast_cache()
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(values[name])


@dataclass
class GradientMode:
    """The way in which a run computes the gradients of its examples, and why.

    Attributes:
        unproved_operation: why examples are computed one at a time, None where whole micro-batches
            are proved. Public: found on public rows.
        is_checked: the loss has accepted public rows. Then a private record that cannot be read, or
            on which user code raises an exception of any type, adds nothing, as one with a NaN, and
            does not end the run. Memory that runs out does, and a pass that changes the weights.
        failed_rows: private rows that added nothing for this reason. PRIVATE.
        unproved_on_private_rows: the first operation that the tracker could not follow on private
            rows, though it could on public rows. PRIVATE: control flow may have led there.
        graph: captures passes as graphs; None captures nothing.
        graph_error: what the last replay of a graph has raised. PRIVATE.
    """

    unproved_operation: Unknown | None = None
    is_checked: bool = False
    failed_rows: int = 0
    unproved_on_private_rows: Unknown | None = None
    graph: Captured | None = None
    graph_error: Exception | None = None


class Captured(Protocol):
    """Captures passes as graphs; see `dpkfc.graph.passes`."""

    refusal: Unknown | None
    """Why no further pass is captured, None at the beginning."""

    def calls(
        self,
        loss_fn: LossFn,
        augment: Augmentation | None,
        batch: Any,
        size: int,
        weigh: Callable[[Tensor], Tensor],
        *,
        copies: bool,
    ) -> Calls | None:
        """Return the blocks of all layers, or None where the pass is not captured or proved."""
        ...


def clipped_sum(
    model: nn.Module,
    layers: Sequence[Layer],
    metric: Metric,
    clip: Clip,
    *,
    loss_fn: LossFn,
    micro_batches: Iterable[tuple[Any, Rows]],
    one_record: Callable[[int], Any] | None = None,
    mode: GradientMode | None = None,
    points: Sequence[EvaluationPoint] = (AT_MODEL_PARAMETERS,),
    augment: Augmentation | None = None,
    num_summed: float = math.inf,
    repeatable: bool = False,
) -> tuple[NamedTensors, Tensor]:
    """Return the clipped sum of one logical batch; PRIVATE until noise has been added.

    The gradient of an example is computed as in a micro-batch of its own. A whole micro-batch is
    differentiated at once where the tracker proves that this gives the same. Otherwise its examples
    are differentiated one at a time.

    Args:
        model: what is differentiated.
        layers: from `find_layers`.
        metric: the coordinates in which units are clipped and summed.
        clip: clipping rule, its norm C, and the norm method of each layer.
        loss_fn: maps model and micro-batch to one loss a row `[n]`.
        micro_batches: batches with their rows, in any order; none for an empty logical batch. An
            exception in place of a batch says that it could not be read.
        one_record: number of a record to a batch of that record alone. None where every micro-batch
            is proved or has one row.
        mode: the way that was found on public rows. What private rows needed is noted in it.
        points: where each example's gradient is taken. The weighted sum over all points is clipped
            as ONE gradient, and every point sees the same random numbers (dropout).
        augment: maps a batch to one with as many rows, each changed at random on its own.
        num_summed: only the first `num_summed` micro-batches enter the sum. The rest only run, so
            that all ranks of a sharded model make equally many passes.
        repeatable: dropout and `augment` take the numbers of the global generators as they stand,
            which a seed makes known. TEST MODE, NOT PRIVATE. Otherwise the numbers come from the
            operating system, and the generators are restored.

    Returns:
        (parameter name to whitened clipped sum in float32 or float64, norms of all units `[U]`).

    Raises:
        ValueError: losses of another shape than the rows; weights that are not finite.
    """
    check_finite(layers)
    # Weights cast for an earlier step would be stale under an autocast around the loop.
    torch.clear_autocast_cache()
    mode = mode or GradientMode()
    passes = _Passes(model, layers, loss_fn, points, augment, one_record, mode)
    summer = ClippedSummer(layers, metric, clip)
    norms: list[Tensor] = []
    with randomize_generators(repeatable):
        for i, (loaded, rows) in enumerate(micro_batches):
            is_summed = i < num_summed
            target = summer
            if not is_summed:
                target = ClippedSummer(layers, metric, clip)
            for calls, batch_size, groups in passes.contributions(loaded, rows):
                part = target.add(calls, batch_size, groups).detach()
                if is_summed:
                    norms.append(part)
    if not norms:
        return summer.result(), torch.zeros(0)
    same_type = [x.to(norms[-1]) for x in norms]
    return summer.result(), torch.cat(same_type)


@dataclass(frozen=True)
class _Passes:
    """The forward and backward passes over the micro-batches of one logical batch."""

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    points: Sequence[EvaluationPoint]
    augment: Augmentation | None
    one_record: Callable[[int], Any] | None
    mode: GradientMode

    def contributions(self, loaded: Any, rows: Rows) -> Iterator[tuple[Calls, int, Groups]]:
        """Yield calls or blocks, the number of their rows, and which rows are clipped together."""
        n = len(rows.records)
        is_tried = self.mode.unproved_operation is None or self._graph is not None
        if is_tried and n > 1:
            calls = None
            try:
                calls = self._together(_check_read(loaded), rows)
            except Exception as error:
                # One example may have caused it.
                if not self._may_go_on(error):
                    raise
            if calls is not None:
                yield calls, n, Groups(rows.units, rows.group)
                return
        for unit in range(rows.units):
            yield self._unit_alone(loaded, rows, unit), 1, Groups(1)

    def _together(self, loaded: Any, rows: Rows) -> Calls | None:
        """Return the calls of a whole micro-batch, or None where its examples cannot be proved.

        With several points, as the two of DiSK, their calls are joined: an example is clipped once.
        """
        n = len(rows.records)
        batch = move_batch(loaded, device_of_layers(self.layers))
        graph = self._graph
        if graph is not None:
            all_calls = self._captured(graph, batch, rows)
            if all_calls is not None:
                return all_calls
        if self.mode.unproved_operation is not None:
            return None
        batch, tracker = follow_augmentation(self.augment, self.model, batch, n)
        all_calls = {}
        for point, own_batch in self._points_and_batches(batch, tracker.following):
            with swap_parameters(self.layers, point.parameters), own_pass(self.model):
                calls = self._pass(own_batch, rows, point.weight, tracker)
                if calls is None:
                    return None
                if len(self.points) > 1 or point.parameters is not None:
                    # Whatever depends on the parameters is computed at this point.
                    calls = copy_inputs(self.layers, settled(self.layers, calls, n))
            # Pop each entry: the memory of a call is freed only when no dictionary holds it.
            for name in list(calls):
                all_calls.setdefault(name, []).extend(calls.pop(name))
        return all_calls

    @property
    def _graph(self) -> Captured | None:
        graph = self.mode.graph
        return None if graph is None or graph.refusal is not None else graph

    def _captured(self, graph: Captured, batch: Any, rows: Rows) -> Calls | None:
        """Return the blocks of a micro-batch from its graph, or None where it has none.

        Whatever a replay raises, another way decides what becomes of these rows.
        """
        n = len(rows.records)
        copies = len(self.points) > 1 or self.points[0].parameters is not None
        all_calls: Calls = {}
        try:
            for point, own_batch in self._points_and_batches(batch):
                weigh = partial(self._weigh, rows, point.weight)
                with swap_parameters(self.layers, point.parameters):
                    calls = graph.calls(
                        self.loss_fn, self.augment, own_batch, n, weigh, copies=copies
                    )
                if calls is None:
                    return None
                for name in list(calls):
                    all_calls.setdefault(name, []).extend(calls.pop(name))
        except Exception as error:
            if isinstance(error, StateChangedError) or is_out_of_memory(error):
                raise
            self.mode.graph_error = error
            return None
        return all_calls

    def _weigh(self, rows: Rows, factor: float, losses: Tensor) -> Tensor:
        """Return the number that is differentiated: each row's loss times its weight."""
        if rows.weights is not None:
            losses = losses * torch.from_numpy(rows.weights).to(losses)
        return losses.sum() * factor

    def _pass(self, batch: Any, rows: Rows, factor: float, tracker: Tracker) -> Calls | None:
        """Differentiate one micro-batch, each row's loss times its weight and a factor."""
        device = device_of_layers(self.layers)
        tape, losses = follow_pass(self.loss_fn, self.model, self.layers, batch, tracker)
        failure = tape.failure(losses)
        if failure is None and losses.grad_fn is None:
            # All examples of this micro-batch may have a constant loss.
            failure = Unknown("loss", "it depends on no trainable layer")
        if failure is not None:
            self.mode.unproved_on_private_rows = self.mode.unproved_on_private_rows or failure
            return None
        total = self._weigh(rows, factor, losses)
        with torch.autocast(device.type, enabled=False):
            return tape.gradients(total)

    def _unit_alone(self, loaded: Any, rows: Rows, unit: int) -> Calls:
        """Return the gradient of one privacy unit, each of its rows in a micro-batch of its own."""
        total: NamedTensors = {}
        first = unit * rows.group
        for row in range(first, first + rows.group):
            weight = 1.0
            if rows.weights is not None:
                weight = float(rows.weights[row])
            if weight == 0.0:
                continue
            if len(rows.records) > 1:
                self._check_separable()
            try:
                record = loaded
                if self.one_record is not None and len(rows.records) > 1:
                    record = self.one_record(int(rows.records[row]))
                self._add_row(_check_read(record), weight, total)
            except Exception as error:
                if not self._may_go_on(error):
                    raise
                self.mode.failed_rows += 1
                add_gradients(total, self._fill_gradients(math.nan))
        return blocks_of_one(self.layers, total or self._fill_gradients(0.0))

    def _fill_gradients(self, value: float) -> NamedTensors:
        """Return gradients of all parameters with one value in every entry."""
        tensors = named_tensors(self.layers)
        return {name: torch.full_like(p, value) for name, p in tensors.items()}

    def _add_row(self, record: Any, weight: float, total: NamedTensors) -> None:
        """Add the gradient of one row, at all points, to its privacy unit's."""
        batch = move_batch(record, device_of_layers(self.layers))
        batch = augmented(self.augment, self.model, batch, 1)
        for point, own_batch in self._points_and_batches(batch):
            with (
                swap_parameters(self.layers, point.parameters),
                own_pass(self.model),
                torch.enable_grad(),
            ):
                factor = weight * point.weight
                gradients = example_gradient(self.model, self.loss_fn, own_batch, factor)
                add_gradients(total, gradients)

    def _may_go_on(self, error: Exception) -> bool:
        """Return whether an error may come from a record, which then adds nothing."""
        is_ours = isinstance(error, StateChangedError) or is_out_of_memory(error)
        return self.mode.is_checked and not is_ours

    def _points_and_batches(
        self,
        batch: Any,
        follow: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[tuple[EvaluationPoint, Any]]:
        """Yield each point with a batch of its own, into which its pass may write.

        All points see the same random numbers.
        """
        restart = restarter(device_of_layers(self.layers))
        for point in self.points:
            restart()
            own_batch = batch
            if point is not self.points[-1]:
                with follow():
                    own_batch = tree_map(_copy_value, batch)
            yield point, own_batch

    def _check_separable(self) -> None:
        """Refuse a micro-batch that must be divided where no function reads one record."""
        if self.one_record is None:
            what = "the micro-batch"
            failure = self.mode.unproved_operation or self.mode.unproved_on_private_rows
            if failure is not None:
                what = failure.operation
            raise ValueError(
                f"{what} hides the batch axis, and clipped_sum was given no one_record to "
                "differentiate records alone"
            )


def _copy_value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return deepcopy(x)


def _check_read(loaded: Any) -> Any:
    """Return a batch, or raise the exception that stands in its place."""
    if isinstance(loaded, Exception):
        raise loaded
    return loaded


def batch_tracker(model: nn.Module, batch: Any, size: int) -> Tracker:
    """Return a tracker for a batch whose tensors have their examples in front."""
    tracker = Tracker(size, model.buffers())
    tracker.declare_earlier_batches()
    tracker.declare_batch(batch)
    tracker.declare_parameters(trainable_tensors(model).values())
    return tracker


def follow_augmentation(
    augment: Augmentation | None, model: nn.Module, batch: Any, size: int
) -> tuple[Any, Tracker]:
    """Return the batch as `augment` changes it, and the tracker that has followed the change."""
    tracker = batch_tracker(model, batch, size)
    if tracker.is_opaque:
        why = "it holds values that are not tensors, which no operation shows to be read"
        tracker.fail("batch", why, is_read=True)
    with tracker.following():
        batch = augmented(augment, model, batch, size)
    return batch, tracker


def follow_pass(
    loss_fn: LossFn, model: nn.Module, layers: Sequence[Layer], batch: Any, tracker: Tracker
) -> tuple[Tape, Tensor]:
    """Run a forward pass under a tracker.

    Args:
        loss_fn: maps model and batch to losses.
        model: the model.
        layers: whose calls the tape records.
        batch: the batch.
        tracker: on which the batch is declared.

    Returns:
        The tape of the pass and its losses `[n]`.

    Raises:
        ValueError: losses of another shape.
    """
    tracker.declare_persistent(model.buffers())
    tape = Tape(model, layers, tracker.size, tracker=tracker)
    with torch.enable_grad(), tape, tracker.following():
        losses = losses_of(loss_fn, model, batch)
    check_losses(losses, tracker.size)
    return tape, losses


def copy_inputs(layers: Sequence[Layer], calls: Calls) -> Calls:
    """Return the calls with copies of inputs that are parameters, whose values will change.

    A learnt query is such an input.
    """
    tensors = [to_local(p) for p in named_tensors(layers).values()]
    storages = {p.untyped_storage().data_ptr() for p in tensors} - {0}

    def copy(x: Tensor) -> Tensor:
        is_parameter = x.untyped_storage().data_ptr() in storages
        return x.clone() if is_parameter else x

    copies: Calls = {}
    for name, several in calls.items():
        copies[name] = []
        for call in several:
            copied = call
            if isinstance(call, Call):
                args, kwargs = tree_map_only(Tensor, copy, (call.args, call.kwargs))
                copied = replace(call, args=args, kwargs=kwargs)
            copies[name].append(copied)
    return copies


def losses_of(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    """Return the losses of a batch, with what loss_fn changes elsewhere undone.

    Raises:
        ValueError: a row outside of an embedding table, or a label out of the range of the loss.
    """
    try:
        with own_variables(loss_fn, model):
            return loss_fn(model, batch)
    except IndexError as error:
        message = unknown_row(model, error)
        texts = ("out of bounds", "out of range in self")
        if message is None and any(text in str(error) for text in texts):
            message = (
                "loss_fn failed on a batch: a label or token id is outside the range that the model"
                " was built for"
            )
        if message is None:
            raise  # a mistake of the function itself
        raise ValueError(message) from error


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    # The processor would read what an accelerator has not copied yet.
    move = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
    return tree_map_only(Tensor, move, batch)
