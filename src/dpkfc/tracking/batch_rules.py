"""The table of batch rules: what each ATen operation does to the place of the examples.

A rule gets an `Operation` none of whose operands is unknown and at least one of which has a batch axis. It returns the
state of every output: one state for all of them, or a list. A rule that is not sure returns `operation.lost(...)`.
A rule is right if perturbing one example of the inputs changes only its entries of the outputs, and permuting the batch
permutes the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.tracking.axes import BatchAxis, Operation, State, Total, axis_after_reshape

Answer = State | Sequence[State | None] | None
Rule = Callable[[Operation], Answer]
RULES: dict[str, Rule] = {}
"""Name of an operation without overload and without the underscore of its in-place form, to its rule."""
TOTAL_RULES: dict[str, Rule] = {}
"""Rules for operations on totals: scalars that are sums over examples."""


def register_batch_rule(name: str, rule: Rule) -> None:
    """Register what an operation does to the place of the examples.

    Args:
        name: the operation, "aten::sort" or "my_library::my_kernel", without overload.
        rule: maps an `Operation` to the state of its outputs: a `BatchAxis`, None for a public output, `operation.lost(why)`
            where the examples are mixed or cannot be told, or a list with one of these for each tensor output.

    The rule is part of the proof of a private pass. A wrong one voids the guarantee.

    Raises:
        ValueError: a name without its library.

    Example:
        register_batch_rule("my_library::scale_rows", lambda operation: operation.axis(operation.args[0]))
    """
    if "::" not in name:
        raise ValueError(f"batch rule {name!r}: name the library too, for example 'aten::{name}'")
    RULES[name.removeprefix("aten::")] = rule


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return add


# -- elementwise operations --------------------------------------------------------------------------------


def broadcast_axis(operation: Operation, tensors: Iterable[Tensor], rank: int) -> BatchAxis | None:
    """Return the axis that all batched operands share after broadcasting, or None where they disagree.

    It is None too where a public operand has other entries for each place in the batch.

    Args:
        operation: the operation.
        tensors: its operands.
        rank: dimensions of the broadcast result.
    """
    found: BatchAxis | None = None
    tensors = list(tensors)
    for x in tensors:
        axis = operation.axis(x)
        if axis is None:
            continue
        placed = axis.shifted(rank - x.dim())
        if found is not None and placed != found:
            return None
        found = placed
    if found is None or not all(_is_shared(operation, x, found.shifted(x.dim() - rank)) for x in tensors):
        return None
    return found


def _is_shared(operation: Operation, x: Any, axis: BatchAxis) -> bool:
    """Return whether a tensor is batched, or has the same entries for all places along an axis.

    A batch of one takes the first entries of `x + table[:N]`, whatever place its example had before. What an operation has
    written into is not looked at: its old entries are gone.
    """
    if not isinstance(x, Tensor) or operation.is_batched(x) or not 0 <= axis.dim < x.dim() or x.shape[axis.dim] == 1:
        return True
    if x.stride(axis.dim) == 0 or any(x is y for y in operation.outputs):
        return True
    if x.shape[axis.dim] != axis.length(operation.size):
        return False
    if operation.trusts_public_rows:
        return True
    parts = x.detach().unflatten(axis.dim, (axis.pre, operation.size, axis.post))
    first = parts.narrow(axis.dim + 1, 0, 1)
    return torch.equal(parts, first.expand_as(parts))


def pointwise(operation: Operation) -> Answer:
    """Return the axis of an elementwise operation: all batched operands must have it in one place."""
    outputs = operation.outputs
    if not outputs:
        return operation.lost("it returns no tensor")
    axis = broadcast_axis(operation, operation.tensors, outputs[0].dim())
    if axis is None or outputs[0].shape[axis.dim] != axis.length(operation.size):
        return operation.lost("broadcasting pairs different examples")
    return axis


for _listed in (
    "_to_copy copy contiguous detach alias lift_fresh bernoulli native_dropout dropout _prelu_kernel "
    "fill masked_fill rrelu_with_noise "
    "binary_cross_entropy_backward real imag conj _conj resolve_conj resolve_neg gelu hardswish hardsigmoid_backward "
    "hardswish_backward log_sigmoid_forward log_sigmoid_backward elu_backward leaky_relu_backward hardtanh_backward "
    "softplus_backward mish_backward polar complex normal uniform random exponential zero "
    "_cast_Float _cast_Double special_multigammaln isclose"
).split():
    RULES[_listed] = pointwise


@_rule("prelu")
def _prelu(operation: Operation) -> Answer:
    """Return the axis of a prelu, whose weights belong to dimension 1."""
    x, weight = operation.args[:2]
    axis = operation.axis(x)
    if operation.is_batched(weight):
        return operation.lost("the weights depend on the examples")
    if axis is not None and axis.dim == 1 and not _is_shared(operation, weight, axis.shifted(-1)):
        return operation.lost("the weights depend on the places of the examples")
    return axis


@_rule("isin", "bucketize")
def _isin(operation: Operation) -> Answer:
    if operation.is_batched(operation.args[1]):
        return operation.lost("every entry is compared with the entries of all examples")
    return operation.axis(operation.args[0])


@_rule("rand_like", "randn_like", "randint_like")
def _random_like(operation: Operation) -> Answer:
    """Return the axis of random numbers, of which every example has its own."""
    return operation.axis(operation.args[0])


@_rule("zeros_like", "ones_like", "full_like", "empty_like")
@_rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def _public(operation: Operation) -> Answer:
    """Return public: the values depend on no operand."""
    return None


# -- views and layout --------------------------------------------------------------------------------------


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "unflatten", "view_as")
def _reshape(operation: Operation) -> Answer:
    x, y = operation.args[0], operation.outputs[0]
    axis = operation.axis(x)
    if axis is None or x.numel() != y.numel():
        return operation.lost("a view with another number of elements")
    moved = axis_after_reshape(axis, x.shape, y.shape, operation.size)
    return moved if moved is not None else operation.lost("a reshape tears the batch axis apart")


@_rule("clone")
def _clone(operation: Operation) -> Answer:
    return operation.axis(operation.args[0])


@_rule("permute")
def _permute(operation: Operation) -> Answer:
    x = operation.args[0]
    axis = operation.axis(x)
    order = [d % x.dim() for d in operation.argument("dims")]
    return BatchAxis(order.index(axis.dim), axis.pre, axis.post) if axis else None


@_rule("transpose")
def _transpose(operation: Operation) -> Answer:
    x = operation.args[0]
    one, other = (operation.argument(name) % max(1, x.dim()) for name in ("dim0", "dim1"))
    return _swapped(operation.axis(x), one, other)


@_rule("t")
def _t(operation: Operation) -> Answer:
    x = operation.args[0]
    return _swapped(operation.axis(x), 0, 1) if x.dim() == 2 else operation.axis(x)


def _swapped(axis: BatchAxis | None, one: int, other: int) -> BatchAxis | None:
    if axis is None or axis.dim not in (one, other):
        return axis
    return BatchAxis(other if axis.dim == one else one, axis.pre, axis.post)


@_rule("expand")
def _expand(operation: Operation) -> Answer:
    x, y = operation.args[0], operation.outputs[0]
    axis = operation.axis(x)
    return axis.shifted(y.dim() - x.dim()) if axis else None


@_rule("repeat")
def _repeat(operation: Operation) -> Answer:
    x, y = operation.args[0], operation.outputs[0]
    axis = operation.axis(x)
    if axis is None:
        return None
    placed = axis.shifted(y.dim() - x.dim())
    times = operation.argument("repeats")[placed.dim]
    return BatchAxis(placed.dim, placed.pre * times, placed.post)


@_rule("slice")
def _slice(operation: Operation) -> Answer:
    x, y = operation.args[0], operation.outputs[0]
    axis, dim = operation.axis(x), operation.argument("dim") % x.dim()
    if axis is None or dim != axis.dim or x.shape == y.shape:
        return axis
    length, step = x.shape[dim], operation.argument("step")
    start = operation.argument("start") or 0
    start = min(max(start + length if start < 0 else start, 0), length)
    return _cut(operation, axis, start, y.shape[dim], step)


def _cut(operation: Operation, axis: BatchAxis, start: int, length: int, step: int = 1) -> Answer:
    """Return the axis of a part of the batch dimension: whole copies of the batch, or one of several places an example."""
    block = operation.size * axis.post
    if step == 1 and start % block == 0 and length % block == 0 and length > 0:
        return BatchAxis(axis.dim, length // block, axis.post)
    if step == axis.post and axis.pre == 1 and start < axis.post and length == operation.size:
        return BatchAxis(axis.dim)
    return operation.lost("a slice takes some of the examples")


@_rule("narrow")
def _narrow(operation: Operation) -> Answer:
    x = operation.args[0]
    axis, dim = operation.axis(x), operation.argument("dim") % x.dim()
    if axis is None or dim != axis.dim:
        return axis
    return _cut(operation, axis, operation.argument("start"), operation.argument("length"))


@_rule("select")
def _select(operation: Operation) -> Answer:
    x = operation.args[0]
    axis, dim = operation.axis(x), operation.argument("dim") % x.dim()
    return _without(operation, axis, dim)


def _without(operation: Operation, axis: BatchAxis | None, dim: int) -> Answer:
    """Return the axis after dimension `dim` has gone."""
    if axis is None:
        return None
    if axis.dim == dim:
        return operation.lost("one entry of the batch axis is taken")
    return axis.shifted(-1) if dim < axis.dim else axis


@_rule("unbind")
def _unbind(operation: Operation) -> Answer:
    x = operation.args[0]
    return _without(operation, operation.axis(x), operation.argument("dim") % x.dim())


@_rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "tensor_split")
def _split(operation: Operation) -> Answer:
    x = operation.args[0]
    axis, dim = operation.axis(x), operation.argument("dim") % x.dim()
    if axis is None or axis.dim != dim:
        return axis
    answers: list[State | None] = []
    start = 0
    for part in operation.outputs:
        answer = _cut(operation, axis, start, part.shape[dim])
        assert not isinstance(answer, Sequence)
        answers.append(answer)
        start += part.shape[dim]
    return answers


@_rule("cat", "concat", "concatenate")
def _cat(operation: Operation) -> Answer:
    tensors = [x for x in operation.args[0] if x.shape != (0,)]
    dim = operation.argument("dim") % tensors[0].dim()
    axes = [operation.axis(x) for x in tensors]
    known = [axis for axis in axes if axis is not None]
    first = known[0]
    if any(axis.dim != first.dim or axis.post != first.post for axis in known):
        return operation.lost("tensors with different batch axes are joined")
    if dim != first.dim:
        same = all(axis.pre == first.pre for axis in known) and all(_is_shared(operation, x, first) for x in tensors)
        return first if same else operation.lost("tensors with different batch axes are joined")
    if len(known) < len(axes):
        return operation.lost("rows of no example are joined to the batch")
    return BatchAxis(first.dim, sum(axis.pre for axis in known), first.post)


@_rule("stack")
def _stack(operation: Operation) -> Answer:
    tensors, rank = operation.args[0], operation.outputs[0].dim()
    axis = broadcast_axis(operation, tensors, rank - 1)
    if axis is None:
        return operation.lost("tensors with different batch axes are stacked")
    return axis.shifted(1) if operation.argument("dim") % rank <= axis.dim else axis


@_rule("unfold")
def _unfold(operation: Operation) -> Answer:
    x = operation.args[0]
    axis = operation.axis(x)
    if axis is not None and operation.argument("dimension") % x.dim() == axis.dim:
        return operation.lost("windows run over the batch axis")
    return axis


@_rule("diagonal")
def _diagonal(operation: Operation) -> Answer:
    x = operation.args[0]
    axis = operation.axis(x)
    if axis is None:
        return None
    pair = {operation.argument(name) % x.dim() for name in ("dim1", "dim2")}
    if axis.dim in pair:
        return operation.lost("a diagonal runs through the batch axis")
    return axis.shifted(-sum(d < axis.dim for d in pair))


@_rule("as_strided")
def _as_strided(operation: Operation) -> Answer:
    x, y = operation.args[0], operation.outputs[0]
    same = x.shape == y.shape and x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    return operation.axis(x) if same else operation.lost("a strided view is not followed")


@_rule("view_as_real", "view_as_complex", "view_as_complex_copy")
def _keep_leading(operation: Operation) -> Answer:
    """Return the axis of an operation that adds or removes trailing dimensions."""
    axis = operation.axis(operation.args[0])
    if axis is not None and axis.dim >= operation.outputs[0].dim():
        return operation.lost("the batch axis is the last dimension")
    return axis


# -- dimensions over which an operation works --------------------------------------------------------------


def _dims(operation: Operation, rank: int) -> set[int]:
    """Return the dimensions that an operation works over; all of them where it names none."""
    for name in ("dim", "dims", "axis"):
        if operation.has_argument(name):
            value = operation.argument(name)
            if value is None or value == []:
                return set(range(rank))
            values = value if isinstance(value, (list, tuple)) else [value]
            return {int(d) % max(1, rank) for d in values}
    return set(range(rank))


@_rule(
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "_safe_softmax",
    "cumsum",
    "cumprod",
    "sort",
    "argsort",
    "topk",
)
@_rule("cummax", "cummin", "logcumsumexp", "flip", "_fft_r2c", "_fft_c2r", "_fft_c2c", "msort")
def _along(operation: Operation) -> Answer:
    """Return the axis of an operation that keeps the rank and works along other dimensions."""
    x = operation.args[0]
    axis = operation.axis(x)
    if axis is not None and axis.dim in _dims(operation, x.dim()):
        return operation.lost("it works along the batch axis")
    return axis


@_rule("diag_embed")
def _diag_embed(operation: Operation) -> Answer:
    """Return the axis of vectors that become diagonals of matrices in two new places."""
    x, rank = operation.args[0], operation.outputs[0].dim()
    axis = operation.axis(x)
    if axis is None or axis.dim == x.dim() - 1:
        return operation.lost("the batch axis becomes a diagonal")
    pair = {operation.argument(name) % rank for name in ("dim1", "dim2")}
    kept = [d for d in range(rank) if d not in pair]
    return BatchAxis(kept[axis.dim], axis.pre, axis.post)


@_rule("renorm")
def _renorm(operation: Operation) -> Answer:
    """Return the axis of a bound on the norm of each entry along a dimension, which must be that of the examples."""
    x = operation.args[0]
    axis = operation.axis(x)
    if axis is None or axis.dim != operation.argument("dim") % x.dim():
        return operation.lost("norms run over the batch axis")
    return axis


@_rule("roll")
def _roll(operation: Operation) -> Answer:
    x = operation.args[0]
    axis, dims = operation.axis(x), operation.argument("dims")
    if axis is not None and (not dims or axis.dim in {d % x.dim() for d in dims}):
        return operation.lost("it rolls along the batch axis")
    return axis


@_rule(
    "amax",
    "amin",
    "prod",
    "any",
    "all",
    "logsumexp",
    "std",
    "var",
    "var_mean",
    "std_mean",
    "argmax",
    "argmin",
    "max",
    "min",
)
@_rule("median", "nanmedian", "mode", "kthvalue", "norm", "linalg_vector_norm", "nansum", "count_nonzero", "aminmax")
def _reduce(operation: Operation) -> Answer:
    """Return the axis of a reduction over other dimensions."""
    x, y = operation.args[0], operation.outputs[0]
    axis = operation.axis(x)
    if axis is None:
        return operation.lost("a batched operand in an unusual place")
    if torch.Tag.pointwise in operation.function.tags:
        return pointwise(operation)
    dims = _dims(operation, x.dim())
    if axis.dim in dims:
        return operation.lost("it reduces over the batch axis")
    if y.dim() == x.dim():
        return axis
    return axis.shifted(-sum(d < axis.dim for d in dims))


@_rule("sum", "mean")
def _sum(operation: Operation) -> Answer:
    """Return the axis of a sum, or the total that a sum over the batch axis is."""
    x, y = operation.args[0], operation.outputs[0]
    axis = operation.axis(x)
    if axis is None:
        return operation.lost("a batched operand in an unusual place")
    if axis.dim not in _dims(operation, x.dim()):
        return _reduce(operation)
    if y.numel() == 1:
        return _total(_name(operation) == "mean", x.numel(), operation.size)
    return operation.lost("it adds up examples")


def _total(is_mean: bool, entries: int, size: int) -> Total:
    """Return the total of so many entries."""
    return Total(True, entries=entries / size) if is_mean else Total()


def _name(operation: Operation) -> str:
    return str(operation.function.overloadpacket.__name__)


# -- products ----------------------------------------------------------------------------------------------


@_rule("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm", "matmul", "linear")
def _product(operation: Operation) -> Answer:
    """Return the axis of a matrix product; the batch axis may not be summed over."""
    name = _name(operation)
    first = 1 if name in ("addmm", "baddbmm", "addmv") else 0
    a, b = operation.args[first], operation.args[first + 1]
    one, other, rank = operation.axis(a), operation.axis(b), operation.outputs[0].dim()
    found: list[BatchAxis] = []
    if any(operation.is_batched(x) for x in operation.tensors if not any(x is y for y in operation.args[: first + 2])):
        return operation.lost("a scale, a bias or an output depends on the examples")
    if one is not None:
        if one.dim == a.dim() - 1:
            return operation.lost("a product sums over the batch axis")
        found.append(one.shifted(max(0, b.dim() - a.dim())) if name == "matmul" and a.dim() > 1 else one)
    if other is not None:
        summed = max(0, b.dim() - 2)
        if b.dim() <= 2 and name in ("mm", "addmm"):
            summed = 0
        if other.dim == summed or name == "linear":
            return operation.lost("a product sums over the batch axis")
        found.append(_right_of_product(other, a, b, rank))
    if first:
        added = operation.axis(operation.args[0])
        found += [added.shifted(rank - operation.args[0].dim())] if added is not None else []
    if any(axis != found[0] for axis in found):
        return operation.lost("a product pairs different examples")
    longest = max(a.dim(), b.dim())
    aligned = [(x, longest) for x in (a, b) if found[0].dim < longest - 2 and x.dim() > 2]
    aligned += [(operation.args[0], rank)] if first else []
    if not all(_is_shared(operation, x, found[0].shifted(x.dim() - dims)) for x, dims in aligned):
        return operation.lost("a product pairs examples with their places")
    return found[0]


def _right_of_product(axis: BatchAxis, a: Tensor, b: Tensor, rank: int) -> BatchAxis:
    """Return where an axis of the second factor lies in a product of this rank."""
    from_the_end = b.dim() - axis.dim
    if a.dim() == 1 and from_the_end > 2:
        from_the_end -= 1  # a vector on the left leaves no row
    return BatchAxis(rank - from_the_end, axis.pre, axis.post)


@_rule("_cdist_forward", "cdist")
def _cdist(operation: Operation) -> Answer:
    a, b = operation.args[:2]
    rank, places = operation.outputs[0].dim(), list[BatchAxis]()
    for x, last in ((a, rank - 2), (b, rank - 1)):
        axis = operation.axis(x)
        if axis is None:
            continue
        if axis.dim == x.dim() - 1:
            return operation.lost("distances sum over the batch axis")
        row = axis.dim == x.dim() - 2
        places.append(BatchAxis(last, axis.pre, axis.post) if row else axis.shifted(rank - x.dim()))
    if any(axis != places[0] for axis in places):
        return operation.lost("distances pair different examples")
    is_many = places[0].dim < rank - 2
    if is_many and not all(_is_shared(operation, x, places[0].shifted(x.dim() - rank)) for x in (a, b)):
        return operation.lost("distances pair examples with their places")
    return places[0]


@_rule("_trilinear")
def _trilinear(operation: Operation) -> Answer:
    """Return the axis of the product inside `nn.Bilinear`, whose batch is dimension 0 of its two inputs."""
    one, _, other = (operation.axis(x) for x in operation.args[:3])
    weight = operation.axis(operation.args[1])
    is_bilinear = list(operation.args[3:7]) == [[1, 3], [0], [1, 2], [2, 3]]
    if one is None or one != other or one.dim != 0 or weight is not None or not is_bilinear:
        return operation.lost("a trilinear product pairs different examples")
    return one


@_rule("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
@_rule("_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d", "thnn_conv2d")
def _convolution(operation: Operation) -> Answer:
    axis = operation.axis(operation.args[0])
    if axis is None or axis.dim != 0 or any(operation.is_batched(x) for x in operation.tensors[1:]):
        return operation.lost("a convolution has the batch in another place than dimension 0 of its input")
    return axis


@_rule("conv_tbc")
def _conv_tbc(operation: Operation) -> Answer:
    """Return the axis of a convolution over `[T, N, C]`."""
    axis = operation.axis(operation.args[0])
    if axis is None or axis.dim != 1 or any(operation.is_batched(x) for x in operation.args[1:3]):
        return operation.lost("the batch is not dimension 1 of the input")
    return axis


# -- operations on trailing dimensions ---------------------------------------------------------------------


def _trailing(count: int) -> Rule:
    """Return the rule of an operation that works within the last `count` dimensions."""

    def rule(operation: Operation) -> Answer:
        batched = [x for x in operation.tensors if operation.is_batched(x)]
        axes = {operation.axis(x) for x in batched}
        if len(axes) > 1 or any(axis.dim >= x.dim() - count for x in batched if (axis := operation.axis(x))):
            return operation.lost("it works along the batch axis")
        axis = axes.pop()
        if axis is None or not all(_is_shared(operation, x, axis) for x in operation.tensors):
            return operation.lost("it pairs examples with their places")
        return axis

    return rule


for _name_, _count in {
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3, "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "max_pool1d": 1, "max_pool2d": 2,
    "max_unpool2d": 3, "max_unpool3d": 4,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2, "_upsample_nearest_exact3d": 3, "upsample_linear1d": 1, "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2, "upsample_trilinear3d": 3, "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
    "reflection_pad1d": 1, "reflection_pad2d": 2, "reflection_pad3d": 3, "replication_pad1d": 1, "replication_pad2d": 2,
    "replication_pad3d": 3, "pixel_shuffle": 3, "pixel_unshuffle": 3, "im2col": 3, "col2im": 2,
    "tril": 2, "triu": 2, "grid_sampler_2d": 3, "grid_sampler_3d": 4, "affine_grid_generator": 2, "linalg_inv_ex": 2,
    "linalg_cholesky_ex": 2, "linalg_qr": 2, "_linalg_svd": 2, "_linalg_eigh": 2, "linalg_matrix_exp": 2, "_linalg_det": 2,
    "_linalg_slogdet": 2,
}.items():  # fmt: skip
    RULES[_name_] = _trailing(_count)


@_rule("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional_max_pool(operation: Operation) -> Answer:
    """Return the axis of a pool over random windows, which are drawn for each example."""
    x, windows = operation.args[0], operation.argument("random_samples")
    axis = operation.axis(x)
    if axis is None or axis.dim != 0 or x.dim() != windows.dim() + len(operation.args[1]) - 1:
        return operation.lost("the batch is not dimension 0 of the input")
    if operation.axis(windows) not in (None, axis) or not _is_shared(operation, windows, axis):
        return operation.lost("windows belong to other examples")
    return axis


@_rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(operation: Operation) -> Answer:
    axis = operation.axis(operation.args[0])
    return axis if axis is not None and axis.dim == 0 else operation.lost("channels are examples")


@_rule("linalg_cross")
def _cross(operation: Operation) -> Answer:
    x = operation.outputs[0]
    axis = broadcast_axis(operation, operation.args[:2], x.dim())
    if axis is None or axis.dim == operation.argument("dim") % x.dim():
        return operation.lost("a cross product works along the batch axis")
    return axis


@_rule("constant_pad_nd")
def _pad(operation: Operation) -> Answer:
    x = operation.args[0]
    axis, pad = operation.axis(x), operation.argument("pad")
    if axis is None:
        return None
    place = 2 * (x.dim() - 1 - axis.dim)
    touched = place < len(pad) and (pad[place] != 0 or pad[place + 1] != 0)
    return operation.lost("padding is added along the batch axis") if touched else axis


@_rule("glu")
def _glu(operation: Operation) -> Answer:
    return _along(operation)


# -- normalisation -----------------------------------------------------------------------------------------


@_rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(operation: Operation) -> Answer:
    x = operation.args[0]
    axis = operation.axis(x)
    if axis is None or axis.dim >= x.dim() - len(operation.args[1]) or _has_batched_weights(operation):
        return operation.lost("it normalises over the batch axis")
    return axis


def _has_batched_weights(operation: Operation) -> bool:
    """Return whether an operand beside the first one depends on the examples."""
    return any(operation.is_batched(x) for x in operation.tensors if x is not operation.args[0])


@_rule("native_group_norm", "group_norm")
def _group_norm(operation: Operation) -> Answer:
    axis = operation.axis(operation.args[0])
    if axis is None or axis.dim != 0 or _has_batched_weights(operation):
        return operation.lost("the batch is not dimension 0 of a group norm")
    if operation.has_argument("N") and operation.argument("N") != operation.args[0].shape[0]:
        return operation.lost("a group norm counts examples as channels")
    return axis


@_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
@_rule("_batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm")
def _batch_norm(operation: Operation) -> Answer:
    """Return the axis of a batch norm: with frozen statistics, or as instance norm uses it, channels of one example each."""
    x = operation.args[0]
    axis = operation.axis(x)
    training = (
        operation.argument("training") if operation.has_argument("training") else "with_update" in _name(operation)
    )
    if axis is None or _has_batched_weights(operation):
        return operation.lost("a batched operand in an unusual place")
    if not training:
        return (
            [axis, None, None, None][: len(operation.outputs)]
            if axis.dim != 1
            else operation.lost("channels are examples")
        )
    if axis.dim != 1:
        return operation.lost("statistics are taken over the batch")
    per_channel = BatchAxis(0, axis.pre, axis.post)
    if not all(_is_shared(operation, weight, per_channel) for weight in operation.args[1:3]):
        return operation.lost("weights depend on the places of the examples")
    return [axis, per_channel, per_channel, None][: len(operation.outputs)]


# -- lookups -----------------------------------------------------------------------------------------------


@_rule("embedding")
def _embedding(operation: Operation) -> Answer:
    weight, ids = operation.args[:2]
    if operation.is_batched(weight):
        return operation.lost("the table of an embedding depends on the examples")
    return operation.axis(ids)


@_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(operation: Operation) -> Answer:
    """Return the axis of bags of equal length, one or several an example: ids `[N, T]`, flattened by torch."""
    weight, ids, offsets = operation.args[:3]
    axis = operation.axis(ids)
    weights = operation.argument("per_sample_weights")
    plain = (
        axis is not None and axis.pre == 1 and not operation.is_batched(weight) and not operation.is_batched(offsets)
    )
    if axis is None or not plain or (operation.is_batched(weights) and operation.axis(weights) != axis):
        return operation.lost("bags of an embedding have the batch in another place")
    if not _is_shared(operation, weights, axis):
        return operation.lost("bags of an embedding have the batch in another place")
    bags, rest = divmod(len(offsets), operation.size)
    length, longer = divmod(ids.numel(), max(1, len(offsets)))
    regular = torch.equal(offsets, length * torch.arange(len(offsets), device=offsets.device))
    if rest or longer or not regular or operation.argument("include_last_offset"):
        return operation.lost("bags of an embedding have several lengths")
    rows = BatchAxis(0, 1, bags)
    return [rows, axis, rows, rows][: len(operation.outputs)]


@_rule("gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim")
def _gather(operation: Operation) -> Answer:
    tensors = [x for x in operation.tensors if x.dim()]
    dim = operation.argument("dim") % tensors[0].dim()
    axes = {axis for x in tensors if (axis := operation.axis(x)) is not None}
    if len(axes) > 1:
        return operation.lost("it pairs different examples")
    axis = axes.pop()
    if axis.dim == dim:
        return operation.lost("it reads along the batch axis")
    if any(x.shape[axis.dim] != axis.length(operation.size) for x in tensors):
        return operation.lost("its operands have different numbers of examples")
    if not all(_is_shared(operation, x, axis) for x in tensors):
        return operation.lost("it pairs examples with their places")
    return axis


@_rule("index_add", "index_copy", "index_fill", "index_reduce")
def _index_write(operation: Operation) -> Answer:
    x, index = operation.args[0], operation.argument("index")
    dim, rank = operation.argument("dim") % max(1, x.dim()), x.dim()
    if operation.is_batched(index):
        return operation.lost("an index depends on the examples")
    axis = broadcast_axis(operation, [y for y in operation.tensors if y is not index and y.dim() == rank], rank)
    if axis is None or axis.dim == dim:
        return operation.lost("it writes along the batch axis")
    return axis


@_rule("index_select")
def _index_select(operation: Operation) -> Answer:
    x, index = operation.args[0], operation.argument("index")
    dim, axis = operation.argument("dim") % max(1, x.dim()), operation.axis(x)
    if operation.is_batched(index):
        place = operation.axis(index)
        if axis is not None or place is None:
            return operation.lost("examples pick entries of other examples")
        return BatchAxis(dim, place.pre, place.post)
    if axis is None or axis.dim != dim:
        return axis
    return _repeated(operation, axis, index)


def _repeated(operation: Operation, axis: BatchAxis, index: Tensor) -> Answer:
    """Return the axis after the whole batch was repeated by a public index: example by example, or one batch after another."""
    length, rows = axis.length(operation.size), index.flatten()
    identity = torch.arange(length, device=rows.device)
    times, rest = divmod(len(rows), length)
    if rest == 0 and times:
        if torch.equal(rows, identity.repeat(times)):
            return BatchAxis(axis.dim, axis.pre * times, axis.post)
        if torch.equal(rows, identity.repeat_interleave(times)):
            return BatchAxis(axis.dim, axis.pre, axis.post * times)
    return operation.lost("an index rearranges the examples")


@_rule("index", "_unsafe_index")
def _index(operation: Operation) -> Answer:
    """Return the axis of `x[i, :, j]`: an index into the batch axis may only count the examples."""
    x, indices = operation.args[0], list(operation.argument("indices"))
    indices += [None] * (x.dim() - len(indices))
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return _masked(operation, x, given)
    rank = max(index.dim() for _, index in given)
    places = [place for place, _ in given]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    axis = operation.axis(x)
    others = [index for place, index in given if axis is None or place != axis.dim]
    found = broadcast_axis(operation, others, rank)
    if found is None and any(operation.is_batched(index) for index in others):
        return operation.lost("indices pair different examples")
    if axis is None:
        return found.shifted(front) if found is not None else None
    picked = dict(given).get(axis.dim)
    if picked is None:
        if found is not None:
            return operation.lost("examples pick entries of other examples")
        kept = [d for d in range(x.dim()) if d not in places]
        before = kept.index(axis.dim)
        moved = before if adjacent and axis.dim < front else before + rank
        return BatchAxis(moved, axis.pre, axis.post)
    if operation.is_batched(picked):
        return operation.lost("an index into the batch axis depends on the examples")
    own = _counting(operation, axis, picked, rank)
    if own is None or (found is not None and found != own) or not _are_shared(operation, others, own, rank):
        return operation.lost("an index rearranges the examples")
    return own.shifted(front)


def _counting(operation: Operation, axis: BatchAxis, index: Tensor, rank: int) -> BatchAxis | None:
    """Return where an index `0, 1, …, N - 1` puts the examples among `rank` index dimensions; None for another index."""
    length = axis.length(operation.size)
    if index.numel() != length or not torch.equal(index.flatten(), torch.arange(length, device=index.device)):
        return None
    long = [d for d, n in enumerate(index.shape) if n != 1]
    if len(long) != 1:
        return None
    return BatchAxis(long[0] + rank - index.dim(), axis.pre, axis.post)


def _are_shared(operation: Operation, tensors: Iterable[Tensor], axis: BatchAxis, rank: int) -> bool:
    """Return whether no public tensor has other entries for each place along an axis of a broadcast result."""
    return all(_is_shared(operation, x, axis.shifted(x.dim() - rank)) for x in tensors)


def _masked(operation: Operation, x: Tensor, given: Sequence[tuple[int, Tensor]]) -> Answer:
    """Return the axis of an index by one public mask over other dimensions."""
    axis = operation.axis(x)
    place, mask = given[0]
    if axis is None or len(given) > 1 or operation.is_batched(mask) or place <= axis.dim < place + mask.dim():
        return operation.lost("a mask picks entries by their values")
    return axis if axis.dim < place else axis.shifted(1 - mask.dim())


@_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(operation: Operation) -> Answer:
    """Return the axis of `x[:, i] = values` and of `x[arange(N), i] = values`."""
    x, values = operation.args[0], operation.argument("values")
    indices = list(operation.argument("indices"))
    indices += [None] * (x.dim() - len(indices))
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        aligned = len(given) == 1 and values.numel() == 1 and not operation.is_batched(values) and given[0][0] == 0
        mask = given[0][1]
        if aligned and operation.axis(mask) in (None, operation.axis(x)) and mask.dim() > 0:
            axis = operation.axis(x) or operation.axis(mask)
            is_covered = axis is not None and axis.dim < mask.dim()
            return (
                axis
                if axis is not None and is_covered and all(_is_shared(operation, y, axis) for y in (x, mask))
                else operation.lost("a mask writes to other examples")
            )
        return operation.lost("a mask picks entries by their values")
    axis = operation.axis(x)
    rank = max(index.dim() for _, index in given)
    places = [place for place, _ in given]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    picked = {place: index for place, index in given}
    has_private_index = any(operation.is_batched(index) for _, index in given)
    for place, index in given:
        if axis is not None and place != axis.dim:
            continue
        target = axis or BatchAxis(place)
        if x.shape[place] == target.length(operation.size) and not operation.is_batched(index):
            own = _counting(operation, target, index, rank)
            placed = operation.axis(values)
            rows = rank + x.dim() - len(given)
            others = [other for where, other in given if where != place]
            if own is None or (has_private_index and broadcast_axis(operation, others, rank) != own):
                continue
            if placed is not None and placed.shifted(rows - values.dim()) != own.shifted(front):
                continue
            if not _are_shared(operation, others, own, rank) or not _is_shared(operation, x, target):
                continue
            if not _are_shared(operation, [values], own.shifted(front), rows):
                continue
            return target
    if has_private_index or (axis is not None and axis.dim in picked):
        return operation.lost("an index writes to other examples")
    kept = [d for d in range(x.dim()) if d not in picked]
    placed = operation.axis(values)
    if placed is not None:
        placed = placed.shifted(rank + len(kept) - values.dim())
        before = placed.dim - rank if placed.dim >= front + rank or not adjacent else placed.dim
        if not 0 <= before < len(kept) or front <= placed.dim < front + rank:
            return operation.lost("an index writes to other examples")
        target = BatchAxis(kept[before], placed.pre, placed.post)
        if (axis is not None and axis != target) or not _is_shared(operation, x, target):
            return operation.lost("an index writes to other examples")
        return target
    if axis is not None:
        before = kept.index(axis.dim)
        moved = before if adjacent and axis.dim < front else before + rank
        if not _is_shared(operation, values, axis.shifted(moved - axis.dim + values.dim() - rank - len(kept))):
            return operation.lost("an index writes to examples by their places")
    return axis


# -- attention, recurrences and losses ---------------------------------------------------------------------


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"
)
@_rule(
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
@_rule("_scaled_dot_product_fused_attention_overrideable")
def _attention(operation: Operation) -> Answer:
    """Return the axis of fused attention: queries, keys and values have the batch, alone or with heads, before the last two."""
    query = operation.args[0]
    axis = broadcast_axis(operation, operation.tensors, query.dim())
    if axis is None or axis.dim >= query.dim() - 2:
        return operation.lost("attention pairs different examples")
    outputs = operation.outputs
    if outputs[0].shape[axis.dim] != axis.length(operation.size):
        return operation.lost("attention repeats the heads of examples")
    if any(operation.is_batched(x) is False and x.shape[axis.dim] != query.shape[axis.dim] for x in operation.args[:3]):
        return operation.lost("attention pairs different examples")
    return [axis, axis, *[None] * (len(outputs) - 2)][: len(outputs)]


def _reduced_loss(operation: Operation, axis: BatchAxis | None, entries: int) -> State:
    """Return the axis of a loss without reduction, or the total of one with it (1 is the mean, 2 the sum)."""
    if axis is None:
        return operation.lost("the loss pairs different examples")
    reduction = operation.argument("reduction")
    return axis if reduction == 0 else _total(reduction == 1, entries, operation.size)


@_rule("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss", "kl_div")
@_rule("binary_cross_entropy", "binary_cross_entropy_with_logits")
def _elementwise_loss(operation: Operation) -> Answer:
    shapes = [x.shape for x in operation.tensors]
    shape = torch.broadcast_shapes(*shapes)
    return _reduced_loss(operation, broadcast_axis(operation, operation.tensors, len(shape)), shape.numel())


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(operation: Operation) -> Answer:
    """Return the axis or the total of a negative log-likelihood.

    With a mean, torch divides by the number of targets that are not ignored, or by the sum of their weights. Both are private.
    (For Opacus-shaped scripts a mean without weights divides by the number of all targets: `integrations/_opacus_batch.py`.)
    """
    scores, target, weight, reduction, ignored = operation.args[:5]
    axis, own = operation.axis(scores), operation.axis(target)
    classes = 1 if scores.dim() > 1 else 0
    if axis is None or axis.dim == classes:
        return operation.lost("the classes of the loss run over the batch axis")
    placed = axis if axis.dim < classes else axis.shifted(-1)
    if (own is not None and own != placed) or not _is_shared(operation, target, placed):
        return operation.lost("the loss pairs different examples")
    divisor = operation.lost("the divisor of the loss counts the labels of all examples")
    if operation.is_batched(weight):
        return operation.lost("class weights depend on the examples")
    if reduction == 0:
        return [placed, None]
    if reduction == 2:
        return [Total(), divisor]
    if weight is not None:
        return operation.lost("a mean with class weights divides by a sum over the labels of the batch")
    return operation.lost(f"a mean with ignore_index={ignored} divides by a count of the labels of the batch")


@_rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin_loss(operation: Operation) -> Answer:
    scores, target = operation.args[:2]
    axis, own = operation.axis(scores), operation.axis(target)
    if axis != BatchAxis(0) or scores.dim() != 2:
        return operation.lost("the classes of the loss run over the batch axis")
    if (own is not None and own != axis) or not _is_shared(operation, target, axis):
        return operation.lost("the loss pairs different examples")
    if any(operation.is_batched(x) for x in operation.tensors[2:]):
        return operation.lost("class weights depend on the examples")
    losses = _reduced_loss(operation, axis, scores.shape[0])
    return losses if len(operation.outputs) == 1 else [losses, axis]


@_rule("_ctc_loss")
def _ctc_loss(operation: Operation) -> Answer:
    scores, targets = operation.args[:2]
    axis, own = operation.axis(scores), operation.axis(targets)
    lengths = [operation.axis(x) for x in operation.args[2:4] if isinstance(x, Tensor)]
    rows = [x for x in (own, *lengths) if x is not None]
    public = [targets, *[torch.as_tensor(x) for x in operation.args[2:4]]]
    if not all(_is_shared(operation, x, BatchAxis(0)) for x in public):
        return operation.lost("public targets or lengths depend on the places of the examples")
    if axis is None or axis != BatchAxis(1) or targets.dim() != 2 or any(x != BatchAxis(0) for x in rows):
        return operation.lost("the batch is not dimension 1 of the scores and 0 of the targets")
    return BatchAxis(0)


# -- totals ------------------------------------------------------------------------------------------------


def _total_rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names:
            TOTAL_RULES[name] = rule
        return rule

    return add


@_total_rule(
    "neg", "view", "reshape", "squeeze", "unsqueeze", "clone", "detach", "alias", "_to_copy", "expand", "positive"
)
@_total_rule("sum", "mean", "select", "_unsafe_view", "_reshape_alias", "contiguous", "lift_fresh")
def _keep_total(operation: Operation) -> Answer:
    total = operation.state(operation.args[0])
    if operation.outputs[0].numel() != 1 or not isinstance(total, Total):
        return operation.lost("a sum over the examples is spread again")
    return total


@_total_rule("add", "sub", "rsub")
def _add_totals(operation: Operation) -> Answer:
    """Return the total of two totals with one divisor; a public number that is added changes no gradient."""
    totals = [
        state for x in operation.args[:2] if isinstance(x, Tensor) and isinstance(state := operation.state(x), Total)
    ]
    others = [x for x in operation.args[:2] if isinstance(x, Tensor) and not isinstance(operation.state(x), Total)]
    if any(operation.state(x) is not None for x in others) or operation.outputs[0].numel() != 1:
        return operation.lost("a sum over the examples meets something else than a public number")
    first = totals[0]
    if len(totals) == 2 and first.is_mean != totals[1].is_mean:
        return operation.lost("a mean and a sum over the examples are added")
    together = sum(total.factor for total in totals)
    is_quotient = any(total.is_quotient for total in totals)
    return replace(first, entries=first.number / together if together else 1.0, is_quotient=is_quotient)


@_total_rule("mul", "div", "true_divide")
def _scale_total(operation: Operation) -> Answer:
    """Return the total times a public number; a division by N makes a sum a mean."""
    one, other = operation.args[:2]
    total = operation.state(one) if isinstance(one, Tensor) else None
    factor = other
    if not isinstance(total, Total):
        total, factor = operation.state(other), one
        if _name(operation) != "mul":
            return operation.lost("something is divided by a sum over the examples")
    if isinstance(factor, Tensor) and operation.state(factor) is not None:
        return operation.lost("a sum over the examples is multiplied with private or trained numbers")
    assert isinstance(total, Total)
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return operation.lost("a sum over the examples is spread again")
    if operation.has_argument("rounding_mode") and operation.argument("rounding_mode") is not None:
        return operation.lost("a sum over the examples is rounded")
    number = float(factor)
    if _name(operation) != "mul":
        if not total.is_mean and number >= operation.size and number % operation.size == 0:
            return replace(total, is_mean=True, number=total.number * operation.size / number, is_quotient=True)
        number = 1 / number if number else 0.0
    return replace(total, number=total.number * number)


def rule_name(function: Any) -> str:
    """Return the name under which an operation is in the table."""
    packet = function.overloadpacket
    name = str(packet.__name__)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    library = function.namespace
    return name if library == "aten" else f"{library}::{name}"
