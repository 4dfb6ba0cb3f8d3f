"""What a person sees while a study runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpkfc.app.tuning.runs import Judge, Run

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A cell that is to be run.

    Attributes:
        run: the cell.
        tag: anything by which its source knows it again.
        judge: sees the evaluations in the worker process and may end the cell; can be pickled.
        label: what a person is shown; empty for the method.
    """

    run: Run
    tag: Any = None
    judge: Judge | None = None
    label: str = ""

    def describe(self) -> str:
        """Return the cell in words."""
        run = self.run
        return f"{run.recipe} {self.label or run.method}, seed {run.seed}, {run.evaluate_on}"


class StudyProgress:
    """A bar of finished cells, and a line for each that ends. Use it in a `with`.

    A warning, which comes without a bar too, names the cells that were stopped when the time was
    up.

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
        self._running: dict[str, str] = {}
        self._stopped: list[str] = []

    def show_start(self, task: Task) -> None:
        """Show that a cell has started."""
        self._running[task.run.hash] = task.label or task.run.method
        self._progress.update(self._bar, now=" · ".join(self._running.values()))

    def show_end(self, task: Task, outcome: str, *, count: bool = True) -> None:
        """Show how a cell has ended; where it does not count, its place is still open."""
        self._running.pop(task.run.hash, None)
        self._progress.console.print(f"{task.describe()}: {outcome}", highlight=False)
        now = " · ".join(self._running.values())
        self._progress.update(self._bar, advance=int(count), now=now)

    def show_timeout(self, task: Task) -> None:
        """Show that a cell was stopped because the time was up."""
        self.show_end(task, "stopped, the time is up", count=False)
        self._stopped.append(task.describe())

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._stopped:
            _LOG.warning(
                "the time given was up: stopped %s; what had finished is kept, and the same command"
                " goes on, which begins the stopped ones anew",
                "; ".join(self._stopped),
            )
