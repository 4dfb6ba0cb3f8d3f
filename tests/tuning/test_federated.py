"""The federated study in small: arms tuned alike, controls that differ in one thing, results that
are taken up again.
"""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.tuning.runs import StudyError
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.federated import FederatedConfig, FedGD, TrustedServer, federate
from dpkfc.federated.partition import dirichlet, iid, parts
from dpkfc_papers import federated_tables
from dpkfc_papers.federated_command import run_study
from dpkfc_papers.federated_features import small_features
from dpkfc_papers.federated_runs import FederatedRun, execute_run
from dpkfc_papers.federated_study import METHODS, SMOKE, STUDY, run_remaining
from dpkfc_papers.store import Store

SHIPPED = Path(__file__).resolve().parents[2] / "papers" / "results" / "federated_accuracy.json"
TINY = dataclasses.replace(
    SMOKE, tasks=("cifar10",), epsilons=(1.0,), seeds=2, rounds=2, clients=3, trials=2
)


def hashes(study, store):
    """Of all cells that the study is made of; an arm and a control that come to equal settings
    share theirs.
    """
    trials = {
        run.hash for task in study.tasks for name in METHODS for run in study.trial_runs(task, name)
    }
    return trials | {run.hash for _, run in study.test_runs(store)}


def test_the_partition_and_the_number_of_clients_change_nothing_but_the_noise():
    features = small_features("cifar10")
    x, y = (part.double() if part.is_floating_point() else part for part in features.train)

    def train_pieces(pieces):
        config = FederatedConfig(
            clients=len(pieces),
            rounds=4,
            expected_records=len(y),
            privacy=TrustedServer(),
            adjacency=REPLACE_ONE,
            rule=FedGD(1.0),
        )
        head = nn.Linear(x.shape[1], features.classes).double()
        for p in head.parameters():
            nn.init.zeros_(p)
        federate(config.with_noise(0.0, 1e-5), head, cross_entropy, parts((x, y), pieces))
        return torch.cat([p.detach().flatten() for p in head.parameters()])

    one = train_pieces(iid(len(y), 1))
    for pieces in (iid(len(y), 7), dirichlet(y.numpy(), 7, 0.1, seed=3)):
        assert torch.allclose(train_pieces(pieces), one, rtol=0, atol=1e-12)


def test_no_cell_starts_when_the_time_is_up_and_the_report_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dpkfc_papers.federated_study.execute_run", lambda *_: {}["started"])
    assert run_study(SMOKE, tmp_path, end=time.monotonic() - 1).is_file()


def test_every_tuned_arm_has_the_same_number_of_trials_and_none_sees_the_test_set():
    for name, arm in METHODS.items():
        runs = STUDY.trial_runs("mnist", name)
        assert len(runs) == len({run.hash for run in runs}) == (STUDY.trials if arm.space else 0)
        assert all(run.evaluate_on == "validation" and run.epsilon == 1.0 for run in runs)
        assert {tuple(dict(run.settings)) for run in runs} <= {tuple(sorted(arm.space))}


@pytest.mark.slow
def test_a_finished_study_runs_nothing_and_its_report_names_every_arm(tmp_path):
    path = tmp_path / "results.json"
    store = Store(path)
    run_remaining(TINY, store, small_features, lambda *what: None)
    assert {row["hash"] for row in store} == hashes(TINY, store) and len(store) <= TINY.max_runs
    assert not list(TINY.remaining_runs(Store(path)))
    text = federated_tables.tables(TINY, Store(path))
    assert (
        all(arm.label in text for arm in METHODS.values())
        and "reproduced" in text
        and "Dirichlet 0.5" in text
    )
    held = json.loads(path.read_text("utf-8"))["rows"]
    assert all(
        row["epsilon"] <= row["target_epsilon"] and row["hardware"]["torch"]
        for row in held.values()
    )
    assert federated_tables.figure(TINY, store, tmp_path / "picture.png").stat().st_size > 1000


def test_the_results_file_that_is_shipped_is_of_this_study():
    store = Store(SHIPPED)
    assert len(store) and {row["hash"] for row in store} <= hashes(STUDY, store)


@pytest.mark.parametrize("change", [{"rule": "fedprox"}, {"partition": "by-mood"}])
def test_what_is_unknown_is_named(change):
    run = FederatedRun(
        task="cifar10",
        rule="fedgd",
        settings=(("clip", 1.0), ("rate", 1.0)),
        epsilon=1.0,
        clients=2,
        rounds=1,
    )
    with pytest.raises(StudyError, match="unknown"):
        execute_run(dataclasses.replace(run, **change), small_features("cifar10"))


def test_the_ablation_has_a_control_of_the_same_step_for_every_rho(study_module):
    ablation = study_module("federated_ablation")
    assert len({run.hash for run in ablation.runs()}) == 4 * 5 * 3
    for rho in ablation.RHOS:
        with_order, without = ablation.runs_of(rho, 0.9)[0], ablation.runs_of(rho, None)[0]
        assert dict(without.settings) == {"rate": 0.1 / rho, "clip": 10.0}
        assert dict(with_order.settings).items() > dict(without.settings).items()
    assert "DP-FedGD at η/ρ" in ablation.table()
