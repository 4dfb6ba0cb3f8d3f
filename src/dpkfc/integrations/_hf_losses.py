"""One loss per example from the logits and labels of a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.memory import is_out_of_memory

__all__ = ["LossFn", "ModelLoss", "per_example_cross_entropy"]

LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]
IGNORED = -100


def per_example_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each example, averaged over the example's OWN labelled positions.

    Args:
        logits: `[N, classes]` or `[N, positions, classes]`.
        labels: `[N]` or `[N, positions]`; positions labelled -100 count for nothing.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.

    Returns:
        `[N]` in float32 or wider; 0 for an example without a labelled position. No other example enters it, unlike a mean
        over all positions of a batch.
    """
    n, classes = logits.shape[0], logits.shape[-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        wide.reshape(-1, classes),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = (labels != IGNORED).reshape(n, -1).sum(1).clamp(min=1)
    return losses.reshape(n, -1).sum(1) / counted


class ModelLoss:
    """The default per-example loss of a model with a head for classification or language modelling.

    Args:
        model: a transformers model, with adapters of peft or without.
        label_smoothing: of `TrainingArguments`.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        base: Any = model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._name = type(base).__name__
        self._encoder_decoder = bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
        self._shifted = False  # the logits of a causal model at a position are for the label after it
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Losses `[N]` of a batch.

        Raises:
            ValueError: no labels or logits, or of shapes that belong to no known task.
        """
        labels = inputs.get("labels")
        # An encoder-decoder model makes its decoder's inputs of the labels.
        given = {name: x for name, x in inputs.items() if name != "labels" or self._encoder_decoder}
        logits = None if labels is None else _part(model(**given), "logits")
        if labels is None or logits is None:
            raise ValueError(f"{self._name} takes no labels or returns no logits; pass per_example_loss=")
        return self._of_logits(logits, labels, self._shifted, self._label_smoothing)

    def _of_logits(self, logits: Tensor, labels: Tensor, shifted: bool, label_smoothing: float) -> Tensor:
        if not labels.is_floating_point() and labels.shape == logits.shape[:-1] and logits.shape[-1] > 1:
            if shifted:
                logits, labels = logits[:, :-1], labels[:, 1:]
            return per_example_cross_entropy(logits, labels, label_smoothing)
        if label_smoothing:
            raise ValueError(
                f"label_smoothing_factor is for labels that are classes, not those of {self._name}; leave it out or pass "
                "per_example_loss="
            )
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if labels.is_floating_point() and labels.numel() == logits.numel() and logits.dim() == 2:
            targets = labels.reshape(logits.shape).to(wide)
            if logits.shape[1] == 1:  # regression, otherwise several yes-or-no labels
                return (wide - targets).square().mean(1)
            return F.binary_cross_entropy_with_logits(wide, targets, reduction="none").mean(1)
        raise ValueError(
            f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} of {self._name} are of no known task; pass "
            "per_example_loss=, a function of (model, inputs) that returns one loss per example"
        )

    @torch.no_grad()
    def settle(self, model: nn.Module, singles: Iterable[Mapping[str, Any]]) -> None:
        """Compare with the loss that the model itself computes for one example, where a mean has nothing to mix.

        Args:
            model: in eval mode.
            singles: public batches of one example; the first with a finite loss of the model decides.

        Raises:
            ValueError: the model computes another loss, so the default is not what it is trained with elsewhere; a model of
                sequences computes none; or none of the batches fits the model.
        """
        logits: Tensor | None = None
        failed: Exception | None = None
        for single in singles:
            if getattr(single.get("input_ids"), "ndim", 2) > 2:
                raise ValueError(
                    f"an example of {self._name} holds several sequences (choices); pass per_example_loss=, a function of "
                    "(model, inputs)"
                )
            try:
                outputs = model(**single)
            except Exception as error:  # drawn numbers may be no tokens or labels of this model
                if is_out_of_memory(error):
                    raise
                failed = error
                continue
            own, logits = _part(outputs, "loss"), _part(outputs, "logits")
            if own is None or logits is None or not bool(torch.isfinite(own)):
                continue
            choices = (False, True) if logits.dim() == 3 and logits.shape[1] > 1 else (False,)
            mine = {shifted: self._of_logits(logits, single["labels"], shifted, 0.0).sum() for shifted in choices}
            same = [k for k, loss in mine.items() if float((loss - own).abs()) <= 1e-3 * float(own.abs()) + 1e-5]
            if not same:
                raise ValueError(
                    f"{self._name} computes another loss than the cross-entropy of its logits and labels (several heads, an "
                    "auxiliary loss, class weights?); pass per_example_loss=, a function of (model, inputs) that returns "
                    "one loss per example"
                )
            self._shifted = same[0]
            return
        if logits is None and failed is not None:
            text = str(failed).splitlines()[0][:60] if str(failed) else type(failed).__name__
            message = f"{self._name} takes no example that is drawn at random ({text}); pass per_example_loss="
            raise ValueError(message) from failed
        if logits is not None and logits.dim() > 2:
            raise ValueError(
                f"{self._name} computes no loss from which to tell whether logits are for the label at or after their "
                "position; pass per_example_loss="
            )


def _part(outputs: Any, name: str) -> Tensor | None:
    part = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return part if isinstance(part, Tensor) else None
