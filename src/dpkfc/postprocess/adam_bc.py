"""DP-AdamBC: Adam whose second moment is freed of the noise's variance (Tang, Shpilevskiy and Lécuyer, AAAI 2024).

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   φ ← β₂ φ + (1 − β₂) Φ
    step = m̂ / √max(v̂ − φ̂, γ'),     m̂ = m / (1 − β₁^t),  v̂ = v / (1 − β₂^t),  φ̂ = φ / (1 − β₂^t)

Φ is the variance of the noise in each entry of g. It is averaged with the weights of g², which changes nothing while it is
constant and stays exact where it is not: behind a filter that warms up, or a read-out whose metric was rebuilt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.postprocess.base import State, entry, put
from dpkfc.privacy.mechanism import Released

__all__ = ["AdamBC"]

_LEAST = 1e-16  # what floor="auto" becomes without noise: Adam's own 1e-8, squared


@dataclass(frozen=True)
class AdamBC:
    """The step of DP-AdamBC, to be taken by `torch.optim.SGD(lr)`; the floor lies inside the root and on v.

    v̂ estimates φ̂ with a relative standard deviation r_t = √(2 (1 − β₂)(1 + β₂^t) / ((1 + β₂)(1 − β₂^t))), which falls to 3 % for
    β₂ = 0.999. Signals whose second moment is below that share of φ̂ cannot be told from noise, and with a floor far below it
    about half of the coordinates sit on the floor at any time and change places: their steps are the noise of m̂ over √γ'.

    Attributes:
        betas: β₁ and β₂.
        floor: γ' > 0, in units of v; or "auto", `resolution` times what v̂ resolves, resolution · r_t · φ̂.
        resolution: for floor="auto", > 0; 1 to 3 is sensible.

    Raises:
        ValueError: a value outside its range, by name.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    floor: float | str = "auto"
    resolution: float = 2.0
    smooths = False
    adaptive = True
    needs_variance = True
    momentum_allowed = False

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas of AdamBC must be two numbers in [0, 1), got {self.betas}")
        if isinstance(self.floor, str) and self.floor != "auto":
            raise ValueError(f"floor of AdamBC must be a positive number or 'auto', got {self.floor!r}")
        if not isinstance(self.floor, str) and not (self.floor > 0 and math.isfinite(self.floor)):
            raise ValueError(
                f"floor of AdamBC must be positive and finite, got {self.floor}: it bounds what is left of v after the noise is "
                "taken off, which can be negative; its size is that of the second moment of the signal, or use 'auto'"
            )
        if not (self.resolution > 0 and math.isfinite(self.resolution)):
            raise ValueError(f"resolution of AdamBC must be positive and finite, got {self.resolution}")

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        said = {"name": "AdamBC", "betas": list(self.betas), "floor": self.floor}
        return {**said, "resolution": self.resolution} if self.floor == "auto" else said

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The step; its note `adam_bc/floor_fraction` is the share of entries at the floor, in [0, 1]."""
        beta1, beta2 = self.betas
        t = 1 + int(state.get("count/", torch.zeros(())))
        steps, kept, low = {}, put("count", {"": torch.tensor(t)}), []
        for name, g in released.gradients.items():
            noise = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
            m = _mean(entry(state, "m", name), g, beta1)
            v = _mean_square(entry(state, "v", name), g, beta2)
            phi = _mean(entry(state, "phi", name), noise, beta2)
            kept |= put("m", {name: m}) | put("v", {name: v}) | put("phi", {name: phi})
            signal, floor = (v - phi).div_(1 - beta2**t), self._floor(phi / (1 - beta2**t), t)
            low.append((signal <= floor).sum())
            steps[name] = (m / (1 - beta1**t)).div_(torch.maximum(signal, floor).sqrt_())
        share = int(torch.stack(low).sum()) / max(1, sum(g.numel() for g in steps.values()))
        notes = {**released.notes, "adam_bc/floor_fraction": share}
        return replace(released, gradients=steps, noise_variance=None, notes=notes), kept

    def _floor(self, phi: Tensor, t: int) -> Tensor:
        """γ', for the variance φ̂ of the noise after t steps."""
        if isinstance(self.floor, str):
            beta = self.betas[1]
            relative = 2 * (1 - beta) / (1 + beta) * (1 + beta**t) / (1 - beta**t)
            return (self.resolution * math.sqrt(relative) * phi).clamp(min=_LEAST)
        return torch.full_like(phi, self.floor)


def _mean(old: Tensor | None, new: Tensor, beta: float) -> Tensor:
    """β old + (1 − β) new, from 0."""
    return (1 - beta) * new if old is None else torch.lerp(old, new, 1 - beta)


def _mean_square(old: Tensor | None, g: Tensor, beta: float) -> Tensor:
    """β old + (1 − β) g², from 0."""
    return g.square().mul_(1 - beta) if old is None else (beta * old).addcmul_(g, g, value=1 - beta)
