"""Draw standard normal numbers on an accelerator by ChaCha20 (RFC 8439) in operations of torch.

Every draw has a key of its own, and every chunk of a draw a nonce of its own. `normal_numbers`
makes the numbers, as on a CPU.

Why not copy the CPU's numbers: the CPU stream takes about 3 ns of one core for a float32 number,
far more than the copy. The cipher starts about 560 kernels a chunk. At 5 µs a kernel, an estimate
that no GPU has confirmed, that is 3 ms for up to 4 million numbers. So the cipher wins from about
10⁶ numbers on one core. `benchmarks/noise.py --device cuda` measures both.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from dpkfc.privacy.normal_numbers import fill_normal

NONCE_CHUNK = 1 << 22  # numbers a nonce; 16 MiB of words
_WORDS = 16  # words of 32 bits in a block
_ROUNDS = 10  # double rounds
_LOW_32 = (1 << 32) - 1
_LOW_53 = (1 << 53) - 1


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
        fill_normal(part, _Keystream(key, chunk, device).take)
    return out


@cache
def _check_device(device: torch.device) -> None:
    """Compare the keystream of a device with the `cryptography` package's, once a process."""
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

    def take(self, count: int, bits: int) -> Tensor:
        """Return the next uniform integers of 32 or 53 bits, int64 `[count]`."""
        blocks = -(-count * (1 if bits == 32 else 2) // _WORDS)
        words = compute_keystream(self._key, self._nonce, self._counter, blocks, self._device)
        self._counter += blocks
        if bits == 32:
            return words[:count].to(torch.int64) & _LOW_32
        wide = words.view(torch.int64)[:count] >> 11
        return wide & _LOW_53
