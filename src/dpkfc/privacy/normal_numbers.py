"""Turn the words of a cipher into standard normal numbers: the transform of Box and Muller (1958).

In float32, 32 bits decide the angle and 32 the radius, and 53 more where the radius exceeds 5.5;
the tail ends at 10.9 standard deviations. In float64 both have 53 bits, and 53 more where the
radius exceeds 3.3; the tail ends at 12.1. The radius is computed in float64 for both.

The operations are torch's, which are vectorised on every processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

# Radii whose 32 bits fall below this get more bits: about one in four million.
_RARE = 1 << 10
# The same for 53 bits: one in 256. The radius is then known to 2⁻⁴⁵ of its probability anywhere.
_RARE_FINE = 1 << 45

Words = Callable[[int, int], Tensor]
"""Maps a count and a number of bits, 32 or 53, to so many uniform integers that float64 holds.

They are valid until the next call.
"""


def fill_normal(out: Tensor, words: Words) -> None:
    """Fill a float32 or float64 tensor `[n]` with independent N(0, 1) numbers.

    Args:
        out: the numbers.
        words: of a keystream; each is used once.
    """
    half = -(-out.numel() // 2)
    bits, bound = (32, _RARE) if out.dtype == torch.float32 else (53, _RARE_FINE)
    unit = 2.0**-bits
    uniform = words(2 * half, bits)
    radius = uniform[:half].double()
    angle = uniform[half:].to(out.dtype)
    if half and radius.amin() < bound:
        rare = (radius < bound).nonzero().squeeze(1)
        fraction = words(rare.numel(), 53).double().mul_(2.0**-53).add_(2.0**-54)
        refined = radius[rare] + fraction
        radius.add_(0.5)
        radius[rare] = refined
    else:
        radius.add_(0.5)
    radius.mul_(unit).log_().mul_(-2.0).sqrt_()
    scale = radius.to(out.dtype)
    angle.mul_(2 * math.pi * unit)
    rest = out.numel() - half
    torch.cos(angle, out=out[:half]).mul_(scale)
    torch.sin(angle[:rest], out=out[half:]).mul_(scale[:rest])


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
