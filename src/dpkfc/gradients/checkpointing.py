"""Activation checkpointing, seen from the tape: parts of the model run a second time during the backward pass."""

from __future__ import annotations

import torch

__all__ = ["in_backward"]


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread, so that a forward call is a repeated one."""
    return torch._C._current_graph_task_id() != -1
