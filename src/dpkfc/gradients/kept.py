"""Values that modules keep in their plain attributes: whether a pass changed them, and how they were.

A forward pass may write into an attribute of a module (a running mean that is no buffer, a cache of positions, attention
maps). Looked at are tensors, arrays and numbers, alone or inside lists, tuples, deques and dicts.
"""

from __future__ import annotations

import cmath
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Attributes", "Kept", "paths_of", "same_values"]

_ORDER = tuple(vars(nn.Module()))
_INTERNAL = frozenset(_ORDER)
_HOLDERS = (list, tuple, deque, dict, OrderedDict, defaultdict)
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH, _LONG = 4, 4096  # longer ones are tables (a vocabulary), which no pass writes


@dataclass(frozen=True, eq=False)
class Kept:
    """A value, with what it takes to see a change in it and to undo that.

    Attributes:
        value: the very object.
        copy: of a tensor or an array; None where writing into it cannot be undone (parameters, computed tensors).
        version: of a tensor; None where it is looked after elsewhere.
        keys: of a dict.
        inner: what a list, tuple, deque or dict holds; None where nothing is looked into.
    """

    value: Any
    copy: Any = None
    version: int | None = None
    keys: tuple[Any, ...] = ()
    inner: tuple[Kept, ...] | None = None

    @classmethod
    def of(cls, x: Any, own: frozenset[int] = frozenset(), depth: int = _DEPTH) -> Kept:
        """Of a value as it is now; tensors whose id is in `own`, and parameters, are looked after elsewhere."""
        if isinstance(x, Tensor):
            if id(x) in own or isinstance(x, nn.Parameter):
                return cls(x)
            copied = x.layout == torch.strided and not x.is_quantized and not x.is_meta and x.grad_fn is None
            return cls(x, x.detach().clone() if copied else None, _version(x))
        if isinstance(x, np.ndarray):
            return cls(x, x.copy())
        if depth and type(x) in _HOLDERS and len(x) <= _LONG:
            inner = tuple(cls.of(y, own, depth - 1) for y in _values(x))
            return cls(x, keys=tuple(x) if isinstance(x, dict) else (), inner=inner)
        return cls(x)

    def is_untouched(self, now: Any, *, by_value: bool = False) -> bool:
        """Whether `now` is the same object with nothing written into it, by torch's counter of writes or `by_value`."""
        if now is not self.value:
            return type(now) is type(self.value) and isinstance(now, _PLAIN) and same_values(now, self.value)
        if isinstance(now, Tensor) and not (by_value and self.copy is not None):
            return self.version in (None, _version(now))
        if self.copy is not None:
            return same_values(now, self.copy)
        return self.inner is None or (
            len(now) == len(self.inner)
            and (tuple(now) if isinstance(now, dict) else ()) == self.keys
            and all(kept.is_untouched(x, by_value=by_value) for kept, x in zip(self.inner, _values(now), strict=True))
        )

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
            inner = [kept.put_back() for kept in self.inner]
            if isinstance(x, dict):
                x.clear()
                x.update(zip(self.keys, inner, strict=True))
            elif not isinstance(x, tuple):
                x.clear()
                x.extend(inner)
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
        return len(ours) == len(theirs) and all(a.equals(b) for a, b in zip(ours, theirs, strict=True))


class Attributes:
    """The plain attributes of all modules of a model, as they are when this is made.

    Args:
        model: whose modules; their parameters and buffers are no plain attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        paths = paths_of(model)
        self._own = frozenset(id(x) for m in paths for held in (m._parameters, m._buffers) for x in held.values())
        self._held = {m: (dict(vars(m)), self._kept(vars(m))) for m in paths}

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Kept]:
        first = len(_ORDER) if tuple(islice(values, len(_ORDER))) == _ORDER else 0  # what every module has comes first
        looked_at = [(k, x) for k, x in islice(values.items(), first, None) if _is_looked_at(type(x))]
        return {k: Kept.of(x, self._own) for k, x in looked_at if k not in _INTERNAL}

    def changed(self, *, by_value: bool = False, also: Iterable[nn.Module] = ()) -> dict[nn.Module, frozenset[str]]:
        """What has changed in every module in which a tensor, an array or a floating-point number did.

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
            if names and (module in others or any(_holds_numbers(x) for x in both)):
                found[module] = frozenset(names)
        return found

    def values(self, changed: Mapping[nn.Module, frozenset[str]]) -> dict[nn.Module, dict[str, Kept | None]]:
        """Copies of what those attributes hold now, None where one is gone."""
        return {
            module: {k: Kept.of(vars(module)[k], self._own) if k in vars(module) else None for k in sorted(names)}
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


def _is_looked_at(kind: type) -> bool:
    return kind in _HOLDERS or issubclass(kind, (Tensor, np.ndarray))


def same_values(one: Any, other: Any) -> bool:
    """Whether two tensors, arrays or plain values are equal, NaN counting as itself."""
    if isinstance(one, Tensor):
        other = other.to(one.device)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, np.ndarray):
        numbers = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=numbers)
    return bool(one == other) or (isinstance(one, float | complex) and cmath.isnan(one) and cmath.isnan(other))


def _holds_numbers(x: Any, depth: int = _DEPTH) -> bool:
    if depth and type(x) in _HOLDERS and len(x) <= _LONG:
        return any(_holds_numbers(y, depth - 1) for y in _values(x))
    return isinstance(x, (Tensor, np.ndarray, float, complex))


def _values(x: Any) -> Iterable[Any]:
    return x.values() if isinstance(x, dict) else x


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
