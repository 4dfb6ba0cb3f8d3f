"""The exponential moving average of releases.

DiSK applies it to combined gradients; alone it is not DiSK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpkfc._checks import check_one_of, is_number, show_value
from dpkfc.postprocess.linear_filter import (
    Recursion,
    filter_release,
    noise_variances,
    replace_outputs,
)
from dpkfc.postprocess.protocol import PostProcess, State, state_entries
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import Tensors

INITS = ("first", "zero", "bias_corrected")


@dataclass(frozen=True)
class EMA(PostProcess):
    """The exponential moving average y_t = (1 − κ) y_{t-1} + κ g_t, a first-order low-pass filter.

    Attributes:
        kappa: κ, the weight of the NEW release, in (0, 1]; 1 changes nothing.
        init: y before the first release: "first" starts at it (y_0 = g_0), "zero" at 0,
            "bias_corrected" at 0 with the result divided by 1 − (1 − κ)^{t+1}.
        momentum_allowed: the caller wants momentum behind it.

    Raises:
        ValueError: a value outside its range.
    """

    kappa: float = 0.7
    init: str = "first"
    momentum_allowed: bool = False

    is_filter = True

    def __post_init__(self) -> None:
        check_averaging("EMA", self.kappa, self.init)

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {"name": "EMA", "kappa": self.kappa, "init": self.init}

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the average with the variance of its noise."""
        if self.kappa == 1:
            return released, {}
        if self.init != "first" or state:
            recursion = Recursion((self.kappa, 0.0), (1.0, self.kappa - 1.0))
            normalise = self.init == "bias_corrected"
            return filter_release(released, state, recursion, normalise)
        old_weight = 1 - self.kappa
        variances = noise_variances(released, state)
        memory = {}
        for name, g in released.gradients.items():
            weighted = old_weight * g
            memory[name] = weighted.unsqueeze(0)
        covariance = {}
        for name, v in variances.items():
            weighted = old_weight**2 * v
            covariance[name] = weighted[None, None]
        new_state = state_entries("memory", memory) | state_entries("covariance", covariance)
        return replace_outputs(released, dict(released.gradients), variances, 1.0), new_state


def check_averaging(name: str, kappa: float, init: str = "first") -> None:
    """Check the weight κ and the start of an average.

    Raises:
        ValueError: naming the field and the fix.
    """
    if not (is_number(kappa) and 0 < kappa <= 1):
        raise ValueError(
            f"kappa of {name} must lie in (0, 1], got {show_value(kappa, 20)}: it is the"
            " weight of the new release; 1 switches the filter off"
        )
    check_one_of(f"init of {name}", init, INITS)
