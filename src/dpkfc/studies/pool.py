"""Cells side by side: one spawned process and one numerical thread a core, and a source that says what comes next."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from dpkfc.allocator import keep_freed_memory
from dpkfc.studies.cell import Ended, Run
from dpkfc.studies.errors import StudyError

__all__ = ["Clock", "Place", "Source", "Task", "Watcher", "cores", "drive", "worker_count"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PATIENCE = 10.0  # seconds that a worker has to end


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

    def failed(self, task: Task, reason: str) -> None:
        """A cell could not be run."""


class Watcher(Protocol):
    """Who is shown how a study goes on."""

    def started(self, task: Task) -> None:
        """A cell has begun."""

    def evaluated(self, task: Task, number: int, accuracy: float) -> None:
        """A cell was judged on the way."""

    def finished(self, task: Task, outcome: str) -> None:
        """A cell has ended: its accuracy, or why there is none."""


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


@dataclass
class Clock:
    """Whether a cell still fits into a time that begins when this is made.

    Attributes:
        minutes: the time; None is no bound.
        expected: seconds of a cell, None where not known.
    """

    minutes: float | None
    expected: Callable[[Any], float | None]
    started: float = field(default_factory=time.monotonic)

    def fits(self, run: Any) -> bool:
        """Whether it would end in time, as far as is known."""
        if self.minutes is None:
            return True
        left = 60 * self.minutes - (time.monotonic() - self.started)
        return left > 0 and (self.expected(run) or 0.0) <= left


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
        budget_minutes: no cell is started whose expected time does not fit; None is no bound.
        expected: seconds of a cell, None where not known.
        watcher: is shown what happens.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the workers have ended, and what had finished is with the source.
        StudyError: a worker process cannot be started.
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
                for pipe in wait([worker.pipe for worker in busy]):
                    worker = next(worker for worker in busy if worker.pipe is pipe)
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
        worker.pipe.send((task.run, task.watched))
        if watcher is not None:
            watcher.started(task)


def _listen(worker: _Worker, source: Source, watcher: Watcher | None) -> None:
    task = worker.task
    assert task is not None
    try:
        kind, *content = worker.pipe.recv()
    except (EOFError, OSError):
        kind, content = "failed", ["its process ended (killed, or out of memory)"]
        worker.pipe.close()
    if kind == "judged":
        number, accuracy = content
        worker.pipe.send(source.report(task, number, accuracy))
        if watcher is not None:
            watcher.evaluated(task, number, accuracy)
        return
    worker.task = None
    if kind == "interrupted":
        raise KeyboardInterrupt
    if kind == "failed":
        source.failed(task, content[0])
        outcome = content[0]
    else:
        row, ended = content
        source.done(task, row, ended)
        outcome = f"{100 * row['accuracy']:.2f} %" if "accuracy" in row else "measured"
        outcome += " (ended early)" if ended else ""
    if watcher is not None:
        watcher.finished(task, outcome)


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
    process = context.Process(target=_work, args=(theirs, place), daemon=True)
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


def _work(pipe: Connection, place: Place) -> None:
    """One worker: cells until the pipe closes. While a cell trains, a signal ends it between two steps."""
    import logging
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
            pipe.send(_outcome(run, watched, pipe, place))
        except (EOFError, OSError):
            return  # the study has ended


def _outcome(run: Run, watched: bool, pipe: Connection, place: Place) -> tuple[Any, ...]:
    def report(number: int, accuracy: float) -> bool:
        pipe.send(("judged", number, accuracy))
        return bool(pipe.recv())

    folder, public = place.folder / "runs", place.folder / "public"
    try:
        row = run.measuring()(run, folder, data_dir=place.data_dir, public=public, report=report if watched else None)
        return "done", row, False
    except Ended as ended:
        return ("done", ended.row, True) if ended.asked else ("interrupted",)
    except (EOFError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        return "failed", text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
