"""Take named tensors apart and put them together: plain values, copies, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Tensors by name.
Tensors = dict[str, Tensor]
NamedTensors = Mapping[str, Tensor]
Values = Mapping[str, Any]
# Tensors by group and name.
Groups = dict[str, Tensors]

# --------------------------------------------------------------------------------------------------
# Plain values with tensors among them, as JSON that keeps them exactly next to named tensors.
#
# Nothing is pickled, so reading a file runs no code of the file's author.

_MARKS = ("!tensor", "!tuple", "!dict")
_PLAIN = (int, float, str, type(None))


def pack(value: Any, where: str, tensors: Tensors) -> Any:
    """Return a value that JSON keeps exactly.

    Tensors move to `tensors` under their path. Tuples, and dicts with keys that are not text, are
    marked.

    Raises:
        TypeError: a value of another kind, by its path.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        while where in tensors:
            where += "'"
        tensors[where] = value
        return {"!tensor": where}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, tensors)
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which no checkpoint can hold; give plain values and "
        "tensors in dicts, lists and tuples"
    )


def _pack_mapping(value: Mapping[Any, Any], where: str, tensors: Tensors) -> Any:
    has_plain_keys = all(isinstance(key, str) and key not in _MARKS for key in value)
    pairs = []
    for key, item in value.items():
        pairs.append([pack(key, where, tensors), pack(item, f"{where}.{key}", tensors)])
    return dict(pairs) if has_plain_keys else {"!dict": pairs}


def unpack(value: Any, tensors: NamedTensors) -> Any:
    """Return what was given to `pack`, with its tensors."""
    match value:
        case {"!tensor": name}:
            return tensors[name]
        case {"!tuple": items}:
            return tuple(unpack(items, tensors))
        case {"!dict": pairs}:
            return dict(unpack(pairs, tensors))
        case dict():
            return {key: unpack(item, tensors) for key, item in value.items()}
        case list():
            return [unpack(item, tensors) for item in value]
    return value


# --------------------------------------------------------------------------------------------------


def separate(named: NamedTensors) -> Tensors:
    """Return the tensors on the CPU.

    Those that are views or share memory are copied, since the format cannot hold them.
    """
    seen: set[int] = set()
    tensors = {}
    for name, tensor in named.items():
        x = tensor.detach().cpu()
        storage = x.untyped_storage()
        is_whole = x.is_contiguous() and storage.nbytes() == x.nbytes
        if not is_whole or storage.data_ptr() in seen:
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
        tensors[name] = x
    return tensors


def unique_tensors(state: Values) -> Tensors:
    """Return the tensors of a state dict; tied weights keep their first name only."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def copy_tensors(state: Values) -> Tensors:
    """Return copies of a state dict's tensors on the CPU; tied weights keep all their names."""
    tensors = {}
    for name, x in state.items():
        if isinstance(x, Tensor):
            tensors[name] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors
