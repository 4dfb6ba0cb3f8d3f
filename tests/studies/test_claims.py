"""A claim holds where two arms differ by more than two standard errors, and on the right side."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def claims(benchmark_module):
    return benchmark_module("claims")


def test_a_difference_has_twice_the_standard_error_of_two_means(claims):
    gain, error = claims.compared([1.0, 3.0], [0.0, 1.0, 2.0, 3.0])
    assert gain == pytest.approx(0.5)
    assert error == pytest.approx(2 * (2 / 2 + (5 / 3) / 4) ** 0.5)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([(1.0, 0.5)], "holds"),
        ([(1.0, 0.5), (2.0, 0.1)], "holds"),
        ([(0.2, 0.5)], "no difference"),
        ([(-1.0, 0.5)], "the reverse"),
        ([(1.0, 0.5), (0.1, 0.5), (-1.0, 0.5), (-2.0, 0.5)], "holds in 1, no difference in 1, the reverse in 2"),
    ],
)
def test_the_verdict_counts_data_sets(claims, differences, said):
    assert claims.verdict(differences) == said


def test_arms_are_read_from_the_results(claims, tmp_path):
    def row(arm, accuracy, measured_on="test", epsilon=1.0):
        return {
            "accuracy": accuracy, "measured_on": measured_on, "target_epsilon": epsilon, "tag": {"arm": arm},
            "run": {"recipe": "imdb-logistic", "method": arm},
        }  # fmt: skip

    rows = [
        row("dp-sgd", 0.80), row("dp-sgd", 0.81), row("dp-kfc-tokens", 0.85), row("dp-kfc-tokens", 0.86), row("disk", 0.9),
        row("dp-sgd", 0.1, "validation"), row("dp-sgd", 0.1, epsilon=8.0),
    ]  # fmt: skip
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "imdb.json").write_text(json.dumps({"rows": dict(enumerate(rows))}), "utf-8")
    found = claims.measured(tmp_path)
    assert found["IMDB, logistic regression"]["dp-sgd"] == pytest.approx([80.0, 81.0])
    lines = claims.table(found).splitlines()
    assert len(lines) == 3 and "beats DP-SGD | IMDB, logistic regression: +5.00 ± 1.41 | **holds** |" in lines[2]


def test_a_grid_whose_points_have_all_run_stands_for_trials(claims, monkeypatch, tmp_path):
    import grids

    class Done(grids.Grid):
        def tests(self, store, arm):
            return [{"accuracy": 0.9}, {"accuracy": 0.92}] if arm == "DiSK" else []

    imdb = grids.GRIDS["imdb"]
    monkeypatch.setitem(grids.GRIDS, "imdb", Done(recipe=imdb.recipe, arms=imdb.arms, common=imdb.common))
    assert claims.measured(tmp_path)["IMDB, logistic regression"] == {"disk": pytest.approx([90.0, 92.0])}


def test_an_arm_that_the_grid_lacks_is_compared_within_the_trials(claims, tmp_path):
    rows = [
        {
            "accuracy": accuracy, "measured_on": "test", "target_epsilon": 1.0, "tag": {"arm": arm},
            "run": {"recipe": "imdb-logistic", "method": arm},
        }
        for arm, accuracy in (("dp-sgd", 0.80), ("dp-sgd", 0.81), ("dp-ngd", 0.82), ("dp-ngd", 0.83), ("dp-kfc-random", 0.5))
    ]  # fmt: skip
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "imdb.json").write_text(json.dumps({"rows": dict(enumerate(rows))}), "utf-8")
    found = claims.measured(tmp_path)
    assert set(found["IMDB, twenty trials"]) == {"dp-ngd", "dp-sgd"}
    assert set(found["IMDB, logistic regression"]) == {"dp-sgd"}


def test_arms_of_grids_are_there(claims):
    import grids

    for name, (recipe, arms) in claims.GRIDS.items():
        assert grids.GRIDS[name].recipe == recipe and set(arms) <= set(grids.GRIDS[name].arms)
