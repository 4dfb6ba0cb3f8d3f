"""Rules for attention, recurrences and losses."""

from __future__ import annotations

import torch

from dpkfc.tracking.batch_rules import Answer, Operation, fits, rule_for
from dpkfc.tracking.elementwise import broadcast_axis
from dpkfc.tracking.layouts import total_of
from dpkfc.tracking.states import BatchAxis, State, Total


@rule_for(
    "scaled_dot_product_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
def _attention(operation: Operation) -> Answer:
    """Return the axis of fused attention.

    Queries, keys and values have the batch, alone or with heads, before the last two dimensions.
    """
    query = operation.args[0]
    outputs = operation.outputs
    why = "attention pairs different examples"
    axis = broadcast_axis(operation, operation.tensors, query.dim(), why)
    operation.require(axis.dim < query.dim() - 2, why)
    is_plain = operation.has_length(outputs[0], axis)
    operation.require(is_plain, "attention repeats the heads of examples")
    length = query.shape[axis.dim]
    for x in operation.args[:3]:
        operation.require(operation.is_batched(x) or x.shape[axis.dim] == length, why)
    return [axis, axis, *[None] * len(outputs)]


def _reduce_loss(operation: Operation, axis: BatchAxis, entries: int) -> State:
    """Return the axis of an unreduced loss, or its total (reduction 1: mean, 2: sum)."""
    reduction = operation.argument("reduction")
    if reduction == 0:
        return axis
    return total_of(operation, reduction == 1, entries)


@rule_for(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss l1_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
def _elementwise_loss(operation: Operation) -> Answer:
    tensors = operation.tensors
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    why = "the loss pairs different examples"
    axis = broadcast_axis(operation, tensors, len(shape), why)
    return _reduce_loss(operation, axis, shape.numel())


@rule_for("nll_loss_forward nll_loss2d_forward")
def _nll_loss(operation: Operation) -> Answer:
    """Return the axis or the total of a negative log-likelihood.

    With a mean, torch divides by the number of targets that are not ignored, or by the sum of their
    weights. Both are private. For Opacus-shaped scripts, a mean without weights divides by the
    number of all targets: see `integrations/_opacus_batch.py`.
    """
    scores, target, weight, reduction, ignored = operation.args[:5]
    class_dim = min(1, scores.dim() - 1)
    why = "the classes of the loss run over the batch axis"
    axis = operation.require(operation.axis(scores), why)
    operation.require(axis.dim != class_dim, why)
    if axis.dim > class_dim:
        axis = axis.shift(-1)
    operation.require(fits(operation, [target], axis), "the loss pairs different examples")
    operation.require(not operation.is_batched(weight), "class weights depend on the examples")
    if reduction == 0:
        return [axis, None]
    if reduction == 2:
        return [
            Total(),
            operation.lose_examples("the divisor of the loss counts the labels of all examples"),
        ]
    operation.require(weight is None, "class weights divide it by the labels of the batch")
    return operation.lose_examples(f"ignore_index={ignored} divides it by the labels of the batch")


@rule_for("multi_margin_loss multilabel_margin_loss_forward")
def _margin_loss(operation: Operation) -> Answer:
    scores, target = operation.args[:2]
    axis = BatchAxis(0)
    is_placed = operation.axis(scores) == axis and scores.dim() == 2
    operation.require(is_placed, "the classes of the loss run over the batch axis")
    operation.require(fits(operation, [target], axis), "the loss pairs different examples")
    are_public = not any(map(operation.is_batched, operation.tensors[2:]))
    operation.require(are_public, "class weights depend on the examples")
    return [_reduce_loss(operation, axis, len(scores)), axis]


@rule_for("_ctc_loss")
def _ctc_loss(operation: Operation) -> Answer:
    scores, *targets_and_lengths = operation.args[:4]
    rows = BatchAxis(0)
    targets = targets_and_lengths[0]
    axes = set(map(operation.axis, targets_and_lengths))
    why = "the batch is not dimension 1 of the scores and 0 of the targets"
    operation.require(operation.axis(scores) == BatchAxis(1), why)
    operation.require(targets.dim() == 2 and axes <= {None, rows}, why)
    tensors = [torch.as_tensor(x) for x in targets_and_lengths]
    why = "public targets or lengths depend on the places of the examples"
    operation.require(fits(operation, tensors, rows), why)
    return rows
