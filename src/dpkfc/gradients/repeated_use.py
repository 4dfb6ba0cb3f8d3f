"""Functions that read parameters, repeated for each example alone to get its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkfc.tensors import Tensors
from dpkfc.tracking.states import BatchAxis, one_example_a_row

Compute = Callable[..., Sequence[Tensor]]
"""Maps what belongs to one example, and the trained tensors one by one, to outputs."""


def differentiate_again(
    compute: Compute,
    trained: Sequence[Tensor],
    rows: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return gradients `[N, ...]` of trained tensors, by `torch.vmap` over the examples.

    Args:
        compute: is run for every example.
        trained: tensors that all examples share.
        rows: what belongs to the examples, `[N, ...]` each.
        gradients: at the outputs, `[N, ...]` each.
    """

    def differentiate(example: Sequence[Tensor], arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        results, pull, *_ = torch.func.vjp(partial(compute, example), *trained)
        pairs = zip(arrived, results, strict=True)
        starts = [g.to(y.dtype) for g, y in pairs]
        found: Sequence[Tensor] = pull(starts)
        return found

    with torch.enable_grad():
        return torch.vmap(differentiate)(rows, gradients)


@dataclass(frozen=True)
class RepeatedUse:
    """A call of a function that read tensors of parameters.

    Attributes:
        compute: the function.
        trained: the tensors.
        batched: its other arguments that have the batch, detached, with their axes.
        names: id of a trained tensor to its name in the model; computed ones are absent.
        output_axis: the batch axis of the output.
        edge: where the gradients of the output arrive.
    """

    compute: Compute
    trained: Sequence[Tensor]
    batched: Sequence[tuple[Tensor, BatchAxis]]
    names: Mapping[int, str]
    output_axis: BatchAxis
    edge: GradientEdge

    def gradients(self, gradient: Tensor, size: int) -> Tensors:
        """Return name to gradients `[N, *parameter.shape]`."""
        rows = [one_example_a_row(x, axis, size) for x, axis in self.batched]
        arrived = [one_example_a_row(gradient, self.output_axis, size)]
        values = [p.detach() for p in self.trained]
        found = differentiate_again(self.compute, values, rows, arrived)
        by_name = {}
        for p, g in zip(self.trained, found, strict=True):
            # A computed tensor has no name.
            if id(p) in self.names:
                by_name[self.names[id(p)]] = g.detach()
        return by_name

    def fits(self, result: Tensor, size: int) -> bool:
        """Return whether the first example alone gives a result of the shape of its row."""
        rows = [one_example_a_row(x, axis, size) for x, axis in self.batched]
        first = [x[0] for x in rows]
        values = [p.detach() for p in self.trained]
        expected = one_example_a_row(result, self.output_axis, size)[0].shape
        try:
            (alone,) = self.compute(first, *values)
        except (RuntimeError, IndexError, ValueError):
            return False
        return alone.shape == expected
