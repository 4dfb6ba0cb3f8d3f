"""SOFIM: a step along the inverse of ρI + M Mᵀ, with M a moving average of releases (DP-FedSOFIM's server step).

By Sherman and Morrison, over all parameters as one vector,

    direction="gradient"    (ρI + MMᵀ)⁻¹ g = g / ρ − M (Mᵀg) / (ρ² + ρ ‖M‖²)        the paper
    direction="momentum"    (ρI + MMᵀ)⁻¹ M = M / (ρ + ‖M‖²)                        its later code

The second one is momentum with a step that depends on its norm: no curvature is in it. While ‖M‖² is far below ρ both are
plain steps with a learning rate 1 / ρ times as large, which is what they have to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.postprocess.base import State, entry, put
from dpkfc.privacy.mechanism import Released

__all__ = ["DIRECTIONS", "SOFIM"]

DIRECTIONS = ("gradient", "momentum")
_PIECE = 1 << 15  # numbers that are worked on while they lie in a core's own memory, by that core alone


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

    def apply(self, released: Released, state: State, *, spare: bool = False) -> tuple[Released, dict[str, Tensor]]:
        """The step, zero during the warm-up.

        Args:
            released: of this step.
            state: of the step before.
            spare: whether nobody needs the arguments any more; their memory then holds the results, since fresh memory of this
                size costs more than the arithmetic.
        """
        t = 1 + int(state.get("count/", torch.zeros(())))
        held, squares, products = {}, 0.0, 0.0
        for name, g in released.gradients.items():
            old = entry(state, "m", name)
            held[name], square, product = _moments(old, g, 1 - self.beta, spare)
            squares, products = squares + square, products + product
        steps = self._steps(released.gradients, held, t, squares, products, spare=spare)
        after = replace(released, gradients=steps, noise_variance=None)
        return after, put("m", held) | put("count", {"": torch.tensor(t)})

    def _steps(
        self, gradients: dict[str, Tensor], held: dict[str, Tensor], t: int, squares: float, products: float, *, spare: bool
    ) -> dict[str, Tensor]:
        """From M before its correction, ‖M‖² and Mᵀg."""
        if t <= self.warmup:
            return {name: torch.zeros_like(g) for name, g in gradients.items()}
        corrected = 1 - self.beta**t if self.bias_correction else 1.0
        squares, products = squares / corrected**2, products / corrected
        if self.direction == "momentum":
            return {name: m / (corrected * (self.rho + squares)) for name, m in held.items()}
        along = products / (self.rho**2 + self.rho * squares) / corrected
        return {name: _combined(g, held[name], self.rho, along, spare) for name, g in gradients.items()}


def _combined(g: Tensor, m: Tensor, rho: float, along: float, spare: bool) -> Tensor:
    """g / ρ − along · M in one walk over memory, piece by piece."""
    found = g if spare and g.is_contiguous() else torch.empty_like(g, memory_format=torch.contiguous_format)
    for to, new, mean in _pieces(found, g, m):
        torch.div(new, rho, out=to).sub_(mean, alpha=along)
    return found


def _moments(old: Tensor | None, g: Tensor, weight: float, spare: bool) -> tuple[Tensor, float, float]:
    """M = old + weight (g − old), from 0 at first, with ‖M‖² and Mᵀg: one walk over memory, piece by piece."""
    m = old if spare and old is not None else torch.empty_like(g, memory_format=torch.contiguous_format)
    squares, products = [], []
    for to, before, new in _pieces(m, g if old is None else old, g):
        if old is None:
            torch.mul(new, weight, out=to)
        else:
            torch.lerp(before, new, weight, out=to)
        squares.append(torch.dot(to, to))
        products.append(torch.dot(to, new))
    square, product = (float(torch.stack(x).sum(dtype=torch.float64)) if x else 0.0 for x in (squares, products))
    return m, square, product


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same pieces of tensors of one shape, each small enough for one core: waking others would cost more."""
    yield from zip(*(x.flatten().split(_PIECE) for x in tensors), strict=True)
