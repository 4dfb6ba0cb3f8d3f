"""Which batch of the private loader has to be stepped next: a batch that was handed out may not be left out.

Which batches a run leaves out could depend on what is in them, and then the sampler would not be the one that ε is computed
for. A batch handed out in training mode therefore stays owed until it is released: leaving the loop, an error or a new pass
do not take it away, and the next pass begins with it. A pass in which no batch is stepped, and that is handed out in
evaluation mode, only looks at the data and owes nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Owed"]

_EVALUATE = "evaluate in model.eval(), called before the loop over the loader"


class Owed:
    """Keeps the logical batch that must be released before any other.

    Attributes:
        batch: its indices, None where nothing is owed. PRIVATE.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self._for_good = False  # handed out in training mode, or in a pass with steps
        self._left_out = False  # by a pass in evaluation mode that was not finished
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._open = self._training = self._stepped = self._failed = self._skipped = False

    def begin(self) -> None:
        """A pass begins: it starts with what the last one owes."""
        self._left_out |= self._skipped
        self._for_good |= self._open and self._stepped
        self._begin_pass()

    def hand_out(self, batch: Any, training: bool) -> None:
        """A physical batch is about to be handed out.

        Args:
            batch: the indices of its logical batch, always the same object.
            training: whether the model is in training mode.

        Raises:
            RuntimeError: the last one was not stepped.
        """
        if self._failed or (self._open and (self._training or self._stepped)):
            self._for_good, self._open, self._failed = True, False, True
            raise RuntimeError(
                "the last batch of the private loader was not followed by optimizer.step(); a drawn batch may not be skipped "
                "or accumulated, because which ones are left out would depend on private data. Call step() for every batch, "
                f"empty ones included; for larger batches raise batch_size and use BatchMemoryManager; {_EVALUATE}. "
                "A new loop over the loader begins with the batch that is missing"
            )
        if self._open:
            self._skip()
        if self.batch is None:
            self.batch = batch
        if self.batch is batch:
            self._for_good |= training
        self._open, self._training = True, training

    def _skip(self) -> None:
        self._skipped, self._open = True, False
        if not self._for_good:
            self.batch = None

    def finish(self) -> None:
        """The pass has come to its end."""
        if self._open and not (self._training or self._stepped):
            self._skip()
        self._for_good |= self._open
        self._begin_pass()

    def check(self, batch: Any) -> None:
        """Raise unless the batch that was handed out last may be stepped.

        Args:
            batch: the indices of its logical batch.

        Raises:
            RuntimeError: another batch is owed, or one beside it was left out.
        """
        if self.batch is not batch:
            raise RuntimeError(
                "an earlier batch of the private loader was never stepped, and no other may be in its place; begin a new loop "
                f"over the loader, in training mode: the missing batch comes first. To look at the data, {_EVALUATE}"
            )
        if not self._training and (self._skipped or self._left_out):
            raise RuntimeError(
                "this batch was handed out in evaluation mode, in which an earlier one was left out: which batches are trained "
                "on would depend on private data. Call model.train() before the loop over the loader, and go through the whole "
                "loader where you evaluate on it"
            )

    def step_done(self, last: bool) -> None:
        """The physical batch was stepped; `last`: and its logical batch released."""
        self._open, self._stepped, self._for_good = False, True, not last
        if last:
            self.batch = None

    def fail(self) -> None:
        """A step ended in an error: nothing else is handed out in this pass."""
        self._failed |= self._open
        self._for_good |= self._open
        self._open = False
