"""What a forward pass may leave in a model: nothing that it has computed from private examples.

Parameters, buffers and extra state (`get_extra_state`) may not change at all: they are in every checkpoint, and released
gradients alone move them. Plain attributes are put back after each pass, counters too: how many passes there were is private.
What the check before the first release finds to be alike for all examples, and left alone by a further pass (a cache of
positions), is built there once, and is what attributes are put back to. One that depends on the examples, and changes what the
model computes later, is refused there.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpkfc.gradients.kept import Attributes, Kept, paths_of, same_values
from dpkfc.gradients.put_off import is_waited_for
from dpkfc.gradients.random_state import restarter
from dpkfc.gradients.sharded import is_divided, local, reshard

__all__ = [
    "PassState", "check_memory", "checked_state", "evaluation_mode", "kept_attributes", "put_back_attributes", "restored_state",
]  # fmt: skip

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
        same = _are_same([pair for pair in self._buffers.values() if is_waited_for(pair[0])])
        for module, leaf in [*self._buffers, *(key for key in added if key not in self._buffers)]:
            held, copy = self._buffers.get((module, leaf), (None, None))
            if held is None or copy is None:
                del module._buffers[leaf]
            elif module._buffers.get(leaf) is not held or not (same and is_waited_for(held) or same_values(held, copy)):
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
