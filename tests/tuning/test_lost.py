"""Trials that the machine lost: they do not count, judge nobody and are tried again; reasons of
failures are kept.
"""

from __future__ import annotations

import pytest

from dpkfc.app.run_folder import RunFolderError
from dpkfc.app.tuning import tune
from dpkfc.app.tuning.runs import Store, StudyError
from dpkfc.app.tuning.tune import Trials, reported
from tests.tuning.test_halving import opened, run_trial
from tests.tuning.test_tune import answered, row_of, settings

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow

KILLED = "its process ended (killed, or out of memory)"


def failing(times, *, lost, judged=()):
    """`drive` in which the first cells fail, after these evaluations."""

    def drive(source, place=None, **_):
        for _ in range(times):
            task = source.next(lambda run: True)
            assert all(source.report(task, number, value) for number, value in enumerate(judged, 1))
            source.failed(task, KILLED if lost else "no such layer", lost=lost)
        answered(source)

    return drive


def test_a_trial_that_was_lost_is_tried_again_in_the_same_study(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "drive", failing(1, lost=True, judged=(0.95,)))
    tuned = tune.tune(settings(trials=3), tmp_path)
    (arm,) = tuned.arms
    assert tuned.complete and (arm.trials, arm.failed) == (3, 0) and not tuned.failures
    assert any(
        row["tag"]["params"]["lr"] == 0.15 and not row["tag"]["pruned"]
        for row in Store(tmp_path / "results.json")
    )


def test_a_lost_attempt_judges_nobody_and_whom_it_stopped_is_run_once_more(tmp_path):
    search = opened(tmp_path, trials=2)
    own, _ = search.ask()
    assert search.report(own, 1, 0.9)
    stopped = run_trial(search, 0.5)  # beside the one that is lost now
    search.lose(own, KILLED)
    assert search.counts() == {"full": 0, "pruned": 1, "failed": 0} and search.started == 1
    again, run = search.ask()
    assert again == own == run.hash and search.report(again, 1, 0.1)
    search.tell(again, 0.1)
    assert not search.is_over and search.ask_again()[0] == stopped


def test_trials_beside_a_lost_attempt_are_not_held_against_it(tmp_path):
    search = opened(tmp_path)
    own, _ = search.ask()
    assert search.report(own, 1, 0.9)
    search.lose(own, KILLED)
    assert search.ask()[0] == own
    other, _ = search.ask()
    assert search.report(other, 1, 0.5)


def test_a_point_that_is_lost_again_and_again_is_given_up_until_the_next_call(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tune, "drive", failing(3, lost=True))
    tuned = tune.tune(settings(trials=2), tmp_path)
    (arm,), (why,) = tuned.arms, tuned.failures.values()
    assert (
        not tuned.complete
        and (arm.trials, arm.failed) == (1, 0)
        and why == f"to be tried again: {KILLED}"
    )
    text = (tmp_path / "tune.md").read_text("utf-8")
    assert "Not finished" in text and KILLED in text
    monkeypatch.setattr(tune, "drive", answered)
    tuned = tune.tune(settings(trials=2), tmp_path)
    assert tuned.complete and tuned.arms[0].trials == 2 and not tuned.failures
    assert len(Store(tmp_path / "results.json")) == 2


def test_a_repetition_that_is_lost_is_asked_for_again_and_given_up_in_the_end(tmp_path):
    search = opened(tmp_path, trials=6)
    run_trial(search, 0.8, 0.8, 0.8)
    stopped = run_trial(search, 0.7)
    for value in (0.3, 0.2, 0.1, 0.05):
        run_trial(search, value)
    for _ in range(3):
        assert search.ask_again()[0] == stopped
        search.lose(stopped, KILLED)
    assert search.ask_again() is None and not search.is_over and search.started == 6
    assert opened(tmp_path, trials=6).ask_again()[0] == stopped


def test_the_reason_of_a_failure_is_told_by_later_calls_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "drive", failing(1, lost=False))
    first = tune.tune(settings(trials=3), tmp_path)
    monkeypatch.setattr(tune, "drive", answered)
    second = tune.tune(settings(trials=3), tmp_path)
    assert first.complete and second.complete and second.arms[0].failed == 1
    assert first.failures == second.failures and list(second.failures.values()) == ["no such layer"]


def test_a_failure_of_an_earlier_version_that_kept_no_reason_is_tried_again(tmp_path):
    search = opened(tmp_path, trials=2)
    own, _ = search.ask()
    search.report(own, 1, 0.9)
    run_trial(search, 0.5)
    search._study.tell(search._running.pop(own), state=optuna.trial.TrialState.FAIL)
    search = opened(tmp_path, trials=2)
    assert search.started == 1 and list(search.failures().values()) == [
        "to be tried again: its reason was not kept"
    ]
    assert search.ask()[0] == own
    assert opened(tmp_path, trials=2).ask()[0] == own, "and again where that is killed, once"


def test_a_point_waits_once_however_often_the_study_is_killed(tmp_path):
    key, _ = opened(tmp_path, trials=3).ask()
    for _ in range(3):
        search = opened(tmp_path, trials=3)
    assert search.ask()[0] == key
    search.tell(key, 0.5)
    assert search.ask()[0] != key


def test_a_retry_that_was_pruned_and_kept_but_not_told_is_told(tmp_path):
    search = opened(tmp_path, trials=3)
    key, run = search.ask()
    search.lose(key, KILLED)
    search.ask()
    tag = {"search": search.name, "arm": "dp-sgd", "params": search.params_of(key), "pruned": True}
    search = opened(tmp_path, trials=3, rows=[{**row_of(run), "tag": tag}])
    assert search.counts()["pruned"] == 1 and search.started == 1


def test_trials_that_cannot_be_noted_are_one_line(tmp_path, monkeypatch):
    search = opened(tmp_path)
    key, _ = search.ask()

    def full(*_, **__):
        raise optuna.exceptions.StorageInternalError("commit") from OSError(
            28, "database or disk is full"
        )

    monkeypatch.setattr(search._study, "tell", full)
    for call in (
        lambda: search.tell(key, 0.5),
        lambda: search.lose(key, KILLED),
        lambda: search.fail(key, "x"),
    ):
        with pytest.raises(
            StudyError, match=r"t\.sqlite3 cannot be written .*disk is full.*goes on from there"
        ):
            call()


def test_a_full_disk_is_told_and_not_the_report_that_does_not_fit_either():
    def report():
        raise RunFolderError("tune.json cannot be written")

    with pytest.raises(StudyError, match="the first"), reported(report):
        raise StudyError("the first")
    with pytest.raises(RunFolderError), reported(report):
        pass
    written = []
    with pytest.raises(KeyboardInterrupt), reported(lambda: written.append(1)):
        raise KeyboardInterrupt
    assert written == [1]


def test_trials_of_the_same_study_are_finished_in_the_same_call(tmp_path):
    store = Store(tmp_path / "results.json")
    source = Trials([opened(tmp_path, trials=4)], store)
    lost = source.next(lambda run: True)
    source.failed(lost, KILLED, lost=True)
    assert (
        [task.run.hash for task in answered(source)].count(lost.run.hash) == 1
        and source.is_over
        and len(store) == 4
    )
