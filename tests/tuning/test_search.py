"""A search of one arm: who goes on at a rung, what a kill or a full disk loses, what resumes."""

import math
import os

import pytest

from dpkfc.app.tuning import journal
from dpkfc.app.tuning.arms import arm_of
from dpkfc.app.tuning.journal import repair_journal
from dpkfc.app.tuning.runs import Run, StudyError
from dpkfc.app.tuning.search import Search
from tests.tuning import rows

pytest.importorskip("optuna")
pytest.importorskip("sklearn")

KILLED = "its process ended (killed, or out of memory)"


def score(run):
    """Return a made-up accuracy with its best learning rate at 0.1."""
    return 0.9 - 0.1 * abs(math.log10(run.config().optimizer.lr / 0.1))


def row_of(run, accuracy=None):
    accuracy = score(run) if accuracy is None else accuracy
    return rows.row_of(
        run,
        accuracy,
        curve=[[0, 0.1], [4, accuracy]],
        target_epsilon=run.config().privacy.epsilon,
        wall_seconds=1.0,
    )


def open_search(folder, trials=8, kind="tpe", **common):
    """Open a search as another process would."""
    journal.open_journal.cache_clear()
    settings = {"steps": 4, "validation_size": 50, **common}
    arm = arm_of("digits", "dp-sgd")
    return Search(arm, settings, "digits", folder / "trials.log", trials=trials, kind=kind)


def judge(search, number, *values):
    """Return whether a running trial goes on after these evaluations."""
    halving = search.halving(number)
    return all(halving(place, value) for place, value in enumerate(values, 1))


def finish(search, asked, *values):
    """End a trial with these evaluations."""
    number, run = asked
    ended = not judge(search, number, *values)
    search.tell(number, row_of(run, values[-1]), ended)
    return number


def run_trial(search, *values):
    return finish(search, search.ask(), *values)


def test_the_first_trial_is_the_recipes_own_and_runs_to_its_end(tmp_path):
    search = open_search(tmp_path)
    number, run = search.ask()
    assert dict(run.settings)["lr"] == 0.15
    for _ in range(3):
        run_trial(search, 0.9)
    assert judge(search, number, 0.1, 0.1, 0.1, 0.1)


def test_hopeless_trials_are_stopped_and_say_nothing_about_the_best(tmp_path):
    search = open_search(tmp_path)
    for value in (0.8, 0.82, 0.84, 0.86, 0.88):
        run_trial(search, value, value, value)
    number, run = search.ask()
    assert not judge(search, number, 0.1)
    search.tell(number, row_of(run, 0.99), ended=True)
    assert search.best()[1] == 0.88
    assert search.counts() == {"full": 5, "pruned": 1, "failed": 0}


def test_the_best_third_goes_on_at_each_rung(tmp_path):
    search = open_search(tmp_path, trials=12)
    run_trial(search, 0.9, 0.9, 0.9)
    seen = [judge(search, search.ask()[0], value) for value in (0.8, 0.95, 0.7, 0.94, 0.93, 0.96)]
    assert seen == [False, True, False, False, False, True]
    number, _ = search.ask()
    assert judge(search, number, 0.97, 0.1) and not judge(search, number, 0.97, 0.1, 0.05)


def test_a_lost_attempt_is_tried_again(tmp_path):
    search = open_search(tmp_path, trials=2)
    own, run = search.ask()
    assert judge(search, own, 0.9)
    run_trial(search, 0.5)
    search.lose(own, KILLED)
    assert search.counts() == {"full": 0, "pruned": 1, "failed": 0} and search.started == 1
    assert list(search.failures().values()) == [f"to be tried again: {KILLED}"]
    again, same = search.ask()
    assert same == run and judge(search, again, 0.1)
    search.tell(again, row_of(run, 0.1))
    assert not search.failures() and search.is_over


def test_a_killed_study_tries_lost_trials_again_once_and_repeats_none(tmp_path):
    search = open_search(tmp_path, trials=6)
    done = [search.ask() for _ in range(2)]
    for asked in done:
        finish(search, asked, 0.5)
    lost = [search.ask()[1], search.ask()[1]]
    # Killed, and again before it has asked.
    open_search(tmp_path, trials=6)
    search = open_search(tmp_path, trials=6)
    rest = []
    while search.started < 6:
        rest.append(search.ask())
        finish(search, rest[-1], 0.5)
    assert [run for _, run in rest[:2]] == lost
    assert len({run.hash for _, run in [*done, *rest]}) == 6


def test_a_trial_that_is_lost_again_and_again_waits_for_the_next_call(tmp_path):
    search = open_search(tmp_path, trials=2)
    for _ in range(3):
        number, run = search.ask()
        search.lose(number, KILLED)
    assert search.started == 1
    run_trial(search, 0.5)
    assert search.started == 2 and not search.is_over
    search = open_search(tmp_path, trials=2)
    assert search.started == 1 and search.ask()[1] == run


def test_a_failure_counts_and_its_reason_is_kept(tmp_path):
    search = open_search(tmp_path, trials=2)
    number, run = search.ask()
    search.fail(number, "no such layer")
    search = open_search(tmp_path, trials=2)
    assert search.started == 1 and search.counts()["failed"] == 1
    assert search.failures() == {run.hash: "no such layer"}


def test_a_random_search_stops_nothing(tmp_path):
    search = open_search(tmp_path, kind="random")
    number, _ = search.ask()
    assert search.halving(number) is None
    with pytest.raises(StudyError, match="trials of --search random, and this is --search tpe"):
        open_search(tmp_path)


def test_a_step_is_searched_as_the_product_of_rate_and_clip(tmp_path):
    search = open_search(tmp_path, trials=12)
    for _ in range(12):
        run_trial(search, 0.5)
    bounds = arm_of("digits", "dp-sgd").space["lr"]
    settings = [dict(Run.make(**row["run"]).settings) for row in search.rows().values()]
    products = [one["lr"] * one["max_grad_norm"] for one in settings]
    assert all(bounds.low * 0.999 < product < bounds.high * 1.001 for product in products)
    rates = [one["lr"] for one in settings]
    assert min(rates) < bounds.low or max(rates) > bounds.high / 10


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"epsilon": 0.5}, "epsilon = the recipe's value, not 0.5"),
    ],
)
def test_trials_of_other_settings_are_refused(tmp_path, changed, message):
    open_search(tmp_path)
    with pytest.raises(StudyError, match=message):
        open_search(tmp_path, **changed)


def test_a_last_line_that_was_cut_short_is_removed_and_nothing_else(tmp_path):
    run_trial(open_search(tmp_path), 0.5)
    path = tmp_path / "trials.log"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "wor')
    repair_journal(path)
    assert path.read_bytes() == whole and open_search(tmp_path).started == 1
    path.write_bytes(b"a text of somebody")
    repair_journal(path)
    assert path.read_bytes() == b"a text of somebody"


def test_a_file_that_is_not_a_journal_is_named(tmp_path):
    (tmp_path / "trials.log").write_text("no journal\nat all\n")
    with pytest.raises(StudyError, match=r"trials\.log cannot be used"):
        open_search(tmp_path)


def test_trials_that_cannot_be_stored_are_one_line(tmp_path, monkeypatch):
    search = open_search(tmp_path)
    number, run = search.ask()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    calls = (
        lambda: search.tell(number, row_of(run)),
        lambda: search.lose(number, KILLED),
        lambda: search.fail(number, "x"),
    )
    for call in calls:
        with pytest.raises(
            StudyError, match=r"trials\.log cannot be written .*No space left.*goes"
        ):
            call()


def test_trials_of_other_files_are_taken_over(tmp_path):
    search = open_search(tmp_path)
    run = search.run({"lr": 100.0, "max_grad_norm": 5.0}, seed=0, evaluate_on="validation")
    tag = {"search": search.name, "arm": "dp-sgd", "params": {"lr": 100.0}, "pruned": False}
    search.add({**row_of(run, 0.97), "tag": tag})
    search = open_search(tmp_path)
    assert search.started == 1 and search.best() == ({"lr": 100.0}, 0.97)
