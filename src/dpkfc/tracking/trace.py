"""What a script does with the examples, as far as it can be compared from batch to batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkfc.tracking.batch_rules import Operation, has_tag, split_names

Trace = list[str | float]
"""Names of operations, each with the numbers that it brings to the examples."""
_AVERAGES = split_names("mean std var var_mean std_mean")


def trace_of(operation: Operation) -> Trace:
    """Return the name of an operation, if it may change a gradient, and its numbers."""
    numbers = _numbers_of(operation)
    is_followed = torch.is_grad_enabled() and operation.result.is_floating_point()
    if numbers or (is_followed and any(x.requires_grad for x in operation.tensors)):
        return [operation.name, *numbers]
    return []


def _numbers_of(operation: Operation) -> list[float]:
    """Return the public numbers that values of examples meet, or the length of an average."""
    result = operation.result
    if operation.name in _AVERAGES:
        return [operation.tensors[0].numel() / max(1, result.numel())]
    if not has_tag(operation.function, torch.Tag.pointwise):
        return []
    is_real = result.is_floating_point()
    found = []
    for x in (*operation.args, *operation.kwargs.values()):
        if isinstance(x, float) or (isinstance(x, int) and is_real):
            found.append(float(x))
        elif isinstance(x, Tensor) and is_real and operation.state(x) is None:
            found += _only_value(x)
    return found


def _only_value(x: Tensor) -> list[float]:
    """Return the value of all entries; nothing where they differ."""
    if x.numel() == 0 or x.is_complex() or x.layout is not torch.strided:
        return []
    rows = x.detach().flatten()
    return [float(rows[0])] if torch.equal(rows, rows[:1].expand_as(rows)) else []
