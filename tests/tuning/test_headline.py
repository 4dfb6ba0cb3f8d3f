"""The front page's table and picture hold what the results hold, and nothing that rests on a single
seed is drawn.
"""

import pytest

from dpkfc.app.recipes.catalogue import run_config
from dpkfc_papers.store import Store, winners_tests
from dpkfc_papers.studies import grids, headline, scores
from dpkfc_papers.studies.harness import RESULTS, interval, read_json
from dpkfc_papers.studies.scores import study_cells
from tests.tuning.rows import make_test_row, write_accuracy


def write_rows(folder):
    """Write a results file with `CELLS`, one seed each, and a trial that must not count."""
    held = [make_test_row("mnist-cnn", arm, accuracy, epsilon) for arm, epsilon, accuracy in CELLS]
    trial = {**held[0], "measured_on": "validation", "accuracy": 0.1}
    return write_accuracy(folder, "cnn", [*held, trial])


CELLS = [
    ("dp-sgd", 1.0, 0.93),
    ("dp-sgd", 1.0, 0.95),
    ("dp-sgd", 2.0, 0.95),
    ("dp-kfc-a", 1.0, 0.96),
    ("dp-kfc-a", 1.0, 0.962),
    ("unknown", 1.0, 0.5),
]


def test_a_cell_is_the_mean_over_its_seeds(tmp_path):
    table = headline.table(write_rows(tmp_path)).splitlines()
    assert table[0] == "| MNIST, test % | curvature measured on | ε = 1 (seeds) | ε = 2 (seeds) |"
    assert table[2].startswith("| linear head on features")
    assert table[3:] == [
        "| DP-KFC, inputs | synthetic pink noise | 96.10\xa0±\xa01.27\xa0(2) | – |",
        "| DP-SGD | – | 94.00\xa0±\xa012.71\xa0(2) | 95.00\xa0(1) |",
    ]


def test_the_picture_leaves_single_seeds_out(tmp_path):
    pytest.importorskip("matplotlib")
    found = headline._select_tested(study_cells("mnist-cnn", write_rows(tmp_path)))
    assert {arm: sorted(of) for arm, of in found.items()} == {"dp-sgd": [1.0], "dp-kfc-a": [1.0]}
    headline.picture(tmp_path / "picture.png", tmp_path)
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_pages_have_one_number_for_a_cell():
    rows = read_json(RESULTS / "accuracy" / "cnn.json")["rows"].values()
    for (recipe, arm), name in scores.MORE_SEEDS.items():
        study = [row for row in winners_tests(rows) if row["target_epsilon"] == 1.0]
        study = [row for row in study if (row["run"]["recipe"], row["tag"]["arm"]) == (recipe, arm)]
        (label,) = [label for label, key in grids.GRIDS[name].keys.items() if key == arm]
        tests = list(grids.GRIDS[name].tests(Store(grids.RESULTS / f"{name}.json"), label))
        assert len(tests) > len(study) > 1
        settings = []
        for row in (study[0], tests[0]):
            run = {key: row["run"][key] for key in ("recipe", "method")} | row["run"]["settings"]
            config = run_config(run).values
            # DP-SGD has no curvature, and so no rank.
            settings.append({key: config[key] for key in config if key != "max_rank"})
        assert settings[0] == settings[1]
        values = study_cells(recipe)[arm][1.0]
        assert values == [100 * test["accuracy"] for test in tests]
        assert interval(values) in headline.choice_table()
