"""SOFIM: a step along the inverse of ρI + M Mᵀ, with M a moving average of releases (DP-FedSOFIM's server step).

By Sherman and Morrison, over all parameters as one vector,

    direction="gradient"    (ρI + MMᵀ)⁻¹ g = g / ρ − M (Mᵀg) / (ρ² + ρ ‖M‖²)        the paper
    direction="momentum"    (ρI + MMᵀ)⁻¹ M = M / (ρ + ‖M‖²)                        its later code

The second one is momentum with a step that depends on its norm: no curvature is in it. While ‖M‖² is far below ρ both are
plain steps with a learning rate 1 / ρ times as large, which is what they have to be compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.postprocess.base import State, entry, put
from dpkfc.privacy.mechanism import Released

__all__ = ["DIRECTIONS", "SOFIM"]

DIRECTIONS = ("gradient", "momentum")
_PIECE = 1 << 17  # numbers that are worked on while they lie in a core's own memory


@dataclass(frozen=True)
class SOFIM:
    """The step of DP-FedSOFIM, to be taken by `torch.optim.SGD(lr)`.

    Attributes:
        rho: ρ > 0.
        beta: M ← β M + (1 − β) g, β in [0, 1).
        direction: what is multiplied by the inverse: "gradient" or "momentum".
        bias_correction: M is divided by 1 − β^t.
        warmup: first steps in which M is formed and nothing moves. Each is a release, and charged.

    Raises:
        ValueError: a value outside its range, by name.
    """

    rho: float = 0.5
    beta: float = 0.9
    direction: str = "gradient"
    bias_correction: bool = False
    warmup: int = 0
    smooths = False
    adaptive = True
    needs_variance = False
    momentum_allowed = False

    def __post_init__(self) -> None:
        if not (self.rho > 0 and math.isfinite(self.rho)):
            raise ValueError(f"rho of SOFIM must be positive and finite, got {self.rho}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta of SOFIM must lie in [0, 1), got {self.beta}")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction of SOFIM must be one of {', '.join(DIRECTIONS)}; got {self.direction!r}")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup of SOFIM must be a number of steps >= 0, got {self.warmup!r}")

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {
            "name": "SOFIM",
            "rho": self.rho,
            "beta": self.beta,
            "direction": self.direction,
            "bias_correction": self.bias_correction,
            "warmup": self.warmup,
        }

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The step, zero during the warm-up."""
        t = 1 + int(state.get("count/", torch.zeros(())))
        held, squares, products = {}, 0.0, 0.0
        for name, g in released.gradients.items():
            old = entry(state, "m", name)
            held[name], square, product = _moments(g if old is None else old, g, 1 - self.beta, old is None)
            squares, products = squares + square, products + product
        steps = self._steps(released.gradients, held, t, squares, products)
        after = replace(released, gradients=steps, noise_variance=None)
        return after, put("m", held) | put("count", {"": torch.tensor(t)})

    def _steps(
        self, gradients: dict[str, Tensor], held: dict[str, Tensor], t: int, squares: float, products: float
    ) -> dict[str, Tensor]:
        """From M before its correction, ‖M‖² and Mᵀg."""
        if t <= self.warmup:
            return {name: torch.zeros_like(g) for name, g in gradients.items()}
        corrected = 1 - self.beta**t if self.bias_correction else 1.0
        squares, products = squares / corrected**2, products / corrected
        if self.direction == "momentum":
            return {name: m / (corrected * (self.rho + squares)) for name, m in held.items()}
        along = products / (self.rho**2 + self.rho * squares) / corrected
        return {name: _combined(g, held[name], self.rho, along) for name, g in gradients.items()}


def _combined(g: Tensor, m: Tensor, rho: float, along: float) -> Tensor:
    """g / ρ − along · M in one walk over memory, piece by piece."""
    found = torch.empty_like(g, memory_format=torch.contiguous_format)
    pieces = (x.flatten().split(_PIECE) for x in (found, g, m))
    for to, new, mean in zip(*pieces, strict=True):
        torch.div(new, rho, out=to).sub_(mean, alpha=along)
    return found


def _moments(old: Tensor, g: Tensor, weight: float, first: bool) -> tuple[Tensor, float, float]:
    """M = old + weight (g − old), from 0 at first, with ‖M‖² and Mᵀg in float64: one walk over memory, piece by piece."""
    m = torch.empty_like(g, memory_format=torch.contiguous_format)
    square, product = g.new_zeros((), dtype=torch.float64), g.new_zeros((), dtype=torch.float64)
    pieces = (x.flatten().split(_PIECE) for x in (m, old, g))
    for to, before, new in zip(*pieces, strict=True):
        if first:
            torch.mul(new, weight, out=to)
        else:
            torch.lerp(before, new, weight, out=to)
        wide = to.double()
        square += torch.dot(wide, wide)
        product += torch.dot(wide, new.double())
    return m, float(square), float(product)
