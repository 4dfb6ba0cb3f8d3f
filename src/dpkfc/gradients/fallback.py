"""Per-example gradients of a module without a rule: the module is run again on each example alone.

`torch.func.vmap` over a vector-Jacobian product of the one module, with the output gradients that the single backward pass has
already produced; a plain loop over the examples where the module cannot be vectorised. The tracker has shown where every
input and output has the batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkfc.fsdp import in_graph
from dpkfc.gradients.calls import Call, Calls
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.blocks import Formed, PerExample
from dpkfc.memory import is_out_of_memory
from dpkfc.tracking.axes import BatchAxis

_log = logging.getLogger(__name__)
_CHUNK_ELEMENTS = 1 << 24  # per-example gradient elements held at once
_looped: WeakSet[nn.Module] = WeakSet()  # modules that cannot be vectorised


def fallback_gradients(layer: Layer, call: Call, batch_size: int) -> dict[str, Tensor]:
    """Return gradients of each example's loss with respect to the parameters a module answers for.

    Args:
        layer: names the parameters.
        call: one call of the module, with the batch axes of its inputs and outputs.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.
    """
    dtypes = [p.dtype for role in layer.parameters if (p := call.module.get_parameter(role)).is_floating_point()]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)  # inputs may come from an autocast region
    leaves, spec = tree_flatten((call.args, call.kwargs))
    axes = iter(call.axes)
    shared, split = list[Any](), dict[int, Tensor]()
    for place, leaf in enumerate(leaves):
        axis = next(axes) if isinstance(leaf, Tensor) else None
        shared.append(_at_least(leaf, widest))
        if axis is not None:
            split[place] = _one_example_a_row(shared[-1], axis, batch_size)
    outputs = zip(call.outputs, call.output_axes, strict=True)
    used = [i for i, (g, axis) in enumerate(outputs) if g is not None and axis is not None]
    gradients = []
    for i in used:
        gradient, axis = call.outputs[i], call.output_axes[i]
        assert gradient is not None and axis is not None
        gradients.append(_at_least(_one_example_a_row(gradient, axis, batch_size), widest))
    repeated = _Repeated(layer, call.module, shared, spec, list(split), used)
    with torch.enable_grad(), _attributes_restored(call.module):
        found = repeated.run(list(split.values()), gradients, batch_size)
    wide = (torch.float32, torch.float64)
    return {role: g if g.dtype in wide else g.float() for role, g in found.items()}


def _one_example_a_row(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`: in every row what a batch of that one example holds, with the batch dimension kept."""
    rows = x.unflatten(axis.dim, (axis.pre, size, axis.post)).movedim(axis.dim + 1, 0)
    return rows.flatten(axis.dim + 1, axis.dim + 2)


def _at_least(x: Any, dtype: torch.dtype) -> Any:
    narrow = isinstance(x, Tensor) and x.is_floating_point() and torch.finfo(x.dtype).bits < torch.finfo(dtype).bits
    return x.to(dtype) if narrow else x


class _Repeated:
    """One call of a module, to be made again for each example.

    Args:
        layer: names the parameters.
        module: the module.
        leaves: its flattened arguments.
        spec: how they are put together.
        places: which of them have the batch.
        used: which of its tensor outputs have a gradient.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, leaves: list[Any], spec: Any, places: list[int], used: list[int]
    ) -> None:
        self.layer = layer
        self.module = module
        self.leaves = leaves
        self.spec = spec
        self.places = places
        self.used = used

    def run(self, rows: list[Tensor], gradients: list[Tensor], size: int) -> dict[str, Tensor]:
        """Return role to gradients of every example, vectorised where that is possible."""
        parameters = {role: self.module.get_parameter(role).detach() for role in self.layer.parameters}
        if self.module not in _looped:
            try:
                return self._vectorised(parameters, rows, gradients)
            except Exception as error:  # noqa: BLE001 - no batching rule, data-dependent control flow, ...
                if is_out_of_memory(error):
                    raise
                _looped.add(self.module)
                _log.warning(
                    "module '%s' (%s) cannot be vectorised over examples (%s); its gradients are taken one example at a time",
                    self.layer.display_name,
                    type(self.module).__name__,
                    type(error).__name__,  # its text may hold values of private examples
                )
        each = [self._gradient(parameters, [x[i] for x in rows], [g[i] for g in gradients]) for i in range(size)]
        return {role: torch.stack([one[role] for one in each]) for role in parameters}

    def _outputs(self, parameters: dict[str, Tensor], rows: list[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, x in zip(self.places, rows, strict=True):
            leaves[place] = x
        args, kwargs = tree_unflatten(leaves, self.spec)
        output = functional_call(self.module, parameters, args, kwargs)
        tensors = [y for y in tree_flatten(output)[0] if isinstance(y, Tensor)]
        return [tensors[i] for i in self.used]

    def _gradient(
        self, parameters: dict[str, Tensor], rows: list[Tensor], gradients: list[Tensor]
    ) -> dict[str, Tensor]:
        own = {role: p.clone().requires_grad_() for role, p in parameters.items()}
        outputs = self._outputs(own, rows)
        pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        if not pairs:
            return {role: torch.zeros_like(p) for role, p in parameters.items()}
        ys, gs = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, list(own.values()), gs, allow_unused=True)
        return {role: _dense(parameters[role], g) for role, g in zip(own, found, strict=True)}

    def _vectorised(
        self, parameters: dict[str, Tensor], rows: list[Tensor], gradients: list[Tensor]
    ) -> dict[str, Tensor]:
        def one(split: list[Tensor], own_gradients: list[Tensor]) -> dict[str, Tensor]:
            ys, pull = vjp(lambda own: self._outputs(own, split), parameters)[:2]
            return pull([g.to(y.dtype) for g, y in zip(own_gradients, ys, strict=True)])[0]

        elements = sum(math.prod(p.shape) for p in parameters.values())
        run = vmap(one, chunk_size=max(1, _CHUNK_ELEMENTS // max(1, elements)))
        with sdpa_kernel([SDPBackend.MATH]):  # the fused kernels have no batching rule
            result = run(rows, gradients)
        return {role: g.detach() for role, g in result.items()}


def _dense(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a gradient as a tensor of all values, also of `nn.EmbeddingBag(sparse=True)`."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore tensors that a forward pass keeps on its modules (weights computed by a hook, caches)."""
    before = [(m, _tensors(m)) for m in module.modules()]
    try:
        yield
    finally:
        for m, tensors in before:
            for name in _tensors(m).keys() - tensors.keys():
                vars(m).pop(name)
            vars(m).update(tensors)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in vars(module).items() if isinstance(x, Tensor)}


# --------------------------------------------------------------------------------------------------
# Gradients of examples that were computed by autograd, in the form in which layers are clipped and
# summed.

MATRICES = ("linear", "conv", "embedding", "tied")
"""Rules of layers whose weight and bias are one matrix."""


def block_of_gradients(layer: Layer, gradients: Mapping[str, Tensor]) -> Formed | PerExample:
    """Return per-example gradients of a layer's parameters as a block.

    Args:
        layer: the layer.
        gradients: role to gradients `[N, *parameter.shape]`; a role that is absent has none.

    Returns:
        For a matrix-shaped layer `[N * groups, d_out, d_in]` with the bias as last column (an embedding: `[N, rows, d]`), for
        another layer the gradients by role. Both in float32, or in float64 where they are.
    """
    like = next(iter(gradients.values()))
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    full = {
        role: gradients[role].to(dtype)
        if role in gradients
        else like.new_zeros(len(like), *layer.tensor(role).shape, dtype=dtype)
        for role in layer.parameters
    }
    if layer.rule not in MATRICES:
        return PerExample(full)
    columns = []
    if "weight" in full:
        weight = full["weight"]
        columns.append(weight.mT if layer.transposed else weight.flatten(2))
    if "bias" in full:
        columns.append(full["bias"].unsqueeze(2))
    matrix = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
    groups = int(getattr(layer.module, "groups", 1))
    rows = matrix.reshape(len(like) * groups, -1, matrix.shape[-1])
    return Formed(rows, groups, crosswise=layer.rule == "embedding")


def gradient_of(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """Return parameter name to gradient of a number, dense; parameters that it does not depend on are absent."""
    parameters = {name: in_graph(p) for name, p in model.named_parameters() if p.requires_grad}
    with torch.autocast(total.device.type, enabled=False):
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}


def blocks_of_one(layers: Sequence[Layer], gradient: Mapping[str, Tensor]) -> Calls:
    """Return the gradient of one example or privacy unit as the blocks of its layers.

    Args:
        layers: of the model.
        gradient: parameter name to gradient.
    """
    calls: Calls = {}
    for layer in layers:
        own = {role: gradient[full].unsqueeze(0) for role, full in layer.parameters.items() if full in gradient}
        if own:
            calls[layer.name] = [block_of_gradients(layer, own)]
    return calls
