"""Show the line that a person watches while a model trains."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpkfc.report.text import round_up

_Part = TypeVar("_Part")
_SMOOTHING = 0.1
_SECONDS_A_LINE = 10.0


def track(parts: Iterable[_Part], label: str) -> Iterable[_Part]:
    """Return parts behind a bar on the terminal of stderr; elsewhere nothing is drawn."""
    console = Console(stderr=True)
    return bars.track(
        parts, label, console=console, transient=True, disable=not console.is_terminal
    )


class TrainingProgress:
    """Show step, ε spent so far, clipped fraction, examples per second and time left.

    The clipped fraction and the speed are computed from private batches: they are for the operator
    only. Use it in a `with`.

    Args:
        total: steps of the plan.
        done: steps that this run took before it was continued.
        console: where to draw; nothing is drawn when it is None.
        label: name of the run.
    """

    def __init__(
        self, total: int, *, done: int = 0, console: Console | None = None, label: str = "training"
    ) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[cyan]ε ≤ {task.fields[epsilon]}"),
            TextColumn("clipped {task.fields[clipped]}"),
            TextColumn("{task.fields[speed]} examples/s"),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(compact=True),
            console=console or Console(quiet=True),
            disable=console is None or not console.is_terminal,
        )
        # Without a terminal a line every few seconds takes the place of the bar.
        self._lines = console if console is not None and not console.is_terminal else None
        self._begun = self._printed = time.perf_counter()
        self._first, self._done, self._total = done, done, total
        self._task = self._progress.add_task(
            label,
            total=total,
            completed=done,
            epsilon="–",
            clipped="–",
            speed="–",
            accuracy="",
        )
        self._speed: float | None = None
        self._last = time.perf_counter()

    def advance(self, *, epsilon: float, clipped_fraction: float, batch_size: int) -> None:
        """Show one more step.

        Args:
            epsilon: ε spent, or an upper bound of it.
            clipped_fraction: fraction of the batch that was clipped.
            batch_size: realised batch.
        """
        now = time.perf_counter()
        speed = batch_size / max(now - self._last, 1e-9)
        before = speed if self._speed is None else self._speed
        self._speed = (1 - _SMOOTHING) * before + _SMOOTHING * speed
        self._last = now
        self._progress.update(
            self._task,
            advance=1,
            epsilon=round_up(epsilon),
            clipped=f"{100 * clipped_fraction:3.0f} %",
            speed=f"{self._speed:,.0f}",
        )
        self._done += 1
        if self._lines is not None and now - self._printed >= _SECONDS_A_LINE:
            self._printed = now
            pace = (now - self._begun) / (self._done - self._first)
            left = timedelta(seconds=round(pace * (self._total - self._done)))
            self._lines.print(
                f"step {self._done:,} of {self._total:,}, ε ≤ {round_up(epsilon)}, {left} left",
                markup=False,
                highlight=False,
            )

    def show_slow_operation(self, operation: str) -> None:
        """Show that examples are differentiated one at a time, and which operation makes it so."""
        label = self._progress.tasks[self._task].description
        self._progress.update(
            self._task, description=f"{label} [yellow](one example at a time: {operation})"
        )

    def accuracy(self, value: float, measured_on: str) -> None:
        """Show the accuracy that was measured last; the time it took does not count as training."""
        self._last = time.perf_counter()
        share = f"{100 * value:.1f} %" if math.isfinite(value) else "–"
        self._progress.update(self._task, accuracy=f"[green]{measured_on} {share}")

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
