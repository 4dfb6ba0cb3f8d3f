"""The time that a study is given."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from dpkfc.studies.errors import StudyError

__all__ = ["Clock", "TimeIsUp", "minutes_left"]


class TimeIsUp(KeyboardInterrupt):
    """The time is up; no more of an error than Ctrl-C, so that nothing takes it for one."""


@dataclass
class Clock:
    """Whether a cell still fits into a time that begins when this is made, and how much of it is left.

    Attributes:
        minutes: the time; None is no bound.
        expected: seconds of a cell, None where not known.

    Raises:
        StudyError: minutes below zero, or no number of them.
    """

    minutes: float | None
    expected: Callable[[Any], float | None]
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise StudyError(f"--budget {self.minutes:g}: give minutes, 0 (nothing is run) or more; leave it out for no bound")

    def left(self) -> float | None:
        """Seconds, 0 when the time is up; None is no bound."""
        return None if self.minutes is None else max(0.0, 60 * self.minutes - (time.monotonic() - self.started))

    def fits(self, run: Any) -> bool:
        """Whether it would end in time, as far as is known."""
        left = self.left()
        return left is None or (left > 0 and (self.expected(run) or 0.0) <= left)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop what this process does inside when the time is up; outside the main thread, and on Windows, it goes on.

        Raises:
            TimeIsUp: it was.
        """
        left = self.left()
        if not left or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise TimeIsUp

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def minutes_left(budget: float | None) -> Callable[[], float | None]:
    """What is left of so many minutes that begin now; None is no bound.

    Raises:
        StudyError: as of `Clock`.
    """
    clock = Clock(budget, lambda run: None)

    def left() -> float | None:
        seconds = clock.left()
        return None if seconds is None else seconds / 60

    return left
