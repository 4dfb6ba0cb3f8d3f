"""Turn the words of a cipher into standard normal numbers: the transform of Box and Muller (1958).

In float32, 32 bits decide the angle and 32 the radius, and 53 more where the radius exceeds 5.5;
the tail ends at 10.9 standard deviations. In float64 both have 53 bits, and 53 more where the
radius exceeds 3.3; the tail ends at 12.1. The square of the radius is computed in float64 for both.

The operations are torch's, which are vectorised on every processor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

# Radii whose 32 bits fall below this get more bits: about one in four million.
_RARE = 1 << 10
# The same for 53 bits: one in 256. The radius is then known to 2⁻⁴⁵ of its probability anywhere.
_RARE_FINE = 1 << 45


def _constant(value: float) -> Tensor:
    """Return a factor as a tensor: an operation that makes one of a number costs more."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


_MINUS_TWO = _constant(-2.0)
# By the number of bits.
_HALF_UNIT = {bits: _constant(0.5 * 2.0**-bits) for bits in (32, 53)}
_ANGLE_UNIT = {bits: _constant(2 * math.pi * 2.0**-bits) for bits in (32, 53)}

Words = Callable[[int, int], Tensor]
"""Maps a count and a number of bits, 32 or 53, to so many uniform integers that float64 holds.

They are valid until the next call.
"""


def make_aligned(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return memory `[size]` that begins at a multiple of 64 bytes, where vectors are read fast."""
    kind: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return torch.empty(size, dtype=kind, device="cpu").numpy()


class _Scratch(threading.local):
    """Memory of each thread, in which every chunk is made: fresh pages cost more than the numbers.

    What stays in it says no more than the sum and the noisy sum, which lie in the same memory.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def take(self, size: int, dtype: str) -> NDArray[Any]:
        """Return memory `[size]`, valid until the next call for the same type."""
        array = self._arrays.get(dtype)
        if array is None or len(array) < size:
            array = self._arrays[dtype] = make_aligned(size, dtype)
        return array[:size]


SCRATCH = _Scratch()
# For the numbers themselves, where the thread that makes a chunk uses it too.
CHUNKS = _Scratch()


def _take(like: Tensor, size: int, dtype: str) -> Tensor:
    """Return memory `[size]` on the device of a tensor."""
    if like.is_cpu:
        return torch.from_numpy(SCRATCH.take(size, dtype))
    return like.new_empty(size, dtype=getattr(torch, dtype))


def fill_normal(out: Tensor, words: Words) -> None:
    """Fill a float32 or float64 tensor `[n]` with independent N(0, 1) numbers.

    Args:
        out: the numbers.
        words: of a keystream; each is used once.
    """
    # A pair of words makes two numbers: radius times cosine, and radius times sine, of an angle.
    half = -(-out.numel() // 2)
    rest = out.numel() - half
    bits = 53
    bound = _RARE_FINE
    if out.dtype == torch.float32:
        bits = 32
        bound = _RARE
    unit = 2.0**-bits
    uniform = words(2 * half, bits)
    radius = _take(out, half, "float64")
    radius.copy_(uniform[:half])
    angle = out[:half]
    angle.copy_(uniform[half:])
    rare = None
    if half and float(radius.amin()) < bound:
        is_rare = radius < bound
        rare = is_rare.nonzero().squeeze(1)
        fraction = words(rare.numel(), 53).double()
        fraction.mul_(2.0**-53).add_(2.0**-54)
        refined = fraction.add_(radius[rare])
        refined.mul_(unit)
    # From k to (k + ½) · unit in one pass.
    torch.add(_HALF_UNIT[bits], radius, alpha=unit, out=radius)
    if rare is not None:
        radius[rare] = refined
    scale = radius.log_()
    if out.dtype != radius.dtype:
        scale = _take(out, half, "float32")
        scale.copy_(radius)
    scale.mul_(_MINUS_TWO)
    scale.sqrt_()
    angle.mul_(_ANGLE_UNIT[bits])
    sines = out[half:]
    torch.sin(angle[:rest], out=sines)
    sines.mul_(scale[:rest])
    angle.cos_()
    angle.mul_(scale)


@contextmanager
def serial_operations() -> Iterator[None]:
    """Run operations of torch without its threads, in this thread and in new ones.

    The threads that draw noise work on pieces that fit a cache. To divide an operation on one among
    more threads would cost more than it takes, and far more where other work keeps the cores busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fill_array(out: NDArray[Any], words: Callable[[int, int], NDArray[Any]]) -> None:
    """Do as `fill_normal` for arrays of numpy."""
    fill_normal(torch.from_numpy(out), lambda count, bits: torch.from_numpy(words(count, bits)))
