"""A call of a covered module: when it begins, when it is over, and with its output gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from dpkfc.gradients.attention import AttentionCall
from dpkfc.gradients.autograd_graph import is_differentiable
from dpkfc.gradients.layers import Arguments, Axes, Call, Calls, Keywords, Layer
from dpkfc.tracking.states import BatchAxis


@dataclass
class OpenCall:
    """A call of a covered module that has started.

    Attributes:
        parameters: those that it covers.
        tensors: its tensor inputs.
        axes: batch axis of each.
        kinds: of states that the inputs have.
        paused: whether the tracker is.
        states: of the random generators when it began, of a module that runs again.
        given: its detached inputs before it began, of a module that runs again.
        attention: what torch's attention was given, where the call is one of its.
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    axes: Axes
    kinds: set[type]
    paused: bool = False
    states: tuple[Any, ...] | None = None
    given: tuple[Arguments, Keywords] | None = None
    attention: AttentionCall | None = None


class Arrival:
    """A hook at an output of a layer, which keeps none of its inputs alive.

    Attributes:
        use: takes the gradient when it arrives, in a pass whose calls are wanted.
    """

    use: Callable[[Tensor | None], None] | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        """Hand on the gradient."""
        if self.use is not None:
            self.use(gradient)


@dataclass
class RecordedCall:
    """A call that is over, before its output gradients are known.

    Attributes:
        layers: those that the module belongs to.
        call: the call without output gradients.
        outputs: its tensor outputs as (shape, type, device).
        edges: where their gradients arrive, None without a gradient.
        versions: the inputs, each with the counter of writes that it had.
        is_public: the call read no example, so that all examples share its outputs.
        arrival: sees the gradient at the output before hooks of other code; of a norm layer.
    """

    layers: tuple[Layer, ...]
    call: Call
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    edges: list[GradientEdge | None]
    versions: list[tuple[Tensor, int]]
    is_public: bool
    arrival: Arrival | None = None

    def with_gradients(self, arrived: Sequence[Tensor | None]) -> Call:
        """Return the call with its output gradients, zeros where none arrived."""
        gradients: list[Tensor | None] = []
        for gradient, (shape, dtype, device) in zip(arrived, self.outputs, strict=True):
            if gradient is not None:
                gradients.append(gradient.reshape(shape))
            elif dtype.is_floating_point or dtype.is_complex:
                zero = torch.zeros((), dtype=dtype, device=device)
                gradients.append(zero.expand(shape))
            else:
                gradients.append(None)
        if self.call.attention is not None:
            # The weights of attention are returned where they are asked for.
            self.call.attention.gradients = (*arrived, None)[:2]
        return replace(self.call, output_gradients=gradients)

    def repeat_public(self, gradient: Tensor, size: int) -> Call:
        """Return a call that read a public input, with the input repeated for every example.

        Args:
            gradient: at its only output, a row an example: as many elements as `[N, *output]`.
            size: examples N.
        """

        def repeat(x: Tensor) -> Tensor:
            return x.expand(size, *x.shape).flatten(0, 1)

        args, kwargs = tree_map_only(Tensor, repeat, (self.call.args, self.call.kwargs))
        axes: Axes = []
        for x, _ in self.versions:
            length = max(1, x.shape[0])
            axes.append(BatchAxis(0, 1, length))
        by_example = gradient.reshape(size, *self.outputs[0][0])
        output_length = max(1, by_example.shape[1])
        output_axis = BatchAxis(0, 1, output_length)
        rows = by_example.flatten(0, 1)
        return Call(self.call.module, args, kwargs, [rows], axes, [output_axis])

    def add_to(self, calls: Calls, call: Call) -> None:
        """Add a form of this call to the calls of all layers that its module belongs to."""
        for layer in self.layers:
            calls.setdefault(layer.name, []).append(call)


def find_edge(x: Tensor, module: nn.Module) -> GradientEdge | None:
    """Return where the gradients of an output of a module arrive, None without a gradient."""
    if not is_differentiable(x):
        return None
    base = find_whole_base(x, module)
    return get_gradient_edge(x if base is None else base)


def find_whole_base(x: Tensor, module: nn.Module) -> Tensor | None:
    """Return the product that an output of a linear layer on sequences is a view of, else None.

    Where that view is changed in place later (`ReLU(inplace=True)`), it gets no gradient of its
    own, but the product does.
    """
    base = x._base
    if not isinstance(module, nn.Linear) or base is None or base.grad_fn is None:
        return None
    is_whole = base.numel() == x.numel() and base.is_contiguous() and x.is_contiguous()
    return base if is_whole else None
