"""One pass over a batch: followed by a tracker, or over one example alone.

The gradient of an example is, by definition, plain autograd on a micro-batch of that example alone.
Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.autograd_graph import gradient_of
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.loss_function import LossFn, check_losses, losses_of
from dpkfc.gradients.tape import Tape
from dpkfc.tensors import Tensors
from dpkfc.tracking.modes import follow
from dpkfc.tracking.tracker import Tracker


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    # The processor would read what an accelerator has not copied yet.
    move = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
    return tree_map_only(Tensor, move, batch)


def batch_tracker(model: nn.Module, batch: Any, size: int) -> Tracker:
    """Return a tracker for a batch whose tensors have their examples in front."""
    tracker = Tracker(size, model.buffers())
    tracker.declare_earlier_batches()
    tracker.declare_batch(batch)
    tracker.declare_parameters(trainable_tensors(model).values())
    return tracker


def follow_augmentation(
    augment: Augmentation | None, model: nn.Module, batch: Any, size: int
) -> tuple[Any, Tracker]:
    """Return the batch as `augment` changes it, and the tracker that has followed the change."""
    tracker = batch_tracker(model, batch, size)
    if tracker.is_opaque:
        why = "it holds values that are not tensors, which no operation shows to be read"
        tracker.fail("batch", why, is_read=True)
    with follow(tracker):
        batch = augment_batch(augment, model, batch, size)
    return batch, tracker


def follow_pass(
    loss_fn: LossFn, model: nn.Module, layers: Sequence[Layer], batch: Any, tracker: Tracker
) -> tuple[Tape, Tensor]:
    """Run a forward pass under a tracker.

    Args:
        loss_fn: maps model and batch to losses.
        model: the model.
        layers: whose calls the tape records.
        batch: the batch.
        tracker: on which the batch is declared.

    Returns:
        The tape of the pass and its losses `[n]`.

    Raises:
        ValueError: losses of another shape.
    """
    tracker.declare_persistent(model.buffers())
    tape = Tape(model, layers, tracker=tracker)
    with torch.enable_grad(), tape, follow(tracker):
        losses = losses_of(loss_fn, model, batch)
    check_losses(losses, tracker.size)
    return tape, losses


def example_gradient(model: nn.Module, loss_fn: LossFn, batch: Any, weight: float) -> Tensors:
    """Return the gradient of the loss of one example.

    Args:
        model: in the mode in which it is trained.
        loss_fn: maps model and batch to losses `[1]`.
        batch: a batch of one example.
        weight: a factor of the loss.

    Returns:
        Parameter name to gradient, dense. Parameters that the loss does not use are absent.

    Raises:
        ValueError: losses of another shape; as `losses_of`.
    """
    losses = losses_of(loss_fn, model, batch)
    check_losses(losses, 1)
    return gradient_of(model, losses.sum() * weight)
