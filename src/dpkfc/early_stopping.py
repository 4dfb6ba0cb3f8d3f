"""The end of a training loop that public examples, or releases on held-out private ones, decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc._checks import check_integer, check_not_negative, check_positive
from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.loss_function import losses_of
from dpkfc.gradients.state import own_pass

Loss = Callable[[nn.Module, Any], Tensor]


class _Patience:
    """Counts evaluations without a new least loss."""

    patience: int
    least_decrease: float

    def __post_init__(self) -> None:
        check_integer("patience", self.patience, 1)
        check_not_negative("least_decrease", self.least_decrease)

    def is_over(self, losses: Sequence[float]) -> bool:
        """Return whether training should end after these losses, the newest one last.

        A loss that is not a number counts as no decrease.
        """
        least = float("inf")
        since = 0
        for loss in losses:
            since += 1
            if loss < least - self.least_decrease:
                least = loss
                since = 0
        return since >= self.patience


@dataclass(frozen=True)
class EarlyStopping(_Patience):
    """Ends training when the loss on public examples has stopped falling.

    The caller keeps the losses, so that a checkpoint can hold them. After an early end, call
    `Session.forfeit_steps`: releases have decided the number of steps, so ε is the plan's.

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

    @torch.no_grad()
    def loss(self, model: nn.Module, loss_fn: Loss) -> float:
        """Return the mean loss on the public examples, in evaluation mode.

        Args:
            model: the model in training; the mode of each module is restored.
            loss_fn: maps (model, batch) to losses `[B]`, as for `Session.step`.
        """
        with evaluation_mode(model):
            return float(loss_fn(model, deepcopy(self.on)).mean())


# What one held-out example adds to the sum at most.
NORM = 1.0
PURPOSE = "evaluation"
# Fractions of the bound are multiples of this, so that float64 adds them without rounding.
_PARTS = 2.0**20


class ReleasingSession(Protocol):
    """What a private evaluation needs of a session."""

    model: nn.Module
    plan: Any

    def release_vector(
        self, purpose: str, vector: NDArray[np.float64], norm: float
    ) -> NDArray[np.float64]:
        """Charge one release and return a vector with its noise."""


@dataclass(frozen=True)
class PrivateEarlyStopping(_Patience):
    """Ends training when a noisy mean loss on held-out private examples has stopped falling.

    Each evaluation is one release in the ledger of the session, for the purpose "evaluation": the
    plan needs `ExtraRelease(purpose="evaluation", norm=1.0, …)` in `extra_releases`, whose `count`
    is the number of evaluations. They are composed with the steps, as if every example were trained
    on and held out. So the guarantee also holds where one more record moves another between both.

    Attributes:
        patience: evaluations without a new least loss after which training ends.
        on: held-out private examples: tensors `[n, ...]` on the model's device. n is public.
        most: B, public. A loss is clamped to [0, B], and one that is not a number counts as B.
        least_decrease: how far a loss must fall below the least one to count as lower.

    Raises:
        ValueError: a value outside its range, or no example.

    Guarantee:
        One held-out example more, less or in the place of another changes the sum of losses by at
        most B. Every example is evaluated alone. What model and loss function remember of it is put
        back.
    """

    patience: int
    on: Sequence[Tensor]
    most: float
    least_decrease: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("most", self.most)
        sizes = {len(x) for x in self.on}
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError("on must be tensors with one and the same number of examples, not 0")

    def loss(self, session: ReleasingSession, loss_fn: Loss) -> float:
        """Charge one evaluation and return the noisy mean loss, which is public.

        Args:
            session: of the training.
            loss_fn: maps (model, batch) to losses `[B]`, or `wrong_answers` with `most=1`.

        Raises:
            BudgetExhausted: all evaluations of the plan are made; nothing was released.
            LedgerError: the charge could not be recorded; nothing was released.
            ValueError: the plan has no releases for evaluations, or protects more than a record.
        """
        if session.plan.config.max_records_per_unit is not None:
            raise ValueError("a private evaluation bounds single examples, not units of several")
        total = np.array([self.total(session.model, loss_fn)])
        (noisy,) = session.release_vector(PURPOSE, total, NORM)
        return self.most * float(noisy) / len(self.on[0])

    @torch.no_grad()
    def total(self, model: nn.Module, loss_fn: Loss) -> float:
        """Return the sum of clamped losses over B, in evaluation mode. PRIVATE."""
        total = 0.0
        with evaluation_mode(model):
            for row in range(len(self.on[0])):
                batch = tuple(x[row : row + 1].clone() for x in self.on)
                # What model and loss remember of an example must not reach the next one.
                with own_pass(model):
                    value = losses_of(loss_fn, model, batch).double().reshape(-1)[:1]
                fraction = (value / self.most).nan_to_num(nan=1.0).clamp(0.0, 1.0)
                total += float((fraction * _PARTS).floor()) / _PARTS
        return total


def wrong_answers(model: nn.Module, batch: Any) -> Tensor:
    """Return 1 for each example whose class is not the answer of the model, else 0 `[B]`.

    Its noisy mean is one minus the accuracy.
    """
    inputs, labels = batch
    return (model(inputs).argmax(-1) != labels).double()
