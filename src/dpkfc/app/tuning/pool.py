"""Run cells side by side, in one process and one numerical thread per core.

A source says which cell comes next.
"""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpkfc.app.datasets import DatasetError
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.run_folder import RunFolderError
from dpkfc.app.tuning.runs import Ended, Run, Store, StudyError
from dpkfc.checkpoint import CheckpointError
from dpkfc.memory import keep_freed_memory
from dpkfc.privacy.ledger import LedgerError

# --------------------------------------------------------------------------------------------------
# What one worker of a study does: cells, one after the other, and what became of each as plain
# values.

# what no setting of a cell brings about
_MACHINE = (
    OSError,
    MemoryError,
    CheckpointError,
    LedgerError,
    RunFolderError,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of a disk that takes nothing more


def work(pipe: Connection, folder: Path, data_dir: str) -> None:
    """Run what comes through a pipe, until it closes.

    While a cell trains, a signal ends it between two steps.

    Answers: ("judged", number, accuracy) wants to hear whether the cell goes on; ("done", row,
    ended), ("failed", reason), ("lost", reason) and ("full", reason), the last two the machine's
    doing, and ("interrupted",) are the end of one.

    Args:
        pipe: to the study.
        folder: run folders are made in `runs` below it, and public examples kept in `public`.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
    """
    import warnings

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("dpkfc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # what a plan has to warn of stands in the row
    while True:
        try:
            run, watched = pipe.recv()
            pipe.send(_outcome(run, watched, pipe, folder, data_dir))
        except (EOFError, OSError):
            return  # the study has ended


def _outcome(
    run: Run, watched: bool, pipe: Connection, folder: Path, data_dir: str
) -> tuple[Any, ...]:
    def report(number: int, accuracy: float) -> bool:
        pipe.send(("judged", number, accuracy))
        return bool(pipe.recv())

    try:
        row = run.measuring()(
            run,
            folder / "runs",
            data_dir=data_dir,
            public=folder / "public",
            report=report if watched else None,
        )
        return "done", row, False
    except Ended as ended:
        return ("done", ended.row, True) if ended.asked else ("interrupted",)
    except (EOFError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, (ValueError, CheckpointError, LedgerError)):
            text = f"{type(error).__name__}: {text}"
        if not isinstance(error, _MACHINE):
            return "failed", text
        return "full" if _is_full(error) else "lost", text


def _is_full(error: BaseException | None) -> bool:
    """Return whether a full disk is behind an error, whatever was made of it on the way."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(
            os.strerror(number) in str(error) for number in _FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


# --------------------------------------------------------------------------------------------------
# The time that a study is given.


class TimeIsUp(KeyboardInterrupt):
    """The time is up; no more of an error than Ctrl-C, so that nothing takes it for one."""


@dataclass
class Clock:
    """Says whether a cell still fits into the time left since this was made.

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
            raise StudyError(
                f"--budget {self.minutes:g}: give minutes, 0 (nothing is run) or more; leave it"
                " out for no bound"
            )

    def seconds_left(self) -> float | None:
        """Seconds, 0 when the time is up; None is no bound."""
        if self.minutes is None:
            return None
        return max(0.0, 60 * self.minutes - (time.monotonic() - self.started))

    def fits(self, run: Any) -> bool:
        """Whether it would end in time, as far as is known."""
        left = self.seconds_left()
        return left is None or (left > 0 and (self.expected(run) or 0.0) <= left)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop what this process does inside when the time is up.

        Outside the main thread, and on Windows, it goes on.

        Raises:
            TimeIsUp: it was.
        """
        left = self.seconds_left()
        if (
            not left
            or threading.current_thread() is not threading.main_thread()
            or not hasattr(signal, "setitimer")
        ):
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

    def minutes() -> float | None:
        seconds = clock.seconds_left()
        return None if seconds is None else seconds / 60

    return minutes


# --------------------------------------------------------------------------------------------------

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PATIENCE = 10.0  # seconds that a worker has to end
_TIME_IS_UP = "stopped when the time given was up; it begins anew"


@dataclass(frozen=True)
class Place:
    """Where cells find data and leave their ledgers.

    Attributes:
        folder: run folders are made in `runs` below it.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
    """

    folder: Path
    data_dir: str = ""


@dataclass(frozen=True)
class Task:
    """A cell that is to be run.

    Attributes:
        run: the cell.
        tag: anything by which its source knows it again.
        watched: whether the source wants to see its evaluations.
        label: what a person is shown; empty for the method.
    """

    run: Run
    tag: Any = None
    watched: bool = False
    label: str = ""


class Source(Protocol):
    """What a study wants to be run, one cell after the other."""

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """Return a cell that can start now and fits into the time left, or None."""

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Whether a cell goes on after its evaluation."""

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """A cell has finished; `ended` where `report` ended it."""

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Record a cell that could not be run.

        `lost` says that the machine failed or the time was up, which says nothing of the cell.
        """


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int | None) -> int:
    """How many cells run at once: every core, or as many as asked for.

    Raises:
        StudyError: less than one, or more than there are cores.
    """
    if asked is None:
        return cores()
    if not 1 <= asked <= cores():
        raise StudyError(
            f"workers = {asked}: every cell takes one core and there are {cores()}; choose 1 to"
            f" {cores()}"
        )
    return asked


@dataclass
class _Worker:
    """A process and the cell it is at."""

    process: Any
    pipe: Connection
    task: Task | None = None


def drive(
    source: Source,
    place: Place,
    *,
    workers: int = 1,
    budget_minutes: float | None = None,
    expected: Callable[[Run], float | None] = lambda run: None,
    watcher: StudyProgress | None = None,
) -> None:
    """Run what a source asks for until it asks for nothing more.

    Args:
        source: is called in this process alone.
        place: data and ledgers.
        workers: cells at once, each with one thread.
        budget_minutes: no cell is started whose expected time does not fit, and started cells are
            stopped when it is up, as by Ctrl-C; None is no bound.
        expected: seconds of a cell, None where not known.
        watcher: is shown what happens.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the workers have ended, and what had finished is with
            the source.
        StudyError: a worker process cannot be started, or the disk is full.
    """
    clock = Clock(budget_minutes, expected)
    crew = _Crew(source, place, watcher or StudyProgress(None))
    with _sigterm_interrupts():
        try:
            while True:
                crew.hand_out(clock.fits, workers)
                busy = crew.busy
                if not busy:
                    return
                ready = wait([worker.pipe for worker in busy], clock.seconds_left())
                if clock.seconds_left() == 0:
                    return crew.stop()
                for worker in busy:
                    if worker.pipe in ready:
                        crew.listen(worker)
        finally:
            crew.dismiss()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
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


class _Crew:
    """The workers of a study, its source, and who is shown how it goes on."""

    def __init__(self, source: Source, place: Place, watcher: StudyProgress) -> None:
        self._source = source
        self._place = place
        self._watcher = watcher
        self._workers: list[_Worker] = []

    @property
    def busy(self) -> list[_Worker]:
        """Workers that have a cell."""
        return [worker for worker in self._workers if worker.task is not None]

    def hand_out(self, fits: Callable[[Run], bool], workers: int) -> None:
        """Give cells to so many workers, as long as the source has one that fits."""
        while len(self.busy) < workers:
            task = self._source.next(fits)
            if task is None:
                return
            worker = next((worker for worker in self._workers if worker.task is None), None)
            if worker is None:
                worker = _hire(self._place)
                self._workers.append(worker)
            worker.task = task
            with suppress(OSError):  # a dead one is noticed when it is listened to
                worker.pipe.send((task.run, task.watched))
            self._watcher.started(task)

    def stop(self) -> None:
        """End cells because the time is up; one that ends by itself meanwhile is kept."""
        until = time.monotonic() + _PATIENCE
        for worker in self.busy:
            if worker.process.is_alive():
                worker.process.terminate()
        while left := self.busy:
            ready = wait([worker.pipe for worker in left], max(0.0, until - time.monotonic()))
            for worker in left:
                if worker.pipe in ready:
                    self.listen(worker, time_is_up=True)
                elif not ready:
                    worker.process.kill()
                    self._leave(worker)

    def _leave(self, worker: _Worker) -> None:
        """Give back the cell of a worker that is stopped in time."""
        task, worker.task = worker.task, None
        assert task is not None
        self._source.failed(task, _TIME_IS_UP, lost=True)
        self._watcher.out_of_time(task)

    def listen(self, worker: _Worker, *, time_is_up: bool = False) -> None:
        """Hear what a worker has to say.

        Raises:
            KeyboardInterrupt: a signal has ended its cell, and not because the time was up.
            StudyError: the disk is full.
        """
        task = worker.task
        assert task is not None
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):
            kind, content = "lost", ["its process ended (killed, or out of memory)"]
            worker.pipe.close()
            self._workers.remove(worker)
        if kind == "judged":
            goes_on = self._source.report(task, *content)
            with suppress(OSError):
                worker.pipe.send(goes_on)
            self._watcher.evaluated(task, *content)
            return
        if kind == "full":
            raise StudyError(
                f"{content[0]}; what had finished before is kept, and the same command goes on from"
                " there"
            )
        if time_is_up and kind in ("interrupted", "lost"):
            self._leave(worker)
            return
        if kind == "interrupted":
            raise KeyboardInterrupt
        if kind == "done":
            self._keep(task, *content)
        else:
            self._source.failed(task, content[0], lost=kind == "lost")
            show = self._watcher.lost if kind == "lost" else self._watcher.finished
            show(task, content[0])
        worker.task = None

    def _keep(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        self._source.done(task, row, ended)
        outcome = f"{100 * row['accuracy']:.2f} %" if "accuracy" in row else "measured"
        self._watcher.finished(task, outcome + (" (ended early)" if ended else ""))

    def dismiss(self) -> None:
        """End all workers."""
        for worker in self._workers:
            if worker.task is not None and worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(_PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that start inside have one numerical thread each."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _hire(place: Place) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, place.folder, place.data_dir), daemon=True)
    try:
        with _one_thread():
            process.start()
    except OSError as error:
        raise StudyError(
            f"a worker process cannot be started ({error.strerror or error}); give fewer --workers"
        ) from None
    theirs.close()
    return _Worker(process, ours)


# --------------------------------------------------------------------------------------------------
# What a person sees while cells run side by side.

_LOG = logging.getLogger(__name__)


class StudyProgress:
    """A bar of finished cells, and a line for each that ends. Use it in a `with`.

    Cells that were stopped because the time was up are named afterwards, in a warning that is there
    without a bar too.

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
        """A cell has started."""
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

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._stopped:
            _LOG.warning(
                "the time given was up: stopped %s; what had finished is kept, and the same command"
                " goes on, which begins the stopped ones anew",
                "; ".join(self._stopped),
            )


def _what(task: Task) -> str:
    return (
        f"{task.run.recipe} {task.label or task.run.method}, seed {task.run.seed},"
        f" {task.run.evaluate_on}"
    )


# --------------------------------------------------------------------------------------------------
# Cells in a fixed order as a source of the pool: what tables and figures are made of.


class Listed:
    """Cells one after the other, each run once and none that is known.

    Args:
        tasks: in order; equal runs are one.
        store: takes every run, and knows those that it holds.
        known: whether a run was made elsewhere.

    Attributes:
        total: different cells.
        done_before: of these, known from the start.
        failures: why a run could not be made, by its hash.
    """

    def __init__(
        self, tasks: Iterable[Task], store: Store, known: Callable[[Run], bool] = lambda run: False
    ) -> None:
        self._store = store
        wanted = {task.run.hash: task for task in tasks}
        self._left = [
            task for task in wanted.values() if store.get(task.run) is None and not known(task.run)
        ]
        self.total, self.done_before = len(wanted), len(wanted) - len(self._left)
        self.failures: dict[str, str] = {}

    @property
    def recipes(self) -> list[str]:
        """Of the cells that are left."""
        return list(dict.fromkeys(task.run.recipe for task in self._left))

    def leave_out(self, recipe: str, reason: str) -> None:
        """Do not run the cells of a recipe."""
        self.failures |= {task.run.hash: reason for task in self._left if task.run.recipe == recipe}
        self._left = [task for task in self._left if task.run.recipe != recipe]

    def leave_out_what_has_no_data(self, data_dir: str, *, parts: bool = False) -> None:
        """Read every data set once; cells without data say so, and the others are run.

        Args:
            data_dir: folder of the data sets.
            parts: whether files that hold a part of a set will do; otherwise that is said in its
                cells too.
        """
        for recipe in self.recipes:
            try:
                part = (
                    find_recipe(recipe)
                    .data(run_config({"recipe": recipe, "data_dir": data_dir}))
                    .part
                )
            except DatasetError as error:
                self.leave_out(recipe, str(error))
                continue
            if part and not parts:
                self.leave_out(recipe, f"the files hold {part}, and the published number is of all")

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """The first cell that fits."""
        found = next((task for task in self._left if fits(task.run)), None)
        if found is not None:
            self._left.remove(found)
        return found

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Nothing that is seen on the way ends a run."""
        return True

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """Keep a run."""
        self._store.put(task.run, row)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Say so; the next call tries it again, whosever doing it was."""
        self.failures[task.run.hash] = reason
