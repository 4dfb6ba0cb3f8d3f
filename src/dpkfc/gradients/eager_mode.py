"""Run the functions that `torch.compile` has compiled as they were written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch


def is_in_backward() -> bool:
    """Return whether a backward pass is running in this thread.

    A forward call inside it is a repeated one (activation checkpointing).
    """
    return torch._C._current_graph_task_id() != -1


_COMPILER = "torch._dynamo"


class _Stance:
    """The setting of torch while any pass is followed.

    Followed passes run uncompiled: a compiled graph shows no call of a layer. Scripts may leave
    passes open and end them in any order.
    """

    passes = 0
    eager: Any = None


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run the functions that `torch.compile` has compiled as they were written, inside the body.

    Without the compiler's module nothing was compiled, and importing it takes as long as torch.

    Raises:
        RuntimeError: the body brought the compiler and ran what it compiled.
    """
    has_compiler = _COMPILER in sys.modules
    if _Stance.eager is None and has_compiler:
        _Stance.eager = torch.compiler.set_stance("force_eager")
    _Stance.passes += 1
    try:
        yield
    finally:
        _Stance.passes -= 1
        if _Stance.passes == 0 and _Stance.eager is not None:
            _Stance.eager.__exit__(None, None, None)
            _Stance.eager = None
    if not has_compiler and _COMPILER in sys.modules:
        counters = import_module(f"{_COMPILER}.utils").counters
        if counters["frames"]["total"]:
            raise RuntimeError(
                "the forward pass called torch.compile; compile the model before the session begins"
            )
