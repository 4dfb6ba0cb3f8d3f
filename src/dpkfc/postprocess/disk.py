"""DiSK: a simplified Kalman filter of the gradient (Zhang et al., ICLR 2025, Algorithm 3).

With d the last change of the parameters and κ the weight of the new release,

    c = (1 − κ) / (κ γ),
    g_i = c ∇ℓ_i(θ + γ d) + (1 − c) ∇ℓ_i(θ)          combined BEFORE the clip: one clip, one sensitivity, one release
    ĝ ← (1 − κ) ĝ + κ (Σ clip(g_i) + noise) / B

since κ g = κ ∇ℓ(θ) + (1 − κ) [∇ℓ(θ + γ d) − ∇ℓ(θ)] / γ: what the filter remembers is moved along by the Hessian times d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkfc.postprocess.base import AT_PARAMETERS, Evaluation, State
from dpkfc.postprocess.moving_average import EMA, check_averaging
from dpkfc.privacy.mechanism import Released

__all__ = ["MODES", "DiSK", "kalman_gain"]

MODES = ("two_point", "look_ahead", "storm")
_GAMMA = 0.5


@dataclass(frozen=True)
class DiSK:
    """The filter of Algorithm 3. Its guarantee is that of DP-SGD, whatever c is: the combination of each example is clipped.

    Both gradients of an example see the same random numbers and the same augmentation. The first step has no d and takes θ.

    Attributes:
        kappa: κ, the weight of the NEW release, in (0, 1]. The smaller, the smoother: of the noise's variance κ / (2 − κ)
            remains. 1 is DP-SGD to the bit.
        gamma: γ, where the second gradient is taken, in units of the last change of the parameters; not 0. None takes what the
            mode says, 0.5 for "two_point".
        mode: "two_point" (Algorithm 3, two passes a step), "look_ahead" (γ = (1 − κ) / κ, hence c = 1: one pass, at θ + γ d) or
            "storm" (γ = −1: θ and the parameters of the step before).
        init: how the average starts, see `EMA`; with "first", the default, every step has the weights for which c is right.
        momentum_allowed: momentum behind the filter is wanted.

    Raises:
        ValueError: a value outside its range, by name.
    """

    kappa: float = 0.7
    gamma: float | None = None
    mode: str = "two_point"
    init: str = "first"
    momentum_allowed: bool = False
    smooths = True
    adaptive = False
    needs_variance = False

    def __post_init__(self) -> None:
        check_averaging("DiSK", self.kappa, self.init)
        if self.mode == "ema":
            raise ValueError("an average of gradients at one point is not DiSK: use EMA(kappa=...) in place of mode='ema'")
        if self.mode not in MODES:
            raise ValueError(f"mode of DiSK must be one of {', '.join(MODES)}; got {self.mode!r}")
        if self.gamma is not None and not (math.isfinite(self.gamma) and self.gamma != 0):
            raise ValueError(
                f"gamma of DiSK must be finite and not 0, got {self.gamma}: at 0 both points are the same; for a single point "
                "use mode='look_ahead', for no second point EMA(kappa=...)"
            )
        if self.gamma is not None and self.mode != "two_point" and not math.isclose(self.gamma, self._step):
            raise ValueError(
                f"mode={self.mode!r} of DiSK means gamma={self._step:.6g}, got {self.gamma}; leave gamma out or use "
                "mode='two_point'"
            )

    @property
    def _step(self) -> float:
        """γ in force."""
        if self.mode == "look_ahead":
            return (1 - self.kappa) / self.kappa
        return -1.0 if self.mode == "storm" else (_GAMMA if self.gamma is None else self.gamma)

    @property
    def weight(self) -> float:
        """c, the weight of the gradient at θ + γ d."""
        if self.kappa == 1:
            return 0.0
        c = (1 - self.kappa) / (self.kappa * self._step)
        return 1.0 if math.isclose(c, 1.0, rel_tol=1e-12) else c

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The points at which gradients are taken: one of them where c is 0 or 1."""
        if self.kappa == 1:
            return AT_PARAMETERS
        ahead = Evaluation(self._step, self.weight)
        return (ahead,) if self.weight == 1 else (ahead, Evaluation(0.0, 1 - self.weight))

    def noise_gain(self, step: int) -> float:
        """Variance of the noise at a step (from 0) over that of a release: noise enters once, and is averaged."""
        return self._average.noise_gain(step)

    @property
    def _average(self) -> EMA:
        return EMA(self.kappa, self.init)

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {"name": "DiSK", "kappa": self.kappa, "gamma": self._step, "mode": self.mode, "init": self.init}

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The average of the combined gradients with the variance of its noise."""
        return self._average.apply(released, state)


def kalman_gain(ratio: float) -> float:
    """κ at which a scalar Kalman filter settles: the root of κ² / (1 − κ) = r.

    Args:
        ratio: r > 0, variance of the gradient's change from step to step over the variance of a release.

    Raises:
        ValueError: a ratio that is not positive and finite.
    """
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be positive and finite, got {ratio}")
    return (math.sqrt(ratio * ratio + 4 * ratio) - ratio) / 2
