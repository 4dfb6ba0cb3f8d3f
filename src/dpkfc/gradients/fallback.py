"""Per-example gradients of a module without a rule, which is run again on each example alone.

`torch.func.vmap` runs over a vector-Jacobian product of the one module, with the output gradients
that the single backward pass has already produced. A loop over the examples takes its place where
the module cannot be vectorised. The tracker has shown where every input and output has the batch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_unflatten

from dpkfc.gradients.autograd_graph import differentiate
from dpkfc.gradients.layers import Call, Layer, tensors_of
from dpkfc.gradients.replica import replicate
from dpkfc.linalg.blocks import raise_precision
from dpkfc.memory import is_out_of_memory
from dpkfc.tensors import Tensors
from dpkfc.tracking.states import one_example_a_row

_log = logging.getLogger(__name__)
_CHUNK_ELEMENTS = 1 << 24  # of gradients held at once
_looped: WeakSet[nn.Module] = WeakSet()  # cannot be vectorised


def fallback_gradients(layer: Layer, call: Call, batch_size: int) -> Tensors:
    """Return gradients of each example's loss with respect to the parameters of a module.

    Args:
        layer: names the parameters.
        call: one call of the module, with the batch axes of its inputs and outputs.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.
    """
    module = call.module
    parameters = {role: module.get_parameter(role).detach() for role in layer.parameters}
    widest = max((p.dtype for p in parameters.values()), key=_bits)
    leaves, spec, axes = call.batched_leaves()
    # Inputs may come from an autocast region and be narrower than the parameters.
    arguments = [_widen(leaf, widest) for leaf in leaves]
    rows = [one_example_a_row(arguments[i], axis, batch_size) for i, axis in axes.items()]
    used = call.batched_gradients()
    gradients = [
        _widen(one_example_a_row(gradient, axis, batch_size), widest)
        for gradient, axis in used.values()
    ]

    def run(values: Tensors, example: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of one example that have a gradient."""
        inputs = list(arguments)
        for place, x in zip(axes, example, strict=True):
            inputs[place] = x
        args, kwargs = tree_unflatten(inputs, spec)
        outputs = tensors_of(functional_call(module, values, args, kwargs))
        return [outputs[place] for place in used]

    # A forward pass may store computed weights or caches on its modules. Its recorded outputs are
    # those that the module's forward hooks were given.
    with replicate(module), torch.enable_grad():
        module._forward_hooks = OrderedDict()
        result = None
        if module not in _looped:
            result = _try_vectorised(layer, module, run, parameters, rows, gradients)
        if result is None:
            result = _loop(run, parameters, rows, gradients, batch_size)
    return {role: raise_precision(g) for role, g in result.items()}


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _widen(x: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in at least this type, and anything else as it is."""
    is_narrow = isinstance(x, Tensor) and x.is_floating_point() and _bits(x.dtype) < _bits(dtype)
    return x.to(dtype) if is_narrow else x


_Run = Callable[[Tensors, Sequence[Tensor]], list[Tensor]]
"""Maps parameters and the inputs of one example to the outputs of a module."""


def _try_vectorised(
    layer: Layer,
    module: nn.Module,
    run: _Run,
    parameters: Tensors,
    rows: list[Tensor],
    gradients: list[Tensor],
) -> Tensors | None:
    """Return role to gradients of every example by `vmap`, None where that is not possible.

    Args:
        layer: named in the message where it is not.
        module: that `run` runs again.
        run: from parameters and inputs of one example to its outputs.
        parameters: role to trainable parameters, detached.
        rows: inputs, one example a row.
        gradients: at the outputs, one example a row.
    """

    def differentiate_one(row: list[Tensor], row_gradients: list[Tensor]) -> Tensors:
        outputs, pull = vjp(lambda values: run(values, row), parameters)[:2]
        starts = [g.to(y.dtype) for g, y in zip(row_gradients, outputs, strict=True)]
        return pull(starts)[0]

    elements = sum(p.numel() for p in parameters.values())
    examples_at_once = max(1, _CHUNK_ELEMENTS // max(1, elements))
    try:
        # The fused kernels of attention have no batching rule.
        with sdpa_kernel([SDPBackend.MATH]):
            result = vmap(differentiate_one, chunk_size=examples_at_once)(rows, gradients)
        return {role: g.detach() for role, g in result.items()}
    # No batching rule, control flow that depends on data, or anything else.
    except Exception as error:  # noqa: BLE001
        if is_out_of_memory(error):
            raise
        _looped.add(module)
        # The text of the error may hold values of private examples, and a module may take this way
        # for some batches alone.
        _log.warning(
            "PRIVATE, for your eyes only: module '%s' (%s) cannot be vectorised over examples (%s);"
            " its gradients are taken one example at a time",
            layer.display_name,
            type(module).__name__,
            type(error).__name__,
        )
        return None


def _loop(
    run: _Run, parameters: Tensors, rows: list[Tensor], gradients: list[Tensor], size: int
) -> Tensors:
    """Return role to gradients of every example, one example after the other."""
    examples = []
    for i in range(size):
        copies = {role: p.clone().requires_grad_() for role, p in parameters.items()}
        outputs = run(copies, [x[i] for x in rows])
        result = differentiate(outputs, [g[i] for g in gradients], list(copies.values()))
        examples.append(dict(zip(copies, result, strict=True)))
    return {name: torch.stack([x[name] for x in examples]) for name in parameters}
