"""The definition: the gradient of each example as a batch of one, clipped and summed by a plain
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.zoo.registry import Batch, Loss

Gradients = dict[str, Tensor]


def gradients_of_each(model: nn.Module, singles: Sequence[Batch], loss_fn: Loss) -> list[Gradients]:
    """Return the gradient of every batch of one by plain autograd; the model is left without
    gradients.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result = []
    for single in singles:
        loss = loss_fn(model, single).reshape(-1)[0]
        loss.backward()
        gradients = {}
        for name, p in parameters.items():
            gradients[name] = (
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense().detach().clone()
            )
            p.grad = None
        result.append(gradients)
    return result


def norm_of(gradients: Gradients) -> float:
    """Return the Euclidean norm over all parameters together, without overflow of squares."""
    flat = torch.cat([g.double().flatten() for g in gradients.values()])
    largest = flat.abs().max()
    if not 0 < largest < float("inf"):
        return float(largest)
    return float(largest * (flat / largest).norm())


def clipped_sum(rows: Sequence[Gradients], clip: float) -> Gradients:
    """Clip each gradient to a norm and add them up; one that is not finite counts zero."""
    total = {name: torch.zeros_like(g) for name, g in rows[0].items()}
    for gradients in rows:
        norm = norm_of(gradients)
        if not norm < float("inf"):
            continue
        factor = 1.0 if norm <= clip else clip / norm
        for name, gradient in gradients.items():
            total[name] += factor * gradient
    return total


def relative_error(actual: Gradients, expected: Gradients) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    difference = {name: actual[name] - expected[name] for name in expected}
    return norm_of(difference) / max(norm_of(expected), 1e-12)
