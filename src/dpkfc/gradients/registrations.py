"""Parametrizations that a forward function registers anew in every pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

REGISTERING = {"ParamWrapper"}
"""Classes whose forward function registers a parametrization anew in every pass.

`ParamWrapper` is peft's adapter of experts that share one parameter.
"""


def watch_registrations(
    model: nn.Module, note_self_set: Callable[[Tensor], None]
) -> AbstractContextManager[Any]:
    """Return a context that notes each `x.set_(x)`, by which torch registers a parametrization.

    It counts as a write, and changes nothing.
    """
    if REGISTERING.isdisjoint(type(m).__name__ for m in model.modules()):
        return nullcontext()
    return _SelfSets(note_self_set)


class _SelfSets(TorchDispatchMode):
    def __init__(self, note_self_set: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note_self_set = note_self_set

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            self._note_self_set(args[0])
        return func(*args, **(kwargs or {}))
