"""Activation checkpointing, seen from the tape: parts of the model run a second time during the backward pass.

`torch.utils.checkpoint` with use_reentrant=False keeps the graph of the first pass, in which the tape has noted its edges,
and only computes the saved tensors anew; the tape's hooks then do again what they did, and record nothing. With
use_reentrant=True the first pass leaves no graph, and the second one differentiates parameters itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from dpkfc.gradients.layers import Layer

__all__ = ["clear_checkpoint_errors", "in_backward", "refuse_hidden"]

_FIX = (
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); in transformers, "
    'gradient_checkpointing_kwargs={"use_reentrant": False}'
)


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, so that a forward call is a repeated one."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def clear_checkpoint_errors() -> Iterator[None]:
    """Say what to do where torch refuses a reentrant checkpoint in a backward pass to chosen tensors.

    Raises:
        ValueError: naming the fix.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            f"the model is checkpointed with use_reentrant=True, which hides its layers; {_FIX}"
        ) from error


def refuse_hidden(hidden: Mapping[str, Layer], recorded: set[str]) -> None:
    """Refuse layers that were called without a graph and never with one: they would be trained by noise alone.

    Args:
        hidden: layers called while gradients were disabled.
        recorded: names of the layers called while they were enabled.

    Raises:
        ValueError: naming the first such layer and the fix.
    """
    for name, layer in hidden.items():
        if name not in recorded:
            raise ValueError(
                f"layer '{layer.display_name}' is trainable, but was called with gradients disabled: under torch.no_grad() "
                "(then freeze it with requires_grad_(False)), or in a block that is checkpointed with use_reentrant=True "
                f"(then {_FIX})"
            )
