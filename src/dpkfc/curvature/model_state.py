"""Restore all that a pass over a probe changes in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpkfc.curvature.model_inputs import device_of_model

_PLAIN = (bool, int, float, str, type(None))


class _KeptWeights(TorchFunctionMode):
    """Copies a parameter before an operation of the body writes to it, as inference of RWKV does.

    A copy of all parameters would double their memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = set(model.parameters())
        self.copies: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and not name.endswith("__")
        is_write = is_write or name.startswith(("__i", "__set"))
        if is_write and args and isinstance(args[0], Tensor) and args[0] in self._parameters:
            self.copies.setdefault(args[0], args[0].detach().clone())
        return func(*args, **(kwargs or {}))


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; restore all that a pass changes in the model afterwards.

    That is modes and other plain attributes, buffers, parameters, and the global random state.
    """
    attributes = []
    buffers = []
    for module in model.modules():
        plain = {name: x for name, x in vars(module).items() if isinstance(x, _PLAIN)}
        attributes.append((module, plain))
        for name, buffer in module.named_buffers(recurse=False):
            before = buffer.detach().clone()
            buffers.append((module, name, buffer, before))
    device = device_of_model(model)
    devices = [device] if device.type == "cuda" else []
    kept = _KeptWeights(model)
    try:
        model.eval()
        # cuDNN differentiates recurrent layers in training mode only. Without dropout both modes
        # give the same result.
        for module, _ in attributes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        with (
            torch.random.fork_rng(devices=devices),
            torch.autocast(device.type, enabled=False),
            kept,
        ):
            yield
    finally:
        for module, plain in attributes:
            vars(module).update(plain)
        with torch.no_grad():
            for p, before in kept.copies.items():
                p.copy_(before)
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                # torch.equal does not take sparse tensors.
                is_sparse = buffer.layout != torch.strided
                if is_sparse or not torch.equal(buffer, before):
                    buffer.copy_(before)
