"""Passes over public rows, which the checks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.layers import Layer, named_tensors
from dpkfc.gradients.loss_function import LossFn, check_losses, losses_of
from dpkfc.gradients.one_pass import follow_augmentation, follow_pass, move_batch
from dpkfc.gradients.state_check import PublicCheck
from dpkfc.gradients.tape import Tape
from dpkfc.public_rows.rows import PublicRows
from dpkfc.rng_state import all_states, has_drawn, restarter
from dpkfc.tracking.states import Unknown
from dpkfc.verification.constant_numbers import ConstantNumbers, NotedDraws
from dpkfc.verification.differences import losses_differ


@dataclass(frozen=True)
class PublicPasses:
    """Passes of one model and loss over public rows.

    Attributes:
        model: the model.
        layers: its layers.
        loss_fn: maps model and batch to losses.
        augment: of the training.
        device: of the parameters.
        max_rows: of a batch.
        state: of the model before the check.
        is_afresh: begin each pass with the same state, as passes of a step do.
        known: losses of rows, by their indices, where no pass has changed an attribute of the
            model, from passes that drew no random numbers. A row alone keeps its graph.
    """

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    augment: Augmentation | None
    device: torch.device
    max_rows: int
    state: PublicCheck
    is_afresh: bool = False
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def losses(self, batch: Any, size: int) -> Tensor:
        """Return the losses `[n]` of a batch, augmented as in training."""
        batch = self.augment_batch(batch, size)
        with self.state.begin_afresh(self.model) if self.is_afresh else nullcontext():
            losses = losses_of(self.loss_fn, self.model, batch)
        check_losses(losses, size)
        return losses

    def losses_of_rows(self, rows: PublicRows, indices: Sequence[int]) -> Tensor:
        """Return the losses `[n]` of some rows, known ones without another pass.

        Losses of several rows have no graph.
        """
        key = tuple(indices)
        losses = self.known.get(key)
        if losses is None:
            with self._note_losses(key) as noted:
                # A collate function may draw numbers too.
                batch = rows.batch(indices)
                losses = self._values(batch, len(key)) if len(key) > 1 else self.losses(batch, 1)
                noted.append(losses)
        return losses

    def _values(self, batch: Any, size: int) -> Tensor:
        """Return losses whose graph holds no activations: a large batch then takes little memory.

        A loss that differentiates itself needs them, and runs again.
        """
        refused: list[None] = []

        def refuse(saved: None) -> Tensor:
            refused.append(saved)
            raise RuntimeError("autograd has saved nothing")

        try:
            with saved_tensors_hooks(_drop, refuse):
                losses = self.losses(batch, size).detach()
        except Exception as error:
            # Transforms of torch.func refuse such hooks. Another error may be raised only once.
            if not refused and "saved tensor hooks" not in str(error):
                raise
        else:
            # A loss may catch the error, and go on in another way.
            if not refused:
                return losses
        return self.losses(batch, size).detach()

    @contextmanager
    def _note_losses(self, key: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """Note the losses that the body puts into the list, if another pass would give the same."""
        states = all_states()
        noted: list[Tensor] = []
        with NotedDraws() as draws:
            yield noted
        if self.state.replica.changed_attributes():
            self.known.clear()
        elif not draws.are_any and not has_drawn(states):
            self.known[key] = noted[0] if len(key) == 1 else noted[0].detach()

    def trace_rows(self, rows: PublicRows, size: int) -> tuple[Unknown | None, Tape, Tensor]:
        """Track one pass over the first rows, and note its losses; return as `trace`."""
        with self._note_losses(tuple(range(size))) as noted:
            failure, tape, losses = self.trace(rows.batch(range(size)), size)
            noted.append(losses)
        return failure, tape, losses

    def trace(self, batch: Any, size: int) -> tuple[Unknown | None, Tape, Tensor]:
        """Track one pass; return why it is not proved, its tape and its losses."""
        batch = move_batch(batch, self.device)
        batch, tracker = follow_augmentation(self.augment, self.model, batch, size)
        tape, losses = follow_pass(self.loss_fn, self.model, self.layers, batch, tracker)
        tape.check_enabled()
        tape.check_depends(losses)
        return tape.failure(losses), tape, losses

    def augment_batch(self, batch: Any, size: int) -> Any:
        """Return a batch on the device of the model, augmented as in training."""
        batch = move_batch(batch, self.device)
        return augment_batch(self.augment, self.model, batch, size)

    def augment_rows(self, rows: PublicRows, indices: Sequence[int]) -> Any:
        """Return the augmented batch of some rows."""
        return self.augment_batch(rows.batch(indices), len(indices))

    def is_repeatable(
        self, make_batch: Callable[[], Any], *, restarted: bool, known: Tensor | None = None
    ) -> bool:
        """Return whether two passes agree, where torch draws constants.

        Args:
            make_batch: makes the batch of each pass.
            restarted: begin both with the same state of the global generators.
            known: losses of one of the passes, if it was made and drew no random numbers.
        """
        restart = restarter()
        passes = [] if known is None else [known]
        with ConstantNumbers():
            while len(passes) < 2:
                if restarted:
                    restart()
                losses = losses_of(self.loss_fn, self.model, make_batch())
                passes.append(losses.detach())
        return not self.differ(*passes)

    def differ(self, losses: Tensor, others: Tensor) -> bool:
        """Return whether losses differ by more than rounding."""
        return losses_differ(losses, others, self.dtypes())

    def dtypes(self) -> set[torch.dtype]:
        """Return the types of the parameters."""
        return {p.dtype for p in named_tensors(self.layers).values()}


def _drop(x: Tensor) -> None:
    """Drop a tensor that autograd would save."""
