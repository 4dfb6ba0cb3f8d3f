"""Rules for views and layout, and for operations over dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from dpkfc.tracking.batch_rules import (
    Answer,
    Operation,
    dimension_of,
    fits,
    rule_for,
    rule_of_first,
)
from dpkfc.tracking.elementwise import broadcast_axis
from dpkfc.tracking.states import BatchAxis, State, Total, axis_after_reshape


@rule_of_first(
    "view _unsafe_view reshape _reshape_alias view_as squeeze unsqueeze flatten unflatten"
)
def _reshape(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    y = operation.result
    operation.require(x.numel() == y.numel(), "a view with another number of elements")
    new_axis = axis_after_reshape(axis, x.shape, y.shape, operation.size)
    return operation.require(new_axis, "a reshape tears the batch axis apart")


@rule_of_first("permute transpose t")
def _permute(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    rank = x.dim()
    order = list(range(rank))
    dims = operation.argument("dims")
    if dims is not None:
        order = [dim % rank for dim in dims]
    else:
        first = dimension_of(operation, x, "dim0")
        second = dimension_of(operation, x, "dim1", 1)
        order[first], order[second] = second, first
    return axis.move(order.index(axis.dim))


@rule_of_first("expand repeat")
def _expand(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    axis = axis.shift(operation.result.dim() - x.dim())
    times = operation.argument("repeats")
    if times is None:
        return axis
    return replace(axis, pre=axis.pre * times[axis.dim])


@rule_of_first("slice narrow")
def _slice(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    y = operation.result
    if dimension_of(operation, x) != axis.dim or x.shape == y.shape:
        return axis
    places = slice(operation.argument("start"), None)
    start, _, _ = places.indices(x.shape[axis.dim])
    step = operation.argument("step", 1)
    return _slice_axis(operation, axis, start, y.shape[axis.dim], step)


def _slice_axis(
    operation: Operation, axis: BatchAxis, start: int, length: int, step: int = 1
) -> State:
    """Return the axis of a part of the batch dimension.

    The part may hold whole copies of the batch, or one of several places of every example.
    """
    block = operation.size * axis.post
    if step == 1 and length > 0 and start % block == length % block == 0:
        return BatchAxis(axis.dim, length // block, axis.post)
    takes_one_place = step == axis.post and axis.pre == 1 and start < axis.post
    if takes_one_place and length == operation.size:
        return BatchAxis(axis.dim)
    return operation.lose_examples("a slice takes some of the examples")


@rule_of_first(
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes"
)
def _split(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    if axis.dim != dimension_of(operation, x):
        return axis
    states: list[State | None] = []
    start = 0
    for part in operation.outputs:
        length = part.shape[axis.dim]
        states.append(_slice_axis(operation, axis, start, length))
        start += length
    return states


@rule_for("cat concat concatenate")
def _cat(operation: Operation) -> Answer:
    empty = (0,)
    tensors = [x for x in operation.args[0] if x.shape != empty]
    known = [axis for axis in map(operation.axis, tensors) if axis is not None]
    first = known[0]
    why = "tensors with different batch axes are joined"
    if dimension_of(operation, tensors[0]) != first.dim:
        operation.require(fits(operation, tensors, first), why)
        return first
    copies = sum(axis.pre for axis in known)
    joined = replace(first, pre=copies)
    for axis in known:
        operation.require(replace(axis, pre=copies) == joined, why)
    operation.require(len(known) == len(tensors), "rows of no example are joined to the batch")
    return joined


@rule_for("stack")
def _stack(operation: Operation) -> Answer:
    y = operation.result
    why = "tensors with different batch axes are stacked"
    axis = broadcast_axis(operation, operation.args[0], y.dim() - 1, why)
    if dimension_of(operation, y) <= axis.dim:
        return axis.shift(1)
    return axis


@rule_for("slice_scatter select_scatter")
def _scatter_part(operation: Operation) -> Answer:
    """Return the axis of a copy with a part written over, as of `x[:, i] = y`."""
    x, part = operation.args[:2]
    dim = dimension_of(operation, x)
    loses_dim = operation.name == "select_scatter"
    why = "a part is written to other examples"
    axes = {axis for axis in [operation.axis(x)] if axis is not None}
    given = operation.axis(part)
    if given is not None:
        axes.add(given.shift(int(loses_dim and given.dim >= dim)))
    operation.require(len(axes) == 1, why)
    axis = axes.pop()
    operation.require(axis.dim != dim or x.shape == part.shape, why)
    of_part = axis.shift(-int(loses_dim and axis.dim > dim))
    operation.require(fits(operation, [x], axis) and fits(operation, [part], of_part), why)
    return axis


@rule_of_first("diagonal")
def _diagonal(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    dims = {dimension_of(operation, x, name) for name in ("dim1", "dim2")}
    operation.require(axis.dim not in dims, "a diagonal runs through the batch axis")
    return _remove_dims(axis, dims)


def _remove_dims(axis: BatchAxis, dims: Iterable[int]) -> BatchAxis:
    """Return an axis after other dimensions are gone."""
    return axis.shift(-sum(dim < axis.dim for dim in dims))


@rule_of_first("as_strided")
def _follow_strided(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    layouts = {(y.shape, y.stride(), y.storage_offset()) for y in (x, operation.result)}
    operation.require(len(layouts) == 1, "a strided view is not followed")
    return axis


@rule_of_first("view_as_real view_as_complex view_as_complex_copy")
def _keep_leading(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of an operation that adds or removes trailing dimensions."""
    operation.require(axis.dim < operation.result.dim(), "the batch axis is the last dimension")
    return axis


# -- dimensions over which an operation works ------------------------------------------------------


def _dims(operation: Operation, rank: int) -> set[int]:
    """Return the dimensions that an operation works over; all of them where it names none."""
    for name in ("dim", "dims", "axis", "dimension"):
        value = operation.argument(name)
        if value not in (None, [], ()):
            if not isinstance(value, (list, tuple)):
                value = [value]
            return {int(dim) % max(1, rank) for dim in value}
    return set(range(rank))


@rule_of_first(
    "softmax _softmax log_softmax _log_softmax _safe_softmax logcumsumexp cumsum cumprod "
    "cummax cummin sort argsort msort topk flip _fft_r2c _fft_c2r _fft_c2c glu roll unfold"
)
def _keep_place(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of an operation along other dimensions, which stay where they are."""
    dims = _dims(operation, x.dim())
    operation.require(axis.dim not in dims, "it works along the batch axis")
    return axis


@rule_of_first("diag_embed")
def _diag_embed(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of vectors that become diagonals of matrices in two new places."""
    y = operation.result
    operation.require(axis.dim < x.dim() - 1, "the batch axis becomes a diagonal")
    old_dims = list(range(y.dim()))
    old_dims.remove(dimension_of(operation, y, "dim1"))
    old_dims.remove(dimension_of(operation, y, "dim2"))
    return axis.move(old_dims[axis.dim])


@rule_of_first("renorm")
def _renorm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a bound on the norm of each entry along the dimension of the examples."""
    operation.require(axis.dim == dimension_of(operation, x), "norms run over the batch axis")
    return axis


@rule_of_first(
    "amax amin max min aminmax argmax argmin median nanmedian prod any all logsumexp std var "
    "var_mean std_mean kthvalue norm linalg_vector_norm nansum count_nonzero mode select "
    "unbind"
)
def _reduce(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a reduction over other dimensions, or after one of them is gone."""
    dims = _dims(operation, x.dim())
    operation.require(axis.dim not in dims, "it reduces over the batch axis")
    if operation.result.dim() == x.dim():
        return axis
    return _remove_dims(axis, dims)


@rule_of_first("sum mean")
def _sum(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a sum, or a total where the sum runs over the batch axis."""
    if axis.dim not in _dims(operation, x.dim()):
        return _reduce(operation, x, axis)
    operation.require(operation.result.numel() == 1, "it adds up examples")
    return total_of(operation, operation.name == "mean", x.numel())


def total_of(operation: Operation, is_mean: bool, entries: int) -> Total:
    """Return the total of so many entries."""
    if is_mean:
        return Total(True, entries=entries / operation.size)
    return Total()
