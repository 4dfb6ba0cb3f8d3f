"""Whether a data set or a collate function has a random generator or a memory of its own.

Its numbers would follow what was read before a record. What objects and code hold is looked at, and
no record is read for it: whether one differs in a second reading would tell of that record.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.gradients.value_kinds import (
    CONTAINERS,
    PLAIN,
    attributes_of,
    is_own_module,
    kind_of,
)
from dpkfc.gradients.variables import globals_of, read

MESSAGE = (
    "the dataset or collate_fn has a random generator of its own, or remembers earlier records;"
    " use torch's, numpy's and random's (docs/pitfalls.md)"
)
_READERS = ("__getitem__", "__getitems__", "__call__")
_NUMBERS = (int, float, complex, np.generic, np.ndarray, Tensor)
_LONG = 1024  # longer containers are tables of records
_SHARED = (torch.default_generator, np.random.mtrand._rand, random._inst)


def refuse_own_generators(*roots: Any) -> None:
    """Refuse objects and functions that reach a random generator, beside the global ones.

    They reach attributes, items of containers, closures, and global variables that code of no
    package names. An attribute that a user's class names in its constructor alone does not count.
    A number or tensor that a user's class sets and uses while it reads a record, such as a running
    mean, is refused too; one that is only counted up is not.

    Raises:
        ValueError: they reach one.
    """
    seen = {id(x): x for x in _SHARED}
    waiting = [*roots]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if kind_of(x) == "random generator" or _remembers_numbers(x):
            raise ValueError(MESSAGE)
        waiting += _parts_of(x)


def _parts_of(x: Any) -> Iterator[Any]:
    """Yield what an object, a function or a class of no package holds or names."""
    if isinstance(x, (*PLAIN, Tensor, np.ndarray, nn.Module, ModuleType)):
        return
    if isinstance(x, MethodType):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, FunctionType):
        if is_own_module(x.__module__ or ""):
            yield from (x.__defaults__, x.__kwdefaults__, vars(x))
            yield from (read(cell, "cell_contents") for cell in x.__closure__ or ())
            yield from (x.__globals__.get(name) for name in globals_of(x.__code__))
    elif isinstance(x, type):
        if is_own_module(x.__module__):
            yield from _methods_of(x)
    else:
        attributes = attributes_of(x)
        if is_own_module(type(x).__module__):
            functions = [f for base in type(x).__mro__ for f in _methods_of(base)]
            codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
            named = {name for code in codes for name in globals_of(code)}
            attributes = {name: y for name, y in attributes.items() if name in named}
        yield from attributes.values()
        yield from type(x).__mro__
        if isinstance(x, (tuple, *CONTAINERS)) and len(x) <= _LONG:
            yield from x.values() if isinstance(x, dict) else x


def _methods_of(cls: type) -> list[Any]:
    """Return the functions of a class, and its other attributes, without its constructor."""
    return [
        getattr(y, "__func__", getattr(y, "fget", y))
        for name, y in vars(cls).items()
        if name != "__init__"
    ]


def _remembers_numbers(x: Any) -> bool:
    """Return whether code that reads a record sets a number of its object, and uses it."""
    cls = type(x)
    if isinstance(x, nn.Module) or not is_own_module(cls.__module__):
        return False
    methods: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        for name, y in vars(base).items():
            if isinstance(y, FunctionType):
                methods[name] = y
    uses: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    seen: set[str] = set()
    waiting = [name for name in _READERS if name in methods]
    while waiting:
        name = waiting.pop()
        if name in seen or not is_own_module(methods[name].__module__):
            continue
        seen.add(name)
        for step in dis.get_instructions(methods[name]):
            uses[step.argval] += step.opname == "LOAD_ATTR"
            stores[step.argval] += step.opname == "STORE_ATTR"
        waiting += [other for other in methods[name].__code__.co_names if other in methods]
    again = [name for name in stores if 0 < stores[name] < uses[name]]
    # Without running a property of the user.
    values = [inspect.getattr_static(x, name, None) for name in again]
    return any(isinstance(y, _NUMBERS) and not isinstance(y, bool) for y in values)
