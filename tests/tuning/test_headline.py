"""The front page's table and picture hold what the results hold, and nothing that rests on a single
seed is drawn.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def headline(study_module):
    return study_module("headline")


def rows(cells):
    """A results file with these (arm, ε, accuracy), one seed each, and a trial that must not
    count.
    """
    test = {"run": {"recipe": "mnist-cnn"}, "measured_on": "test"}
    held = [
        {**test, "target_epsilon": epsilon, "accuracy": accuracy, "tag": {"arm": arm}}
        for arm, epsilon, accuracy in cells
    ]
    trial = {**held[0], "measured_on": "validation", "accuracy": 0.1}
    return {"rows": {str(i): row for i, row in enumerate([*held, trial])}}


CELLS = [
    ("dp-sgd", 1.0, 0.93),
    ("dp-sgd", 1.0, 0.95),
    ("dp-sgd", 2.0, 0.95),
    ("dp-kfc-a", 1.0, 0.96),
    ("dp-kfc-a", 1.0, 0.962),
    ("unknown", 1.0, 0.5),
]


def test_a_cell_is_the_mean_over_its_seeds(headline):
    table = headline.table(rows(CELLS)).splitlines()
    assert table[0] == "| MNIST, test % | its curvature sees | ε = 1 (seeds) | ε = 2 (seeds) |"
    assert table[2].startswith("| linear head on features")
    assert table[3:] == [
        "| DP-KFC, inputs | nothing: pink noise | 96.10\xa0±\xa01.27\xa0(2) | – |",
        "| DP-SGD | nothing | 94.00\xa0±\xa012.71\xa0(2) | 95.00\xa0(1) |",
    ]


def test_the_picture_leaves_single_seeds_out(headline, tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = headline._enough(headline.cells(rows(CELLS), "mnist-cnn"))
    assert {arm: sorted(of) for arm, of in found.items()} == {"dp-sgd": [1.0], "dp-kfc-a": [1.0]}
    headline.picture(rows(CELLS), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
