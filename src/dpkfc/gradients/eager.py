"""Passes that are followed run uncompiled: a compiled graph shows no call of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["run_eagerly"]


class _Stance:
    """The setting of torch while any pass is followed. Scripts may leave passes open and end them in any order."""

    def __init__(self) -> None:
        self._passes = 0
        self._eager: Any = None

    def begin(self) -> None:
        if self._passes == 0:
            self._eager = torch.compiler.set_stance("force_eager")
        self._passes += 1

    def end(self) -> None:
        self._passes -= 1
        if self._passes == 0:
            self._eager.__exit__(None, None, None)


_STANCE = _Stance()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run the functions that `torch.compile` has compiled as they were written, inside the body."""
    _STANCE.begin()
    try:
        yield
    finally:
        _STANCE.end()
