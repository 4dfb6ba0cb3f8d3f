"""DiSK's Fig. 6a: its cells, means over repetitions, the best rate of each method, and a name of a
table and a figure.
"""

import json

import pytest

from dpkfc.app.tuning.runs import StudyError
from dpkfc_papers import commands, tables
from dpkfc_papers.figures import FIGURES, find, reproduce_figures
from dpkfc_papers.noise_sweep import RATES, SWEEP_METHODS, best, points, sweep_cells
from dpkfc_papers.store import Store
from tests.tuning import rows

pytestmark = pytest.mark.slow

FIGURE = FIGURES["disk-fig6a"]


def row_of(run, loss):
    more = {"steps": 320, "noise_multiplier": 4.0, "expected_batch_size": 500}
    return rows.row_of(run, 0.9, loss=loss, **more)


def test_points_are_means_over_repetitions_and_a_run_without_a_finite_loss_takes_its_point_away():
    runs = [
        run
        for run in sweep_cells()
        if dict(run.settings)["noise_multiplier"] == 4.0 and run.seed < 2
    ]
    rows = [
        row_of(run, dict(run.settings)["lr"] + run.seed + (run.method == "disk")) for run in runs
    ]
    found = points(rows)
    assert [(one.method, one.lr) for one in found] == [
        (method, lr) for method in SWEEP_METHODS for lr in RATES
    ]
    assert all(
        one.mean == pytest.approx(one.lr + 0.5 + (one.method == "disk")) and one.runs == 2
        for one in found
    )
    assert all(one.std == pytest.approx(2**-0.5) for one in found)
    assert [(one.method, one.lr) for one in best(found)] == [
        (method, min(RATES)) for method in SWEEP_METHODS
    ]
    rows[0]["loss"] = None
    assert len(points(rows)) == len(found) - 1


def test_the_figure_is_made_of_small_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "drive", lambda *_, **__: None)
    with Store(tmp_path / "results.json") as store:
        for place, run in enumerate(FIGURE.runs(True)):
            store.put(run, row_of(run, 0.01 + 0.01 * place))
    (made,) = reproduce_figures(["disk-fig6"], tmp_path, small=True).values()
    content = json.loads((tmp_path / "disk-fig6a.json").read_text("utf-8"))
    assert (
        not made.missing
        and len(content["rows"]) == len(FIGURE.runs(True))
        and content["private"].startswith("nothing")
    )
    assert content["rows"][0]["values"]["loss"] == 0.01
    assert (tmp_path / "disk-fig6a-linear-regression.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_may_be_a_table_and_a_figure():
    assert find("disk-fig6") is FIGURE
    assert commands._kinds(["disk-fig6"], [], results=None) == (["disk-fig6"], ["disk-fig6"], False)
    column = "(b) CIFAR-10, WRN"
    assert commands._kinds(["disk-fig6"], [column], results=None) == (["disk-fig6"], [], False)
    with pytest.raises(StudyError, match="leave out 'disk-fig6a'"):
        commands._kinds(["disk-fig6a"], [column], results=None)
