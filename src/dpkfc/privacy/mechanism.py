"""The one place where noise is added: a clipped sum goes in, a noisy mean comes out, charged before it exists.

Nothing downstream (optimisers, filters, checkpoints) takes any value but `Released`. Noise is either Gaussian in the
floating-point numbers of the sum, or Gaussian rounded to a grid on which the sum is rounded too: see `grid`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.entropy import draw_key
from dpkfc.privacy.chacha20 import draw_normal
from dpkfc.privacy.grid import MOST_STEPS, ROUNDED, grid_of
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.rng import CHUNK, NoiseStream

__all__ = ["ClippedSum", "MechanismPlan", "Released", "gaussian_release", "release", "rounded_release"]

LARGE = 1 << 24  # numbers beyond which a draw is used up in pieces

Normal = Callable[[int, torch.dtype], Tensor]


class MechanismPlan(Protocol):
    """What the mechanism reads of a plan."""

    @property
    def max_grad_norm(self) -> float: ...  # noqa: D102
    @property
    def clipping(self) -> str: ...  # noqa: D102
    @property
    def noise(self) -> str: ...  # noqa: D102
    @property
    def noise_multiplier(self) -> float: ...  # noqa: D102
    @property
    def sensitivity(self) -> float: ...  # noqa: D102
    @property
    def stddev(self) -> float: ...  # noqa: D102
    @property
    def expected_batch_size(self) -> int: ...  # noqa: D102
    @property
    def event(self) -> dp_accounting.DpEvent: ...  # noqa: D102
    @property
    def test_mode(self) -> bool: ...  # noqa: D102
    @property
    def hash(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class ClippedSum:
    """PRIVATE: the sum over a logical batch of per-example gradients, each clipped over all tensors together.

    Attributes:
        tensors: parameter name to its part of the sum, in the coordinates in which it was clipped.
        max_grad_norm: the C it was clipped with.
        clipping: how: "flat", "normalised" or "automatic".
    """

    tensors: dict[str, Tensor]
    max_grad_norm: float
    clipping: str = "flat"


@dataclass(frozen=True, kw_only=True)
class Released:
    """A gradient that may be seen: (clipped sum + noise) / expected batch size.

    Attributes:
        gradients: parameter name to its part, in the coordinates of the clipped sum.
        noise_variance: variance of the noise in every entry: (stddev / expected batch size)² as it is released, and after a
            read-out or a filter parameter name to the variance of each entry; None where it is not known any more.
        step: number of the step.
        release: number of the release in the ledger, from 1.
        notes: public numbers worth logging that post-processing adds.
    """

    gradients: dict[str, Tensor]
    noise_variance: float | Mapping[str, Tensor | float] | None
    step: int
    release: int
    notes: Mapping[str, float] = field(default_factory=dict)

    def variance_of(self, name: str) -> Tensor | float:
        """Variance of the noise in one parameter's part: a number, or a tensor that broadcasts to its shape.

        Raises:
            ValueError: it is not known.
        """
        if self.noise_variance is None:
            raise ValueError("the variance of the noise is not known here: an adaptive step came before")
        return self.noise_variance[name] if isinstance(self.noise_variance, Mapping) else self.noise_variance

    def scaled_variance(self, factor: float) -> float | dict[str, Tensor | float] | None:
        """`noise_variance` times a number, in whichever form it has."""
        if isinstance(self.noise_variance, Mapping):
            return {name: variance * factor for name, variance in self.noise_variance.items()}
        return None if self.noise_variance is None else self.noise_variance * factor


def release(clipped: ClippedSum, plan: MechanismPlan, noise: NoiseStream, ledger: Ledger, step: int) -> Released:
    """Charge the ledger, then add N(0, stddev²) to every entry of the sum and divide by the expected batch size.

    The guarantee is the plan's event for one release, provided the sum was clipped as it says. With `plan.noise` "rounded"
    it covers how sum and noise are added in the computer; with "gaussian" it is that of real numbers.

    Args:
        clipped: the clipped sum of one logical batch; all zero for an empty one, which is a release like any other.
        plan: sensitivity, noise and divisor.
        noise: the stream of the run; only a plan in test mode takes a repeatable one.
        ledger: of the same plan.
        step: number of the step, >= 0.

    Raises:
        ValueError: the sum, the stream or the ledger does not fit the plan, or the sum is not finite floating point of
            at least 32 bits on one device. Nothing was charged.
        BudgetExhausted: the plan allows no further release. Nothing was charged.
        LedgerError: the charge could not be recorded; nothing was released.
    """
    _check(clipped, plan, noise, ledger, step)
    numbers = sum(x.numel() for x in clipped.tensors.values())
    grid = grid_of(plan.sensitivity, max(1, numbers), plan.stddev) if plan.noise == ROUNDED else 0.0
    number = ledger.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)
    normal = _normal(noise, step, next(iter(clipped.tensors.values())).device, numbers)
    if grid:
        gradients = rounded_release(clipped.tensors, plan.stddev, plan.expected_batch_size, normal, grid)
    else:
        gradients = gaussian_release(clipped.tensors, plan.stddev, plan.expected_batch_size, normal)
    variance = (plan.stddev / plan.expected_batch_size) ** 2
    return Released(gradients=gradients, noise_variance=variance, step=step, release=number)


def gaussian_release(tensors: Mapping[str, Tensor], stddev: float, divisor: float, normal: Normal) -> dict[str, Tensor]:
    """(x + stddev · z) / divisor with one draw of standard normal z over all tensors together.

    Args:
        tensors: name to a float32 or float64 tensor; not changed.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: (size, dtype) to that many independent N(0, 1) numbers `[size]` on the device of the tensors; of a large
            model on a CPU it is asked for the draw in consecutive pieces.

    Returns:
        New tensors of the same names, shapes and types.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)
    with torch.no_grad():
        if stddev == 0:
            return {name: x.detach() / divisor for name, x in tensors.items()}
        widest = torch.float64 if any(x.dtype == torch.float64 for x in tensors.values()) else torch.float32
        numbers = sum(x.numel() for x in tensors.values())
        if numbers > LARGE and all(x.device.type == "cpu" for x in tensors.values()):
            return _released_in_pieces(tensors, stddev, divisor, normal, widest)
        pieces = normal(numbers, widest).split([x.numel() for x in tensors.values()])
        noisy = {}
        for (name, x), z in zip(tensors.items(), pieces, strict=True):
            noisy[name] = z.to(x.dtype).view(x.shape).mul_(stddev).add_(x.detach()).div_(divisor)
        return noisy


def _released_in_pieces(
    tensors: Mapping[str, Tensor], stddev: float, divisor: float, normal: Normal, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same numbers, of a draw that is used up while it is made: memory for all of it would cost more than making it."""
    left, noisy = sum(x.numel() for x in tensors.values()), {}
    z: NDArray[Any] = np.zeros(0)
    for name, x in tensors.items():
        noisy[name] = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat, out = x.detach().reshape(-1).numpy(), noisy[name].view(-1).numpy()  # threads of torch would wait for the noise's
        start = 0
        while start < len(flat):
            if not len(z):
                z = normal(min(CHUNK, left), dtype).numpy()
                left -= len(z)
            now, z = z[: len(flat) - start], z[len(flat) - start :]
            part = slice(start, start + len(now))
            np.multiply(now.astype(flat.dtype, copy=False), flat.dtype.type(stddev), out=out[part])
            out[part] += flat[part]
            out[part] /= flat.dtype.type(divisor)
            start = part.stop
    return noisy


def rounded_release(
    tensors: Mapping[str, Tensor], stddev: float, divisor: float, normal: Normal, grid: float
) -> dict[str, Tensor]:
    """(x̂ + ẑ) / divisor, x̂ being x and ẑ being stddev · z, each rounded to the nearest multiple of the grid.

    Sum and noise are integers of 52 bits while they are added, so x̂ + ẑ is exact: it is stddev · z + x̂ rounded to the
    grid. Entries of x beyond 2⁵¹ steps are moved there first, which brings no two sums farther apart. Zero has one sign.

    Args:
        tensors: name to a float32 or float64 tensor; not changed.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: as for `gaussian_release`; asked for float64.
        grid: a power of two, from `grid.grid_of`.

    Returns:
        New tensors of the same names, shapes and types; a float64 one with a power of two as divisor lies on the grid.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)
    sizes = [x.numel() for x in tensors.values()]
    with torch.no_grad():
        pieces = normal(sum(sizes), torch.float64).split(sizes) if stddev > 0 else [None] * len(sizes)
        noisy = {}
        for (name, x), z in zip(tensors.items(), pieces, strict=True):
            steps = x.detach().to("cpu" if z is None else z.device, torch.float64, copy=True)
            steps.div_(grid).round_().clamp_(-MOST_STEPS, MOST_STEPS).add_(0.0)  # −0 would tell from which side x came
            if z is not None:
                steps += z.view(x.shape).mul_(stddev / grid).round_()
            noisy[name] = steps.mul_(grid / divisor).to(x)
        return noisy


def _check_scale(stddev: float, divisor: float) -> None:
    if not (stddev >= 0 and math.isfinite(stddev)):
        raise ValueError(f"stddev must be finite and >= 0, got {stddev}")
    if not (divisor > 0 and math.isfinite(divisor)):
        raise ValueError(f"divisor must be positive and finite, got {divisor}")


def _normal(noise: NoiseStream, step: int, device: torch.device, numbers: int) -> Normal:
    """Choose the source of the normal numbers of one release.

    On a CPU the source is the stream. All `numbers` of the release are one draw of the stream, at once or, where the caller
    asks for fewer, in pieces. On a CUDA device it is ChaCha20 under a fresh key. Small draws, and draws for other devices,
    are copied from the stream. In test mode a device uses its own generator, seeded with the step.
    """
    pieces: list[Iterator[NDArray[Any]]] = []

    def of_stream(size: int, dtype: torch.dtype) -> Tensor:
        kind = str(dtype).removeprefix("torch.")
        if size == numbers or numbers <= LARGE:
            return torch.from_numpy(noise.normal(size, step, kind))
        pieces[:] = pieces or [noise.pieces(numbers, step, kind)]
        return torch.from_numpy(next(pieces[0]))

    if device.type == "cpu":
        return of_stream
    without_float64 = device.type == "mps"  # `rounded_release` then works on the CPU

    def of_cipher(size: int, dtype: torch.dtype) -> Tensor:
        if device.type == "cuda" and size > CHUNK:
            return draw_normal(draw_key(), size, dtype, device)
        z = of_stream(size, dtype)
        return z if without_float64 and dtype == torch.float64 else z.to(device)

    if noise.is_secure:
        return of_cipher
    generator = torch.Generator(device=device).manual_seed(noise.device_seed(step))

    def of_test_mode(size: int, dtype: torch.dtype) -> Tensor:
        if without_float64 and dtype == torch.float64:
            return of_stream(size, dtype)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    return of_test_mode


def _check(clipped: ClippedSum, plan: MechanismPlan, noise: NoiseStream, ledger: Ledger, step: int) -> None:
    """Refuse everything that would make the release cost more than the plan says, before it is charged."""
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    if (clipped.max_grad_norm, clipped.clipping) != (plan.max_grad_norm, plan.clipping):
        raise ValueError(
            f"the sum was clipped with max_grad_norm={clipped.max_grad_norm} ({clipped.clipping}), the plan assumes "
            f"{plan.max_grad_norm} ({plan.clipping}); clip with the plan's own settings"
        )
    if noise.is_secure == plan.test_mode:
        kind, mode = ("secure", "in test mode") if noise.is_secure else ("repeatable", "not in test mode")
        raise ValueError(f"the noise stream is {kind} and the plan is {mode}; take the stream from plan.noise_stream()")
    if ledger.plan_hash != plan.hash:
        raise ValueError(f"the ledger belongs to the plan {ledger.plan_hash}, the release to the plan {plan.hash}")
    if not clipped.tensors:
        raise ValueError("the clipped sum has no tensors: no parameter is trained")
    if len(devices := {x.device for x in clipped.tensors.values()}) > 1:
        raise ValueError(f"the clipped sum lies on several devices: {sorted(map(str, devices))}; move it to one")
    for name, x in clipped.tensors.items():
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the clipped sum of '{name}' is {x.dtype}; sum and noise need float32 or float64")
    _check_finite(clipped.tensors)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """A finite sum of its entries answers for a tensor, and all of them are asked at once."""
    if bool(torch.stack([x.sum().isfinite() for x in tensors.values()]).all()):
        return
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"the clipped sum of '{name}' is not finite; an example that is not must contribute zero")
