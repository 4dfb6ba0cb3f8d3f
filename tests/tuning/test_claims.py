"""A claim holds where two arms differ by more than the 95 % interval of their difference, and on
the right side.
"""

import math
from functools import partial

import pytest

from dpkfc_papers.studies import claims, features_table, grids, scores
from dpkfc_papers.studies.harness import compare_means
from tests.tuning.rows import make_test_row, write_accuracy

imdb_row = partial(make_test_row, "imdb-logistic")


def test_a_difference_has_the_interval_of_welch():
    from scipy.stats import t

    above, below = [1.0, 3.0], [0.0, 1.0, 2.0, 3.0]
    gain, error = compare_means(above, below)
    # The means have the variances 1 and 5 / 12.
    freedom = (17 / 12) ** 2 / (1 + (5 / 12) ** 2 / 3)
    half = t.ppf(0.975, freedom) * math.sqrt(17 / 12)
    assert gain == pytest.approx(0.5)
    assert error == pytest.approx(half)
    assert compare_means([1.0, 1.0], [0.5, 0.5]) == (0.5, 0.0)


@pytest.mark.parametrize(
    "differences, verdict",
    [
        ({"a": (1.0, 0.5)}, "holds"),
        ({"a": (1.0, 0.5), "b": (2.0, 0.1)}, "holds"),
        ({"a": (0.2, 0.5)}, "no difference"),
        ({"a": (-1.0, 0.5)}, "the reverse"),
        (
            {"a": (1.0, 0.5), "b": (0.1, 0.5), "c": (-1, 0.5), "d": (-2, 0.5)},
            "holds in 1, no difference in 1, the reverse in 2",
        ),
        (
            {"a": (1.0, 0.5), "a (again)": (1.0, 0.5), "b": (0.1, 0.5)},
            "holds in 1, no difference in 1",
        ),
        ({"a": (1.0, 0.5), "a (again)": (0.1, 0.5)}, "no difference"),
    ],
)
def test_the_verdict_counts_data_sets(differences, verdict):
    assert claims.verdict(differences) == verdict


def test_arms_are_read_from_the_results(tmp_path):
    rows = [
        imdb_row("dp-sgd", 0.80),
        imdb_row("dp-sgd", 0.81),
        imdb_row("dp-kfc-tokens", 0.85),
        imdb_row("dp-kfc-tokens", 0.86),
        imdb_row("disk", 0.9),
        {**imdb_row("dp-sgd", 0.1), "measured_on": "validation"},
        imdb_row("dp-sgd", 0.1, epsilon=8.0),
    ]
    write_accuracy(tmp_path, "imdb", rows)
    found = scores.read_measured(tmp_path)
    assert found["IMDB, logistic regression"]["dp-sgd"] == pytest.approx([80.0, 81.0])
    lines = claims.table(found).splitlines()
    assert (
        len(lines) == 3
        and "beats DP-SGD | IMDB, logistic regression: +5.00 ± 3.04 | **holds** |" in lines[2]
    )


def test_a_grid_whose_points_have_all_run_stands_for_trials(monkeypatch, tmp_path):
    class Done(grids.Grid):
        def tests(self, store, arm):
            return [{"accuracy": 0.9}, {"accuracy": 0.92}] if arm == "DiSK" else []

    imdb = grids.GRIDS["imdb"]
    monkeypatch.setitem(grids.GRIDS, "imdb", Done(**vars(imdb)))
    assert scores.read_measured(tmp_path)["IMDB, logistic regression"] == {
        "disk": pytest.approx([90.0, 92.0])
    }


def test_an_arm_that_the_grid_lacks_is_compared_within_the_trials(tmp_path):
    rows = [
        imdb_row("dp-sgd", 0.80),
        imdb_row("dp-sgd", 0.81),
        imdb_row("dp-ngd", 0.82),
        imdb_row("dp-ngd", 0.83),
        imdb_row("dp-kfc-random", 0.5),
        imdb_row("dp-kfc-oracle", 0.9),
    ]
    write_accuracy(tmp_path, "imdb", rows)
    found = scores.read_measured(tmp_path)
    assert set(found["IMDB, twenty trials"]) == {"dp-ngd", "dp-sgd"}
    assert set(found["IMDB, logistic regression"]) == {"dp-sgd"}


def test_noise_is_compared_with_public_and_with_private_data_wherever_both_were_run():
    found = scores.read_measured(scores.RESULTS)
    lines = claims.table(found).splitlines()
    for words in (
        "no worse than public data",
        "no worse than private data",
        "no worse than the private images",
    ):
        (line,) = [line for line in lines if words in line]
        assert "MNIST, CNN: -" in line and ("Fashion" in line or "images" in words)
    assert not {"dp-kfc-oracle", "dp-kfc-public"} & set(found["IMDB, logistic regression"])


def test_a_claim_that_was_chosen_on_tests_is_withdrawn():
    found = scores.read_measured(scores.RESULTS)
    (line,) = [line for line in claims.table(found).splitlines() if "pink noise as its" in line]
    assert "**withdrawn**: dead leaves became the default when the tests of both were known" in line
    (line,) = [
        line for line in claims.verdict_table(found).splitlines() if "pink noise as its" in line
    ]
    assert "(chosen on tests)" in line and line.endswith("| **withdrawn** |")


@pytest.mark.parametrize(
    "cast, verdict",
    [
        (["holds", "holds"], "holds"),
        (["holds", "no difference"], "holds in part"),
        (["holds", "the reverse"], "mixed"),
        (["no difference"], "no difference"),
        (["no difference", "the reverse"], "does not hold"),
    ],
)
def test_a_verdict_has_two_words_or_three(cast, verdict):
    assert claims.judge(cast) == verdict


def test_rows_of_features_that_differ_in_one_part_are_compared():
    """New rows need no code, and what has no partner is left out."""

    def row(arm, *test, data="mnist", epsilon=1.0):
        values = {"data": data, "arm": arm, "epsilon": epsilon, "test": test}
        return features_table.Row.read({**values, "validation": [[1, 1, test[0]]]})

    rows = [
        row("scattering+encoder2, synthetic, dp-sgd", 0.96, 0.961),
        row("scattering+encoder2, white, dp-sgd", 0.94, 0.941),
        row("scattering+encoder2, synthetic, dp-kfc", 0.96, 0.961),
        row("scattering+encoder2, synthetic, dp-kfc, random directions", 0.9, 0.901),
        row("network, tanh, dp-sgd", 0.92, 0.921),
        row("scattering, synthetic, dp-sgd", 0.5, 0.5, epsilon=3.0),
    ]
    lines = claims.verdict_table({}, rows).splitlines()[2:]
    verdicts = {line.split(" | ")[0].removeprefix("| "): line.split("**")[1] for line in lines}
    assert verdicts == {
        "ours: linear heads on synthetic features beat networks on pixels": "holds",
        "ours: … those of white noise": "holds",
        "ours: whitening adds to features with scales": "no difference",
        "ours: … random directions are worse": "holds",
    }


def test_a_paper_has_its_claims_with_the_controls_beside_them():
    found = {"A": {"sofim": [2.0, 2.1], "fedgd": [1.0, 1.1], "fedgd-matched": [2.0, 2.1]}}
    assert claims.paper_table(found).splitlines()[2:] == [
        "| DP-FedSOFIM | its server step beats DP-FedGD, both tuned | **holds (1, 0, 0)** |"
        " also at a matched learning rate: no difference (0, 1, 0) |"
    ]
    lines = claims.paper_table(scores.read_measured(scores.RESULTS)).splitlines()
    assert 10 < len(lines) <= 40 and not any("this project" in line for line in lines)
