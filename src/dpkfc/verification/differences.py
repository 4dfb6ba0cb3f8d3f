"""Whether losses, gradients and rows of two passes differ by more than rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.autograd_graph import gradient_of
from dpkfc.tensors import Tensors

_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}


def losses_differ(losses: Tensor, others: Tensor, dtypes: set[torch.dtype]) -> bool:
    """Return whether losses of a model of some types differ by more than rounding."""
    losses = losses.detach().double()
    others = others.detach().double()
    tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in dtypes)
    is_finite = losses.isfinite()
    if not torch.equal(is_finite, others.isfinite()):
        return True
    if not bool(is_finite.any()):
        return False
    losses = losses[is_finite]
    others = others[is_finite]
    scale = torch.maximum(losses.abs(), others.abs())
    bound = tolerance * (scale + scale.median()) + 1e-9
    distance = (losses - others).abs()
    return bool((distance > bound).any())


def gradients_differ(gradient: Tensor, other: Tensor, dtypes: set[torch.dtype]) -> bool:
    """Return whether gradients of a model of some types differ by more than rounding."""
    scale = max(norm_of(gradient), norm_of(other))
    if not math.isfinite(scale):
        return False
    tolerance = 1e-2 if dtypes <= {torch.float32, torch.float64} else 5e-2
    return norm_of(gradient - other) > tolerance * scale + 1e-9


def are_rows_equal(tensors: list[Tensor], others: list[Tensor], rows: list[int]) -> bool:
    """Return whether rows of two batches agree, or the batches have different padding."""
    shapes = [x.shape[1:] for x in tensors]
    if shapes != [x.shape[1:] for x in others]:
        return True
    for x, y in zip(tensors, others, strict=True):
        if x.is_complex():
            continue
        kept = x[rows].double()
        other_kept = y[rows].double()
        if not torch.allclose(kept, other_kept, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return True


def difference_of(one: Tensor, other: Tensor, total_norm: float, dtype: torch.dtype) -> float:
    """Return the relative difference of two gradients of a parameter, 0 where it is rounding.

    Args:
        one: a gradient.
        other: another.
        total_norm: norm of the gradient of all parameters.
        dtype: the type of the layer that rounds most.
    """
    # The slack is for a gradient that is zero up to rounding.
    tolerances = {torch.float32: (1e-2, 1e-5), torch.float64: (1e-6, 1e-5)}
    relative, slack = tolerances.get(dtype, (0.2, 1e-2))
    scale = max(norm_of(one), norm_of(other))
    distance = norm_of(one.to(other) - other)
    if distance > relative * scale + slack * total_norm + 1e-12:
        return distance / max(scale, 1e-30)
    return 0.0


def have_equal_gradients(model: nn.Module, one: Tensor, other: Tensor) -> bool:
    """Return whether two numbers have one gradient in every parameter, up to rounding.

    An attention over padding hardly changes the outputs of an untrained model.
    """
    gradients = all_gradients(model, one)
    others = all_gradients(model, other)
    total_norm = total_norm_of(gradients)
    for name, gradient in gradients.items():
        if difference_of(gradient, others[name], total_norm, gradient.dtype):
            return False
    return True


def all_gradients(model: nn.Module, total: Tensor) -> Tensors:
    """Return the gradient of a number at every trainable parameter, else zeros."""
    gradients = gradient_of(model, total)
    dense = {}
    for name, p in trainable_tensors(model).items():
        gradient = gradients.get(name)
        dense[name] = torch.zeros_like(p) if gradient is None else gradient
    return dense


def total_norm_of(gradients: Tensors) -> float:
    """Return the norm of the gradient of all parameters."""
    return math.hypot(*map(norm_of, gradients.values()))


def norm_of(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor, summed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
