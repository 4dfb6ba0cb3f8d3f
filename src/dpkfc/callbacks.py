"""Let code of the user watch a session.

A callback gets the numbers that ε covers. Numbers of private batches before noise reach only a
callback that asks for them, and the privacy card then names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dpkfc.curvature.base import PreconditionerState

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
        noise_multiplier: σ, the standard deviation of the noise over the sensitivity.
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
