"""Steps between a release and the optimizer: filters over time, and steps that give the update."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.postprocess.pipeline import (
    AT_PARAMETERS,
    LookaheadPoint,
    PostProcess,
    State,
    get_tensor,
    state_entries,
)
from dpkfc.privacy.mechanism import NamedTensors, Released, Tensors

# --------------------------------------------------------------------------------------------------
# Linear filters of releases over time, y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, and the variance of the
# noise in y_t.
#
# In the transposed second direct form a filter of order n stores n tensors a parameter, z:
#
#     y = b_0 g + z_1,        z_i ← b_i g − a_i y + z_{i+1},
#
# so z ← F z + r g with r_i = b_i − a_i b_0. The noise of different releases is independent. Hence
# its covariance K in z follows K ← F K Fᵀ + r rᵀ V, and y has the variance b_0² V + K_11. Both are
# exact where V, the variance of a release, changes with the step (a rebuilt metric under the
# natural or the inverse read-out).

Coefficients = tuple[float, ...]


@dataclass(frozen=True)
class Recursion:
    """The coefficients of a filter of order n: b and a `[n + 1]` with a_0 = 1."""

    b: Coefficients
    a: Coefficients

    @property
    def order(self) -> int:
        """Return n, the number of stored tensors a parameter."""
        return len(self.b) - 1

    def advance(self, g: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y and the next memory `[n, ...]` for an input g `[...]`; None is all zeros."""
        y = self.b[0] * g
        if memory is not None:
            y += memory[0]
        next_memory = g.new_empty(self.order, *g.shape)
        for i, z in enumerate(next_memory, 1):
            b = self.b[i]
            torch.mul(y, -self.a[i], out=z)
            if b:
                z.add_(g, alpha=b)
            if memory is not None and i < self.order:
                z.add_(memory[i])
        return y, next_memory

    def advance_variance(self, v: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the variance of y and the next covariance `[n, n, ...]` of the memory.

        Args:
            v: variance of the input `[...]`.
            covariance: of the memory; None before the first step.
        """
        n = self.order
        transition, drive = _matrices(self, v.dtype, v.device)
        ones = [1] * v.dim()
        drive = drive.view(n, n, *ones) * v
        variance = self.b[0] ** 2 * v
        if covariance is None:
            return variance, drive
        # The covariance may be a single number from steps with one variance, or lie on another
        # device.
        covariance = covariance.to(v)
        shape = covariance.shape[2:]
        ones = [1] * (v.dim() - len(shape))
        k = covariance.view(n, n, *ones, *shape)
        next_covariance = k * float(transition) ** 2 if n == 1 else _congruence(transition, k)
        return variance + k[0, 0], next_covariance + drive


@functools.lru_cache(maxsize=32)
def _matrices(
    recursion: Recursion, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return F and r rᵀ `[n, n]`."""
    a = np.array(recursion.a[1:])
    b = np.array(recursion.b)
    f = np.eye(recursion.order, k=1)
    f[:, 0] -= a
    r = b[1:] - a * b[0]
    transition = torch.from_numpy(f)
    transition = transition.to(device, dtype)
    drive = torch.from_numpy(np.outer(r, r))
    return transition, drive.to(device, dtype)


def _congruence(f: Tensor, k: Tensor) -> Tensor:
    """Return F K Fᵀ for symmetric K `[n, n, ...]`."""
    # `[n, n …]`
    size = (len(f), -1)
    fk = f @ k.reshape(size)
    # F (F K)ᵀ is F K Fᵀ.
    transposed = fk.view(k.shape).transpose(0, 1)
    product = f @ transposed.reshape(size)
    return product.view(k.shape)


def filter_release(
    released: Released, state: State, recursion: Recursion, normalise: bool
) -> tuple[Released, Tensors]:
    """Filter every parameter by one step.

    Args:
        released: its noise is independent of the noise of all other releases.
        state: of the step before.
        recursion: the coefficients.
        normalise: divide by c_t, the answer of the filter to a constant 1 since the first step, so
            that a constant passes unchanged.

    Returns:
        The filtered value with the variance of its noise, and the next state.
    """
    outputs = {}
    memories = {}
    for name, g in released.gradients.items():
        memory = get_tensor(state, "memory", name)
        outputs[name], memories[name] = recursion.advance(g, memory)
    variances = {}
    covariances = {}
    for name, v in noise_variances(released, state).items():
        covariance = get_tensor(state, "covariance", name)
        if covariance is None:
            covariance = get_tensor(state, "covariance", "")
        variances[name], covariances[name] = recursion.advance_variance(v, covariance)
    new_state = state_entries("memory", memories) | state_entries("covariance", covariances)
    divisor = 1.0
    if normalise:
        one = torch.ones((), dtype=torch.float64)
        unit = get_tensor(state, "unit", "")
        if unit is not None:
            unit = unit.cpu()
        answer, unit = recursion.advance(one, unit)
        divisor = float(answer)
        new_state |= state_entries("unit", {"": unit})
        for y in outputs.values():
            y.div_(divisor)
    return replace_outputs(released, outputs, variances, 1 / divisor**2), new_state


def noise_variances(released: Released, state: State) -> Tensors:
    """Return the variance of the noise by parameter, under "" if all share one number."""
    common = released.noise_variance
    if common is None:
        return {}
    prefix = "covariance/"
    has_own_covariances = any(key.startswith(prefix) and key != prefix for key in state)
    if isinstance(common, float) and not has_own_covariances:
        return {"": torch.tensor(common, dtype=torch.float64)}
    variances = {}
    for name, g in released.gradients.items():
        v = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
        ones = [1] * (g.dim() - v.dim())
        variances[name] = v.reshape((*ones, *v.shape))
    return variances


def replace_outputs(
    released: Released, outputs: Tensors, variances: NamedTensors, factor: float
) -> Released:
    """Return the release with other gradients and with its `noise_variances` scaled."""
    noise_variance: Any = None
    if "" in variances:
        noise_variance = float(variances[""]) * factor
    elif variances:
        noise_variance = {name: v * factor for name, v in variances.items()}
    return replace(released, gradients=outputs, noise_variance=noise_variance)


# --------------------------------------------------------------------------------------------------
# The exponential moving average of releases. DiSK applies it to combined gradients; alone it is not
# DiSK.

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
    if not (isinstance(kappa, (int, float)) and 0 < kappa <= 1):
        raise ValueError(
            f"kappa of {name} must lie in (0, 1], got {kappa!r}: it is the weight of the new"
            " release; 1 switches the filter off"
        )
    check_one_of(f"init of {name}", init, INITS)


# --------------------------------------------------------------------------------------------------
# DiSK: a simplified Kalman filter of the gradient (Zhang et al., ICLR 2025, Algorithm 3). With d
# the last change of the parameters and κ the weight of the new release,
#
#     c = (1 − κ) / (κ γ),
#     g_i = c ∇ℓ_i(θ + γ d) + (1 − c) ∇ℓ_i(θ)       combined BEFORE the clip: one clip, one release
#     ĝ ← (1 − κ) ĝ + κ (Σ clip(g_i) + noise) / B
#
# since κ g = κ ∇ℓ(θ) + (1 − κ) [∇ℓ(θ + γ d) − ∇ℓ(θ)] / γ: the Hessian times d moves the stored
# average along.

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
        if not (math.isfinite(self.gamma) and self.gamma != 0):
            raise ValueError(
                f"gamma of DiSK must be finite and not 0, got {self.gamma}: at 0 both points are"
                " the same; use mode='look_ahead' or EMA(kappa=...)"
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


# --------------------------------------------------------------------------------------------------
# Low-pass filters of releases: the gradient changes slowly, the noise does not (DOPPLER, Zhang et
# al. 2024).

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
        b = [float(x) for x in self.b]
        a = [float(x) for x in self.a]
        is_usable = a and b and a[0] and b[0] and all(map(math.isfinite, a + b))
        if not is_usable:
            raise ValueError(
                f"b and a must be finite numbers with b[0] and a[0] not zero, got b={self.b} and"
                f" a={self.a}"
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
                " divided out; use LowPass.first_order(0.1) or LowPass.butterworth()"
            )

    @classmethod
    def first_order(cls, kappa: float, momentum_allowed: bool = False) -> LowPass:
        """Return the average of all releases with weights (1 − κ)^{t-s}.

        It is `EMA(kappa, "bias_corrected")`.
        """
        check_averaging("LowPass.first_order", kappa)
        return cls((kappa,), (1.0, kappa - 1.0), momentum_allowed)

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
            "b": [_rounded(x) for x in self.b],
            "a": [_rounded(x) for x in self.a],
        }

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the filtered value with the variance of its noise."""
        recursion = Recursion(self.b, self.a)
        return filter_release(released, state, recursion, normalise=True)


def _rounded(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")


# --------------------------------------------------------------------------------------------------
# DP-AdamBC: Adam whose second moment is freed of the noise's variance (Tang, Shpilevskiy and
# Lécuyer, AAAI 2024).
#
#     m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   φ ← β₂ φ + (1 − β₂) Φ
#     step = m̂ / √max(v̂ − φ̂, γ'),     m̂ = m / (1 − β₁^t),  v̂ = v / (1 − β₂^t),  φ̂ = φ / (1 − β₂^t)
#
# Φ is the variance of the noise in each entry of g. Averaging it with the weights of g² keeps it
# exact where it changes: behind a filter that warms up, or where a metric is rebuilt.


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

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the step; note `adam_bc/floor_fraction` gives the entries at the floor."""
        beta1, beta2 = self.betas
        t = _count(state)
        bias1 = 1 - beta1**t
        bias2 = 1 - beta2**t
        steps = {}
        new_state = state_entries("count", {"": torch.tensor(t)})
        at_floor = []
        entries = 0
        for name, g in released.gradients.items():
            noise = torch.as_tensor(released.variance_of(name), dtype=g.dtype, device=g.device)
            m = _mean(get_tensor(state, "m", name), g, beta1)
            v = _mean_square(get_tensor(state, "v", name), g, beta2)
            phi = _mean(get_tensor(state, "phi", name), noise, beta2)
            new_state[f"m/{name}"] = m
            new_state[f"v/{name}"] = v
            new_state[f"phi/{name}"] = phi
            signal = v - phi
            signal.div_(bias2)
            floor = self._floor(phi / bias2, t)
            root = torch.maximum(signal, floor)
            root.sqrt_()
            step = m / bias1
            step.div_(root)
            steps[name] = step
            is_low = signal <= floor
            at_floor.append(is_low.sum())
            entries += g.numel()
        fraction = int(torch.stack(at_floor).sum()) / max(1, entries)
        notes = {**released.notes, "adam_bc/floor_fraction": fraction}
        return replace(released, gradients=steps, noise_variance=None, notes=notes), new_state

    def _floor(self, phi: Tensor, t: int) -> Tensor:
        """Return γ' for the variance φ̂ of the noise after t steps."""
        if isinstance(self.floor, str):
            beta = self.betas[1]
            power = beta**t
            relative = 2 * (1 - beta) / (1 + beta) * (1 + power) / (1 - power)
            factor = self.resolution * math.sqrt(relative)
            resolved = factor * phi
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
        square = g.square()
        return square.mul_(1 - beta)
    decayed = beta * old
    return decayed.addcmul_(g, g, value=1 - beta)


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

    def apply_in_place(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the step in the memory of the arguments, because new memory costs more time."""
        return self.apply(released, state, in_place=True)

    def apply(
        self, released: Released, state: State, *, in_place: bool = False
    ) -> tuple[Released, Tensors]:
        """Return the step, zero during the warm-up."""
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
