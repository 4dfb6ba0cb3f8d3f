"""Points at which the gradients of examples are taken: other values of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.gradients.layers import Layer, named_tensors
from dpkfc.tensors import Tensors


@dataclass(frozen=True)
class EvaluationPoint:
    """A point where gradients are taken.

    Attributes:
        parameters: values of the parameters, None for the model's own.
        weight: a factor of the losses.
    """

    parameters: Mapping[str, Tensor] | None = None
    weight: float = 1.0


AT_MODEL_PARAMETERS = EvaluationPoint()


@contextmanager
def swap_parameters(
    layers: Sequence[Layer], parameters: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """Run the body with other values of the parameters, and restore their own to the bit."""
    if parameters is None:
        yield
        return
    tensors = named_tensors(layers)
    before = {name: p.detach().clone() for name, p in tensors.items()}
    try:
        _write(tensors, parameters)
        yield
    finally:
        _write(tensors, before)


def _write(parameters: Tensors, values: Mapping[str, Tensor]) -> None:
    # Autocast may have cached casts of the old values.
    torch.clear_autocast_cache()
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(values[name])
