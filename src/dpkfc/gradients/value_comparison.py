"""Whether two values of a program are equal, with all that they hold."""

from __future__ import annotations

import cmath
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dpkfc.gradients.value_kinds import ARRAYS, ITERATORS, PLAIN, attributes_of, kind_of

NESTING = 8
"""Nested containers that are looked into."""
Objects = Mapping[int, Mapping[str, Any]]
"""By id: attributes that objects had at some time."""


def same_values(one: Any, other: Any) -> bool:
    """Return whether two tensors, arrays or plain values are equal. NaN equals NaN."""
    if isinstance(one, Tensor):
        # A mode that follows operations would take the answer for one of the program.
        with _disable_current_modes():
            return _same_tensors(one, other)
    if isinstance(one, np.ndarray):
        is_number = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=is_number)
    if one == other:
        return True
    return isinstance(one, float | complex) and cmath.isnan(one) and cmath.isnan(other)


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    other = other.to(one.device)
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other) or bool(equal_or_nan(one, other).all())


def equal_or_nan(one: Tensor, other: Tensor) -> Tensor:
    """Return which entries are equal, or both NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def are_equal(
    one: Any, other: Any, objects: tuple[Objects, Objects] = ({}, {}), inside: int = NESTING
) -> bool:
    """Return whether two values are equal, with all that they hold.

    Modules, functions and objects of packages are equal to all of their class.

    Args:
        one: a value.
        other: a value.
        objects: the attributes of objects in the one and in the other, where these are not the
            present ones.
        inside: nested containers that are looked into.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, (Tensor, np.ndarray, *PLAIN)):
        return one is other or same_values(one, other)
    parts = [_parts_of(x, of) for x, of in zip((one, other), objects, strict=True)]
    if len(parts[0]) != len(parts[1]):
        return False
    pairs = zip(*parts, strict=True)
    return not inside or all(are_equal(x, y, objects, inside - 1) for x, y in pairs)


def _parts_of(x: Any, objects: Objects) -> list[Any]:
    """Return what a value consists of, nothing for a value that is not looked into."""
    if id(x) in objects:
        x = objects[id(x)]
    elif kind_of(x) == "object":
        x = attributes_of(x)
    if isinstance(x, dict):
        return [*x, *x.values()]
    if isinstance(x, set):
        return sorted(map(repr, x))
    if isinstance(x, (*ITERATORS, *ARRAYS)):
        return [*x.__reduce_ex__(4)]
    return [*x] if isinstance(x, (list, tuple, deque)) else []
