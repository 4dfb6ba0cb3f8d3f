"""The study of DP-NGD's variations: its stages, the rule of its verdicts, and KL of a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.app.tuning import runs
from dpkfc.app.tuning.runs import Run
from dpkfc_papers.store import Store
from tests.tuning.rows import row_of


@pytest.fixture
def study(study_module):
    return study_module("ngd_ablation")


@pytest.fixture
def pages(study_module, study):
    return study_module("ngd_pages")


@pytest.fixture
def duality(study_module):
    return study_module("ngd_duality")


def _fill(study, path):
    """A store with all points and the tests of the baseline, of made-up accuracies."""
    store = Store(path)

    def score(run, accuracy):
        store.put(run, row_of(run, accuracy))

    for method in study.ORDERS:
        for number, run in enumerate(study.grid_runs(store, (method,))):
            score(run, 0.7 + 0.01 * (number == 2))
    for seed in study.SEEDS:
        score(study.test_run(store, "whitened", seed), 0.80 + 0.001 * seed)
        score(study.test_run(store, "before", seed), 0.75 + 0.001 * seed)
        score(study.test_run(store, "whitened", seed, study.EVERY[32]), 0.85 + 0.001 * seed)
    return store


def test_every_run_of_the_study_has_settings_that_go_together(study, tmp_path):
    store = _fill(study, tmp_path / "rows.json")
    listed = {run for stage in study.stages(store) for run in stage if run is not None}
    assert len({run.hash for run in listed}) == len(listed) > 80
    private = study.test_run(store, "whitened", 0, study.PRIVATE)
    assert private.config().preconditioner.source == "private-oracle"
    assert private.config().data.public_data == ""


def test_cells_have_the_printed_numbers_and_a_verdict_or_none(study, pages, tmp_path):
    cells = {cell.label: cell for cell in pages.cells()}
    assert len(cells) == 15
    sparse = cells["Tcur = 32"]
    assert (sparse.printed, sparse.baseline) == (67.53, 70.05)
    store = _fill(study, tmp_path / "rows.json")
    verdicts = {cell.label: verdict for cell, _, verdict in pages.directions(store)}
    assert verdicts["clip before the curvature"] == pages.SAME
    assert verdicts["Tcur = 32"] == pages.OTHER
    assert verdicts["p = 2"] == pages.NOT_RUN
    assert "| Table 6 | Tcur = 32 | -2.52 | 85.10" in pages.direction_table(store)


def test_a_run_that_fails_leaves_a_row_without_an_accuracy(study, tmp_path, monkeypatch):
    def fail(run, place, judge):
        assert judge(1, 0.25)
        assert judge(2, 0.125)
        raise ValueError("the output contains NaN")

    monkeypatch.setattr(runs, "run_cell", fail)
    run = Run.make("digits", "dp-sgd", measure=study.UNTIL_FAILURE)
    row = run.find_measure()(run, tmp_path)
    store = Store(tmp_path / "rows.json")
    store.put(run, row)
    assert Store(store.path).get(run) == {
        "run": run.describe(),
        "hash": run.hash,
        "failed": "the output contains NaN",
        "accuracies": [0.25, 0.125],
    }


def test_the_divergence_of_a_small_step_is_half_its_fisher_norm(duality):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4)).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    moved = duality.Moved(model, {"inputs": x})
    step = {"0": 1e-3 * torch.randn(4, 4, dtype=torch.float64)}
    logits = F.pad(x, (0, 1), value=1.0) @ step["0"].mT
    p = model(x).softmax(1).detach()
    variance = (p * logits.square()).sum(1) - (p * logits).sum(1).square()
    found = moved.divergences(step)["inputs"]
    assert found == pytest.approx(float(variance.mean()) / 2, rel=1e-2)
    assert moved.divergences({"0": 0 * step["0"]})["inputs"] == pytest.approx(0.0, abs=1e-15)
