"""The gradient of an example by definition: plain autograd on a micro-batch of that example alone.

Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpkfc.gradients.materialised import gradient_of
from dpkfc.gradients.tape import check_losses

__all__ = ["add_gradients", "example_gradient"]


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
    losses = loss_fn(model, batch)
    check_losses(losses, 1)
    if losses.grad_fn is None:
        return {}
    try:
        return gradient_of(model, losses.sum() * weight)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    return _by_backward(model, loss_fn(model, batch).sum() * weight)


def _by_backward(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """Return gradients as `backward()` writes them: a checkpoint with use_reentrant=True knows no other way."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in parameters.values():
        p.grad = None
    try:
        total.backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}
    finally:
        for p in parameters.values():
            p.grad = None


def add_gradients(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Add the gradient of one row to that of its privacy unit, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient
