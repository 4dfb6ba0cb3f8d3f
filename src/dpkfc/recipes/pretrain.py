"""Training without privacy on labelled public data, as the start of any private method (DP-SGD-PT in the DP-NGD paper).

The paper leaves epochs, optimizer and what becomes of the head open. Here: SGD with momentum 0.9 and a cosine schedule, and a
head with new weights afterwards, since public labels mean something else.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.data.public import check_disjoint
from dpkfc.recipes.axes import public_data
from dpkfc.recipes.models import seeded
from dpkfc.recipes.settings import ConfigError, RunConfig

__all__ = ["pretrain"]

_BATCH = 50


def pretrain(config: RunConfig, model: nn.Module, input_shape: tuple[int, ...], private: tuple[Tensor, ...]) -> str:
    """Train a model on `public_data` in place and give its head new weights.

    Args:
        config: `public_data`, `pretrain_epochs`, `pretrain_lr` and the public `seed`.
        model: with its initial weights.
        input_shape: of one input.
        private: the private training set, which may share no row with the public one.

    Returns:
        One line for the privacy card.

    Raises:
        ConfigError: no labels, labels outside the head, shared rows, or a model without a linear head.
    """
    path = Path(config.public_data)
    inputs, labels = public_data(path, input_shape)
    if labels is None:
        raise ConfigError(f"public_data {path} has no `labels`; pre-training needs them")
    try:
        check_disjoint(inputs, private, f"public_data {path.name}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise ConfigError("pre-training needs a model whose last linear layer is its head; this one has no linear layer")
    head, labels = heads[-1], labels.long()
    own, classes = head.weight.detach().clone(), int(labels.max()) + 1
    if int(labels.min()) < 0 or classes > head.out_features:
        raise ConfigError(
            f"public_data {path} has labels from {int(labels.min())} to {classes - 1}, but the head has {head.out_features} "
            "outputs; merge public classes until they fit"
        )
    accuracy = _fit(config, model, inputs, labels)
    with torch.no_grad():
        head.weight.copy_(own)  # the weights it was built with: as new
        if head.bias is not None:
            head.bias.zero_()
    return (
        f"{config.pretrain_epochs} epochs on {len(inputs)} examples of {path.name}, declared public by its user "
        f"(accuracy there {accuracy:.1%}); the head begins anew"
    )


def _fit(config: RunConfig, model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    device = next(model.parameters()).device
    inputs, labels = (inputs.float() if inputs.is_floating_point() else inputs).to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.pretrain_lr, momentum=0.9)
    count = config.pretrain_epochs * -(-len(inputs) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    generator = torch.Generator().manual_seed(config.seed)

    def train() -> nn.Module:
        for _ in range(config.pretrain_epochs):
            for rows in torch.randperm(len(inputs), generator=generator).split(_BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimizer.step()
                schedule.step()
        return model

    seeded(train, config.seed)  # dropout draws from the public seed
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in zip(inputs.split(500), labels.split(500), strict=True))
    model.train()
    return right / len(inputs)
