"""Which errors say that memory ran out."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

_MESSAGES = (
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed",
    "memoryerror",  # as another process tells it
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on an accelerator or on the CPU, here or on another process."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)
    )
