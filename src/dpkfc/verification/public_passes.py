"""Passes over public rows, which the checks compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.layers import Layer, named_tensors
from dpkfc.gradients.loss_function import LossFn, check_losses, losses_of
from dpkfc.gradients.one_pass import follow_augmentation, follow_pass, move_batch
from dpkfc.gradients.state_check import PublicCheck
from dpkfc.gradients.tape import Tape
from dpkfc.public_rows.rows import PublicRows
from dpkfc.rng_state import restarter
from dpkfc.tracking.states import Unknown
from dpkfc.verification.constant_numbers import ConstantNumbers
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
    """

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    augment: Augmentation | None
    device: torch.device
    max_rows: int
    state: PublicCheck
    is_afresh: bool = False

    def losses(self, batch: Any, size: int) -> Tensor:
        """Return the losses `[n]` of a batch, augmented as in training."""
        batch = self.augment_batch(batch, size)
        with self.state.begin_afresh(self.model) if self.is_afresh else nullcontext():
            losses = losses_of(self.loss_fn, self.model, batch)
        check_losses(losses, size)
        return losses

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

    def is_repeatable(self, make_batch: Callable[[], Any], *, restarted: bool) -> bool:
        """Return whether two passes agree, where torch draws constants.

        Args:
            make_batch: makes the batch of each pass.
            restarted: begin both with the same state of the global generators.
        """
        restart = restarter()
        passes = []
        with ConstantNumbers():
            for _ in range(2):
                if restarted:
                    restart()
                losses = losses_of(self.loss_fn, self.model, make_batch())
                passes.append(losses.detach())
        return not self.differ(*passes)

    def differ(self, losses: Tensor, others: Tensor) -> bool:
        """Return whether losses differ by more than rounding."""
        dtypes = {p.dtype for p in named_tensors(self.layers).values()}
        return losses_differ(losses, others, dtypes)
