"""Inputs that all examples share: position numbers of shape `[1, T]` or `[T]`, a parameter `[1, T, d]`.

What a layer makes of them has no batch axis. Broadcasting later spreads it over the examples, and autograd adds the
examples' gradients up before the layer sees them. So the tape hands on the output as a view with one row an example: the
values are the same, and every example has a gradient of its own. Whether the rows do belong to the examples is seen from
the gradients themselves, once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

__all__ = ["Doubt", "LeadingAxis", "ambiguous", "leading_size", "marked_gradients", "marks", "settle", "spread"]

_BATCH_FIRST = ("linear", "conv", "computed", "embedding", "tied", "norm")


@dataclass
class LeadingAxis:
    """What is known of a layer's inputs that have no batch axis.

    One-dimensional ids `[L]` are positions that all examples share where L is not the number of examples. Where it is,
    they may be one an example just as well; what was seen before decides, or the gradients do.

    Attributes:
        shared: ids of another length than the batch were seen.
        own: ids were seen to be one an example.
        settled: the rows of a spread output were seen to belong to the examples.
        shared_arguments: arguments of a module without a rule (structure of the call, place in it) that were seen with
            another length than the batch.
    """

    shared: bool = False
    own: bool = False
    settled: bool = False
    shared_arguments: set[tuple[str, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Doubt:
    """A call whose output rows have not been seen yet to belong to the examples.

    Attributes:
        layer: the layer called.
        ids: as many one-dimensional ids as there are examples; otherwise an output that was spread over the examples.
    """

    layer: Layer
    ids: bool


def leading_size(inputs: object) -> int | None:
    """Examples in the inputs of a model: the leading axis of the first tensor that has one."""
    tensors = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.dim()]
    return tensors[0].shape[0] if tensors else None


def spread(
    layer: Layer, module: nn.Module, inputs: Sequence[Tensor], output: Tensor, batch_size: int | None
) -> tuple[Tensor, Doubt | None]:
    """An output with one row an example, and whether that needs to be looked at.

    Args:
        layer: the layer called; what is seen is remembered on it.
        module: the module called.
        inputs: its tensor inputs.
        output: one of its outputs, floating point.
        batch_size: examples N, None where unknown.

    Returns:
        The output itself, or a view `[N, ...]` of it where all examples share it.
    """
    if isinstance(module, nn.Embedding) and inputs and inputs[0].dim() == 1 and len(inputs[0]) != 1:
        return _of_flat_ids(layer, len(inputs[0]), output, batch_size)
    if batch_size is None or batch_size == 1 or output.dim() < 2 or output.shape[0] != 1:
        return output, None
    if layer.rule in _BATCH_FIRST and not (inputs and inputs[0].shape[0] == 1):
        return output, None
    if layer.rule not in (*_BATCH_FIRST, "fallback") or isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return output, None  # time may come first
    view = output.expand(batch_size, *output.shape[1:])
    return view, None if layer.axis.settled else Doubt(layer, ids=False)


def _of_flat_ids(layer: Layer, length: int, output: Tensor, batch_size: int | None) -> tuple[Tensor, Doubt | None]:
    axis = layer.axis
    if batch_size is not None and length != batch_size:
        axis.shared = True
    elif not axis.shared or axis.own or batch_size is None:
        return output, None if axis.own and not axis.shared else Doubt(layer, ids=True)
    view = output.expand(batch_size, *output.shape)
    return view, None if axis.settled else Doubt(layer, ids=False)


def marked_gradients(losses: Tensor, edges: Sequence[GradientEdge]) -> Sequence[Tensor | None]:
    """Gradients at a few edges of the losses with an own factor each; the graph is kept."""
    if not edges:
        return []
    return torch.autograd.grad((losses * marks(losses)).sum(), list(edges), allow_unused=True, retain_graph=True)


def marks(losses: Tensor) -> Tensor:
    """Factors `[N]` that tell examples apart: powers of two, so that gradients are scaled by them without rounding."""
    return 2.0 ** (torch.arange(len(losses), device=losses.device) % 4).to(losses.dtype)


def settle(doubt: Doubt, gradient: Tensor | None, marked: Tensor | None, losses: Tensor) -> None:
    """Look whether row n of an output's gradient comes from example n alone: it then scales with that example's loss.

    Args:
        doubt: what is asked; the answer is remembered on its layer.
        gradient: of the summed losses, with respect to the output.
        marked: the same from `marked_gradients`.
        losses: the losses `[N]`.

    Raises:
        ValueError: the rows belong to no single example, or the gradients are not finite; naming the fix.
    """
    factors = marks(losses)
    if gradient is None or marked is None or len(gradient) != len(factors):
        return  # without effect on the losses, or refused by its rule
    rows, seen = gradient.flatten(1).double(), marked.flatten(1).double()
    expected = rows * factors.double().unsqueeze(1)
    finite = torch.isfinite(expected).all(1) & torch.isfinite(seen).all(1)
    size = float(expected[finite].norm())
    own = float((seen - expected)[finite].norm()) <= 1e-3 * size
    axis = doubt.layer.axis
    if doubt.ids and not bool(finite.any()):
        raise ValueError(f"{ambiguous(doubt.layer, len(factors))}; no gradient of this batch is finite")
    if size == 0.0:
        return
    if not doubt.ids and not own:
        raise ValueError(
            f"layer '{doubt.layer.display_name}' has an input that all examples share, but its output is used so that the "
            f"gradients of different examples mix; give its input a leading axis of {len(factors)} with expand()"
        )
    if doubt.ids and not own:
        axis.shared = True
        raise ValueError(f"{ambiguous(doubt.layer, len(factors))}. Or loss_fn mixes examples: one id moves several losses")
    axis.own, axis.settled = axis.own or doubt.ids, axis.settled or not doubt.ids


def ambiguous(layer: Layer, length: int) -> str:
    """What to tell of ids that may be one an example or shared by all."""
    return (
        f"layer '{layer.display_name}' was called with ids of shape [{length}] in a batch of {length} examples, which can be "
        "read as one id an example and as positions that all examples share; "
        f"for shared positions use ids of shape [1, {length}] (torch.arange({length}).unsqueeze(0)), for one id an example "
        f"use [{length}, 1]"
    )
