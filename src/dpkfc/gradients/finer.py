"""The check of single examples once more in float64, where float32 says that they differ.

A batch of two and a batch of one take different kernels. In a deep network with kinks (ReLU) a few of the millions of
activations lie within a rounding error of the kink and fall on either side, which moves a gradient by percents although
nothing mixes examples. In float64 that does not happen, and real mixing stays.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.apart import doubled
from dpkfc.gradients.layers import Layer, find_layers
from dpkfc.gradients.verify import check_per_example_gradients

__all__ = ["check_alone"]

_log = logging.getLogger(__name__)

_KINKS = 0.1  # of a gradient: what activations on either side of a kink may make of it


def check_alone(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    pair: Any,
    singles: Sequence[Any],
    *,
    comparable: bool = True,
) -> bool:
    """As `check_per_example_gradients`, which it takes from; a copy of the model in float64 has the last word.

    Raises:
        ValueError: as there, where float64 does not say otherwise, the copy cannot be made or run, or a gradient differs by
            more than rounding at kinks explains.
    """
    try:
        return check_per_example_gradients(model, layers, loss_fn, pair, singles, comparable=comparable)
    except ValueError:
        found = _in_double(model, loss_fn, pair, singles)
        if found is None:
            raise
        check_per_example_gradients(model, layers, loss_fn, pair, singles, slack=_KINKS)
        _log.debug("gradients of single examples agree in float64, and in float32 but for rounding at kinks")
        return found


def _in_double(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], pair: Any, singles: Sequence[Any]
) -> bool | None:
    if all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point()):
        return None
    try:
        twin = copy.deepcopy(model).double()
        return check_per_example_gradients(twin, find_layers(twin), loss_fn, doubled(pair), [doubled(x) for x in singles])
    except Exception as error:  # noqa: BLE001 - the first error stands; the text of this one may hold private values
        _log.debug("the check in float64 did not pass either: %s", type(error).__name__)
        return None

