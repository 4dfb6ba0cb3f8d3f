"""Hold records with NaN or infinity: they contribute zero, and no message tells of them."""

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.federated import federate
from tests.federated.worlds import datasets, head, plan_of
from tests.federated.worlds import loss_fn as federated_loss
from tests.integrations import opacus_cases
from tests.sessions import train
from tests.test_session import N, data, loss_fn, net, plan, session, weights


class Token(nn.Module):
    """A parameter of its own, and dropout below: it cannot be run again for single examples."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.body, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.position.expand(
            x.shape[1] + 1, -1
        )
        return self.head(self.drop(self.body(x).relu()).mean(1))


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_with_dropout_that_cannot_be_run_again_trains_on(verify):
    """From the first step on, with gradients of zero below the head, and in batches as long as the
    seven positions.
    """
    torch.manual_seed(3)
    model, x, y = Token(), torch.randn(N, 6, 4), torch.randint(0, 3, (N,))
    x[::3] = float("nan")
    nn.init.zeros_(model.head.weight)

    train(model, (x, y), expected_batch_size=7, steps=30, verify=verify)
    assert bool(weights(model).isfinite().all())


class Root(nn.Module):
    """Its derivative at zero is infinite: that of a root."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.gain).square().sum(-1).sqrt()


# -- messages --------------------------------------------------------------------------------------


def train_by_session(missing):
    """Train on records of which the first ones lack a value."""
    x, y = data()
    x[:missing, 2] = float("nan")
    with session(plan(1.0, sampler="fixed"), net(), dataset=(x, y), verify=False) as s:
        return [s.step(batch, loss_fn) for batch in s.batches()]


def train_by_engine(missing):
    x, y = data(dtype=torch.float32)
    x[:missing, 2] = float("nan")
    engine, model, optimizer, loader = opacus_cases.private(
        net(dtype=torch.float32),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N // 2),
        verify=False,
        test_mode_seed=None,
    )
    opacus_cases.train(model, optimizer, loader)
    engine.close()


@pytest.mark.parametrize(("missing", "shares"), [(0, {0.0}), (N // 2, None), (N, {1.0})])
def test_a_step_tells_its_owner_the_share_of_records_that_are_not_finite(missing, shares):
    found = {record.nonfinite_fraction for record in train_by_session(missing)}
    assert found == shares if shares else all(0 < x < 1 for x in found)


@pytest.mark.parametrize("run", [train_by_session, train_by_engine])
def test_no_message_depends_on_the_records(run, caplog):
    # The first run has what is said once a process.
    run(0)
    messages = []
    for missing in (0, 3 * N // 4, N):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
            warnings.simplefilter("always")
            run(missing)
        logged = [record.getMessage() for record in caplog.records]
        messages.append([str(warning.message) for warning in caught] + logged)
    assert messages[0] == messages[1] == messages[2]


def train_by_federation(missing):
    federate(plan_of(rounds=1), head(), federated_loss, datasets())


def train_by_lightning(missing):
    lightning_cases = pytest.importorskip("tests.integrations.lightning_cases")
    with TemporaryDirectory() as folder:
        lightning_cases.fit(Path(folder), plan=lightning_cases.plan_of(steps=1))


def train_by_trainer(missing):
    hf_cases = pytest.importorskip("tests.integrations.hf_cases")
    with TemporaryDirectory() as folder:
        hf_cases.trainer_of(folder, "sequence", plan=hf_cases.plan_of(steps=1)).train()


@pytest.mark.parametrize(
    "run", [train_by_engine, train_by_federation, train_by_lightning, train_by_trainer]
)
def test_every_script_has_a_warning_on_what_becomes_of_missing_values(run):
    with pytest.warns(UserWarning, match="check the data for missing values") as caught:
        run(0)
    assert all(len(str(warning.message)) <= 160 for warning in caught)
