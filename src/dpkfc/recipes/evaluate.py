"""What a recipe minimises and is judged by: loss of a batch, and score and mean loss of held-out examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.recipes.datasets.examples import Examples

__all__ = ["CLASSIFICATION", "Judged", "Task", "cross_entropy", "evaluate"]


@dataclass(frozen=True)
class Judged:
    """How good a model is on held-out examples.

    Attributes:
        accuracy: the score of the task, 1 where it is perfect; for classes the share of right answers.
        loss: mean loss.
    """

    accuracy: float
    loss: float


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, chunk: int = 250) -> Judged:
    """Accuracy and mean cross-entropy; the model's mode is put back afterwards.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples a forward pass; what they leave behind then fits the caches of a core.
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is minimised, and what a model is judged by.

    Attributes:
        loss: model and batch to one loss an example `[B]`.
        judge: model and held-out examples to score and mean loss.
        score: what the score is called; it is 1 where a model is perfect, and higher is better.
        mean_loss: what the mean loss is called.
        also: more figures that follow from those two, by name.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = cross_entropy
    judge: Callable[[nn.Module, Examples], Judged] = evaluate
    score: str = "accuracy"
    mean_loss: str = "mean loss"
    also: Callable[[Judged], dict[str, float]] | None = None


CLASSIFICATION = Task()
