"""What a loss function or an augmentation may keep from one call to the next: nothing.

A memory of past features, a running mean or a counter, in the object whose method the function is, in a `partial`, in a closure
or in a global variable, would let one example move the gradients of others, in other steps too. Whatever the function reaches is
put back after each call; modules that it reaches, and that are no part of the model, may not change their buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from dpkfc.gradients.kept import LARGE, Kept, is_own, is_own_module, paths_of
from dpkfc.gradients.model_state import kept_attributes, restored_state

__all__ = ["forgotten", "isolated"]

_log = logging.getLogger(__name__)

_DEPTH = 4  # functions that a loss function calls, and those that they call
_INSIDE = 8  # lists in dicts in objects

_told: set[str] = set()


def isolated(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss function, after each call of which everything that it reaches holds again what it held before.

    Reached are: the object that it is or whose method it is, arguments of a `partial`, variables of closures, and global
    variables that it names; functions, lists, dicts and objects in them, as far as their classes belong to no installed package.

    Raises:
        ValueError: from a call that changes a buffer or a parameter of a module that is no part of the model, or a tensor of
            more than a megabyte, which is not copied.
    """

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with forgotten(loss_fn, model):
            return loss_fn(model, batch)

    return update_wrapper(losses, loss_fn, assigned=(), updated=())  # its code is that of loss_fn for whoever asks


@contextmanager
def forgotten(function: Any, model: nn.Module, name: str = "loss_fn") -> Iterator[None]:
    """Undo after a call of a function what it changed outside of the model, as `isolated` does.

    Args:
        function: a loss function or an augmentation.
        model: the model that is trained.
        name: of the function, for messages.
    """
    own = set(paths_of(model))
    reached = _Reached(own, name)
    reached.follow(function)
    with ExitStack() as stack:
        for module in reached.modules:
            stack.enter_context(restored_state(module, own))
            stack.enter_context(kept_attributes(module, own))
        try:
            yield
        finally:
            fault = reached.put_back()
    if fault:
        raise ValueError(fault)


@dataclass(frozen=True)
class _Variable:
    """A variable that a loss function reaches: a place in a dict, or the cell of a closure."""

    name: str
    place: Any
    kept: Kept

    def put_back(self) -> bool:
        """Whether it had changed."""
        cell = isinstance(self.place, CellType)
        now = _content(self.place) if cell else self.place.get(self.name, _NOTHING)
        if now is not _NOTHING and self.kept.is_untouched(now):
            return False
        value = self.kept.put_back()
        if cell:
            self.place.cell_contents = value
        else:
            self.place[self.name] = value
        return True


_NOTHING = object()


class _Reached:
    """All that a function reaches, as it is now.

    Args:
        own: the modules of the model, which are looked after elsewhere.
        function: name of the function, for messages.

    Attributes:
        modules: others that it reaches.
    """

    def __init__(self, own: set[nn.Module], function: str) -> None:
        self.modules: list[nn.Module] = []
        self._function = function
        self._own, self._variables = own, list[_Variable]()
        self._seen = {id(module) for module in own}
        self._kept = set[int]()

    def follow(self, x: Any, depth: int = _DEPTH) -> None:
        """Note what a function, or a value, holds."""
        kind: Any = type(x)
        if depth == 0 or id(x) in self._seen:
            return
        if isinstance(x, partial):
            for name, value in [*((f"argument {i}", arg) for i, arg in enumerate(x.args)), *x.keywords.items()]:
                self._note(name, {name: value}, value, depth)
            self.follow(x.func, depth)
        elif isinstance(x, MethodType):
            held = x.__self__
            self._note(type(held).__name__, {type(held).__name__: held}, held, depth)
            self.follow(x.__func__, depth)
        elif isinstance(x, FunctionType):
            self._seen.add(id(x))
            if is_own_module(x.__module__ or ""):
                self._variables_of(x, depth)
        elif callable(x) and (isinstance(x, nn.Module) or is_own(kind)):
            self._note(kind.__name__, {kind.__name__: x}, x, depth)
            self.follow(x.forward if isinstance(x, nn.Module) else vars(kind).get("__call__"), depth)

    def _variables_of(self, function: FunctionType, depth: int) -> None:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if (value := _content(cell)) is not _NOTHING:
                self._note(name, cell, value, depth)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._note(name, {name: value}, value, depth)
        for i, value in enumerate(function.__defaults__ or ()):
            self._note(f"default {i}", {f"default {i}": value}, value, depth)
        for name in _globals_of(function.__code__):
            if name in function.__globals__:
                self._note(name, function.__globals__, function.__globals__[name], depth)

    def _note(self, name: str, place: Any, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self.follow(value, depth - 1)
        elif not isinstance(value, type):
            kept = Kept.of(value, self._kept, _INSIDE, LARGE)
            self._variables.append(_Variable(name, place, kept))
            self._modules_in(kept, depth)

    def _modules_in(self, kept: Kept, depth: int) -> None:
        for x in kept.inner or ():
            value = x.value if isinstance(x, Kept) else x
            if isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, (FunctionType, MethodType, partial)):
                self.follow(value, depth - 1)
            elif isinstance(x, Kept):
                self._modules_in(x, depth)

    def _module(self, module: nn.Module) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.modules.append(module)

    def put_back(self) -> str:
        """Undo what has changed.

        Returns:
            Why it is refused, where it cannot be undone; otherwise nothing.
        """
        changed = [x for x in self._variables if x.put_back()]
        new = sorted({x.name for x in changed} - _told)
        _told.update(new)
        if new:
            _log.warning(
                "%s changes variables that may depend on private examples; they are put back after every call (what shall "
                "only be looked at can be printed or given to a logger): %s", self._function, ", ".join(new),
            )  # fmt: skip
        large = [x.name for x in changed if not x.kept.is_untouched(x.kept.value, by_value=True)]
        if not large:
            return ""
        return (
            f"{self._function} writes to a tensor that it reaches by '{large[0]}', and that is too large to be put back: what it "
            "holds would carry private data into later steps. Compute each example without a memory of others"
        )


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _NOTHING


def _globals_of(code: CodeType) -> Iterator[str]:
    """Names in a function, and in those inside it, that may be global variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
