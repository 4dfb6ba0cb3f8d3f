"""Take values with tensors apart and put them together: plain values, devices, shared memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by the name of a parameter in the model, or by its role in its module."""
NamedTensors = Mapping[str, Tensor]
"""The same, only to be read."""
Values = Mapping[str, Any]
# Tensors by group and name.
Groups = dict[str, Tensors]
T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# Plain values with tensors among them, as JSON that keeps them exactly next to named tensors.
#
# Nothing is pickled, so reading a file runs no code of the file's author.

_MARKS = ("!tensor", "!tuple", "!dict", "!object")
_PLAIN = (int, float, str, type(None))


def pack(value: Any, where: str, tensors: Tensors, kinds: Collection[type] = ()) -> Any:
    """Return a value that JSON keeps exactly.

    Tensors move to `tensors` under their path; one that occurs twice keeps its first path. Tuples,
    dicts with keys that are not text, and dataclasses are marked.

    Args:
        value: plain values and tensors in dicts, lists, tuples and dataclasses of `kinds`.
        where: the path of the value.
        tensors: gains the tensors.
        kinds: dataclasses whose fields are packed.

    Raises:
        TypeError: a value of another kind, by its path.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        for known, other in tensors.items():
            if other is value:
                return {"!tensor": known}
        while where in tensors:
            where += "'"
        tensors[where] = value
        return {"!tensor": where}
    if type(value) in kinds:
        members = {f.name: getattr(value, f.name) for f in fields(value)}
        packed = _pack_mapping(members, where, tensors, kinds)
        return {"!object": [type(value).__name__, packed]}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, tensors, kinds)
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{where}.{i}", tensors, kinds) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which no checkpoint can hold; give plain values and "
        "tensors in dicts, lists and tuples"
    )


def _pack_mapping(
    value: Mapping[Any, Any], where: str, tensors: Tensors, kinds: Collection[type]
) -> Any:
    has_plain_keys = all(isinstance(key, str) and key not in _MARKS for key in value)
    pairs = []
    for key, item in value.items():
        packed = pack(item, f"{where}.{key}", tensors, kinds)
        pairs.append([pack(key, where, tensors), packed])
    return dict(pairs) if has_plain_keys else {"!dict": pairs}


def unpack(value: Any, tensors: NamedTensors, kinds: Collection[type] = ()) -> Any:
    """Return what was given to `pack`, with its tensors.

    Raises:
        KeyError: a tensor is missing, or the dataclass of a value is not among `kinds`.
    """
    match value:
        case {"!tensor": name}:
            return tensors[name]
        case {"!tuple": items}:
            return tuple(unpack(items, tensors, kinds))
        case {"!dict": pairs}:
            return dict(unpack(pairs, tensors, kinds))
        case {"!object": [name, members]}:
            known = {kind.__name__: kind for kind in kinds}
            return known[name](**unpack(members, tensors, kinds))
        case dict():
            return {key: unpack(item, tensors, kinds) for key, item in value.items()}
        case list():
            return [unpack(item, tensors, kinds) for item in value]
    return value


# --------------------------------------------------------------------------------------------------


def copy_to_device(value: T, device: torch.device) -> T:
    """Return a copy of a value with every tensor in it on a device.

    An object that several parts of the value hold stays one object.
    """
    known = {}

    def copy_once(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = _copy_value(x, device, copy_once)
        return known[id(x)]

    return cast(T, copy_once(value))


def _copy_value(x: Any, device: torch.device, copy_part: Callable[[Any], Any]) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device)
    if isinstance(x, torch.device):
        return device
    is_own_class = is_dataclass(x) or type(x).__module__.startswith("dpkfc.")
    is_value = hasattr(x, "__dict__") and not isinstance(x, type)
    if is_own_class and is_value:
        twin = copy.copy(x)
        for name, part in vars(x).items():
            object.__setattr__(twin, name, copy_part(part))
        return twin
    if isinstance(x, Mapping):
        return {key: copy_part(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        parts = map(copy_part, x)
        return type(x)(parts)
    return x


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


def content_bytes(x: Tensor) -> bytes:
    """Return the bytes of a tensor's entries, on whatever device it is."""
    flat = x.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


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
