"""Does the loss of a script have the reduction it was declared with?

`loss.backward()` shows nothing of the loss but its gradient at the model's output. Were the reduction not the declared
one, the gradient of one example would depend on the number or the labels of the others, and the sensitivity would not be
the one that the noise is made for. For classification losses the gradient itself gives the reduction away.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_loss_scale"]

_TOLERANCE = 1e-3


def check_loss_scale(output: Tensor, gradient: Tensor, reduction: str) -> bool:
    """Compare the reduction of a classification loss with the declared one.

    Args:
        output: logits or log-probabilities `[N, classes]`.
        gradient: of the user's loss with respect to the output.
        reduction: the declared one, "mean" or "sum".

    Returns:
        Whether there was a verdict: the gradient is that of a cross-entropy or of a negative log-likelihood, N >= 2.

    Raises:
        ValueError: a sum declared as a mean or the reverse; a mean whose divisor depends on the labels.
    """
    factors = _factors(output, gradient)
    if factors is None:
        return False
    n = output.shape[0]
    summed = bool(((factors - 1).abs() < _TOLERANCE).all())
    equal = bool((factors.max() - factors.min()) < _TOLERANCE * factors.max())
    weighted = not equal and factors.numel() == n and bool((factors.sum() - 1).abs() < _TOLERANCE)
    averaged = equal and bool((factors * n - 1).abs().max() < _TOLERANCE)
    if weighted:
        raise ValueError(
            "the loss divides by a number that depends on the labels (class weights or ignore_index with "
            "reduction='mean'), so one example changes the gradients of the others and clipping does not bound it; use "
            "reduction='sum' with make_private(loss_reduction='sum')"
        )
    if (reduction == "mean" and summed) or (reduction == "sum" and averaged):
        actual = "sum" if summed else "mean"
        raise ValueError(
            f"the loss is a {actual} over the examples but loss_reduction='{reduction}' was declared; the size of the batch "
            f"would leak into every gradient. Use make_private(loss_reduction='{actual}') or a loss with "
            f"reduction='{reduction}'"
        )
    return True


def _factors(output: Tensor, gradient: Tensor) -> Tensor | None:
    """Factor of each example's own loss in the whole `[M]`, M <= N; None where the gradient is of no form known here.

    With probabilities p and label y the gradient of a cross-entropy at the logits is p - e_y, that of a negative
    log-likelihood at the log-probabilities is -e_y. An ignored example has the factor 0. An example that is predicted with
    confidence leaves too little to measure and is left out.
    """
    if output.dim() != 2 or output.shape[0] < 2 or output.shape[1] < 2 or output.shape != gradient.shape:
        return None
    if output.dtype not in (torch.float32, torch.float64) or not bool(torch.isfinite(gradient).all()):
        return None
    label = torch.nn.functional.one_hot(gradient.argmin(1), output.shape[1]).to(gradient)
    likelihood = bool((gradient * (1 - label) == 0).all())
    pattern = -label if likelihood else output.softmax(1) - label
    ignored = (gradient == 0).all(1)
    clear = ignored | (pattern.abs().amax(1) > 0.05)
    gradient, pattern = gradient[clear], pattern[clear]
    factors = (gradient * pattern).sum(1) / pattern.square().sum(1).clamp_min(1e-30)
    off = (gradient - factors.unsqueeze(1) * pattern).abs().amax(1)
    fits = bool((off <= _TOLERANCE * gradient.abs().amax(1)).all())
    return factors if fits and int((factors > 0).sum()) >= 2 else None
