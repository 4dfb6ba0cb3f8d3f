"""Post-processing steps that give the update of the parameters, and an average of the weights.

DP-AdamBC is Adam whose second moment is freed of the noise's variance (Tang, Shpilevskiy and
Lécuyer, AAAI 2024).

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   φ ← β₂ φ + (1 − β₂) Φ
    step = m̂ / √max(v̂ − φ̂, γ'),     m̂ = m / (1 − β₁^t),  v̂ = v / (1 − β₂^t),  φ̂ = φ / (1 − β₂^t)

Φ is the variance of the noise in each entry of g. Averaging it with the weights of g² keeps it
exact where it changes: behind a filter that warms up, or where a metric is rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.postprocess.pipeline import PostProcess, State, get_tensor, state_entries
from dpkfc.privacy.mechanism import Released

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
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas of AdamBC must be two numbers in [0, 1), got {self.betas}")
        if isinstance(self.floor, str):
            if self.floor != "auto":
                raise ValueError(
                    f"floor of AdamBC must be a positive number or 'auto', got {self.floor!r}"
                )
        elif not (self.floor > 0 and math.isfinite(self.floor)):
            raise ValueError(
                f"floor of AdamBC must be positive and finite, got {self.floor}: v less the noise"
                " can be negative; use the size of the squared signal, or 'auto'"
            )
        check_positive("resolution of AdamBC", self.resolution)

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        description = {"name": "AdamBC", "betas": list(self.betas), "floor": self.floor}
        if self.floor == "auto":
            description["resolution"] = self.resolution
        return description

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """Return the step; note `adam_bc/floor_fraction` gives the entries at the floor."""
        beta1, beta2 = self.betas
        t = _count(state)
        steps = {}
        new_state = state_entries("count", {"": torch.tensor(t)})
        at_floor = []
        entries = 0
        for name, g in released.gradients.items():
            noise = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
            m = _mean(get_tensor(state, "m", name), g, beta1)
            v = _mean_square(get_tensor(state, "v", name), g, beta2)
            phi = _mean(get_tensor(state, "phi", name), noise, beta2)
            new_state |= {f"m/{name}": m, f"v/{name}": v, f"phi/{name}": phi}
            signal = (v - phi).div_(1 - beta2**t)
            floor = self._floor(phi / (1 - beta2**t), t)
            root = torch.maximum(signal, floor).sqrt_()
            steps[name] = (m / (1 - beta1**t)).div_(root)
            at_floor.append((signal <= floor).sum())
            entries += g.numel()
        fraction = int(torch.stack(at_floor).sum()) / max(1, entries)
        notes = {**released.notes, "adam_bc/floor_fraction": fraction}
        return replace(released, gradients=steps, noise_variance=None, notes=notes), new_state

    def _floor(self, phi: Tensor, t: int) -> Tensor:
        """Return γ' for the variance φ̂ of the noise after t steps."""
        if isinstance(self.floor, str):
            beta = self.betas[1]
            relative = 2 * (1 - beta) / (1 + beta) * (1 + beta**t) / (1 - beta**t)
            resolved = self.resolution * math.sqrt(relative) * phi
            return resolved.clamp(min=_SMALLEST_FLOOR)
        return torch.full_like(phi, self.floor)


def _count(state: State) -> int:
    """Return the number of this step, from 1."""
    return 1 + int(state.get("count/", torch.zeros(())))


def _mean(old: Tensor | None, new: Tensor, beta: float) -> Tensor:
    """Return β old + (1 − β) new, from 0."""
    if old is None:
        return (1 - beta) * new
    return torch.lerp(old, new, 1 - beta)


def _mean_square(old: Tensor | None, g: Tensor, beta: float) -> Tensor:
    """Return β old + (1 − β) g², from 0."""
    if old is None:
        return g.square().mul_(1 - beta)
    return (beta * old).addcmul_(g, g, value=1 - beta)


# --------------------------------------------------------------------------------------------------
# SOFIM: a step along the inverse of ρI + M Mᵀ, with M a moving average of releases. It is the
# server step of DP-FedSOFIM. By Sherman and Morrison, over all parameters as one vector,
#
#     direction="gradient"    (ρI + MMᵀ)⁻¹ g = g / ρ − M (Mᵀg) / (ρ² + ρ ‖M‖²)        the paper
#     direction="momentum"    (ρI + MMᵀ)⁻¹ M = M / (ρ + ‖M‖²)                        its later code
#
# "momentum" is momentum with a step that depends on its norm; it uses no curvature. While ‖M‖² is
# far below ρ both are plain steps with a learning rate 1 / ρ times as large. Compare them with such
# steps.

DIRECTIONS = ("gradient", "momentum")
_CHUNK = 1 << 15  # numbers that fit the cache of one core


@dataclass(frozen=True)
class SOFIM(PostProcess):
    """The step of DP-FedSOFIM, to be taken by `torch.optim.SGD(lr)`.

    Attributes:
        rho: ρ > 0.
        beta: M ← β M + (1 − β) g, β in [0, 1).
        direction: the vector that the inverse multiplies: "gradient" or "momentum".
        bias_correction: M is divided by 1 − β^t.
        warmup: first steps in which M is built and nothing moves. Each is a release, and charged.

    Raises:
        ValueError: a value outside its range, by name.
    """

    rho: float = 0.5
    beta: float = 0.9
    direction: str = "gradient"
    bias_correction: bool = False
    warmup: int = 0

    is_optimizer_step = True

    def __post_init__(self) -> None:
        check_positive("rho of SOFIM", self.rho)
        check_in_range("beta of SOFIM", self.beta, "[0, 1)")
        check_one_of("direction of SOFIM", self.direction, DIRECTIONS)
        check_integer("warmup of SOFIM", self.warmup, 0)

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {"name": "SOFIM", **asdict(self)}

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """Return the step, zero during the warm-up."""
        return self._apply(released, state, in_place=False)

    def apply_in_place(
        self, released: Released, state: State
    ) -> tuple[Released, dict[str, Tensor]]:
        """Return the step in the memory of the arguments, because new memory costs more time."""
        return self._apply(released, state, in_place=True)

    def _apply(
        self, released: Released, state: State, *, in_place: bool
    ) -> tuple[Released, dict[str, Tensor]]:
        t = _count(state)
        means = {}
        squared_norm = 0.0
        product = 0.0
        for name, g in released.gradients.items():
            old = get_tensor(state, "m", name)
            means[name], square, inner = _update_mean(old, g, 1 - self.beta, in_place)
            squared_norm += square
            product += inner
        steps = self._steps(released.gradients, means, t, squared_norm, product, in_place)
        update = replace(released, gradients=steps, noise_variance=None)
        count = state_entries("count", {"": torch.tensor(t)})
        return update, state_entries("m", means) | count

    def _steps(
        self,
        gradients: dict[str, Tensor],
        means: dict[str, Tensor],
        t: int,
        squared_norm: float,
        product: float,
        in_place: bool,
    ) -> dict[str, Tensor]:
        """Return the steps from the uncorrected M, ‖M‖² and Mᵀg."""
        if t <= self.warmup:
            return {name: torch.zeros_like(g) for name, g in gradients.items()}
        correction = 1 - self.beta**t if self.bias_correction else 1.0
        squared_norm /= correction**2
        product /= correction
        if self.direction == "momentum":
            divisor = correction * (self.rho + squared_norm)
            return {name: mean / divisor for name, mean in means.items()}
        divisor = self.rho**2 + self.rho * squared_norm
        factor = product / divisor / correction
        return {
            name: _combine(g, means[name], self.rho, factor, in_place)
            for name, g in gradients.items()
        }


def _combine(g: Tensor, mean: Tensor, rho: float, factor: float, in_place: bool) -> Tensor:
    """Return g / ρ − factor · M in one pass over memory."""
    if in_place and g.is_contiguous():
        result = g
    else:
        result = torch.empty_like(g, memory_format=torch.contiguous_format)
    for result_part, g_part, mean_part in _chunks(result, g, mean):
        torch.div(g_part, rho, out=result_part).sub_(mean_part, alpha=factor)
    return result


def _update_mean(
    old: Tensor | None, g: Tensor, weight: float, in_place: bool
) -> tuple[Tensor, float, float]:
    """Return M = old + weight (g − old), ‖M‖² and Mᵀg in one pass; old is 0 at first."""
    if in_place and old is not None:
        mean = old
    else:
        mean = torch.empty_like(g, memory_format=torch.contiguous_format)
    squares = []
    products = []
    start = g if old is None else old
    for mean_part, old_part, g_part in _chunks(mean, start, g):
        if old is None:
            torch.mul(g_part, weight, out=mean_part)
        else:
            torch.lerp(old_part, g_part, weight, out=mean_part)
        squares.append(torch.dot(mean_part, mean_part))
        products.append(torch.dot(mean_part, g_part))
    return mean, _sum(squares), _sum(products)


def _sum(values: list[Tensor]) -> float:
    if not values:
        return 0.0
    return float(torch.stack(values).sum(dtype=torch.float64))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunks of tensors of one shape, each small enough for one core."""
    chunks = [x.flatten().split(_CHUNK) for x in tensors]
    yield from zip(*chunks, strict=True)


# --------------------------------------------------------------------------------------------------
# An exponential moving average of the weights, for evaluation only (De et al. 2022).
#
#     μ_t = min(μ, (1 + t) / (10 + t)),    average ← μ_t average + (1 − μ_t) θ,    t updates so far
#
# It is a function of released weights: it costs no privacy and does not change the training.


@dataclass(frozen=True)
class WeightEMA:
    """Settings of the average.

    Attributes:
        decay: μ in [0, 1).
        warmup: use μ_t in place of μ, so that the first updates forget faster. Without a warm-up
            the initial weights count until 1 / (1 − μ) steps have passed.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        check_in_range("decay of WeightEMA", self.decay, "[0, 1)")

    def decay_at(self, update: int) -> float:
        """Return μ_t of an update, counted from 0."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + update) / (10 + update))

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {"name": "WeightEMA", **asdict(self)}


def check_fields(preconditioner: Any, weight_average: Any) -> None:
    """Refuse a post-processing step in another field, and a value that is no weight average.

    Raises:
        ValueError: naming the right field.
    """
    if isinstance(preconditioner, PostProcess):
        raise ValueError(
            f"{type(preconditioner).__name__} acts on releases, behind the noise, and is no"
            " preconditioner: give it as postprocess=(...,)"
        )
    if weight_average is not None and not isinstance(weight_average, WeightEMA):
        raise ValueError(
            f"weight_average must be WeightEMA(...) or None, got {type(weight_average).__name__};"
            " averages of gradients belong into postprocess="
        )


class WeightAverage:
    """The average of one run, in float32 at least; without settings it does nothing.

    Args:
        settings: None for no average.
        parameters: trainable parameters, by name; frozen ones do not move.
    """

    def __init__(self, settings: WeightEMA | None, parameters: Mapping[str, Tensor]) -> None:
        self._settings = settings
        self._parameters = dict(parameters)
        self._updates = 0
        self._average: dict[str, Tensor] | None = None
        self._trained_weights: dict[str, Tensor] | None = None

    def start(self) -> None:
        """Start from the weights that the first step changes.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        self.check_swapped_out()
        if self._settings is not None and self._average is None:
            self._average = {name: _widen(p).clone() for name, p in self._parameters.items()}

    def update(self) -> None:
        """Average the parameters after a step."""
        if self._settings is None or self._average is None:
            return
        weight = 1 - self._settings.decay_at(self._updates)
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._average[name].lerp_(_widen(p), weight)
        self._updates += 1

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Put the averaged weights into the model, and restore the trained weights to the bit.

        Raises:
            RuntimeError: there is no average, or it is in the model already.
        """
        if self._settings is None:
            raise RuntimeError(
                "no average of the weights is kept: use PrivacyConfig(weight_average=WeightEMA())"
            )
        self.check_swapped_out()
        # Before the first step the average is the weights themselves.
        average = self._average or {}
        self._trained_weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(average)
            yield
        finally:
            self._write(self._trained_weights)
            self._trained_weights = None

    def check_swapped_out(self) -> None:
        """Refuse to go on while the averaged weights are in the model.

        A step would be lost, and a checkpoint would hold the wrong weights.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        if self._trained_weights is not None:
            raise RuntimeError(
                "the averaged weights are in the model: leave `with session.averaged_weights()`"
                " first"
            )

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average and the number of updates; nothing before the first."""
        self.check_swapped_out()
        if not self._average:
            return {}
        state = {f"average.{name}": value for name, value in self._average.items()}
        state["updates"] = torch.tensor(self._updates)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; an empty one starts the average at the next step."""
        self.check_swapped_out()
        average = {}
        for name, value in state.items():
            if name != "updates":
                average[name.removeprefix("average.")] = value.clone()
        self._average = average or None
        self._updates = int(state["updates"]) if average else 0


def _widen(p: Tensor) -> Tensor:
    """Return a parameter in a type that holds small changes."""
    if p.dtype == torch.float64:
        return p.detach()
    return p.detach().float()
