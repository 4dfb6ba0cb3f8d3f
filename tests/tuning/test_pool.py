"""Cells side by side: workers, failures, budget, interruption; the workers themselves are real
once.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time

import pytest

from dpkfc.app.run_folder import RunFolderError, placed
from dpkfc.app.settings import ConfigError
from dpkfc.app.tuning import runs as pool
from dpkfc.app.tuning.runs import (
    Clock,
    Place,
    Run,
    StudyError,
    StudyProgress,
    Task,
    TimeIsUp,
    drive,
    worker_count,
)
from dpkfc.checkpoint import CheckpointError


class Listed:
    """A source that wants a list of runs."""

    def __init__(self, runs, watched=False, go_on=True):
        self.left, self.watched, self.go_on = list(runs), watched, go_on
        self.rows, self.failures, self.lost, self.judged = [], [], [], []

    def next(self, fits):
        index = next((i for i, run in enumerate(self.left) if fits(run)), None)
        return None if index is None else Task(self.left.pop(index), watched=self.watched)

    def report(self, task, number, accuracy):
        self.judged.append(number)
        return self.go_on

    def done(self, task, row, ended):
        self.rows.append((row, ended))

    def failed(self, task, reason, *, lost):
        (self.lost if lost else self.failures).append(reason)


@pytest.mark.slow
def test_real_workers_train_report_and_fail_by_name(tmp_path):
    pytest.importorskip("sklearn")
    tiny = {"steps": 2, "expected_batch_size": 16, "accountant": "rdp", "evaluate_every": 1}
    runs = [
        Run.of("digits", "dp-sgd", {**tiny, "validation_size": 50}, evaluate_on="validation"),
        Run.of("digits", "dp-sgd", {**tiny, "warmup_steps": 99}),
    ]
    source = Listed(runs, watched=True, go_on=False)
    drive(source, Place(tmp_path), workers=1)
    ((row, ended),) = source.rows
    assert ended and row["steps"] == 1 and source.judged == [1]
    assert "longer than the plan" in source.failures[0]
    assert (tmp_path / "runs" / row["hash"] / "ledger.jsonl").is_file()


class Line:
    """A worker that answers at once, in this process."""

    def __init__(self, answers):
        self.answers, self.closed = answers, False

    def send(self, message):
        pass

    def recv(self):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        self.closed = True


class Idle:
    def is_alive(self):
        return False

    def join(self, timeout=None):
        pass


@pytest.fixture
def answers(monkeypatch):
    """What workers answer, in order; and the workers that were hired."""
    given: list = []
    hired: list = []

    def hire(place):
        hired.append(pool._Worker(Idle(), Line(given)))
        return hired[-1]

    monkeypatch.setattr(pool, "_hire", hire)
    monkeypatch.setattr(pool, "wait", lambda pipes, timeout: pipes[:1])
    return given, hired


RUNS = [Run.of("digits", "dp-sgd", seed=seed) for seed in range(4)]


def test_as_many_workers_as_asked_for(answers):
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False)] * 4
    source = Listed(RUNS)
    drive(source, Place(None), workers=2)
    assert len(hired) == 2 and len(source.rows) == 4


def test_a_killed_worker_has_lost_its_cell_and_another_takes_its_place(answers):
    given, hired = answers
    given += [EOFError(), ("done", {"accuracy": 0.5}, False)]
    source = Listed(RUNS[:2])
    drive(source, Place(None), workers=1)
    assert (
        "killed" in source.lost[0]
        and not source.failures
        and len(source.rows) == 1
        and len(hired) == 2
    )


def test_a_worker_that_dies_before_it_hears_an_answer_ends_nothing_but_its_cell(answers):
    given, hired = answers
    given += [("judged", 1, 0.5), EOFError(), ("done", {"accuracy": 0.5}, False)]
    source = Listed(RUNS[:2])

    def report(task, number, accuracy):
        hired[0].pipe.send = broken
        return True

    def broken(message):
        raise BrokenPipeError

    source.report = report
    drive(source, Place(None), workers=1)
    assert len(source.lost) == 1 and len(source.rows) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "full"),
        (CheckpointError("I/O error: No space left on device (os error 28)"), "full"),
        (OSError(errno.EMFILE, "Too many open files"), "lost"),
        (RunFolderError("run folder x cannot be written (Permission denied)"), "lost"),
        (ConfigError("warmup_steps = 99 is longer than the plan"), "failed"),
        (RuntimeError("a defect"), "failed"),
    ],
)
def test_what_the_machine_does_is_told_from_what_is_wrong_with_a_cell(
    monkeypatch, tmp_path, error, kind
):
    def cell(*_, **__):
        raise error

    monkeypatch.setattr(Run, "measuring", lambda self: cell)
    assert pool._outcome(RUNS[0], False, None, tmp_path, "")[0] == kind


def test_a_full_disk_is_seen_behind_the_error_that_was_made_of_it(tmp_path):
    def write(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(RunFolderError) as told:
        placed(tmp_path / "file", write)
    assert pool._is_full(told.value)
    with pytest.raises(CheckpointError) as told:
        try:
            write(tmp_path)
        except OSError as error:
            raise CheckpointError("cannot write the checkpoint") from error
    assert pool._is_full(told.value) and not pool._is_full(
        CheckpointError("cannot write the checkpoint")
    )


def test_a_full_disk_ends_the_study_and_keeps_what_had_finished(answers):
    given, _ = answers
    given += [
        ("done", {"accuracy": 0.5}, False),
        ("full", "file x cannot be written (No space left on device)"),
    ]
    source = Listed(RUNS)
    with pytest.raises(StudyError, match=r"No space left.*is kept, and the same command goes on"):
        drive(source, Place(None), workers=1)
    assert len(source.rows) == 1 and not source.lost + source.failures


def test_an_interrupted_cell_stops_the_study(answers):
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False), ("interrupted",)]
    source = Listed(RUNS)
    with pytest.raises(KeyboardInterrupt):
        drive(source, Place(None), workers=1)
    assert len(source.rows) == 1 and all(worker.pipe.closed for worker in hired)


def test_sigterm_is_ctrl_c(answers):
    """Left to itself the signal would end this process alone, and workers would finish cells that
    nobody keeps.
    """
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False)] * 2
    before, source = signal.getsignal(signal.SIGTERM), Listed(RUNS)
    source.done = lambda task, row, ended: (
        source.rows.append(row),
        os.kill(os.getpid(), signal.SIGTERM),
    )
    with pytest.raises(KeyboardInterrupt):
        drive(source, Place(None), workers=1)
    assert len(source.rows) == 1 and all(worker.pipe.closed for worker in hired)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_budget_starts_what_fits_and_nothing_else(answers):
    given, _ = answers
    given += [("done", {"accuracy": 0.5}, False)] * 4
    source = Listed(RUNS)
    drive(
        source, Place(None), budget_minutes=1, expected=lambda run: 30.0 if run.seed % 2 else 120.0
    )
    assert [run.seed for run in source.left] == [0, 2]
    source = Listed(RUNS)
    drive(source, Place(None), budget_minutes=0)
    assert not source.rows


def test_cells_that_run_when_the_time_is_up_are_stopped_and_named(answers, monkeypatch, caplog):
    given, hired = answers
    given += [("judged", 1, 0.5), ("done", {"accuracy": 0.5}, False), ("interrupted",), EOFError()]
    calls = iter(
        [lambda pipes: [], lambda pipes: pipes[:1], lambda pipes: pipes[:1], lambda pipes: pipes]
    )

    def waited(pipes, timeout):
        time.sleep(timeout if len(given) == 4 else 0)
        return next(calls)(pipes)

    monkeypatch.setattr(pool, "wait", waited)
    monkeypatch.setattr(pool, "_PATIENCE", 0.2)
    monkeypatch.setattr(logging.getLogger("dpkfc"), "propagate", True)
    source = Listed(RUNS)
    with StudyProgress(4) as progress:
        drive(source, Place(None), workers=3, budget_minutes=1e-3, watcher=progress)
    assert (
        len(hired) == 3
        and len(source.rows) == 1
        and len(source.lost) == 2
        and len(source.left) == 1
    )
    assert "begins anew" in source.lost[0] and all(worker.pipe.closed for worker in hired)
    assert (
        "seed 1" in caplog.text
        and "seed 2" in caplog.text
        and "the same command goes on" in caplog.text
    )


@pytest.mark.slow
def test_a_real_worker_is_stopped_in_time(tmp_path):
    pytest.importorskip("sklearn")
    long = Run.of(
        "digits", "dp-sgd", {"steps": 50_000, "expected_batch_size": 16, "accountant": "rdp"}
    )
    source, started = Listed([long]), time.monotonic()
    drive(source, Place(tmp_path), budget_minutes=0.1)
    assert (
        source.lost and not source.failures and time.monotonic() - started < 6 + 2 * pool._PATIENCE
    )


def test_work_in_this_process_is_stopped_as_by_ctrl_c():
    clock = Clock(1e-3, lambda run: None)
    with pytest.raises(TimeIsUp), clock.stopping():
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and clock.seconds_left() == 0
    with clock.stopping(), Clock(None, lambda run: None).stopping():
        pass
    assert Clock(None).minutes_left() is None and 0 < Clock(2.0).minutes_left() <= 2.0


def test_cores_are_never_oversubscribed(monkeypatch):
    cores = worker_count(None)
    assert 1 <= cores <= os.cpu_count()
    for wrong in (0, cores + 1):
        with pytest.raises(StudyError, match="one core"):
            worker_count(wrong)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pool._one_thread():
        assert {os.environ[name] for name in pool._THREADS} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"
