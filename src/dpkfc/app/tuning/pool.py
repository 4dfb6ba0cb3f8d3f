"""Run many cells side by side: one process and one numerical thread a core."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

from dpkfc._checks import show_value
from dpkfc.app.tuning.runs import Place, Row, Run, StudyError
from dpkfc.app.tuning.study_progress import StudyProgress, Task
from dpkfc.app.tuning.worker import PATIENCE, Outcome, begin_work, run_one

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_TIME_IS_UP = "stopped when the time given was up; it begins anew"
_KILLED = "its process ended (killed, or out of memory)"
# Whether a cell ends within the time left, as far as is known.
Fits = Callable[[Run], bool]


class Source(Protocol):
    """What a study wants to be run, one cell after the other."""

    def next(self, fits: Fits) -> Task | None:
        """Return a cell that can start now and fits into the time left, or None."""

    def take_row(self, task: Task, row: Row, ended: bool) -> None:
        """Take the row of a cell that has finished; `ended` where its judge ended it."""

    def take_failure(self, task: Task, reason: str, *, lost: bool) -> None:
        """Record a cell that could not be run.

        `lost` says that the machine failed or the time was up, which says nothing about the cell.
        """


def worker_count(count: int | None) -> int:
    """Return how many cells run at once: every core, or as many as asked for.

    Raises:
        StudyError: less than one, or more than there are cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        # The cores that this process may use.
        cores = len(os.sched_getaffinity(0))
    if count is None:
        return cores
    if not 1 <= count <= cores:
        raise StudyError(
            f"workers = {show_value(count, 20)}: every cell takes one core and there are"
            f" {cores}; choose 1 to {cores}"
        )
    return count


def end_of(budget_minutes: float | None) -> float:
    """Return when a budget that begins now is spent, by `time.monotonic`; None means no bound.

    Raises:
        StudyError: minutes below zero, or not a number.
    """
    if budget_minutes is None:
        return math.inf
    if not (math.isfinite(budget_minutes) and budget_minutes >= 0):
        raise StudyError(
            f"--budget {budget_minutes:g}: give minutes, 0 (nothing is run) or more; leave it out"
            " for no bound"
        )
    return time.monotonic() + 60 * budget_minutes


def drive(
    source: Source,
    place: Place,
    *,
    workers: int = 1,
    end: float = math.inf,
    expected: Callable[[Run], float | None] = lambda run: None,
    progress: StudyProgress | None = None,
) -> None:
    """Run what a source asks for until it asks for nothing more.

    Args:
        source: is called in this process alone.
        place: data and ledgers.
        workers: cells at once, each with one thread.
        end: of `end_of`: no cell is started whose expected time does not fit, and cells that still
            run then are stopped, as by Ctrl-C.
        expected: seconds of a cell, None where not known.
        progress: shows what happens.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the workers have ended, and what had finished is with
            the source.
        StudyError: a worker process cannot be started, or the disk is full.
    """
    crew = _Crew(source, place, workers, end, progress or StudyProgress(None))

    def fits(run: Run) -> bool:
        left = end - time.monotonic()
        return left > 0 and (expected(run) or 0.0) <= left

    with _interrupt_on_sigterm(), _limit_threads():
        try:
            while True:
                while crew.has_room and (task := source.next(fits)) is not None:
                    crew.start(task)
                if not crew.running:
                    return
                crew.wait()
        finally:
            crew.dismiss()


class _Crew:
    """The worker processes of a study and the cells that they run."""

    def __init__(
        self, source: Source, place: Place, workers: int, end: float, progress: StudyProgress
    ) -> None:
        self.source = source
        self.place = place
        self.workers = workers
        self.end = end
        self.progress = progress
        self.running: dict[Future[Outcome], Task] = {}
        self._others = set(multiprocessing.active_children())
        self._executor = self._hire()

    def _hire(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, initializer=begin_work)

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.workers

    def start(self, task: Task) -> None:
        """Give a cell to a worker, in new processes where one of the old ones was killed."""
        arguments = (task.run, self.place, task.judge, self.end)
        try:
            try:
                future = self._executor.submit(run_one, *arguments)
            except BrokenProcessPool:
                self._executor = self._hire()
                future = self._executor.submit(run_one, *arguments)
        except OSError as error:
            self.source.take_failure(task, str(error), lost=True)
            raise StudyError(
                f"a worker process cannot be started ({error.strerror or error}); give fewer"
                " --workers"
            ) from None
        self.running[future] = task
        self.progress.show_start(task)

    def wait(self) -> None:
        """Take the outcomes of the cells that end next.

        Raises:
            KeyboardInterrupt: a signal has ended a cell, and not because the time was up.
            StudyError: the disk is full.
        """
        patience = None if math.isinf(self.end) else self.end + PATIENCE - time.monotonic()
        ended = wait(self.running, patience, FIRST_COMPLETED).done
        if not ended:
            # The time is up, and a worker did not hear it.
            for child in self._children():
                child.kill()
            ended = wait(self.running).done
        for future in ended:
            task = self.running.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                outcome = Outcome("lost", reason=_KILLED)
            self._settle(task, outcome)

    def _settle(self, task: Task, outcome: Outcome) -> None:
        if outcome.kind in ("stopped", "lost") and time.monotonic() >= self.end:
            self.source.take_failure(task, _TIME_IS_UP, lost=True)
            self.progress.show_timeout(task)
        elif outcome.kind == "stopped":
            raise KeyboardInterrupt
        elif outcome.kind == "full":
            raise StudyError(
                f"{outcome.reason}; what had finished before is kept, and the same command goes on"
                " from there"
            )
        elif outcome.row is not None:
            ended = outcome.kind == "ended"
            self.source.take_row(task, outcome.row, ended)
            accuracy = outcome.row.get("accuracy")
            text = "measured" if accuracy is None else f"{100 * accuracy:.2f} %"
            self.progress.show_end(task, f"{text} (ended early)" if ended else text)
        else:
            is_lost = outcome.kind == "lost"
            self.source.take_failure(task, outcome.reason, lost=is_lost)
            text = f"lost to the machine: {outcome.reason}" if is_lost else outcome.reason
            self.progress.show_end(task, text, count=not is_lost)

    def _children(self) -> list[Any]:
        return [child for child in multiprocessing.active_children() if child not in self._others]

    def dismiss(self) -> None:
        """End all workers; a cell that still runs ends between two steps."""
        if self.running:
            for child in self._children():
                child.terminate()
            if wait(self.running, PATIENCE).not_done:
                for child in self._children():
                    child.kill()
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """End a study at SIGTERM as at Ctrl-C.

    Otherwise SIGTERM would leave the workers behind, each busy with its cell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Give processes that start inside one numerical thread each."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name in _THREADS:
            del os.environ[name]
        os.environ.update(before)
