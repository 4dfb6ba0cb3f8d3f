"""What a tape notes of one call of a module, and the calls of layers that it becomes once gradients are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpkfc.gradients.attention import Attended
from dpkfc.gradients.broadcast import Doubt
from dpkfc.gradients.direct import Uses
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import Call

__all__ = ["Record", "calls_of", "note_of"]


@dataclass
class Record:
    """One call of one module, before its output gradients are known (or, listening, with those that have arrived).

    `spread`: an output that all examples share was handed on with one row an example. `uses`: of parameters that the module
    reads itself. `attended`: of torch's attention.
    """

    layers: tuple[Layer, ...]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edges: list[GradientEdge | None]
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    versions: list[tuple[Tensor, int]]
    doubts: list[Doubt | None]
    spread: bool = False
    uses: Uses | None = None
    attended: Attended | None = None
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)

    def call(self, gradients: Sequence[Tensor | None], own: dict[str, Tensor] | None = None) -> Call:
        """The call with its output gradients, zeros where none has come."""
        outputs = [
            (torch.zeros(shape, dtype=dtype, device=device) if g is None else g) if dtype.is_floating_point else None
            for g, (shape, dtype, device) in zip(gradients, self.outputs, strict=True)
        ]
        if self.attended is not None:
            self.attended.gradients = gradients
        return Call(self.module, self.args, self.kwargs, outputs, own, self.attended)

    @property
    def added_an_axis(self) -> bool:
        """Whether the output of one-dimensional ids was spread over the examples."""
        ids = [x.shape for x, _ in self.versions] if isinstance(self.module, nn.Embedding) else []
        return bool(ids) and len(ids[0]) == 1 and self.outputs[0][0][:-1] != ids[0]


def note_of(record: Record) -> str:
    """What to add to an error of a model in which the output of this call has the batch in front."""
    name = record.layers[0].display_name
    if record.added_an_axis:
        return (
            f"dpkfc: layer '{name}' was called with ids of shape [T] that all examples share, and its "
            "output was handed on with the batch in front; where the model adds an axis itself, use ids of shape [1, T]"
        )
    return (
        f"dpkfc: layer '{name}' has an input that all examples share; its output was handed on with one row an example. Where "
        "the model repeats it for the batch itself, use expand(N, ...) instead of repeat or repeat_interleave; where it is "
        "called with one of the examples (an expert of a mixture), call it with all of them and weigh what it returns"
    )


def calls_of(
    records: Sequence[tuple[Record, list[Tensor | None]]], own: Mapping[Uses, dict[str, Tensor]] = MappingProxyType({})
) -> dict[str, list[Call]]:
    """For each layer its calls; those on which no loss depends are left out where the layer has another.

    What is computed without an example for a norm or a look (DoRA calls its factors on an identity matrix) need not lead with the
    batch.
    """
    used = {layer.name for r, gradients in records for layer in r.layers if any(g is not None for g in gradients)}
    calls: dict[str, list[Call]] = {}
    for record, gradients in records:
        names = [x.name for x in record.layers if x.name not in used or any(g is not None for g in gradients)]
        for name in names:
            calls.setdefault(name, []).append(record.call(gradients, None if record.uses is None else own.get(record.uses)))
    return calls
