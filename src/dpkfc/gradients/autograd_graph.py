"""Gradients at places of an autograd graph, and what the graph consists of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.memory import is_out_of_memory
from dpkfc.tensors import Tensors
from dpkfc.tracking.states import Unknown

_BUILTIN_NODES = (
    "AccumulateGrad",
    "CopySlices",
    "torch::autograd::AccumulateGrad",
    "torch::autograd::CopySlices",
)


def differentiate(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients at some tensors, from those at tensors that depend on them.

    Args:
        outputs: tensors of one graph.
        gradients: at the outputs, None for an output without a gradient.
        inputs: where gradients are wanted.

    Returns:
        Dense tensors, also of `nn.EmbeddingBag(sparse=True)`, zeros where no output depends on an
        input.
    """
    pairs = zip(outputs, gradients, strict=True)
    used = [(y, g.to(y.dtype)) for y, g in pairs if g is not None and y.requires_grad]
    if not used:
        return [torch.zeros_like(x) for x in inputs]
    targets, starts = zip(*used, strict=True)
    arrived = torch.autograd.grad(targets, inputs, starts, materialize_grads=True)
    return [g.to_dense() for g in arrived]


@contextmanager
def hide_saved_tensors_hooks() -> Iterator[None]:
    """Run the body without outer hooks on saved tensors, such as a checkpoint's.

    Hooks of no effect would not do: `torch.func` refuses any.
    """
    stack = torch._C._autograd
    hidden: list[Any] = []
    while (hooks := stack._top_saved_tensors_default_hooks(True)) is not None:
        hidden.append(hooks)
        stack._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hidden):
            stack._push_saved_tensors_default_hooks(pack, unpack)


def gradient_of(model: nn.Module, total: Tensor) -> Tensors:
    """Return parameter name to the gradient of a number, dense.

    Parameters that the number does not depend on are absent.
    """
    if total.grad_fn is None:
        return {}
    parameters = trainable_tensors(model)
    with torch.autocast(total.device.type, enabled=False):
        arrived = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    gradients = zip(parameters, arrived, strict=True)
    return {name: g.to_dense() for name, g in gradients if g is not None}


def pull_rows(
    sources: Sequence[Tensor],
    rows: Sequence[Tensor],
    targets: Sequence[GradientEdge | Tensor],
    size: int,
) -> Sequence[Tensor | None]:
    """Return the gradients of every example at some places of a graph, from those at its ends.

    Args:
        sources: tensors of the graph, which depend on no example.
        rows: gradients `[N, *source.shape]` at each.
        targets: where gradients are wanted.
        size: examples N.

    Returns:
        For each target `[N, ...]` of its shape, None where no source depends on it.
    """
    if not sources or not targets:
        return [None] * len(targets)
    grad = partial(
        torch.autograd.grad, sources, list(targets), retain_graph=True, allow_unused=True
    )
    try:
        return grad(rows, is_grads_batched=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
    # One of the operations has no batching rule.
    examples = [grad([g[i] for g in rows]) for i in range(size)]
    columns = zip(*examples, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def custom_function(losses: Tensor, ends: Sequence[Tensor] = ()) -> Unknown | None:
    """Return the first node of the graph whose backward pass is Python code, or None.

    Args:
        losses: where the graph begins.
        ends: tensors behind which the graph is not searched.
    """
    for node in nodes_of(losses, ends):
        name = node.name()
        is_builtin = "Backward" in name and name[-1:].isdigit()
        if is_builtin or name in _BUILTIN_NODES:
            continue
        origin = getattr(type(node), "_forward_cls", type(node))
        if not str(origin.__module__).startswith("torch.distributed."):
            return Unknown(name, "the backward pass of a custom autograd function is not followed")
    return None


def nodes_of(losses: Tensor, ends: Sequence[Tensor] = ()) -> Iterator[Any]:
    """Yield all nodes of the graph of some losses, down to `ends`, whose nodes are left out."""
    with torch._C.DisableTorchFunction():
        first, *excluded = [x.grad_fn for x in (losses, *ends)]
    seen: set[Any] = {None, *excluded}
    if first not in seen:
        yield from _nodes_behind(first, seen)


def leads_to(node: Any, targets: Collection[Any]) -> bool:
    """Return whether a backward pass from a node comes to one of some nodes."""
    return any(found in targets for found in _nodes_behind(node, {None}))


def _nodes_behind(first: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield a node and all behind it that were not seen."""
    waiting = [first]
    seen.add(first)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def depends_on(model: nn.Module, x: Tensor) -> bool:
    """Return whether a tensor was computed from a trainable parameter of a model."""
    with torch._C.DisableTorchFunction():
        parameters = set(map(id, trainable_tensors(model).values()))
        return any(id(getattr(node, "variable", None)) in parameters for node in nodes_of(x))


def used_parameters(model: nn.Module, x: Tensor, ends: Sequence[Tensor] = ()) -> set[str]:
    """Return the names of the trainable parameters that a tensor was computed from.

    Args:
        model: with the parameters.
        x: the tensor.
        ends: tensors behind which the graph is not searched.
    """
    with torch._C.DisableTorchFunction():
        found = {id(getattr(node, "variable", None)) for node in nodes_of(x, ends)}
        return {name for name, p in trainable_tensors(model).items() if id(p) in found}


def is_differentiable(x: Any) -> bool:
    """Return whether a value is a tensor that gradients arrive at."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
