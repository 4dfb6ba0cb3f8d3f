"""Judging released weights on held-out examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.recipes.datasets.examples import Examples

__all__ = ["Judged", "cross_entropy", "evaluate"]


@dataclass(frozen=True)
class Judged:
    """Accuracy in [0, 1] and mean loss."""

    accuracy: float
    loss: float


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, chunk: int = 1000) -> Judged:
    """Accuracy and mean cross-entropy; the model's mode is put back afterwards.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples a forward pass.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    right, loss = 0, 0.0
    for inputs, on_cpu in zip(examples[0].split(chunk), examples[1].split(chunk), strict=True):
        output, labels = model(inputs.to(device)), on_cpu.to(device)
        right += int((output.argmax(1) == labels).sum())
        loss += float(functional.cross_entropy(output, labels, reduction="sum"))
    model.train(training)
    return Judged(right / len(examples[1]), loss / len(examples[1]))
