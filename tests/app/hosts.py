"""Folders that `write_card` leaves in every host, of runs that take a second."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpkfc import PrivacyConfig, Session
from dpkfc.federated import FederatedConfig, TrustedServer, federate
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.report.officer import Declared
from tests.app.finished import finished_run
from tests.sessions import cross_entropy as loss

__all__ = ["HOSTS", "SAID", "open_session", "plan_of", "train"]

N = 60
X, Y = torch.randn(N, 6, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2
SAID = {
    "title": "readmission",
    "chosen_by": "beforehand",
    "not_private": {"loss": "of private data"},
    "declared": Declared(owner="Ward 3", purpose="predict readmission"),
}


def plan_of(**changed):
    settings = {"expected_batch_size": 20, "steps": 4, "accountant": "rdp", **changed}
    return PrivacyConfig(**settings).with_noise(2.0, 1e-3, N)


def open_session(path=None, *, resume=False, **changed):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = plan_of(**changed)
    return Session(plan, model, optimizer, (X, Y), ledger_path=path, resume=resume)


def train(session, steps=4):
    for _, batch in zip(range(steps), session.batches(), strict=False):
        session.step(batch, loss)
    return session


def run_session(folder):
    with open_session(weight_average=WeightEMA(0.5)) as session:
        train(session).write_card(folder / "card", **SAID)
    return folder / "card"


def train_engine(folder):
    model, engine = nn.Linear(6, 2), PrivacyEngine(accountant="rdp")
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        ledger_path=folder / "elsewhere.jsonl",
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.close()
    return engine


def run_engine(folder):
    train_engine(folder).write_card(folder / "card", **SAID)
    return folder / "card"


def run_trainer(folder):
    pytest.importorskip("transformers")
    from tests.integrations import hf_cases

    trainer = hf_cases.trainer_of(folder / "run")
    trainer.train()
    trainer.write_card(folder / "card", **SAID)
    return folder / "card"


def run_lightning(folder):
    pytest.importorskip("lightning.pytorch")
    from tests.integrations import lightning_cases

    with lightning_cases.quiet():
        _, _, private = lightning_cases.fit(folder / "run")
    private.write_card(folder / "card", **SAID)
    return folder / "card"


def train_server():
    from tests.federated.worlds import CLIENTS, RECORDS, datasets, head, loss_fn

    config = FederatedConfig(
        clients=CLIENTS, rounds=2, expected_records=RECORDS, privacy=TrustedServer()
    )
    return federate(config.calibrate(2.0, 1e-3), head(), loss_fn, datasets())


def run_server(folder):
    run = train_server()
    run.server.write_card(folder / "card", run.records, **SAID)
    return folder / "card"


def run_command(folder):
    return finished_run(folder / "run")


HOSTS = {
    "session": run_session,
    "opacus": run_engine,
    "transformers": run_trainer,
    "lightning": run_lightning,
    "federated": run_server,
    "dpkfc train": run_command,
}
