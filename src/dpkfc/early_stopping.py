"""The end of a training loop that public examples decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer, check_not_negative


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training when the loss on public examples has stopped falling.

    The caller keeps the losses, so that a checkpoint can hold them. After an early end, call
    `Session.forfeit_steps`: releases have decided the number of steps, so ε is that of the plan.

    Attributes:
        patience: evaluations without a new least loss after which training ends.
        on: public examples, as one batch on the model's device. Private ones void ε.
        least_decrease: how far a loss must fall below the least one to count as lower.

    Raises:
        ValueError: a value outside its range.
    """

    patience: int
    on: Any
    least_decrease: float = 0.0

    def __post_init__(self) -> None:
        check_integer("patience", self.patience, 1)
        check_not_negative("least_decrease", self.least_decrease)

    @torch.no_grad()
    def loss(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> float:
        """Return the mean loss on the public examples, in evaluation mode.

        Args:
            model: the model in training; its mode is restored.
            loss_fn: maps (model, batch) to losses `[B]`, as for `Session.step`.
        """
        was_training = model.training
        model.eval()
        try:
            return float(loss_fn(model, self.on).mean())
        finally:
            model.train(was_training)

    def is_over(self, losses: Sequence[float]) -> bool:
        """Return whether training should end after these losses, the newest one last.

        A loss that is not a number counts as no decrease.
        """
        least, since = float("inf"), 0
        for loss in losses:
            since += 1
            if loss < least - self.least_decrease:
                least, since = loss, 0
        return since >= self.patience
