"""Checks of a model before a step: its parameters, their values, and hooks on gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules import module as _every_module

from dpkfc.distributed.fsdp import reshard, to_local
from dpkfc.gradients.layers import Layer, named_tensors
from dpkfc.tensors import NamedTensors, Tensors


def check_unchanged(
    model: nn.Module,
    layers: Sequence[Layer],
    parameters: Tensors,
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
        RuntimeError: a parameter that was replaced, frozen, unfrozen, added, or made in inference
            mode, by name; inference mode is on.
        ValueError: a parameter with a hook on its gradient, or with values that are not finite.
    """
    refuse_inference_mode()
    # An evaluation may have left the model gathered.
    reshard(model)
    now = dict(model.named_parameters())
    _check_covered(now, layers)
    _refuse_gradient_hooks(model, now)
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise RuntimeError(
                f"parameter '{name}' was replaced after the model was made private; move, cast or "
                "adapt it before, and before the optimizer is created"
            )
        if parameter.is_inference():
            raise RuntimeError(
                f"parameter '{name}' was made inside torch.inference_mode() and cannot be trained; "
                "make the model outside of it"
            )
    if finite:
        check_finite(layers)


def refuse_inference_mode() -> None:
    """Refuse to differentiate where torch computes no gradients, so that releases are noise alone.

    Raises:
        RuntimeError: `torch.inference_mode()` is on.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() is on, in which torch computes no gradients; nothing was "
            "released: train outside of it"
        )


def _check_covered(parameters: NamedTensors, layers: Sequence[Layer]) -> None:
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
    trainable = {id(p): name for name, p in parameters.items() if p.requires_grad}
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
    sums: Tensors = {}
    tensors = {name: to_local(p) for name, p in named_tensors(layers).items()}
    for name, x in tensors.items():
        if x.numel() and x.is_floating_point():
            sums[name] = x.detach().sum()
    if not sums:
        return
    # One question to the GPU for all parameters.
    device = next(iter(sums.values())).device
    answers = torch.stack([x.to(device) for x in sums.values()]).isfinite()
    for name, is_finite in zip(sums, answers.tolist(), strict=True):
        # A sum of finite numbers may be infinite.
        if not is_finite and not torch.isfinite(tensors[name]).all():
            raise ValueError(
                f"parameter '{name}' holds NaN or infinity, so that every release would be noise "
                "alone; nothing was released. Start again with a smaller learning rate"
            )


def _refuse_gradient_hooks(model: nn.Module, parameters: NamedTensors) -> None:
    """Refuse a hook that would see private gradients before they are noised.

    `wandb.watch(model, log="gradients")` leaves such hooks, as do optimizers that step during a
    backward pass. Hooks of torch itself (`fully_shard` has its own) are allowed.

    Raises:
        ValueError: naming the parameter or the module.
    """
    for name, p in parameters.items():
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
