"""Per-example gradients of a module without a rule: the module is run again on each example alone.

`torch.func.vmap` over a vector–Jacobian product of the one module, with the output gradients that the single backward pass
has already produced; a plain loop over the examples where the module cannot be vectorised. Only the parameters that the
module answers for are differentiated. What comes out is compared with the gradient of the whole call each time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, islice
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkfc.gradients.layers import Layer
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.random_state import device_of, random_states, same_states

__all__ = ["fallback_gradients"]

_log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 24  # per-example gradient elements held at once
_MAX_ALTERNATIVES = 64
_ATTENTION = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip
_Rebuild = Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
_looped: WeakSet[nn.Module] = WeakSet()  # modules that were found not to be vectorisable


@dataclass(frozen=True)
class _Cut:
    """How one tensor is cut into examples: the batch axis, and whether it stays, with length 1."""

    axis: int = 0
    keep: bool = True


@dataclass(frozen=True)
class _Division:
    """One call, and how it is divided into examples.

    Attributes:
        leaves: its arguments, flattened.
        rebuild: from leaves to positional and keyword arguments.
        cuts: how each leaf is cut, None where all examples share it.
        used: which of its floating-point outputs the losses depend on.
        gradients: at those.
        axes: the batch axis of each.
        known: whether the cuts are known rather than guessed from lengths.
    """

    leaves: list[Any]
    rebuild: _Rebuild
    cuts: list[_Cut | None]
    used: list[int]
    gradients: list[Tensor]
    axes: list[int]
    known: bool = False

    def alternatives(self) -> Iterator[_Division]:
        """The division itself, and others in which arguments as long as the batch are shared by all examples."""
        guessed = [] if self.known else [i for i, cut in enumerate(self.cuts) if cut is not None][1:]
        choices = chain.from_iterable(combinations(guessed, size) for size in range(len(guessed) + 1))
        for shared in islice(choices, _MAX_ALTERNATIVES):
            yield replace(self, cuts=[None if i in shared else cut for i, cut in enumerate(self.cuts)])


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
    division = _divided(layer, module, (args, kwargs), [g for g in outputs if g is not None], batch_size)
    reason: Exception | None = None
    with torch.enable_grad(), _attributes_kept(module):
        weights = 0.5 + torch.frac(0.618 * torch.arange(1, batch_size + 1, dtype=torch.float64))
        whole = _whole(layer, module, division, weights)
        for attempt in division.alternatives():
            try:
                result = _one_by_one(layer, module, attempt, batch_size)
            except Exception as error:  # noqa: BLE001 - whatever a module raises on arguments of another shape
                if is_out_of_memory(error):
                    raise
                reason = error
                continue
            if all(_adds_up(result[role], whole[role], weights) for role in whole):
                return {r: g if g.dtype in (torch.float32, torch.float64) else g.float() for r, g in result.items()}
    raise ValueError(
        f"parameters of '{layer.display_name}' ({type(module).__name__}): per-example gradients do not add up to its gradient"
        f"{f' ({reason})' if reason else ''}. It may mix the examples of a batch; or an argument without a leading batch axis "
        "is not the same for all examples, or one with it is: give every argument the batch, or an axis of 1, in front"
    ) from reason


def _divided(
    layer: Layer,
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    gradients: list[Tensor],
    batch_size: int,
) -> _Division:
    dtypes = [p.dtype for role in layer.parameters if (p := module.get_parameter(role)).is_floating_point()]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)  # inputs may come from an autocast region
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        leaves, rebuild, cuts, first = _divided_attention(layer, module, inputs, batch_size)
    else:
        leaves, spec = tree_flatten(inputs)
        rebuild, first = partial(tree_unflatten, treespec=spec), None
        cuts = [_Cut() if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch_size else None for x in leaves]
    used, axes = list[int](), list[int]()
    for i, g in enumerate(gradients):
        axis = 0 if i or first is None else first
        if g.dim() > axis and g.shape[axis] == batch_size:
            used, axes = [*used, i], [*axes, axis]
        elif bool(g.any()):
            raise ValueError(
                f"module '{layer.display_name}' ({type(module).__name__}) owns parameters but its output {tuple(g.shape)} "
                f"does not lead with the batch of {batch_size}; move those parameters into a module whose output does"
            )
    leaves, gradients = [_at_least(x, widest) for x in leaves], [_at_least(gradients[i], widest) for i in used]
    return _Division(leaves, rebuild, cuts, used, gradients, axes, known=first is not None)


def _at_least(x: Any, dtype: torch.dtype) -> Any:
    narrow = isinstance(x, Tensor) and x.is_floating_point() and torch.finfo(x.dtype).bits < torch.finfo(dtype).bits
    return x.to(dtype) if narrow else x


def _divided_attention(
    layer: Layer, module: nn.MultiheadAttention, inputs: tuple[tuple[Any, ...], dict[str, Any]], batch_size: int
) -> tuple[list[Any], _Rebuild, list[_Cut | None], int]:
    """Attention says itself what its arguments are: a mask `[T, T]` is shared also where T is the number of examples."""
    given = dict(zip(_ATTENTION, inputs[0], strict=False)) | inputs[1]
    axis = 0 if module.batch_first else 1
    if given["query"].dim() != 3 or given["query"].shape[axis] != batch_size:
        raise ValueError(
            f"module '{layer.display_name}' (MultiheadAttention, batch_first={module.batch_first}) was given a query of shape "
            f"{tuple(given['query'].shape)}, but axis {axis} must be the batch of {batch_size} examples; build it with "
            "batch_first=True and pass [batch, time, features]"
        )
    cuts: dict[str, _Cut | None] = {"query": _Cut(axis), "key": _Cut(axis), "value": _Cut(axis)}
    if given.get("key_padding_mask") is not None:
        cuts["key_padding_mask"] = _Cut()
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:  # [batch * heads, T, S]
        given["attn_mask"] = mask.unflatten(0, (batch_size, module.num_heads))
        cuts["attn_mask"] = _Cut(keep=False)

    def rebuild(full: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = dict(zip(given, full, strict=True))
        if call.get("attn_mask") is not None and call["attn_mask"].dim() == 4:
            call["attn_mask"] = call["attn_mask"].flatten(0, 1)
        return (), call

    return list(given.values()), rebuild, [cuts.get(name) for name in given], axis


def _whole(layer: Layer, module: nn.Module, division: _Division, weights: Tensor) -> dict[str, Tensor]:
    """The gradient of the weighted losses through the whole call, by plain autograd on the module's own parameters.

    Raises:
        ValueError: the module draws random numbers, so that the call cannot be repeated.
    """
    states = random_states(device_of([layer]))
    scaled = [
        g * weights.to(g).view([-1 if i == axis else 1 for i in range(g.dim())])
        for g, axis in zip(division.gradients, division.axes, strict=True)
    ]
    result = _differentiated(layer, module, division, division.leaves, scaled)
    if not same_states(states, random_states(device_of([layer]))):
        raise ValueError(
            f"module '{layer.display_name}' ({type(module).__name__}) owns parameters directly and draws random numbers, so "
            "its forward pass cannot be repeated for single examples; move the parameters, or the randomness, into a module "
            "of their own"
        )
    return result


def _differentiated(
    layer: Layer, module: nn.Module, division: _Division, leaves: list[Any], gradients: list[Tensor]
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
    return {
        role: torch.zeros_like(p) if g is None else g for (role, p), g in zip(parameters.items(), found, strict=True)
    }


def _floating(output: Any, used: list[int]) -> list[Tensor]:
    floating = [y for y in tree_flatten(output)[0] if isinstance(y, Tensor) and y.is_floating_point()]
    return [floating[i] for i in used]


def _fitting(gradient: Tensor, output: Tensor) -> Tensor:
    """A gradient for an output; one that all examples share has length 1 where the gradient has the batch."""
    if output.dim() and output.shape[0] == 1 and gradient.shape[0] != 1:
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(output.dtype)


def _one_by_one(layer: Layer, module: nn.Module, division: _Division, batch_size: int) -> dict[str, Tensor]:
    """Role to gradients of every example alone, vectorised where that is possible."""
    if module not in _looped:
        try:
            return _vectorised(layer, module, division)
        except Exception as error:  # noqa: BLE001 - no batching rule, data-dependent control flow, ...
            if is_out_of_memory(error):
                raise
            reason = type(error).__name__  # its text may hold values of private examples
    rows = []
    for i in range(batch_size):
        full = [
            x if cut is None else x.narrow(cut.axis, i, 1) if cut.keep else x.select(cut.axis, i)
            for x, cut in zip(division.leaves, division.cuts, strict=True)
        ]
        gradients = [g.narrow(axis, i, 1) for g, axis in zip(division.gradients, division.axes, strict=True)]
        rows.append(_differentiated(layer, module, division, full, gradients))
    if module not in _looped:
        _looped.add(module)
        _log.warning(
            "module '%s' (%s) cannot be vectorised over examples (%s); its gradients are taken one example at a time",
            layer.display_name, type(module).__name__, reason,
        )  # fmt: skip
    return {role: torch.stack([row[role] for row in rows]) for role in layer.parameters}


def _vectorised(layer: Layer, module: nn.Module, division: _Division) -> dict[str, Tensor]:
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


def _adds_up(found: Tensor, whole: Tensor, weights: Tensor) -> bool:
    """Whether Σ w_n g_n is the gradient of the whole call; the weights differ, so that examples cannot stand in for others."""
    weighted = found.double().reshape(len(found), -1) * weights.to(found.device).unsqueeze(1)
    scale = float(weighted.norm(dim=1).sum())
    tolerance = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 0.05
    error = float((weighted.sum(0) - whole.double().flatten()).norm())
    return not math.isfinite(scale) or error <= tolerance * scale + 1e-12


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
