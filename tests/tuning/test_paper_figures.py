"""Scripts that measure figures of papers: rates and filters by their best settings."""

from dataclasses import replace

import pytest
import torch

from dpkfc_papers import federated_features, federated_runs


class Rows:
    """Rows by hash, as a store has them."""

    def __init__(self):
        self.found = {}

    def get(self, run):
        return self.found.get(run.hash)

    def add(self, run, accuracy):
        self.found[run.hash] = {"accuracy": accuracy}


def test_a_federated_rate_is_chosen_on_validation_after_its_grid(study_module):
    study = study_module("federated_variations")
    rows = Rows()
    grid = study.client_grid(0.1, "sofim")
    for place, run in enumerate(grid):
        assert study.test_runs(rows, grid) == []
        rows.add(run, 0.5 - abs(place - 1) / 10)
    found = study.test_runs(rows, grid)
    assert [run.eta for run in found] == [study.GRID[1]] * len(study.SEEDS)
    assert {run.evaluate_on for run in found} == {"test"}


@pytest.mark.slow
def test_a_network_trains_from_scratch_on_images(study_module):
    study = study_module("federated_variations")
    x = torch.randn(60, 1, 14, 14)
    y = torch.arange(60) % 10
    data = federated_features.Features(
        train=(x[:30], y[:30]),
        validation=(x[30:40], y[30:40]),
        test=(x[40:], y[40:]),
        public=torch.empty(0),
        classes=10,
        origin="made up",
    )
    run = replace(study.network_grid("sofim", 1.0)[0], rounds=2)
    for evaluate_on, size in (("validation", 30), ("test", 40)):
        now = replace(run, evaluate_on=evaluate_on)
        record = federated_runs.execute_run(now, data, study.network)
        assert (record["dataset_size"], record["steps"]) == (size, 2)
        assert record["epsilon"] <= study.EPSILON
