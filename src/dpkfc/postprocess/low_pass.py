"""Low-pass filters of releases: the gradient changes slowly, the noise does not.

Source: DOPPLER (Zhang et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpkfc._checks import is_number, show_value
from dpkfc.postprocess.linear_filter import Recursion, filter_release
from dpkfc.postprocess.protocol import PostProcess, State
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import Tensors

# The coefficients of scipy.signal.butter(2, 0.1).
_BUTTERWORTH_B = (0.020083365564211232, 0.040166731128422464, 0.020083365564211232)
_BUTTERWORTH_A = (1.0, -1.5610180758007182, 0.6413515380575631)
# The last bits of a design differ between versions of scipy, so a plan's hash leaves them out.
_DIGITS = 12


@dataclass(frozen=True)
class LowPass(PostProcess):
    """The filter of DOPPLER, y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, divided by c_t.

    c_t is the answer of the filter to a constant 1 since the first step. The default is the
    Butterworth filter of order 2 with cutoff 0.1. It remembers about 20 steps and keeps 0.11 of the
    noise's variance. The memory (2 / cutoff) should be a small part of the run.

    Attributes:
        b, a: coefficients, as scipy.signal names them; a_0 is divided out.
        momentum_allowed: the caller wants momentum behind it.

    Raises:
        ValueError: an unstable filter, or one that passes no constant or turns its sign.
    """

    b: tuple[float, ...] = _BUTTERWORTH_B
    a: tuple[float, ...] = _BUTTERWORTH_A
    momentum_allowed: bool = False

    is_filter = True

    def __post_init__(self) -> None:
        are_finite = all(is_number(x) and math.isfinite(x) for x in (*self.b, *self.a))
        b = [float(x) for x in self.b if are_finite]
        a = [float(x) for x in self.a if are_finite]
        if not (a and b and a[0] and b[0]):
            raise ValueError(
                "b and a must be finite numbers with b[0] and a[0] not zero, got"
                f" b={show_value(self.b, 36)} and a={show_value(self.a, 36)}"
            )
        n = max(len(b), len(a), 2)
        for name, coefficients in {"b": b, "a": a}.items():
            padding = [0.0] * (n - len(coefficients))
            padded = coefficients + padding
            normalised = tuple(x / a[0] for x in padded)
            object.__setattr__(self, name, normalised)
        slowest = max(abs(np.roots(self.a)), default=0.0)
        if slowest >= 1 - 1e-9:
            raise ValueError(
                f"the filter is unstable: a has a root of size {slowest:.6g}, and all must lie"
                " inside the unit circle; use LowPass.butterworth()"
            )
        self._check_answer(slowest)

    def _check_answer(self, slowest: float) -> None:
        """Check that the answer to a constant can be divided out: one sign and never 0."""
        from scipy.signal import lfilter

        steps = 100
        if slowest >= 1e-6:
            steps += round(30 / -math.log(slowest))
            steps = min(100_000, steps)
        answer = lfilter(self.b, self.a, np.ones(steps))
        limit = sum(self.b) / sum(self.a)
        smallest = min(answer * math.copysign(1, limit))
        if not smallest > 1e-9 * abs(answer).max():
            raise ValueError(
                "the filter's answer to a constant vanishes or turns its sign, so it cannot be"
                " divided out; use LowPass.butterworth()"
            )

    @classmethod
    def butterworth(
        cls, order: int = 2, cutoff: float = 0.1, momentum_allowed: bool = False
    ) -> LowPass:
        """Return a Butterworth filter; its cutoff in (0, 1) is a fraction of half the step rate."""
        from scipy.signal import butter

        if not 0 < cutoff < 1:
            raise ValueError(
                f"cutoff must lie in (0, 1), as a share of half the step rate; got {cutoff}"
            )
        b, a = butter(order, cutoff)
        return cls(b, a, momentum_allowed)

    @classmethod
    def chebyshev(cls, momentum_allowed: bool = False) -> LowPass:
        """Return the authors' default: a Chebyshev filter of order 2, 10 dB of ripple, cutoff 0.02.

        It overshoots by 1.6 and rings for some 200 steps: do not use it in short runs.
        """
        from scipy.signal import cheby1

        b, a = cheby1(2, 10, 0.02)
        return cls(b, a, momentum_allowed)

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {
            "name": "LowPass",
            "b": [_round(x) for x in self.b],
            "a": [_round(x) for x in self.a],
        }

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the filtered value with the variance of its noise."""
        recursion = Recursion(self.b, self.a)
        return filter_release(released, state, recursion, normalise=True)


def _round(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")
