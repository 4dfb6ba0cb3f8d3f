"""Low-pass filters of releases: the gradient changes slowly, the noise does not (DOPPLER, Zhang et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpkfc.postprocess.base import State
from dpkfc.postprocess.linear import Recursion, average, noise_gain
from dpkfc.postprocess.moving_average import check_averaging
from dpkfc.privacy.mechanism import Released

__all__ = ["LowPass"]

_BUTTERWORTH_B = (0.020083365564211232, 0.040166731128422464, 0.020083365564211232)  # scipy.signal.butter(2, 0.1)
_BUTTERWORTH_A = (1.0, -1.5610180758007182, 0.6413515380575631)
_DIGITS = 12  # of coefficients in a plan's hash: the last bits of a design differ between versions of scipy


@dataclass(frozen=True)
class LowPass:
    """DOPPLER: y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, divided by c_t, its answer to a constant 1 since the first step.

    The default is the Butterworth filter of order 2 with cutoff 0.1, which remembers about 20 steps and keeps 0.11 of the
    noise's variance; the memory (2 / cutoff) should be a small part of the run.

    Attributes:
        b, a: coefficients, as scipy.signal names them; a_0 is divided out.
        momentum_allowed: momentum behind it is wanted.

    Raises:
        ValueError: an unstable filter, or one that passes no constant or turns its sign.
    """

    b: tuple[float, ...] = _BUTTERWORTH_B
    a: tuple[float, ...] = _BUTTERWORTH_A
    momentum_allowed: bool = False
    smooths = True
    adaptive = False
    needs_variance = False

    def __post_init__(self) -> None:
        b, a = [float(x) for x in self.b], [float(x) for x in self.a]
        if not b or not a or not all(map(math.isfinite, b + a)) or a[0] == 0 or b[0] == 0:
            raise ValueError(f"b and a must be finite numbers with b[0] and a[0] not zero, got b={self.b} and a={self.a}")
        n = max(len(b), len(a), 2)
        object.__setattr__(self, "b", tuple(x / a[0] for x in b + [0.0] * (n - len(b))))
        object.__setattr__(self, "a", tuple(x / a[0] for x in a + [0.0] * (n - len(a))))
        slowest = max(abs(np.roots(self.a)), default=0.0)
        if slowest >= 1 - 1e-9:
            raise ValueError(
                f"the filter is unstable: a has a root of size {slowest:.6g}, and all must lie inside the unit circle; scale the "
                "recursive coefficients down, or take LowPass.butterworth()"
            )
        self._check_answer(slowest)

    def _check_answer(self, slowest: float) -> None:
        from scipy.signal import lfilter

        steps = 100 if slowest < 1e-6 else min(100_000, 100 + round(30 / -math.log(slowest)))
        answer = lfilter(self.b, self.a, np.ones(steps))
        final = sum(self.b) / sum(self.a)
        if not (answer * math.copysign(1, final) > 1e-9 * abs(answer).max()).all():
            raise ValueError(
                "the filter's answer to a constant vanishes or turns its sign, so that it cannot be divided out; a low-pass "
                "filter is needed, such as LowPass.first_order(0.1) or LowPass.butterworth()"
            )

    @classmethod
    def first_order(cls, kappa: float, momentum_allowed: bool = False) -> LowPass:
        """The average of all releases with weights (1 − κ)^{t-s}: `EMA(kappa, "bias_corrected")`."""
        check_averaging("LowPass.first_order", kappa)
        return cls((kappa,), (1.0, kappa - 1.0), momentum_allowed)

    @classmethod
    def butterworth(cls, order: int = 2, cutoff: float = 0.1, momentum_allowed: bool = False) -> LowPass:
        """A Butterworth filter; the cutoff is a share of half the step rate, in (0, 1)."""
        from scipy.signal import butter

        if not 0 < cutoff < 1:
            raise ValueError(f"cutoff must lie in (0, 1), as a share of half the step rate; got {cutoff}")
        b, a = butter(order, cutoff)
        return cls(tuple(map(float, b)), tuple(map(float, a)), momentum_allowed)

    @classmethod
    def chebyshev(cls, momentum_allowed: bool = False) -> LowPass:
        """The authors' default, a Chebyshev filter of order 2 with 10 dB of ripple and cutoff 0.02, to reproduce them.

        It overshoots by 1.6 and rings for some 200 steps: not for short runs.
        """
        from scipy.signal import cheby1

        b, a = cheby1(2, 10, 0.02)
        return cls(tuple(map(float, b)), tuple(map(float, a)), momentum_allowed)

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {"name": "LowPass", "b": [_rounded(x) for x in self.b], "a": [_rounded(x) for x in self.a]}

    def noise_gain(self, step: int) -> float:
        """Variance of the noise at a step (from 0) over that of a release, equal at all steps: Σ_{s ≤ step} h_s² / c_step²."""
        return noise_gain(Recursion(self.b, self.a), step)

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The filtered value with the variance of its noise."""
        return average(released, state, Recursion(self.b, self.a), normalise=True)


def _rounded(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")
