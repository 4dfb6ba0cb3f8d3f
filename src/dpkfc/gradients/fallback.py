"""Per-example gradients of a module without a rule: its own parameters, differentiated example by example.

`torch.func.vmap` over a vector–Jacobian product of the one module, with the output gradients that the single backward
pass has already produced. Only the parameters the module owns directly are differentiated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpkfc.gradients.layers import Layer

__all__ = ["fallback_gradients"]

_CHUNK_ELEMENTS = 1 << 24  # per-example gradient elements held at once


def fallback_gradients(
    layer: Layer,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[Tensor | None],
    *,
    batch_size: int,
) -> dict[str, Tensor]:
    """Gradients of each example's loss with respect to the parameters a module owns.

    Args:
        layer: names the parameters.
        module: the module that was called.
        args: its detached inputs; tensors whose leading axis is the batch are split by example, others are shared.
        kwargs: the same by keyword.
        outputs: gradients at its tensor outputs, leading axis the batch.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.

    Raises:
        ValueError: the module draws random numbers, or its outputs do not lead with the batch.
    """
    _refuse_randomness(layer, module)
    parameters = {role: module.get_parameter(role).detach() for role in layer.parameters}
    leaves, spec = tree_flatten((args, kwargs))
    axes = [0 if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == batch_size else None for x in leaves]
    cotangents = [g for g in outputs if g is not None]
    for g in cotangents:
        if g.dim() < 1 or g.shape[0] != batch_size:
            raise ValueError(
                f"module '{layer.display_name}' ({type(module).__name__}) owns parameters but its output {tuple(g.shape)} "
                f"does not lead with the batch of {batch_size}; move those parameters into a module whose output does"
            )

    def one(split: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
        examples = iter(split)
        full = [next(examples).unsqueeze(0) if axis == 0 else x for x, axis in zip(leaves, axes, strict=True)]
        call_args, call_kwargs = tree_unflatten(full, spec)

        def forward(own: dict[str, Tensor]) -> list[Tensor]:
            out = functional_call(module, own, call_args, call_kwargs)
            return [y for y in tree_flatten(out)[0] if isinstance(y, Tensor) and y.is_floating_point()]

        pull = vjp(forward, parameters)[1]
        return pull([g.unsqueeze(0) for g in gradients])[0]

    split = [x for x, axis in zip(leaves, axes, strict=True) if axis == 0]
    size = sum(math.prod(p.shape) for p in parameters.values())
    chunk = max(1, _CHUNK_ELEMENTS // max(1, size))
    with torch.enable_grad():
        result = vmap(one, chunk_size=chunk)(split, cotangents)
        _check_split(layer, module, parameters, (args, kwargs), cotangents, result=result)
    return tree_map(lambda g: g.detach() if g.dtype in (torch.float32, torch.float64) else g.detach().float(), result)


def _check_split(
    layer: Layer,
    module: nn.Module,
    parameters: dict[str, Tensor],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    cotangents: list[Tensor],
    *,
    result: dict[str, Tensor],
) -> None:
    """Raise unless per-example gradients add up to the gradient of the whole call.

    They do not where an argument that all examples share happens to be as long as the batch and was split with it.
    """

    def forward(own: dict[str, Tensor]) -> list[Tensor]:
        out = functional_call(module, own, *inputs)
        return [y for y in tree_flatten(out)[0] if isinstance(y, Tensor) and y.is_floating_point()]

    whole = vjp(forward, parameters)[1](cotangents)[0]
    for role, expected in whole.items():
        found = result[role].detach().sum(0).to(expected)
        scale = result[role].detach().flatten(1).norm(dim=1).sum().to(expected)
        if bool(torch.isfinite(scale)) and float((found - expected).norm()) > 1e-3 * float(scale) + 1e-12:
            raise ValueError(
                f"parameter '{layer.parameters[role]}': per-example gradients of '{layer.display_name}' "
                f"({type(module).__name__}) do not add up to its gradient. An argument shared by all examples may be exactly "
                "as long as the batch; keep it as a buffer of the module, or give it a leading axis of 1"
            )


def _refuse_randomness(layer: Layer, module: nn.Module) -> None:
    for name, child in module.named_modules():
        rate = getattr(child, "p", None) if isinstance(child, nn.modules.dropout._DropoutNd) else None
        if isinstance(child, nn.MultiheadAttention):
            rate = child.dropout
        if child.training and rate:
            raise ValueError(
                f"module '{layer.display_name}' ({type(module).__name__}) owns parameters directly and contains dropout "
                f"('{name}', p={rate}), so its forward pass cannot be repeated for single examples; set that dropout to 0 "
                "or move the parameters into a module of their own"
            )
