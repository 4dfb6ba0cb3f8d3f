"""Everything that can be reached from an object or read in a folder, as path and fingerprint, to
compare two runs.
"""

import datetime
import enum
import functools
import gc
import hashlib
import json
import random
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor

__all__ = [
    "find_differences",
    "files_of",
    "fingerprint",
    "process_state",
    "collect_values",
    "tensors_alive",
]

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    type(...),
)
_PLAIN += (datetime.datetime, Path, np.generic, slice, range)
_OPAQUE = (
    types.ModuleType,
    type,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
_OPAQUE += (types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType)
# numbers of the operating system, of memory and of hooks
_PROCESS = frozenset({"_descriptor", "_pid", "_cdata", "id"})
_DEPTH = 400

Found = dict[str, str]


def _digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(x):
    """Type, shape and bytes of a tensor, NaN of one kind."""
    x = x.detach().cpu()
    x = x.to_dense() if x.layout != torch.strided else x
    if x.is_floating_point():
        x = torch.where(torch.isnan(x), torch.full((), float("nan"), dtype=x.dtype), x)
    data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return f"{x.dtype} {tuple(x.shape)} {_digest(data)}"


def collect_values(roots, skipped=()):
    """Path to fingerprint of every value that can be reached from some objects: attributes, items,
    closures, frames.

    Args:
        roots: name to object.
        skipped: beginnings of paths that are not followed.
    """
    found = {}
    seen = {}
    stack = [(name, value) for name, value in reversed(list(roots.items()))]
    while stack:
        path, value = stack.pop()
        if (
            any(path == s or path.startswith((s + ".", s + "[")) for s in skipped)
            or path.count(".") > _DEPTH
        ):
            continue
        if isinstance(value, _PLAIN):
            found[path] = repr(value)
            continue
        if isinstance(value, _OPAQUE) or callable(value) and not hasattr(value, "__dict__"):
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        found[path + " is"] = type(value).__name__
        if isinstance(value, Tensor):
            found[path] = fingerprint(value)
            if value.is_leaf and value.grad is not None:
                stack.append((path + ".grad", value.grad))
        stack += reversed(list(_list_parts(path, value)))
    return found


def _list_parts(path, value):
    """What a value holds."""
    if isinstance(value, np.ndarray):
        yield (
            path + "[:]",
            value.tolist()
            if value.dtype == object
            else f"{value.dtype} {value.shape} {_digest(value.tobytes())}",
        )
    elif isinstance(value, torch.Generator):
        yield path + ".state", value.get_state()
    elif isinstance(value, np.random.Generator):
        yield path + ".state", value.bit_generator.state
    elif isinstance(value, Mapping | weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        for i, (key, item) in enumerate(list(value.items())):
            # hooks are numbered by the process
            named = isinstance(key, _PLAIN) and not ("hook" in path and isinstance(key, int))
            yield f"{path}[{key!r}]" if named else f"{path}[#{i}]", item
    elif isinstance(value, set | frozenset | weakref.WeakSet):
        yield (
            path + "{}",
            sorted(repr(x) if isinstance(x, _PLAIN) else type(x).__name__ for x in value),
        )
    elif isinstance(value, Sequence) or type(value).__name__ == "deque":
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield path + ".self", value.__self__
    elif isinstance(value, functools.partial):
        yield path + ".partial", (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield path + ".closure", (*held, value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        yield path + ".locals", dict(value.gi_frame.f_locals)
    if not isinstance(value, Tensor | types.FunctionType):
        slots = [
            name
            for kind in type(value).__mro__
            for name in getattr(kind, "__slots__", ())
            if isinstance(name, str)
        ]
        held = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
        for name, item in {**held, **getattr(value, "__dict__", {})}.items():
            if name not in _PROCESS:
                yield f"{path}.{name}", item


def _is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018 - empty ones raise
    except ValueError:
        return False
    return True


def process_state():
    """What is outside any run: the global generators, and what the modules of the library
    remember.
    """
    remembered = {
        f"{name}.{key}": value
        for name, module in sorted(sys.modules.items())
        if name == "dpkfc" or name.startswith("dpkfc.")
        for key, value in vars(module).items()
        if isinstance(
            value,
            dict | list | set | weakref.WeakSet | weakref.WeakKeyDictionary | Tensor | np.ndarray,
        )
        and not key.startswith("__")
    }
    generators = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    return {"generators": generators, "modules": remembered}


def tensors_alive(*own):
    """Fingerprints of all tensors that are alive, but for those that share memory with `own`."""
    gc.collect()
    memory = {x.untyped_storage().data_ptr() for x in own}
    tensors = [
        x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type != "meta"
    ]
    return {fingerprint(x) for x in tensors if x.untyped_storage().data_ptr() not in memory}


def files_of(folder):
    """Path to fingerprint of every figure in every file below a folder: columns of tables, lines of
    a ledger, keys of JSON.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            found[f"{name}: schema"] = repr(
                (table.schema.to_string(show_schema_metadata=True), table.num_rows)
            )
            found |= {
                f"{name}: {column}": repr(table[column].to_pylist())
                for column in table.column_names
            }
        elif path.suffix == ".json":
            found |= _json(name, json.loads(path.read_text("utf-8")))
        elif path.suffix == ".jsonl":
            for i, line in enumerate(path.read_text("utf-8").splitlines()):
                found |= _json(f"{name}: {i}", json.loads(line))
        elif path.suffix in (".md", ".toml", ".log", ".txt"):
            found |= {
                f"{name}: line {i}": line
                for i, line in enumerate(path.read_text("utf-8").splitlines())
            }
        elif path.suffix == ".safetensors":  # whose metadata are written in any order
            with safe_open(path, "pt") as file:
                found[f"{name}: metadata"] = repr(sorted((file.metadata() or {}).items()))
                found |= {
                    f"{name}: {key}": fingerprint(file.get_tensor(key)) for key in file.keys()
                }
        else:
            found[name] = _digest(path.read_bytes())
    return found


def _json(path, value):
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _json(f"{path}.{key}", item).items()
        }
    if isinstance(value, list):
        return {
            k: v for i, item in enumerate(value) for k, v in _json(f"{path}[{i}]", item).items()
        }
    return {path: repr(value)}


def find_differences(one, other):
    """Paths whose values differ, or that exist on one side alone."""
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}
