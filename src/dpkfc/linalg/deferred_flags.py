"""Deferred flags: questions about the values of a GPU tensor, read all at once.

So the host waits for the GPU once a micro-batch and not once a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_DEFERRED: ContextVar[list[Tensor] | None] = ContextVar("deferred", default=None)


def is_on_accelerator(x: Tensor) -> bool:
    """Return whether reading a number of x makes the host wait for another device."""
    return x.device.type != "cpu"


def is_any_set(flags: Tensor) -> bool:
    """Return whether any flag is set.

    Inside `defer_flags` it returns False for flags on another device and stores the question.
    """
    deferred = _DEFERRED.get()
    if deferred is None or not is_on_accelerator(flags):
        return bool(flags.any())
    deferred.append(flags.any())
    return False


@contextmanager
def defer_flags() -> Iterator[list[Tensor]]:
    """Collect the questions that `is_any_set` leaves open in the body, each one flag `[]`.

    Results of the body are valid where every flag turns out to be False.
    """
    deferred: list[Tensor] = []
    token = _DEFERRED.set(deferred)
    try:
        yield deferred
    finally:
        _DEFERRED.reset(token)
