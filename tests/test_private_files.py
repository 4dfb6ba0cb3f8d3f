"""Files with figures that ε does not protect can be read by their owner alone; other files keep the
mode of the system.
"""

import os
import stat

import pytest
import torch

from dpkfc import checkpoint
from dpkfc.app.metrics import Metrics, Row
from dpkfc.app.run_folder import RunFolder, write_atomically, write_json
from dpkfc.app.tuning import tune
from dpkfc.app.tuning.arms import arm_of
from dpkfc.app.tuning.runs import Run
from dpkfc.app.tuning.search import Search
from dpkfc.app.tuning.tuned import Tuned
from dpkfc_papers.store import Store

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows keeps rights in another form")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_to_all():
    before = os.umask(0o022)
    yield
    os.umask(before)


def write_metrics(folder):
    Metrics(rows=[Row(step=1, epsilon=0.5, clipped_fraction=0.25)]).write(
        folder / "metrics.parquet"
    )


def write_results(folder):
    run = Run.make("digits", "dp-sgd")
    row = {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": 0.5,
        "epsilon": 1.0,
        "steps": 3,
        "noise_multiplier": 1.0,
    }
    with Store(folder / "results.json") as store:
        store.put(run, row)
    (folder / "results.json.lock").unlink()  # holds the number of a process


def write_tuned(folder):
    numbers = dict.fromkeys(("epsilon_with_tuning", "epsilon_with_training", "epsilon_composed"))
    Tuned(
        recipe="digits",
        search="tpe",
        planned=1,
        validation=50,
        epsilon=1.0,
        delta=1e-5,
        statement="",
        unpublished="",
        runs_begun=1,
        arms=(),
        complete=True,
        failures={},
        **numbers,
    ).write(folder)


def write_trials(folder):
    pytest.importorskip("optuna")
    arm = arm_of("digits", "dp-sgd")
    search = Search(arm, {"validation_size": 50}, "digits", folder / "trials.log", trials=2)
    search.ask()
    tune._write_rows(folder / "results.json", search.rows())


def write_client_state(folder):
    checkpoint.write(
        folder / "state", {"control": {"w": torch.ones(2)}}, {"mask": torch.ones(1)}, private=True
    )


@pytest.mark.parametrize(
    "write",
    [
        write_metrics,
        write_results,
        write_tuned,
        write_trials,
        write_client_state,
    ],
)
def test_a_file_with_private_figures_is_for_its_owner_alone(tmp_path, write):
    write(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and {mode(path) for path in files} == {0o600}
    assert all(mode(path) == 0o700 for path in tmp_path.rglob("*") if path.is_dir())


def test_a_file_that_all_could_read_is_replaced_by_one_for_its_owner(tmp_path):
    path = tmp_path / "metrics.parquet"
    path.touch(0o644)
    path.with_name("metrics.parquet.part").touch(0o644)  # left by a crash
    write_metrics(tmp_path)
    assert mode(path) == 0o600


def test_what_is_meant_to_be_shared_keeps_the_mode_of_the_system(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.card, {"guarantee": {}})
    write_atomically(folder.model, lambda part: part.write_bytes(b""))
    checkpoint.write(folder.checkpoint, {"model": {"w": torch.ones(2)}}, {})
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(files) == 4 and {mode(path) for path in files} == {0o644}
