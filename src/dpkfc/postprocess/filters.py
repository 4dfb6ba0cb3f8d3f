"""DiSK: a simplified Kalman filter of the gradient (Zhang et al., ICLR 2025, Algorithm 3).

With d the last change of the parameters and κ the weight of the new release,

    c = (1 − κ) / (κ γ),
    g_i = c ∇ℓ_i(θ + γ d) + (1 − c) ∇ℓ_i(θ)          combined BEFORE the clip: one clip, one sensitivity, one release
    ĝ ← (1 − κ) ĝ + κ (Σ clip(g_i) + noise) / B

since κ g = κ ∇ℓ(θ) + (1 − κ) [∇ℓ(θ + γ d) − ∇ℓ(θ)] / γ: what the filter remembers is moved along by the Hessian times d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.postprocess.protocol import AT_PARAMETERS, Evaluation, State, entry, put
from dpkfc.privacy.mechanism import Released

# --------------------------------------------------------------------------------------------------
# Linear filters of releases over time, y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, and the variance of the
# noise in y_t.
#
# In the transposed second direct form a filter of order n remembers n tensors a parameter, z:
#
#     y = b_0 g + z_1,        z_i ← b_i g − a_i y + z_{i+1},
#
# so z ← F z + r g with r_i = b_i − a_i b_0. The noise of different releases is independent, hence
# its covariance K in z follows K ← F K Fᵀ + r rᵀ V and y has the variance b_0² V + K_11. Both are
# exact while V, the variance of a release, changes with the step (a metric that was rebuilt under
# the natural or the inverse read-out).

Coefficients = tuple[float, ...]


@dataclass(frozen=True)
class Recursion:
    """The coefficients of a filter of order n: b and a `[n + 1]` with a_0 = 1."""

    b: Coefficients
    a: Coefficients

    @property
    def order(self) -> int:
        """n, the tensors of memory a parameter."""
        return len(self.b) - 1

    def advance(self, g: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """(y, next memory `[n, ...]`) for an input g `[...]`; no memory is one of zeros."""
        y = self.b[0] * g
        if memory is not None:
            y += memory[0]
        after = g.new_empty(self.order, *g.shape)
        for i, z in enumerate(after, 1):
            torch.mul(y, -self.a[i], out=z)
            if self.b[i]:
                z.add_(g, alpha=self.b[i])
            if memory is not None and i < self.order:
                z.add_(memory[i])
        return y, after

    def advance_variance(self, v: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor]:
        """(variance of y, next covariance of the memory `[n, n, ...]`) for an input of variance v `[...]`."""
        n, (f, drive) = self.order, _matrices(self, v.dtype, v.device)
        drive = drive.view(n, n, *[1] * v.dim()) * v
        if covariance is None:
            return self.b[0] ** 2 * v, drive
        covariance = covariance.to(v)  # one number for all before there was one for each, or of a checkpoint on a device
        k = covariance.view(n, n, *[1] * (v.dim() - covariance.dim() + 2), *covariance.shape[2:])
        moved = k * float(f) ** 2 if n == 1 else _congruent(f, k)
        return self.b[0] ** 2 * v + k[0, 0], moved + drive


@functools.lru_cache(maxsize=32)
def _matrices(filter_: Recursion, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """F and r rᵀ `[n, n]`."""
    n, a, b = filter_.order, np.array(filter_.a), np.array(filter_.b)
    f, r = np.eye(n, k=1), b[1:] - a[1:] * b[0]
    f[:, 0] -= a[1:]
    return torch.from_numpy(f).to(device, dtype), torch.from_numpy(np.outer(r, r)).to(device, dtype)


def _congruent(f: Tensor, k: Tensor) -> Tensor:
    """F K Fᵀ for symmetric K `[n, n, ...]`."""
    n = len(f)
    once = (f @ k.reshape(n, -1)).view(k.shape)
    return (f @ once.transpose(0, 1).reshape(n, -1)).view(k.shape)


def average(released: Released, state: State, filter_: Recursion, normalise: bool) -> tuple[Released, dict[str, Tensor]]:
    """One step of a filter on every parameter.

    Args:
        released: with the noise of a release, independent of that of all others.
        state: of the step before.
        filter_: its coefficients.
        normalise: divide by c_t, the filter's answer to a constant 1 since the first step, so that a constant passes unchanged.

    Returns:
        The filtered value with the variance of its noise, and the next state.
    """
    outputs, memories, covariances = {}, {}, {}
    for name, g in released.gradients.items():
        outputs[name], memories[name] = filter_.advance(g, entry(state, "memory", name))
    variances: dict[str, Tensor] = {}
    for name, v in variances_of(released, state).items():
        held = entry(state, "covariance", name)
        held = entry(state, "covariance", "") if held is None else held
        variances[name], covariances[name] = filter_.advance_variance(v, held)
    kept = put("memory", memories) | put("covariance", covariances)
    divisor = 1.0
    if normalise:
        unit = entry(state, "unit", "")
        c, unit = filter_.advance(torch.ones((), dtype=torch.float64), None if unit is None else unit.cpu())
        divisor, kept = float(c), kept | put("unit", {"": unit})
        outputs = {name: y.div_(divisor) for name, y in outputs.items()}
    return scaled(released, outputs, variances, 1 / divisor**2), kept


def variances_of(released: Released, state: State) -> dict[str, Tensor]:
    """The variance of the noise by parameter, or under "" where one number holds for all, now and in the past."""
    if released.noise_variance is None:
        return {}
    apart = any(key.startswith("covariance/") and key != "covariance/" for key in state)
    if isinstance(released.noise_variance, float) and not apart:
        return {"": torch.tensor(released.noise_variance, dtype=torch.float64)}
    found = {}
    for name, g in released.gradients.items():
        v = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
        found[name] = v.reshape((1,) * (g.dim() - v.dim()) + tuple(v.shape))
    return found


def scaled(released: Released, outputs: dict[str, Tensor], variances: Mapping[str, Tensor], factor: float) -> Released:
    """The release with other gradients, and with variances as `variances_of` names them, times a number."""
    if not variances:
        return replace(released, gradients=outputs, noise_variance=None)
    alone = set(variances) == {""}
    noise = float(variances[""]) * factor if alone else {name: v * factor for name, v in variances.items()}
    return replace(released, gradients=outputs, noise_variance=noise)


def impulse_response(filter_: Recursion, steps: int) -> NDArray[np.float64]:
    """h_0 ... h_{steps-1}."""
    from scipy.signal import lfilter

    return np.asarray(lfilter(filter_.b, filter_.a, np.eye(1, steps)[0]))


def noise_gain(filter_: Recursion, step: int, normalise: bool = True) -> float:
    """Variance of the noise after the filter over that of a release: Σ_{s ≤ step} h_s² (/ c_step² where normalised)."""
    h = impulse_response(filter_, step + 1)
    return float((h**2).sum() / (h.sum() ** 2 if normalise else 1.0))


# --------------------------------------------------------------------------------------------------
# The exponential moving average of releases, which DiSK applies to its combined gradients and which
# is no DiSK alone.

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


# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# Low-pass filters of releases: the gradient changes slowly, the noise does not (DOPPLER, Zhang et
# al. 2024).

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
