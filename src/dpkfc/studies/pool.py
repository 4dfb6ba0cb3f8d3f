"""Cells side by side: one spawned process and one numerical thread a core, and a source that says what comes next."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from dpkfc.studies.cell import Run
from dpkfc.studies.clock import Clock
from dpkfc.studies.errors import StudyError
from dpkfc.studies.worker import work

__all__ = ["Place", "Source", "Task", "Watcher", "cores", "drive", "worker_count"]

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
        """A cell that can start now and fits into the time left; None where there is none at the moment."""

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Whether a cell goes on after its evaluation."""

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """A cell has finished; `ended` where `report` ended it."""

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """A cell could not be run; `lost` where that was the machine's doing or the time was up, which says nothing of it."""


class Watcher(Protocol):
    """Who is shown how a study goes on."""

    def started(self, task: Task) -> None:
        """A cell has begun."""

    def evaluated(self, task: Task, number: int, accuracy: float) -> None:
        """A cell was judged on the way."""

    def finished(self, task: Task, outcome: str) -> None:
        """A cell has ended: its accuracy, or why there is none."""

    def lost(self, task: Task, reason: str) -> None:
        """A cell was lost to the machine: its place is still open."""

    def out_of_time(self, task: Task) -> None:
        """A cell was stopped because the time was up."""


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
        raise StudyError(f"workers = {asked}: every cell takes one core and there are {cores()}; choose 1 to {cores()}")
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
    watcher: Watcher | None = None,
) -> None:
    """Run what a source asks for until it asks for nothing more.

    Args:
        source: is called in this process alone.
        place: data and ledgers.
        workers: cells at once, each with one thread.
        budget_minutes: no cell is started whose expected time does not fit, and those that have begun are stopped when it is up,
            as by Ctrl-C; None is no bound.
        expected: seconds of a cell, None where not known.
        watcher: is shown what happens.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the workers have ended, and what had finished is with the source.
        StudyError: a worker process cannot be started, or the disk is full.
    """
    clock = Clock(budget_minutes, expected)
    crew: list[_Worker] = []
    with _sigterm_interrupts():
        try:
            while True:
                _hand_out(source, clock.fits, crew, lambda: _hire(place), watcher, workers=workers)
                busy = [worker for worker in crew if worker.task is not None]
                if not busy:
                    return
                ready = wait([worker.pipe for worker in busy], clock.left())
                if clock.left() == 0:
                    return _stop(busy, source, watcher)
                for worker in [worker for worker in busy if worker.pipe in ready]:
                    _listen(worker, source, watcher)
                crew = [worker for worker in crew if not worker.pipe.closed]
        finally:
            _dismiss(crew)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a study as Ctrl-C does: on its own it would leave the workers behind, each busy with its cell."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _hand_out(
    source: Source,
    fits: Callable[[Run], bool],
    crew: list[_Worker],
    hire: Callable[[], _Worker],
    watcher: Watcher | None,
    *,
    workers: int,
) -> None:
    while sum(worker.task is not None for worker in crew) < workers:
        task = source.next(fits)
        if task is None:
            return
        worker = next((worker for worker in crew if worker.task is None), None)
        if worker is None:
            worker = hire()
            crew.append(worker)
        worker.task = task
        with suppress(OSError):  # a dead one is noticed when it is listened to
            worker.pipe.send((task.run, task.watched))
        if watcher is not None:
            watcher.started(task)


def _stop(busy: Sequence[_Worker], source: Source, watcher: Watcher | None) -> None:
    """End cells because the time is up; one that ends by itself meanwhile is kept."""
    until = time.monotonic() + _PATIENCE
    for worker in busy:
        if worker.process.is_alive():
            worker.process.terminate()
    while left := [worker for worker in busy if worker.task is not None]:
        ready = wait([worker.pipe for worker in left], max(0.0, until - time.monotonic()))
        for worker in left:
            if worker.pipe in ready:
                _listen(worker, source, watcher, time_is_up=True)
            elif not ready:
                worker.process.kill()
                _leave(worker, source, watcher)
                worker.task = None


def _leave(worker: _Worker, source: Source, watcher: Watcher | None) -> None:
    """Give back the cell of a worker that is stopped in time."""
    assert worker.task is not None
    source.failed(worker.task, _TIME_IS_UP, lost=True)
    if watcher is not None:
        watcher.out_of_time(worker.task)


def _listen(worker: _Worker, source: Source, watcher: Watcher | None, *, time_is_up: bool = False) -> None:
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
    if kind == "judged":
        number, accuracy = content
        goes_on = source.report(task, number, accuracy)
        with suppress(OSError):
            worker.pipe.send(goes_on)
        if watcher is not None:
            watcher.evaluated(task, number, accuracy)
        return
    if kind == "full":
        raise StudyError(f"{content[0]}; what had finished before is kept, and the same command goes on from there")
    if time_is_up and kind in ("interrupted", "lost"):
        _leave(worker, source, watcher)
    elif kind == "interrupted":
        raise KeyboardInterrupt
    elif kind in ("failed", "lost"):
        _give_up(task, content[0], source, watcher, lost=kind == "lost")
    else:
        _keep(task, *content, source=source, watcher=watcher)
    worker.task = None


def _give_up(task: Task, reason: str, source: Source, watcher: Watcher | None, *, lost: bool) -> None:
    source.failed(task, reason, lost=lost)
    if watcher is not None:
        (watcher.lost if lost else watcher.finished)(task, reason)


def _keep(task: Task, row: dict[str, Any], ended: bool, *, source: Source, watcher: Watcher | None) -> None:
    source.done(task, row, ended)
    outcome = f"{100 * row['accuracy']:.2f} %" if "accuracy" in row else "measured"
    if watcher is not None:
        watcher.finished(task, outcome + (" (ended early)" if ended else ""))


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
        raise StudyError(f"a worker process cannot be started ({error.strerror or error}); give fewer --workers") from None
    theirs.close()
    return _Worker(process, ours)


def _dismiss(crew: list[_Worker]) -> None:
    for worker in crew:
        if worker.task is not None and worker.process.is_alive():
            worker.process.terminate()
        worker.pipe.close()
    for worker in crew:
        worker.process.join(_PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
