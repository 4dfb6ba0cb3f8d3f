"""Linear filters of releases over time, y_t = Σ b_τ g_{t-τ} − Σ a_τ y_{t-τ}, and their noise.

In the transposed second direct form a filter of order n stores n tensors a parameter, z:

    y = b_0 g + z_1,        z_i ← b_i g − a_i y + z_{i+1},

so z ← F z + r g with r_i = b_i − a_i b_0. The noise of different releases is independent. Hence its
covariance K in z follows K ← F K Fᵀ + r rᵀ V, and y has the variance b_0² V + K_11. Both are exact
where V, the variance of a release, changes with the step (a rebuilt metric under the natural or the
inverse read-out).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.postprocess.protocol import State, get_tensor, state_entries
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import NamedTensors, Tensors

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
        noise_variance = float(variances[""])
    elif variances:
        noise_variance = variances
    filtered = replace(released, gradients=outputs, noise_variance=noise_variance)
    return replace(filtered, noise_variance=filtered.scaled_variance(factor))
