"""Values that modules keep in their plain attributes: whether a pass changed them, and how they were.

A forward pass may write into an attribute of a module (a running mean that is no buffer, a cache of positions, attention
maps, a counter). Looked at are tensors, arrays, numbers and texts, alone or inside lists, tuples, deques, sets, dicts, and
objects of classes that belong to no installed package (a memory bank of the user's own).
"""

from __future__ import annotations

import cmath
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["LARGE", "Attributes", "Kept", "is_own", "is_own_module", "paths_of", "same_values"]

_ORDER = tuple(vars(nn.Module()))
_INTERNAL = frozenset(_ORDER)
_HOLDERS = (list, tuple, deque, set, frozenset, dict, OrderedDict, defaultdict, Counter)
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH, _LONG = 4, 1024  # longer ones are tables (a vocabulary) or queues: what is in them is compared, and not looked into
LARGE = 1 << 20  # bytes above which a tensor outside the model is not copied
_LOOKED_AT = (Tensor, np.ndarray, int, float, complex, str, bytes)
_COMMON = frozenset({"builtins", "abc", "typing", "collections", "enum"})  # from which classes of the user's own derive


@dataclass(frozen=True, eq=False)
class Kept:
    """A value, with what it takes to see a change in it and to undo that.

    Attributes:
        value: the very object.
        copy: of a tensor or an array; None where writing into it cannot be undone (parameters, computed tensors).
        version: of a tensor; None where it is looked after elsewhere.
        keys: of a dict or an object.
        inner: what a holder of others holds; None where nothing is looked into.
        flat: `inner` is the values themselves, which are not looked into.
    """

    value: Any
    copy: Any = None
    version: int | None = None
    keys: tuple[Any, ...] = ()
    inner: tuple[Any, ...] | None = None
    flat: bool = False

    @classmethod
    def of(cls, x: Any, own: set[int] | None = None, depth: int = _DEPTH, most: int | None = None) -> Kept:
        """Of a value as it is now.

        Args:
            x: the value.
            own: ids of tensors that are looked after elsewhere, as parameters are; those of objects are added.
            depth: of what holds others.
            most: bytes of a tensor or an array that is copied; None for any.
        """
        own = set() if own is None else own
        if isinstance(x, Tensor):
            if id(x) in own or isinstance(x, nn.Parameter):
                return cls(x)
            copied = x.layout == torch.strided and not x.is_quantized and not x.is_meta and x.grad_fn is None
            copied = copied and (most is None or x.numel() * x.element_size() <= most)
            return cls(x, x.detach().clone() if copied else None, _version(x))
        if isinstance(x, np.ndarray):
            return cls(x, x.copy() if most is None or x.nbytes <= most else None)
        if not depth or not _is_holder(type(x)) or id(x) in own:
            return cls(x)
        if type(x) not in _HOLDERS:
            own.add(id(x))  # objects know one another
        keys, values = _items(x)
        if len(values) > _LONG:
            return cls(x, keys=keys, inner=values, flat=True)
        return cls(x, keys=keys, inner=tuple(cls.of(y, own, depth - 1, most) for y in values))

    def is_untouched(self, now: Any, *, by_value: bool = False) -> bool:
        """Whether `now` is the same object with nothing written into it, by torch's counter of writes or `by_value`."""
        if now is not self.value:
            return type(now) is type(self.value) and isinstance(now, _PLAIN) and same_values(now, self.value)
        if isinstance(now, Tensor) and not (by_value and self.copy is not None):
            return self.version in (None, _version(now))
        if self.copy is not None:
            return same_values(now, self.copy)
        return self.inner is None or self._holds_the_same(self.inner, now, by_value)

    def _holds_the_same(self, inner: tuple[Any, ...], now: Any, by_value: bool) -> bool:
        keys, values = _items(now)
        if len(values) != len(inner) or keys != self.keys:
            return False
        if self.flat:
            return all(map(operator.is_, inner, values))
        return all(kept.is_untouched(x, by_value=by_value) for kept, x in zip(inner, values, strict=True))

    def put_back(self) -> Any:
        """The object, holding again what it held."""
        x = self.value
        if isinstance(self.copy, Tensor):
            if x.shape != self.copy.shape:
                return self.copy
            if not same_values(x, self.copy):
                with torch.no_grad():
                    x.copy_(self.copy)
        elif isinstance(self.copy, np.ndarray):
            x[...] = self.copy
        elif self.inner is not None:
            _fill(x, self.keys, list(self.inner) if self.flat else [kept.put_back() for kept in self.inner])
        return x

    def equals(self, other: Kept) -> bool:
        """Whether two values are alike, as far as tensors, arrays, numbers, text and what holds them go."""
        if type(self.value) is not type(other.value) or self.keys != other.keys:
            return False
        if isinstance(self.value, (Tensor, np.ndarray)):
            return same_values(*(kept.value if kept.copy is None else kept.copy for kept in (self, other)))
        if isinstance(self.value, _PLAIN):
            return same_values(self.value, other.value)
        ours, theirs = self.inner or (), other.inner or ()
        if self.flat or other.flat:
            return self.flat == other.flat and len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
        return len(ours) == len(theirs) and all(a.equals(b) for a, b in zip(ours, theirs, strict=True))


class Attributes:
    """The plain attributes of all modules of a model, as they are when this is made.

    Args:
        model: whose modules; their parameters and buffers are no plain attributes.
        without: modules that are left out.
    """

    def __init__(self, model: nn.Module, without: Collection[nn.Module] = ()) -> None:
        paths = [m for m in paths_of(model) if m not in without]
        self._own = frozenset(id(x) for m in paths for held in (m._parameters, m._buffers) for x in held.values())
        self._seen = set(self._own)
        self._held = {m: (dict(vars(m)), self._kept(vars(m))) for m in paths}

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Kept]:
        first = len(_ORDER) if tuple(islice(values, len(_ORDER))) == _ORDER else 0  # what every module has comes first
        looked_at = [(k, x) for k, x in islice(values.items(), first, None) if _is_looked_at(type(x))]
        return {k: Kept.of(x, self._seen) for k, x in looked_at if k not in _INTERNAL}

    def changed(self, *, by_value: bool = False, also: Iterable[nn.Module] = ()) -> dict[nn.Module, frozenset[str]]:
        """What has changed in every module in which a tensor, an array, a number or a text did.

        Args:
            by_value: compare the numbers too, not only objects and torch's counter of writes.
            also: modules of which any change is told.
        """
        found, others, nothing = dict[nn.Module, frozenset[str]](), set(also), object()
        for module, (before, kept) in self._held.items():
            now = vars(module)
            same = len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
            if same and not kept:
                continue
            names = {k for k, x in now.items() if x is not before.get(k, nothing)} - _INTERNAL
            names = {k for k in names if k not in before or not Kept(before[k]).is_untouched(now[k])}
            names |= {k for k, x in kept.items() if k in now and not x.is_untouched(now[k], by_value=by_value)}
            names |= before.keys() - now.keys()
            both = [x[k] for k in names for x in (before, now) if k in x]
            if names and (module in others or any(_holds_values(x) for x in both)):
                found[module] = frozenset(names)
        return found

    def values(self, changed: Mapping[nn.Module, frozenset[str]]) -> dict[nn.Module, dict[str, Kept | None]]:
        """Copies of what those attributes hold now, None where one is gone."""
        return {
            module: {k: Kept.of(vars(module)[k], set(self._own)) if k in vars(module) else None for k in sorted(names)}
            for module, names in changed.items()
        }

    def put_back(
        self, changed: Mapping[nn.Module, frozenset[str]], leave: Mapping[nn.Module, frozenset[str]] | None = None
    ) -> None:
        """Undo changes, but for the attributes named in `leave`."""
        for module, names in changed.items():
            before, kept = self._held[module]
            for name in names - (leave or {}).get(module, frozenset()):
                if name in before:
                    vars(module)[name] = kept[name].put_back() if name in kept else before[name]
                else:
                    vars(module).pop(name, None)


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of a model with its path, as `named_modules` has them, which takes much longer to walk through a deep one."""
    found, open_ = dict[nn.Module, str](), [("", model)]
    while open_:
        path, module = open_.pop()
        if module not in found:
            found[module] = path
            inner = [(f"{path}.{name}" if path else name, m) for name, m in module._modules.items() if m is not None]
            open_.extend(reversed(inner))
    return found


def _is_holder(kind: Any) -> bool:
    return kind in _HOLDERS or is_own(kind)


@cache
def is_own(kind: Any) -> bool:
    """Whether a class, and all it derives from, belongs to no installed package, so that nobody else looks after its objects."""
    roots = [x.__module__ for x in kind.__mro__ if x.__module__.partition(".")[0] not in _COMMON]
    return bool(roots) and all(map(is_own_module, roots)) and "__dict__" in dir(kind) and not issubclass(kind, type)


@cache
def is_own_module(name: str) -> bool:
    """Whether a module of Python, by its name, is neither of an installed package nor of the standard library."""
    if name.partition(".")[0] in {*sys.stdlib_module_names, "torch", "dpkfc"}:
        return False
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return "site-packages" not in file and "dist-packages" not in file


def _kind_is_looked_at(kind: Any) -> bool:
    return _is_holder(kind) or issubclass(kind, (Tensor, np.ndarray))


_is_looked_at: Callable[[Any], bool] = cache(_kind_is_looked_at)


def same_values(one: Any, other: Any) -> bool:
    """Whether two tensors, arrays or plain values are equal, NaN counting as itself."""
    if isinstance(one, Tensor):
        other = other.to(one.device)
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, np.ndarray):
        numbers = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=numbers)
    return bool(one == other) or (isinstance(one, float | complex) and cmath.isnan(one) and cmath.isnan(other))


def _holds_values(x: Any, depth: int = _DEPTH) -> bool:
    if depth and _is_holder(type(x)):
        return any(_holds_values(y, depth - 1) for y in _items(x)[1])
    return isinstance(x, _LOOKED_AT)


def _items(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Names, where there are some, and values of what a holder of others holds."""
    if isinstance(x, _HOLDERS) and not isinstance(x, dict):
        return (), tuple(x)
    named = x if isinstance(x, dict) else vars(x)
    return tuple(named), tuple(named.values())


def _fill(x: Any, keys: tuple[Any, ...], values: list[Any]) -> None:
    """Make a holder of others hold these again."""
    if isinstance(x, (tuple, frozenset)):
        return  # what they hold stays
    held: Any = x if isinstance(x, _HOLDERS) else vars(x)
    held.clear()
    if isinstance(held, dict):
        held.update(zip(keys, values, strict=True))
    elif isinstance(held, set):
        held.update(values)
    else:
        held.extend(values)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
