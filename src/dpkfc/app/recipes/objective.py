"""The objective of a recipe: loss of a batch, and score and mean loss of held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets.examples import Examples
from dpkfc.gradients.state import evaluation_mode


@dataclass(frozen=True)
class Judged:
    """Score and mean loss of a model on held-out examples.

    Attributes:
        accuracy: the score of the task, 1 for a perfect model; for classes the fraction of right
            answers.
        loss: mean loss.
    """

    accuracy: float
    loss: float


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Return the per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`).

    An example whose label is not a class has loss 0: a private label must not end a run.
    """
    inputs, labels = batch
    outputs = model(inputs)
    known = _known_labels(labels, outputs.shape[1])
    return functional.cross_entropy(outputs, known, reduction="none", ignore_index=_NO_CLASS)


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
    device = next(model.parameters()).device
    with evaluation_mode(model):
        for part in inputs.split(chunk):
            yield model(part.to(device))


def evaluate(model: nn.Module, examples: Examples, chunk: int = 250) -> Judged:
    """Return accuracy and mean cross-entropy, and restore the model's mode afterwards.

    Examples whose label is not a class are left out.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples of a forward pass.
    """
    right = 0
    total = 0
    loss = 0.0
    outputs = model_outputs(model, examples[0], chunk)
    for output, batch in zip(outputs, examples[1].split(chunk), strict=True):
        labels = _known_labels(batch.to(output.device), output.shape[1])
        right += int((output.argmax(1) == labels).sum())
        total += int((labels != _NO_CLASS).sum())
        losses = functional.cross_entropy(output, labels, reduction="sum", ignore_index=_NO_CLASS)
        loss += float(losses)
    total = max(1, total)
    return Judged(right / total, loss / total)


@dataclass(frozen=True)
class ClassScore:
    """How well a model knows one class, on held-out examples.

    Attributes:
        label: of the class.
        examples: held-out examples of the class.
        recall: fraction of them that the model gives this label; None without examples.
        precision: fraction of the examples with this answer that are of the class; None where the
            model gives no such answer.
    """

    label: int
    examples: int
    recall: float | None
    precision: float | None


def score_classes(model: nn.Module, examples: Examples) -> list[ClassScore]:
    """Return recall and precision of every class, and restore the model's mode afterwards.

    Args:
        model: on any device, with one output a class.
        examples: inputs `[N, ...]` and labels `[N]`.
    """
    answers = []
    count = 0
    for output in model_outputs(model, examples[0]):
        count = output.shape[1]
        answers.append(output.argmax(1).cpu())
    labels = _known_labels(examples[1].cpu(), count)
    given = torch.cat(answers)[labels != _NO_CLASS]
    labels = labels[labels != _NO_CLASS]
    scores = []
    for label in range(count):
        of_class = int((labels == label).sum())
        answered = int((given == label).sum())
        right = int(((labels == label) & (given == label)).sum())
        score = ClassScore(
            label=label,
            examples=of_class,
            recall=right / of_class if of_class else None,
            precision=right / answered if answered else None,
        )
        scores.append(score)
    return scores


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, and a score of held-out examples.

    Attributes:
        loss: maps model and batch to per-example losses `[B]`.
        judge: maps model and held-out examples to score and mean loss.
        score: name of the score, which is 1 for a perfect model.
        mean_loss: name of the mean loss.
        also: more figures that follow from score and mean loss, by name.
        classes: maps model and held-out examples to the scores of classes; None without classes.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = cross_entropy
    judge: Callable[[nn.Module, Examples], Judged] = evaluate
    score: str = "accuracy"
    mean_loss: str = "mean loss"
    also: Callable[[Judged], dict[str, float]] | None = None
    classes: Callable[[nn.Module, Examples], list[ClassScore]] | None = None

    def figures(self, score: float | None, loss: float | None) -> dict[str, float | None]:
        """Return score, mean loss and what follows from them, by name."""
        return {self.score: score, self.mean_loss: loss, **self.further(score, loss)}

    def further(self, score: float | None, loss: float | None) -> dict[str, float]:
        """Return the figures that follow from score and mean loss, by name."""
        if self.also is None or score is None or loss is None:
            return {}
        return self.also(Judged(score, loss))


CLASSIFICATION = Objective(classes=score_classes)
