"""Rules for elementwise operations."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from dpkfc.tracking.batch_rules import (
    RULES,
    Answer,
    Operation,
    fits,
    is_shared,
    rule_for,
    rule_of_first,
)
from dpkfc.tracking.states import BatchAxis


def broadcast_axis(
    operation: Operation, tensors: Iterable[Tensor], rank: int, why: str
) -> BatchAxis:
    """Return the axis that all batched operands share after broadcasting.

    Args:
        operation: the operation.
        tensors: its operands.
        rank: dimensions of the broadcast result.
        why: the reason to lose the examples where axes differ, or where a public operand has
            different entries for different examples.
    """
    tensors = list(tensors)
    axes = axes_in_result(operation, tensors, rank)
    operation.require(axes and fits(operation, tensors, axes[0], rank), why)
    return axes[0]


def axes_in_result(operation: Operation, tensors: Iterable[Tensor], rank: int) -> list[BatchAxis]:
    """Return where the batched operands have their axes in a broadcast result."""
    axes = []
    for x in tensors:
        axis = operation.axis(x)
        if axis is not None:
            axes.append(axis.shift(rank - x.dim()))
    return axes


def pointwise(operation: Operation) -> Answer:
    """Return the axis of an elementwise operation; all batched operands must agree on it."""
    outputs = operation.outputs
    operation.require(outputs, "it returns no tensor")
    why = "broadcasting pairs different examples"
    axis = broadcast_axis(operation, operation.tensors, outputs[0].dim(), why)
    operation.require(operation.has_length(outputs[0], axis), why)
    return axis


_POINTWISE = """
    _to_copy copy contiguous detach alias lift_fresh bernoulli native_dropout dropout _prelu_kernel
    fill masked_fill binary_cross_entropy_backward real imag conj _conj
    resolve_conj resolve_neg gelu hardswish hardsigmoid_backward hardswish_backward
    log_sigmoid_forward log_sigmoid_backward elu_backward leaky_relu_backward hardtanh_backward
    softplus_backward mish_backward polar complex normal uniform random exponential zero
    _cast_Float _cast_Double special_multigammaln isclose rsub floor_divide
"""
RULES.update(dict.fromkeys(_POINTWISE.split(), pointwise))


@rule_for("prelu")
def _prelu(operation: Operation) -> Answer:
    """Return the axis of a prelu, whose weights belong to dimension 1."""
    x, weight = operation.args[:2]
    axis = operation.axis(x)
    operation.require(not operation.is_batched(weight), "the weights depend on the examples")
    if axis is not None and axis.dim == 1:
        are_equal = is_shared(operation, weight, axis.move(0))
        operation.require(are_equal, "the weights depend on the places of the examples")
    return axis


@rule_of_first("isin bucketize rand_like randn_like randint_like rrelu_with_noise")
def _same_axis(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of the first operand; random numbers are drawn for every example.

    The noise of rrelu is written over, or never read.
    """
    why = "every entry is compared with the entries of all examples"
    operation.require(not has_batched_weights(operation), why)
    return axis


def has_batched_weights(operation: Operation) -> bool:
    """Return whether an operand next to the first one depends on the examples."""
    return any(map(operation.is_batched, operation.tensors[1:]))


@rule_for(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "new_empty_strided"
)
def _public(operation: Operation) -> Answer:
    """Return public: the values depend on no operand."""
    return None
