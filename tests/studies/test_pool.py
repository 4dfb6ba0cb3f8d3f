"""Cells side by side: workers, failures, budget, interruption; the workers themselves are real once."""

from __future__ import annotations

import os
import signal

import pytest

from dpkfc.studies import pool
from dpkfc.studies.cell import Run
from dpkfc.studies.errors import StudyError
from dpkfc.studies.pool import Place, Task, cores, drive, worker_count


class Listed:
    """A source that wants a list of runs."""

    def __init__(self, runs, watched=False, go_on=True):
        self.left, self.watched, self.go_on = list(runs), watched, go_on
        self.rows, self.failures, self.judged = [], [], []

    def next(self, fits):
        index = next((i for i, run in enumerate(self.left) if fits(run)), None)
        return None if index is None else Task(self.left.pop(index), watched=self.watched)

    def report(self, task, number, accuracy):
        self.judged.append(number)
        return self.go_on

    def done(self, task, row, ended):
        self.rows.append((row, ended))

    def failed(self, task, reason):
        self.failures.append(reason)


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
    (row, ended), = source.rows
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
    monkeypatch.setattr(pool, "wait", lambda pipes: pipes[:1])
    return given, hired


RUNS = [Run.of("digits", "dp-sgd", seed=seed) for seed in range(4)]


def test_as_many_workers_as_asked_for(answers):
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False)] * 4
    source = Listed(RUNS)
    drive(source, Place(None), workers=2)
    assert len(hired) == 2 and len(source.rows) == 4


def test_a_killed_worker_is_a_failed_cell_and_another_takes_its_place(answers):
    given, hired = answers
    given += [EOFError(), ("done", {"accuracy": 0.5}, False)]
    source = Listed(RUNS[:2])
    drive(source, Place(None), workers=1)
    assert "killed" in source.failures[0] and len(source.rows) == 1 and len(hired) == 2


def test_an_interrupted_cell_stops_the_study(answers):
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False), ("interrupted",)]
    source = Listed(RUNS)
    with pytest.raises(KeyboardInterrupt):
        drive(source, Place(None), workers=1)
    assert len(source.rows) == 1 and all(worker.pipe.closed for worker in hired)


def test_sigterm_is_ctrl_c(answers):
    """Left to itself the signal would end this process alone, and workers would finish cells that nobody keeps."""
    given, hired = answers
    given += [("done", {"accuracy": 0.5}, False)] * 2
    before, source = signal.getsignal(signal.SIGTERM), Listed(RUNS)
    source.done = lambda task, row, ended: (source.rows.append(row), os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        drive(source, Place(None), workers=1)
    assert len(source.rows) == 1 and all(worker.pipe.closed for worker in hired)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_budget_starts_what_fits_and_nothing_else(answers):
    given, _ = answers
    given += [("done", {"accuracy": 0.5}, False)] * 4
    source = Listed(RUNS)
    drive(source, Place(None), budget_minutes=1, expected=lambda run: 30.0 if run.seed % 2 else 120.0)
    assert [run.seed for run in source.left] == [0, 2]
    source = Listed(RUNS)
    drive(source, Place(None), budget_minutes=0)
    assert not source.rows


def test_cores_are_never_oversubscribed(monkeypatch):
    assert worker_count(None) == cores()
    for wrong in (0, cores() + 1):
        with pytest.raises(StudyError, match="one core"):
            worker_count(wrong)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pool._one_thread():
        assert {os.environ[name] for name in pool._THREADS} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"
