"""Stopping a run between two steps on Ctrl-C or SIGTERM, so that no charged release is thrown away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]


@dataclass
class StopRequest:
    """Whether somebody asked the run to end.

    Attributes:
        requested: set by the first signal.
    """

    requested: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM; the second raises KeyboardInterrupt at once. Handlers are put back afterwards.

    Outside the main thread, where handlers cannot be set, signals keep their meaning.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
