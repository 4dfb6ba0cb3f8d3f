"""The check on public rows of what forward passes leave in a model.

It finds attributes that are equal for all examples and that a further pass leaves alone (a cache of
positions). These are built once, and every replica begins with them. An attribute that depends on
the examples, and changes what the model computes later, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dpkfc.distributed.fsdp import is_divided, reshard, to_local
from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.layers import paths_of
from dpkfc.gradients.replica import LARGE, Replica, replicate
from dpkfc.gradients.state import (
    ERASED,
    PUT_BACK,
    StateChangedError,
    copy_extra_states,
    erase,
    refuse_write,
    restore_extra_states,
)
from dpkfc.gradients.value_comparison import are_equal, same_values
from dpkfc.rng_state import restarter
from dpkfc.weights import digest_tensors

_log = logging.getLogger(__name__)

_Names = dict[nn.Module, set[str]]
"""Modules with names of their attributes."""


@dataclass
class PublicCheck:
    """What passes on public rows have changed.

    Attributes:
        replica: of the model, for all passes.
        caches: attributes that depend on no example and are built once, by module and name.
        harmless: attributes that every pass makes anew, whatever the examples are.
        changed: names of other attributes, by class and path of the module.
        variables: names of variables, by what reaches them.
    """

    replica: Replica
    caches: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    harmless: _Names = field(default_factory=dict)
    changed: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    variables: dict[str, set[str]] = field(default_factory=dict)

    @contextmanager
    def begin_afresh(self, model: nn.Module) -> Iterator[Replica]:
        """Run the body, a pass or several, with the state that the model had before the check."""
        with self.replica.suspend(), replicate(model) as replica:
            yield replica

    def note(self, replica: Replica) -> None:
        """Note which attributes passes have changed, caches and the like aside."""
        for module, names in replica.changed_attributes().items():
            known = {*self.caches.get(module, ()), *self.harmless.get(module, ())}
            place = replica.paths[module], type(module).__name__
            self.changed.setdefault(place, set()).update(names - known)

    def warn(self) -> None:
        """Say which attributes and variables were changed."""
        for (path, kind), names in self.changed.items():
            if names:
                _log.warning(
                    "forward passes write to attributes of the module '%s' (%s) that may depend on "
                    "private examples, or on how many there are; they are put back after every "
                    "pass: %s",
                    path,
                    kind,
                    ", ".join(sorted(names)),
                )
        for function, names in self.variables.items():
            if names:
                _log.warning(
                    "%s changes variables that may depend on private examples; they are put back "
                    "after every call (print or log values that only you should see): %s",
                    function,
                    ", ".join(sorted(names)),
                )


_open_check: ContextVar[PublicCheck | None] = ContextVar("open_check", default=None)


def _buffer_faults(replica: Replica) -> Iterator[str]:
    for name in replica.changed_buffers():
        yield (
            f"the forward pass changes the buffer '{name}', which would carry private data out"
            " without noise; use a local variable, or freeze it with .eval()"
        )


@contextmanager
def checked_state(model: nn.Module) -> Iterator[PublicCheck]:
    """Run the check before the first release on a replica; refuse what it changes by its value.

    Parameters are copied into main memory, so that writing into one is seen and undone even where
    torch does not count it (`p.data`). Of large frozen parameters only a digest is kept: a model
    whose adapters are trained needs no second copy.

    Yields:
        What the passes change, for `check_memory`.

    Raises:
        StateChangedError: naming a parameter, a buffer or a module with extra state.
    """
    extra = copy_extra_states(model)
    reshard(model)
    parameters = {name: (p, _copy_or_digest(p)) for name, p in model.named_parameters()}
    outer = _open_check.get()
    with replicate(model) as replica:
        check = PublicCheck(replica) if outer is None else replace(outer, replica=replica)
        token = _open_check.set(check)
        try:
            yield check
        finally:
            _open_check.reset(token)
            reshard(model)
            fault = restore_extra_states(model, extra)
            faults = [*_buffer_faults(replica), *_restore_parameters(replica, parameters)]
            check.note(replica)
            if fault or faults:
                raise StateChangedError(fault or faults[0])
    for module, values in check.caches.items():
        vars(module).update(values)
    if outer is None:
        check.warn()


def _copy_or_digest(p: Tensor) -> Tensor | str:
    """Return a copy in main memory, or the digest of a large frozen or unloaded parameter."""
    if p.requires_grad or p.numel() * p.element_size() <= LARGE:
        with suppress(RuntimeError, NotImplementedError, TypeError):
            return to_local(p).to("cpu", copy=True)
    return _digest(p)


def _digest(p: Tensor) -> str:
    return digest_tensors({"": to_local(p)})[""]


def _write_back(original: Tensor, copy: Tensor) -> None:
    if original.shape == copy.shape or is_divided(original):
        with torch.no_grad():
            to_local(original).copy_(copy)
    else:
        original.data = copy.to(original.device)


def _restore_parameters(
    replica: Replica, before: Mapping[str, tuple[Tensor, Tensor | str]]
) -> Iterator[str]:
    """Restore the values of parameters, and yield the message that refuses each change."""
    for name, (p, copy) in before.items():
        if isinstance(copy, str):
            if _digest(p) != copy:
                erase(p)
                yield refuse_write(name, ERASED)
        elif not same_values(to_local(p), copy):
            _write_back(p, copy)
            yield refuse_write(name, PUT_BACK)
    # Some libraries load a frozen layer for the time of a pass.
    for name, old, new in replica.replaced_parameters():
        is_reloaded = old is not None and not old.requires_grad and (new is None or new.is_meta)
        if not is_reloaded and (old is None or old.requires_grad or not are_equal(old, new)):
            yield refuse_write(name, PUT_BACK)


def check_memory(
    model: nn.Module,
    check: PublicCheck,
    losses: Callable[[Any], Tensor],
    batches: Iterable[Any],
) -> None:
    """Refuse an attribute that depends on the examples and changes what is computed later.

    Caches, which do not depend on the examples, are kept when the check ends.

    Args:
        model: in the mode it is trained in.
        check: of the model.
        losses: of a batch `[n]`.
        batches: two or more of equal shapes, with different examples.

    Raises:
        ValueError: naming module and attribute.
    """
    if not check.replica.changed_attributes():
        return
    restart = restarter()

    def run(*sequence: Any, mode: Callable[[], Any] = nullcontext) -> tuple[Tensor, Replica]:
        """Return the losses of the last of several batches, in a mode, and what they changed."""
        with check.begin_afresh(model) as replica:
            for batch in sequence[:-1]:
                restart()
                losses(batch)
            restart()
            with mode():
                return losses(sequence[-1]).detach(), replica

    tested = list(batches)
    runs = [run(batch)[1] for batch in tested]
    dependent = _find_dependent(check, runs, run(tested[-1], tested[0])[1])
    if not dependent:
        return
    for earlier, later in pairwise(tested):
        for mode in (nullcontext, partial(evaluation_mode, model)):
            alone, _ = run(later, mode=mode)
            after, _ = run(earlier, later, mode=mode)
            if not torch.allclose(alone, after, rtol=1e-5, atol=1e-6, equal_nan=True):
                _refuse_memory(model, dependent)


def _find_dependent(check: PublicCheck, runs: Sequence[Replica], again: Replica) -> _Names:
    """Return attributes whose values depended on the input. Record the others in the check."""
    first = runs[0]
    # A flag that says that they were registered may not outlive them.
    has_new_parts = any(run.has_new_parts() for run in runs)
    changed: _Names = {}
    for run in runs:
        for module, names in run.changed_attributes().items():
            changed.setdefault(module, set()).update(names)
    dependent: _Names = {}
    for module, names in changed.items():
        own = {name: first.modules[module][1].get(name) for name in names}
        found = {name for name in names if not first.agrees(runs[1:], module, name)}
        if found:
            dependent[module] = found
        elif all(first.agrees([again], module, name) for name in names):
            if has_new_parts or any(map(_is_computed, own.values())):
                check.harmless[module] = names
            else:
                check.caches[module] = own
    return dependent


def _is_computed(value: Any) -> bool:
    """Return whether a value holds a tensor with a graph, of parameters that will change."""
    return any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(value))


def _refuse_memory(model: nn.Module, dependent: _Names) -> None:
    for module, path in paths_of(model).items():
        for name in sorted(dependent.get(module, ())):
            raise ValueError(
                f"the forward pass keeps '{name}' of the module '{path}' ({type(module).__name__}),"
                " which depends on the examples; remove or freeze it (docs/errors.md#state)"
            )


def note_call(replica: Replica, name: str) -> Iterator[str]:
    """Note in the open check what a call of a function has changed, and yield what is refused.

    Private values may decide no message, so only an open check looks at what has changed.
    """
    check = _open_check.get()
    if check is not None:
        with _disable_current_modes():  # a comparison is not an operation of the model
            yield from _buffer_faults(replica)
            check.note(replica)
            check.variables.setdefault(name, set()).update(replica.changed_variables())
