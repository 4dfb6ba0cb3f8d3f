"""The mode in which a model is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the body with every module in eval mode, and restore the modes afterwards.

    Dropout would differ between two passes. Recurrent layers without dropout, which compute the
    same in both modes, are in training mode: cuDNN differentiates them in no other.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        yield
    finally:
        for module, mode in modes:
            module.training = mode
