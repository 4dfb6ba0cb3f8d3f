"""How values in attributes and variables of a program are copied, by their class.

Copied are tensors, arrays, iterators and containers with their items. Objects of the user's own
classes, and objects of the standard library that hold attributes, stay what they are, and their
attributes are copied. Generators of random numbers get a new seed. Objects of installed packages
are shared.
"""

from __future__ import annotations

import argparse
import hashlib
import queue
import random
import sys
import threading
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import count
from types import FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (int, float, complex, str, bytes, type(None))
CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
ITERATORS = (count, *map(type, (iter([]), iter(()), iter(range(0)))))
ARRAYS = (array, bytearray)
# Classes of the standard library whose objects are what their attributes are.
_BY_ATTRIBUTES = (
    SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    ChainMap,
    queue.Queue,
    threading.local,
    WeakKeyDictionary,
    WeakSet,
    WeakValueDictionary,
)
# Base classes of users' own classes.
_COMMON = frozenset({"builtins", "abc", "typing", "collections", "enum"})


def _write_bit_generator(x: np.random.Generator, state: Any) -> None:
    x.bit_generator.state = state


# How generators of random numbers are read, written and seeded.
GENERATORS: dict[Any, tuple[Callable[..., Any], ...]] = {
    random.Random: (random.Random.getstate, random.Random.setstate, random.Random.seed),
    np.random.RandomState: (
        np.random.RandomState.get_state,
        np.random.RandomState.set_state,
        np.random.RandomState.seed,
    ),
    np.random.Generator: (
        lambda x: x.bit_generator.state,
        _write_bit_generator,
        lambda x, seed: _write_bit_generator(x, type(x.bit_generator)(seed).state),
    ),
    torch.Generator: (
        torch.Generator.get_state,
        torch.Generator.set_state,
        torch.Generator.manual_seed,
    ),
}

_KINDS: dict[Any, str] = {
    **dict.fromkeys(CONTAINERS, "container"),
    **dict.fromkeys((*ITERATORS, *ARRAYS), "whole"),
    **dict.fromkeys(GENERATORS, "random generator"),
    **dict.fromkeys((FunctionType, MethodType, partial), "callable"),
    **dict.fromkeys((*PLAIN, bool, nn.Parameter), ""),
    GeneratorType: "watched",
    queue.SimpleQueue: "queue",
    tuple: "tuple",
}


def kind_of(x: Any) -> str:
    """Return how a value is copied: a key of `WAYS` of `replica.py`, "" for one that is shared."""
    return _kind_of_class(_class_of(x))


def _class_of(x: Any) -> Any:
    return type(x)


@cache
def _kind_of_class(cls: Any) -> str:
    if cls in _KINDS:
        return _KINDS[cls]
    bases = {Tensor: "tensor", np.ndarray: "array", nn.Module: "module", type: "class"}
    for base, kind in bases.items():
        if issubclass(cls, base):
            return kind
    if issubclass(cls, tuple):
        return "tuple" if hasattr(cls, "_make") else ""
    has_attributes = "__dict__" in dir(cls) or _slots_of(cls)
    if issubclass(cls, _BY_ATTRIBUTES) or (_is_own(cls) and has_attributes):
        return "object"
    return ""


@cache
def is_own_module(name: str) -> bool:
    """Return whether a Python module is neither of a package nor of the standard library."""
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or package in ("torch", "dpkfc"):
        return False
    file = str(getattr(sys.modules.get(name), "__file__", ""))
    return "site-packages" not in file and "dist-packages" not in file


def _is_own(cls: Any) -> bool:
    """Return whether a class, and all it derives from, belongs to no installed package."""
    names = {x.__module__ for x in cls.__mro__}
    own = [name for name in names if name.partition(".")[0] not in _COMMON]
    return bool(own) and all(map(is_own_module, own))


def draw_seed() -> int:
    """Return a seed from torch's global generator, also where its numbers are made constants."""
    state = hashlib.sha256(bytes(torch.get_rng_state().tolist()))
    torch.rand(())
    return int.from_bytes(state.digest()[:4], "little")


# -- objects and containers ------------------------------------------------------------------------


@cache
def _slots_of(cls: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class and of the classes that it derives from."""
    slots = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            is_mangled = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))


def attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its `__dict__` and in its slots."""
    slots = {name: getattr(x, name) for name in _slots_of(_class_of(x)) if hasattr(x, name)}
    return {**getattr(x, "__dict__", {}), **slots}


def fill(x: Any, attributes: Mapping[str, Any]) -> None:
    """Give an object these attributes and no others."""
    slots = _slots_of(_class_of(x))
    for name in slots:
        if name in attributes:
            object.__setattr__(x, name, attributes[name])  # a frozen dataclass has its own
        elif hasattr(x, name):
            object.__delattr__(x, name)
    if hasattr(x, "__dict__"):
        vars(x).clear()
        vars(x).update({name: y for name, y in attributes.items() if name not in slots})


def pairs_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys, or numbers, and the items of a container."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def refill(container: Any, items: Any) -> None:
    """Make a container hold other items."""
    container.clear()
    (container.update if hasattr(container, "update") else container.extend)(items)
