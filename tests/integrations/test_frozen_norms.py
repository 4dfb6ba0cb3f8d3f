"""A norm whose statistics are frozen stays so under the Trainer, which puts the rest of the model
into training mode.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")
from transformers import TrainingArguments

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.huggingface import PrivateTrainer

PLAN = PrivacyConfig(expected_batch_size=16, steps=3, accountant="rdp").with_noise(1.0, 1e-4, 48)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
        self.b.parametrizations.weight.requires_grad_(False)

    def forward(self, x, labels=None):
        z = self.b(self.drop(self.norm(self.a(x))))
        return (
            {"logits": z} if labels is None else {"logits": z, "loss": F.cross_entropy(z, labels)}
        )


def trainer(model, folder):
    rows = [{"x": torch.randn(6), "labels": torch.randint(3, ())} for _ in range(48)]
    args = TrainingArguments(str(folder), report_to=[], use_cpu=True, save_strategy="no")
    return PrivateTrainer(model, args, plan=PLAN, train_dataset=rows)


def test_norms_in_eval_mode_stay_in_it_and_dropout_does_not(tmp_path):
    model = Net().eval()
    mean = model.norm.running_mean.clone()
    before = model.a.weight.detach().clone()
    private = trainer(model, tmp_path)
    assert private.train().metrics["releases"] == 3
    assert torch.equal(model.norm.running_mean, mean) and not torch.equal(model.a.weight, before)
    assert not model.norm.training and model.drop.training
