"""Steps, evaluations and checkpoints of one run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import Tensor

from dpkfc.app.assembly import Prepared, learning_rate
from dpkfc.app.metrics import Metrics, Row
from dpkfc.app.processes import gather_judged
from dpkfc.app.progress import TrainingProgress
from dpkfc.app.recipes.objective import NOTHING_KNOWN
from dpkfc.app.results import evaluated_weights
from dpkfc.app.run_folder import RunFolder
from dpkfc.distributed.context import DistributedContext
from dpkfc.early_stopping import PURPOSE, EarlyStopping, PrivateEarlyStopping, wrong_answers
from dpkfc.session import Session
from dpkfc.step_record import Batch, StepRecord

if TYPE_CHECKING:
    from dpkfc.audit.run_canaries import PlantedCanaries

# Called with the row of each evaluation after the first step. The run ends if it returns False.
Watch = Callable[[Row], bool]


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM in a list; let the second raise KeyboardInterrupt at once.

    Handlers are restored afterwards. Outside the main thread handlers cannot be set, and signals
    keep their meaning.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class TrainingLoop:
    """Steps, evaluations and checkpoints of one run."""

    prepared: Prepared
    folder: RunFolder
    session: Session
    metrics: Metrics
    ranks: DistributedContext
    watch: Watch | None
    canaries: PlantedCanaries | None = None

    @cached_property
    def every(self) -> int:
        """Steps between evaluations."""
        config, plan = self.prepared.config, self.prepared.plan
        epoch = max(1, round(self.prepared.data.size / config.privacy.expected_batch_size))
        return config.run.evaluate_every or min(epoch, max(1, plan.steps // 5))

    def run(self, progress: TrainingProgress) -> bool:
        """Train to the end of the plan.

        Returns:
            Whether the run was interrupted; then a checkpoint is on the disk.
        """
        plan, done = self.prepared.plan, self.session.steps_done
        if not self.metrics.rows or done >= plan.steps:
            # Save before the first step: a run that is killed later can then be continued, and the
            # budget that it has spent is not lost. Evaluate a finished run again: it may have died
            # before the figures of its final weights were written.
            self.session.release_curvature()
            row = Row(step=done, epsilon=plan.curve.running_epsilon(done))
            self.metrics.add(self._evaluate(row, progress))
            self._save()
        with stop_on_signals() as stop:
            try:
                for batch in self.session.batches():
                    row = self._step(batch, progress)
                    if batch.step == done and self.session.unproved_operation:
                        progress.show_slow_operation(self.session.unproved_operation)
                    is_last = row.step == plan.steps
                    if is_last or row.step % self.every == 0:
                        row = self._evaluate(row, progress)
                    if not is_last and row.accuracy is not None:
                        row = self._release_loss(row)
                    self.metrics.add(row)
                    if row.accuracy is not None:
                        self._save()
                    if is_last:
                        continue
                    if self.ranks.any(self._is_over(row)):
                        self._end_early(row)
                        return False
                    if self.ranks.any(bool(stop) or not self._should_go_on(row)):
                        self._save()
                        return True
            except KeyboardInterrupt:
                if self.ranks.world_size > 1:
                    # All processes save a checkpoint together, and this one alone was interrupted.
                    raise
                self._save()
                return True
        return False

    def _step(self, batch: Batch, progress: TrainingProgress) -> Row:
        """Take one private step and return its row of the metrics."""
        rate = learning_rate(self.prepared.config, batch.step, self.prepared.plan.steps)
        for group in self.session.optimizer.param_groups:
            group["lr"] = rate
        loss: Callable[..., Tensor] = self.prepared.recipe.task.loss
        if self.canaries is not None:
            self.canaries.start_step(batch)
            loss = self.canaries.loss
        record = self.session.step(batch, loss)
        self._note_refresh()
        bound = self.prepared.plan.curve.upper_bound(record.release, self.every)
        row = _row(record, bound)
        progress.advance(
            epsilon=row.epsilon,
            clipped_fraction=record.clipped_fraction,
            batch_size=record.batch_size,
        )
        return row

    def _is_over(self, row: Row) -> bool:
        """Return whether the losses so far, public or released with noise, end the run."""
        stopping = self.prepared.stopping
        if stopping is None or row.decisive_loss is None:
            return False
        losses = [row.decisive_loss for row in self.metrics.rows]
        return stopping.is_over([loss for loss in losses if loss is not None])

    def _release_loss(self, row: Row) -> Row:
        """Return a row with a charged, noisy mean on held-out private examples.

        A run that was cut off may have charged some evaluations twice. Once all are charged, the
        row is returned as it is.
        """
        stopping, session = self.prepared.stopping, self.session
        if not isinstance(stopping, PrivateEarlyStopping):
            return row
        if session.ledger.extra.get(PURPOSE, 0) >= session.plan.extra_counts[PURPOSE]:
            return row
        loss_fn = self.prepared.recipe.task.loss
        if self.prepared.config.run.stop_on == "private-error":
            loss_fn = wrong_answers
        with evaluated_weights(session):
            return replace(row, noisy_loss=stopping.loss(session, loss_fn))

    def _end_early(self, row: Row) -> None:
        """Charge the steps that are left.

        Released weights or losses have decided when the run ends, so ε is the whole plan's.
        """
        self.session.forfeit_steps()
        plan = self.prepared.plan
        self.metrics.add(replace(row, epsilon=plan.curve.epsilon(plan.steps)))
        self._save()

    def _should_go_on(self, row: Row) -> bool:
        """Return whether the operator's `watch` lets the run go on after this row."""
        return row.accuracy is None or self.watch is None or self.watch(row)

    def _evaluate(self, row: Row, progress: TrainingProgress) -> Row:
        """Return a row with the score and the mean loss on held-out examples.

        Where scores are released with noise, nothing else is computed from the test rows.
        """
        with evaluated_weights(self.session):
            judged = NOTHING_KNOWN
            if self.prepared.counts is None:
                parts = gather_judged(self.prepared, self.ranks)
                judge = partial(self.prepared.recipe.task.judge, *parts)
                judged = self.ranks.broadcast_from_rank0(judge, "evaluation")
            stopping = self.prepared.stopping
            public_loss: float | None = None
            if isinstance(stopping, EarlyStopping):
                public_loss = stopping.loss(self.prepared.model, self.prepared.recipe.task.loss)
        progress.accuracy(judged.accuracy, self.prepared.config.run.eval_on)
        return replace(row, accuracy=judged.accuracy, loss=judged.loss, public_loss=public_loss)

    def _note_refresh(self) -> None:
        """Remember step, digest and scale of a new preconditioner."""
        state = self.session.preconditioner
        refreshes = self.metrics.refreshes
        if state is None or any(state.step == known["step"] for known in refreshes):
            return
        refresh = {"step": state.step, "digest": state.digest, "scale": state.scale}
        if state.note:
            refresh["note"] = state.note
        refreshes.append(refresh)

    def _save(self) -> None:
        self.session.save(self.folder.checkpoint)
        write = partial(self.metrics.write, self.folder.metrics)
        self.ranks.broadcast_from_rank0(write, "metrics")


def _row(record: StepRecord, epsilon: float) -> Row:
    """Return the row of a step, without an evaluation."""
    return Row(
        step=record.release,
        epsilon=epsilon,
        seconds=record.seconds,
        batch_size=record.batch_size,
        clipped_fraction=record.clipped_fraction,
        nonfinite_fraction=record.nonfinite_fraction,
        median_norm=record.median_norm,
        floor_fraction=record.notes.get("adam_bc/floor_fraction"),
    )
