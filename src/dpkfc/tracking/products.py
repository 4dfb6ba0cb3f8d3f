"""Rules for products."""

from __future__ import annotations

from torch import Tensor

from dpkfc.tracking.batch_rules import Answer, Operation, fits, rule_for, rule_of_first
from dpkfc.tracking.elementwise import axes_in_result, has_batched_weights
from dpkfc.tracking.states import BatchAxis


@rule_for("mm addmm bmm baddbmm mv addmv dot vdot _scaled_mm matmul linear")
def _product(operation: Operation) -> Answer:
    """Return the axis of a matrix product; the batch axis may not be summed over."""
    known = operation.args[:2]
    if operation.name in ("addmm", "baddbmm", "addmv"):
        known = operation.args[:3]
    *addends, a, b = known
    rank = operation.result.dim()
    ids = set(map(id, known))
    others = [x for x in operation.tensors if id(x) not in ids]
    why = "a scale, a bias or an output depends on the examples"
    operation.require(not any(map(operation.is_batched, others)), why)
    axes = _axes_of_factors(operation, a, b)
    axes += axes_in_result(operation, addends, rank)
    first = axes[0]
    operation.require(set(axes) == {first}, "a product pairs different examples")
    why = "a product pairs examples with their places"
    longest = max(a.dim(), b.dim())
    # Rows come from the first factor, columns from the second. An addend may have the examples.
    factors = {longest - 2: [a], longest - 1: [b]}
    both = [x for x in (a, b) if x.dim() > 2]
    operation.require(fits(operation, factors.get(first.dim, both), first, longest), why)
    operation.require(fits(operation, addends, first, rank), why)
    return first


def _axes_of_factors(operation: Operation, a: Tensor, b: Tensor) -> list[BatchAxis]:
    """Return where the axes of the batched factors lie in a product, which sums over neither."""
    axes = []
    why = "a product sums over the batch axis"
    axis = operation.axis(a)
    if axis is not None:
        operation.require(axis.dim < a.dim() - 1, why)
        missing = max(0, b.dim() - a.dim())
        axes.append(axis.shift(missing))
    axis = operation.axis(b)
    if axis is not None:
        summed_dim = max(0, b.dim() - 2)
        operation.require(axis.dim != summed_dim and operation.name != "linear", why)
        from_the_end = b.dim() - axis.dim
        if a.dim() == 1 and from_the_end > 2:
            # A vector on the left leaves no row.
            from_the_end -= 1
        axes.append(axis.move(operation.result.dim() - from_the_end))
    return axes


@rule_for("_cdist_forward _euclidean_dist cdist")
def _cdist(operation: Operation) -> Answer:
    a, b = operation.args[:2]
    rank = operation.result.dim()
    axes: list[BatchAxis] = []
    for x, row_dim in ((a, rank - 2), (b, rank - 1)):
        axis = operation.axis(x)
        if axis is None:
            continue
        operation.require(axis.dim < x.dim() - 1, "distances sum over the batch axis")
        if axis.dim == x.dim() - 2:
            axes.append(axis.move(row_dim))
        else:
            axes.append(axis.shift(rank - x.dim()))
    first = axes[0]
    operation.require(set(axes) == {first}, "distances pair different examples")
    if first.dim < rank - 2:
        are_shared = fits(operation, (a, b), first, rank)
        operation.require(are_shared, "distances pair examples with their places")
    return first


@rule_for("_trilinear")
def _trilinear(operation: Operation) -> Answer:
    """Return the axis of the product inside `nn.Bilinear`, whose inputs have the batch in front."""
    first, weight, second = map(operation.axis, operation.args[:3])
    expanded_and_summed_dims = list(operation.args[3:7])
    is_bilinear = expanded_and_summed_dims == [[1, 3], [0], [1, 2], [2, 3]]
    why = "a trilinear product pairs different examples"
    axis = operation.require(first, why)
    has_rows = axis.dim == 0 and axis == second
    operation.require(is_bilinear and has_rows and weight is None, why)
    return axis


@rule_of_first(
    "convolution _convolution cudnn_convolution mkldnn_convolution thnn_conv2d "
    "_slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d conv_depthwise3d conv_tbc "
    "native_group_norm group_norm channel_shuffle native_channel_shuffle"
)
def _channels(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of an operation on `[N, channels, ...]`, or of `conv_tbc` on `[T, N, C]`."""
    groups = operation.argument("groups", 1)
    is_among_channels = (axis.dim, axis.pre) == (1, 1)
    if "conv" in operation.name and is_among_channels and groups % operation.size == 0:
        return _axis_of_groups(operation)
    batch_dim = 1 if operation.name == "conv_tbc" else 0
    is_alone = axis.dim == batch_dim and not has_batched_weights(operation)
    why = f"the batch is not dimension {batch_dim} of its first operand alone"
    operation.require(is_alone, why)
    length = x.shape[0]
    is_plain = operation.argument("N", length) == length
    operation.require(is_plain, "a group norm counts examples as channels")
    return axis


def _axis_of_groups(operation: Operation) -> Answer:
    """Return the axis of a convolution whose groups of channels belong to one example each."""
    y = operation.result
    for x in operation.args[1:3]:
        if x is not None:
            own = BatchAxis(0, 1, len(x) // operation.size)
            operation.require(fits(operation, [x], own), "kernels belong to other examples")
    return BatchAxis(1, 1, y.shape[1] // operation.size)
