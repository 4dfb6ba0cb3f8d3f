"""A grid judges an arm on the test set only when all of its points have been run, and with the best
of them.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dpkfc_papers.studies import grids

GRIDS = vars(grids)
GRID = GRIDS["Grid"](
    recipe="digits",
    common={"steps": 4},
    seeds=(0, 1),
    arms={
        "SGD": ("dp-sgd", [{"lr": 0.1}, {"lr": 0.2}]),
        "Adam": ("dp-adam", [{"lr": 0.1, "schedule": "cosine"}, {"lr": 0.2}]),
    },
)


class Known(dict):
    """Rows by the hash of their run."""

    def get(self, run):
        return super().get(run.hash)


def test_what_wins_on_the_validation_split_is_judged_seed_by_seed():
    points = [run for _, run in GRID.cells(Known(), False)]
    assert [run.evaluate_on for run in points] == ["validation"] * 4 and len(
        {run.hash for run in points}
    ) == 4
    row = {"noise_multiplier": 1.0, "steps": 4}
    known = Known(
        {
            run.hash: row | {"accuracy": accuracy}
            for run, accuracy in zip(points[:3], (0.5, 0.6, 0.9), strict=True)
        }
    )
    tests = GRID.cells(known, True)
    assert [(arm, run.evaluate_on, run.seed, run.config().optimizer.lr) for arm, run in tests] == [
        ("SGD", "test", 0, 0.2),
        ("SGD", "test", 1, 0.2),
    ]
    assert all(run.config().data.validation_size == 0 for _, run in tests)
    best, other = GRID.points(known, "SGD")
    assert (best[0]["lr"], other[0]["lr"]) == (0.2, 0.1)
    assert (
        GRIDS["_describe_point"]({"lr": 0.1, "schedule": "cosine"}) == "lr = 0.1, schedule = cosine"
    )


def test_of_several_tuning_seeds_the_mean_decides_and_all_have_to_have_run(study_module):
    # The grid imports it when it is needed.
    study_module("harness")
    grid = GRIDS["Grid"](
        recipe="digits",
        common={"steps": 4},
        seeds=(0,),
        tuned_with=(7, 8),
        arms={"SGD": ("dp-sgd", [{"lr": 0.1}, {"lr": 0.2}])},
    )
    points = [run for _, run in grid.cells(Known(), False)]
    assert [(run.seed, run.config().optimizer.lr) for run in points] == [
        (7, 0.1),
        (7, 0.2),
        (8, 0.1),
        (8, 0.2),
    ]
    row = {"noise_multiplier": 1.0, "steps": 4}
    known = Known(
        {
            run.hash: row | {"accuracy": x}
            for run, x in zip(points, (0.9, 0.8, 0.5, 0.8), strict=True)
        }
    )
    assert [run.config().optimizer.lr for _, run in grid.cells(known, True)] == [0.2]
    assert GRIDS["_spread"](grid.points(known, "SGD")[1][1]) == "70.00\xa0±\xa0254.12 (2)"
    del known[points[2].hash]
    assert not grid.cells(known, True)


def test_every_grid_has_runs_of_its_own():
    for grid in GRIDS["GRIDS"].values():
        runs = [run.hash for _, run in grid.cells(Known(), False)]
        assert len(runs) == len(set(runs))


def test_the_digits_that_play_public_data_are_private_for_no_method():
    methods = importlib.import_module("dpkfc_papers.studies.methods")
    train = torch.arange(1437.0)
    whole = SimpleNamespace(train=(train, train.long()), test=(train[:3], train[:3].long()))
    validated = methods.divide(whole, "validation")
    assert [len(part[1]) for part in validated] == [200, 987, 250]
    assert torch.cat([part[0] for part in validated]).sort().values.equal(train)
    public, private, held_out = methods.divide(whole, "test")
    assert (len(private[1]), held_out) == (1237, whole.test)
    assert not set(public[0].tolist()) & set(private[0].tolist())


def test_a_method_trains_on_what_public_and_validation_images_leave():
    methods = importlib.import_module("dpkfc_papers.studies.methods")
    run = replace(
        methods.GRID, common={**methods.GRID.common, "steps": 2, "accountant": "rdp"}
    ).run("dp-sgd-pt", {"pretrain_epochs": 1}, 100, False)
    row = methods.train_once(run, None)
    assert row["steps"] == 2 and row["measured_on"] == "validation"
    assert row["hash"] == run.hash and row["epsilon"] == pytest.approx(3.0, abs=0.05)
