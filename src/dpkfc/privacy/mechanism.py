"""The one place where noise is added: a clipped sum becomes a noisy mean, charged before it exists.

Everything downstream (optimizers, filters, checkpoints) takes only a `Released`. The noise is
Gaussian in the floating-point numbers of the sum, or Gaussian and rounded, with the sum, to one
grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from torch import Tensor

from dpkfc.privacy.integration import Floats
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.releases import MOST_STEPS, ROUNDED, ExtraRelease, charge_extra, grid_of
from dpkfc.privacy.rng import CHUNK, NoiseStream, draw_key

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# --------------------------------------------------------------------------------------------------
# Standard normal numbers on an accelerator: ChaCha20 (RFC 8439) in integer operations of torch.
#
# The numbers are made from the keystream as `rng` makes them, with equal precision and equal tails.
# Every draw has a key of its own, and every chunk of a draw a nonce of its own.
#
# Why not copy the CPU's numbers: the CPU stream takes about 15 ns of one core for a float32 number
# (260 MB/s), far more than the copy. The cipher starts about 560 kernels a chunk. At 5 µs a kernel,
# an estimate that no GPU has confirmed, that is 3 ms for up to 4 million numbers. So the cipher
# wins from about 2·10⁵ numbers on one core, and the mechanism copies draws up to 1.3·10⁵.
# `benchmarks/noise.py --device cuda` measures both.

NONCE_CHUNK = 1 << 22  # numbers a nonce; 16 MiB of words
_WORDS = 16  # words of 32 bits in a block
_ROUNDS = 10  # double rounds
_LOW_32 = (1 << 32) - 1
_LOW_53 = (1 << 53) - 1
# The radius gets 53 more bits where its own bits fall below these bounds, as in `rng`.
_RARE = 1 << 10
_RARE_FINE = 1 << 45


def compute_keystream(
    key: bytes, nonce: bytes, counter: int, blocks: int, device: torch.device
) -> Tensor:
    """Compute consecutive blocks of the ChaCha20 keystream.

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        counter: number of the first block.
        blocks: number of blocks; the last number is below 2³².
        device: where to compute.

    Returns:
        The keystream as int32 words `[16 * blocks]`, each word in little-endian order.

    Raises:
        ValueError: a key, a nonce or a counter of another size.

    Source:
        RFC 8439, section 2.3.
    """
    stop = counter + blocks
    if len(key) != 32 or len(nonce) != 12 or not 0 <= counter <= stop <= 1 << 32:
        raise ValueError(
            "ChaCha20 needs a key of 32 bytes, a nonce of 12 and counters below 2³²; got"
            f" {len(key)}, {len(nonce)} and {counter} + {blocks}"
        )
    first = b"expand 32-byte k" + key + counter.to_bytes(4, "little") + nonce
    words = np.frombuffer(first, "<i4").astype(np.int32)
    column = torch.from_numpy(words).to(device)
    column = column.unsqueeze(1)
    # `[16, blocks]`
    start = column.repeat(1, blocks)
    start[12] += torch.arange(blocks, dtype=torch.int32, device=device)

    rows = [row.clone() for row in start.view(4, 4, blocks)]
    for _ in range(_ROUNDS):
        _mix(rows)
        _roll(rows, -1)
        _mix(rows)
        _roll(rows, 1)
    state = torch.cat(rows)
    state.add_(start)
    return state.t().reshape(-1)


def _roll(rows: list[Tensor], direction: int) -> None:
    """Roll row i by i words; this turns diagonals into columns, and back."""
    for i in (1, 2, 3):
        rows[i] = torch.roll(rows[i], direction * i, 0)


def _mix(rows: list[Tensor]) -> None:
    """Apply the quarter round to all four columns of all blocks, in place."""
    a, b, c, d = rows
    spare = torch.empty_like(a)
    steps = [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)]
    for total, term, word, bits in steps:
        total.add_(term)
        word.bitwise_xor_(total)
        # Rotate to the left. A right shift of int32 repeats the sign, so the mask clears the upper
        # bits.
        torch.bitwise_right_shift(word, 32 - bits, out=spare)
        spare.bitwise_and_((1 << bits) - 1)
        word.bitwise_left_shift_(bits)
        word.bitwise_or_(spare)


def draw_normal(key: bytes, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw independent N(0, 1) numbers on a device.

    Args:
        key: 32 fresh bytes, used for this draw alone.
        size: number of numbers, >= 0.
        dtype: float32 or float64.
        device: with float64 and integer arithmetic.

    Returns:
        The numbers `[size]`.

    Guarantee:
        An observer who cannot break ChaCha20 cannot predict one number from the others.

    Raises:
        RuntimeError: the device computes a wrong keystream.
    """
    _check_device(device)
    out = torch.empty(size, dtype=dtype, device=device)
    for chunk, part in enumerate(out.split(NONCE_CHUNK)):
        _fill_normal(part, _Keystream(key, chunk, device))
    return out


@cache
def _check_device(device: torch.device) -> None:
    """Compare the keystream of a device with that of the `cryptography` package, once a process."""
    key = bytes(range(32))
    nonce = bytes(range(12))
    blocks = 33
    words = compute_keystream(key, nonce, 1, blocks, device).cpu().numpy()
    counter = (1).to_bytes(4, "little")
    cipher = Cipher(algorithms.ChaCha20(key, counter + nonce), mode=None)
    expected = cipher.encryptor().update(bytes(64 * blocks))
    if words.astype("<i4").tobytes() != expected:
        raise RuntimeError(
            f"{device} computes a wrong ChaCha20 keystream; train on the CPU or update torch"
        )


class _Keystream:
    """Hands out the words of one nonce in order; every request begins with a new block."""

    def __init__(self, key: bytes, chunk: int, device: torch.device) -> None:
        self._key = key
        self._nonce = chunk.to_bytes(12, "little")
        self._device = device
        self._counter = 0

    def take(self, words: int) -> Tensor:
        """Return the next int32 words `[words]`."""
        if not words:
            return torch.empty(0, dtype=torch.int32, device=self._device)
        blocks = -(-words // _WORDS)
        stream = compute_keystream(self._key, self._nonce, self._counter, blocks, self._device)
        self._counter += blocks
        return stream[:words]

    def take_53(self, count: int) -> Tensor:
        """Return the next uniform integers of 53 bits, int64 `[count]`."""
        words = self.take(2 * count)
        wide = words.view(torch.int64) >> 11
        return wide & _LOW_53


def _fill_normal(out: Tensor, stream: _Keystream) -> None:
    """Fill `out` by the transform of Box and Muller, as `rng._fill_normal` does."""
    half = -(-out.numel() // 2)
    if out.dtype == torch.float32:
        words = stream.take(2 * half)
        bits = words.to(torch.int64) & _LOW_32
        bound = _RARE
        unit = 2.0**-32
    else:
        bits = stream.take_53(2 * half)
        bound = _RARE_FINE
        unit = 2.0**-53
    radius = bits[:half].double()
    is_rare = bits[:half] < bound
    rare = is_rare.nonzero().squeeze(1)
    more_bits = stream.take_53(rare.numel())
    fraction = more_bits.double() * 2.0**-53 + 2.0**-54
    refined = radius[rare] + fraction
    radius += 0.5
    radius[rare] = refined
    radius.mul_(unit)
    radius.log_()
    radius.mul_(-2.0)
    radius.sqrt_()
    scale = radius.to(out.dtype)
    angle = bits[half:].to(out.dtype)
    angle.mul_(2 * math.pi * unit)
    rest = out.numel() - half
    out[:half] = angle.cos() * scale
    out[half:] = angle[:rest].sin() * scale[:rest]


# --------------------------------------------------------------------------------------------------

LARGE = 1 << 24  # larger draws are used in pieces
# Tensors by name.
Tensors = dict[str, Tensor]
NamedTensors = Mapping[str, Tensor]
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
        clipping: one that `gradients.clipped_sum.contribution_bound` knows.
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
            release. After a read-out or a filter it maps parameter names to the variance of each
            entry. None where it is unknown.
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
    """Charge the ledger, add N(0, stddev²) to the sum, divide by the expected batch size.

    The guarantee is the plan's event for one release, provided that the sum was clipped as stated.
    With `plan.noise` "rounded" the guarantee covers the addition in the computer. With "gaussian"
    it holds for real numbers.

    Args:
        clipped: the clipped sum of one logical batch, all zero for an empty batch, which is a
            release too.
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
    normal = _choose_source(noise, step, device, numbers)
    if grid:
        gradients = rounded_release(tensors, stddev, divisor, normal, grid)
    else:
        gradients = gaussian_release(tensors, stddev, divisor, normal)
    variance = (stddev / divisor) ** 2
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
        tensors: name to a float32 or float64 tensor; not changed.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: maps (size, dtype) to independent N(0, 1) numbers `[size]` on the device of the
            tensors. For a large model on a CPU it is called for consecutive pieces of the draw.

    Returns:
        New tensors of the same names, shapes and types.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)
    with torch.no_grad():
        if stddev == 0:
            return {name: x.detach() / divisor for name, x in tensors.items()}
        widest = torch.float32
        is_on_cpu = True
        sizes = []
        for x in tensors.values():
            widest = torch.promote_types(widest, x.dtype)
            is_on_cpu = is_on_cpu and x.device.type == "cpu"
            sizes.append(x.numel())
        numbers = sum(sizes)
        if numbers > LARGE and is_on_cpu:
            return _release_in_pieces(tensors, stddev, divisor, normal, widest)
        pieces = normal(numbers, widest).split(sizes)
        noisy = {}
        for (name, x), z in zip(tensors.items(), pieces, strict=True):
            noise = z.to(x.dtype).view(x.shape)
            noise.mul_(stddev)
            noise.add_(x.detach())
            noise.div_(divisor)
            noisy[name] = noise
        return noisy


def _release_in_pieces(
    tensors: NamedTensors, stddev: float, divisor: float, normal: Normal, dtype: torch.dtype
) -> Tensors:
    """Return the result of `gaussian_release` from a draw in pieces.

    New memory for the whole draw would cost more than the draw.
    """
    remaining = sum(x.numel() for x in tensors.values())
    noisy = {}
    z: NDArray[Any] = np.zeros(0)
    for name, x in tensors.items():
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        noisy[name] = result
        # Numpy, because threads of torch would wait for the threads of the noise.
        flat = x.detach().reshape(-1).numpy()
        out = result.view(-1).numpy()
        start = 0
        while start < len(flat):
            if not len(z):
                z = normal(min(CHUNK, remaining), dtype).numpy()
                remaining -= len(z)
            missing = len(flat) - start
            piece = z[:missing].astype(flat.dtype, copy=False)
            z = z[missing:]
            stop = start + len(piece)
            part = out[start:stop]
            np.multiply(piece, flat.dtype.type(stddev), out=part)
            part += flat[start:stop]
            part /= flat.dtype.type(divisor)
            start = stop
    return noisy


def rounded_release(
    tensors: NamedTensors, stddev: float, divisor: float, normal: Normal, grid: float
) -> Tensors:
    """Return (x̂ + ẑ) / divisor, where x̂ = x and ẑ = stddev · z are rounded to the grid.

    Sum and noise are integers of 52 bits while they are added, so x̂ + ẑ is exact: it is stddev · z
    + x̂ rounded to the grid. Entries of x beyond 2⁵¹ steps are clamped first, which does not
    increase the distance of any two sums. Zero has one sign.

    Args:
        tensors: name to a float32 or float64 tensor; not changed.
        stddev: absolute standard deviation, >= 0; at 0 nothing is drawn.
        divisor: positive.
        normal: as for `gaussian_release`; asked for float64.
        grid: a power of two, from `grid_of`.

    Returns:
        New tensors of the same names, shapes and types. A float64 tensor lies on the grid where the
        divisor is a power of two.

    Raises:
        ValueError: stddev negative or not finite, or divisor not positive and finite.
    """
    _check_scale(stddev, divisor)
    sizes = [x.numel() for x in tensors.values()]
    with torch.no_grad():
        pieces: Sequence[Tensor | None] = [None] * len(sizes)
        if stddev > 0:
            pieces = normal(sum(sizes), torch.float64).split(sizes)
        noisy = {}
        for (name, x), z in zip(tensors.items(), pieces, strict=True):
            device = torch.device("cpu")
            if z is not None:
                device = z.device
            steps = x.detach().to(device, torch.float64, copy=True)
            steps.div_(grid)
            steps.round_()
            steps.clamp_(-MOST_STEPS, MOST_STEPS)
            # Adding zero turns −0 into 0: −0 would reveal the sign of x.
            steps.add_(0.0)
            if z is not None:
                noise = z.view(x.shape)
                noise.mul_(stddev / grid)
                steps += noise.round_()
            steps.mul_(grid / divisor)
            noisy[name] = steps.to(x)
        return noisy


def _check_scale(stddev: float, divisor: float) -> None:
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and >= 0, got {stddev}")
    if not 0 < divisor < math.inf:
        raise ValueError(f"divisor must be positive and finite, got {divisor}")


def _choose_source(noise: NoiseStream, step: int, device: torch.device, numbers: int) -> Normal:
    """Return a function (size, dtype) → N(0, 1) numbers: the source of the noise of one release.

    On a CPU the source is the stream. All `numbers` of the release are one draw of the stream, at
    once, or in pieces where the caller asks for fewer. On a CUDA device the source is ChaCha20
    under a fresh key. Small draws, and draws for other devices, are copied from the stream. In test
    mode a device uses its own generator, seeded with the step.
    """
    pieces: Iterator[NDArray[Any]] | None = None
    generator = None
    if device.type != "cpu" and not noise.is_secure:
        generator = torch.Generator(device=device).manual_seed(noise.device_seed(step))

    def draw_from_stream(size: int, dtype: torch.dtype) -> Tensor:
        nonlocal pieces
        kind = str(dtype).removeprefix("torch.")
        if size == numbers or numbers <= LARGE:
            return torch.from_numpy(noise.normal(size, step, kind))
        if pieces is None:
            pieces = noise.pieces(numbers, step, kind)
        return torch.from_numpy(next(pieces))

    def draw_for_device(size: int, dtype: torch.dtype) -> Tensor:
        if device.type == "mps" and dtype == torch.float64:
            # Without float64 on the device `rounded_release` works on the CPU.
            return draw_from_stream(size, dtype)
        if generator is not None:
            return torch.randn(size, dtype=dtype, device=device, generator=generator)
        if device.type == "cuda" and size > CHUNK:
            return draw_normal(draw_key(), size, dtype, device)
        return draw_from_stream(size, dtype).to(device)

    return draw_from_stream if device.type == "cpu" else draw_for_device


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
    are_finite = [x.sum().isfinite() for x in tensors.values()]
    if torch.stack(are_finite).all():
        return
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise ValueError(
                f"the clipped sum of '{name}' is not finite; a non-finite example must contribute"
                " zero"
            )
