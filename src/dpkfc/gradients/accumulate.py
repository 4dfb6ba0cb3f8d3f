"""The clipped sum of a logical batch, micro-batch by micro-batch.

Norms are taken in the metric, each example is clipped once over all layers, unwhitened sums are accumulated, and every
layer's sum is whitened once at the end. Any split into micro-batches gives the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.calls import Calls
from dpkfc.gradients.clipping import clip_factors
from dpkfc.gradients.groups import Groups, grouped
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.norms import LayerNorms, per_example_norms
from dpkfc.gradients.put_off import answered, put_off
from dpkfc.gradients.reread import Reread
from dpkfc.gradients.rules import joined_calls
from dpkfc.gradients.subspace import split_for
from dpkfc.gradients.sums import weighted_sum
from dpkfc.metric import Elementwise, Entry, Metric

__all__ = ["Clip", "ClippedSummer", "MicroBatch", "matrix_of", "on_groups", "split_sum"]


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
