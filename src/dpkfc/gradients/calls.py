"""A recorded call of a module, as the rules of its layers read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpkfc.gradients.attention import Attended
from dpkfc.tracking.axes import BatchAxis

__all__ = ["Call", "Calls"]


@dataclass(frozen=True)
class Call:
    """One call of a module: detached inputs and the gradients of the summed losses at its outputs.

    Attributes:
        module: the module called.
        args, kwargs: its inputs, detached.
        outputs: one gradient per tensor output, None where the output is not floating point.
        axes: where each tensor among the inputs has the batch, None for one that all examples share.
        output_axes: where each tensor output has the batch.
        attended: of torch's attention, from which its two linear layers are taken.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor | None]
    axes: list[BatchAxis | None]
    output_axes: list[BatchAxis | None]
    attended: Attended | None = None

    @property
    def input(self) -> Tensor:
        """Return the single tensor input of a module with a rule."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


Calls = dict[str, list[Any]]
"""Layer name to its calls, or to blocks of gradients."""
