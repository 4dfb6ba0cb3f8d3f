"""Variables: attributes of objects and of classes, global variables, closures, arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from torch.jit._script import OrderedDictWrapper

NOTHING = object()
"""Stands for the value of a variable that is not set."""


def read(place: Any, key: Any) -> Any:
    """Return the value of a variable, or `NOTHING`."""
    if isinstance(place, type):
        place = vars(place)
    if isinstance(place, partial):
        return place.args, place.keywords
    if isinstance(place, OrderedDictWrapper):
        return place[key]
    if isinstance(place, Mapping):
        return place.get(key, NOTHING)
    try:
        return getattr(place, key)
    except (AttributeError, ValueError):  # a cell that is not assigned yet
        return NOTHING


def write(place: Any, key: Any, value: Any) -> None:
    """Set a variable, or remove its value."""
    if isinstance(place, partial):
        arguments: Any = place
        arguments.__setstate__((place.func, *value, vars(place)))
    elif isinstance(place, (dict, OrderedDictWrapper)):
        place[key] = value
        if value is NOTHING:
            del place[key]
    elif value is NOTHING:
        (type if isinstance(place, type) else object).__delattr__(place, key)
    else:
        # Not the method of the place: a frozen dataclass has its own.
        (type if isinstance(place, type) else object).__setattr__(place, key, value)


def globals_of(code: CodeType) -> Iterator[str]:
    """Names in a function, and in those inside it, that may be global variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_of(constant)


@dataclass(frozen=True)
class Variable:
    """A variable that has a value of its own for the time of a pass.

    Attributes:
        name: for messages.
        place: a dict, a class, an object, a function, a `partial` or the cell of a closure.
        key: in its place.
        before: the value that it gets back.
    """

    name: str
    place: Any
    key: Any
    before: Any

    @property
    def now(self) -> Any:
        """Return the present value."""
        return read(self.place, self.key)
