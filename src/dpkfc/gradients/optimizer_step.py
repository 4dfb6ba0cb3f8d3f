"""The hand-over of a release to a torch optimizer, which holds the model's parameters.

Nothing else moves them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from inspect import signature
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from dpkfc._errors import first_line
from dpkfc.distributed.fsdp import to_local
from dpkfc.tensors import Tensors
from dpkfc.weights import digest_tensors

Trace = tuple[int, Tensor]


def check_optimizer(optimizer: Any, parameters: Tensors) -> None:
    """Refuse an optimizer that does not hold exactly the trainable parameters of the model.

    Frozen parameters may be in it too.

    Raises:
        ValueError: naming a parameter that is missing or foreign; a GradScaler, whose scale follows
            private gradients; an optimizer whose step needs a closure, which would ask for
            gradients without noise; a complex parameter, or one that was expanded; a setting of the
            optimizer that is NaN or infinite, or with which it makes no step.
    """
    _check_kind(optimizer)
    in_optimizer: set[Tensor] = set()
    for group in optimizer.param_groups:
        in_optimizer.update(group["params"])
        _check_numbers(group)
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(
                f"parameter '{name}' is complex, which is not supported; freeze it, or hold a real "
                "one with a last axis of 2 (torch.view_as_complex)"
            )
        sides = zip(p.shape, p.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in sides):
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
    _try_step(optimizer)


def _try_step(optimizer: Any) -> None:
    """Step another optimizer of torch's class on one entry in place of each parameter.

    What its step refuses, such as `capturable` on a CPU, is refused before a release. Optimizers of
    other code are not tried: they may keep what they are shown.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return
    groups = [
        {**group, "params": [_stand_in_for(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    try:
        twin = kind(groups)
        twin.defaults = optimizer.defaults
        twin.step()
    except Exception as error:
        raise ValueError(
            f"{kind.__name__} cannot make a step ({first_line(error):.80}); change its settings"
        ) from error


def _stand_in_for(p: Tensor) -> Tensor:
    x = torch.zeros([1] * p.ndim, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
    x.grad = torch.zeros_like(x)
    return x


def _check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse NaN in a setting of an optimizer, or an infinite learning rate.

    The first step would make every weight NaN, and the release before it is spent.
    """
    for name, value in group.items():
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        is_nan = any(isinstance(x, float) and math.isnan(x) for x in numbers)
        is_rate = name == "lr" and isinstance(value, (float, Tensor))
        if is_nan or (is_rate and not math.isfinite(value)):
            raise ValueError(f"{name} of the optimizer is {value}; give a finite number")


def _check_kind(optimizer: Any) -> None:
    """Refuse an object that is not an optimizer, or that would ask for gradients without noise."""
    kind = type(optimizer).__name__
    # The optimizer of accelerate has a scaler under float16.
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(optimizer, torch.amp.GradScaler) or scaler is not None:
        raise ValueError(
            "a GradScaler cannot step a private run: its scale follows private gradients without "
            "noise; use bfloat16, and pass the torch optimizer itself"
        )
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"the optimizer must be a torch.optim.Optimizer, got {kind}")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{kind} steps with a closure that asks for gradients without noise; use an optimizer "
            "that takes one gradient a step, such as SGD or Adam"
        )


def traces(parameters: Tensors) -> dict[str, Trace]:
    """Return version, first and last entries of each parameter: they show if it was written.

    Either end of an embedding table may be the row of padding, which never moves.
    """
    found = {}
    for name, p in parameters.items():
        entries = to_local(p).flatten()
        found[name] = (p._version, torch.cat([entries[:16], entries[-16:]]))
    return found


def check_moved(
    optimizer: torch.optim.Optimizer, parameters: Tensors, before: Mapping[str, Trace]
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
    rates = {p: group.get("lr", 1.0) for group in optimizer.param_groups for p in group["params"]}
    for name, (version, entries) in traces(parameters).items():
        old_version, old_entries = before[name]
        rate = rates[parameters[name]]
        is_written = version != old_version or not torch.equal(old_entries, entries)
        # This process may hold no entry of a sharded parameter.
        if not is_written and len(entries) and rate > 0:
            raise RuntimeError(
                f"parameter '{name}' did not move in the first step although its learning rate is "
                f"{rate}: the optimizer holds another tensor than the model"
            )


def step_on_release(
    optimizer: torch.optim.Optimizer, parameters: Tensors, record: Callable[[], None]
) -> None:
    """Run an optimizer on the released gradients, and record the weights that it has made.

    The last of all step pre-hooks checks that `p.grad` still holds the release and that no weight
    was written, and so does the end of a closure, in which Lightning calls
    `on_before_optimizer_step`. The first of all post-hooks records the weights. In wrappers of
    other libraries the optimizer is found by the attribute `optimizer`, or `_optimizer` as in
    Lightning. An object without hooks is not checked.

    Args:
        optimizer: of the run.
        parameters: trainable ones, by name.
        record: takes the weights as they are as the weights of this release.

    Raises:
        RuntimeError: a pre-hook or a closure replaced or wrote a gradient or a parameter, by name.
            Then the optimizer has not stepped.
    """
    inner: Any = optimizer
    while inner is not None and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = vars(inner).get("optimizer", vars(inner).get("_optimizer"))
    gradients = {name: p.grad for name, p in parameters.items()}
    before: dict[str, str] = {}
    if inner is not None and (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
        before = _digest_step(parameters, gradients)
    is_recorded = False

    def check(stepped: torch.optim.Optimizer, args: Any, settings: Any) -> Any:
        if is_nested_step(stepped):
            return None
        if before:
            _check_digests(parameters, before, "a step pre-hook")
        closure = settings.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            return None
        expected = before or _digest_step(parameters, gradients)

        def check_closure() -> Any:
            result = closure()
            _check_digests(parameters, expected, "on_before_optimizer_step or a closure")
            return result

        return args[:1], {**settings, "closure": check_closure}

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


def _digest_step(parameters: Tensors, gradients: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return digests of the release in each gradient and of each parameter, by what it is."""
    release = {f"the release in the gradient of '{name}'": x for name, x in gradients.items()}
    return digest_tensors(
        release | {f"the parameter '{name}'": p for name, p in parameters.items()}
    )


def _check_digests(parameters: Tensors, before: Mapping[str, str], hook: str) -> None:
    """Raise a RuntimeError where a hook has replaced a gradient or written a parameter."""
    now = _digest_step(parameters, {name: p.grad for name, p in parameters.items()})
    for what in {**before, **now}:
        if before.get(what) != now.get(what):
            raise RuntimeError(f"{hook} replaced {what}; remove the hook")


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
