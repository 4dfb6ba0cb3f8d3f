"""Plain values with tensors among them, as JSON that keeps them exactly beside named tensors.

Nothing is pickled, so that reading a file runs no code of whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["packed", "unpacked"]

_MARKS = ("!tensor", "!tuple", "!dict")


def packed(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON keeps exactly: tensors move to `tensors` under their path; tuples and keys that are no texts are marked.

    Raises:
        TypeError: a value of another kind, by its path.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Tensor):
        while where in tensors:
            where += "'"
        tensors[where] = value
        return {"!tensor": where}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: packed(item, f"{where}.{key}", tensors) for key, item in value.items()}
        pairs = [
            (packed(key, where, tensors), packed(item, f"{where}.{key}", tensors)) for key, item in value.items()
        ]
        return {"!dict": [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        items = [packed(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which no checkpoint can hold; give plain values and tensors in dicts, lists "
        "and tuples"
    )


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` has written, with its tensors."""
    match value:
        case {"!tensor": name}:
            return tensors[name]
        case {"!tuple": items}:
            return tuple(unpacked(item, tensors) for item in items)
        case {"!dict": pairs}:
            return {unpacked(key, tensors): unpacked(item, tensors) for key, item in pairs}
        case dict():
            return {key: unpacked(item, tensors) for key, item in value.items()}
        case list():
            return [unpacked(item, tensors) for item in value]
    return value
