"""DiSK: a simplified Kalman filter of the gradient (Zhang et al., ICLR 2025, Algorithm 3).

With d the last change of the parameters and κ the weight of the new release,

    c = (1 − κ) / (κ γ),
    g_i = c ∇ℓ_i(θ + γ d) + (1 − c) ∇ℓ_i(θ)       combined BEFORE the clip: one clip, one release
    ĝ ← (1 − κ) ĝ + κ (Σ clip(g_i) + noise) / B

since κ g = κ ∇ℓ(θ) + (1 − κ) [∇ℓ(θ + γ d) − ∇ℓ(θ)] / γ: the Hessian times d moves the stored
average along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dpkfc._checks import check_one_of, is_number, show_value
from dpkfc.postprocess.ema import EMA, check_averaging
from dpkfc.postprocess.protocol import AT_PARAMETERS, LookaheadPoint, PostProcess, State
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import Tensors

MODES = ("two_point", "look_ahead", "storm")
_DEFAULT_GAMMA = 0.5


@dataclass(frozen=True)
class DiSK(PostProcess):
    """Filters by Algorithm 3, with the guarantee of DP-SGD.

    Each example's combination is clipped.

    Both gradients of an example see the same random numbers and the same augmentation. The first
    step has no d and takes its gradients at θ.

    Attributes:
        kappa: κ, the weight of the NEW release, in (0, 1]. The smaller, the smoother: κ / (2 − κ)
            of the noise's variance remains. 1 is DP-SGD to the bit.
        gamma: γ ≠ 0, the place of the second gradient in units of the last change of the
            parameters. None takes the value of the mode, 0.5 for "two_point".
        mode: "two_point" (Algorithm 3, two passes a step), "look_ahead" (γ = (1 − κ) / κ, hence c =
            1: one pass, at θ + γ d) or "storm" (γ = −1: θ and the parameters of the step before).
        init: the start of the average, see `EMA`. With "first" every step has the weights of c.
        momentum_allowed: the caller wants momentum behind the filter.

    Raises:
        ValueError: a value outside its range, by name.
    """

    kappa: float = 0.7
    gamma: float | None = None
    mode: str = "two_point"
    init: str = "first"
    momentum_allowed: bool = False

    is_filter = True

    def __post_init__(self) -> None:
        check_averaging("DiSK", self.kappa, self.init)
        if self.mode == "ema":
            raise ValueError(
                "an average of gradients at one point is not DiSK: use EMA(kappa=...) in place of"
                " mode='ema'"
            )
        check_one_of("mode of DiSK", self.mode, MODES)
        if self.gamma is None:
            return
        if not (is_number(self.gamma) and math.isfinite(self.gamma) and self.gamma != 0):
            raise ValueError(
                f"gamma of DiSK must be finite and not 0, got {show_value(self.gamma, 20)}: at 0"
                " both points are the same; use mode='look_ahead' or EMA(kappa=...)"
            )
        if self.mode != "two_point" and not math.isclose(self.gamma, self._lookahead):
            raise ValueError(
                f"mode={self.mode!r} of DiSK means gamma={self._lookahead:.6g}, got {self.gamma};"
                " leave gamma out or use mode='two_point'"
            )

    @property
    def _lookahead(self) -> float:
        """Return γ in force."""
        if self.mode == "look_ahead":
            return (1 - self.kappa) / self.kappa
        if self.mode == "storm":
            return -1.0
        if self.gamma is None:
            return _DEFAULT_GAMMA
        return self.gamma

    @property
    def weight(self) -> float:
        """Return c, the weight of the gradient at θ + γ d."""
        if self.kappa == 1:
            return 0.0
        c = (1 - self.kappa) / (self.kappa * self._lookahead)
        if math.isclose(c, 1.0, rel_tol=1e-12):
            return 1.0
        return c

    @property
    def evaluations(self) -> tuple[LookaheadPoint, ...]:
        """Return the points at which gradients are taken, a single one where c is 0 or 1."""
        if self.kappa == 1:
            return AT_PARAMETERS
        point = LookaheadPoint(self._lookahead, self.weight)
        if self.weight == 1:
            return (point,)
        return (point, LookaheadPoint(0.0, 1 - self.weight))

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {
            "name": "DiSK",
            "kappa": self.kappa,
            "gamma": self._lookahead,
            "mode": self.mode,
            "init": self.init,
        }

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the average of the combined gradients with the variance of its noise."""
        average = EMA(self.kappa, self.init)
        return average.apply(released, state)
