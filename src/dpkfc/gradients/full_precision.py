"""The precision in which norms and sums are taken, whatever the program has set for its passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
# The operations of torch that have a switch of their own.
_OPERATIONS: list[Any] = [torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn]
_OPERATIONS += [_MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn]


@contextmanager
def full_precision() -> Iterator[None]:
    """Take norms and sums in the precision that their bounds assume.

    The body runs without autocast, TF32 and bfloat16 inside float32. Whatever was set through
    torch's older switches (`allow_tf32`, `set_float32_matmul_precision`) or its newer ones
    (`fp32_precision`), on the CPU too, is restored afterwards.
    """
    with ExitStack() as undo:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                undo.enter_context(torch.autocast(device, enabled=False))
        for operation in _OPERATIONS:
            undo.callback(_restore_precision, operation, operation.fp32_precision)
        # Torch can read an older switch only where no newer one differs from it.
        with suppress(RuntimeError):
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            undo.callback(setattr, _CUDNN, "allow_tf32", _CUDNN.allow_tf32)
            _CUDNN.allow_tf32 = False
        for operation in _OPERATIONS:
            operation.fp32_precision = "ieee"
        yield


def same_autocast(device: str) -> torch.autocast:
    """Return a context in which operations on a device have the precision that they have now."""
    dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    # Casts of weights that `torch.func` wraps may not outlive it.
    return torch.autocast(device, dtype, enabled=is_enabled, cache_enabled=False)


def _restore_precision(operation: Any, value: str) -> None:
    """Restore a precision; an operation that took its backend's precision does so again."""
    operation.fp32_precision = "none"
    if operation.fp32_precision != value:
        operation.fp32_precision = value
