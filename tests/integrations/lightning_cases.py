"""A small LightningModule, its data, a plan and a fit with a ledger in a folder."""

import logging
import warnings
from contextlib import contextmanager

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.lightning import PrivateModule, PrivateTraining
from dpkfc.privacy.ledger import verify
from tests.recording import Heard

N, B = 40, 8


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )


class Net(PrivateModule):
    def __init__(self, dropout=0.0, lr=0.1, momentum=0.9):
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.momentum = lr, momentum
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
        )
        self.seen, self.grads = Heard(), 0

    def forward(self, x):
        return self.layers(x)

    def per_example_loss(self, batch):
        self.seen.append((self.training, len(batch[0])))
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        self.grads += all(p.grad is not None for p in self.parameters())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plan_of(noise=1.0, steps=7, **settings):
    chosen = {"expected_batch_size": B, "steps": steps, "accountant": "rdp", **settings}
    return PrivacyConfig(**chosen).with_noise(noise, 1e-3, N)


def trainer_of(folder, private, *others, **settings):
    chosen = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    chosen |= {"logger": False, "enable_checkpointing": False, "default_root_dir": folder}
    return L.Trainer(callbacks=[*([private] if private else []), *others], **{**chosen, **settings})


def fit(folder, module=None, plan=None, callbacks=(), dataset=None, ckpt_path=None, **settings):
    """(trainer, module, callback) after a fit with a ledger in the folder."""
    module = module or Net()
    folder.mkdir(exist_ok=True)
    private = PrivateTraining(
        plan or plan_of(), dataset or data(), ledger_path=folder / "ledger.jsonl"
    )
    trainer = trainer_of(folder, private, *callbacks, **settings)
    trainer.fit(module, val_dataloaders=DataLoader(data(12), 6), ckpt_path=ckpt_path)
    return trainer, module, private


def releases(folder):
    return len(verify(folder / "ledger.jsonl").releases)


@contextmanager
def quiet():
    """Without the advice of Lightning, and without the warning of a run in test mode."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*no guarantee of this run")
        yield
