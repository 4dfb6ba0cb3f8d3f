"""What a person sees while cells run side by side."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpkfc.studies.pool import Task

__all__ = ["StudyProgress"]

_LOG = logging.getLogger(__name__)


class StudyProgress:
    """A bar of finished cells, and a line for each that ends. Use it in a `with`.

    Cells that were stopped because the time was up are named afterwards, in a warning that is there without a bar too.

    Args:
        total: cells there will be, those that are done included; None where not known.
        done: cells that were done before.
        console: where to draw; nothing is drawn when it is None.
    """

    def __init__(self, total: int | None, *, done: int = 0, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=console or Console(quiet=True),
            disable=console is None,
        )
        self._bar = self._progress.add_task("cells", total=total, completed=done, now="")
        self._now: dict[str, str] = {}
        self._stopped: list[str] = []

    def started(self, task: Task) -> None:
        """A cell has begun."""
        self._show(task, "…")

    def evaluated(self, task: Task, number: int, accuracy: float) -> None:
        """A cell was judged on the way; for the operator only."""
        self._show(task, f"{100 * accuracy:.1f} %")

    def finished(self, task: Task, outcome: str) -> None:
        """A cell has ended."""
        self._end(task, outcome, advance=1)

    def lost(self, task: Task, reason: str) -> None:
        """A cell was lost to the machine: its place is still open."""
        self._end(task, f"lost to the machine: {reason}", advance=0)

    def out_of_time(self, task: Task) -> None:
        """A cell was stopped because the time was up."""
        self._end(task, "stopped, the time is up", advance=0)
        self._stopped.append(_what(task))

    def _end(self, task: Task, outcome: str, *, advance: int) -> None:
        self._now.pop(task.run.hash, None)
        self._progress.console.print(f"{_what(task)}: {outcome}", highlight=False)
        self._progress.update(self._bar, advance=advance, now=self._line())

    def _show(self, task: Task, text: str) -> None:
        self._now[task.run.hash] = f"{task.label or task.run.method} {text}"
        self._progress.update(self._bar, now=self._line())

    def _line(self) -> str:
        return " · ".join(self._now.values())

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._stopped:
            _LOG.warning(
                "the time given was up: stopped %s; what had finished is kept, and the same command goes on, which begins the "
                "stopped ones anew", "; ".join(self._stopped),
            )  # fmt: skip


def _what(task: Task) -> str:
    return f"{task.run.recipe} {task.label or task.run.method}, seed {task.run.seed}, {task.run.evaluate_on}"
