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
    return {} if losses.grad_fn is None else gradient_of(model, losses.sum() * weight)


def add_gradients(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Add the gradient of one row to that of its privacy unit, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient
