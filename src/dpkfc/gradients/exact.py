"""The gradient of an example by definition: plain autograd on a micro-batch of that example alone.

Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.layers import Layer
from dpkfc.gradients.materialised import block_of_gradients
from dpkfc.gradients.calls import Calls
from dpkfc.gradients.sharded import in_graph
from dpkfc.gradients.tape import check_losses

__all__ = ["add_gradients", "blocks_of_one", "example_gradient"]


def example_gradient(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, weight: float = 1.0
) -> dict[str, Tensor]:
    """Return the gradient of the loss of one example.

    Args:
        model: in the mode in which it is trained.
        loss_fn: maps model and batch to losses `[1]`.
        batch: a batch of one example.
        weight: a factor of the loss.

    Returns:
        Parameter name to gradient, dense; parameters that the loss does not use are absent.

    Raises:
        ValueError: losses of another shape.
    """
    parameters = {name: in_graph(p) for name, p in model.named_parameters() if p.requires_grad}
    losses = loss_fn(model, batch)
    check_losses(losses, 1)
    if losses.grad_fn is None:
        return {}
    total = losses.sum() * weight
    gradients: Sequence[Tensor | None]
    try:
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        gradients = _by_backward(loss_fn(model, batch).sum() * weight, list(parameters.values()))
    pairs = zip(parameters, gradients, strict=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}


def _by_backward(total: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return gradients as `backward()` writes them: a checkpoint with use_reentrant=True knows no other way."""
    for p in parameters:
        p.grad = None
    try:
        total.backward()
        return tuple(p.grad for p in parameters)
    finally:
        for p in parameters:
            p.grad = None


def add_gradients(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Add the gradient of one row to that of its privacy unit, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient


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
