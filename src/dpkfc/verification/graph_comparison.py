"""The gradients of a captured graph, compared with plain autograd once, on public rows.

A capture takes some operations apart. This is a guard against parts that compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.clipped_sum import Captured
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.loss_function import LossFn, losses_of
from dpkfc.gradients.state import ends_run, own_pass
from dpkfc.rng_state import all_states, has_drawn, preserve_generators
from dpkfc.tracking.states import Unknown
from dpkfc.verification.differences import all_gradients, total_norm_of
from dpkfc.verification.tape_comparison import check_sums, weights_of_rows


def compare_graph(
    graph: Captured,
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: LossFn,
    augment: Augmentation | None,
    batch: Any,
    size: int,
) -> None:
    """Refuse a graph whose gradients differ from plain autograd's.

    Passes that draw random numbers are not compared: a graph may draw others.

    Args:
        graph: captures passes; its `refusal` is set.
        model: in the mode in which it is trained.
        layers: of the model.
        loss_fn: maps model and batch to losses `[n]`.
        augment: of the training.
        batch: public rows on the device of the model, which the loss accepts.
        size: rows of the batch.
    """
    with preserve_generators():
        states = all_states()
        with own_pass(model), torch.enable_grad():
            losses = losses_of(loss_fn, model, augment_batch(augment, model, batch, size))
            weights = weights_of_rows(size, losses.device)
            total = (losses * weights.to(losses)).sum()
            expected = all_gradients(model, total)
        if has_drawn(states):
            return
        try:
            calls = graph.calls(loss_fn, augment, batch, size, torch.sum, copies=True)
        except Exception as error:
            if ends_run(error):
                raise
            return  # as in a step: another way is taken
    if calls is None:
        return
    # Under autocast a layer in bfloat16 rounds the gradients of others too.
    dtypes = {block.like.dtype for blocks in calls.values() for block in blocks}
    dtypes |= {gradient.dtype for gradient in expected.values()}
    dtype = max(dtypes, key=lambda x: torch.finfo(x).eps)
    total_norm = total_norm_of(expected)
    try:
        for layer in layers:
            check_sums(layer, calls.pop(layer.name, []), weights, expected, total_norm, dtype)
    except ValueError:
        reason = "its gradients on public rows differ from plain autograd"
        graph.refusal = Unknown("graph", reason)
