"""A replica of the model for one pass, and copies of the variables that its code and loss reach.

A forward pass may write into a module: a running mean, a cache, attention maps, a counter, another
method. No such change may reach the next pass. So modules keep their identity, and for the time of
a pass each of them has a `__dict__` of its own, with copies of buffers and of the values in plain
attributes. Afterwards it is thrown away. Parameters are shared. The variables that code reaches get
copies in the same way (`value_kinds.py`).
"""

from __future__ import annotations

import math
import operator
import queue
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as copy_object
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.jit._script import OrderedDictWrapper

from dpkfc.distributed.fsdp import reshard
from dpkfc.gradients.layers import join_names
from dpkfc.gradients.value_comparison import NESTING, Objects, are_equal
from dpkfc.gradients.value_kinds import (
    CONTAINERS,
    GENERATORS,
    PLAIN,
    attributes_of,
    draw_seed,
    fill,
    is_own_module,
    kind_of,
    pairs_of,
    refill,
)
from dpkfc.gradients.variables import NOTHING, Variable, globals_of, read, write
from dpkfc.tracking.tracker import is_known_private

LARGE = 1 << 20
"""Bytes above which a tensor outside of the model is not copied."""
_LONG = 1024  # longer containers are tables or queues, whose items are shared
_FUNCTIONS = 4  # nested calls of functions
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


class Replica:
    """Values of their own for modules and variables, until it is closed.

    Args:
        known: an open replica, whose copies also stand for their originals here.
        most: bytes of a tensor or an array that is copied.

    Attributes:
        modules: each with the attributes that it gets back, and its own.
        paths: of the modules.
    """

    def __init__(self, known: Replica | None = None, most: float = math.inf) -> None:
        self.modules: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.paths: dict[nn.Module, str] = {}
        # By id: an object, which must stay alive, and what stands for it.
        self._copies: dict[int, tuple[Any, Any]] = dict(known._copies) if known else {}
        self._most = most
        self._variables: dict[tuple[int, Any], Variable] = {}
        # By id: objects whose attributes are copied, as they were before and in the end.
        self._objects: dict[int, dict[str, Any]] = {}
        self._objects_after: dict[int, dict[str, Any]] = {}
        self._versions: list[tuple[str, Tensor, int]] = []
        # By id: how often a tensor was set to itself.
        self._self_sets: Counter[int] = Counter()
        self._generators: list[tuple[Any, Any]] = []
        # By id: attributes that an object gets back where others are the program's again.
        self._kept: dict[int, dict[str, Any]] = {}
        # Containers, with copies that hold what they get back.
        self._contents: list[tuple[Any, Any]] = []
        # What is shared although it may change, with the name of a variable and a mark of change.
        self._watched: list[tuple[str, Any, Any]] = []
        self._followed: dict[int, Any] = {}
        # With the names of their attributes.
        self._classes: dict[type, set[str]] = {}
        self._follows_code = False
        self._depth = 0
        self._name = ""

    # -- modules -----------------------------------------------------------------------------------

    def add_model(self, model: nn.Module, *, has_own_hooks: bool = True) -> None:
        """Give all modules of a model attributes of their own.

        Args:
            model: whose modules.
            has_own_hooks: hooks that are registered or removed meanwhile are thrown away too.
        """
        new = {}
        for path, module in model.named_modules():
            if id(module) not in self._copies:
                new[module] = path
        self.paths |= new
        # All are known before the first is copied: an attribute of one may hold another.
        for module in new:
            self._keep(module, module)
        for module in new:
            self._add_module(module, has_own_hooks)

    def _add_module(self, module: nn.Module, has_own_hooks: bool) -> None:
        """Give one module a `__dict__` of its own."""
        before = vars(module)
        own = dict(before)
        for name, value in before.items():
            if has_own_hooks or "_hooks" not in name:
                is_empty = isinstance(value, dict) and not value
                own[name] = value.copy() if is_empty else self.copy(value)
        self.modules[module] = before, own
        buffers = own["_buffers"]
        if isinstance(buffers, OrderedDictWrapper):  # of a scripted module
            for name in buffers.keys():  # noqa: SIM118
                self._set(buffers, name)
        for name, p in own["_parameters"].items():
            if p is not None:
                self._versions.append((join_names(self.paths[module], name), p, p._version))
        object.__setattr__(module, "__dict__", own)

    def renew_buffers(self) -> None:
        """Give all modules new copies of the buffers that they had."""
        copies = Replica()
        for before, own in self.modules.values():
            own["_buffers"] = copies.copy(before["_buffers"])

    # -- values ------------------------------------------------------------------------------------

    def copy(self, x: Any, inside: int = NESTING) -> Any:
        """Return what stands for a value during the pass: a copy, or the value itself."""
        way = WAYS.get(kind_of(x))
        if way is None or inside == 0:
            return x
        if id(x) in self._copies:
            return self._copies[id(x)][1]
        return way(self, x, inside - 1)

    def _keep(self, x: Any, own: Any) -> Any:
        """Remember and return what stands for x; a copy stands for itself."""
        self._copies[id(x)] = x, own
        self._copies[id(own)] = own, own
        return own

    # The ways of `copy`. Each takes a value and how many containers inside it are looked into.

    def _copy_whole(self, x: Any, inside: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12
            return self._keep(x, copy_object(x))

    def _copy_tensor(self, x: Tensor, inside: int) -> Any:
        # A copy of what an earlier batch has left would not show whose it is.
        if isinstance(x, nn.Parameter) or x.grad_fn is not None or is_known_private(x):
            return x
        if x.numel() * x.element_size() > self._most:
            return self._watch(x, inside)
        return self._keep(x, x.detach().clone().requires_grad_(x.requires_grad))

    def _copy_array(self, x: Any, inside: int) -> Any:
        return self._keep(x, x.copy() if x.nbytes <= self._most else x)

    def _copy_tuple(self, x: Any, inside: int) -> Any:
        items = [self.copy(item, inside) for item in x]
        if all(map(operator.is_, items, x)):
            return self._keep(x, x)
        # A named tuple is made by its own function.
        make = getattr(x, "_make", tuple)
        return self._keep(x, make(items))

    def _copy_container(self, x: Any, inside: int) -> Any:
        own = self._keep(x, x.copy())
        if len(x) <= _LONG:
            for key, value in list(pairs_of(x)):
                item = self.copy(value, inside)
                if item is not value and not isinstance(x, set):
                    own[key] = item
        return own

    def _copy_queue(self, x: Any, inside: int) -> Any:
        own = self._keep(x, queue.SimpleQueue())
        # A queue shows its items only as it gives them away.
        items = [x.get() for _ in range(x.qsize())]
        for item in items:
            x.put(item)
            own.put(self.copy(item, inside))
        return own

    def _add_object(self, x: Any, inside: int) -> Any:
        """Give the attributes of an object copies; it stays the same object."""
        self._keep(x, x)
        before = self._objects[id(x)] = attributes_of(x)
        fill(x, {name: self.copy(value, inside) for name, value in before.items()})
        return x

    def _add_generator(self, x: Any, inside: int) -> Any:
        """Seed a generator of random numbers anew, which gets its state back in the end."""
        read, _, seed = GENERATORS[type(x)]
        self._generators.append((x, read(x)))
        seed(x, draw_seed())
        return self._keep(x, x)

    def _watch(self, x: Any, inside: int) -> Any:
        """Share a value that cannot be copied, and see in the end whether it has changed."""
        self._watched.append((self._name, x, _mark(x)))
        return self._keep(x, x)

    def _add_callable(self, x: Any, inside: int) -> Any:
        """Copy the object of a method; where code is followed, what the function reaches."""
        if isinstance(x, MethodType):
            self.copy(x.__self__, inside)
        if self._follows_code:
            self.follow(x)
        return x

    def _add_other_model(self, x: nn.Module, inside: int) -> nn.Module:
        self.add_model(x)
        return x

    # -- variables ---------------------------------------------------------------------------------

    def _set(self, place: Any, key: Any, name: str = "") -> None:
        """Give a variable a value of its own."""
        if (id(place), key) in self._variables:
            return
        before = read(place, key)
        self._variables[id(place), key] = Variable(name or key, place, key, before)
        self._name = name or key
        own = self.copy(before)
        if own is not before:
            write(place, key, own)

    # -- code --------------------------------------------------------------------------------------

    def follow_model(self, model: nn.Module) -> None:
        """Give what the methods and hooks of a model reach values of their own."""
        self._follows_code = True
        for module in model.modules():
            self._keep(module, module)
        for module in model.modules():
            values = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if is_own_module(type(module).__module__):
                values += vars(module).values()
            for value in values:
                if isinstance(value, (FunctionType, MethodType, partial, nn.Module)):
                    self.copy(value)
            for kind in type(module).__mro__:
                self._follow_class(kind)

    def follow(self, x: Any) -> None:
        """Give what a function reaches values of their own.

        It reaches the object that it is or whose method it is, arguments of a `partial`, variables
        of closures, and global variables that it names. Functions and objects in them count as far
        as they belong to no installed package.
        """
        if self._depth == _FUNCTIONS or id(x) in self._followed:
            return
        self._followed[id(x)] = x
        self._depth += 1
        if isinstance(x, partial):
            self._set(x, "arguments")
            self.follow(x.func)
        elif isinstance(x, MethodType):
            self.copy(x.__self__)
            self.follow(x.__func__)
        elif isinstance(x, FunctionType):
            if is_own_module(x.__module__ or ""):
                self._follow_function(x)
        elif isinstance(x, nn.Module):
            self.copy(x)
            self.follow(x.forward)
        elif kind_of(x) == "object":
            self.copy(x)
            self.follow(vars(type(x)).get("__call__"))
        self._depth -= 1

    def _follow_function(self, function: FunctionType) -> None:
        """Give the variables of a function's closure, arguments and modules their own values."""
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self._set(cell, "cell_contents", name)
        for key in ("__defaults__", "__kwdefaults__", "__dict__"):
            self._set(function, key)
        names = set(globals_of(function.__code__))
        variables = function.__globals__
        places = [variables]
        for name in names:
            value = variables.get(name)
            if isinstance(value, ModuleType) and is_own_module(value.__name__):
                # `settings.scale` names a variable of another module.
                places.append(vars(value))
        for place in places:
            for name in names:
                self._set(place, name)

    def _follow_class(self, kind: Any, inside: int = 0) -> Any:
        """Give the attributes of a class of no package, and what its methods reach, their own."""
        is_new = self._follows_code and id(kind) not in self._followed
        if is_new and self._depth < _FUNCTIONS and is_own_module(kind.__module__):
            self._followed[id(kind)] = kind
            self._classes[kind] = {*vars(kind)}
            self._depth += 1
            for name, x in [*vars(kind).items()]:
                function = getattr(x, "__func__", getattr(x, "fget", x))
                if isinstance(function, FunctionType):
                    self.follow(function)
                elif not name.startswith("__"):
                    self._set(kind, name)
            self._depth -= 1
        return kind

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back what it had."""
        for variable in self._list_variables():
            if variable.now is not variable.before:
                write(variable.place, variable.key, variable.before)
        self._restore_generators()
        self._objects_after = self._read_objects()
        self._switch(0, self._objects)
        for key, before in self._kept.items():
            x, _ = self._copies[key]
            attributes = attributes_of(x) | before
            fill(x, {name: y for name, y in attributes.items() if y is not NOTHING})
        for container, items in self._contents:
            refill(container, items)

    def close_unchanged(self) -> None:
        """Give back variables and attributes that have not changed; `close` gives back the others.

        What the program does to them from now on stays. The original containers come back with
        their present contents, since other references may point to them.
        """
        self._fill_originals()
        for key, variable in list(self._variables.items()):
            if self._is_as_before(variable.before, variable.now):
                if variable.now is not variable.before:
                    write(variable.place, variable.key, variable.before)
                del self._variables[key]
        objects = {}
        for number, now in self._read_objects().items():
            before = self._objects[number]
            equal = {}
            for name, value in before.items():
                if self._is_as_before(value, now.get(name, NOTHING)):
                    equal[name] = value
            changed = [name for name in before | now if name not in equal]
            self._kept[number] = {name: before.get(name, NOTHING) for name in changed}
            objects[number] = now | equal
        self._switch(0, objects)
        self._objects.clear()
        self._restore_generators()

    def give_up(self) -> None:
        """Do as `close_unchanged`, and leave variables that have changed as they are, for good."""
        self.close_unchanged()
        self._variables.clear()
        self._classes.clear()
        self._kept.clear()

    def _fill_originals(self) -> None:
        """Put what copies of containers hold into their originals, until the replica is closed."""
        pairs = [(x, own) for x, own in self._copies.values() if own is not x]
        original_of = {id(own): x for x, own in pairs}
        changed = []
        for x, own in pairs:
            if type(x) in CONTAINERS and not self._is_as_before(x, own):
                changed.append((x, own))
        for x, own in changed:
            self._contents.append((x, x.copy()))
            items = own.copy()
            for key, item in list(pairs_of(own)):
                if id(item) in original_of and not isinstance(own, set):
                    items[key] = original_of[id(item)]
            refill(x, items)

    def _restore_generators(self) -> None:
        for generator, state in self._generators:
            _, restore, _ = GENERATORS[type(generator)]
            restore(generator, state)
        self._generators.clear()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Run the body with the attributes that modules and objects had."""
        after = self._read_objects()
        self._switch(0, self._objects)
        try:
            yield
        finally:
            self._switch(1, after)

    def _read_objects(self) -> dict[int, dict[str, Any]]:
        """Return the present attributes of objects, by id."""
        return {key: attributes_of(self._copies[key][0]) for key in self._objects}

    def _switch(self, which: int, objects: Objects) -> None:
        """Give modules the attributes that they had (0) or their own (1), and objects these."""
        for module, attributes in self.modules.items():
            object.__setattr__(module, "__dict__", attributes[which])
        for key, values in objects.items():
            fill(self._copies[key][0], values)

    def _list_variables(self) -> list[Variable]:
        """Return all variables, and those that classes have got meanwhile."""
        new = []
        for kind, names in self._classes.items():
            for name in vars(kind).keys() - names:
                if not name.startswith("__"):
                    new.append(Variable(name, kind, name, NOTHING))
        return [*self._variables.values(), *new]

    def _is_as_before(self, before: Any, now: Any) -> bool:
        return are_equal(before, now, (self._objects, self._objects_after))

    def changed_attributes(self) -> dict[nn.Module, set[str]]:
        """Return the names of the plain attributes that have changed, by module."""
        changed: dict[nn.Module, set[str]] = {}
        for module, (before, own) in self.modules.items():
            for name in {**before, **own}.keys() - _INTERNAL:
                if not self._is_as_before(before.get(name, NOTHING), own.get(name, NOTHING)):
                    changed.setdefault(module, set()).add(name)
        return changed

    def has_new_parts(self) -> bool:
        """Return whether a module has got or lost hooks or modules below it."""
        for before, own in self.modules.values():
            for name in before.keys() & _INTERNAL:
                has_parts = name == "_modules" or name.endswith("_hooks")
                if has_parts and list(own[name]) != list(before[name]):
                    return True
        return False

    def agrees(self, others: Sequence[Replica], module: nn.Module, name: str) -> bool:
        """Return whether an attribute has ended with the same value in closed replicas."""
        value = self.modules[module][1].get(name, NOTHING)
        for other in others:
            objects = self._objects_after, other._objects_after
            other_value = other.modules[module][1].get(name, NOTHING)
            if not are_equal(value, other_value, objects):
                return False
        return True

    def changed_buffers(self) -> Iterator[str]:
        """Yield the names of buffers that have changed."""
        for module, (before, own) in self.modules.items():
            old, new = before["_buffers"], own["_buffers"]
            for name in {**old, **new}:
                scripted = self._variables.get((id(old), name))
                was = scripted.before if scripted else read(old, name)
                if not self._is_as_before(was, read(new, name)):
                    yield join_names(self.paths[module], name)

    def changed_variables(self) -> set[str]:
        """Return the names of other variables that have changed."""
        names = set()
        for variable in self._list_variables():
            if not self._is_as_before(variable.before, variable.now):
                names.add(variable.name)
        for key, before in self._objects.items():
            x, _ = self._copies[key]
            if not self._is_as_before(before, attributes_of(x)):
                names.add(type(x).__name__)
        return names

    def written_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of parameters that were written in place."""
        for name, p, version in self._versions:
            if p._version != version + self._self_sets[id(p)]:
                yield name, p

    def note_self_set(self, x: Tensor) -> None:
        """Count a write that changes nothing: `x.set_(x)`."""
        self._self_sets[id(x)] += 1

    def replaced_parameters(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of a parameter, what it was, and what it is; or None."""
        for module, (before, own) in self.modules.items():
            old, new = before["_parameters"], own["_parameters"]
            for name in {**old, **new}:
                was, now = read(old, name), read(new, name)
                was = None if was is NOTHING else was
                now = None if now is NOTHING else now
                if was is not now:
                    yield join_names(self.paths[module], name), was, now

    def find_lost(self) -> tuple[str, Any] | None:
        """Return a value that has changed and has no copy, and the variable that reaches it."""
        for name, x, mark in self._watched:
            if _mark(x) != mark:
                return name, x
        return None


def _mark(x: Any) -> Any:
    """Return what shows that a tensor was written, or that a generator function has advanced."""
    if isinstance(x, Tensor):
        return 0 if x.is_inference() else x._version
    if x.gi_frame is None:
        return None
    variables = sorted(x.gi_frame.f_locals.items())
    plain = [(name, value) for name, value in variables if isinstance(value, PLAIN)]
    return x.gi_frame.f_lasti, plain


# How a value of each kind is copied.
WAYS: dict[str, Callable[[Replica, Any, int], Any]] = {
    "container": Replica._copy_container,
    "whole": Replica._copy_whole,
    "random generator": Replica._add_generator,
    "callable": Replica._add_callable,
    "watched": Replica._watch,
    "queue": Replica._copy_queue,
    "tuple": Replica._copy_tuple,
    "tensor": Replica._copy_tensor,
    "array": Replica._copy_array,
    "module": Replica._add_other_model,
    "class": Replica._follow_class,
    "object": Replica._add_object,
}

# Open replicas: variables of the code of a model may be its attributes too.
_open: WeakKeyDictionary[nn.Module, Replica] = WeakKeyDictionary()


@contextmanager
def replicate(model: nn.Module) -> Iterator[Replica]:
    """Run the body, one or more passes, on a replica of a model, which is thrown away."""
    reshard(model)
    outer = _open.get(model)
    replica = _open[model] = Replica()
    try:
        with torch._C.DisableTorchFunction():
            replica.add_model(model)
        yield replica
    finally:
        reshard(model)  # FSDP2 puts gathered parameters into the modules
        replica.close()
        del _open[model]
        if outer is not None:
            _open[model] = outer


@contextmanager
def replicate_variables(model: nn.Module, function: Any) -> Iterator[Replica]:
    """Run the body with values of their own for variables that code reaches.

    Args:
        model: the model, whose code is followed, and whose own attributes are left alone.
        function: a loss function, or None.
    """
    replica = Replica(_open.get(model), LARGE)
    try:
        # No mode for functions need see how values are looked at.
        with torch._C.DisableTorchFunction():
            replica.follow_model(model)
            replica.follow(function)
        yield replica
    finally:
        replica.close()
