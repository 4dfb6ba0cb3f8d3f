"""Clip factors of examples: how each gradient is scaled so that its norm stays within a bound.

An example has one factor, over the norm of all its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc._checks import check_positive
from dpkfc.clipping import contribution_bound

_LEAST = torch.finfo(torch.float32).tiny  # smallest factor in full precision


def clip_factors(
    norms: Tensor, max_grad_norm: float, clipping: str = "flat", automatic_gamma: float = 0.01
) -> Tensor:
    """Return the factor c of each example, so that c · norm never exceeds `contribution_bound`.

    Args:
        norms: upper bounds of the per-example gradient norms `[N]`, in the preconditioned space.
        max_grad_norm: C.
        clipping: flat: min(1, C / n) (Abadi et al. 2016); normalised: min(1 / C, 1 / n) (De et al.
            2022); automatic: C / (n + γ) (Bu et al. 2023).
        automatic_gamma: γ of automatic clipping.

    Returns:
        Factors `[N]`. The factor is zero for an example whose norm is not finite, or so large that
        its factor is not a normal number of float32. Rounded up, such a factor would let more than
        C through.

    Raises:
        ValueError: C or γ not positive and finite, or a clipping with more than one factor.
    """
    # A basis brings norms of its own, which no setting has checked.
    if not 0 < max_grad_norm < math.inf:
        raise ValueError(f"max_grad_norm must be positive and finite, got {max_grad_norm}")
    if clipping == "automatic":
        check_positive("automatic_gamma", automatic_gamma)
        factors = max_grad_norm / (norms + automatic_gamma)
    elif clipping in ("flat", "normalised"):
        factors = (max_grad_norm / norms).clamp(max=1.0)
    else:
        raise ValueError(
            f"clipping={clipping!r} has no rule for one factor of a whole gradient; clip each layer"
            " or part with a norm of its own and clipping='flat'"
        )
    if clipping == "normalised":
        factors = factors / max_grad_norm
    is_counted = torch.isfinite(norms) & (factors >= _LEAST)
    return torch.where(is_counted, factors, torch.zeros_like(factors))


@dataclass(frozen=True)
class Clip:
    """How an example is clipped, see `clip_factors`.

    Attributes:
        max_grad_norm: C.
        clipping: as in `clip_factors`. "per_layer" clips each of L layers to C / √L.
        automatic_gamma: γ of automatic clipping.

    Raises:
        ValueError: as `contribution_bound`.
    """

    max_grad_norm: float
    clipping: str = "flat"
    automatic_gamma: float = 0.01

    def __post_init__(self) -> None:
        contribution_bound(self.clipping, self.max_grad_norm)
