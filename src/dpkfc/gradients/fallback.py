"""Per-example gradients by `torch.func`: modules without a rule, and parametrized weights.

A module without a rule is run again on each example alone.

`torch.func.vmap` runs over a vector-Jacobian product of the one module, with the output gradients
that the single backward pass has already produced. A loop over the examples takes its place where
the module cannot be vectorised. The tracker has shown where every input and output has the batch.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_unflatten

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.layers import MATRICES, Call, Calls, Layer
from dpkfc.gradients.replica import replicate
from dpkfc.linalg.blocks import (
    ConvBlock,
    MaterializedGradients,
    Outer,
    PerExample,
    chunks,
    raise_precision,
)
from dpkfc.linalg.metric import NamedTensors
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import are_states_equal, random_states
from dpkfc.tracking.states import one_example_a_row

_log = logging.getLogger(__name__)
_CHUNK_ELEMENTS = 1 << 24  # of gradients held at once
_looped: WeakSet[nn.Module] = WeakSet()  # cannot be vectorised


def fallback_gradients(layer: Layer, call: Call, batch_size: int) -> NamedTensors:
    """Return gradients of each example's loss with respect to the parameters of a module.

    Args:
        layer: names the parameters.
        call: one call of the module, with the batch axes of its inputs and outputs.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.
    """
    module = call.module
    parameters: NamedTensors = {}
    for role in layer.parameters:
        parameters[role] = module.get_parameter(role).detach()
    dtypes = [p.dtype for p in parameters.values()]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    leaves, spec, axes = call.batched_leaves()
    # Inputs may come from an autocast region and be narrower than the parameters.
    arguments = [_widen(leaf, widest) for leaf in leaves]
    rows = []
    for place, axis in axes.items():
        rows.append(one_example_a_row(arguments[place], axis, batch_size))
    used = call.batched_gradients()
    gradients = []
    for gradient, axis in used.values():
        gradient_rows = one_example_a_row(gradient, axis, batch_size)
        gradients.append(_widen(gradient_rows, widest))

    def run(values: NamedTensors, example: list[Tensor]) -> list[Tensor]:
        """Return the outputs of one example that have a gradient."""
        inputs = list(arguments)
        for place, x in zip(axes, example, strict=True):
            inputs[place] = x
        args, kwargs = tree_unflatten(inputs, spec)
        output = functional_call(module, values, args, kwargs)
        tensors = [y for y in tree_leaves(output) if isinstance(y, Tensor)]
        return [tensors[place] for place in used]

    # A forward pass may store computed weights or caches on its modules. Its recorded outputs are
    # those that the module's forward hooks were given.
    with replicate(module), torch.enable_grad():
        module._forward_hooks = OrderedDict()
        result = _gradients_of_rows(layer, module, run, parameters, rows, gradients, batch_size)
    return {role: raise_precision(g) for role, g in result.items()}


def _widen(x: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in at least this type, and anything else as it is."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    bits = torch.finfo(x.dtype).bits
    if bits < torch.finfo(dtype).bits:
        return x.to(dtype)
    return x


_Run = Callable[[NamedTensors, list[Tensor]], list[Tensor]]
"""Maps parameters and the inputs of one example to the outputs of a module."""


def _gradients_of_rows(
    layer: Layer,
    module: nn.Module,
    run: _Run,
    parameters: NamedTensors,
    rows: list[Tensor],
    gradients: list[Tensor],
    size: int,
) -> NamedTensors:
    """Return role to gradients of every example, vectorised where that is possible.

    Args:
        layer: named in the message where it is not.
        module: that `run` runs again.
        run: from parameters and inputs of one example to its outputs.
        parameters: role to trainable parameters, detached.
        rows: inputs, one example a row.
        gradients: at the outputs, one example a row.
        size: examples N.
    """
    if module not in _looped:
        try:
            return _vectorise(run, parameters, rows, gradients)
        # No batching rule, control flow that depends on data, or anything else.
        except Exception as error:  # noqa: BLE001
            if is_out_of_memory(error):
                raise
            _looped.add(module)
            # The text of the error may hold values of private examples.
            _log.warning(
                "module '%s' (%s) cannot be vectorised over examples (%s); its gradients are "
                "taken one example at a time",
                layer.display_name,
                type(module).__name__,
                type(error).__name__,
            )
    examples = []
    for i in range(size):
        copies = {}
        for role, p in parameters.items():
            copies[role] = p.clone().requires_grad_()
        outputs = run(copies, [x[i] for x in rows])
        row_gradients = [g[i] for g in gradients]
        result = differentiate(outputs, row_gradients, list(copies.values()))
        examples.append(dict(zip(copies, result, strict=True)))
    return _stack_examples(examples)


def _vectorise(
    run: _Run, parameters: NamedTensors, rows: list[Tensor], gradients: list[Tensor]
) -> NamedTensors:
    """Return role to gradients of every example by `vmap`."""

    def gradient(row: list[Tensor], row_gradients: list[Tensor]) -> NamedTensors:
        outputs, pull = vjp(lambda values: run(values, row), parameters)[:2]
        starts = []
        for g, y in zip(row_gradients, outputs, strict=True):
            starts.append(g.to(y.dtype))
        return pull(starts)[0]

    elements = sum(p.numel() for p in parameters.values())
    examples_at_once = max(1, _CHUNK_ELEMENTS // max(1, elements))
    run_all = vmap(gradient, chunk_size=examples_at_once)
    # The fused kernels of attention have no batching rule.
    with sdpa_kernel([SDPBackend.MATH]):
        result = run_all(rows, gradients)
    return {role: g.detach() for role, g in result.items()}


def _stack_examples(examples: Sequence[NamedTensors]) -> NamedTensors:
    """Return name to the values of all examples."""
    stacked = {}
    for name in examples[0]:
        values = [x[name] for x in examples]
        stacked[name] = torch.stack(values)
    return stacked


def differentiate(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients at some tensors, from those at tensors that depend on them.

    Args:
        outputs: tensors of one graph.
        gradients: at the outputs, None where there is none.
        inputs: where gradients are wanted.

    Returns:
        Dense tensors, also of `nn.EmbeddingBag(sparse=True)`, zeros where no output depends on an
        input.
    """
    targets: list[Tensor] = []
    starts: list[Tensor] = []
    for y, g in zip(outputs, gradients, strict=True):
        if g is not None and y.requires_grad:
            targets.append(y)
            starts.append(g.to(y.dtype))
    if not targets:
        return [torch.zeros_like(x) for x in inputs]
    arrived = torch.autograd.grad(targets, inputs, starts, materialize_grads=True)
    return [g.to_dense() for g in arrived]


# --------------------------------------------------------------------------------------------------
# Gradients of examples that were computed by autograd, in the form in which layers are clipped and
# summed.


def block_of_gradients(layer: Layer, gradients: NamedTensors) -> MaterializedGradients | PerExample:
    """Return per-example gradients of a layer's parameters as a block.

    Args:
        layer: the layer.
        gradients: role to gradients `[N, *parameter.shape]`. An absent role has zeros.

    Returns:
        For a matrix-shaped layer `[N * groups, d_out, d_in]` with the bias as last column (an
        embedding: `[N, rows, d]`), for another layer the gradients by role. Both are in float32, or
        in float64 where they are.
    """
    first = next(iter(gradients.values()))
    like = raise_precision(first)
    size = len(like)
    by_role = {}
    for role in layer.parameters:
        if role in gradients:
            by_role[role] = gradients[role].to(like.dtype)
        else:
            shape = layer.tensor(role).shape
            by_role[role] = like.new_zeros(size, *shape)
    if layer.rule not in MATRICES:
        return PerExample(by_role)
    matrix = matrices_of(layer, by_role)
    rows = matrix.reshape(size * layer.groups, -1, matrix.shape[-1])
    is_embedding = layer.rule == "embedding"
    return MaterializedGradients(rows, layer.groups, crosswise=is_embedding)


def matrices_of(layer: Layer, tensors: NamedTensors) -> Tensor:
    """Return `[N, d_out, columns]` from `[N, *parameter.shape]` by role, the bias last."""
    columns = []
    if "weight" in tensors:
        weight = tensors["weight"]
        weight = weight.mT if layer.transposed else weight.flatten(2)
        columns.append(weight)
    if "bias" in tensors:
        columns.append(tensors["bias"].unsqueeze(2))
    if len(columns) == 1:
        return columns[0]
    return torch.cat(columns, 2)


def gradient_of(model: nn.Module, total: Tensor) -> NamedTensors:
    """Return parameter name to the gradient of a number, dense.

    Parameters that the number does not depend on are absent.
    """
    if total.grad_fn is None:
        return {}
    parameters = trainable_tensors(model)
    tensors = list(parameters.values())
    with torch.autocast(total.device.type, enabled=False):
        arrived = torch.autograd.grad(total, tensors, allow_unused=True)
    gradients: NamedTensors = {}
    for name, gradient in zip(parameters, arrived, strict=True):
        if gradient is not None:
            gradients[name] = gradient.to_dense()
    return gradients


def add_blocks(layers: Sequence[Layer], gradients: NamedTensors, calls: Calls) -> None:
    """Add gradients to the calls of the layers that the parameters belong to.

    Args:
        layers: of the model.
        gradients: parameter name to gradients `[N, *parameter.shape]`.
        calls: layer name to its calls or blocks.
    """
    for layer in layers:
        by_role = {}
        for role, name in layer.parameters.items():
            if name in gradients:
                by_role[role] = gradients[name]
        if by_role:
            block = block_of_gradients(layer, by_role)
            calls.setdefault(layer.name, []).append(block)


def blocks_of_one(layers: Sequence[Layer], gradient: NamedTensors) -> Calls:
    """Return the gradient of one example or privacy unit as the blocks of its layers.

    Args:
        layers: of the model.
        gradient: parameter name to gradient.
    """
    calls: Calls = {}
    rows = {name: g.unsqueeze(0) for name, g in gradient.items()}
    add_blocks(layers, rows, calls)
    return calls


# --------------------------------------------------------------------------------------------------
# Layers whose weight is computed from parameters, by any `torch` parametrization.
#
# Weight standardisation and weight norm are examples. The effective weight W = f(θ) depends on no
# example, so the layer is an ordinary linear layer or convolution in W. The gradient of example n
# is `g_n(θ) = Jᵀ g_n(W)` with J = ∂f/∂θ. The rows of a group are added before that product, which
# is vectorised over examples. Curvature treats the result as an elementwise layer: whitening in W
# is not whitening in θ.

_PULLED_ELEMENTS = 1 << 23  # gradients pulled back at once
_TENSORS = ("weight", "bias")


@dataclass(frozen=True)
class Pull:
    """Maps gradients with respect to an effective tensor to gradients of what it is computed from.

    Attributes:
        shape: of the effective tensor.
        apply: `[n, *shape]` to role and `[n, *parameter.shape]`.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor], NamedTensors]


@dataclass(frozen=True)
class ParametrizedBlock:
    """The gradients of one layer before they are pulled back.

    Attributes:
        parts: blocks in the effective tensors, each with the pull of `weight` and `bias` where they
            train. There is one part, or several where the gradients were taken at several values of
            the parameters. Their gradients are added.
    """

    parts: tuple[tuple[Outer | ConvBlock, Mapping[str, Pull]], ...]

    @property
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return self.parts[0][0].batch_size

    def merge_rows(self, count: int, size: int) -> PerExample:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        parts = []
        for block, pulls in self.parts:
            merged = block.merge_rows(count, size)
            parts.append((merged, pulls))
        return ParametrizedBlock(tuple(parts)).per_example()

    def per_example(self) -> PerExample:
        """Return materialised gradients, formed and pulled back a few examples at a time."""
        n = self.batch_size
        gradients: NamedTensors = {}
        for block, pulls in self.parts:
            sizes = [math.prod(pull.shape) for pull in pulls.values()]
            for rows in chunks(n, sum(sizes), _PULLED_ELEMENTS):
                pulled = _pull_back(block.select(rows), pulls)
                for role, g in pulled.items():
                    if role not in gradients:
                        shape = g.shape[1:]
                        gradients[role] = g.new_zeros(n, *shape)
                    gradients[role][rows] += g
        return PerExample(gradients)


def _pull_back(block: Outer | ConvBlock, pulls: Mapping[str, Pull]) -> NamedTensors:
    # `[n * groups, d_out, d_in]`, the bias in the last column.
    matrices = block.per_example()
    columns = {"weight": matrices, "bias": matrices[..., -1]}
    if len(pulls) == 2:
        columns["weight"] = matrices[..., :-1]
    gradients: NamedTensors = {}
    for name, pull in pulls.items():
        rows = columns[name].reshape(block.batch_size, *pull.shape)
        gradients.update(pull.apply(rows))
    return gradients


def has_computed_weight(module: nn.Module, roles: list[str]) -> bool:
    """Return whether all trainable parameters of a module make up its weight or bias.

    They do so through torch parametrizations or directly.

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    if not is_parametrized(module):
        return False
    prefixes = tuple(f"parametrizations.{name}." for name in _TENSORS)
    others = [role for role in roles if not role.startswith(prefixes)]
    return set(others) <= set(_TENSORS)


def pulls_of(module: nn.Module, roles: list[str]) -> dict[str, Pull]:
    """Return the pulls of a layer's weight and bias at the present values of its parameters.

    The values are copied.

    Args:
        module: for which `has_computed_weight` holds.
        roles: its trainable parameters.

    Raises:
        ValueError: a parametrization that draws random numbers.
    """
    pulls: dict[str, Pull] = {}
    for name in _TENSORS:
        prefix = f"parametrizations.{name}."
        paths = []
        for role in roles:
            if role.startswith(prefix):
                paths.append(role.removeprefix(prefix))
        if paths:
            pulls[name] = _pull_of(module, name, paths, prefix)
        elif name in roles:
            pulls[name] = _plain_pull(module, name)
    return pulls


def _plain_pull(module: nn.Module, name: str) -> Pull:
    """Return the pull of a tensor that is a parameter itself."""
    shape = module.get_parameter(name).shape
    return Pull(tuple(shape), lambda g: {name: g})


def _pull_of(module: nn.Module, name: str, paths: list[str], prefix: str) -> Pull:
    parametrization = module.get_submodule(prefix[:-1])
    parameters = {}
    for path in paths:
        p = parametrization.get_parameter(path)
        parameters[path] = p.detach().clone()
    device = parameters[paths[0]].device
    before = random_states(device)

    def effective(values: NamedTensors) -> Tensor:
        return functional_call(parametrization, values, ())

    value, pull = vjp(effective, parameters)[:2]
    if not are_states_equal(before, random_states(device)):
        raise ValueError(
            f"the parametrization of '{name}' of a {type(module).__name__} draws random numbers, "
            "so its weight cannot be recomputed; put it in eval mode"
        )

    def apply(g: Tensor) -> NamedTensors:
        with torch.no_grad():
            rows = g.to(value.dtype)
            pulled = vectorised(lambda one: pull(one)[0], rows)
        gradients = {}
        for path, x in pulled.items():
            gradients[prefix + path] = x.to(g.dtype)
        return gradients

    return Pull(tuple(value.shape), apply)


def vectorised(function: Callable[[Tensor], NamedTensors], g: Tensor) -> NamedTensors:
    """Return a function of every example, vectorised where every operation has a batching rule.

    Otherwise examples are processed one after the other.
    """
    try:
        return vmap(function)(g)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        kind = type(error).__name__
        _log.debug("a parametrization cannot be vectorised over examples: %s", kind)
    return _stack_examples([function(x) for x in g])
