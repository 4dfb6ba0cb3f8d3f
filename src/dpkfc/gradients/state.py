"""What a forward pass may leave in a model: nothing that it has computed from private examples.

Parameters, buffers and extra state (`get_extra_state`) may not change at all: they are in every
checkpoint, and only released gradients move them. Plain attributes are restored after each pass,
counters too, since the number of passes is private. The check before the first release finds
attributes that are equal for all examples and that a further pass leaves alone (a cache of
positions). These are built once, and attributes are restored to them. An attribute that depends on
the examples, and changes what the model computes later, is refused there.
"""

from __future__ import annotations

import argparse
import cmath
import hashlib
import io
import logging
import math
import operator
import queue
import random
import sys
import threading
import warnings
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy as copy_object
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from inspect import signature
from itertools import chain, count, pairwise
from traceback import walk_stack
from types import (
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dpkfc.distributed.fsdp import is_divided, reshard, to_local
from dpkfc.gradients.layers import Layer, join_names, named_tensors
from dpkfc.linalg.deferred_flags import is_on_accelerator
from dpkfc.linalg.metric import NamedTensors
from dpkfc.rng_state import restarter
from dpkfc.weights import digest_tensors

# --------------------------------------------------------------------------------------------------
# Values that modules keep in their plain attributes: whether a pass changed them, and their values
# before.
#
# A forward pass may write into an attribute of a module (a running mean that is no buffer, a cache
# of positions, attention maps, a counter). Tensors, arrays, numbers, texts and random generators
# are compared, alone or inside containers: lists, tuples, dicts and the like, holders of attributes
# of the standard library, and objects of classes that belong to no installed package (a memory bank
# of the user's own). Of an iterator it is only seen whether it has advanced.

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HOLDERS = (list, tuple, deque, set, frozenset, dict, OrderedDict, defaultdict, Counter)
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
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH = 4
_LONG = 1024
"""Longer containers are tables or queues: their items are compared by identity."""
LARGE = 1 << 20
"""Bytes above which a tensor outside the model is not copied."""
_VALUES = (Tensor, np.ndarray, int, float, complex, str, bytes)
# Base classes of users' own classes.
_COMMON = frozenset({"builtins", "abc", "typing", "collections", "enum"})


# Stands for the value of a variable that has none.
_NOTHING = object()
_Names = dict[nn.Module, frozenset[str]]
"""Modules with names of their attributes."""


@dataclass(frozen=True)
class _Accessor:
    """How a state that is not an attribute is read and written.

    Attributes:
        read: object to a value that no later change of the object reaches.
        write: object and such a value; None where the state cannot be put back.
        seed: generator of random numbers and a seed. A generator gets a seed from torch's global
            one before a pass: put back alone, it would draw the same numbers in all of them.
        is_iterator: put back by a copy in the place of the object.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] | None = None
    seed: Callable[[Any, int], Any] | None = None
    is_iterator: bool = False


def _write_bit_generator(x: np.random.Generator, state: Any) -> None:
    x.bit_generator.state = state


def _seed_generator(x: np.random.Generator, seed: int) -> None:
    x.bit_generator.state = type(x.bit_generator)(seed).state


def _draw_seed() -> int:
    """Return a seed from torch's global generator, also where its numbers are made constants."""
    state = hashlib.sha256(bytes(torch.get_rng_state().tolist()))
    torch.rand(())
    return int.from_bytes(state.digest()[:4], "little")


def _write_array(x: Any, state: bytes) -> None:
    x[:] = type(x)(x.typecode, state) if isinstance(x, array) else state


def _take_items(x: Any) -> tuple[Any, ...]:
    items = tuple(x.get_nowait() for _ in range(x.qsize()))
    _put_items(x, items)
    return items


def _put_items(x: Any, items: tuple[Any, ...]) -> None:
    while not x.empty():
        x.get_nowait()
    for item in items:
        x.put(item)


def _copy_iterator(x: Any) -> Any:
    """Return an iterator at the same place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12
        return copy_object(x)


def _frame_of(x: GeneratorType[Any, Any, Any]) -> Any:
    """Return where a generator stands, and the numbers and texts among its variables."""
    if x.gi_frame is None:
        return None
    variables = sorted(x.gi_frame.f_locals.items())
    return x.gi_frame.f_lasti, [(k, v) for k, v in variables if isinstance(v, _PLAIN)]


_ACCESSORS: dict[Any, _Accessor] = {
    random.Random: _Accessor(
        random.Random.getstate, random.Random.setstate, seed=random.Random.seed
    ),
    np.random.Generator: _Accessor(
        lambda x: x.bit_generator.state, _write_bit_generator, seed=_seed_generator
    ),
    np.random.RandomState: _Accessor(
        partial(np.random.RandomState.get_state, legacy=False),
        np.random.RandomState.set_state,
        seed=np.random.RandomState.seed,
    ),
    torch.Generator: _Accessor(
        torch.Generator.get_state, torch.Generator.set_state, seed=torch.Generator.manual_seed
    ),
    array: _Accessor(array.tobytes, _write_array),
    bytearray: _Accessor(bytes, _write_array),
    GeneratorType: _Accessor(_frame_of),
    queue.SimpleQueue: _Accessor(_take_items, _put_items),
    count: _Accessor(repr, is_iterator=True),
}
for _iterator in map(type, (iter([]), iter(()), iter(range(0)))):
    _ACCESSORS[_iterator] = _Accessor(operator.length_hint, is_iterator=True)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A value, with what is needed to see a change in it and to undo the change.

    Attributes:
        value: the very object.
        copy: of a tensor, an array or an iterator. None where writing into it cannot be undone
            (parameters, computed tensors).
        version: of a tensor. None where another guard watches the tensor.
        keys: of a dict or an object.
        inner: snapshots of the items of a container. None where its items are not compared.
        flat: `inner` holds the items themselves, which are compared by identity.
        state: of an object that has an `_Accessor`.
    """

    value: Any
    copy: Any = None
    version: int | None = None
    keys: tuple[Any, ...] = ()
    inner: tuple[Any, ...] | None = None
    flat: bool = False
    state: Snapshot | None = None

    @classmethod
    def take(
        cls, x: Any, watched: set[int], depth: int = _DEPTH, most: float = math.inf
    ) -> Snapshot:
        """Return the snapshot of a value as it is now.

        Args:
            x: the value.
            watched: ids of tensors that another guard watches, as parameters are. Ids of objects
                are added.
            depth: of nested containers.
            most: bytes of a tensor or an array that is copied.
        """
        if isinstance(x, Tensor):
            return cls._take_tensor(x, watched, most)
        if isinstance(x, np.ndarray):
            return cls(x, x.copy() if x.nbytes <= most else None)
        if type(x) in _ACCESSORS:
            accessor = _ACCESSORS[type(x)]
            own = _copy_iterator(x) if accessor.is_iterator else None
            snapshot = cls(x, own, state=cls._take_state(x))
            if accessor.seed is not None:
                accessor.seed(x, _draw_seed())
            return snapshot
        if not depth or not _is_container(type(x)) or id(x) in watched:
            return cls(x)
        if type(x) not in _HOLDERS:
            watched.add(id(x))  # objects may hold one another
        keys, values = _items(x)
        if len(values) > _LONG:
            return cls(x, keys=keys, inner=values, flat=True)
        inner = tuple(cls.take(y, watched, depth - 1, most) for y in values)
        return cls(x, keys=keys, inner=inner)

    @classmethod
    def _take_tensor(cls, x: Tensor, watched: set[int], most: float) -> Snapshot:
        if id(x) in watched or isinstance(x, nn.Parameter):
            return cls(x)
        copy = None
        is_plain = x.layout == torch.strided and not x.is_quantized and not x.is_meta
        if is_plain and x.grad_fn is None and x.nbytes <= most:
            copy = x.detach().clone()
        return cls(x, copy, _version(x))

    @classmethod
    def _take_state(cls, x: Any) -> Snapshot:
        return cls.take(_ACCESSORS[type(x)].read(x), set())

    def is_unchanged(self, now: Any, *, by_value: bool = False) -> bool:
        """Return whether `now` is the same object and nothing was written into it.

        Args:
            now: the present value.
            by_value: compare the values of tensors, and not only torch's counter of writes.
        """
        if self.state is not None and type(now) is type(self.value):
            return self.state.equals(self._take_state(now))
        if now is not self.value:
            if type(now) is not type(self.value) or not isinstance(now, _PLAIN):
                return False
            return same_values(now, self.value)
        is_counted = isinstance(now, Tensor) and not by_value
        if self.copy is not None and not is_counted:
            return same_values(now, self.copy)
        if isinstance(now, Tensor):
            return self.version in (None, _version(now))
        if self.inner is None:
            return True
        keys, values = _items(now)
        if len(values) != len(self.inner) or keys != self.keys:
            return False
        if self.flat:
            return all(map(operator.is_, self.inner, values))
        pairs = zip(self.inner, values, strict=True)
        return all(item.is_unchanged(x, by_value=by_value) for item, x in pairs)

    def restore(self) -> Any:
        """Return the object, with the contents that it had.

        Raises:
            StateChangedError: it has changed in a way that cannot be undone.
        """
        x = self.value
        if self.state is not None:
            x = self._restore_state(x)
        elif isinstance(self.copy, Tensor):
            if not same_values(x, self.copy):
                x = _write_copy(x, self.copy)
        elif isinstance(self.copy, np.ndarray):
            x[...] = self.copy
        elif self.inner is not None:
            items = list(self.inner)
            if not self.flat:
                items = [item.restore() for item in items]
            _fill(x, self.keys, items)
        return x

    def _restore_state(self, x: Any) -> Any:
        accessor = _ACCESSORS[type(x)]
        if self.is_unchanged(x):
            return x
        if accessor.is_iterator:
            return _copy_iterator(self.copy)
        if accessor.write is None:
            raise StateChangedError(
                f"model, loss_fn or augment advances a {type(x).__name__}, which cannot be put back"
                " after a pass; take its values before training (docs/errors.md#state)"
            )
        assert self.state is not None
        accessor.write(x, self.state.value)
        return x

    def equals(self, other: Snapshot) -> bool:
        """Return whether two values are equal: tensors, arrays, numbers, texts and containers."""
        if type(self.value) is not type(other.value) or self.keys != other.keys:
            return False
        if self.state is not None and other.state is not None:
            return self.state.equals(other.state)
        if isinstance(self.value, _VALUES):
            return same_values(self._contents, other._contents)
        ours = self.inner or ()
        theirs = other.inner or ()
        if self.flat != other.flat or len(ours) != len(theirs):
            return False
        if self.flat:
            return all(map(operator.is_, ours, theirs))
        return all(a.equals(b) for a, b in zip(ours, theirs, strict=True))

    @property
    def _contents(self) -> Any:
        if self.copy is None:
            return self.value
        return self.copy


_Copies = dict[nn.Module, dict[str, Snapshot]]
"""Modules with copies of their attributes, of `_NOTHING` where one is gone."""


class AttributeSnapshot:
    """The plain attributes of all modules of a model, as they are when this is made.

    Args:
        model: whose modules. Their parameters and buffers are no plain attributes.
        without: modules that are left out.
    """

    def __init__(self, model: nn.Module, without: Collection[nn.Module] = ()) -> None:
        modules = paths_of(model, without)
        watched: set[int] = set()
        for m in modules:
            watched.update(map(id, (*m._parameters.values(), *m._buffers.values())))
        self._tensors = frozenset(watched)
        self._before = {}
        for m in modules:
            attributes = dict(vars(m))
            snapshots = {}
            for name, x in attributes.items():
                kind: Any = type(x)
                if name not in _INTERNAL and _may_hold_values(kind):
                    snapshots[name] = Snapshot.take(x, watched)
            self._before[m] = (attributes, snapshots)

    def changed(self, *, by_value: bool = False, also: Iterable[nn.Module] = ()) -> _Names:
        """Return the changed attributes of every module where a value changed.

        Values are tensors, arrays, numbers and texts. An attribute may have been replaced, written
        to, added or removed.

        Args:
            by_value: compare the values of tensors too, and not only objects and torch's counter of
                writes.
            also: modules of which any change is returned.
        """
        changed: _Names = {}
        others = set(also)
        for module, (before, snapshots) in self._before.items():
            now = vars(module)
            if not snapshots and len(now) == len(before):
                if all(map(operator.is_, now.values(), before.values())):
                    continue
            names = set(before.keys() - now.keys())
            for name in now.keys() - _INTERNAL:
                snapshot = snapshots.get(name) or Snapshot(before.get(name, _NOTHING))
                if not snapshot.is_unchanged(now[name], by_value=by_value):
                    names.add(name)
            values = [place.get(name) for place in (before, now) for name in names]
            if names and (module in others or any(map(_holds_values, values))):
                changed[module] = frozenset(names)
        return changed

    def values(self) -> _Copies:
        """Return copies of the present values of attributes that have changed."""
        copies: _Copies = {}
        for module, names in self.changed(by_value=True).items():
            now = vars(module)
            copies[module] = {}
            for name in sorted(names):
                watched = set(self._tensors)
                copies[module][name] = Snapshot.take(now.get(name, _NOTHING), watched)
        return copies

    def undo(self, *, by_value: bool = False, also: Iterable[nn.Module] = ()) -> _Names:
        """Undo all changes, and return what they were; arguments as of `changed`."""
        changed = self.changed(by_value=by_value, also=also)
        for module, names in changed.items():
            before, snapshots = self._before[module]
            for name in names:
                value = before.get(name, _NOTHING)
                if name in snapshots:
                    value = snapshots[name].restore()
                _write(vars(module), name, value)
        return changed


def paths_of(model: nn.Module, without: Collection[nn.Module] = ()) -> dict[nn.Module, str]:
    """Return every module of a model with its path, in the order of `named_modules`.

    Args:
        model: whose modules.
        without: modules that are left out, with all that is below them.
    """
    modules = model.named_modules(set(without)) if without else model.named_modules()
    return {module: path for path, module in modules}


def _is_container(kind: Any) -> bool:
    return kind in _HOLDERS or issubclass(kind, (tuple, *_BY_ATTRIBUTES)) or is_own(kind)


@cache
def is_own(kind: Any) -> bool:
    """Return whether a class, and all it derives from, belongs to no installed package.

    Then no other code watches its objects.
    """
    names = {x.__module__ for x in kind.__mro__}
    own = [name for name in names if name.partition(".")[0] not in _COMMON]
    if not own or not all(map(is_own_module, own)):
        return False
    return not issubclass(kind, type) and ("__dict__" in dir(kind) or bool(_slots_of(kind.__mro__)))


@cache
def _slots_of(classes: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the slots of a class and of the classes that it derives from."""
    slots = []
    for base in classes:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            is_mangled = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))


@cache
def is_own_module(name: str) -> bool:
    """Return whether a Python module is neither of a package nor of the standard library."""
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or package in ("torch", "dpkfc"):
        return False
    file = str(getattr(sys.modules.get(name), "__file__", ""))
    return "site-packages" not in file and "dist-packages" not in file


@cache
def _may_hold_values(kind: Any) -> bool:
    return _is_container(kind) or kind in _ACCESSORS or issubclass(kind, (Tensor, np.ndarray))


def same_values(one: Any, other: Any) -> bool:
    """Return whether two tensors, arrays or plain values are equal. NaN equals NaN."""
    if isinstance(one, Tensor):
        other = other.to(one.device)
        if _form(one) != _form(other):
            return False
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if torch.equal(one, other):
            return True
        return bool(equal_or_nan(one, other).all())
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype:
            return False
        is_number = one.dtype.kind in "fc"
        return np.array_equal(one, other, equal_nan=is_number)
    if one == other:
        return True
    return isinstance(one, float | complex) and cmath.isnan(one) and cmath.isnan(other)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.layout


def equal_or_nan(one: Tensor, other: Tensor) -> Tensor:
    """Return which entries are equal, or both NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def _holds_values(x: Any, depth: int = _DEPTH) -> bool:
    if depth and _is_container(type(x)):
        _, values = _items(x)
        return isinstance(x, WeakSet) or any(_holds_values(y, depth - 1) for y in values)
    return isinstance(x, _VALUES) or type(x) in _ACCESSORS


def _items(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the names, where a container has names, and the items of the container."""
    named = x
    if not isinstance(x, _HOLDERS):
        named = dict(getattr(x, "__dict__", {}))
        named |= {name: getattr(x, name) for name in _slots_of(type(x).__mro__) if hasattr(x, name)}
    elif not isinstance(x, dict):
        return (), tuple(x)
    return tuple(named), tuple(named.values())


def _fill(x: Any, keys: tuple[Any, ...], values: list[Any]) -> None:
    """Put items back into a container. Tuples and frozen sets keep theirs."""
    if isinstance(x, (tuple, frozenset)):
        return
    if not isinstance(x, _HOLDERS):
        _fill_attributes(x, dict(zip(keys, values, strict=True)))
        return
    container: Any = x
    container.clear()
    if isinstance(container, dict):
        container.update(dict(zip(keys, values, strict=True)))  # a Counter would count pairs
    elif isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def _fill_attributes(x: Any, values: dict[str, Any]) -> None:
    """Give an object these attributes and no others."""
    for name in _slots_of(type(x).__mro__):
        if name in values:
            # A frozen dataclass has a method of its own.
            object.__setattr__(x, name, values.pop(name))
        elif hasattr(x, name):
            object.__delattr__(x, name)
    if hasattr(x, "__dict__"):
        vars(x).clear()
        vars(x).update(values)


def _version(x: Tensor) -> int:
    if x.is_inference():
        return 0
    return x._version


# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
# Attributes found by a check that is still open.
_built: WeakKeyDictionary[nn.Module, dict[str, Snapshot]] = WeakKeyDictionary()
# Whether a check on public rows is open. Private values may decide no message, so that what passes
# over private examples change is put back without a word.
_is_checking: ContextVar[bool] = ContextVar("is_checking", default=False)
# Attributes that were restored and reported once.
_reported: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


# A module and the name of a tensor in it.
_Place = tuple[nn.Module, str]


class PassState:
    """Parameters, buffers and extra state of a model, as they are when this is made.

    Args:
        model: the model.
        by_value: keep copies of the parameters too (in main memory). Then writing into one is seen
            and undone even where torch does not count it (`p.data`). Of large frozen parameters
            only a digest is kept: a model whose adapters are trained needs no second copy.
        without: modules that another guard watches.

    Attributes:
        written: modules with a change, after `restore`.
    """

    def __init__(
        self, model: nn.Module, *, by_value: bool = False, without: Collection[nn.Module] = ()
    ) -> None:
        reshard(model)
        self._model = model
        self._paths = paths_of(model, without)
        self._buffers: dict[_Place, tuple[Tensor, Tensor]] = {}
        self._parameters: dict[_Place, tuple[Any, int, Tensor | str | None]] = {}
        self._extra: dict[nn.Module, Snapshot] = {}
        for place, b in self._tensors("_buffers").items():
            self._buffers[place] = (b, b.clone())
        for place, p in self._tensors("_parameters").items():
            copy = _copy_or_digest(p) if by_value else None
            self._parameters[place] = (p, p._version, copy)
        for m in self._paths:
            if type(m).get_extra_state is not nn.Module.get_extra_state:
                self._extra[m] = _extra_state(m)
        self.written: list[nn.Module] = []

    def _tensors(self, kind: str) -> dict[_Place, Tensor]:
        """Return module and name of each of the `_buffers` or `_parameters` to the tensor."""
        tensors = {}
        for m in self._paths:
            for leaf, x in getattr(m, kind).items():
                if x is not None:
                    tensors[m, leaf] = x
        return tensors

    def restore(self) -> str:
        """Undo whatever changed.

        Returns:
            The message that refuses the first change, empty where nothing changed. A buffer counts
            in a check on public rows alone: a private value may not end a run.
        """
        reshard(self._model)
        extra = list(self._changed_extra())
        buffers = list(self._changed_buffers())
        faults = [*extra, *(buffers if _is_checking.get() else ()), *self._changed_parameters()]
        return next(iter(faults), "")

    def _changed_extra(self) -> Iterator[str]:
        for module, before in self._extra.items():
            if _extra_state(module).equals(before):
                continue
            self.written.append(module)
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                module.set_extra_state(before.restore())
            kind = type(module).__name__
            yield (
                f"the forward pass changes the extra state of the module '{self._paths[module]}' "
                f"({kind}.get_extra_state), which would carry private data into checkpoints; "
                "freeze it"
            )

    def _changed_buffers(self) -> Iterator[str]:
        now = self._tensors("_buffers")
        on_accelerator = [pair for pair in self._buffers.values() if is_on_accelerator(pair[0])]
        are_same = _are_same(on_accelerator)
        for module, leaf in {**self._buffers, **now}:
            if (module, leaf) not in self._buffers:
                del module._buffers[leaf]
            else:
                buffer, copy = self._buffers[module, leaf]
                is_same = are_same and is_on_accelerator(buffer)
                if now.get((module, leaf)) is buffer and (is_same or same_values(buffer, copy)):
                    continue
                module._buffers[leaf] = _write_copy(buffer, copy)
            yield (
                f"the forward pass changes the buffer '{self._name(module, leaf)}', which would "
                "carry private data out of the model without noise; freeze it with .eval()"
            )

    def _changed_parameters(self) -> Iterator[str]:
        present = self._tensors("_parameters")
        for module, leaf in {**self._parameters, **present}:
            if (module, leaf) not in self._parameters:
                del module._parameters[leaf]
                fate = _PUT_BACK
            else:
                original, version, copy = self._parameters[module, leaf]
                fate = _restore_parameter(original, version, copy, present.get((module, leaf)))
                if not fate:
                    continue
                module._parameters[leaf] = original
            yield (f"the forward pass writes to the parameter '{self._name(module, leaf)}'; {fate}")

    def _name(self, module: nn.Module, leaf: str) -> str:
        self.written.append(module)
        return join_names(self._paths[module], leaf)


_PUT_BACK = "use a parametrization, or write behind each step and call accept_weights()"


def _restore_parameter(
    original: Any, version: int, copy: Tensor | str | None, now: Tensor | None
) -> str:
    """Undo a change of a parameter, and return what to do, empty where nothing changed.

    Args:
        original: the parameter before the pass.
        version: its counter of writes then.
        copy: its values or their digest, where they were kept.
        now: what is in its place now.
    """
    if isinstance(copy, Tensor) and not same_values(to_local(original), copy):
        value = _write_copy(to_local(original), copy)
        if value.shape != original.shape and not is_divided(original):
            original.data = value
        return _PUT_BACK
    is_lost = copy is None and original._version != version
    if isinstance(copy, str):
        is_lost = _digest(original) != copy
    if is_lost:
        with torch.no_grad():
            original.fill_(float("nan") if original.is_floating_point() else 0)
        return (
            "its value is unknown and has been erased: load the last checkpoint "
            "(docs/errors.md#state)"
        )
    if now is original or _is_reloaded(original, now, copy):
        return ""
    return _PUT_BACK


def _are_same(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether all tensors equal their copies, in one question to their GPU."""
    flags: list[Tensor] = []
    for x, copy in pairs:
        if _form(x) != _form(copy):
            return False
        flags.append(equal_or_nan(x, copy).all().to(pairs[0][0].device))
    if not flags:
        return False
    return bool(torch.stack(flags).all())


def _copy_or_digest(p: Tensor) -> Tensor | str | None:
    """Return a copy in main memory, or the digest of a large frozen parameter.

    It is None for a parameter that has neither (not loaded, quantised).
    """
    try:
        if not p.requires_grad and p.numel() * p.element_size() > LARGE:
            return _digest(p)
        return to_local(p).to("cpu", copy=True)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _digest(p: Tensor) -> str:
    # A reloaded parameter may be on another device.
    return digest_tensors({"": to_local(p).cpu()})[""]


def _is_reloaded(before: Tensor, now: Tensor | None, copy: Tensor | str | None) -> bool:
    """Return whether a frozen parameter is another object with the same values.

    Some libraries load a layer for the time of the pass.
    """
    if before.requires_grad or now is None:
        return False
    if copy is None or now.is_meta:
        return True
    if isinstance(copy, str):
        return _digest(now) == copy
    return same_values(now.detach(), copy)


def _write_copy(x: Tensor, copy: Tensor) -> Tensor:
    """Return the tensor with the values of its copy, or the copy where the shape has changed."""
    if x.shape != copy.shape:
        return copy.to(x.device)
    with torch.no_grad():
        x.copy_(copy)
    return x


def _extra_state(module: nn.Module) -> Snapshot:
    state: Any = module.get_extra_state()
    if isinstance(state, io.BytesIO):
        state = state.getvalue()
    return Snapshot.take(state, set())


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the body with every module in eval mode, and restore the modes afterwards.

    Dropout would differ between two passes. Recurrent layers without dropout, which compute the
    same in both modes, are in training mode: cuDNN differentiates them in no other.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module, _ in modes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class StateChangedError(ValueError):
    """A pass has changed what only releases may change; it ends the run."""


@contextmanager
def _refuse_change(restore: Callable[[], str]) -> Iterator[None]:
    """Undo after the body what it changed, also after an error.

    Raises:
        StateChangedError: the message of `restore`, of a change that may not happen, whatever the
            body has raised.
    """
    try:
        yield
    finally:
        fault = restore()
        if fault:
            raise StateChangedError(fault)


@contextmanager
def restored_state(model: nn.Module, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """Restore parameters, buffers and extra state that the body changes, also after an error.

    A parameter is seen to be written by torch's counter, and is then erased: a copy of all
    parameters in every pass would double their memory. `checked_state` copies them, for the check
    before the first release.

    Args:
        model: the model.
        without: modules that another guard watches.

    Raises:
        StateChangedError: naming the parameter, buffer or module, which would carry statistics of
            private data outside the mechanism.
    """
    with _refuse_change(PassState(model, without=without).restore):
        yield


@contextmanager
def restored_attributes(model: nn.Module, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """Restore plain attributes after the work on one micro-batch, but of modules in `without`."""
    before = AttributeSnapshot(model, without)
    try:
        yield
    finally:
        changed = before.undo()
        if _is_checking.get():
            _warn_of_attributes(model, changed)


def _warn_of_attributes(model: nn.Module, changed: _Names) -> None:
    """Warn of attributes that passes on public rows have changed; caches and the like are none."""
    paths = paths_of(model)
    for module, names in changed.items():
        new = names - _reported.get(module, frozenset()) - _built.get(module, {}).keys()
        if new:
            _report(module, new)
            _log.warning(
                "forward passes write to attributes of the module '%s' (%s) that may depend on "
                "private examples, or on how many there are; they are put back after every pass: "
                "%s",
                paths.get(module, "?"),
                type(module).__name__,
                ", ".join(sorted(new)),
            )


def _report(module: nn.Module, names: frozenset[str]) -> None:
    _reported[module] = _reported.get(module, frozenset()) | names


@contextmanager
def checked_state(model: nn.Module) -> Iterator[AttributeSnapshot]:
    """Restore whatever the check before the first release changes, found by its value.

    Caches that `check_memory` has found to depend on no example stay as they were built.

    Yields:
        The plain attributes before the body, for `check_memory`.

    Raises:
        ValueError: as `restored_state`.
    """
    state = PassState(model, by_value=True)
    before = AttributeSnapshot(model)
    _built.clear()
    token = _is_checking.set(True)

    def restore() -> str:
        fault = state.restore()
        _is_checking.reset(token)
        changed = before.undo(by_value=True, also=state.written)
        if not fault:
            _warn_of_attributes(model, changed)
        return fault

    with _refuse_change(restore):
        yield before
    for module, values in _built.items():
        for name, snapshot in values.items():
            _write(vars(module), name, snapshot.restore())


def check_memory(
    model: nn.Module,
    before: AttributeSnapshot,
    losses: Callable[[Any], Tensor],
    batches: Iterable[Any],
    device: torch.device,
) -> None:
    """Refuse an attribute that depends on the examples and changes what is computed later.

    Caches, which do not depend on the examples, stay as they are when the check ends.

    Args:
        model: in the mode it is trained in.
        before: its attributes before any pass.
        losses: of a batch `[n]`.
        batches: two or more of equal shapes, with different examples.
        device: of the model.

    Raises:
        ValueError: naming module and attribute.
    """
    if not before.changed(by_value=True):
        return
    restart = restarter(device)

    def run(batch: Any) -> Tensor:
        restart()
        return losses(batch)

    tested = list(batches)
    runs = []
    for batch in tested:
        before.undo(by_value=True)
        run(batch)
        runs.append(before.values())
    # Once more, on top of the last pass.
    run(tested[0])
    dependent = _find_dependent(runs, before.values())
    if not dependent:
        return
    for earlier, later in pairwise(tested):
        for mode in (nullcontext, partial(evaluation_mode, model)):
            results = []
            for past in ((), (earlier,)):
                before.undo(by_value=True)
                for batch in past:
                    run(batch)
                with mode():
                    results.append(run(later).detach())
            alone, after = results
            if not torch.allclose(alone, after, rtol=1e-5, atol=1e-6, equal_nan=True):
                _refuse_memory(model, dependent)


def _find_dependent(runs: Sequence[_Copies], again: _Copies) -> _Names:
    """Return attributes whose values depended on the input. Record the others as caches."""
    dependent: _Names = {}
    for module in dict.fromkeys(chain(*runs)):
        first, *others = [values.get(module, {}) for values in runs]
        last = again.get(module, {})
        names = frozenset(first).union(*others)
        changed = set()
        for run in others:
            changed |= {name for name in names if not _is_equal(name, first, run)}
        if changed:
            dependent[module] = frozenset(changed)
        elif all(_is_equal(name, first, last) for name in names):
            if any(map(_is_computed, others[-1].values())):
                _report(module, names)  # made anew in every pass
            else:
                _built[module] = dict(others[-1])
    return dependent


def _is_computed(snapshot: Snapshot) -> bool:
    """Return whether a value holds a tensor with a graph, of parameters that will change."""
    if isinstance(snapshot.value, Tensor):
        return snapshot.value.grad_fn is not None
    inner = [x for x in snapshot.inner or () if isinstance(x, Snapshot)]
    return any(map(_is_computed, inner))


def _is_equal(name: str, one: Mapping[str, Snapshot], other: Mapping[str, Snapshot]) -> bool:
    return name in one and name in other and one[name].equals(other[name])


def _refuse_memory(model: nn.Module, dependent: _Names) -> None:
    for module, path in paths_of(model).items():
        for name in sorted(dependent.get(module, ())):
            raise ValueError(
                f"the forward pass keeps '{name}' of the module '{path}' ({type(module).__name__}),"
                " which depends on the examples; remove or freeze it (docs/errors.md#state)"
            )


# --------------------------------------------------------------------------------------------------
# State that a loss function or an augmentation keeps from one call to the next.
#
# A memory of past features, a running mean or a counter would let one example move the gradients of
# others, in other steps too. It may lie in the object whose method the function is, in a `partial`,
# in a closure or in a global variable. Everything that the function reaches is restored after each
# call. Modules that it reaches, and that are no part of the model, may not change their buffers.

_LOSS_DEPTH = 4  # nested calls of functions
_INSIDE = 8  # nested containers
_reported_losses: set[str] = set()


def make_stateless(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the loss function, after each call of which everything that it reaches is restored.

    It reaches the object that it is or whose method it is, arguments of a `partial`, variables of
    closures, and global variables that it names. Functions, lists, dicts and objects in them count
    as far as their classes belong to no installed package.

    Raises:
        ValueError: from a call that changes a buffer or a parameter of a module that is no part of
            the model, or a tensor of more than a megabyte, which is not copied.
    """

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with loss_state_restored(loss_fn, model):
            return loss_fn(model, batch)

    # The wrapper shows the code of loss_fn.
    return update_wrapper(losses, loss_fn, assigned=(), updated=())


@contextmanager
def loss_state_restored(function: Any, model: nn.Module, name: str = "loss_fn") -> Iterator[None]:
    """Undo after a call of a function what it, and the code of the model, changed elsewhere.

    Args:
        function: a loss function or an augmentation.
        model: the model that is trained. Its own attributes are restored elsewhere.
        name: of the function, for messages.
    """
    reached = Reached(model, name)
    reached.follow(function)
    own = reached.own
    with ExitStack() as stack:
        stack.enter_context(_refuse_change(reached.restore))
        for module in reached.modules:
            stack.enter_context(restored_state(module, own))
            stack.enter_context(restored_attributes(module, own))
        yield


def identify_program(function: Any) -> Any:
    """Return the code of a loss function, whatever object or arguments the function is bound to."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


@dataclass(frozen=True)
class _Variable:
    """A variable that a loss reaches: in a dict or a class, or the cell of a closure."""

    name: str
    place: Any
    snapshot: Snapshot

    def restore(self) -> bool:
        """Restore the variable, and return whether it had changed."""
        if self.snapshot.is_unchanged(_read(self.place, self.name)):
            return False
        _write(self.place, self.name, self.snapshot.restore())
        return True


class Reached:
    """All variables that a model and a function reach, as they are now.

    Args:
        model: the model, whose own attributes another guard watches.
        function: name of the function, for messages.

    Attributes:
        own: the modules of the model.
        modules: other modules that are reached.
    """

    def __init__(self, model: nn.Module, function: str = "the model") -> None:
        self.own = set(paths_of(model))
        self.modules: list[nn.Module] = []
        self._function = function
        self._variables: list[_Variable] = []
        # Classes with the names of their attributes.
        self._classes: dict[type, set[str]] = {}
        self._seen = set(map(id, self.own))
        self._watched: set[int] = set()
        for module in self.own:
            self._follow_module(module)

    def _follow_module(self, module: nn.Module) -> None:
        """Note what the methods, hooks and class attributes of a module of the model reach."""
        values = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if is_own_module(type(module).__module__):
            values += vars(module).values()
        for value in values:
            self._note_callable(value, _LOSS_DEPTH)
        for kind in type(module).__mro__:
            self._follow_class(kind, _LOSS_DEPTH)

    def _follow_class(self, kind: type, depth: int) -> None:
        """Note the attributes of a class that belongs to no package, and what its methods reach."""
        if depth == 0 or id(kind) in self._seen or not is_own_module(kind.__module__):
            return
        self._seen.add(id(kind))
        self._classes[kind] = set(vars(kind))
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                self.follow(function, depth)
            elif not name.startswith("__"):
                self._note(name, kind, depth)

    def follow(self, x: Any, depth: int = _LOSS_DEPTH) -> None:
        """Note what a function, or a value, holds."""
        kind: Any = type(x)
        if depth == 0 or id(x) in self._seen:
            return
        if isinstance(x, partial):
            arguments = {f"argument {i}": value for i, value in enumerate(x.args)}
            self._note_values({**arguments, **x.keywords}, depth)
            self.follow(x.func, depth)
        elif isinstance(x, MethodType):
            owner = x.__self__
            self._note_values({type(owner).__name__: owner}, depth)
            self.follow(x.__func__, depth)
        elif isinstance(x, FunctionType):
            self._seen.add(id(x))
            if is_own_module(x.__module__ or ""):
                self._note_variables(x, depth)
        elif callable(x) and (isinstance(x, nn.Module) or is_own(kind)):
            self._note_values({kind.__name__: x}, depth)
            called = vars(kind).get("__call__")
            if isinstance(x, nn.Module):
                called = x.forward
            self.follow(called, depth)

    def _note_variables(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        cells = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            self._note(name, cell, depth)
        values = {
            "default arguments": function.__defaults__,
            "default keywords": function.__kwdefaults__,
            "attributes of a function": vars(function),
        }
        self._note_values(values, depth)
        names = set(_globals_of(code))
        variables = function.__globals__
        places = [variables]
        for x in map(variables.get, names):
            if isinstance(x, ModuleType) and is_own_module(x.__name__):
                places.append(vars(x))
        for place in places:
            for name in names:
                self._note(name, place, depth)

    def _note_values(self, values: dict[str, Any], depth: int) -> None:
        """Note values that cannot be replaced in their places, only written into."""
        for name in values:
            self._note(name, values, depth)

    def _note(self, name: str, place: Any, depth: int) -> None:
        value = _read(place, name)
        if isinstance(value, type):
            self._follow_class(value, depth - 1)
            return
        if self._note_callable(value, depth):
            return
        snapshot = Snapshot.take(value, self._watched, _INSIDE, LARGE)
        self._variables.append(_Variable(name, place, snapshot))
        self._note_inside(snapshot, depth)

    def _note_inside(self, snapshot: Snapshot, depth: int) -> None:
        for x in snapshot.inner or ():
            if not isinstance(x, Snapshot):
                self._note_callable(x, depth)
            elif not self._note_callable(x.value, depth):
                self._note_inside(x, depth)

    def _note_callable(self, value: Any, depth: int) -> bool:
        """Note a module or a function, and return whether the value is one."""
        if isinstance(value, nn.Module):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.modules.append(value)
            return True
        if isinstance(value, (FunctionType, MethodType, partial)):
            self.follow(value, depth - 1)
            return True
        return False

    def restore(self) -> str:
        """Undo what has changed.

        Returns:
            The message that refuses a change that cannot be undone, otherwise an empty text.
        """
        for kind, names in self._classes.items():
            for name in vars(kind).keys() - names:
                if not name.startswith("__"):
                    self._variables.append(_Variable(name, kind, Snapshot(_NOTHING)))
        changed = [x for x in self._variables if x.restore()]
        new = sorted({x.name for x in changed} - _reported_losses)
        if new and _is_checking.get():
            _reported_losses.update(new)
            _log.warning(
                "%s changes variables that may depend on private examples; they are put back after "
                "every call (print or log values that only you should see): %s",
                self._function,
                ", ".join(new),
            )
        for x in changed:
            if not x.snapshot.is_unchanged(_read(x.place, x.name), by_value=True):
                return (
                    f"{self._function} writes to a tensor that it reaches by '{x.name}', and that "
                    "is too large to be put back; compute each example without a memory of others"
                )
        return ""


def _read(place: Any, name: str) -> Any:
    """Return the value of a variable in a dict, a class or the cell of a closure, or `_NOTHING`."""
    if isinstance(place, type):
        place = vars(place)
    if not isinstance(place, CellType):
        return place.get(name, _NOTHING)
    try:
        return place.cell_contents
    except ValueError:  # not assigned yet
        return _NOTHING


def _write(place: Any, name: str, value: Any) -> None:
    """Set a variable, or remove its value."""
    if isinstance(place, CellType):
        name = "cell_contents"
    if isinstance(place, dict) and value is _NOTHING:
        place.pop(name, None)
    elif isinstance(place, dict):
        place[name] = value
    elif value is _NOTHING:
        delattr(place, name)
    else:
        setattr(place, name, value)


def _globals_of(code: CodeType) -> Iterator[str]:
    """Names in a function, and in those inside it, that may be global variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


# --------------------------------------------------------------------------------------------------
# Augmentation.
#
# K views of one example are K consecutive rows whose gradients are averaged before the clip, so
# that an example still moves the sum by at most C. The tracker follows the rows through the
# augmentation as through the model. Whatever an augmentation keeps of a batch is undone after each
# call, so that no batch changes a later one.


Augmentation = Callable[[Any], Any]
"""Maps a batch to one with as many rows, each changed at random on its own."""


def augmented(
    augment: Augmentation | None,
    model: nn.Module,
    batch: Any,
    rows: int,
) -> Any:
    """Return the batch as `augment` changes it, itself without one.

    Args:
        augment: maps a batch to one with as many rows.
        model: the model that is trained, whose state is restored elsewhere.
        batch: on the model's device.
        rows: how many it has.

    Raises:
        ValueError: another number of rows came back.
    """
    if augment is None:
        return batch
    with loss_state_restored(augment, model, "augment"):
        changed = augment(batch)
    for before, after in zip(_sizes(batch), _sizes(changed), strict=False):
        if before == rows and after != rows:
            raise ValueError(
                f"augment made {after} rows of {rows}; return one row for every row. Several views "
                "of an example come from PrivacyConfig(augmentations=K)"
            )
    return changed


def _sizes(batch: Any) -> list[int | None]:
    sizes: list[int | None] = []
    for x in tree_leaves(batch):
        size = None
        if isinstance(x, Tensor) and x.dim():
            size = len(x)
        sizes.append(size)
    return sizes


# --------------------------------------------------------------------------------------------------
# Checks around the hand-over of a release to a torch optimizer, which holds the model's parameters.
# Nothing else moves them.

Trace = tuple[int, Tensor]


def check_optimizer(optimizer: Any, parameters: NamedTensors) -> None:
    """Refuse an optimizer that does not hold exactly the trainable parameters of the model.

    Frozen parameters may be in it too.

    Raises:
        ValueError: naming a parameter that is missing or foreign; a GradScaler, whose scale follows
            private gradients; an optimizer whose step needs a closure, which would ask for
            gradients without noise, or that takes sparse gradients only; a complex parameter, or
            one that was expanded.
    """
    _check_kind(optimizer)
    in_optimizer: set[Tensor] = set()
    for group in optimizer.param_groups:
        in_optimizer.update(group["params"])
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(
                f"parameter '{name}' is complex, which is not supported; freeze it, or hold a real "
                "one with a last axis of 2 (torch.view_as_complex)"
            )
        if any(size > 1 and not stride for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(
                f"several entries of parameter '{name}' lie in one place of memory (expand), so no "
                "optimizer can change them; make the parameter of a clone()"
            )
        if p not in in_optimizer:
            raise ValueError(
                f"the optimizer does not hold trainable parameter '{name}'; pass it to the "
                "optimizer or freeze it with requires_grad_(False)"
            )
    for p in in_optimizer.difference(parameters.values()):
        if p.requires_grad:
            raise ValueError(
                f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not "
                "in the model and would get no private gradient; remove it"
            )


def _check_kind(optimizer: Any) -> None:
    """Refuse an object that is not an optimizer, or that would ask for gradients without noise."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and a release is dense: rows without noise "
            "would reveal the tokens of private texts; use Adam"
        )
    # The optimizer of accelerate has a scaler under float16.
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(optimizer, torch.amp.GradScaler) or scaler is not None:
        raise ValueError(
            "a GradScaler cannot step a private run: its scale follows private gradients without "
            "noise; use bfloat16, and pass the torch optimizer itself"
        )
    is_optimizer = hasattr(optimizer, "param_groups")
    if not is_optimizer:
        raise ValueError(f"the optimizer must be a torch.optim.Optimizer, got {kind}")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{kind} steps with a closure that asks for gradients without noise; use an optimizer "
            "that takes one gradient a step, such as SGD or Adam"
        )


def check_unchanged(
    model: nn.Module,
    layers: Sequence[Layer],
    parameters: NamedTensors,
    *,
    finite: bool = False,
) -> None:
    """Refuse a model that trains other parameters than when its layers were found.

    Args:
        model: as it is now.
        layers: found before.
        parameters: trainable ones, by name, at that time.
        finite: check their values too, as `check_finite` does.

    Raises:
        RuntimeError: a parameter that was replaced, frozen, unfrozen or added, by name.
        ValueError: a parameter with a hook on its gradient, or with values that are not finite.
    """
    # An evaluation may have left the model gathered.
    reshard(model)
    _check_covered(model, layers)
    refuse_gradient_hooks(model)
    now = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise RuntimeError(
                f"parameter '{name}' was replaced after the session was built; move, cast or adapt "
                "the model before creating the optimizer and the session"
            )
    if finite:
        check_finite(layers)


def _check_covered(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse a model whose trainable parameters are no longer exactly those of its layers.

    An adapter was added, or a layer was unfrozen, frozen or replaced after `find_layers`.
    """
    covered: dict[int, str] = {}
    for layer in layers:
        for role, name in layer.parameters.items():
            try:
                covered[id(layer.tensor(role))] = name
            except AttributeError as error:
                raise RuntimeError(
                    f"parameter '{name}' was taken out of its module after the model was made"
                    " private (a parametrization or a replaced layer?); do so before"
                ) from error
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for key, name in trainable.items():
        if key not in covered:
            raise RuntimeError(
                f"parameter '{name}' is trainable but in no covered layer; add and unfreeze "
                "layers before the model is made private (docs/errors.md#not-covered)"
            )
    for key, name in covered.items():
        if key not in trainable:
            raise RuntimeError(
                f"parameter '{name}' was frozen or taken out of the model after it was made "
                "private; do so before"
            )


def check_finite(layers: Sequence[Layer]) -> None:
    """Refuse a trainable weight that is NaN or infinite, before a release that is only noise.

    Weights are public: they are what was released before, or the initial values.

    Raises:
        ValueError: naming the parameter.
    """
    flags: NamedTensors = {}
    for name, p in named_tensors(layers).items():
        x = to_local(p)
        if x.numel() and x.is_floating_point():
            flags[name] = torch.isfinite(torch.stack(torch.aminmax(x))).all()
    if not flags:
        return
    # One question to the GPU for all parameters.
    device = next(iter(flags.values())).device
    answers = torch.stack([flag.to(device) for flag in flags.values()])
    for name, is_finite in zip(flags, answers.tolist(), strict=True):
        if not is_finite:
            raise ValueError(
                f"parameter '{name}' holds NaN or infinity, so that every release would be noise "
                "alone; nothing was released. Start again with a smaller learning rate"
            )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse a hook that would see private gradients before they are noised.

    `wandb.watch(model, log="gradients")` leaves such hooks, as do optimizers that step during a
    backward pass. Hooks of torch itself (`fully_shard` has its own) are allowed.

    Raises:
        ValueError: naming the parameter or the module.
    """
    for name, p in model.named_parameters():
        hooks = getattr(p, "_backward_hooks", None)
        if hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{name}' has a hook on its gradient, which would see private gradients "
                "without noise (wandb.watch(log='gradients')?); remove it"
            )
    everywhere = [
        *_every_module._global_backward_hooks.values(),
        *_every_module._global_backward_pre_hooks.values(),
    ]
    for name, module in model.named_modules():
        own = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        for hook in (*own, *everywhere):
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                raise ValueError(
                    f"module '{name}' ({type(module).__name__}) has a backward hook, which would "
                    "see private gradients without noise; remove it"
                )


def traces(parameters: NamedTensors) -> dict[str, Trace]:
    """Return version and first entries of each parameter, which show whether it was written."""
    found = {}
    for name, p in parameters.items():
        found[name] = (p._version, to_local(p).flatten()[:16].clone())
    return found


def check_moved(
    optimizer: torch.optim.Optimizer, parameters: NamedTensors, before: Mapping[str, Trace]
) -> None:
    """Raise unless every parameter was written to.

    Some optimizers bypass the version counter, so changed values count too.

    Args:
        optimizer: has just made a step with noise in every gradient.
        parameters: trainable ones, by name.
        before: their `traces` before the step.

    Raises:
        RuntimeError: naming a parameter that did not move although its learning rate is positive.
    """
    rates = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            rates[p] = group.get("lr", 1.0)
    now = traces(parameters)
    for name, parameter in parameters.items():
        version, entries = now[name]
        old_version, old_entries = before[name]
        if version != old_version or not torch.equal(old_entries, entries):
            continue
        # This process may hold nothing of a sharded parameter.
        if to_local(parameter).numel() > 0 and rates[parameter] > 0:
            raise RuntimeError(
                f"parameter '{name}' did not move in the first step although its learning rate is "
                f"{rates[parameter]}: the optimizer holds another tensor than the model"
            )


def step_on_release(
    optimizer: torch.optim.Optimizer, parameters: NamedTensors, record: Callable[[], None]
) -> None:
    """Run an optimizer on the released gradients, and record the weights that it has made.

    The last of all step pre-hooks checks that `p.grad` still holds the release and that no weight
    was written; the first of all post-hooks records the weights. In wrappers of other libraries the
    optimizer is found by the attribute `optimizer`. An object without hooks has none to check.

    Args:
        optimizer: of the run.
        parameters: trainable ones, by name.
        record: takes the weights as they are for those of this release.

    Raises:
        RuntimeError: a pre-hook replaced or wrote a gradient or a parameter, by name. Then no
            parameter is written.
    """
    inner: Any = optimizer
    while inner is not None and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = vars(inner).get("optimizer")
    gradients = {name: p.grad for name, p in parameters.items()}
    before: list[dict[str, str]] = []
    if inner is not None and inner._optimizer_step_pre_hooks:
        before = [digest_tensors(gradients), digest_tensors(parameters)]
    is_recorded = False

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if not before or is_nested_step(stepped):
            return
        now = {name: p.grad for name, p in parameters.items()}
        for kind, old, new in zip(
            ("the release in the gradient of", "the parameter"),
            before,
            (digest_tensors(now), digest_tensors(parameters)),
            strict=True,
        ):
            for name in {**old, **new}:
                if old.get(name) != new.get(name):
                    raise RuntimeError(f"a step pre-hook replaced {kind} '{name}'; remove the hook")

    def end(stepped: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal is_recorded
        if not is_nested_step(stepped):
            record()
            is_recorded = True

    try:
        with ExitStack() as stack:
            if inner is not None:
                stack.enter_context(inner.register_step_pre_hook(check))
            if inner is optimizer:  # a wrapper may have a part in the step
                stack.enter_context(register_first_post_hook(optimizer, end))
            optimizer.step()
    finally:
        if not is_recorded:
            record()


def register_first_post_hook(
    optimizer: torch.optim.Optimizer, hook: Callable[..., None]
) -> RemovableHandle:
    """Register a hook that runs behind the step of an optimizer, before those of other code."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


# What torch puts around the step of each class of optimizers, to run the hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook runs in a step that the step of a subclass has called.

    For `super().step()` torch runs all hooks once more.
    """
    steps = 0
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is _HOOKED_STEP and frame.f_locals["self"] is optimizer:
            steps += 1
    return steps > 1
