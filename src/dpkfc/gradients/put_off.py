"""Questions about values, asked of a card all at once: the host waits for it once a micro-batch instead of once a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["answered", "any_of", "is_waited_for", "put_off"]

_ASKED: ContextVar[list[Tensor] | None] = ContextVar("asked", default=None)


def is_waited_for(x: Tensor) -> bool:
    """Whether reading a number of x makes the host wait for a device that it otherwise runs ahead of."""
    return x.device.type != "cpu"


def any_of(flags: Tensor) -> bool:
    """Whether any of them is set; inside `put_off`, and not on the host, it answers no and leaves the question open."""
    asked = _ASKED.get()
    if asked is None or not is_waited_for(flags):
        return bool(flags.any())
    asked.append(flags.any())
    return False


@contextmanager
def put_off() -> Iterator[list[Tensor]]:
    """The questions that `any_of` leaves open in here, each one flag `[]`; what was computed holds where all answers are no."""
    asked: list[Tensor] = []
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def answered(questions: Sequence[Tensor]) -> list[bool]:
    """The answers, fetched in one transfer."""
    return [bool(x) for x in torch.stack([*questions]).tolist()] if questions else []
