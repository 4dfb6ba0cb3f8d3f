"""Which trials go on: the best third at a rung, whoever was there first; killed attempts judge
nobody.
"""

from __future__ import annotations

import pytest

from dpkfc.app.html import best_trials, winners_tests
from dpkfc.app.tuning.runs import Store
from dpkfc.app.tuning.search import Search, arm_of, is_in_best_third, is_rung
from dpkfc.app.tuning.tune import Trials
from tests.tuning.test_tune import answered, row_of, score

pytest.importorskip("optuna")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow


def test_rungs_and_thirds():
    assert [n for n in range(1, 30) if is_rung(n)] == [1, 3, 9, 27]
    assert (
        is_in_best_third(0.1, [])
        and is_in_best_third(0.2, [0.1])
        and not is_in_best_third(0.1, [0.2])
    )
    assert is_in_best_third(0.5, [0.5, 0.5]) and not is_in_best_third(0.4, [0.5, 0.3])
    assert is_in_best_third(0.8, [0.9, 0.7, 0.6, 0.5, 0.4]) and not is_in_best_third(
        0.7, [0.9, 0.8, 0.6, 0.5, 0.4]
    )


def opened(tmp_path, trials=8, rows=()) -> Search:
    common = {"steps": 4, "validation_size": 50}
    return Search(
        arm_of("digits", "dp-sgd"),
        common,
        "digits",
        tmp_path / "t.sqlite3",
        trials=trials,
        rows=rows,
    )


def run_trial(search: Search, *values: float) -> str:
    """One trial with these evaluations; its hash."""
    key, _ = search.ask()
    ended = not all(search.report(key, number, value) for number, value in enumerate(values, 1))
    search.tell(key, values[-1], ended)
    return key


def test_a_killed_attempt_does_not_judge_its_own_retry(tmp_path):
    search = opened(tmp_path)
    own, _ = search.ask()
    assert search.report(own, 1, 0.9)
    other, _ = search.ask()
    assert not search.report(other, 1, 0.85)  # beside the first one, which runs
    again = opened(tmp_path)  # both were killed
    retried = {again.ask()[0], again.ask()[0]}
    assert retried == {own, other}
    assert again.report(other, 1, 0.85)


def test_the_recipes_own_trial_runs_to_its_end(tmp_path):
    search = opened(tmp_path)
    own, _ = search.ask()
    for _ in range(3):
        assert run_trial(search, 0.9)
    assert all(search.report(own, number, 0.1) for number in (1, 2, 3, 4))


def test_a_trial_that_was_stopped_early_and_stands_at_the_end_is_run_once_more(tmp_path):
    search = opened(tmp_path, trials=6)
    own = run_trial(search, 0.8, 0.8, 0.8)
    stopped = run_trial(search, 0.7)  # one of two
    assert search.ask_again() is None and not search.is_over
    for value in (0.3, 0.2, 0.1, 0.05):
        run_trial(search, value)
    assert (
        search.counts() == {"full": 1, "pruned": 5, "failed": 0}
        and search.started == 6
        and not search.is_over
    )
    again, run = search.ask_again()
    assert again == stopped == run.hash and search.ask_again() is None
    assert all(
        search.report(again, number, value) for number, value in ((1, 0.7), (2, 0.1), (3, 0.01))
    )
    search.tell(again, 0.95)
    assert (
        search.counts() == {"full": 2, "pruned": 4, "failed": 0}
        and search.started == 6
        and search.is_over
    )
    assert search.best()[1] == 0.95 and own != stopped


def test_a_repetition_that_runs_keeps_its_place_among_the_others(tmp_path):
    search = opened(tmp_path, trials=10)
    values = (0.5, 0.1, 0.2, 0.3, 0.9, 0.8, 0.7, 0.6, 0.4, 0.05)
    keys = [
        run_trial(search, value, *([value] if is_in_best_third(value, values[:i]) else []))
        for i, value in enumerate(values)
    ]
    late = [trial.user_attrs["hash"] for trial in search._stopped_too_early()]
    assert keys[6] in late and keys[7] not in late  # 0.7 is the third of ten
    asked = {search.ask_again()[0] for _ in late}
    assert asked == set(late) and search.ask_again() is None


def test_a_trial_is_counted_once_among_those_it_is_held_against(tmp_path):
    search = opened(tmp_path, trials=8)
    for i, values in enumerate(order := (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)):
        run_trial(search, values, *([values] if is_in_best_third(values, order[:i]) else []))
    late = [max(trial.intermediate_values.values()) for trial in search._stopped_too_early()]
    assert late == [0.8]  # the second of eight; the third is not in their third


def test_a_repetition_that_was_killed_is_asked_for_again_and_a_finished_one_is_not(tmp_path):
    store = Store(tmp_path / "results.json")
    source = Trials([opened(tmp_path, rows=list(store))], store)
    answered(source)
    assert source.is_over
    before = {row["hash"]: row["tag"]["pruned"] for row in store}
    (tmp_path / "t.sqlite3").unlink()
    worst = min((row for row in store if not row["tag"]["pruned"]), key=lambda row: row["accuracy"])
    changed = dict(worst, tag={**worst["tag"], "pruned": True}, curve=[[0, 0.1], [1, 0.99]])
    rows = [changed if row is worst else row for row in store]
    search = opened(tmp_path, rows=rows)
    key, run = search.ask_again()
    assert key == worst["hash"] == run.hash
    search = opened(tmp_path, rows=rows)  # killed
    assert search.started == len(before) and search.ask_again()[0] == key
    search = opened(tmp_path, rows=list(store))  # kept, but not told
    assert search.is_over and search.best()[1] == pytest.approx(max(score_of(store)), abs=1e-3)


def score_of(store: Store) -> list[float]:
    return [row["accuracy"] for row in store if not row["tag"]["pruned"]]


def test_a_study_runs_what_was_stopped_too_early_before_it_tests(tmp_path):
    store = Store(tmp_path / "results.json")
    search = opened(tmp_path, trials=6)
    source = Trials([search], store)
    tasks = answered(source)
    hashes = [task.run.hash for task in tasks]
    assert source.is_over and len(store) == 6
    for row in store:
        if row["tag"]["pruned"]:
            others = [score(one.run) for one in tasks if one.run.hash != row["hash"]]
            assert hashes.count(row["hash"]) == 1 and not is_in_best_third(row["accuracy"], others)


def test_tests_of_an_earlier_winner_are_told_no_more():
    def row(run, measured, accuracy, **tag):
        return {
            **row_of(run),
            "measured_on": measured,
            "accuracy": accuracy,
            "tag": {"arm": "dp-sgd", **tag},
        }

    search_run = arm_of("digits", "dp-sgd")
    from dpkfc.app.tuning.runs import Run

    run = Run.of("digits", search_run.method, {})
    old, new = {"lr": 0.1}, {"lr": 0.2}
    trials = [
        row(run, "validation", 0.8, params=old, pruned=False),
        row(run, "validation", 0.99, params={"lr": 9}, pruned=True),
    ]
    tests = [row(run, "test", 0.7, tuned=old), row(run, "test", 0.71, tuned=old)]
    assert winners_tests([*trials, *tests]) == tests
    later = row(run, "validation", 0.9, params=new, pruned=False)
    assert best_trials([*trials, later])["digits", "dp-sgd"] is later
    assert winners_tests([*trials, later, *tests]) == []
    fresh = row(run, "test", 0.75, tuned=new)
    assert winners_tests([*trials, later, *tests, fresh]) == [fresh]
    equal = row(run, "validation", 0.8, params=new, pruned=False)
    # of two equal trials the one that was tested
    assert winners_tests([equal, *trials, *tests]) == tests
    assert winners_tests(tests) == tests
