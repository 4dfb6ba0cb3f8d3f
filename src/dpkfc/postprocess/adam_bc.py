"""DP-AdamBC: Adam whose second moment is freed of the noise's variance.

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   φ ← β₂ φ + (1 − β₂) Φ
    step = m̂ / √max(v̂ − φ̂, γ'),     m̂ = m / (1 − β₁^t),  v̂ = v / (1 − β₂^t),  φ̂ = φ / (1 − β₂^t)

Φ is the variance of the noise in each entry of g. Averaging it with the weights of g² keeps it
exact where it changes: behind a filter that warms up, or where a metric is rebuilt.

Source: Tang, Shpilevskiy and Lécuyer (AAAI 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import check_positive, is_number, show_value
from dpkfc.postprocess.protocol import PostProcess, State, get_tensor, number_of_step, state_entries
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import Tensors

_SMALLEST_FLOOR = 1e-16  # 1e-8 of Adam, squared


@dataclass(frozen=True)
class AdamBC(PostProcess):
    """The step of DP-AdamBC, to be taken by `torch.optim.SGD(lr)`; the floor lies inside the root.

    v̂ estimates φ̂ with the relative standard deviation r_t = √(2 (1 − β₂)(1 + β₂^t) / ((1 + β₂)(1
    − β₂^t))), which falls to 3 % for β₂ = 0.999. A second moment below that fraction of φ̂ cannot
    be told from noise. With a much lower floor, about half of the coordinates sit on the floor at
    any time, and their steps are the noise of m̂ over √γ'.

    Attributes:
        betas: β₁ and β₂.
        floor: γ' > 0, in units of v; "auto" means resolution · r_t · φ̂.
        resolution: for floor="auto", > 0; 1 to 3 is sensible.

    Raises:
        ValueError: a value outside its range, by name.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    floor: float | str = "auto"
    resolution: float = 2.0

    is_optimizer_step = True
    needs_variance = True

    def __post_init__(self) -> None:
        are_weights = all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        if len(self.betas) != 2 or not are_weights:
            raise ValueError(
                f"betas of AdamBC must be two numbers in [0, 1), got {show_value(self.betas)}"
            )
        if isinstance(self.floor, str):
            if self.floor != "auto":
                raise ValueError(
                    f"floor of AdamBC must be a positive number or 'auto', got {self.floor!r}"
                )
        elif not (is_number(self.floor) and 0 < self.floor < math.inf):
            raise ValueError(
                f"floor of AdamBC must be positive and finite, got {show_value(self.floor, 20)}: v"
                " less the noise can be negative; use the size of the squared signal, or 'auto'"
            )
        check_positive("resolution of AdamBC", self.resolution)

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        description = {"name": "AdamBC", "betas": list(self.betas), "floor": self.floor}
        if self.floor == "auto":
            description["resolution"] = self.resolution
        return description

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the step; note `adam_bc/floor_fraction` gives the entries at the floor."""
        beta1, beta2 = self.betas
        t = number_of_step(state)
        bias1 = 1 - beta1**t
        bias2 = 1 - beta2**t
        steps = {}
        new_state = state_entries("count", {"": torch.tensor(t)})
        at_floor = []
        entries = 0
        for name, g in released.gradients.items():
            noise = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
            m = _mean(get_tensor(state, "m", name), g, beta1)
            v = _mean_square(get_tensor(state, "v", name), g, beta2)
            phi = _mean(get_tensor(state, "phi", name), noise, beta2)
            new_state[f"m/{name}"] = m
            new_state[f"v/{name}"] = v
            new_state[f"phi/{name}"] = phi
            signal = v - phi
            signal.div_(bias2)
            floor = self._floor(phi / bias2, t)
            root = torch.maximum(signal, floor)
            root.sqrt_()
            step = m / bias1
            step.div_(root)
            steps[name] = step
            is_low = signal <= floor
            at_floor.append(is_low.sum())
            entries += g.numel()
        fraction = int(torch.stack(at_floor).sum()) / max(1, entries)
        notes = {**released.notes, "adam_bc/floor_fraction": fraction}
        return replace(released, gradients=steps, noise_variance=None, notes=notes), new_state

    def _floor(self, phi: Tensor, t: int) -> Tensor:
        """Return γ' for the variance φ̂ of the noise after t steps."""
        if isinstance(self.floor, str):
            beta = self.betas[1]
            power = beta**t
            relative = 2 * (1 - beta) / (1 + beta) * (1 + power) / (1 - power)
            factor = self.resolution * math.sqrt(relative)
            resolved = factor * phi
            return resolved.clamp(min=_SMALLEST_FLOOR)
        return torch.full_like(phi, self.floor)


def _mean(old: Tensor | None, new: Tensor, beta: float) -> Tensor:
    """Return β old + (1 − β) new, from 0."""
    if old is None:
        return (1 - beta) * new
    return torch.lerp(old, new, 1 - beta)


def _mean_square(old: Tensor | None, g: Tensor, beta: float) -> Tensor:
    """Return β old + (1 − β) g², from 0."""
    if old is None:
        square = g.square()
        return square.mul_(1 - beta)
    decayed = beta * old
    return decayed.addcmul_(g, g, value=1 - beta)
