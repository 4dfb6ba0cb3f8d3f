"""A recorded call of a module, as the rules of its layers read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.attention import AttentionCall
from dpkfc.tracking.axes import BatchAxis


@dataclass(frozen=True)
class Call:
    """One call of a module: detached inputs and the gradients of the summed losses at its outputs.

    Attributes:
        module: the module called.
        args, kwargs: its inputs, detached.
        output_gradients: one gradient per tensor output, None where the output is not floating
            point.
        axes: where each tensor among the inputs has the batch, None for one that all examples
            share.
        output_axes: where each tensor output has the batch.
        attention: of torch's attention, from which its two linear layers are taken.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_gradients: list[Tensor | None]
    axes: list[BatchAxis | None]
    output_axes: list[BatchAxis | None]
    attention: AttentionCall | None = None

    @property
    def input(self) -> Tensor:
        """Return the single tensor input of a module with a rule."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def gradient(self) -> Tensor:
        """Return the gradient at the single tensor output of a module with a rule."""
        gradient = self.output_gradients[0]
        assert gradient is not None
        return gradient


Calls = dict[str, list[Any]]
"""Layer name to its calls, or to blocks of gradients."""


def raise_precision(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 as it is.

    Gradients, norms, sums and noise live in these types whatever the model computes in.
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
