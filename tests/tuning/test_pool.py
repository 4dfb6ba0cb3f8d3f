"""Cells side by side: what became of them, workers that die, the budget, and signals."""

import errno
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from dpkfc.app.run_folder import RunFolderError, write_atomically
from dpkfc.app.toml import ConfigError
from dpkfc.app.tuning import pool, worker
from dpkfc.app.tuning.pool import drive, end_of, worker_count
from dpkfc.app.tuning.runs import Ended, Place, Run, StudyError
from dpkfc.app.tuning.study_progress import StudyProgress, Task
from dpkfc.app.tuning.worker import Outcome, run_one
from dpkfc.checkpoint import CheckpointError

RUNS = [Run.make("digits", "dp-sgd", seed=seed) for seed in range(4)]
DONE = Outcome("done", {"accuracy": 0.5})
NOWHERE = Place(Path("nowhere"))


class Wanted:
    """A source that wants a list of runs."""

    def __init__(self, runs=RUNS, judge=None):
        self.left = list(runs)
        self.judge = judge
        self.rows = []
        self.failures = []
        self.lost = []

    def next(self, fits):
        for run in self.left:
            if fits(run):
                self.left.remove(run)
                return Task(run, judge=self.judge)
        return None

    def take_row(self, task, row, ended):
        self.rows.append((row, ended))

    def take_failure(self, task, reason, *, lost):
        (self.lost if lost else self.failures).append(reason)


class Executor:
    """Answers at once with what a test has prepared."""

    answers: list[object] = []
    hired = 0

    def __init__(self, workers, *_, **__):
        type(self).hired += 1
        self.is_broken = False

    def submit(self, *_):
        if self.is_broken:
            raise BrokenProcessPool
        future = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            self.is_broken = True
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    def shutdown(self, **_):
        pass


@pytest.fixture
def answers(monkeypatch):
    monkeypatch.setattr(Executor, "answers", [])
    monkeypatch.setattr(Executor, "hired", 0)
    monkeypatch.setattr(pool, "ProcessPoolExecutor", Executor)
    monkeypatch.setattr(pool, "PATIENCE", 0.1)
    return Executor.answers


@pytest.mark.slow
def test_real_workers_train_and_a_judge_ends_a_cell_in_them(tmp_path):
    pytest.importorskip("sklearn")
    tiny = {"steps": 2, "expected_batch_size": 16, "accountant": "rdp", "evaluate_every": 1}
    runs = [
        Run.make("digits", "dp-sgd", {**tiny, "validation_size": 50}, evaluate_on="validation"),
        Run.make("digits", "dp-sgd", {**tiny, "warmup_steps": 99}),
    ]
    source = Wanted(runs, judge=is_first)
    drive(source, Place(tmp_path), workers=1)
    ((row, ended),) = source.rows
    assert ended and row["steps"] == 1 and "longer than the plan" in source.failures[0]
    assert (tmp_path / "runs" / row["hash"] / "ledger.jsonl").is_file()


def is_first(number, accuracy):
    return number < 1


@pytest.mark.slow
def test_a_real_worker_is_stopped_in_time(tmp_path):
    pytest.importorskip("sklearn")
    long = Run.make(
        "digits", "dp-sgd", {"steps": 500_000, "expected_batch_size": 16, "accountant": "rdp"}
    )
    source = Wanted([long])
    drive(source, Place(tmp_path), end=end_of(0.3))
    assert "begins anew" in source.lost[0] and not source.failures


def test_a_killed_worker_loses_its_cells_and_others_take_its_place(answers):
    answers += [BrokenProcessPool(), BrokenProcessPool(), DONE, DONE]
    source = Wanted()
    drive(source, NOWHERE, workers=1)
    assert len(source.lost) == 2 and "killed" in source.lost[0] and not source.failures
    assert len(source.rows) == 2 and Executor.hired == 3


def test_a_full_disk_ends_the_study_and_keeps_what_had_finished(answers):
    answers += [DONE, Outcome("full", reason="file x cannot be written (No space left on device)")]
    source = Wanted()
    with pytest.raises(StudyError, match=r"No space left.*is kept, and the same command goes on"):
        drive(source, NOWHERE)
    assert len(source.rows) == 1 and not source.lost + source.failures


def test_an_interrupted_cell_stops_the_study(answers):
    answers += [DONE, Outcome("stopped")]
    source = Wanted()
    with pytest.raises(KeyboardInterrupt):
        drive(source, NOWHERE)
    assert len(source.rows) == 1


def test_sigterm_is_ctrl_c(answers):
    """Otherwise the signal would end this process alone, and leave its workers behind."""
    answers += [DONE] * 2
    before = signal.getsignal(signal.SIGTERM)
    source = Wanted()

    def take_row(task, row, ended):
        source.rows.append((row, ended))
        os.kill(os.getpid(), signal.SIGTERM)

    source.take_row = take_row
    with pytest.raises(KeyboardInterrupt):
        drive(source, NOWHERE)
    assert len(source.rows) == 1 and signal.getsignal(signal.SIGTERM) == before


def test_a_budget_starts_what_fits_and_nothing_else(answers):
    answers += [DONE] * 4
    source = Wanted()
    drive(source, NOWHERE, end=end_of(1), expected=lambda run: 30.0 if run.seed % 2 else 120.0)
    assert [run.seed for run in source.left] == [0, 2]
    source = Wanted()
    drive(source, NOWHERE, end=end_of(0))
    assert not source.rows


def test_cells_that_run_when_the_time_is_up_are_named(answers, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("dpkfc"), "propagate", True)
    end = time.monotonic() + 0.2
    answers += [DONE, Outcome("stopped"), BrokenProcessPool()]
    monkeypatch.setattr(pool, "wait", lambda *arguments: wait_until(end, *arguments))
    source = Wanted()
    with StudyProgress(4) as progress:
        drive(source, NOWHERE, workers=3, end=end, progress=progress)
    assert len(source.rows) == 1 and len(source.lost) == 2 and len(source.left) == 1
    assert all("begins anew" in reason for reason in source.lost)
    assert "seed 1" in caplog.text and "the same command goes on" in caplog.text


def wait_until(end, futures, *_):
    time.sleep(max(0.0, end - time.monotonic()))
    return REAL_WAIT(futures)


REAL_WAIT = pool.wait


@pytest.mark.parametrize(
    "error, kind",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "full"),
        (CheckpointError("I/O error: No space left on device (os error 28)"), "full"),
        (OSError(errno.EMFILE, "Too many open files"), "lost"),
        (RunFolderError("run folder x cannot be written (Permission denied)"), "lost"),
        (ConfigError("warmup_steps = 99 is longer than the plan"), "failed"),
        (RuntimeError("a defect"), "failed"),
        (Ended({}, is_deliberate=True), "ended"),
        (Ended({}, is_deliberate=False), "stopped"),
    ],
)
def test_what_the_machine_does_is_told_from_what_is_wrong_with_a_cell(monkeypatch, error, kind):
    def cell(*_):
        raise error

    monkeypatch.setattr(Run, "find_measure", lambda self: cell)
    assert run_one(RUNS[0], NOWHERE, None).kind == kind


def test_a_cell_ends_by_a_signal_when_the_time_is_up(monkeypatch):
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())

    def cell(*_):
        assert heard.wait(60)
        return {}

    monkeypatch.setattr(Run, "find_measure", lambda self: cell)
    try:
        assert run_one(RUNS[0], NOWHERE, None, time.monotonic() + 0.01).kind == "done"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_full_disk_is_seen_behind_the_error_that_was_made_of_it(tmp_path):
    def write(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(RunFolderError) as told:
        write_atomically(tmp_path / "file", write)
    assert worker._is_full(told.value)
    assert not worker._is_full(CheckpointError("cannot write the checkpoint"))


def test_cores_are_never_oversubscribed(monkeypatch):
    cores = worker_count(None)
    assert 1 <= cores <= os.cpu_count()
    for wrong in (0, cores + 1):
        with pytest.raises(StudyError, match="one core"):
            worker_count(wrong)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pool._limit_threads():
        assert {os.environ[name] for name in pool._THREADS} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"
