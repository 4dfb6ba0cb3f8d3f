"""DP-AdamBC: Adam whose second moment is freed of the noise's variance (Tang, Shpilevskiy and Lécuyer, AAAI 2024).

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   φ ← β₂ φ + (1 − β₂) Φ
    step = m̂ / √max(v̂ − φ̂, γ'),     m̂ = m / (1 − β₁^t),  v̂ = v / (1 − β₂^t),  φ̂ = φ / (1 − β₂^t)

Φ is the variance of the noise in each entry of g. It is averaged with the weights of g², which changes nothing while it is
constant and stays exact where it is not: behind a filter that warms up, or a read-out whose metric was rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.postprocess.protocol import State, entry, put
from dpkfc.privacy.mechanism import Released

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


# --------------------------------------------------------------------------------------------------
# SOFIM: a step along the inverse of ρI + M Mᵀ, with M a moving average of releases (DP-FedSOFIM's
# server step).
#
# By Sherman and Morrison, over all parameters as one vector,
#
#     direction="gradient"    (ρI + MMᵀ)⁻¹ g = g / ρ − M (Mᵀg) / (ρ² + ρ ‖M‖²)        the paper
#     direction="momentum"    (ρI + MMᵀ)⁻¹ M = M / (ρ + ‖M‖²)                        its later code
#
# The second one is momentum with a step that depends on its norm: no curvature is in it. While ‖M‖²
# is far below ρ both are plain steps with a learning rate 1 / ρ times as large, which is what they
# have to be compared with.

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


# --------------------------------------------------------------------------------------------------
# An exponential moving average of the weights, for evaluation only (De et al. 2022).
#
#     μ_t = min(μ, (1 + t) / (10 + t)),    average ← μ_t average + (1 − μ_t) θ,    t = 0, 1, ... counts the updates
#
# It is a function of released weights, costs no privacy and changes nothing of the training.


@dataclass(frozen=True)
class WeightEMA:
    """Settings of the average.

    Attributes:
        decay: μ in [0, 1).
        warmup: the first updates forget faster, by (1 + t) / (10 + t); without it the initial weights count until 1 / (1 − μ)
            steps have passed.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay of WeightEMA must lie in [0, 1), got {self.decay}")

    def decay_at(self, update: int) -> float:
        """μ_t of an update, counted from 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {"name": "WeightEMA", "decay": self.decay, "warmup": self.warmup}


class WeightAverage:
    """The average of one run, in float32 at least; without settings it does nothing.

    Args:
        settings: None for no average.
        parameters: trainable ones, by name; frozen ones do not move.
    """

    def __init__(self, settings: WeightEMA | None, parameters: Mapping[str, Tensor]) -> None:
        self._settings, self._parameters, self._updates = settings, dict(parameters), 0
        self._average: dict[str, Tensor] | None = None
        self._own: dict[str, Tensor] | None = None

    def before_step(self) -> None:
        """Start from the weights that the first step changes.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        self.check_own_weights()
        if self._settings is not None and self._average is None:
            self._average = {name: _wide(p).clone() for name, p in self._parameters.items()}

    def update(self) -> None:
        """Take in the parameters after a step."""
        if self._settings is None or self._average is None:
            return
        share = 1 - self._settings.decay_at(self._updates)
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._average[name].lerp_(_wide(p), share)
        self._updates += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The averaged weights in the model; afterwards it has its own back, to the bit.

        Raises:
            RuntimeError: no average is kept, or it is in the model already.
        """
        if self._settings is None:
            raise RuntimeError("no average of the weights is kept: use PrivacyConfig(weight_average=WeightEMA())")
        self.check_own_weights()
        average = self._average or {}  # before the first step the average is the weights themselves
        self._own = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(average)
            yield
        finally:
            self._write(self._own)
            self._own = None

    def check_own_weights(self) -> None:
        """Raise while the averaged weights are in the model.

        Raises:
            RuntimeError: they are; a step would be lost, and a checkpoint would hold the wrong weights.
        """
        if self._own is not None:
            raise RuntimeError("the averaged weights are in the model: leave `with session.averaged_weights()` first")

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average and the number of updates; empty before the first."""
        self.check_own_weights()
        average = self._average or {}
        updates = {"updates": torch.tensor(self._updates)} if average else {}
        return {f"average.{name}": x for name, x in average.items()} | updates

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; from an empty one the average starts anew at the next step."""
        self.check_own_weights()
        found = {name.removeprefix("average."): x.clone() for name, x in state.items() if name != "updates"}
        self._average = found or None
        self._updates = int(state["updates"]) if found else 0


def _wide(p: Tensor) -> Tensor:
    """A parameter in a type that holds small changes."""
    return p.detach() if p.dtype == torch.float64 else p.detach().float()
