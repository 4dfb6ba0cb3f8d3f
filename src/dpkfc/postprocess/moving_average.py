"""The exponential moving average of releases, which DiSK applies to its combined gradients and which is no DiSK alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkfc.postprocess.base import State, put
from dpkfc.postprocess.linear import Recursion, average, noise_gain, scaled, variances_of
from dpkfc.privacy.mechanism import Released

__all__ = ["EMA", "INITS", "check_averaging"]

INITS = ("first", "zero", "bias_corrected")


@dataclass(frozen=True)
class EMA:
    """The exponential moving average y_t = (1 − κ) y_{t-1} + κ g_t: a first-order low-pass filter, and no more than that.

    Attributes:
        kappa: κ, the weight of the NEW release, in (0, 1]; 1 changes nothing.
        init: y before the first release: "first" starts at it (y_0 = g_0), "zero" at 0, "bias_corrected" at 0 with the result
            divided by 1 − (1 − κ)^{t+1}.
        momentum_allowed: momentum behind it is wanted.

    Raises:
        ValueError: a value outside its range.
    """

    kappa: float = 0.7
    init: str = "first"
    momentum_allowed: bool = False
    smooths = True
    adaptive = False
    needs_variance = False

    def __post_init__(self) -> None:
        check_averaging("EMA", self.kappa, self.init)

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {"name": "EMA", "kappa": self.kappa, "init": self.init}

    def noise_gain(self, step: int) -> float:
        """Variance of the noise at a step (from 0) over that of a release, equal at all steps; towards κ / (2 − κ)."""
        if self.init == "first":
            old = (1 - self.kappa) ** (2 * step)
            return old + self.kappa / (2 - self.kappa) * (1 - old)
        return noise_gain(self._recursion, step, self.init == "bias_corrected")

    @property
    def _recursion(self) -> Recursion:
        return Recursion((self.kappa, 0.0), (1.0, self.kappa - 1.0))

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The average with the variance of its noise."""
        if self.kappa == 1:
            return released, {}
        if self.init != "first" or state:
            return average(released, state, self._recursion, self.init == "bias_corrected")
        old, variances = 1 - self.kappa, variances_of(released, state)
        memory = put("memory", {name: (old * g).unsqueeze(0) for name, g in released.gradients.items()})
        covariance = {name: (old**2 * v).reshape(1, 1, *v.shape) for name, v in variances.items()}
        return scaled(released, dict(released.gradients), variances, 1.0), memory | put("covariance", covariance)


def check_averaging(who: str, kappa: float, init: str = "first") -> None:
    """Raise unless κ is a weight and the start is a known one.

    Raises:
        ValueError: naming the field and what to do.
    """
    if not (isinstance(kappa, (int, float)) and 0 < kappa <= 1):
        raise ValueError(
            f"kappa of {who} must lie in (0, 1], got {kappa!r}: it is the weight of the new release (1 switches the filter off), "
            "not that of the memory"
        )
    if init not in INITS:
        raise ValueError(f"init of {who} must be one of {', '.join(INITS)}; got {init!r}")
