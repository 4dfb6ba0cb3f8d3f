"""One loss per example from the logits and labels of a transformers model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc._errors import first_line
from dpkfc.linalg.blocks import raise_precision
from dpkfc.memory import is_out_of_memory

LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]
IGNORED = -100


def per_example_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy of each example, averaged over its OWN labelled positions.

    Args:
        logits: `[N, classes]` or `[N, positions, classes]`.
        labels: `[N]` or `[N, positions]`; positions labelled -100 are masked.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.

    Returns:
        `[N]` in float32 or wider; 0 for an example without a labelled position. Each loss depends
        on its own example only, unlike a mean over all positions of a batch.
    """
    n = logits.shape[0]
    losses = F.cross_entropy(
        raise_precision(logits).reshape(-1, logits.shape[-1]),
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
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        self._name = type(base).__name__
        config = getattr(base, "config", None)
        self._encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        # The logits of a causal model at a position are for the label after it.
        self._shifted = False
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses `[N]` of a batch.

        Raises:
            ValueError: labels or logits are missing, or their shapes fit no known task.
        """
        labels = inputs.get("labels")
        # An encoder-decoder model makes its decoder's inputs from the labels.
        given = {name: x for name, x in inputs.items() if name != "labels" or self._encoder_decoder}
        logits = None if labels is None else _part(model(**given), "logits")
        if labels is None or logits is None:
            raise ValueError(
                f"{self._name} takes no labels or returns no logits; pass per_example_loss="
            )
        return self._loss_of_logits(logits, labels, self._shifted, self._label_smoothing)

    def _loss_of_logits(
        self, logits: Tensor, labels: Tensor, shifted: bool, label_smoothing: float
    ) -> Tensor:
        are_classes = not labels.is_floating_point() and labels.shape == logits.shape[:-1]
        if are_classes and logits.shape[-1] > 1:
            if shifted:
                logits, labels = logits[:, :-1], labels[:, 1:]
            return per_example_cross_entropy(logits, labels, label_smoothing)
        if label_smoothing:
            raise ValueError(
                f"label_smoothing_factor is for labels that are classes, not for {self._name};"
                " leave it out or pass per_example_loss="
            )
        if labels.is_floating_point() and labels.numel() == logits.numel() and logits.dim() == 2:
            wide = raise_precision(logits)
            targets = labels.reshape(logits.shape).to(wide)
            if logits.shape[1] == 1:  # regression, otherwise several yes-or-no labels
                return (wide - targets).square().mean(1)
            return F.binary_cross_entropy_with_logits(wide, targets, reduction="none").mean(1)
        raise ValueError(
            f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} of {self._name} are of"
            " no known task; pass per_example_loss=, a function of (model, inputs)"
        )

    @torch.no_grad()
    def check_against_model(self, model: nn.Module, singles: Iterable[Mapping[str, Any]]) -> None:
        """Check the default against the loss that the model itself computes for one example.

        In a batch of one, a mean cannot mix examples.

        Args:
            model: in eval mode.
            singles: public batches of one example; the first with a finite loss of the model
                decides.

        Raises:
            ValueError: the model's own loss is not the default one or has parts that mix examples,
                a model of sequences computes none, or the model takes none of the batches.
        """
        logits: Tensor | None = None
        failed: Exception | None = None
        no_loss = torch.tensor(math.nan)
        for single in singles:
            if getattr(single.get("input_ids"), "ndim", 2) > 2:
                raise ValueError(
                    f"an example of {self._name} holds several sequences (choices); pass"
                    " per_example_loss=, a function of (model, inputs)"
                )
            try:
                outputs = model(**single)
            except Exception as error:  # drawn numbers may not be tokens or labels of this model
                if is_out_of_memory(error):
                    raise
                failed = error
                continue
            own = _part(outputs, "loss", no_loss)
            logits = _part(outputs, "logits")
            names = outputs if isinstance(outputs, Mapping) else ()
            if any(name.endswith(("aux_loss", "z_loss")) for name in names):
                raise ValueError(
                    f"{self._name} adds a loss that balances its experts over a whole batch; set"
                    " output_router_logits=False in its config"
                )
            if logits is not None and bool(torch.isfinite(own)):
                self._shifted = self._find_shift(logits, single["labels"], own)
                return
        if logits is None and failed is not None:
            raise ValueError(
                f"{self._name} takes no example that is drawn at random"
                f" ({first_line(failed)[:60]}); pass per_example_loss="
            ) from failed
        if logits is not None and logits.dim() > 2:
            raise ValueError(
                f"{self._name} computes no loss from which to tell whether logits are for the label"
                " at or after their position; pass per_example_loss="
            )

    def _find_shift(self, logits: Tensor, labels: Tensor, own: Tensor) -> bool:
        """Return whether the model's loss compares logits with the labels after them.

        Raises:
            ValueError: the loss is neither form of the default.
        """
        choices = (False, True) if logits.dim() == 3 and logits.shape[1] > 1 else (False,)
        tolerance = 1e-3 * float(own.abs()) + 1e-5
        for shifted in choices:
            loss = self._loss_of_logits(logits, labels, shifted, 0.0).sum()
            if float((loss - own).abs()) <= tolerance:
                return shifted
        raise ValueError(
            f"{self._name} computes another loss than the cross-entropy of its logits and"
            " labels; pass per_example_loss=, a function of (model, inputs)"
        )


def _part(outputs: Any, name: str, default: Any = None) -> Any:
    """Return a tensor of a model's outputs by name, or the default without one."""
    part = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return part if isinstance(part, Tensor) else default
