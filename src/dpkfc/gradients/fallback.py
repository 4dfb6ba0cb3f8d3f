"""Per-example gradients of a module without a rule: the module is run again on each example alone.

`torch.func.vmap` over a vector–Jacobian product of the one module, with the output gradients that the single backward pass
has already produced; a plain loop over the examples where the module cannot be vectorised. Only the parameters that the
module answers for are differentiated. What comes out is compared with the gradient of the whole call each time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.division import Division, divided
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.random_state import device_of, random_states, same_states

__all__ = ["fallback_gradients"]

_log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 24  # per-example gradient elements held at once
_ROUNDING = 16  # units in the last place by which contributions that cancel in a sum may be off
_looped: WeakSet[nn.Module] = WeakSet()  # modules that were found not to be vectorisable


def fallback_gradients(
    layer: Layer,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[Tensor | None],
    *,
    batch_size: int,
) -> dict[str, Tensor]:
    """Gradients of each example's loss with respect to the parameters a module answers for.

    Args:
        layer: names the parameters.
        module: the module that was called.
        args: its detached inputs; tensors whose leading axis is the batch are cut into examples, others are shared.
        kwargs: the same by keyword.
        outputs: gradients at its tensor outputs, leading axis the batch.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.

    Raises:
        ValueError: the module draws random numbers, its outputs do not lead with the batch, or the gradients of single
            examples do not add up to that of the batch.
    """
    _refuse_dropout(layer, module)
    division = divided(layer, module, (args, kwargs), [g for g in outputs if g is not None], batch_size)
    reason: Exception | None = None
    with torch.enable_grad(), _attributes_kept(module):
        for attempt in division.alternatives():
            try:
                result = _one_by_one(layer, module, attempt, batch_size)
                added = _adds_up(layer, module, attempt, result)
            except _DrawsNumbersError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a module raises on arguments of another shape
                if is_out_of_memory(error):
                    raise
                reason = error
                continue
            if added:
                return {r: g if g.dtype in (torch.float32, torch.float64) else g.float() for r, g in result.items()}
    raise ValueError(
        f"parameters of '{layer.display_name}' ({type(module).__name__}): per-example gradients do not add up to its gradient"
        f"{f' ({reason})' if reason else ''}. It may mix the examples of a batch; or an argument without a leading batch axis "
        "is not the same for all examples, or one with it is: give every argument the batch, or an axis of 1, in front"
    ) from reason


class _DrawsNumbersError(ValueError):
    """A call that cannot be repeated, however it is divided."""


def _check_drawn(layer: Layer, module: nn.Module, states: Sequence[Tensor]) -> None:
    if not same_states(states, random_states(device_of([layer]))):
        raise _DrawsNumbersError(
            f"module '{layer.display_name}' ({type(module).__name__}) owns parameters directly and draws random numbers, so "
            "its forward pass cannot be repeated for single examples; move the parameters, or the randomness, into a module "
            "of their own"
        )


def _differentiated(
    layer: Layer, module: nn.Module, division: Division, leaves: list[Any], gradients: list[Tensor]
) -> dict[str, Tensor]:
    """One backward pass through the module as it is."""
    parameters = {role: module.get_parameter(role) for role in layer.parameters}
    args, kwargs = division.rebuild(leaves)
    outputs = _floating(module(*args, **kwargs), division.used)
    pairs = [(y, _fitting(g, y)) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    found: Any = [None] * len(parameters)
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, list(parameters.values()), gs, allow_unused=True)
    return {role: _dense(p, g) for (role, p), g in zip(parameters.items(), found, strict=True)}


def _dense(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient as a tensor of all values, also of `nn.EmbeddingBag(sparse=True)`."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _floating(output: Any, used: list[int]) -> list[Tensor]:
    floating = [y for y in tree_flatten(output)[0] if isinstance(y, Tensor) and y.is_floating_point()]
    return [floating[i] for i in used]


def _fitting(gradient: Tensor, output: Tensor) -> Tensor:
    """A gradient for an output; one that all examples share has length 1 where the gradient has the batch."""
    if output.dim() and output.shape[0] == 1 and gradient.shape[0] != 1:
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(output.dtype)


def _one_by_one(layer: Layer, module: nn.Module, division: Division, batch_size: int) -> dict[str, Tensor]:
    """Role to gradients of every example alone, vectorised where that is possible."""
    if module not in _looped:
        try:
            return _vectorised(layer, module, division)
        except Exception as error:  # noqa: BLE001 - no batching rule, data-dependent control flow, ...
            if is_out_of_memory(error):
                raise
            reason = type(error).__name__  # its text may hold values of private examples
    rows, states = list[dict[str, Tensor]](), random_states(device_of([layer]))
    for i in range(batch_size):
        full = [
            x if cut is None else x.narrow(cut.axis, i, 1) if cut.keep else x.select(cut.axis, i)
            for x, cut in zip(division.leaves, division.cuts, strict=True)
        ]
        gradients = [g.narrow(axis, i, 1) for g, axis in zip(division.gradients, division.axes, strict=True)]
        rows.append(_differentiated(layer, module, division, full, gradients))
    _check_drawn(layer, module, states)
    if module not in _looped:
        _looped.add(module)
        _log.warning(
            "module '%s' (%s) cannot be vectorised over examples (%s); its gradients are taken one example at a time",
            layer.display_name, type(module).__name__, reason,
        )  # fmt: skip
    return {role: torch.stack([row[role] for row in rows]) for role in layer.parameters}


def _vectorised(layer: Layer, module: nn.Module, division: Division) -> dict[str, Tensor]:
    parameters = {role: module.get_parameter(role).detach() for role in layer.parameters}

    def one(split: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
        examples = iter(split)
        full = [
            x if cut is None else next(examples).unsqueeze(cut.axis) if cut.keep else next(examples)
            for x, cut in zip(division.leaves, division.cuts, strict=True)
        ]
        call_args, call_kwargs = division.rebuild(full)

        def forward(own: dict[str, Tensor]) -> list[Tensor]:
            return _floating(functional_call(module, own, call_args, call_kwargs), division.used)

        ys, pull = vjp(forward, parameters)[:2]
        pairs = zip(gradients, division.axes, ys, strict=True)
        return pull([_fitting(g.unsqueeze(axis), y) for g, axis, y in pairs])[0]

    split = [(x, cut.axis) for x, cut in zip(division.leaves, division.cuts, strict=True) if cut is not None]
    chunk = max(1, _CHUNK_ELEMENTS // max(1, sum(math.prod(p.shape) for p in parameters.values())))
    run = vmap(one, in_dims=([axis for _, axis in split], division.axes), chunk_size=chunk)
    with sdpa_kernel([SDPBackend.MATH]):  # the fused kernels have no batching rule
        result = run([x for x, _ in split], division.gradients)
    return {role: g.detach() for role, g in result.items()}


def _adds_up(layer: Layer, module: nn.Module, division: Division, found: dict[str, Tensor]) -> bool:
    """Whether Σ_n w_n g_n is the gradient of the whole call; the weights differ, so that examples cannot stand in for others.

    No example decides for all: each is scaled to about one length, and one that is not finite is left out, with the row of
    another in its place.
    """
    precise = all(g.dtype in (torch.float32, torch.float64) for g in found.values())
    relative, rounding = 1e-3 if precise else 0.05, _ROUNDING * max(torch.finfo(g.dtype).eps for g in found.values())
    own = torch.stack([torch.linalg.vector_norm(g.double().reshape(len(g), -1), dim=1) for g in found.values()]).norm(dim=0)
    given = division.sizes().to(own)
    fine = own.isfinite() & given.isfinite()
    length = torch.where(fine, torch.maximum(own, given * rounding / relative), 1.0).clamp(min=2.0**-100, max=2.0**100)
    weights = 0.5 + torch.frac(0.618 * torch.arange(1, len(fine) + 1, dtype=torch.float64, device=fine.device))
    weights = torch.where(fine, weights * torch.exp2(-torch.log2(length).round()), 0.0)
    states = random_states(device_of([layer]))
    whole = _differentiated(layer, module, division, division.without(~fine), division.scaled(weights))
    _check_drawn(layer, module, states)
    allowed = rounding * (weights * torch.where(fine, given, 0.0)).sum() + 1e-12
    agrees = [~fine.any()]  # examples without a gradient contribute zero, however they are divided
    for role, gradients in found.items():
        rows = torch.where(fine.unsqueeze(1), gradients.double().reshape(len(fine), -1), 0.0) * weights.unsqueeze(1)
        error = (rows.sum(0) - whole[role].double().flatten()).norm()
        agrees.append(error <= relative * rows.norm(dim=1).sum() + allowed)
    return bool(agrees[0] | torch.stack(agrees[1:]).all())


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put tensors back that a forward pass keeps on its modules (weights computed by a hook, caches)."""
    before = [(m, _tensors(m)) for m in module.modules()]
    try:
        yield
    finally:
        for m, held in before:
            for name in _tensors(m).keys() - held.keys():
                vars(m).pop(name)
            vars(m).update(held)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in vars(module).items() if isinstance(x, Tensor)}


def _refuse_dropout(layer: Layer, module: nn.Module) -> None:
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
