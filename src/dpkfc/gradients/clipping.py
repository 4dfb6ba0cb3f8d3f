"""Clip factors: one scalar an example, over the norm of all its trainable parameters together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["CLIPPINGS", "SPLIT", "clip_factors", "contribution_bound"]

CLIPPINGS = ("flat", "normalised", "automatic", "per_layer")
_LEAST = torch.finfo(torch.float32).tiny  # smallest factor that the sum, in float32, holds to full precision
SPLIT = ("embedding", "embedding_residual")  # the parts of a gradient along a basis, clipped apart (GEP): see `subspace`


def contribution_bound(clipping: str, max_grad_norm: float) -> float:
    """The largest norm one example may contribute to the sum after clipping.

    Args:
        clipping: flat, normalised, automatic, per_layer, embedding or embedding_residual.
        max_grad_norm: C.

    Returns:
        C for flat, automatic and per-layer clipping (C / √L for each of L layers), 1 for normalised clipping (De et al.
        2022: clipped, then divided by C). Of a gradient split along a basis each part is divided by a norm of its own: 1 for
        the embedding alone, √2 for embedding and residual.

    Raises:
        ValueError: an unknown clipping, a C that is not positive and finite, or one beside the norms of a split gradient.
    """
    if clipping not in CLIPPINGS + SPLIT:
        raise ValueError(f"unknown clipping '{clipping}'; choose one of {', '.join(CLIPPINGS + SPLIT)}")
    if not 0 < max_grad_norm < float("inf"):
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}")
    if clipping in SPLIT and max_grad_norm != 1:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} has no meaning with clipping='{clipping}', which clips to the embedding_norm and the "
            "residual_norm of the preconditioner; leave max_grad_norm at 1"
        )
    if clipping in SPLIT:
        return 1.0 if clipping == "embedding" else math.sqrt(2)
    return 1.0 if clipping == "normalised" else max_grad_norm


def clip_factors(norms: Tensor, max_grad_norm: float, clipping: str = "flat", automatic_gamma: float = 0.01) -> Tensor:
    """Factor c of each example, so that c · norm never exceeds `contribution_bound`.

    Args:
        norms: upper bounds of the per-example gradient norms `[N]`, in the coordinates of the noise.
        max_grad_norm: C.
        clipping: flat: min(1, C / n) (Abadi et al. 2016); normalised: min(1 / C, 1 / n) (De et al. 2022);
            automatic: C / (n + γ) (Bu et al. 2023).
        automatic_gamma: γ of automatic clipping.

    Returns:
        Factors `[N]`; zero for an example whose norm is not finite, or so large that its factor is not a normal number of
        float32 (rounded up, it would let more than C through): such an example contributes nothing.

    Raises:
        ValueError: as `contribution_bound`; γ not positive.
    """
    contribution_bound(clipping, max_grad_norm)
    if automatic_gamma <= 0:
        raise ValueError(f"automatic_gamma must be positive, got {automatic_gamma}")
    if clipping == "per_layer":
        raise ValueError("per_layer clipping has one factor a layer; clip each layer with C / √L and clipping='flat'")
    if clipping in SPLIT:
        raise ValueError(f"{clipping} clipping has one factor a part; clip each part with its own norm and clipping='flat'")
    if clipping == "automatic":
        factors = max_grad_norm / (norms + automatic_gamma)
    else:
        factors = (max_grad_norm / norms).clamp(max=1.0)
        if clipping == "normalised":
            factors = factors / max_grad_norm
    return torch.where(torch.isfinite(norms) & (factors >= _LEAST), factors, torch.zeros_like(factors))
