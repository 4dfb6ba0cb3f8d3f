"""Checks around the hand-over of a release to a torch optimizer: it holds the model's parameters, and nothing else moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module

from dpkfc.gradients.discovery import check_covered
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.sharded import local, reshard

__all__ = [
    "WeightGuard", "check_finite", "check_moved", "check_optimizer", "check_unchanged", "refuse_gradient_hooks", "traces",
]  # fmt: skip

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
