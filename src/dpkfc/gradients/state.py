"""What a forward pass may leave in a model: nothing that it has computed from private examples.

Parameters, buffers and extra state (`get_extra_state`) may not change at all: they are in every
checkpoint, and only released gradients move them. Every pass runs on a replica (`replica.py`), so
that nothing else stays either, counters too, since the number of passes is private. The check
before the first release finds attributes that are equal for all examples and that a further pass
leaves alone (a cache of positions). These are built once, and every replica begins with them. An
attribute that depends on the examples, and changes what the model computes later, is refused there.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from inspect import signature
from itertools import pairwise
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dpkfc.distributed.fsdp import is_divided, reshard, to_local
from dpkfc.gradients.layers import Layer, join_names, named_tensors
from dpkfc.gradients.replica import (
    LARGE,
    Replica,
    are_equal,
    replicate,
    replicate_variables,
    same_values,
)
from dpkfc.linalg.metric import NamedTensors
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import restarter
from dpkfc.weights import digest_tensors

_log = logging.getLogger(__name__)


class StateChangedError(ValueError):
    """A pass has changed what only releases may change; it ends the run."""


def ends_run(error: Exception) -> bool:
    """Return whether an error says nothing of a record: memory ran out, or weights were written."""
    return isinstance(error, StateChangedError) or is_out_of_memory(error)


@contextmanager
def _refuse_change(find_fault: Callable[[], str]) -> Iterator[None]:
    """Raise a StateChangedError after the body, whatever it has raised, if there is a fault."""
    try:
        yield
    finally:
        fault = find_fault()
        if fault:
            raise StateChangedError(fault)


@contextmanager
def own_pass(model: nn.Module) -> Iterator[None]:
    """Run a pass over private examples on a replica of the model.

    A parameter is seen to be written by torch's counter, and is then erased: a copy of all
    parameters in every pass would double their memory. `checked_state` copies them, for the check
    before the first release.

    Raises:
        StateChangedError: naming a parameter or a module, which would carry statistics of private
            data outside the mechanism.
    """
    extra = _extra_states(model)

    def find_written() -> str:
        reshard(model)  # FSDP2 puts gathered parameters into the modules
        return erase_written(replica)

    # An adapter of fused experts registers its parametrization anew in every pass.
    registers = any(type(m).__name__ == "ParamWrapper" for m in model.modules())
    with (
        replicate(model) as replica,
        _refuse_change(lambda: _restore_extra_states(model, extra)),
        _refuse_change(find_written),
        _SelfSets(replica) if registers else nullcontext(),
    ):
        yield


class _SelfSets(TorchDispatchMode):
    """Tell a replica of each `x.set_(x)`, by which torch registers a parametrization.

    It counts as a write, and changes nothing.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            self._replica.note_self_set(args[0])
        return func(*args, **(kwargs or {}))


_PUT_BACK = "use a parametrization, or write after each step and call accept_weights()"
_ERASED = (
    "its value is unknown and has been erased: load the last checkpoint (docs/errors.md#state)"
)


def _parameter_fault(name: str, fate: str) -> str:
    return f"the forward pass writes to the parameter '{name}'; {fate}"


def erase_written(replica: Replica) -> str:
    """Erase parameters that passes have written, and return the message that refuses the first.

    A trainable parameter that is another object now is refused too. The message is empty where
    there is none.
    """
    faults = []
    for module, leaf, p in replica.written_parameters():
        _erase(p)
        faults.append(_parameter_fault(join_names(replica.paths[module], leaf), _ERASED))
    for module, leaf, old, _ in replica.replaced_parameters():
        if old is not None and old.requires_grad:
            faults.append(_parameter_fault(join_names(replica.paths[module], leaf), _PUT_BACK))
    return next(iter(faults), "")


def _erase(p: Tensor) -> None:
    with torch.no_grad():
        p.fill_(float("nan") if p.is_floating_point() else 0)


# -- extra state -----------------------------------------------------------------------------------


def _extra_states(model: nn.Module) -> dict[str, Any]:
    """Return copies of the extra state of all modules that have one, by path."""
    states = {}
    for path, m in model.named_modules():
        if type(m).get_extra_state is not nn.Module.get_extra_state:
            states[path] = _extra_state(m)
    return states


def _extra_state(module: nn.Module) -> Any:
    state: Any = module.get_extra_state()
    if isinstance(state, io.BytesIO):
        state = state.getvalue()
    return Replica().copy(state)


def _restore_extra_states(model: nn.Module, before: Mapping[str, Any]) -> str:
    """Restore extra state that passes have changed, and return the message that refuses it."""
    fault = ""
    for path, state in before.items():
        module = model.get_submodule(path)
        if not are_equal(_extra_state(module), state):
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                module.set_extra_state(state)
            kind = type(module).__name__
            fault = fault or (
                f"the forward pass changes the extra state of the module '{path}' "
                f"({kind}.get_extra_state), which would carry private data into checkpoints; "
                "freeze it"
            )
    return fault


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


# --------------------------------------------------------------------------------------------------
# The check on public rows.

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
        with self.replica.suspended(), replicate(model) as replica:
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


# Private values may decide no message, so only a check that is open looks at what has changed.
_open_check: ContextVar[PublicCheck | None] = ContextVar("open_check", default=None)


def _buffer_faults(replica: Replica) -> Iterator[str]:
    for module, leaf in replica.changed_buffers():
        yield (
            f"the forward pass changes the buffer '{join_names(replica.paths[module], leaf)}', "
            "which would carry private data out of the model without noise; freeze it with .eval()"
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
    extra = _extra_states(model)
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
            fault = _restore_extra_states(model, extra)
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
                _erase(p)
                yield _parameter_fault(name, _ERASED)
        elif not same_values(to_local(p), copy):
            _write_back(p, copy)
            yield _parameter_fault(name, _PUT_BACK)
    # Some libraries load a frozen layer for the time of a pass.
    for module, leaf, old, new in replica.replaced_parameters():
        is_reloaded = old is not None and not old.requires_grad and (new is None or new.is_meta)
        if not is_reloaded and (old is None or old.requires_grad or not are_equal(old, new)):
            yield _parameter_fault(join_names(replica.paths[module], leaf), _PUT_BACK)


def check_memory(
    model: nn.Module,
    check: PublicCheck,
    losses: Callable[[Any], Tensor],
    batches: Iterable[Any],
    device: torch.device,
) -> None:
    """Refuse an attribute that depends on the examples and changes what is computed later.

    Caches, which do not depend on the examples, are kept when the check ends.

    Args:
        model: in the mode it is trained in.
        check: of the model.
        losses: of a batch `[n]`.
        batches: two or more of equal shapes, with different examples.
        device: of the model.

    Raises:
        ValueError: naming module and attribute.
    """
    if not check.replica.changed_attributes():
        return
    restart = restarter(device)

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
            alone, after = (run(*past, later, mode=mode)[0] for past in ((), (earlier,)))
            if not torch.allclose(alone, after, rtol=1e-5, atol=1e-6, equal_nan=True):
                _refuse_memory(model, dependent)


def _find_dependent(check: PublicCheck, runs: Sequence[Replica], again: Replica) -> _Names:
    """Return attributes whose values depended on the input. Record the others in the check."""
    first = runs[0]
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
            if any(map(_is_computed, own.values())):
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


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module of a model with its path, in the order of `named_modules`."""
    return {module: path for path, module in model.named_modules()}


# --------------------------------------------------------------------------------------------------
# State that a loss function or an augmentation keeps from one call to the next.
#
# A memory of past features, a running mean or a counter would let one example move the gradients of
# others, in other steps too. It may lie in the object whose method the function is, in a `partial`,
# in a closure or in a global variable. Modules that the function reaches, and that are not part of
# the model, may not change their buffers.


def make_stateless(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the loss function, each call of which has variables of its own.

    Raises:
        StateChangedError: from a call that changes a buffer or a parameter of a module that is not
            a part of the model, or a tensor of more than a megabyte, which is not copied.
    """

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with own_variables(loss_fn, model):
            return loss_fn(model, batch)

    # The wrapper shows the code of loss_fn.
    return update_wrapper(losses, loss_fn, assigned=(), updated=())


@contextmanager
def own_variables(function: Any, model: nn.Module, name: str = "loss_fn") -> Iterator[None]:
    """Run a call of a function with values of their own for all variables that it reaches.

    Those that the code of the model reaches have them too.

    Args:
        function: a loss function or an augmentation.
        model: the model that is trained. Its own attributes have theirs from `own_pass`.
        name: of the function, for messages.

    Raises:
        StateChangedError: as `make_stateless`.
    """
    with (
        replicate_variables(model, function) as replica,
        _refuse_change(lambda: _find_fault(replica, name)),
    ):
        yield


def _find_fault(replica: Replica, name: str) -> str:
    """Return the message that refuses what a call has changed, empty without one."""
    faults = [erase_written(replica)]
    check = _open_check.get()
    if check is not None:
        with _disable_current_modes():  # a comparison is not an operation of the model
            faults += _buffer_faults(replica)
            check.note(replica)
            check.variables.setdefault(name, set()).update(replica.changed_variables())
    lost = replica.find_lost()
    if lost is not None:
        variable, x = lost
        if isinstance(x, Tensor):
            faults.append(
                f"{name} writes to a tensor that it reaches by '{variable}', and that "
                "is too large to be put back; compute each example without a memory of others"
            )
        else:
            faults.append(
                "model, loss_fn or augment advances a generator, which cannot be put back"
                " after a pass; take its values before training (docs/errors.md#state)"
            )
    return next(filter(None, faults), "")


def identify_program(function: Any) -> Any:
    """Return the code of a loss function, whatever object or arguments the function is bound to."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


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
        model: the model that is trained, whose attributes have values of their own elsewhere.
        batch: on the model's device.
        rows: how many it has.

    Raises:
        ValueError: another number of rows came back.
    """
    if augment is None:
        return batch
    with own_variables(augment, model, "augment"):
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
    """Refuse a model whose trainable parameters are no longer exactly its layers' parameters.

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
    tensors = {name: to_local(p) for name, p in named_tensors(layers).items()}
    for name, x in tensors.items():
        if x.numel() and x.is_floating_point():
            flags[name] = x.sum().isfinite()
    if not flags:
        return
    # One question to the GPU for all parameters.
    device = next(iter(flags.values())).device
    answers = torch.stack([flag.to(device) for flag in flags.values()])
    for name, is_finite in zip(flags, answers.tolist(), strict=True):
        # A sum of finite numbers may be infinite.
        if not is_finite and not torch.isfinite(tensors[name]).all():
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
        # This process may hold no entry of a sharded parameter.
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
        record: takes the weights as they are as the weights of this release.

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
    """Register a hook that runs behind the step of an optimizer, before hooks of other code."""
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
