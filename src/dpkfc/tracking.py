"""Prove that every gradient belongs to one example: states, rules, tracker.

The tracker follows the batch axis through every operation of a forward pass.

A rule gets an `Operation`. None of its operands is unknown, and at least one has a batch axis. The
rule returns the state of every output: one state for all of them, or a list. A rule that cannot
follow the examples returns `operation.lost(...)`, or ends at `operation.require(...)`.

A rule is correct under two conditions. Perturbing one example of the inputs changes only the
entries of this example in the outputs. Permuting the batch permutes the outputs.
"""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from traceback import walk_stack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# States of tensors. A tracked pass gives every tensor one of five states. A public tensor depends
# on no example and has no entry. `docs/design.md`, "One gradient, one example", explains the proof
# that they make up.


@dataclass(frozen=True)
class BatchAxis:
    """Says that `dim` runs over (pre, N, post), and that its index (p, i, q) is of example i.

    Examples: `[N, d]` has `BatchAxis(0)`, a sequence-first `[T, N, d]` has `BatchAxis(1)`, tokens
    folded as `[N * T, d]` have `BatchAxis(0, post=T)`, two towers joined as `[2 * N, d]` have
    `BatchAxis(0, pre=2)`.
    """

    dim: int
    pre: int = 1
    post: int = 1

    def shifted(self, by: int) -> BatchAxis:
        """Return the same axis after `by` dimensions were added in front of it."""
        return BatchAxis(self.dim + by, self.pre, self.post)

    def move(self, dim: int) -> BatchAxis:
        """Return the same axis in another dimension."""
        return BatchAxis(dim, self.pre, self.post)

    @property
    def extra_dims(self) -> int:
        """Return how many dimensions `example_first` adds for pre and post."""
        return (self.pre > 1) + (self.post > 1)

    def length(self, size: int) -> int:
        """Return the length of the dimension for a batch of `size` examples."""
        return self.pre * size * self.post


class Parametric:
    """Say that a tensor depends on trainable parameters and on no example."""

    def __repr__(self) -> str:
        return "parametric"


PARAMETRIC = Parametric()


class Public:
    """Say that a tensor with a history of its own was computed from public tensors alone."""


PUBLIC = Public()


@dataclass(frozen=True)
class Total:
    """Say that a scalar is Σ_i ℓ_i times a public number, where ℓ_i depends on example i alone.

    Attributes:
        is_mean: the sum was divided by the number of examples.
        number: what the sum was multiplied by besides.
        entries: of each example, over which a mean was taken too.
        is_quotient: it is a mean since the sum was divided by a multiple of N, which may be a
            constant by intention.
    """

    is_mean: bool = False
    number: float = 1.0
    entries: float = 1.0
    is_quotient: bool = False

    @property
    def factor(self) -> float:
        """Return what an entry of an example counts, but for the number of examples."""
        return self.number / self.entries


@dataclass(frozen=True)
class Unknown:
    """Say that the examples of a tensor cannot be told from its shape any more.

    Attributes:
        operation: name of the first operation that lost the axis, such as "aten.sort.default".
        reason: what happened, with the shapes of its operands.
        is_read: values were shown to Python code, and no tensor or gradient was changed.
    """

    operation: str
    reason: str
    is_read: bool = False


_OF_LAYER = Unknown("layer", "what a layer computes inside is used outside of it")
_OF_EARLIER_BATCH = Unknown("a tensor that an earlier batch left", "it depends on other examples")

State = BatchAxis | Parametric | Public | Total | Unknown
"""What a tracked pass knows of a tensor that is not public."""
_PRIVATE = (BatchAxis, Total, Unknown)
# What tensors that a layer computes inside are outside of it; others stay what they are.
_OUTSIDE_OF_LAYER: Mapping[type, State] = {
    Public: PARAMETRIC,
    BatchAxis: _OF_LAYER,
    Total: _OF_LAYER,
}


def axis_after_reshape(
    axis: BatchAxis, shape: Sequence[int], new_shape: Sequence[int], size: int
) -> BatchAxis | None:
    """Return the axis after a reshape that keeps the order, or None if it tears the batch.

    Args:
        axis: the axis in the old shape.
        shape: the old shape.
        new_shape: the new shape, with as many elements.
        size: examples N, at least 2.
    """
    trailing = shape[axis.dim + 1 :]
    inner = axis.post * math.prod(trailing)
    if math.prod(new_shape) == 0:
        return None
    right = 1
    for dim, length in reversed([*enumerate(new_shape)]):
        post, rest = divmod(inner, right)
        if rest == 0:
            pre, other_rest = divmod(length, size * post)
            if other_rest == 0:
                return BatchAxis(dim, pre, post)
        right *= length
    return None


def example_first(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`: examples in front; pre and post are dimensions if longer than 1.

    Args:
        x: a tensor with this axis.
        axis: where its examples lie.
        size: examples N.
    """
    if axis.pre == axis.post == 1:
        # A check of padding asks where the size is another.
        return x.movedim(axis.dim, 0)
    rows = _split_batch(x, axis, size)
    pre_dim = axis.dim + 1
    if axis.post == 1:
        rows = rows.squeeze(pre_dim + 1)
    if axis.pre == 1:
        rows = rows.squeeze(pre_dim)
    return rows


def one_example_a_row(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`, where each row is what a batch of that one example would hold.

    The batch dimension is kept.
    """
    rows = _split_batch(x, axis, size)
    pre_dim = axis.dim + 1
    return rows.flatten(pre_dim, pre_dim + 1)


def _split_batch(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]` with pre and post in the place of the batch dimension."""
    shape = (axis.pre, size, axis.post)
    parts = x.unflatten(axis.dim, shape)
    return parts.movedim(axis.dim + 1, 0)


def names_of_shapes(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of some tensors as they appear in messages."""
    shapes = [list(x.shape) for x in tensors[:3]]
    return " and ".join(map(str, shapes))


# --------------------------------------------------------------------------------------------------
# One ATen operation of a tracked pass, as a batch rule sees it.

T = TypeVar("T")


class LostExamples(Exception):
    """Ends a batch rule where the examples cannot be followed.

    Attributes:
        state: of all outputs of the operation.
    """

    def __init__(self, state: Unknown) -> None:
        super().__init__(state)
        self.state = state


@dataclass(slots=True)
class Operation:
    """Give a rule the operands, the outputs and the states of one operation.

    Attributes:
        function: the ATen overload.
        name: under which the operation is in the table.
        args: positional arguments.
        kwargs: keyword arguments.
        output: what the operation returned.
        size: examples N of the pass, at least 2.
        state: maps a tensor to its state, None for a public one.
        axis: maps an operand to its batch axis, None for a public tensor or for no tensor.
        trusts_public_rows: a public tensor with a row for each example may hold the examples' own
            rows.
        before: by id, the old values of public tensors that an operation in place has changed.
    """

    function: OpOverload
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any
    size: int
    state: Callable[[Any], State | None]
    axis: Callable[[Any], BatchAxis | None]
    trusts_public_rows: bool
    before: Mapping[int, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensor operands, those inside lists too."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def outputs(self) -> list[Tensor]:
        """Return all tensor outputs."""
        return list(tensors_in((self.output,)))

    @property
    def result(self) -> Tensor:
        """Return the first tensor output."""
        return next(tensors_in((self.output,)))

    def is_batched(self, x: Any) -> bool:
        """Return whether an operand has a batch axis."""
        return self.axis(x) is not None

    def has_length(self, x: Tensor, axis: BatchAxis) -> bool:
        """Return whether a dimension of a tensor is as long as this axis makes it."""
        return x.shape[axis.dim] == axis.length(self.size)

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the schema, with the schema's own default.

        Args:
            name: of the argument.
            default: is returned where the schema has no argument of this name.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        place, value = arguments_of(self.function).get(name, (len(self.args), default))
        if place < len(self.args):
            return self.args[place]
        return value

    def lost(self, why: str) -> Unknown:
        """Return the state of an output whose examples cannot be told any more."""
        batched = list(filter(self.is_batched, self.tensors))
        shapes = names_of_shapes(batched or self.tensors)
        return Unknown(str(self.function), f"{why} (shapes {shapes})")

    def require(self, value: T | None, why: str) -> T:
        """Return a value. Where it is None or false, end the rule: all outputs are lost.

        Raises:
            LostExamples: with the state of the outputs.
        """
        if not value:
            raise LostExamples(self.lost(why))
        return value


@cache
def arguments_of(function: OpOverload) -> dict[str, tuple[int, Any]]:
    """Return name to (place, default) of the arguments of an operation."""
    arguments = enumerate(function._schema.arguments)
    return {argument.name: (place, argument.default_value) for place, argument in arguments}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some values and inside the lists and tuples among them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(x)


# --------------------------------------------------------------------------------------------------
# The table.

Answer = State | Sequence[State | None] | None
Rule = Callable[[Operation], Answer]
_FirstRule = Callable[[Operation, Tensor, BatchAxis], Answer]

# The key is an operation without overload, and without the underscore of its in-place form.
RULES: dict[str, Rule] = {}
# Rules for operations on totals: scalars that are sums over examples.
TOTAL_RULES: dict[str, Rule] = {}


def register_batch_rule(name: str, rule: Rule) -> None:
    """Register what an operation does to the place of the examples.

    Args:
        name: the operation, "aten::sort" or "my_library::my_kernel", without overload.
        rule: maps an `Operation` to the state of its outputs. A state is a `BatchAxis`, None for a
            public output, or `operation.lost(why)` where the examples are mixed or cannot be
            followed. A list holds one state for each tensor output.

    The rule is part of the proof of a private pass. A wrong rule voids the guarantee.

    Raises:
        ValueError: a name without its library.

    Example:
        def scale_rows_axis(operation):
            return operation.axis(operation.args[0])

        register_batch_rule("my_library::scale_rows", scale_rows_axis)
    """
    if "::" not in name:
        raise ValueError(f"batch rule {name!r}: name the library too, for example 'aten::{name}'")
    RULES[name.removeprefix("aten::")] = rule


def split_names(text: str) -> frozenset[str]:
    """Return the names in a text that divides them by spaces."""
    return frozenset(text.split())


@cache
def rule_name(function: Any) -> str:
    """Return the name under which an operation is in the table."""
    name = str(function.overloadpacket.__name__)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    library = function.namespace
    if library == "aten":
        return name
    return f"{library}::{name}"


def _rule(names: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Register a rule under some names, divided by spaces."""

    def add(rule: Rule) -> Rule:
        for name in names.split():
            table[name] = rule
        return rule

    return add


def _rule_of_first(names: str) -> Callable[[_FirstRule], _FirstRule]:
    """Register a rule that is given the first operand too, which has to have the batch."""

    def add(rule: _FirstRule) -> _FirstRule:
        @_rule(names)
        def run(operation: Operation) -> Answer:
            x = operation.args[0]
            axis = operation.require(operation.axis(x), "a batched operand in an unusual place")
            return rule(operation, x, axis)

        return rule

    return add


def _dimension(operation: Operation, x: Tensor, name: str = "dim", default: int = 0) -> int:
    """Return an argument that names a dimension of x, counted from the front."""
    dim = int(operation.argument(name, default))
    return dim % max(1, x.dim())


def _fits(
    operation: Operation, tensors: Iterable[Any], axis: BatchAxis, rank: int | None = None
) -> bool:
    """Return whether all of some operands have this axis, or equal entries along it.

    Args:
        operation: the operation.
        tensors: of one rank, or of several with a broadcast result. Other values fit.
        axis: in the tensors, or in that result.
        rank: dimensions of the result.
    """
    for x in tensors_in(tensors):
        expected = axis
        if rank is not None:
            missing = rank - x.dim()
            expected = axis.shifted(-missing)
        known = operation.axis(x)
        if known is None:
            if not _is_shared(operation, x, expected):
                return False
        elif known != expected:
            return False
    return True


# -- elementwise operations ------------------------------------------------------------------------


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
    axes = _axes_in_result(operation, tensors, rank)
    operation.require(axes and _fits(operation, tensors, axes[0], rank), why)
    return axes[0]


def _axes_in_result(operation: Operation, tensors: Iterable[Tensor], rank: int) -> list[BatchAxis]:
    """Return where the batched operands have their axes in a broadcast result."""
    axes = []
    for x in tensors:
        axis = operation.axis(x)
        if axis is not None:
            axes.append(axis.shifted(rank - x.dim()))
    return axes


def _is_shared(operation: Operation, x: Tensor, axis: BatchAxis) -> bool:
    """Return whether a public tensor has the same entries for all places along an axis.

    A batch of one takes the first entries of `x + table[:N]`, whatever place its example had
    before. Of a tensor that the operation has changed in place, the old entries count. One that it
    has written over counts as shared.
    """
    x = operation.before.get(id(x), x)
    if not 0 <= axis.dim < x.dim():
        return True
    if x.shape[axis.dim] == 1 or x.stride(axis.dim) == 0 or id(x) in map(id, operation.outputs):
        return True
    if not operation.has_length(x, axis):
        return False
    return operation.trusts_public_rows or are_places_equal(x, axis, operation.size)


def are_places_equal(x: Tensor, axis: BatchAxis, size: int) -> bool:
    """Return whether a public tensor has the same entries for all `size` places along an axis."""
    shape = (axis.pre, size, axis.post)
    # No other tracker may take this for a read of the program: a tape outside may look at its rows.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        parts = x.detach().unflatten(axis.dim, shape)
        first = parts.narrow(axis.dim + 1, 0, 1)
        return torch.equal(parts, first.expand_as(parts))


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
    fill masked_fill rrelu_with_noise binary_cross_entropy_backward real imag conj _conj
    resolve_conj resolve_neg gelu hardswish hardsigmoid_backward hardswish_backward
    log_sigmoid_forward log_sigmoid_backward elu_backward leaky_relu_backward hardtanh_backward
    softplus_backward mish_backward polar complex normal uniform random exponential zero
    _cast_Float _cast_Double special_multigammaln isclose
"""
RULES.update(dict.fromkeys(_POINTWISE.split(), pointwise))


@_rule("prelu")
def _prelu(operation: Operation) -> Answer:
    """Return the axis of a prelu, whose weights belong to dimension 1."""
    x, weight = operation.args[:2]
    axis = operation.axis(x)
    operation.require(not operation.is_batched(weight), "the weights depend on the examples")
    if axis is not None and axis.dim == 1:
        is_shared = _is_shared(operation, weight, axis.move(0))
        operation.require(is_shared, "the weights depend on the places of the examples")
    return axis


@_rule_of_first("isin bucketize rand_like randn_like randint_like")
def _same_axis(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of the first operand; random numbers are drawn for every example."""
    why = "every entry is compared with the entries of all examples"
    operation.require(not _has_batched_weights(operation), why)
    return axis


def _has_batched_weights(operation: Operation) -> bool:
    """Return whether an operand next to the first one depends on the examples."""
    return any(map(operation.is_batched, operation.tensors[1:]))


@_rule(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "new_empty_strided"
)
def _public(operation: Operation) -> Answer:
    """Return public: the values depend on no operand."""
    return None


# -- views and layout ------------------------------------------------------------------------------


@_rule_of_first(
    "view _unsafe_view reshape _reshape_alias view_as squeeze unsqueeze flatten unflatten"
)
def _reshape(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    y = operation.result
    operation.require(x.numel() == y.numel(), "a view with another number of elements")
    new_axis = axis_after_reshape(axis, x.shape, y.shape, operation.size)
    return operation.require(new_axis, "a reshape tears the batch axis apart")


@_rule_of_first("permute transpose t")
def _permute(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    rank = x.dim()
    order = list(range(rank))
    dims = operation.argument("dims")
    if dims is not None:
        order = [dim % rank for dim in dims]
    else:
        first = _dimension(operation, x, "dim0")
        second = _dimension(operation, x, "dim1", 1)
        order[first], order[second] = second, first
    return axis.move(order.index(axis.dim))


@_rule_of_first("expand repeat")
def _expand(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    axis = axis.shifted(operation.result.dim() - x.dim())
    times = operation.argument("repeats")
    if times is None:
        return axis
    return replace(axis, pre=axis.pre * times[axis.dim])


@_rule_of_first("slice narrow")
def _slice(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    y = operation.result
    if _dimension(operation, x) != axis.dim or x.shape == y.shape:
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
    return operation.lost("a slice takes some of the examples")


@_rule_of_first(
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes"
)
def _split(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    if axis.dim != _dimension(operation, x):
        return axis
    states: list[State | None] = []
    start = 0
    for part in operation.outputs:
        length = part.shape[axis.dim]
        states.append(_slice_axis(operation, axis, start, length))
        start += length
    return states


@_rule("cat concat concatenate")
def _cat(operation: Operation) -> Answer:
    empty = (0,)
    tensors = [x for x in operation.args[0] if x.shape != empty]
    known = [axis for axis in map(operation.axis, tensors) if axis is not None]
    first = known[0]
    why = "tensors with different batch axes are joined"
    if _dimension(operation, tensors[0]) != first.dim:
        operation.require(_fits(operation, tensors, first), why)
        return first
    copies = sum(axis.pre for axis in known)
    joined = replace(first, pre=copies)
    for axis in known:
        operation.require(replace(axis, pre=copies) == joined, why)
    operation.require(len(known) == len(tensors), "rows of no example are joined to the batch")
    return joined


@_rule("stack")
def _stack(operation: Operation) -> Answer:
    y = operation.result
    why = "tensors with different batch axes are stacked"
    axis = broadcast_axis(operation, operation.args[0], y.dim() - 1, why)
    if _dimension(operation, y) <= axis.dim:
        return axis.shifted(1)
    return axis


@_rule_of_first("diagonal")
def _diagonal(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    dims = {_dimension(operation, x, name) for name in ("dim1", "dim2")}
    operation.require(axis.dim not in dims, "a diagonal runs through the batch axis")
    return _remove_dims(axis, dims)


def _remove_dims(axis: BatchAxis, dims: Iterable[int]) -> BatchAxis:
    """Return an axis after other dimensions are gone."""
    return axis.shifted(-sum(dim < axis.dim for dim in dims))


@_rule_of_first("as_strided")
def _strided(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    layouts = {(y.shape, y.stride(), y.storage_offset()) for y in (x, operation.result)}
    operation.require(len(layouts) == 1, "a strided view is not followed")
    return axis


@_rule_of_first("view_as_real view_as_complex view_as_complex_copy")
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


@_rule_of_first(
    "softmax _softmax log_softmax _log_softmax _safe_softmax logcumsumexp cumsum cumprod "
    "cummax cummin sort argsort msort topk flip _fft_r2c _fft_c2r _fft_c2c glu roll unfold"
)
def _keep_place(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of an operation along other dimensions, which stay where they are."""
    dims = _dims(operation, x.dim())
    operation.require(axis.dim not in dims, "it works along the batch axis")
    return axis


@_rule_of_first("diag_embed")
def _diag_embed(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of vectors that become diagonals of matrices in two new places."""
    y = operation.result
    operation.require(axis.dim < x.dim() - 1, "the batch axis becomes a diagonal")
    old_dims = list(range(y.dim()))
    old_dims.remove(_dimension(operation, y, "dim1"))
    old_dims.remove(_dimension(operation, y, "dim2"))
    return axis.move(old_dims[axis.dim])


@_rule_of_first("renorm")
def _renorm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a bound on the norm of each entry along the dimension of the examples."""
    operation.require(axis.dim == _dimension(operation, x), "norms run over the batch axis")
    return axis


@_rule_of_first(
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


@_rule_of_first("sum mean")
def _sum(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a sum, or a total where the sum runs over the batch axis."""
    if axis.dim not in _dims(operation, x.dim()):
        return _reduce(operation, x, axis)
    operation.require(operation.result.numel() == 1, "it adds up examples")
    return _total(operation, operation.name == "mean", x.numel())


def _total(operation: Operation, is_mean: bool, entries: int) -> Total:
    """Return the total of so many entries."""
    if is_mean:
        return Total(True, entries=entries / operation.size)
    return Total()


# -- products --------------------------------------------------------------------------------------


@_rule("mm addmm bmm baddbmm mv addmv dot vdot _scaled_mm matmul linear")
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
    axes += _axes_in_result(operation, addends, rank)
    first = axes[0]
    operation.require(set(axes) == {first}, "a product pairs different examples")
    why = "a product pairs examples with their places"
    longest = max(a.dim(), b.dim())
    # Rows come from the first factor, columns from the second. An addend may have the examples.
    factors = {longest - 2: [a], longest - 1: [b]}
    both = [x for x in (a, b) if x.dim() > 2]
    operation.require(_fits(operation, factors.get(first.dim, both), first, longest), why)
    operation.require(_fits(operation, addends, first, rank), why)
    return first


def _axes_of_factors(operation: Operation, a: Tensor, b: Tensor) -> list[BatchAxis]:
    """Return where the axes of the batched factors lie in a product, which sums over neither."""
    axes = []
    why = "a product sums over the batch axis"
    axis = operation.axis(a)
    if axis is not None:
        operation.require(axis.dim < a.dim() - 1, why)
        missing = max(0, b.dim() - a.dim())
        axes.append(axis.shifted(missing))
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


@_rule("_cdist_forward cdist")
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
            axes.append(axis.shifted(rank - x.dim()))
    first = axes[0]
    operation.require(set(axes) == {first}, "distances pair different examples")
    if first.dim < rank - 2:
        are_shared = _fits(operation, (a, b), first, rank)
        operation.require(are_shared, "distances pair examples with their places")
    return first


@_rule("_trilinear")
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


@_rule_of_first(
    "convolution _convolution cudnn_convolution mkldnn_convolution thnn_conv2d "
    "_slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d conv_depthwise3d conv_tbc "
    "native_group_norm group_norm channel_shuffle native_channel_shuffle"
)
def _channels(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of an operation on `[N, channels, ...]`, or of `conv_tbc` on `[T, N, C]`."""
    batch_dim = 1 if operation.name == "conv_tbc" else 0
    is_alone = axis.dim == batch_dim and not _has_batched_weights(operation)
    why = f"the batch is not dimension {batch_dim} of its first operand alone"
    operation.require(is_alone, why)
    length = x.shape[0]
    is_plain = operation.argument("N", length) == length
    operation.require(is_plain, "a group norm counts examples as channels")
    return axis


# -- operations on trailing dimensions -------------------------------------------------------------


def _common_axis(operation: Operation, tensors: Iterable[Tensor], why: str) -> BatchAxis:
    """Return the one axis of all batched tensors; where they have several, `why` is the reason."""
    axes = {axis for axis in map(operation.axis, tensors) if axis is not None}
    operation.require(len(axes) == 1, why)
    return axes.pop()


def _trailing(count: int) -> Rule:
    """Return the rule of an operation that works within the last `count` dimensions."""

    def rule(operation: Operation) -> Answer:
        batched = list(filter(operation.is_batched, operation.tensors))
        axis = _common_axis(operation, batched, "it works along the batch axis")
        kept_dims = min(x.dim() for x in batched) - count
        operation.require(axis.dim < kept_dims, "it works along the batch axis")
        are_shared = _fits(operation, operation.tensors, axis)
        operation.require(are_shared, "it pairs examples with their places")
        return axis

    return rule


_TRAILING_DIMS = {
    1: """
        avg_pool1d adaptive_avg_pool1d max_pool1d upsample_nearest1d _upsample_nearest_exact1d
        upsample_linear1d reflection_pad1d replication_pad1d
    """,
    2: """
        avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d
        max_pool2d_with_indices upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
        upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d
        replication_pad2d col2im tril triu affine_grid_generator linalg_inv_ex linalg_cholesky_ex
        linalg_qr _linalg_svd _linalg_eigh linalg_matrix_exp _linalg_det _linalg_slogdet
    """,
    3: """
        avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_unpool2d
        max_pool3d_with_indices upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d
        reflection_pad3d replication_pad3d pixel_shuffle pixel_unshuffle im2col grid_sampler_2d
    """,
    4: "max_unpool3d grid_sampler_3d",
}
for _count, _names in _TRAILING_DIMS.items():
    RULES.update(dict.fromkeys(_names.split(), _trailing(_count)))


@_rule_of_first("fractional_max_pool2d fractional_max_pool3d")
def _fractional_max_pool(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a pool over random windows, which are drawn for each example."""
    windows = operation.argument("random_samples")
    spatial_dims = len(operation.args[1])
    has_rows = axis.dim == 0 and x.dim() == windows.dim() + spatial_dims - 1
    operation.require(has_rows, "the batch is not dimension 0 of the input")
    operation.require(_fits(operation, [windows], axis), "windows belong to other examples")
    return axis


@_rule("linalg_cross")
def _cross(operation: Operation) -> Answer:
    y = operation.result
    why = "a cross product works along the batch axis"
    axis = broadcast_axis(operation, operation.args[:2], y.dim(), why)
    operation.require(axis.dim != _dimension(operation, y), why)
    return axis


@_rule_of_first("constant_pad_nd")
def _pad(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    # The list of paddings begins with the last dimension, two numbers for each.
    place = 2 * (x.dim() - 1 - axis.dim)
    paddings = operation.argument("pad")[place:]
    operation.require(not any(paddings[:2]), "padding is added along the batch axis")
    return axis


# -- normalisation ---------------------------------------------------------------------------------


@_rule_of_first("native_layer_norm layer_norm _fused_rms_norm rms_norm")
def _layer_norm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    kept_dims = x.dim() - len(operation.args[1])
    is_kept = axis.dim < kept_dims and not _has_batched_weights(operation)
    operation.require(is_kept, "it normalises over the batch axis")
    return axis


@_rule_of_first(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "miopen_batch_norm"
)
def _batch_norm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a batch norm.

    Its statistics are frozen, or belong to channels of one example each, as in an instance norm.
    """
    are_public = not _has_batched_weights(operation)
    operation.require(are_public, "a batched operand in an unusual place")
    if not operation.argument("training", "with_update" in operation.name):
        operation.require(axis.dim != 1, "channels are examples")
        return [axis, None, None, None]
    operation.require(axis.dim == 1, "statistics are taken over the batch")
    channel_axis = axis.move(0)
    are_shared = _fits(operation, operation.args[1:3], channel_axis)
    operation.require(are_shared, "weights depend on the places of the examples")
    return [axis, channel_axis, channel_axis, None]


# -- lookups ---------------------------------------------------------------------------------------


@_rule("embedding")
def _embedding(operation: Operation) -> Answer:
    weight, ids = operation.args[:2]
    is_public = not operation.is_batched(weight)
    operation.require(is_public, "the table of an embedding depends on the examples")
    return operation.axis(ids)


@_rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(operation: Operation) -> Answer:
    """Return the axis of bags of equal length, one or several an example.

    The ids are `[N, T]`, which torch has flattened.
    """
    weight, ids, offsets = operation.args[:3]
    sample_weights = operation.argument("per_sample_weights")
    why = "bags of an embedding have the batch in another place"
    axis = operation.require(operation.axis(ids), why)
    has_public_table = not any(map(operation.is_batched, (weight, offsets)))
    has_rows = axis.pre == 1 and _fits(operation, [sample_weights], axis)
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


@_rule("gather scatter scatter_add scatter_reduce take_along_dim")
def _gather(operation: Operation) -> Answer:
    tensors = [x for x in operation.tensors if x.dim()]
    axis = _common_axis(operation, tensors, "it pairs different examples")
    is_other_dim = axis.dim != _dimension(operation, tensors[0])
    operation.require(is_other_dim, "it reads along the batch axis")
    have_examples = all(operation.has_length(x, axis) for x in tensors)
    operation.require(have_examples, "its operands have different numbers of examples")
    operation.require(_fits(operation, tensors, axis), "it pairs examples with their places")
    return axis


@_rule("index_add index_copy index_fill index_reduce")
def _index_write(operation: Operation) -> Answer:
    x = operation.args[0]
    index = operation.argument("index")
    rank = x.dim()
    operation.require(not operation.is_batched(index), "an index depends on the examples")
    operands = [y for y in operation.tensors if y is not index and y.dim() == rank]
    why = "it writes along the batch axis"
    axis = broadcast_axis(operation, operands, rank, why)
    operation.require(axis.dim != _dimension(operation, x), why)
    return axis


@_rule("index_select")
def _index_select(operation: Operation) -> Answer:
    x = operation.args[0]
    index = operation.argument("index")
    axis = operation.axis(x)
    dim = _dimension(operation, x)
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
    return operation.lost("an index rearranges the examples")


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
        """Return the first index that is a mask, None where there is none."""
        return next(filter(_is_mask, self.given.values()), None)

    def except_dim(self, dim: int) -> list[Tensor]:
        """Return the indices of all other dimensions."""
        return [index for other, index in self.given.items() if other != dim]

    def moved_dim(self, dim: int) -> int:
        """Return where a dimension of x without an index lies in the result."""
        place = self.untouched_dims.index(dim)
        if self.is_adjacent and dim < self.front:
            return place
        return place + self.rank


def _is_mask(index: Tensor) -> bool:
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


@_rule("index _unsafe_index")
def _index(operation: Operation) -> Answer:
    """Return the axis of `x[i, :, j]`: an index into the batch axis may only count the examples."""
    indices = _indices(operation)
    if indices.mask is not None:
        return _index_by_mask(operation, indices)
    axis = operation.axis(operation.args[0])
    why = "indices pair different examples"
    if axis is None:
        indices_axis = broadcast_axis(operation, indices.given.values(), indices.rank, why)
        return indices_axis.shifted(indices.front)
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
    operation.require(_fits(operation, others, counting_axis, indices.rank), why)
    return counting_axis.shifted(indices.front)


def _axis_of_counting_index(
    operation: Operation, axis: BatchAxis, index: Tensor, rank: int
) -> BatchAxis | None:
    """Return where an index `0, 1, …, N - 1` puts the examples among `rank` index dimensions.

    The answer is None for another index.
    """
    length = axis.length(operation.size)
    if index.numel() != length:
        return None
    identity = torch.arange(length, device=index.device)
    if not torch.equal(index.flatten(), identity) or length not in index.shape:
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
    return axis.shifted(1 - mask.dim())


@_rule("index_put _index_put_impl _unsafe_index_put")
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
        values_axis = values_axis.shifted(rank - values.dim())
        return _axis_of_written_values(operation, indices, values_axis)
    axis = operation.require(axis, why)
    operation.require(axis.dim not in indices.given, why)
    moved_axis = axis.move(indices.moved_dim(axis.dim))
    are_shared = _fits(operation, [values], moved_axis, rank)
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
    operation.require(_fits(operation, (x, mask), axis), why)
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
    row_axis = counting_axis.shifted(indices.front)
    return (
        _fits(operation, others, counting_axis, indices.rank)
        and _fits(operation, [x], target)
        and _fits(operation, [values], row_axis, indices.result_rank)
    )


def _axis_of_written_values(
    operation: Operation, indices: _Indices, values_axis: BatchAxis
) -> Answer:
    """Return the axis of x after batched values are written at public indices elsewhere.

    Args:
        operation: the write.
        indices: its indices, none of which is private.
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
    operation.require(_fits(operation, operation.args[:1], target), why)
    return target


# -- attention, recurrences and losses -------------------------------------------------------------


@_rule(
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
    return _total(operation, reduction == 1, entries)


@_rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss l1_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
def _elementwise_loss(operation: Operation) -> Answer:
    tensors = operation.tensors
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    why = "the loss pairs different examples"
    axis = broadcast_axis(operation, tensors, len(shape), why)
    return _reduce_loss(operation, axis, shape.numel())


@_rule("nll_loss_forward nll_loss2d_forward")
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
        axis = axis.shifted(-1)
    operation.require(_fits(operation, [target], axis), "the loss pairs different examples")
    operation.require(not operation.is_batched(weight), "class weights depend on the examples")
    if reduction == 0:
        return [axis, None]
    if reduction == 2:
        return [
            Total(),
            operation.lost("the divisor of the loss counts the labels of all examples"),
        ]
    operation.require(weight is None, "class weights divide it by the labels of the batch")
    return operation.lost(f"ignore_index={ignored} divides it by the labels of the batch")


@_rule("multi_margin_loss multilabel_margin_loss_forward")
def _margin_loss(operation: Operation) -> Answer:
    scores, target = operation.args[:2]
    axis = BatchAxis(0)
    is_placed = operation.axis(scores) == axis and scores.dim() == 2
    operation.require(is_placed, "the classes of the loss run over the batch axis")
    operation.require(_fits(operation, [target], axis), "the loss pairs different examples")
    are_public = not any(map(operation.is_batched, operation.tensors[2:]))
    operation.require(are_public, "class weights depend on the examples")
    return [_reduce_loss(operation, axis, len(scores)), axis]


@_rule("_ctc_loss")
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
    operation.require(_fits(operation, tensors, rows), why)
    return rows


# -- totals ----------------------------------------------------------------------------------------


@_rule(
    "neg positive view reshape squeeze unsqueeze expand clone detach alias _to_copy "
    "contiguous lift_fresh sum mean select _unsafe_view _reshape_alias",
    table=TOTAL_RULES,
)
def _keep_total(operation: Operation) -> Answer:
    total = operation.state(operation.args[0])
    is_kept = operation.result.numel() == 1 and isinstance(total, Total)
    operation.require(is_kept, "a sum over the examples is spread again")
    return total


@_rule("add sub rsub", table=TOTAL_RULES)
def _add_totals(operation: Operation) -> Answer:
    """Return the total of two with one divisor; a public number changes no gradient."""
    why = "a sum over the examples meets something else than a public number"
    operation.require(operation.result.numel() == 1, why)
    states = list(map(operation.state, operation.args[:2]))
    totals = [state for state in states if isinstance(state, Total)]
    operation.require(len(totals) + states.count(None) == len(states), why)
    first = totals[0]
    have_one_divisor = all(total.is_mean == first.is_mean for total in totals)
    operation.require(have_one_divisor, "a mean and a sum over the examples are added")
    factor = sum(total.factor for total in totals)
    entries = first.number / factor if factor else 1.0
    is_quotient = any(total.is_quotient for total in totals)
    return replace(first, entries=entries, is_quotient=is_quotient)


@_rule("mul div true_divide", table=TOTAL_RULES)
def _scale_total(operation: Operation) -> Answer:
    """Return the total times a public number; a division by N makes a sum a mean."""
    is_division = operation.name != "mul"
    first, factor = operation.args[:2]
    total = operation.state(first)
    if not isinstance(total, Total):
        operation.require(not is_division, "something is divided by a sum over the examples")
        total = operation.state(factor)
        factor = first
    why = "a sum over the examples is multiplied with private or trained numbers"
    operation.require(operation.state(factor) is None, why)
    assert isinstance(total, Total)
    operation.require(operation.result.numel() == 1, "a sum over the examples is spread again")
    is_exact = operation.argument("rounding_mode") is None
    operation.require(is_exact, "a sum over the examples is rounded")
    number = float(factor)
    if is_division:
        is_multiple = number >= operation.size and number % operation.size == 0
        if not total.is_mean and is_multiple:
            new_number = total.number * operation.size / number
            return replace(total, is_mean=True, number=new_number, is_quotient=True)
        number = 1 / number if number else 0.0
    return replace(total, number=total.number * number)


# --------------------------------------------------------------------------------------------------
# The tracker: two modes of torch that apply the rules. The dispatch mode sees every ATen operation
# and keeps the state of every tensor: this is the proof. The function mode sees what Python code
# calls. It notes reads that leave torch, and it gives parameters that meet the examples a row for
# each of them (`gradients.tape`), which is no part of the proof.


_READS = split_names("_local_scalar_dense is_nonzero equal item allclose")
_LEAVES_TORCH = split_names(
    "numpy tolist __array__ __dlpack__ untyped_storage storage data_ptr __reduce_ex__ "
    "__deepcopy__ __repr__ __format__ apply_ map_ map2_ _typed_storage"
)
_WRITES_VALUES = split_names("apply_ map_ map2_")
_CREATES = split_names("tensor as_tensor from_numpy asarray frombuffer from_dlpack new_tensor")
# Operations in place whose result has nothing of the old values.
_OVERWRITES = split_names(
    "copy fill zero normal uniform random exponential bernoulli cauchy geometric "
    "log_normal _foreach_copy _foreach_zero"
)
# Memory that these return holds what was there before, which is no part of the program.
_UNFILLED = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)
# Finds names of operations whose results have private shapes, beside those that torch marks.
_HAVE_OTHER_SHAPES = re.compile("to_sparse|_pack_padded|_pad_packed")
# Python modules between a use of `grad_fn` and the code that asked for it.
_PASS_ON_GRADIENTS = (__name__, "torch.autograd.graph", "torch.overrides", "torch.utils._device")
_MEETS_RUNNING_STATISTICS = split_names("native_batch_norm cudnn_batch_norm miopen_batch_norm")
_DRAWS = split_names(
    "rand randn randint bernoulli uniform normal exponential random log_normal rand_like"
    " randn_like randint_like"
)
# Functions whose branches on values only choose between forms with equal results, or only check
# values.
_HARMLESS_READS = frozenset(
    {
        ("transformers.masking_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"),
        ("transformers.masking_utils", "find_packed_sequence_indices"),
        ("transformers.modeling_attn_mask_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.modeling_attn_mask_utils", "_prepare_4d_attention_mask_for_sdpa"),
        ("transformers.modeling_utils", "warn_if_padding_and_no_attention_mask"),
        ("torch.nn.functional", "multi_head_attention_forward"),
        (__name__, "_call_one_hot"),
    }
)


class UnknownOperation(ValueError):
    """An operation whose effect on the batch axis is not known, under `verify="strict"`."""


class _Reference(weakref.ref[Tensor]):
    __slots__ = ("key",)
    key: int


def _state_of_unseen(x: Tensor) -> State | None:
    """Return the state of a tensor that no followed operation has made."""
    if x.requires_grad and x.grad_fn is None:
        return PARAMETRIC
    if x.requires_grad:
        return Unknown(
            "autograd",
            "a tensor was made where no operation is seen, as by a compiled function or a kernel",
        )
    if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
        return Unknown(type(x).__name__, "tensors of this type are not followed")
    return None


class Tracker:
    """Keep the state of every tensor of one forward pass over N >= 2 examples.

    Args:
        size: examples N.
        persistent: tensors that outlive the pass (buffers), which no example may be written into.
        trusts_public_rows: not all of the batch is declared, so a public tensor with a row for each
            example may be part of it.

    Attributes:
        failure: the first reason why the pass is not proved, or None.
        altered: the first of them that is no mere read of values, or None.
        is_opaque: the batch holds values that are not tensors.
        call: calls a function of torch in the place of the function mode; None calls it as it is.
        read: ids of the declared parameters that were read outside of a layer that covers them.
    """

    # The tracker of the batch before, which knows the tensors that this batch has left.
    _of_last_batch: Tracker | None = None

    def __init__(
        self, size: int, persistent: Iterable[Tensor] = (), *, trusts_public_rows: bool = False
    ) -> None:
        self.size = size
        self.trusts_public_rows = trusts_public_rows
        self.failure: Unknown | None = None
        self.altered: Unknown | None = None
        self.is_opaque = False
        self.call: Callable[[Any, Any, Any], Any] | None = None
        self.read: set[int] = set()
        self._parameters: set[int] = set()
        self._states: dict[int, State] = {}
        self._references: dict[int, _Reference] = {}
        self.declare_persistent(persistent)
        self._covered: set[int] = set()
        self._interiors: list[list[int]] = []
        self._rewritten: dict[int, Unknown] = {}
        self._aliases: dict[int, int] = {}
        self._paused = 0
        self._calls = 0

    # -- states ------------------------------------------------------------------------------------

    def state(self, x: Any) -> State | None:
        """Return what is known of a value, None if no example and no parameter decide it."""
        if not isinstance(x, Tensor) or is_lazy(x):
            return None  # a lazy one has no values yet, and no operation may look at it
        with torch._C.DisableTorchFunction():
            return self._state(x)

    def _state(self, x: Tensor) -> State | None:
        # None is no key of a table.
        base_key = id(x._base)
        if base_key in self._rewritten:
            return self._rewritten[base_key]
        key = id(x)
        if key in self._covered:
            return None
        known = self._states.get(key)
        if known is not None and known is not PUBLIC:
            return known
        # A view that was noted as public may show what was written into its base since.
        if base_key in self._states:
            return self._state_of_view(x)
        return None if known is PUBLIC else _state_of_unseen(x)

    def _state_of_view(self, x: Tensor) -> State | None:
        """Return the state of a view whose base was written after it was made."""
        base: Any = x._base
        state = self.state(base)
        if not isinstance(state, BatchAxis):
            return state
        lost = Unknown("view", "a view of a tensor that the examples were written into")
        return _same_memory(state, base, x, self.size) or lost

    def is_declared(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter, or was seen before."""
        return id(x) in self._states

    def axis(self, x: Any) -> BatchAxis | None:
        """Return the batch axis of a tensor, None where it has none."""
        state = self.state(x)
        return state if isinstance(state, BatchAxis) else None

    def set_state(self, x: Tensor, state: State | None) -> None:
        """Declare what a tensor is."""
        key = id(x)
        if state is None:
            self._states.pop(key, None)
            return
        self._states[key] = state
        if self._interiors:
            self._interiors[-1].append(key)
        self._remember(x)

    def _remember(self, x: Tensor) -> None:
        """Forget what is noted of a tensor as soon as it is freed."""
        key = id(x)
        if key not in self._references:
            reference = _Reference(x, self._forget)
            reference.key = key
            self._references[key] = reference

    def _forget(self, reference: Any) -> None:
        for table in (self._states, self._references, self._rewritten, self._aliases):
            table.pop(reference.key, None)

    def _note_alias(self, x: Tensor) -> None:
        """Note a tensor that shares memory with another one, of which it is no view."""
        self._remember(x)
        self._aliases[id(x)] = _memory(x)

    def declare_batch(self, batch: Any) -> None:
        """Declare that every tensor of a batch has its examples in front, or is unknown.

        Values of other types are not followed: where a batch has them, tensors that are made of
        values are unknown too.
        """
        for x in tree_leaves(batch):
            if not isinstance(x, Tensor):
                self.is_opaque = self.is_opaque or x is not None
            elif x.shape[:1] == (self.size,):
                self.set_state(x, BatchAxis(0))
            else:
                shape = list(x.shape)
                why = f"a tensor {shape} of the batch does not have {self.size} examples in front"
                self.set_state(x, Unknown("batch", why))

    def declare_persistent(self, tensors: Iterable[Tensor]) -> None:
        """Declare tensors that outlive the operations on the batch; earlier ones do not count."""
        self._persistent = set(map(_memory, tensors))

    def declare_earlier_batches(self) -> None:
        """Declare that tensors which earlier batches have left depend on other examples."""
        earlier = Tracker._of_last_batch
        Tracker._of_last_batch = self
        if earlier is None:
            return
        for key, reference in [*earlier._references.items()]:
            x = reference()
            state = earlier._states.get(key)
            if x is None or not isinstance(state, _PRIVATE):
                continue
            if _memory(x) not in self._persistent:
                self.set_state(x, _OF_EARLIER_BATCH)

    def declare_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Declare the trainable parameters."""
        for p in parameters:
            self.set_state(p, PARAMETRIC)
            self._parameters.add(id(p))

    def fail(self, operation: Any, reason: str, *, is_read: bool = False) -> Unknown:
        """Note that the pass is not proved, and return why; the first reason stays.

        Args:
            operation: what was called.
            reason: what it did.
            is_read: values were shown to Python code, and no tensor or gradient was changed.
        """
        failure = Unknown(str(operation), reason, is_read)
        self.failure = self.failure or failure
        if not is_read:
            self.altered = self.altered or failure
        return failure

    # -- what a layer reads itself -----------------------------------------------------------------

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Begin to treat parameters as public; the call of their layer gives their gradients."""
        self._covered.update(map(id, parameters))
        self._interiors.append([])

    def uncover(self, parameters: Iterable[Tensor], outputs: Sequence[Tensor]) -> None:
        """End to treat parameters as public.

        Args:
            parameters: as of `cover`.
            outputs: of the call. What else was computed in it depends on the parameters in a way
                that the call does not show.
        """
        self._covered.difference_update(map(id, parameters))
        interior = self._states.keys() & self._interiors.pop()
        for key in interior.difference(map(id, outputs)):
            # A tensor may be freed meanwhile.
            state = self._states.get(key)
            if state is not None:
                self._states[key] = _OUTSIDE_OF_LAYER.get(type(state), state)

    def pause(self) -> None:
        """Stop following operations, inside a module whose outputs the caller declares."""
        self._paused += 1

    def resume(self) -> None:
        """Follow operations again."""
        self._paused -= 1

    # -- modes -------------------------------------------------------------------------------------

    def modes(self) -> tuple[Any, Any]:
        """Return the two modes that follow operations, for a caller who enters and leaves them."""
        return _Dispatch(self), _Functions(self)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow all operations of the body."""
        with _Dispatch(self), _Functions(self):
            yield

    def values_before(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[int, Tensor]:
        """Return copies of public tensors whose memory an operation is about to write.

        Old values can be part of the result: `table[:N].clone().add_(x)` adds the row of the place
        that an example has in the batch.
        """
        if self._paused or not _written_arguments(function):
            return {}
        read = [*tensors_in(args)]
        operands = [*read, *tensors_in((*kwargs.values(),))]
        if not self._is_any_private(operands):
            return {}
        targets = [*tensors_in((kwargs.get("out"),))]
        if str(function.overloadpacket.__name__).endswith("_"):
            targets += tensors_in(args[:1])
        # The rest of a base stays where a view is written over.
        bases = [x._base for x in targets if x._base is not None]
        if rule_name(function) in _OVERWRITES:
            read = operands[1:]
        memories = set(map(_memory, targets))
        copies = {}
        for x in [*bases, *read]:
            if _memory(x) in memories and self.state(x) is None:
                copies[id(x)] = torch.ops.aten.clone.default(x)
        return copies

    def follow(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        before: Mapping[int, Tensor],
    ) -> None:
        """Take note of one ATen operation that was made, and of what it has changed in place."""
        if self._paused:
            return
        if function is torch.ops.aten.detach.default:
            self._note_alias(output)
        if function is torch.ops.aten.lift_fresh.default and not self._calls:
            why = "a tensor was made of values where no function of torch was called"
            self.set_state(output, Unknown(str(function), why))
            return
        states = self._states_of_operands(args, kwargs)
        if states:
            operation = Operation(
                function,
                rule_name(function),
                args,
                kwargs,
                output,
                self.size,
                self.state,
                self.axis,
                self.trusts_public_rows,
                before,
            )
            self._note(operation, states)
        elif rule_name(function) in _DRAWS and kwargs.get("generator") is None:
            self._note_draw(function, _operands(args, kwargs), output)

    def _states_of_operands(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[type, State]:
        """Return the first state of each kind that the operands have.

        A public operand counts where it has a history of its own.
        """
        states: dict[type, State] = {}
        with torch._C.DisableTorchFunction():
            for x in _operands(args, kwargs):
                state = None if is_lazy(x) else self._state(x)
                if state is None:
                    if type(x) is Tensor and not (x.requires_grad or x._is_view()):
                        continue
                    state = PUBLIC
                states.setdefault(type(state), state)
                if state is PARAMETRIC and id(x) in self._parameters:
                    self.read.add(id(x))
        return states

    def _note_draw(self, function: Any, operands: Iterable[Tensor], x: Tensor) -> None:
        """Give random numbers of the length of the batch to the examples.

        A batch of one draws them too. The numbers must have one distribution, so operands that hold
        means or probabilities may have one value only.
        """
        if not function._schema.name.endswith("_like"):
            for y in operands:
                first = y.flatten()[:1]
                if y is not x and not torch.equal(y, first.expand_as(y)):
                    return
        is_kept = x._is_view() or _memory(x) in self._persistent
        has_place = x.shape[:1] == (self.size,) or x.shape.count(self.size) == 1
        if has_place and not is_kept:
            self.set_state(x, BatchAxis(x.shape.index(self.size)))

    def _note(self, operation: Operation, states: Mapping[type, State]) -> None:
        """Take note of the outputs of an operation, of what it reads and of what it writes."""
        is_private = not states.keys().isdisjoint(_PRIVATE)
        answer = self._states_of_outputs(operation, states)
        if is_private:
            self._note_reads(operation)
        # An operation of several forms may have fewer outputs than its rule has answers.
        for x, state in zip(operation.outputs, answer, strict=False):
            if state is None:
                continue
            if _written_arguments(operation.function):
                self._write(operation, x, state)
            else:
                self.set_state(x, state)
        if is_private:
            self._write_into_operands(operation)
        elif not operation.outputs:
            # FSDP2 gathers parameters into keyword arguments, which stay parameters.
            self._write_into_operands(replace(operation, kwargs={}))

    def _states_of_outputs(
        self, operation: Operation, states: Mapping[type, State]
    ) -> Sequence[State | None]:
        """Return the states of the outputs, from the first state of each kind of the operands."""
        function = operation.function
        if Unknown in states:
            answer: Any = states[Unknown]
        elif states.keys().isdisjoint((BatchAxis, Total)):
            answer = states.get(Parametric, PUBLIC)
        elif Parametric in states:
            shapes = names_of_shapes(operation.tensors)
            why = f"a trainable parameter is used outside its layer (shapes {shapes})"
            answer = Unknown(str(function), why)
        else:
            answer = self._apply(operation, Total in states)
        count = len(operation.outputs)
        if not isinstance(answer, (list, tuple)):
            return [answer] * count
        if len(answer) < count:
            return [Unknown(str(function), "its batch rule gives too few states")] * count
        return answer

    def _note_reads(self, operation: Operation) -> None:
        """Note an operation on the examples that shows values of them to the program."""
        function, name = operation.function, operation.name
        is_dynamic = torch.Tag.dynamic_output_shape in function.tags
        has_private_shape = is_dynamic or _HAVE_OTHER_SHAPES.search(name) is not None
        if name == "index":
            has_private_shape = self._is_any_private(
                filter(_is_mask, tensors_in(operation.args[1]))
            )
        if has_private_shape:
            self.fail(function, "the shape of a tensor depends on the examples", is_read=True)
        if name in _READS and not _is_harmless():
            why = "the program reads a value that depends on the examples"
            self.fail(function, why, is_read=True)

    def _is_any_private(self, values: Iterable[Any]) -> bool:
        """Return whether a tensor among some values depends on the examples."""
        states = map(self.state, tensors_in(values))
        return any(isinstance(state, _PRIVATE) for state in states)

    def _has_numbers(self, values: Sequence[Any]) -> bool:
        """Return whether tensors of the examples lie inside lists from which a tensor is made."""
        return self._is_any_private(x for x in values if not isinstance(x, Tensor))

    def _write_into_operands(self, operation: Operation) -> None:
        """Take note of operands that an operation writes into without returning them."""
        names = _written_arguments(operation.function)
        if operation.name in _MEETS_RUNNING_STATISTICS and operation.argument("training"):
            names = ["running_mean", "running_var"]
        if not names:
            return
        returned = set(map(id, operation.outputs))
        written = Unknown(str(operation.function), "it writes into its operands")
        for x in tensors_in(map(operation.argument, names)):
            if id(x) not in returned:
                self._write(operation, x, written)

    def _apply(self, operation: Operation, has_total: bool) -> Any:
        name = operation.name
        rule = TOTAL_RULES.get(name)
        why = "a sum over the examples is used here"
        if not has_total:
            rule = RULES.get(name)
            why = "no batch rule is registered for it"
            if torch.Tag.pointwise in operation.function.tags:
                rule = pointwise
        if operation.kwargs.get("generator") is not None:
            # Numbers of a known seed belong to places. The system seeds the generators of torch.
            rule = None
            why = "it draws from a generator of the program, whose numbers may be known"
        if rule is None:
            return operation.lost(why)
        try:
            return rule(operation)
        except LostExamples as error:
            return error.state
        # A run must not stop where a rule meets operands that it does not expect.
        except Exception as error:
            return operation.lost(f"its batch rule failed: {error!r:.60}")

    def _write(self, operation: Operation, x: Tensor, state: State) -> None:
        """Set the state of a tensor that was written into, and of the tensor that it views."""
        if isinstance(state, _PRIVATE):
            state = self._check_target(operation.function, x, state)
        whole, state_of_whole = x, state
        if x._base is not None:
            whole, state_of_whole = x._base, self._state_of_base(operation, x, state)
        if isinstance(state_of_whole, Unknown):
            # Other views of it show the same memory.
            self._rewritten[id(whole)] = state_of_whole
        self.set_state(whole, state_of_whole)
        self.set_state(x, state)

    def _check_target(self, function: Any, x: Tensor, state: State) -> State:
        """Note where more than x shows the examples that were written into it.

        Returns:
            The state of x, which is unknown where it outlives the pass.
        """
        memory = _memory(x)
        if memory in self._persistent:
            why = "the examples are written into a tensor that outlives the pass"
            state = self.fail(function, why)
        is_of_batch = x.layout is not torch.strided or self.axis(x) is not None
        checks = (
            (
                not is_of_batch and not x.untyped_storage().resizable(),
                "the examples are written into memory that an array may share",
            ),
            (
                memory in self._aliases.values(),
                "the examples are written into memory that .data or .detach() shares",
            ),
            (
                x.is_inference(),
                "the examples are written in inference mode, in which views are not known",
            ),
        )
        for applies, why in checks:
            if applies:
                self.fail(function, why)
        return state

    def _state_of_base(self, operation: Operation, view: Tensor, state: State) -> State:
        """Return the state of a tensor after a view of it was written.

        Args:
            operation: what wrote.
            view: the view.
            state: of the view.
        """
        base: Any = view._base
        known = self._states.get(id(base))
        if isinstance(known, Unknown):
            return known
        if not isinstance(state, BatchAxis):
            return state
        moved = _same_memory(state, view, base, self.size)
        if moved is None or known not in (None, PUBLIC, moved):
            why = "the examples are written into a part of a tensor that cannot be followed"
            return Unknown(str(operation.function), why)
        was_public = id(base) in operation.before
        if was_public and not _is_shared(operation, base, moved):
            why = "the examples are written beside entries of their places"
            return Unknown(str(operation.function), why)
        return moved


def is_known_private(x: Tensor) -> bool:
    """Return whether the tracker of the last batch has seen a tensor that depends on examples."""
    tracker = Tracker._of_last_batch
    return tracker is not None and isinstance(tracker.state(x), _PRIVATE)


@contextmanager
def forget_batches() -> Iterator[None]:
    """Forget after the body which tensors its batches have left: they hold public rows."""
    before = Tracker._of_last_batch
    try:
        yield
    finally:
        Tracker._of_last_batch = before


@cache
def _written_arguments(function: Any) -> list[str]:
    """Return the names of the arguments that an operation writes into."""
    arguments = function._schema.arguments
    return [x.name for x in arguments if getattr(x.alias_info, "is_write", False)]


class _Mode:
    """What the two modes of a tracker hold; one that is off shows nothing."""

    is_on = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def _note_error(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note an error: the program may catch it, and go on in another way for all examples."""
        tracker = self._tracker
        if self.is_on and tracker._is_any_private((*args, *kwargs.values())):
            name = getattr(function, "__name__", function)
            why = "it raises an error, which the values of an example may decide"
            tracker.fail(name, why, is_read=True)


class _Dispatch(_Mode, TorchDispatchMode):
    """Show every ATen operation to a tracker."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and follow it."""
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            before = self._tracker.values_before(func, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except Exception:
            self._note_error(func, args, kwargs)
            raise
        if func in _UNFILLED:
            torch.ops.aten.zero_.default(output)
        with torch._C.DisableTorchFunction():
            self._tracker.follow(func, args, kwargs, output, before)
        return output


class _Functions(_Mode, TorchFunctionMode):
    """Show what Python code calls to a tracker."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        self._tracker._calls += 1
        try:
            return self._call(func, args, kwargs)
        except Exception:
            self._note_error(func, args, kwargs)
            raise
        finally:
            self._tracker._calls -= 1

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracker = self._tracker
        if tracker._paused or not self.is_on:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            name = f"{attribute}.{name}"
        self._check(name, args, kwargs)
        if name == "one_hot" and _number_of_classes(args, kwargs) > 0:
            return _call_one_hot(func, args, kwargs)
        call = tracker.call
        if call is None or not torch.is_grad_enabled():
            result = func(*args, **kwargs)
        else:
            result = call(func, args, kwargs)
        note = _NOTES_OF_RESULTS.get(name)
        if note is not None:
            note(tracker, name, [*args, *kwargs.values()], result)
        return result

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a call that moves values, or changes gradients, where no operation is seen."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and not _is_of_torch(getattr(hooks[0], "__module__", "")):
            why = "a hook may change what the backward pass reads"
            self._tracker.fail("saved_tensors_hooks", why)
        check = _CHECKS_OF_CALLS.get(name)
        if check is not None:
            check(self._tracker, name, [*args, *kwargs.values()])


def _check_values(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker._is_any_private(values) and not _is_harmless():
        why = "values that depend on the examples leave torch"
        tracker.fail(f"Tensor.{name}", why, is_read=name not in _WRITES_VALUES)


def _check_lists(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    given = values[1:]
    # A tuple of indices holds tensors, which are followed; a tuple of numbers becomes a tensor.
    if name != "new" and type(values[1]) is tuple:
        given = values[1]
    if tracker._has_numbers(given):
        why = "a list of values that depend on the examples becomes a tensor"
        tracker.fail(f"Tensor.{name}", why)


def _check_hook(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    # The hooks of FSDP2 gather parameters and return the gradient as it is.
    if tracker._is_any_private(values):
        if not str(values[1].__module__).startswith("torch.distributed.fsdp."):
            why = "a hook may change the gradients of the examples"
            tracker.fail("Tensor.register_hook", why)


def _check_graph(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker._is_any_private(values):
        frames = walk_stack(sys._getframe(1))
        callers = (frame.f_globals.get("__name__", "") for frame, _ in frames)
        if not _is_of_torch(next(x for x in callers if x not in _PASS_ON_GRADIENTS)):
            why = "a hook may change the gradients of the examples"
            tracker.fail("Tensor.grad_fn", why)


def _check_data(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker._is_any_private(values[1:]):
        tracker.fail("Tensor.data", "the examples are written into a tensor by .data")


def _note_data(tracker: Tracker, name: str, values: Sequence[Any], result: Tensor) -> None:
    tracker.set_state(result, tracker.state(values[0]))
    tracker._note_alias(result)


def _note_created(tracker: Tracker, name: str, values: Sequence[Any], result: Tensor) -> None:
    if tracker.is_opaque or tracker._has_numbers(values):
        tracker.set_state(result, Unknown(f"torch.{name}", "a tensor was made of single values"))


_NOTES_OF_RESULTS = {"data.__get__": _note_data, **dict.fromkeys(_CREATES, _note_created)}
# By name, a call that is checked before it is made.
_CHECKS_OF_CALLS: dict[str, Callable[[Tracker, str, Sequence[Any]], None]] = {
    **dict.fromkeys(_LEAVES_TORCH, _check_values),
    **dict.fromkeys(("__getitem__", "__setitem__", "new"), _check_lists),
    "register_hook": _check_hook,
    "grad_fn.__get__": _check_graph,
    "data.__set__": _check_data,
}


def _is_of_torch(module: str) -> bool:
    """Return whether a Python module belongs to torch, or to this library."""
    return module.partition(".")[0] in ("torch", "dpkfc")


def _call_one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `one_hot` with a number of classes; it reads values only to check them."""
    return func(*args, **kwargs)


def _number_of_classes(args: Any, kwargs: Any) -> int:
    if len(args) > 1:
        return int(args[1])
    return int(kwargs.get("num_classes", -1))


def _memory(x: Tensor) -> int:
    """Return a number that is the same for all tensors that share their memory."""
    if x.layout is torch.strided:
        return int(x.untyped_storage()._cdata)
    return id(x)


def _is_harmless() -> bool:
    """Return whether a listed function reads the value; its branches give one result."""
    for frame, _ in walk_stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_name) in _HARMLESS_READS:
            return True
        # a user's function reads what it wants
        if not (_is_of_torch(module) or module.startswith("transformers.")):
            return False
    return False


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among some arguments, but for those in lists of keyword arguments."""
    yield from tensors_in(args)
    for x in kwargs.values():
        if isinstance(x, Tensor):
            yield x


def _same_memory(axis: BatchAxis, one: Tensor, other: Tensor, size: int) -> BatchAxis | None:
    """Return where the axis of a tensor lies in another that shares its memory, else None."""
    begin = min(one.storage_offset(), other.storage_offset())
    step = one.stride(axis.dim) * axis.post
    for dim, length in enumerate(other.shape):
        stride = other.stride(dim)
        if stride == 0:
            continue
        post, rest = divmod(step, stride)
        if rest == 0 and post >= 1 and length % (size * post) == 0:
            found = BatchAxis(dim, length // (size * post), post)
            blocks = (one, axis), (other, found)
            if all(_has_own_blocks(x, own, size, int(begin)) for x, own in blocks):
                return found
    return None


def _has_own_blocks(x: Tensor, axis: BatchAxis, size: int, begin: int) -> bool:
    """Return whether example i lies in every N-th block of the memory from `begin` on, from i."""
    stride = x.stride(axis.dim)
    block = stride * axis.post
    last = (x.storage_offset() - begin) % (size * block) + block - stride
    for dim, length in enumerate(x.shape):
        if dim != axis.dim and x.stride(dim) % (size * block):
            last += (length - 1) * x.stride(dim)
    return last < block
