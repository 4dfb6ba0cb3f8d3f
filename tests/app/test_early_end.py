"""A run that public examples end early, and the scores of single classes."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.app.finished import read_card

pytest.importorskip("sklearn")

from dpkfc.app.metrics import Metrics
from dpkfc.app.owndata.tasks import Task, judgement
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.objective import cross_entropy, evaluate
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import resume, run
from dpkfc.early_stopping import EarlyStopping, PrivateEarlyStopping
from dpkfc.report.verify import verify_ledger

BASE = {
    "recipe": "digits",
    "method": "dp-sgd",
    "steps": 12,
    "evaluate_every": 1,
    "epsilon": 3.0,
    "accountant": "rdp",
}


@pytest.fixture
def public_file(tmp_path):
    """Noise with labels: its loss soon stops falling."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (20,), generator=generator)
    path = tmp_path / "public.safetensors"
    save_file({"inputs": inputs, "labels": labels}, path)
    return path


def test_an_early_end_charges_every_step(tmp_path, public_file):
    out = tmp_path / "run"
    # At this rate the loss on noise rises at once, whatever the noise of the steps is.
    settings = {**BASE, "lr": 20.0, "patience": 2, "public_validation": str(public_file)}
    result = run(run_config({**settings, "out": str(out)}))
    rows = Metrics.read(out / "metrics.parquet").rows
    card = read_card(out)
    assert rows[-1].step < 12 and not result.interrupted
    assert rows[-1].public_loss is not None
    assert card["guarantee"]["releases"] == 12
    assert f"after step {rows[-1].step}" in card["hyper_parameters"]["early end"]
    assert rows[-1].epsilon == pytest.approx(card["guarantee"]["epsilon"])
    assert result.epsilon == pytest.approx(card["guarantee"]["epsilon"])
    assert verify_ledger(out / "ledger.jsonl")["releases"] == 12
    with pytest.raises(ConfigError, match="complete"):
        resume(out)


@pytest.mark.parametrize("who", ["public loss", "score", "task"])
def test_an_evaluation_leaves_frozen_statistics_frozen(who):
    """A run would end at its next step, whose pass writes statistics of private examples."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    examples = torch.randn(8, 3), torch.randint(2, (8,))
    if who == "public loss":
        EarlyStopping(1, on=examples).loss(model, cross_entropy)
    elif who == "score":
        evaluate(model, examples)
    else:
        task = Task(
            model=lambda: model,
            train=examples,
            test=examples,
            classes=("left", "right"),
            metrics=lambda network, batch: {"sum": float(network(batch[0]).sum())},
        )
        judgement(task).judge(model, examples)
    assert [module.training for module in model] == [True, False, True]


def test_a_loss_that_writes_into_its_batch_leaves_the_public_examples():
    def loss(model, batch):
        return model(batch[0].mul_(2)).sum(1)

    model, stopping = nn.Linear(3, 1), EarlyStopping(1, on=(torch.randn(8, 3),))
    assert stopping.loss(model, loss) == stopping.loss(model, loss)
    private = PrivateEarlyStopping(1, on=stopping.on, most=1.0)
    assert private.total(model, loss) == private.total(model, loss)


def test_patience_needs_public_examples(public_file):
    with pytest.raises(ConfigError, match="give both or none"):
        make_config(recipe="digits", patience=2)
    with pytest.raises(ConfigError, match="give both or none"):
        make_config(recipe="digits", public_validation=str(public_file))


def test_public_validation_without_labels_is_one_error(tmp_path):
    path = tmp_path / "public.safetensors"
    save_file({"inputs": torch.randn(3, 1, 8, 8)}, path)
    config = run_config({**BASE, "patience": 1, "public_validation": str(path)})
    with pytest.raises(ConfigError, match="no `labels`"):
        prepare(config)
