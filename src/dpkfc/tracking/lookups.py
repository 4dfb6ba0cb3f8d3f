"""Rules for lookups: embeddings, gathers and indices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpkfc.tracking.batch_rules import Answer, Operation, dimension_of, fits, rule_for
from dpkfc.tracking.elementwise import broadcast_axis
from dpkfc.tracking.states import BatchAxis
from dpkfc.tracking.trailing import common_axis


@rule_for("embedding take")
def _embedding(operation: Operation) -> Answer:
    weight, ids = operation.args[:2]
    is_public = not operation.is_batched(weight)
    operation.require(is_public, "the table of an embedding depends on the examples")
    return operation.axis(ids)


@rule_for("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(operation: Operation) -> Answer:
    """Return the axis of bags of equal length, one or several an example.

    The ids are `[N, T]`, which torch has flattened.
    """
    weight, ids, offsets = operation.args[:3]
    sample_weights = operation.argument("per_sample_weights")
    why = "bags of an embedding have the batch in another place"
    axis = operation.require(operation.axis(ids), why)
    has_public_table = not any(map(operation.is_batched, (weight, offsets)))
    has_rows = axis.pre == 1 and fits(operation, [sample_weights], axis)
    operation.require(has_public_table and has_rows, why)
    count = len(offsets)
    bags, bag_rest = divmod(count, operation.size)
    length, length_rest = divmod(ids.numel(), max(1, count))
    regular_offsets = length * torch.arange(count, device=offsets.device)
    is_regular = bag_rest == length_rest == 0 and torch.equal(offsets, regular_offsets)
    is_plain = is_regular and not operation.argument("include_last_offset")
    operation.require(is_plain, "bags of an embedding have several lengths")
    bag_axis = BatchAxis(0, 1, bags)
    return [bag_axis, axis, bag_axis, bag_axis]


@rule_for("gather scatter scatter_add scatter_reduce take_along_dim")
def _gather(operation: Operation) -> Answer:
    tensors = [x for x in operation.tensors if x.dim()]
    axis = common_axis(operation, tensors, "it pairs different examples")
    is_other_dim = axis.dim != dimension_of(operation, tensors[0])
    if "scatter" not in operation.name and not operation.is_batched(tensors[0]):
        if not is_other_dim:
            return axis
    operation.require(is_other_dim, "it reads along the batch axis")
    have_examples = all(operation.has_length(x, axis) for x in tensors)
    operation.require(have_examples, "its operands have different numbers of examples")
    operation.require(fits(operation, tensors, axis), "it pairs examples with their places")
    return axis


@rule_for("index_add index_copy index_fill index_reduce")
def _index_write(operation: Operation) -> Answer:
    x = operation.args[0]
    index = operation.argument("index")
    rank = x.dim()
    operation.require(not operation.is_batched(index), "an index depends on the examples")
    operands = [y for y in operation.tensors if y is not index and y.dim() == rank]
    why = "it writes along the batch axis"
    axis = broadcast_axis(operation, operands, rank, why)
    operation.require(axis.dim != dimension_of(operation, x), why)
    return axis


@rule_for("index_select")
def _index_select(operation: Operation) -> Answer:
    x = operation.args[0]
    index = operation.argument("index")
    axis = operation.axis(x)
    dim = dimension_of(operation, x)
    index_axis = operation.axis(index)
    if index_axis is not None:
        operation.require(axis is None, "examples pick entries of other examples")
        return index_axis.move(dim)
    if axis is None or axis.dim != dim:
        return axis
    return _repeat_by_index(operation, axis, index)


def _repeat_by_index(operation: Operation, axis: BatchAxis, index: Tensor) -> Answer:
    """Return the axis after a public index repeats each example, or the batch, several times."""
    length = axis.length(operation.size)
    rows = index.flatten()
    identity = torch.arange(length, device=rows.device)
    times, rest = divmod(len(rows), length)
    if rest == 0 and times:
        if torch.equal(rows, identity.repeat(times)):
            return replace(axis, pre=axis.pre * times)
        if torch.equal(rows, identity.repeat_interleave(times)):
            return replace(axis, post=axis.post * times)
    return operation.lose_examples("an index rearranges the examples")


@dataclass(frozen=True)
class _Indices:
    """The indices of `x[i, :, j]`, where x has `x_rank` dimensions.

    Attributes:
        given: dimension of x to its index.
        x_rank: dimensions of x.
        rank: dimensions of the indices after broadcasting.
        is_adjacent: whether the indexed dimensions of x lie next to each other.
        front: first dimension of the result that the indices fill.
    """

    given: dict[int, Tensor]
    x_rank: int
    rank: int
    is_adjacent: bool
    front: int

    @property
    def result_rank(self) -> int:
        """Return the dimensions of the result."""
        return self.rank + self.x_rank - len(self.given)

    @property
    def untouched_dims(self) -> list[int]:
        """Return the dimensions of x without an index."""
        return [dim for dim in range(self.x_rank) if dim not in self.given]

    @property
    def mask(self) -> Tensor | None:
        """Return the first index that is a mask, None without one."""
        return next(filter(is_mask, self.given.values()), None)

    def except_dim(self, dim: int) -> list[Tensor]:
        """Return the indices of all other dimensions."""
        return [index for other, index in self.given.items() if other != dim]

    def moved_dim(self, dim: int) -> int:
        """Return where a dimension of x without an index lies in the result."""
        place = self.untouched_dims.index(dim)
        if self.is_adjacent and dim < self.front:
            return place
        return place + self.rank


def is_mask(index: Tensor) -> bool:
    """Return whether an index picks entries by its values."""
    return index.dtype in (torch.bool, torch.uint8)


def _indices(operation: Operation) -> _Indices:
    """Return the indices of an operation."""
    indices = enumerate(operation.argument("indices"))
    given = {dim: index for dim, index in indices if index is not None}
    dims = list(given)
    rank = max(index.dim() for index in given.values())
    is_adjacent = dims[-1] - dims[0] == len(dims) - 1
    front = 0
    if is_adjacent:
        front = dims[0]
    return _Indices(given, operation.args[0].dim(), rank, is_adjacent, front)


@rule_for("index _unsafe_index")
def _index(operation: Operation) -> Answer:
    """Return the axis of `x[i, :, j]`: an index into the batch axis may only count the examples."""
    indices = _indices(operation)
    if indices.mask is not None:
        return _index_by_mask(operation, indices)
    axis = operation.axis(operation.args[0])
    why = "indices pair different examples"
    if axis is None:
        indices_axis = broadcast_axis(operation, indices.given.values(), indices.rank, why)
        return indices_axis.shift(indices.front)
    others = indices.except_dim(axis.dim)
    are_public = not any(map(operation.is_batched, others))
    if not are_public:
        broadcast_axis(operation, others, indices.rank, why)
    batch_index = indices.given.get(axis.dim)
    if batch_index is None:
        operation.require(are_public, "examples pick entries of other examples")
        return axis.move(indices.moved_dim(axis.dim))
    is_public = not operation.is_batched(batch_index)
    operation.require(is_public, "an index into the batch axis depends on the examples")
    why = "an index rearranges the examples"
    counting_axis = _axis_of_counting_index(operation, axis, batch_index, indices.rank)
    counting_axis = operation.require(counting_axis, why)
    operation.require(fits(operation, others, counting_axis, indices.rank), why)
    return counting_axis.shift(indices.front)


def _axis_of_counting_index(
    operation: Operation, axis: BatchAxis, index: Tensor, rank: int
) -> BatchAxis | None:
    """Return where an index `0, 1, …, N - 1` puts the examples among `rank` index dimensions.

    The answer is None for another index.
    """
    length = axis.length(operation.size)
    if index.numel() != length:
        return None
    if not operation.is_counting(index, length) or length not in index.shape:
        return None
    dim = index.shape.index(length) + rank - index.dim()
    return axis.move(dim)


def _index_by_mask(operation: Operation, indices: _Indices) -> Answer:
    """Return the axis of an index by one public mask over other dimensions."""
    axis = operation.axis(operation.args[0])
    dim, mask = next(iter(indices.given.items()))
    why = "a mask picks entries by their values"
    operation.require(len(indices.given) == 1 and not operation.is_batched(mask), why)
    axis = operation.require(axis, why)
    if axis.dim < dim:
        return axis
    operation.require(axis.dim >= dim + mask.dim(), why)
    return axis.shift(1 - mask.dim())


@rule_for("index_put _index_put_impl _unsafe_index_put")
def _index_put(operation: Operation) -> Answer:
    """Return the axis of `x[:, i] = values` and of `x[arange(N), i] = values`."""
    x = operation.args[0]
    values = operation.argument("values")
    indices = _indices(operation)
    if indices.mask is not None:
        return _put_by_mask(operation, indices)
    axis = operation.axis(x)
    targets = [BatchAxis(dim) for dim in indices.given]
    if axis is not None:
        targets = [axis]
    for target in targets:
        if _writes_every_example(operation, indices, target):
            return target
    why = "an index writes to other examples"
    operation.require(not any(map(operation.is_batched, indices.given.values())), why)
    values_axis = operation.axis(values)
    rank = indices.result_rank
    if values_axis is not None:
        values_axis = values_axis.shift(rank - values.dim())
        return _axis_of_written_values(operation, indices, values_axis)
    axis = operation.require(axis, why)
    operation.require(axis.dim not in indices.given, why)
    moved_axis = axis.move(indices.moved_dim(axis.dim))
    are_shared = fits(operation, [values], moved_axis, rank)
    operation.require(are_shared, "an index writes to examples by their places")
    return axis


def _put_by_mask(operation: Operation, indices: _Indices) -> Answer:
    """Return the axis of `x[mask] = number`."""
    x = operation.args[0]
    values = operation.argument("values")
    dim, mask = next(iter(indices.given.items()))
    axis = operation.axis(x)
    why = "a mask picks entries by their values"
    operation.require(values.numel() == 1 and not operation.is_batched(values), why)
    operation.require(len(indices.given) == 1 and dim == 0 and mask.dim() > 0, why)
    operation.require(operation.axis(mask) in (None, axis), why)
    why = "a mask writes to other examples"
    axis = operation.require(axis, why)
    operation.require(axis.dim < mask.dim(), why)
    operation.require(fits(operation, (x, mask), axis), why)
    return axis


def _writes_every_example(operation: Operation, indices: _Indices, target: BatchAxis) -> bool:
    """Return whether an index counts the examples along an axis of x, each writing its row."""
    x = operation.args[0]
    values = operation.argument("values")
    index = indices.given.get(target.dim)
    if index is None or operation.is_batched(index) or not operation.has_length(x, target):
        return False
    counting_axis = _axis_of_counting_index(operation, target, index, indices.rank)
    if counting_axis is None:
        return False
    others = indices.except_dim(target.dim)
    row_axis = counting_axis.shift(indices.front)
    return (
        fits(operation, others, counting_axis, indices.rank)
        and fits(operation, [x], target)
        and fits(operation, [values], row_axis, indices.result_rank)
    )


def _axis_of_written_values(
    operation: Operation, indices: _Indices, values_axis: BatchAxis
) -> Answer:
    """Return the axis of x after batched values are written at public indices elsewhere.

    Args:
        operation: the write.
        indices: its indices, all public.
        values_axis: the axis of the values in the shape of `x[indices]`.
    """
    untouched = indices.untouched_dims
    behind_indices = indices.front + indices.rank
    place = values_axis.dim
    if place >= behind_indices or not indices.is_adjacent:
        place -= indices.rank
    is_index_dim = indices.front <= values_axis.dim < behind_indices
    why = "an index writes to other examples"
    operation.require(not is_index_dim and 0 <= place < len(untouched), why)
    target = values_axis.move(untouched[place])
    operation.require(fits(operation, operation.args[:1], target), why)
    return target
