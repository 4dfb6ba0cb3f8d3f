"""The one place where noise is added: a clipped sum becomes a noisy mean, charged before it exists.

Everything downstream (optimizers, filters, checkpoints) takes only a `Released`. The noise is
Gaussian in the floating-point numbers of the sum, or Gaussian and rounded, with the sum, to one
grid.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dpkfc.privacy.correlated_noise import BandedNoise
from dpkfc.privacy.extra_releases import ExtraRelease, charge_extra
from dpkfc.privacy.gaussian_pairs import Floats
from dpkfc.privacy.grid import MOST_STEPS, ROUNDED, grid_of
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.normal_numbers import serial_operations
from dpkfc.privacy.rng import CHUNK, NoiseStream, Use, draw_key
from dpkfc.tensors import NamedTensors, Tensors

if TYPE_CHECKING:
    from dp_accounting import DpEvent
from dpkfc.privacy.chacha20 import draw_normal

Normal = Callable[[int, torch.dtype], Tensor]


class MechanismPlan(Protocol):
    """The settings of a plan that the mechanism reads."""

    @property
    def max_grad_norm(self) -> float: ...  # noqa: D102
    @property
    def clipping(self) -> str: ...  # noqa: D102
    @property
    def noise(self) -> str: ...  # noqa: D102
    @property
    def bands(self) -> int: ...  # noqa: D102
    @property
    def noise_multiplier(self) -> float: ...  # noqa: D102
    @property
    def sensitivity(self) -> float: ...  # noqa: D102
    @property
    def stddev(self) -> float: ...  # noqa: D102
    @property
    def expected_batch_size(self) -> int: ...  # noqa: D102
    @property
    def event(self) -> DpEvent: ...  # noqa: D102
    @property
    def test_mode(self) -> bool: ...  # noqa: D102
    @property
    def hash(self) -> str: ...  # noqa: D102


class ReleaseLedger(Protocol):
    """What a release needs of a ledger; a charge that was made before can stand for one."""

    @property
    def plan_hash(self) -> str: ...  # noqa: D102
    def charge(  # noqa: D102
        self, step: int, event: DpEvent, noise: float, stddev: float, sensitivity: float, /
    ) -> int: ...


@dataclass(frozen=True)
class ClippedSum:
    """PRIVATE: the sum of per-example gradients of a batch, each clipped over all tensors.

    Attributes:
        tensors: parameter name to its part of the sum, in the space of the clip.
        max_grad_norm: C of the clip.
        clipping: one that `clipping.contribution_bound` knows.
    """

    tensors: Tensors
    max_grad_norm: float
    clipping: str = "flat"


@dataclass(frozen=True, kw_only=True)
class Released:
    """A public gradient: (clipped sum + noise) / expected batch size.

    Attributes:
        gradients: parameter name to its part, in the space of the clipped sum.
        noise_variance: variance of the noise in every entry, (stddev / expected batch size)² for a
            release with independent noise. After a read-out or a filter it maps parameter names to
            the variance of each entry. None where it is unknown.
        step: number of the step.
        release: number of the release in the ledger, from 1.
        notes: public numbers worth logging that post-processing adds.
    """

    gradients: Tensors
    noise_variance: float | Mapping[str, Tensor | float] | None
    step: int
    release: int
    notes: Mapping[str, float] = field(default_factory=dict)

    def variance_of(self, name: str) -> Tensor | float:
        """Return the variance of the noise in one parameter.

        It is a number, or a tensor that broadcasts to the shape of the parameter.

        Raises:
            ValueError: the variance is unknown.
        """
        if self.noise_variance is None:
            raise ValueError(
                "the variance of the noise is not known here: an adaptive step came before"
            )
        if isinstance(self.noise_variance, Mapping):
            return self.noise_variance[name]
        return self.noise_variance

    def scaled_variance(self, factor: float) -> float | dict[str, Tensor | float] | None:
        """Return `noise_variance` times a number, in the same form."""
        if isinstance(self.noise_variance, Mapping):
            return {name: variance * factor for name, variance in self.noise_variance.items()}
        if self.noise_variance is None:
            return None
        return self.noise_variance * factor


def release(
    clipped: ClippedSum, plan: MechanismPlan, noise: NoiseStream, ledger: ReleaseLedger, step: int
) -> Released:
    """Charge the ledger, add Gaussian noise to the sum, divide by the expected batch size.

    The noise is stddev · z with independent z ~ N(0, 1), or with more than one band stddev · C⁻¹ z
    (`correlated_noise`).

    The guarantee is the plan's event for one release, provided that the sum was clipped as stated.
    With `plan.noise` "rounded" the guarantee covers the addition in the computer. With "gaussian"
    it holds for real numbers.

    Args:
        clipped: the clipped sum of one logical batch, all zero for an empty batch, which is a
            release too. Its memory may become the memory of the release.
        plan: sensitivity, noise and divisor.
        noise: the stream of the run; only a plan in test mode takes a repeatable stream.
        ledger: of the same plan.
        step: number of the step, >= 0.

    Raises:
        ValueError: the sum, the stream or the ledger does not fit the plan, or the sum is not
            finite floating point of at least 32 bits on one device. Nothing was charged.
        BudgetExhausted: the plan allows no further release. Nothing was charged.
        LedgerError: the charge could not be recorded; nothing was released.
    """
    _check(clipped, plan, noise, ledger, step)
    tensors = clipped.tensors
    stddev = plan.stddev
    divisor = plan.expected_batch_size
    numbers = sum(x.numel() for x in tensors.values())
    grid = 0.0
    if plan.noise == ROUNDED:
        grid = grid_of(plan.sensitivity, max(1, numbers), stddev)
    number = ledger.charge(step, plan.event, plan.noise_multiplier, stddev, plan.sensitivity)
    device = next(iter(tensors.values())).device
    correlation = BandedNoise(plan.bands)
    is_correlated = plan.bands > 1
    if is_correlated:
        normal = _correlate(noise, step, device, numbers, number, correlation)
    else:
        normal = _choose_source(noise, step, device, numbers)
    if grid:
        gradients = rounded_release(tensors, stddev, divisor, normal, grid)
    else:
        gradients = gaussian_release(tensors, stddev, divisor, normal)
    variance = (stddev / divisor) ** 2
    if is_correlated:
        variance *= correlation.variance(noise.correlated_draws)
    return Released(gradients=gradients, noise_variance=variance, step=step, release=number)


class VectorPlan(Protocol):
    """What the release of a vector reads of a plan."""

    @property
    def hash(self) -> str:
        """Return the hash that a ledger of the plan has."""

    def noise_stream(self) -> NoiseStream:
        """Return where the noise comes from."""


def release_vector(
    vector: Floats, kind: ExtraRelease, plan: VectorPlan, ledger: Ledger, draw: int
) -> Floats:
    """Charge the ledger, then add rounded noise to a private vector.

    Args:
        vector: `[n]`; one record (unit) more changes its rounded values by at most
            `kind.sensitivity`, in the L2 norm. A value that is not a number counts as 0.
        kind: one of the plan.
        plan: of the run; its noise is secure but in test mode.
        ledger: of the same plan.
        draw: number of the draw, in test mode different from every step.

    Returns:
        The noisy vector `[n]`, which is public.

    Raises:
        BudgetExhausted: the plan allows no further release of this kind; nothing was charged.
        LedgerError: the charge could not be recorded; nothing was released.
        ValueError: the ledger of another plan, an empty vector, or a sensitivity that rounding
            cannot keep.
    """
    if ledger.plan_hash != plan.hash:
        raise ValueError(f"{ledger.name} belongs to another plan than this release: open its own")
    vector = np.nan_to_num(np.asarray(vector, np.float64))
    vector = vector.reshape(-1)
    size = len(vector)
    noise = plan.noise_stream()
    grid = grid_of(kind.sensitivity, size, kind.stddev)
    charge_extra(ledger, kind, draw)
    normal = _choose_source(noise, draw, torch.device("cpu"), size)
    tensors = {"vector": torch.from_numpy(vector)}
    noisy = rounded_release(tensors, kind.stddev, 1.0, normal, grid)
    return noisy["vector"].numpy()


def gaussian_release(
    tensors: NamedTensors, stddev: float, divisor: float, normal: Normal
) -> Tensors:
    """Return (x + stddev · z) / divisor with one draw of standard normal z over all tensors.

    Args:
        tensors: name to a float32 or float64 tensor, whose memory the result takes where it is
            contiguous.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: maps (size, dtype) to independent N(0, 1) numbers `[size]` on the device of the
            tensors. For a model on a CPU it is called for consecutive pieces of the draw, each of
            which is used before the next is asked for.

    Returns:
        Contiguous tensors of the same names, shapes and types.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)
    widest = torch.float32
    for x in tensors.values():
        widest = torch.promote_types(widest, x.dtype)

    def finish(x: Tensor, z: Tensor) -> None:
        x.add_(z.to(x.dtype), alpha=stddev).div_(divisor)

    return _release_in_pieces(tensors, normal if stddev else _draw_zeros, widest, finish)


@torch.no_grad()
def add_waiting_noise(rows: Tensor, stddev: Tensor, noise: NoiseStream, draw: int) -> Tensor:
    """Return rows of weights with the noise of the steps that have passed them over.

    Such steps were charged, and gave these rows noise alone: independent Gaussian noise, whose sum
    is one Gaussian with the sum of the variances. It holds for real numbers, as "gaussian" does.

    Args:
        rows: float32 or float64 `[n, d]`.
        stddev: of the sum that each row waits for, float64 `[n]`.
        noise: the stream of the run.
        draw: number of the draw; in test mode no other draw of the run may have it.
    """
    normal = _choose_source(noise, draw, rows.device, rows.numel())
    z = normal(rows.numel(), rows.dtype).view_as(rows)
    return z.mul_(stddev.to(z.dtype).unsqueeze(1)).add_(rows)


def _draw_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Return the noise of a standard deviation of 0."""
    return torch.zeros(size, dtype=dtype)


@torch.no_grad()
def _release_in_pieces(
    tensors: NamedTensors,
    normal: Normal,
    dtype: torch.dtype,
    finish: Callable[[Tensor, Tensor], None],
) -> Tensors:
    """Return the tensors of a sum after `finish` has changed each with its share of one draw.

    On a CPU the draw comes in pieces that fit a cache, and each thread finishes what it has drawn:
    new memory for the whole would cost more than the draw. So the release takes the memory of the
    sum, which then outlives no release either.

    Args:
        tensors: name to a part of the sum.
        normal: the source of the draw.
        dtype: of the draw.
        finish: changes a part of the sum by the noise, which it may change too; both `[n]`.
    """
    noisy = {}
    starts: list[int] = []
    parts: list[Tensor] = []
    numbers = 0
    for name, x in tensors.items():
        noisy[name] = x.detach().contiguous()
        starts.append(numbers)
        parts.append(noisy[name].view(-1))
        numbers += x.numel()

    def use(start: int, z: Tensor) -> None:
        stop = start + len(z)
        for i in range(bisect_right(starts, start) - 1, len(parts)):
            begin = starts[i]
            if begin >= stop:
                break
            here = slice(max(start, begin) - begin, min(stop - begin, len(parts[i])))
            drawn = z[here.start + begin - start : here.stop + begin - start]
            finish(parts[i][here], drawn)

    if isinstance(normal, _Pieces):
        normal.hand_out(dtype, use)
    elif numbers:
        is_on_cpu = all(x.is_cpu for x in tensors.values())
        with serial_operations() if is_on_cpu else nullcontext():
            use(0, normal(numbers, dtype))
    return noisy


def rounded_release(
    tensors: NamedTensors, stddev: float, divisor: float, normal: Normal, grid: float
) -> Tensors:
    """Return (x̂ + ẑ) / divisor, where x̂ = x and ẑ = stddev · z are rounded to the grid.

    Sum and noise are integers of 52 bits while they are added, so x̂ + ẑ is exact: it is stddev · z
    + x̂ rounded to the grid. Entries of x beyond 2⁵¹ steps are clamped first, which does not
    increase the distance of any two sums. Zero has one sign.

    Args:
        tensors: as for `gaussian_release`.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: as for `gaussian_release`; asked for float64.
        grid: a power of two, from `grid_of`.

    Returns:
        Contiguous tensors of the same names, shapes and types. A float64 tensor lies on the grid
        where the divisor is a power of two.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)

    def finish(x: Tensor, z: Tensor) -> None:
        # The grid is a power of two, so that the product is the quotient.
        steps = x.to(z.device, torch.float64, copy=True).mul_(1 / grid).round_()
        steps.clamp_(-MOST_STEPS, MOST_STEPS)
        # Adding zero turns −0 into 0: −0 would reveal the sign of x.
        steps.add_(0.0)
        steps.add_(z.mul_(stddev / grid).round_())
        x.copy_(steps.mul_(grid / divisor))

    return _release_in_pieces(tensors, normal if stddev else _draw_zeros, torch.float64, finish)


def _check_scale(stddev: float, divisor: float) -> None:
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and >= 0, got {stddev}")
    if not 0 < divisor < math.inf:
        raise ValueError(f"divisor must be positive and finite, got {divisor}")


@dataclass(frozen=True)
class _Pieces:
    """A source of noise on a CPU: one draw of a stream, in pieces.

    Attributes:
        numbers: of the draw.
        draw: makes the draw, from its type, what uses each piece, and the most threads.
    """

    numbers: int
    draw: Callable[[str, Use, int], None]

    def hand_out(self, dtype: torch.dtype, use: Callable[[int, Tensor], None]) -> None:
        """Call a function, in several threads, with the place and the numbers of each piece."""
        threads = torch.get_num_threads()
        kind = str(dtype).removeprefix("torch.")
        with serial_operations():
            self.draw(kind, lambda start, z: use(start, torch.from_numpy(z)), threads)

    def __call__(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return the first numbers `[size]` of the draw."""
        out = torch.empty(self.numbers, dtype=dtype)

        def copy(start: int, z: Tensor) -> None:
            out[start : start + len(z)] = z

        self.hand_out(dtype, copy)
        return out[:size]


def _choose_source(noise: NoiseStream, step: int, device: torch.device, numbers: int) -> Normal:
    """Return a function (size, dtype) → N(0, 1) numbers: the source of the noise of one release.

    On a CPU the source is the stream. On a CUDA device it is ChaCha20 under a fresh key. Small
    draws, and draws for other devices, are copied from the stream. In test mode a device uses its
    own generator, seeded with the step.
    """

    def draw(kind: str, use: Use, threads: int) -> None:
        if numbers > CHUNK:
            noise.draw(numbers, step, kind).hand_out(use, threads)
        else:
            use(0, noise.normal(numbers, step, kind))

    from_stream = _Pieces(numbers, draw)
    if device.type == "cpu":
        return from_stream
    generator = None
    if not noise.is_secure:
        generator = torch.Generator(device=device).manual_seed(noise.device_seed(step))

    def draw_for_device(size: int, dtype: torch.dtype) -> Tensor:
        if device.type == "mps" and dtype == torch.float64:
            # Without float64 on the device `rounded_release` works on the CPU.
            return from_stream(size, dtype)
        if generator is not None:
            return torch.randn(size, dtype=dtype, device=device, generator=generator)
        if device.type == "cuda" and size > CHUNK:
            return draw_normal(draw_key(), size, dtype, device)
        return from_stream(size, dtype).to(device)

    return draw_for_device


def _correlate(
    noise: NoiseStream,
    step: int,
    device: torch.device,
    numbers: int,
    release: int,
    correlation: BandedNoise,
) -> Normal:
    """Return a source of noise that is correlated with earlier releases, drawn on the CPU."""

    def draw(kind: str, use: Use, threads: int) -> None:
        correlated = noise.correlated_draw(numbers, step, kind, release, correlation)
        correlated.hand_out(use, threads)

    from_stream = _Pieces(numbers, draw)
    if device.type == "cpu":
        return from_stream
    return lambda size, dtype: from_stream(size, dtype).to(device)


def _check(
    clipped: ClippedSum, plan: MechanismPlan, noise: NoiseStream, ledger: ReleaseLedger, step: int
) -> None:
    """Refuse a release that would cost more than the plan states, before it is charged."""
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    if (clipped.max_grad_norm, clipped.clipping) != (plan.max_grad_norm, plan.clipping):
        raise ValueError(
            f"the sum was clipped with max_grad_norm={clipped.max_grad_norm} ({clipped.clipping}),"
            " the plan assumes "
            f"{plan.max_grad_norm} ({plan.clipping}); clip with the plan's own settings"
        )
    if noise.is_secure == plan.test_mode:
        kind = "repeatable"
        mode = "not in test mode"
        if noise.is_secure:
            kind = "secure"
            mode = "in test mode"
        raise ValueError(
            f"the noise stream is {kind} and the plan is {mode}; take the stream from"
            " plan.noise_stream()"
        )
    if ledger.plan_hash != plan.hash:
        raise ValueError(
            f"the ledger belongs to the plan {ledger.plan_hash}, the release to the plan"
            f" {plan.hash}"
        )
    if not clipped.tensors:
        raise ValueError("the clipped sum has no tensors: no parameter is trained")
    devices = {x.device for x in clipped.tensors.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the clipped sum lies on several devices: {sorted(map(str, devices))}; move it to one"
        )
    for name, x in clipped.tensors.items():
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the clipped sum of '{name}' is {x.dtype}; sum and noise need float32 or float64"
            )
    _check_finite(clipped.tensors)


def _check_finite(tensors: NamedTensors) -> None:
    """Check that all entries are finite, by the sums of all tensors at once."""
    sums = [x.sum() for x in tensors.values()]
    if torch.stack(sums).isfinite().all():
        return
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise ValueError(
                f"the clipped sum of '{name}' is not finite; a non-finite example must contribute"
                " zero"
            )
