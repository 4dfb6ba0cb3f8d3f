"""What a forward pass may leave in a model: nothing that it has computed from private examples.

Parameters, buffers and extra state (`get_extra_state`) may not change at all: they are in every checkpoint, and released
gradients alone move them. Plain attributes are put back after each pass, counters too: how many passes there were is private.
What the check before the first release finds to be alike for all examples, and left alone by a further pass (a cache of
positions), is built there once, and is what attributes are put back to. One that depends on the examples, and changes what the
model computes later, is refused there.
"""

from __future__ import annotations

import cmath
import hashlib
import io
import logging
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from itertools import islice, pairwise
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module
from torch.utils._pytree import tree_flatten

from dpkfc.fsdp import is_divided, local, reshard
from dpkfc.gradients.discovery import check_covered
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.blocks import is_on_accelerator
from dpkfc.rng_state import restarter

# --------------------------------------------------------------------------------------------------
# Values that modules keep in their plain attributes: whether a pass changed them, and how they
# were.
#
# A forward pass may write into an attribute of a module (a running mean that is no buffer, a cache
# of positions, attention maps, a counter). Looked at are tensors, arrays, numbers and texts, alone
# or inside lists, tuples, deques, sets, dicts, and objects of classes that belong to no installed
# package (a memory bank of the user's own).

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


# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_LARGE = 1 << 20  # bytes of a frozen parameter above which it is not copied
_built: WeakKeyDictionary[nn.Module, dict[str, Kept | None]] = WeakKeyDictionary()  # found by a check that is still open
_told: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()  # those that were put back, said once


class PassState:
    """Parameters, buffers and extra state of a model, as they are when this is made.

    Args:
        model: the model.
        by_value: keep copies of the parameters too (in main memory), so that writing into one is seen even where torch does
            not count it (`p.data`), and undone. Of large frozen ones only a digest is kept: a model whose adapters are trained
            needs no second copy of the rest.
        without: modules that are looked after elsewhere.
    """

    def __init__(self, model: nn.Module, *, by_value: bool = False, without: Collection[nn.Module] = ()) -> None:
        reshard(model)
        self._model, self._paths = model, {m: path for m, path in paths_of(model).items() if m not in without}
        self._buffers = {
            (m, leaf): (b, b.clone()) for m in self._paths for leaf, b in m._buffers.items() if b is not None
        }
        self._parameters = {
            (m, leaf): (p, p._version, _noted(p) if by_value else None)
            for m in self._paths
            for leaf, p in m._parameters.items()
            if p is not None
        }
        self._extra = {
            m: _frozen(m.get_extra_state())
            for m in self._paths
            if type(m).get_extra_state is not nn.Module.get_extra_state
        }
        self.written: list[nn.Module] = []

    def put_back(self) -> str:
        """Undo whatever changed.

        Returns:
            Why that is refused, naming the first of it; empty where nothing changed.
        """
        reshard(self._model)
        faults = [*self._changed_extra(), *self._changed_buffers(), *self._changed_parameters()]
        return faults[0] if faults else ""

    def _changed_extra(self) -> Iterator[str]:
        for module, before in self._extra.items():
            if _frozen(module.get_extra_state()).equals(before):
                continue
            self.written.append(module)
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                module.set_extra_state(before.put_back())
            kind = type(module).__name__
            yield (
                f"the forward pass changes the extra state of the module '{self._paths[module]}' ({kind}.get_extra_state), which "
                "every checkpoint would hold: it would carry private data out of the model without noise; freeze it, or use a "
                "module without such a state"
            )

    def _changed_buffers(self) -> Iterator[str]:
        added = [(m, leaf) for m in self._paths for leaf, b in m._buffers.items() if b is not None]
        same = _are_same([pair for pair in self._buffers.values() if is_on_accelerator(pair[0])])
        for module, leaf in [*self._buffers, *(key for key in added if key not in self._buffers)]:
            held, copy = self._buffers.get((module, leaf), (None, None))
            if held is None or copy is None:
                del module._buffers[leaf]
            elif module._buffers.get(leaf) is not held or not (same and is_on_accelerator(held) or same_values(held, copy)):
                module._buffers[leaf] = _written(held, copy)
            else:
                continue
            yield (
                f"the forward pass changes the buffer '{self._name(module, leaf)}', which would carry private data out of the "
                "model without noise; freeze it (.eval() for normalisation statistics) or use a layer without running state"
            )

    def _changed_parameters(self) -> Iterator[str]:
        added = [(m, leaf) for m in self._paths for leaf, p in m._parameters.items() if p is not None]
        for module, leaf in [*self._parameters, *(key for key in added if key not in self._parameters)]:
            held, version, copy = self._parameters.get((module, leaf), (None, 0, None))
            parameters = module._parameters  # of a scripted module without get
            now, fate = parameters[leaf] if leaf in parameters else None, "It has been put back"
            if held is None:
                del module._parameters[leaf]
            elif isinstance(copy, Tensor) and not same_values(local(held), copy):
                value = _written(local(held), copy)
                if value.shape != held.shape and not is_divided(held):
                    held.data = value
            elif (copy is None and held._version != version) or (isinstance(copy, bytes) and _digest(held) != copy):
                with torch.no_grad():
                    held.fill_(float("nan") if held.is_floating_point() else 0)
                fate = "Its value has been erased, since what it was is not known any more: load the last checkpoint"
            elif now is held or _moved(held, now, copy):
                continue
            if held is not None:
                module._parameters[leaf] = held
            yield (
                f"the forward pass writes to the parameter '{self._name(module, leaf)}'; only released gradients may change one, "
                f"and it would carry private data out of the model without noise. {fate}"
            )

    def _name(self, module: nn.Module, leaf: str) -> str:
        self.written.append(module)
        return f"{self._paths[module]}.{leaf}" if self._paths[module] else leaf


def _are_same(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all tensors hold what their copies do, in one question to the card that they lie on."""
    if not pairs or any(x.shape != copy.shape or x.dtype != copy.dtype for x, copy in pairs):
        return False
    flags = [((x == copy) | (x.isnan() & copy.isnan())).all().to(pairs[0][0].device) for x, copy in pairs]
    return bool(torch.stack(flags).all())


def _noted(p: Tensor) -> Tensor | bytes | None:
    """A copy in main memory, of a large frozen parameter a digest; None of a kind that has neither (not loaded, quantised)."""
    try:
        if not p.requires_grad and p.numel() * p.element_size() > _LARGE:
            return _digest(p)
        return local(p).to("cpu", copy=True)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _digest(p: Tensor) -> bytes:
    """Of the values, where they are in memory row by row."""
    digest = hashlib.sha256(str(tuple(p.shape)).encode())
    flat = local(p).contiguous().flatten()
    for part in flat.split(max(1, _LARGE // p.element_size())):
        digest.update(part.view(torch.uint8).cpu().numpy())
    return digest.digest()


def _moved(held: Tensor, now: Tensor | None, copy: Tensor | bytes | None) -> bool:
    """Whether a frozen parameter is another object with the same values, as where its layer is loaded for the pass."""
    if held.requires_grad or now is None:
        return False
    if copy is None or now.is_meta:
        return True
    return _digest(now) == copy if isinstance(copy, bytes) else same_values(now.detach(), copy)


def _written(held: Tensor, copy: Tensor) -> Tensor:
    """The tensor with the values of its copy; the copy itself where it has another shape now."""
    if held.shape != copy.shape:
        return copy.to(held.device)
    with torch.no_grad():
        held.copy_(copy)
    return held


def _frozen(state: Any) -> Kept:
    return Kept.of(state.getvalue() if isinstance(state, io.BytesIO) else state)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, each put back to its own mode afterwards (dropout would differ between two passes).

    Recurrent layers without dropout, which compute the same in both modes, are in training mode: cuDNN differentiates them
    in no other.
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


@contextmanager
def restored_state(model: nn.Module, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """A forward pass: parameters, buffers and extra state are put back if the body changes them, also after an error.

    Modules in `without` are looked after elsewhere.

    A parameter is seen to be written by torch's counter, and erased: a copy of all of them in every pass would double their
    memory. `checked_state` copies them, for the check before the first release.

    Raises:
        ValueError: naming the parameter, buffer or module: it would carry statistics of private data outside the mechanism.
    """
    state, fault = PassState(model, without=without), ""
    try:
        yield
    finally:
        fault = state.put_back()
    if fault:
        raise ValueError(fault)


@contextmanager
def kept_attributes(model: nn.Module, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """The work on one micro-batch: plain attributes are put back, but of modules in `without`."""
    before = Attributes(model, without)
    try:
        yield
    finally:
        put_back_attributes(model, before)


def put_back_attributes(model: nn.Module, before: Attributes) -> None:
    """Undo what passes have changed in plain attributes, and say so once.

    Args:
        model: the model.
        before: its attributes before those passes.
    """
    changed = before.changed()
    before.put_back(changed)
    paths = paths_of(model) if any(changed.values()) else {}
    for module, names in changed.items():
        new = names - _told.get(module, frozenset())
        if new:
            _told[module] = _told.get(module, frozenset()) | new
            _log.warning(
                "forward passes write to attributes of the module '%s' (%s) that may depend on private examples, or on how many "
                "there are; they are put back after every pass: %s",
                paths.get(module, "?"), type(module).__name__, ", ".join(sorted(new)),
            )  # fmt: skip


@contextmanager
def checked_state(model: nn.Module) -> Iterator[Attributes]:
    """The check before the first release: whatever the body changes is seen by its value, and put back.

    Caches that `check_memory` has found to depend on no example stay as they were built.

    Yields:
        The plain attributes before the body, for `check_memory`.

    Raises:
        ValueError: as `restored_state`.
    """
    state, before, fault = PassState(model, by_value=True), Attributes(model), ""
    _built.clear()
    try:
        yield before
    finally:
        fault = state.put_back()
        before.put_back(before.changed(by_value=True, also=state.written))
    if fault:
        raise ValueError(fault)
    for module, values in _built.items():
        for name, kept in values.items():
            if kept is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = kept.put_back()


def check_memory(
    model: nn.Module, before: Attributes, losses: Callable[[Any], Tensor], batches: Iterable[Any], device: torch.device
) -> None:
    """Raise if a forward pass writes an attribute that depends on the examples and changes what is computed later.

    Caches, which do not depend on them, stay as they are when the check ends.

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
    restart, held, tested = restarter(device), [], list(batches)
    for batch in tested:
        before.put_back(before.changed(by_value=True))
        restart()
        losses(batch)
        held.append(before.values(before.changed(by_value=True)))
    restart()
    losses(tested[0])  # once more, on top of the last
    dependent = _sorted_out(held, before.values(before.changed(by_value=True)))
    for earlier, later in pairwise(tested) if dependent else ():
        for evaluated in (False, True):
            found = []
            for past in ((), (earlier,)):
                before.put_back(before.changed(by_value=True))
                for batch in past:
                    restart()
                    losses(batch)
                restart()
                with evaluation_mode(model) if evaluated else nullcontext():
                    found.append(losses(later).detach())
            if not torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6, equal_nan=True):
                _refuse(model, dependent)


def _sorted_out(
    held: Sequence[Mapping[nn.Module, Mapping[str, Kept | None]]], again: Mapping[nn.Module, Mapping[str, Kept | None]]
) -> dict[nn.Module, frozenset[str]]:
    """Attributes that came out otherwise for other examples; of modules without one, caches are noted and others not told of."""
    dependent: dict[nn.Module, frozenset[str]] = {}
    for module in {module: None for values in held for module in values}:
        runs = [values.get(module, {}) for values in held]
        names = frozenset(name for run in runs for name in run)
        alike = frozenset(name for name in names if all(_alike(name, runs[0], run) for run in runs[1:]))
        if names != alike:
            dependent[module] = names - alike
        elif all(_alike(name, runs[0], again.get(module, {})) for name in names):
            if any(_is_computed(kept) for kept in runs[-1].values()):
                _told[module] = _told.get(module, frozenset()) | names  # made anew in every pass
            else:
                _built[module] = dict(runs[-1])
    return dependent


def _is_computed(kept: Kept | None) -> bool:
    """Whether a value holds a tensor with a graph, of parameters that will change."""
    if kept is None or isinstance(kept.value, Tensor):
        return kept is not None and kept.value.grad_fn is not None
    return any(isinstance(x, Kept) and _is_computed(x) for x in kept.inner or ())


def _alike(name: str, one: Mapping[str, Kept | None], other: Mapping[str, Kept | None]) -> bool:
    a, b = one.get(name), other.get(name)
    return name in one and name in other and (a is b or (a is not None and b is not None and a.equals(b)))


def _refuse(model: nn.Module, dependent: Mapping[nn.Module, frozenset[str]]) -> None:
    for module, path in paths_of(model).items():
        for name in sorted(dependent.get(module, ())):
            raise ValueError(
                f"the forward pass keeps '{name}' of the module '{path}' ({type(module).__name__}), which depends on the "
                "examples and changes what the model computes for later ones: it would carry private data out of the model "
                "without noise. Leave it out, freeze it, or compute it from parameters or public data before the training"
            )


# --------------------------------------------------------------------------------------------------
# What a loss function or an augmentation may keep from one call to the next: nothing.
#
# A memory of past features, a running mean or a counter, in the object whose method the function
# is, in a `partial`, in a closure or in a global variable, would let one example move the gradients
# of others, in other steps too. Whatever the function reaches is put back after each call; modules
# that it reaches, and that are no part of the model, may not change their buffers.

_LOSS_DEPTH = 4  # functions that a loss function calls, and those that they call
_INSIDE = 8  # lists in dicts in objects
_reported_losses: set[str] = set()


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

    def follow(self, x: Any, depth: int = _LOSS_DEPTH) -> None:
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
        new = sorted({x.name for x in changed} - _reported_losses)
        _reported_losses.update(new)
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


# --------------------------------------------------------------------------------------------------
# Views of an example: what an `augment` makes of a batch.
#
# K views of one example are K consecutive rows whose gradients are averaged before the clip
# (`groups`), so that an example still moves the sum by at most C. The tracker follows the rows
# through the augmentation as through the model. What an augmentation keeps of a batch is undone
# after each call, so that no batch changes a later one.


def augmented(augment: Callable[[Any], Any] | None, model: nn.Module, batch: Any, rows: int) -> Any:
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
    with forgotten(augment, model, "augment"):
        changed = augment(batch)
    for before, after in zip(_sizes(batch), _sizes(changed), strict=False):
        if before == rows and after != rows:
            raise ValueError(
                f"augment made {after} rows of {rows}; it must return one row for every row it is given. Several views of an "
                "example come from PrivacyConfig(augmentations=K), which calls augment on each of them"
            )
    return changed


def _sizes(batch: Any) -> list[int | None]:
    return [len(x) if isinstance(x, Tensor) and x.dim() else None for x in tree_flatten(batch)[0]]


# --------------------------------------------------------------------------------------------------
# Checks around the hand-over of a release to a torch optimizer: it holds the model's parameters,
# and nothing else moves them.

Trace = tuple[int, Tensor]


def check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless an optimizer holds exactly the trainable parameters of the model (frozen ones may be in it too).

    Raises:
        ValueError: naming a parameter that is missing or foreign; a GradScaler, whose scale follows private gradients; an
            optimizer whose step needs a closure, which would ask for gradients without noise, or that takes sparse gradients
            alone; a complex parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} steps with a closure that asks for gradients again and again, and none of them would be "
            "noised; use SGD, Adam or another torch optimizer that takes one gradient a step"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and a release is dense: every entry has its noise, since rows without any "
            "would tell which tokens the private texts hold; use Adam or another torch optimizer"
        )
    scaler = getattr(optimizer, "scaler", None)  # that of accelerate's optimizer under float16
    if isinstance(optimizer, torch.amp.GradScaler) or scaler is not None:
        raise ValueError(
            "a GradScaler cannot step a private run: its scale, and whether it skips a step, follow the size of un-noised "
            "private gradients. Norms, sums and noise are float32 whatever the model computes in: use bfloat16, which needs "
            "no scale, and pass the torch optimizer itself"
        )
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"the optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    several = [name for name, p in parameters.items() if p.is_complex()]
    if several:
        raise ValueError(
            f"parameter '{several[0]}' is complex, and gradients of complex parameters are not supported; hold its real and "
            "imaginary parts in a real parameter with a last axis of 2 (torch.view_as_complex makes one of it), or freeze it"
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if p not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold trainable parameter '{missing[0]}'; pass it to the optimizer or freeze it with "
            "requires_grad_(False)"
        )
    own = set(parameters.values())
    foreign = [p for p in held if p.requires_grad and p not in own]
    if foreign:
        raise ValueError(
            f"the optimizer holds a trainable parameter of shape {tuple(foreign[0].shape)} that is not in the model; the "
            "session would never give it a private gradient"
        )


def check_unchanged(
    model: nn.Module, layers: Sequence[Layer], parameters: Mapping[str, Tensor], *, finite: bool = False
) -> None:
    """Raise if the model trains other parameters than when its layers were found.

    Args:
        model: as it is now.
        layers: found before.
        parameters: trainable ones, by name, at that time.
        finite: look at their values too, as `check_finite` does.

    Raises:
        RuntimeError: a parameter that was replaced, frozen, unfrozen or added, by name.
        ValueError: a parameter with a hook on its gradient, or of values that are not finite, by name.
    """
    reshard(model)  # an evaluation may have left it gathered
    check_covered(model, layers)
    refuse_gradient_hooks(model)
    now = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise RuntimeError(
                f"parameter '{name}' was replaced after the session was built; move, cast or adapt the model before "
                "creating the optimizer and the session"
            )
    if finite:
        check_finite(layers)


def check_finite(layers: Sequence[Layer]) -> None:
    """Raise if a trainable weight is NaN or infinite, before a release that would be noise alone.

    Weights are public: they are what was released before, or where training began.

    Raises:
        ValueError: naming the parameter.
    """
    held = {full: local(layer.tensor(role)) for layer in layers for role, full in layer.parameters.items()}
    held = {name: x for name, x in held.items() if x.numel() and x.is_floating_point()}
    finite = {name: torch.isfinite(torch.stack(torch.aminmax(x))).all() for name, x in held.items()}
    if finite and not bool(torch.stack([x.to(next(iter(finite.values())).device) for x in finite.values()]).all()):
        name = next(name for name, x in finite.items() if not bool(x))
        raise ValueError(
            f"parameter '{name}' holds NaN or infinity, so that every release from here on would be noise alone; nothing was "
            "released. Begin with finite weights; if training has made them so, begin again with a smaller learning rate"
        )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise if a parameter or a module has a hook that would be shown private gradients before they are noised.

    `wandb.watch(model, log="gradients")` leaves such hooks, as do optimizers that step while a backward pass runs. Those of torch
    itself (`fully_shard` has its own) are left alone.

    Raises:
        ValueError: naming the parameter or the module.
    """
    for name, p in model.named_parameters():
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{name}' has a hook on its gradient, which would be shown gradients of private examples without "
                "noise (wandb.watch(log='gradients'), an optimizer that steps during the backward pass?); remove it. What is "
                "released is in p.grad when optimizer.step() is called"
            )
    everywhere = [*_every_module._global_backward_hooks.values(), *_every_module._global_backward_pre_hooks.values()]
    for name, module in model.named_modules():
        hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values(), *everywhere]
        if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            raise ValueError(
                f"module '{name}' ({type(module).__name__}) has a backward hook, which would be shown gradients of private "
                "examples without noise; remove it (the handle that register_full_backward_hook returned has remove()). What is "
                "released is in p.grad when optimizer.step() is called"
            )


def traces(parameters: Mapping[str, Tensor]) -> dict[str, Trace]:
    """What tells whether each parameter has been written to: its version and its first entries."""
    return {name: _trace(p) for name, p in parameters.items()}


def _trace(parameter: Tensor) -> Trace:
    return parameter._version, local(parameter).flatten()[:16].clone()


def check_moved(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], before: Mapping[str, Trace]
) -> None:
    """Raise unless every parameter was written to, or at least changed (some optimizers bypass the version counter).

    Args:
        optimizer: has just made a step with noise in every gradient.
        parameters: trainable ones, by name.
        before: their `traces` before the step.

    Raises:
        RuntimeError: naming a parameter that did not move although its learning rate is positive.
    """
    rates = {p: g.get("lr", 1.0) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in parameters.items():
        version, values = before[name]
        still = parameter._version == version and torch.equal(values, _trace(parameter)[1])
        still = still and local(parameter).numel() > 0  # this process may hold nothing of it
        if still and rates[parameter] > 0:
            raise RuntimeError(
                f"parameter '{name}' did not move in the first step although its learning rate is {rates[parameter]}: "
                "the optimizer holds another tensor than the model"
            )


class WeightGuard:
    """Know whether anything but the session has written a parameter since the last release.

    Torch counts the writes of a tensor. A write through `parameter.data` is not counted, and is not seen here.

    Args:
        parameters: trainable ones, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._versions: dict[str, int] = {}  # empty before the first release: any weights may begin

    def accept(self) -> None:
        """Take the weights as they are now for those of the last release."""
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    def check(self) -> None:
        """Raise if a parameter was written since the weights were accepted.

        Raises:
            RuntimeError: naming the parameter.
        """
        for name, version in self._versions.items():
            if self._parameters[name]._version != version:
                raise RuntimeError(
                    f"parameter '{name}' was written between two releases; leave steps to session.step(), or call "
                    "session.accept_weights()"
                )

    @contextmanager
    def around(self, work: AbstractContextManager[None]) -> Iterator[None]:
        """Accept what a context of the session writes when it is entered and left.

        Raises:
            RuntimeError: a parameter was written before.
        """
        self.check()
        try:
            with work:
                self.accept()
                yield
        finally:
            self.accept()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run an optimizer on the released gradients, and remember the version counters of the parameters.

        The last of all step pre-hooks checks that `p.grad` still holds the release. Wrappers of other libraries are looked
        through by their attribute `optimizer`; an object without hooks has none to check.

        Raises:
            RuntimeError: a pre-hook replaced or wrote a gradient, by name of the parameter; no parameter is written then.
        """
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        written = {name: gradient._version for name, gradient in gradients.items()}

        def check(*_: Any) -> None:
            for name, gradient in gradients.items():
                if self._parameters[name].grad is not gradient or gradient._version != written[name]:
                    raise RuntimeError(f"a step pre-hook replaced the release in the gradient of '{name}'; remove the hook")

        inner: Any = optimizer
        while inner is not None and "_optimizer_step_pre_hooks" not in vars(inner):
            inner = vars(inner).get("optimizer")
        handle = None if inner is None else inner.register_step_pre_hook(check)
        try:
            optimizer.step()
        finally:
            self.accept()
            if handle is not None:
                handle.remove()
