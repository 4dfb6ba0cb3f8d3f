"""Sums over messages and records, by the names of their tensors."""

from __future__ import annotations

import torch

from dpkfc.linalg.blocks import accumulation_dtype
from dpkfc.tensors import NamedTensors, Tensors


def zero_sums(parameters: NamedTensors) -> Tensors:
    """Return zeros that sums over messages or records start from."""
    sums = {}
    for name, p in parameters.items():
        dtype = accumulation_dtype(p)
        sums[name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
    return sums


def total_norm(tensors: NamedTensors) -> float:
    """Return the norm over all tensors together, in float64."""
    squares = []
    for x in tensors.values():
        square = x.double().square()
        squares.append(square.sum())
    total = torch.stack(squares).sum()
    return float(total.sqrt())
