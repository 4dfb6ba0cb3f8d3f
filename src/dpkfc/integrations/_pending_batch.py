"""Which batch of the private loader has to be stepped next.

If a run could skip batches by their content, ε would not be the sampler's. A batch yielded in
training mode therefore stays pending until it is released: leaving the loop, an error or a new
pass do not change that, and the next pass begins with it. A pass in evaluation mode without any
step only reads the data, and leaves no batch pending.
"""

from __future__ import annotations

from typing import Any


class PendingBatchGuard:
    """Keeps the logical batch that must be released before any other.

    Attributes:
        batch: the indices of the pending batch, None between steps. PRIVATE.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self._must_release = False  # yielded for training
        self._skipped_before = False  # by an unfinished pass in evaluation mode
        self._reset_pass()

    def _reset_pass(self) -> None:
        self._is_open = False  # a batch was yielded and not stepped
        self._is_training = False
        self._has_stepped = False
        self._has_failed = False
        self._has_skipped = False

    def begin_pass(self) -> None:
        """Begin a pass, which starts with the batch that is pending."""
        self._skipped_before |= self._has_skipped
        self._must_release |= self._is_open and self._has_stepped
        self._reset_pass()

    def yield_batch(self, batch: Any, training: bool) -> None:
        """Record that the loader is about to yield a physical batch.

        Args:
            batch: the indices of its logical batch, always the same object.
            training: whether the model is in training mode.

        Raises:
            RuntimeError: the last batch was not stepped.
        """
        needs_step = self._is_open and (self._is_training or self._has_stepped)
        if self._has_failed or needs_step:
            self._must_release = True
            self._is_open = False
            self._has_failed = True
            raise RuntimeError(
                "the last batch was not followed by optimizer.step(), which voids ε; step every"
                " batch (larger ones: BatchMemoryManager), then begin a new loop over the loader"
            )
        if self._is_open:
            self._skip()
        if self.batch is None:
            self.batch = batch
        if self.batch is batch:
            self._must_release |= training
        self._is_open = True
        self._is_training = training

    def _skip(self) -> None:
        self._has_skipped = True
        self._is_open = False
        if not self._must_release:
            self.batch = None

    def finish_pass(self) -> None:
        """Record that the pass has come to its end."""
        if self._is_open and not (self._is_training or self._has_stepped):
            self._skip()
        self._must_release |= self._is_open
        self._reset_pass()

    def check(self, batch: Any) -> None:
        """Check that the batch that was yielded last may be stepped.

        Args:
            batch: the indices of its logical batch.

        Raises:
            RuntimeError: another batch is pending, or an earlier batch of the pass was skipped.
        """
        if self.batch is not batch:
            raise RuntimeError(
                "an earlier batch of the private loader was never stepped; begin a new loop in "
                "training mode, which starts with it, and evaluate in model.eval() before a loop"
            )
        if not self._is_training and (self._has_skipped or self._skipped_before):
            raise RuntimeError(
                "an earlier batch was skipped in evaluation mode, so the choice may depend on"
                " private data; call model.train() before the loop over the loader"
            )

    def record_step(self, is_last: bool) -> None:
        """Record that the physical batch was stepped.

        Args:
            is_last: whether its logical batch was released.
        """
        self._is_open = False
        self._has_stepped = True
        self._must_release = not is_last
        if is_last:
            self.batch = None

    def record_failure(self) -> None:
        """Record that a step ended in an error. The pass yields no further batch."""
        self._has_failed |= self._is_open
        self._must_release |= self._is_open
        self._is_open = False
