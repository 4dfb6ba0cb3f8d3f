"""Results survive what happens to files: every mistake is one line, and what was finished is
kept.
"""

import json

import pytest

from dpkfc.app.tuning.runs import Run, StudyError
from dpkfc_papers.store import Store, best_trials, winners_tests
from tests.tuning.rows import row_of

RUN, OTHER = Run.make("digits", "dp-sgd"), Run.make("digits", "dp-sgd", seed=1)


def test_a_row_comes_back(tmp_path):
    path = tmp_path / "deep" / "results.json"
    with Store(path) as store:
        store.put(RUN, row_of(RUN))
    found = Store(path)
    assert found.get(RUN)["accuracy"] == 0.5 and found.get(OTHER) is None and len(found) == 1


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "damaged"),
        ("[]", "not a results file"),
        (json.dumps({"kind": "dpkfc study", "version": 99, "rows": {}}), "version 99"),
    ],
)
def test_a_file_that_is_none_is_named_and_left_as_it_is(tmp_path, text, says):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(StudyError, match=says):
        Store(path)
    assert path.read_text() == text


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    store = Store(tmp_path / "results.json")
    store.put(RUN, row_of(RUN))

    def full(self, text, encoding=None):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(StudyError, match=r"No space left.*goes on"):
        store.put(OTHER, row_of(OTHER))
    monkeypatch.undo()
    assert len(Store(tmp_path / "results.json")) == 1


def test_two_writers_do_not_share_a_study(tmp_path):
    with (
        Store(tmp_path / "results.json"),
        pytest.raises(StudyError, match="another process"),
        Store(tmp_path / "results.json"),
    ):
        pass
    with Store(tmp_path / "results.json"):
        pass


def test_tests_of_an_earlier_winner_are_told_no_more():
    def row(run, measured, accuracy, **tag):
        return {
            "run": run.describe(),
            "measured_on": measured,
            "accuracy": accuracy,
            "tag": {"arm": "dp-sgd", **tag},
        }

    run = RUN
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
