"""Linear filters of releases over time, y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, and the variance of the noise in y_t.

In the transposed second direct form a filter of order n remembers n tensors a parameter, z:

    y = b_0 g + z_1,        z_i ← b_i g − a_i y + z_{i+1},

so z ← F z + r g with r_i = b_i − a_i b_0. The noise of different releases is independent, hence its covariance K in z
follows K ← F K Fᵀ + r rᵀ V and y has the variance b_0² V + K_11. Both are exact while V, the variance of a release, changes
with the step (a metric that was rebuilt under the natural or the inverse read-out).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.postprocess.base import State, entry, put
from dpkfc.privacy.mechanism import Released

__all__ = ["Recursion", "average", "noise_gain", "scaled", "variances_of"]

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
