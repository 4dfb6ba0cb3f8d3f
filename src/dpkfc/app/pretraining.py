"""Train without privacy on labelled public data, as the start of any private method.

This is DP-SGD-PT of the DP-NGD paper, which leaves epochs, optimizer and the head open. Here: SGD
with momentum 0.9 and a cosine schedule, and a head with new weights afterwards, since public labels
mean something else.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.models import build_seeded
from dpkfc.app.public_data import read_labelled
from dpkfc.app.recipes.objective import evaluate
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError

_BATCH = 50


def pretrain(config: RunConfig, model: nn.Module, input_shape: tuple[int, ...]) -> str:
    """Train a model on `public_data` in place, and give its head new weights.

    Args:
        config: `public_data`, `pretrain_epochs`, `pretrain_lr` and the public `seed`.
        model: with its initial weights.
        input_shape: of one input.

    Returns:
        One line for the privacy card.

    Raises:
        ConfigError: no labels, labels outside the head, or a model without a linear head.
    """
    path = Path(config.data.public_data)
    inputs, labels = read_labelled(path, input_shape, "public_data", "pre-training")
    head = _head_of(model)
    labels = labels.long()
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= head.out_features:
        raise ConfigError(
            f"public_data {path} has labels from {least} to {most}, but the head has "
            f"{head.out_features} outputs; merge public classes until they fit"
        )
    first_weight = head.weight.detach().clone()
    accuracy = _fit(config, model, inputs, labels)
    with torch.no_grad():
        head.weight.copy_(first_weight)
        if head.bias is not None:
            head.bias.zero_()
    return (
        f"{config.model.pretrain_epochs} epochs on {len(inputs)} examples of {path.name}, declared"
        f" public by its user (accuracy there {accuracy:.1%}); the head begins anew"
    )


def _head_of(model: nn.Module) -> nn.Linear:
    """Return the last linear layer of a model.

    Raises:
        ConfigError: the model has no linear layer.
    """
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise ConfigError(
            "pre-training needs a model with a linear layer, which serves as its head"
        )
    return heads[-1]


def _fit(config: RunConfig, model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Train on public examples and return the accuracy on them."""
    device = next(model.parameters()).device
    inputs, labels = inputs.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.model.pretrain_lr, momentum=0.9)
    batches = math.ceil(len(inputs) / _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config.model.pretrain_epochs * batches
    )
    generator = torch.Generator().manual_seed(config.run.seed)

    def train() -> nn.Module:
        for _ in range(config.model.pretrain_epochs):
            for rows in torch.randperm(len(inputs), generator=generator).split(_BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimizer.step()
                schedule.step()
        return model

    # Dropout draws from the public seed.
    build_seeded(train, config.run.seed)
    optimizer.zero_grad()
    return evaluate(model, (inputs, labels), 500).accuracy
