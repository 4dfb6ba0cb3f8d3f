"""SOFIM: a step along the inverse of ρI + M Mᵀ, with M a moving average of releases.

It is the server step of DP-FedSOFIM. By Sherman and Morrison, over all parameters as one vector,

    direction="gradient"    (ρI + MMᵀ)⁻¹ g = g / ρ − M (Mᵀg) / (ρ² + ρ ‖M‖²)        the paper
    direction="momentum"    (ρI + MMᵀ)⁻¹ M = M / (ρ + ‖M‖²)                        its later code

"momentum" is momentum with a step that depends on its norm; it uses no curvature. While ‖M‖² is far
below ρ both are plain steps with a learning rate 1 / ρ times as large. Compare them with such
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.postprocess.protocol import PostProcess, State, get_tensor, number_of_step, state_entries
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import Tensors

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

    def apply_in_place(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the step in the memory of the arguments, because new memory costs more time."""
        return self.apply(released, state, in_place=True)

    def apply(
        self, released: Released, state: State, *, in_place: bool = False
    ) -> tuple[Released, Tensors]:
        """Return the step, zero during the warm-up."""
        t = number_of_step(state)
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
        gradients: Tensors,
        means: Tensors,
        t: int,
        squared_norm: float,
        product: float,
        in_place: bool,
    ) -> Tensors:
        """Return the steps from the uncorrected M, ‖M‖² and Mᵀg."""
        if t <= self.warmup:
            return {name: torch.zeros_like(g) for name, g in gradients.items()}
        correction = 1.0
        if self.bias_correction:
            correction -= self.beta**t
        squared_norm /= correction**2
        product /= correction
        if self.direction == "momentum":
            divisor = correction * (self.rho + squared_norm)
            return {name: mean / divisor for name, mean in means.items()}
        divisor = self.rho**2 + self.rho * squared_norm
        factor = product / divisor / correction
        steps = {}
        for name, g in gradients.items():
            steps[name] = _combine(g, means[name], self.rho, factor, in_place)
        return steps


def _combine(g: Tensor, mean: Tensor, rho: float, factor: float, in_place: bool) -> Tensor:
    """Return g / ρ − factor · M in one pass over memory."""
    if in_place and g.is_contiguous():
        result = g
    else:
        result = torch.empty_like(g, memory_format=torch.contiguous_format)
    for result_part, g_part, mean_part in _chunks(result, g, mean):
        torch.div(g_part, rho, out=result_part)
        result_part.sub_(mean_part, alpha=factor)
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
    total = torch.stack(values).sum(dtype=torch.float64)
    return float(total)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunks of tensors of one shape, each small enough for one core."""
    chunks = [x.flatten().split(_CHUNK) for x in tensors]
    yield from zip(*chunks, strict=True)
