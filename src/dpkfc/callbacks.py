"""Let code of the user watch a session, and end its loop early.

A callback gets the numbers that ε covers. Numbers of private batches before noise reach only a
callback that asks for them, and the privacy card then names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc._checks import check_integer, check_not_negative, check_positive
from dpkfc.curvature.base import PreconditionerState
from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.loss_function import losses_of
from dpkfc.gradients.state import own_pass

if TYPE_CHECKING:
    from dpkfc.distributed.context import DistributedContext

_log = logging.getLogger(__name__)
_REASON = "computed from private examples before noise, and handed to"


@dataclass(frozen=True)
class StepReport:
    """Numbers of one step, for a callback.

    Attributes:
        step: the index of the step, from 0.
        release: the number of releases so far, this one included.
        epsilon: an upper bound of ε of these releases at the plan's δ.
        learning_rate: of the optimizer's first group of parameters.
        noise_multiplier: σ, the standard deviation of the noise over the clip bound.
        notes: public numbers of post-processing.
        private: PRIVATE numbers of the batch, which ε does not cover, by name. None unless the
            callback asks for them.
    """

    step: int
    release: int
    epsilon: float
    learning_rate: float
    noise_multiplier: float
    notes: Mapping[str, float] = field(default_factory=dict)
    private: Mapping[str, float] | None = None


@runtime_checkable
class Callback(Protocol):
    """What a session calls. Inherit from it and write the methods that you need.

    `on_start` may raise, which ends the run before any budget is spent. An error of another method
    is logged, and the session goes on without that callback. On several processes the first one
    alone calls them.

    Attributes:
        private: whether reports hold numbers that ε does not cover.
    """

    private: bool = False

    def on_start(self, session: Any) -> None:
        """See the session before its first step."""

    def on_step(self, report: StepReport) -> None:
        """See the numbers of a step, after the optimizer has taken it."""

    def on_refresh(self, state: PreconditionerState) -> None:
        """See a new preconditioner, before the report of the step that made it."""

    def on_end(self, session: Any) -> None:
        """See the session when it closes, if it has taken a step."""


class CallbackCalls:
    """Calls the callbacks of one session, and keeps their errors away from it.

    Args:
        callbacks: in the order in which they are called.
        ranks: the processes of the session.

    Attributes:
        private_readers: names of the callbacks that were given private numbers, in earlier parts
            of the run too.
        has_started: whether `on_start` was called, and `on_end` was not.
        active: callbacks that still see steps, on the first process.

    Raises:
        ValueError: an object that is not a callback.
    """

    def __init__(self, callbacks: Sequence[Callback], ranks: DistributedContext) -> None:
        for callback in callbacks:
            # A class has the methods too.
            if isinstance(callback, type) or not isinstance(callback, Callback):
                raise ValueError(
                    f"callbacks: {callback!r:.50} is not a callback; derive it from"
                    " dpkfc.Callback, and pass an instance in a list"
                )
        self.private_readers: list[str] = []
        self._callbacks = list(callbacks)
        self.active: list[Callback] = []
        self.has_started = False
        self._ranks = ranks
        self._state: PreconditionerState | None = None

    def start(self, session: Any, state: PreconditionerState | None) -> None:
        """Call `on_start`; an error ends the run on every process."""
        self._state = state

        def start() -> None:
            for callback in self._callbacks:
                callback.on_start(session)

        self._ranks.broadcast_from_rank0(start, "callbacks")
        self.has_started = True
        self.active = list(self._callbacks) if self._ranks.is_rank0 else []

    def refresh(self, state: PreconditionerState | None) -> None:
        """Report a preconditioner that is another one than before."""
        if state is None or state is self._state:
            return
        self._state = state
        self._call_all(self.active, lambda callback: callback.on_refresh(state))

    def step(self, public: StepReport, private: Mapping[str, float]) -> None:
        """Report a step; private numbers go to the callbacks that ask for them.

        Args:
            public: the report of all callbacks.
            private: PRIVATE numbers of the step.
        """
        whole = replace(public, private=dict(private))

        def call(callback: Callback) -> None:
            if not callback.private:
                callback.on_step(public)
                return
            self.note_private_readers([type(callback).__name__])
            callback.on_step(whole)

        self._call_all(self.active, call)

    def end(self, session: Any) -> None:
        """Call `on_end` once, also of callbacks that have failed before."""
        if not self.has_started:
            return
        self.has_started = False
        self.active = []
        if self._ranks.is_rank0:
            self._call_all(self._callbacks, lambda callback: callback.on_end(session))

    def _call_all(self, callbacks: Sequence[Callback], call: Callable[[Callback], None]) -> None:
        for callback in list(callbacks):
            try:
                call(callback)
            except Exception:
                _log.warning(
                    "the callback %s has failed; the run goes on without it",
                    type(callback).__name__,
                    exc_info=True,
                )
                self.active = [other for other in self.active if other is not callback]

    def unprotected_figures(self, names: Sequence[str]) -> dict[str, str]:
        """Return the private numbers that callbacks were given, with the reason, for the card."""
        if not self.private_readers:
            return {}
        return {f"callbacks: {', '.join(names)}": f"{_REASON} {', '.join(self.private_readers)}"}

    def note_private_readers(self, names: Sequence[str]) -> None:
        """Remember callbacks that were given private numbers."""
        self.private_readers += [name for name in names if name not in self.private_readers]


# --------------------------------------------------------------------------------------------------
# The end of a training loop that public examples, or releases on held-out private ones, decide.

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
