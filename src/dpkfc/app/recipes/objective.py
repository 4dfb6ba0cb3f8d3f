"""The objective of a recipe: loss of a batch, and score and mean loss of held-out examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.class_scores import choose_classes, score_classes
from dpkfc.app.datasets.examples import Examples
from dpkfc.app.scores import Scores
from dpkfc.gradients.evaluation_mode import evaluation_mode


@dataclass(frozen=True)
class Judged:
    """Score and mean loss of a model on held-out examples.

    Attributes:
        accuracy: the score of the task, 1 for a perfect model; for classes the fraction of right
            answers. NaN where no example has a known label.
        loss: mean loss, NaN in the same case.
    """

    accuracy: float
    loss: float


NOTHING_KNOWN = Judged(math.nan, math.nan)


def cross_entropy(model: nn.Module, batch: Examples, weights: Sequence[float] = ()) -> Tensor:
    """Return the per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`).

    An example whose label is not a class has loss 0: a private label must not end a run.

    Args:
        model: with one output a class.
        batch: inputs and labels.
        weights: public factor of each class; empty for equal ones.
    """
    inputs, labels = batch
    outputs = model(inputs)
    known = _known_labels(labels, outputs.shape[1])
    factors = outputs.new_tensor(weights) if weights else None
    return functional.cross_entropy(
        outputs, known, factors, reduction="none", ignore_index=_NO_CLASS
    )


_NO_CLASS = -100


def _known_labels(labels: Tensor, classes: int) -> Tensor:
    """Return labels with `_NO_CLASS` where one is not a class; shares of classes stay."""
    if labels.is_floating_point():
        return labels
    labels = labels.long()
    is_known = (labels >= 0) & (labels < classes)
    return labels.where(is_known, _NO_CLASS)


def squared_error(model: nn.Module, batch: Examples) -> Tensor:
    """Return half the squared error `[B]` of a model with one output for targets `[B]`.

    An example whose target is NaN has loss 0: a private target must not end a run.
    """
    inputs, targets = batch
    is_known = ~targets.isnan()
    errors = (model(inputs).squeeze(1) - targets.nan_to_num()) * is_known
    return 0.5 * errors.square()


@torch.no_grad()
def model_outputs(model: nn.Module, inputs: Tensor, chunk: int = 250) -> Iterator[Tensor]:
    """Yield outputs of inputs `[N, ...]` in evaluation mode, and restore all modes at the end.

    Args:
        model: on any device.
        inputs: on any device.
        chunk: inputs of a forward pass, so that activations fit the caches of a core.
    """
    device = next((p.device for p in model.parameters()), inputs.device)
    with evaluation_mode(model):
        for part in inputs.split(chunk):
            yield model(part.to(device))


def evaluate(
    model: nn.Module, examples: Examples, chunk: int = 250, threshold: float = 0.5
) -> Judged:
    """Return accuracy and mean cross-entropy, and restore the model's mode afterwards.

    Examples whose label is not a class are left out; without others both are NaN.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples of a forward pass.
        threshold: probability of the second of two classes from which it is the answer.
    """
    right = 0
    total = 0
    loss = 0.0
    outputs = model_outputs(model, examples[0], chunk)
    for output, batch in zip(outputs, examples[1].split(chunk), strict=True):
        labels = _known_labels(batch.to(output.device), output.shape[1])
        right += int((choose_classes(output, threshold) == labels).sum())
        total += int((labels != _NO_CLASS).sum())
        losses = functional.cross_entropy(output, labels, reduction="sum", ignore_index=_NO_CLASS)
        loss += float(losses)
    return Judged(right / total, loss / total) if total else NOTHING_KNOWN


def score_model(model: nn.Module, examples: Examples, threshold: float = 0.5) -> Scores:
    """Return all scores of a model with one output a class; its mode is restored.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and class numbers `[N]`.
        threshold: probability of the second of two classes from which it is the answer.
    """
    outputs = torch.cat([output.cpu() for output in model_outputs(model, examples[0])])
    if outputs.dtype == torch.bfloat16:  # unknown to NumPy
        outputs = outputs.float()
    return score_classes(outputs.numpy(), examples[1].cpu().numpy(), threshold)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, and a score of held-out examples.

    Attributes:
        loss: maps model and batch to per-example losses `[B]`.
        judge: maps model and held-out examples to score and mean loss.
        score: name of the score, which is 1 for a perfect model.
        mean_loss: name of the mean loss.
        also: more figures that follow from score and mean loss, by name.
        scores: maps model and held-out examples to all scores; None where there is nothing to show
            but the score and the mean loss.
        unit: half the range of a number that is learned between −1 and 1; 0 for others.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = cross_entropy
    judge: Callable[[nn.Module, Examples], Judged] = evaluate
    score: str = "accuracy"
    mean_loss: str = "mean loss"
    also: Callable[[Judged], dict[str, float]] | None = None
    scores: Callable[[nn.Module, Examples], Scores] | None = None
    unit: float = 0.0

    def figures(self, score: float | None, loss: float | None) -> dict[str, float | None]:
        """Return score, mean loss and what follows from them, by name; None for no number."""
        named = {self.score: score, self.mean_loss: loss, **self.derive_figures(score, loss)}
        return {name: finite(value) for name, value in named.items()}

    def derive_figures(self, score: float | None, loss: float | None) -> dict[str, float]:
        """Return the figures that follow from score and mean loss, by name."""
        score, loss = finite(score), finite(loss)
        if self.also is None or score is None or loss is None:
            return {}
        return self.also(Judged(score, loss))


def finite(value: float | None) -> float | None:
    """Return a number, and None for one that is not finite: there was nothing to measure it on."""
    return value if value is not None and math.isfinite(value) else None


CLASSIFICATION = Objective(scores=score_model)
