"""Norms of rows that round up: what every bound of an example's gradient is made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpkfc.gradients.put_off import is_waited_for

__all__ = ["TINY", "lengths", "within_reach"]

TINY = 2.0**-80  # squared norms below it may have lost terms that are too small for float32
_SHORT = 4096  # entries of a row whose squares may be summed in its own precision
_REACH = 2.0**100


def lengths(x: Tensor) -> Tensor:
    """Upper bounds of the norms over the last axis, in float64; each row's is its own.

    The sum of d squares in float32 is off by at most a share (d + 2) u, percents over millions of entries: long rows are cut
    into short ones, whose sums are added in float64. Rows whose squares leave the range of float32 are taken again; on a card,
    whose values the host does not wait for, they are bounded by √d times their largest entry.
    """
    d, info = x.shape[-1], torch.finfo(x.dtype)
    if x.dtype != torch.float32:
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    if d > _SHORT:
        return torch.linalg.vector_norm(torch.stack([lengths(part) for part in x.split(_SHORT, -1)], -1), dim=-1)
    square = torch.linalg.vector_norm(x, dim=-1).double().square()
    found = (square * (1 + (d + 2) * info.eps)).sqrt()
    again = ~((square >= TINY) & (square < math.inf))
    if d and is_waited_for(x):
        return torch.where(again, torch.linalg.vector_norm(x, math.inf, dim=-1).double() * math.sqrt(d), found)
    if bool(again.any()):
        found[again] = torch.linalg.vector_norm(x[again], dim=-1, dtype=torch.float64)
    return found


def within_reach(lengths: Tensor, inputs: Tensor) -> Tensor:
    """Lengths of a layer's inputs, infinite beyond 2¹⁰⁰ in float32, so that such an example counts nothing.

    In the sum its output gradients times its clip factor would be below the least normal number, and their rounding, times
    such inputs, more than the clip allows.
    """
    return lengths.masked_fill(lengths > _REACH, math.inf) if inputs.dtype == torch.float32 else lengths
