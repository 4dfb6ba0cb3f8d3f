"""Parameters and shared tensors that meet the examples: class tokens, positions, tied weights.

A tensor that all examples share has one gradient for the whole batch. Its gradient for each example
appears where it meets a batched tensor. There the tape hands on a view with one row an example. The
values are the same, and the backward pass brings every example its own gradient. From there it is
pulled back through the public part of the graph.

None of this is part of the proof. A use that is not followed here leaves its parameter as it is.
The tracker then sees that it meets the examples outside of a layer, and the gradients are computed
one example at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpkfc.gradients.layers import name_arguments
from dpkfc.linalg.blocks import Lookup
from dpkfc.memory import is_out_of_memory
from dpkfc.tracking import PARAMETRIC, BatchAxis, Tracker, example_first, tensors_in

_ELEMENTWISE = frozenset(
    (
        "add iadd radd sub isub rsub subtract mul imul rmul multiply div idiv rdiv truediv "
        "itruediv rtruediv divide true_divide where maximum minimum pow lerp addcmul"
    ).split()
)
_BATCHED_PRODUCTS = frozenset("matmul imatmul rmatmul bmm scaled_dot_product_attention".split())
_SPREADING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave".split())
_TRANSPOSING = frozenset("t T mT transpose swapaxes permute".split())


@dataclass(frozen=True)
class Meeting:
    """A place where a shared tensor got a row for each example.

    Attributes:
        source: the shared tensor.
        axis: the batch axis of the view that was handed on.
        shape: of that view.
        edge: where the gradients of the view arrive.
    """

    source: Tensor
    axis: BatchAxis
    shape: torch.Size
    edge: GradientEdge

    def gradients(self, gradient: Tensor, size: int) -> Tensor:
        """Return gradients `[N, *source.shape]` from the gradient of the view."""
        axis = self.axis
        rows = example_first(gradient, axis, size)
        if axis.extra_dims:
            first = axis.dim + 1
            copies = range(first, first + axis.extra_dims)
            rows = rows.sum(dim=[*copies])
        return rows.reshape(size, *self.source.shape)


@dataclass(frozen=True)
class WeightUse:
    """A trainable matrix that a function read itself.

    The function is `F.linear(x, weight)` or `F.embedding(ids, weight)`.

    Attributes:
        name: of the weight in the model.
        bias: name of the bias that was added with it, or "".
        input: features or ids, detached.
        axis: the batch axis of the input.
        output_axis: the batch axis of the output.
        edge: where the gradients of the output arrive.
        padding: row whose gradient is left out, or None.
        crosswise: the weight lies as `[d_in, d_out]`, or is a vector `[d_in]`.
    """

    name: str
    bias: str
    input: Tensor
    axis: BatchAxis
    output_axis: BatchAxis
    edge: GradientEdge
    padding: int | None = None
    crosswise: bool = False

    @property
    def is_lookup(self) -> bool:
        """Return whether the input holds row numbers of a table."""
        return not self.input.is_floating_point()

    def gradients(self, gradient: Tensor, size: int, rows: int) -> dict[str, Tensor]:
        """Return name to gradients `[N, *parameter.shape]`; `rows` is the length of a table."""
        b = example_first(gradient, self.output_axis, size)
        a = example_first(self.input, self.axis, size)
        if self.is_lookup:
            ids = a.reshape(size, -1).long()
            b = b.reshape(size, ids.shape[1], -1)
            lookup = Lookup(ids, b, rows).drop_row(self.padding)
            return {self.name: lookup.per_example()}
        a = a.reshape(size, -1, a.shape[-1])
        b = b.reshape(size, a.shape[1], -1)
        a = a.to(b.dtype)
        product = torch.bmm(a.mT, b) if self.crosswise else torch.bmm(b.mT, a)
        gradients = {self.name: product}
        if self.bias:
            gradients[self.bias] = b.sum(1)
        return gradients


@dataclass
class SharedUses:
    """Notes the meetings and weight uses of one forward pass, through the hooks of a tracker.

    Attributes:
        tracker: of the pass.
        names: id of a trainable parameter to its name.
        meetings: found so far.
        weights: found so far.
    """

    tracker: Tracker
    names: Mapping[int, str]
    meetings: list[Meeting] = field(default_factory=list)
    weights: list[WeightUse] = field(default_factory=list)
    _transposed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _open: WeightUse | None = None

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, with one row per example in place of a shared tensor."""
        name = _name(function)
        states = [self.tracker.state(x) for x in tensors_in((*args, *kwargs.values()))]
        if PARAMETRIC not in states:
            return function(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # Inside a checkpoint the pass is repeated without this.
            return function(*args, **kwargs)
        if name in _SPREADING:
            return self._spread(function, args, kwargs)
        if name in ("linear", "embedding", "matmul", "rmatmul"):
            used = self._weight(function, name, args, kwargs)
            if used is not None:
                return used
        if name in _TRANSPOSING:
            result = function(*args, **kwargs)
            self._note_transpose(args[0], result)
            return result
        if name in _ELEMENTWISE:
            args, kwargs = self._expand_rows(args, kwargs, 0)
        elif name in _BATCHED_PRODUCTS:
            args, kwargs = self._expand_rows(args, kwargs, 2)
        return function(*args, **kwargs)

    def _spread(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `expand`, `repeat` or a relative, and note a meeting with the examples.

        It is one where a single dimension grows from 1 to N.
        """
        source = args[0]
        result = function(*args, **kwargs)
        if self.tracker.state(source) is not PARAMETRIC or result.grad_fn is None:
            return result
        if result.dim() < source.dim():
            # It is flattened: its first axis holds entries of the parameter.
            return result
        before = _broadcast_shape(source, result.dim())
        changed = [dim for dim, length in enumerate(before) if length != result.shape[dim]]
        if len(changed) != 1:
            return result
        dim = changed[0]
        if before[dim] == 1 and result.shape[dim] == self.tracker.size:
            self._add(source, result, BatchAxis(dim))
        return result

    def _add(self, source: Tensor, rows: Tensor, axis: BatchAxis) -> None:
        """Note that `rows` shows `source` to every example.

        Without a graph there is no gradient to bring back.
        """
        self.tracker.set_state(rows, axis)
        if rows.requires_grad:
            edge = get_gradient_edge(rows)
            self.meetings.append(Meeting(source, axis, rows.shape, edge))

    def _expand_rows(self, args: Any, kwargs: Any, trailing: int) -> tuple[Any, Any]:
        """Return the arguments with shared tensors expanded along the batch axis.

        The `trailing` dimensions do not broadcast.
        """
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        rank = max((x.dim() for x in tensors), default=0)
        axes = set()
        for x in tensors:
            own = self.tracker.axis(x)
            if own is not None:
                axes.add(own.shifted(rank - x.dim()))
        if len(axes) != 1:
            return args, kwargs
        axis = axes.pop()
        if axis.dim >= rank - trailing:
            return args, kwargs

        def rows_of(x: Any) -> Any:
            if not isinstance(x, Tensor) or self.tracker.state(x) is not PARAMETRIC:
                return x
            shape = _broadcast_shape(x, rank)
            if shape[axis.dim] != 1 or x.dim() < trailing:
                return x
            wide = list(shape)
            wide[axis.dim] = axis.length(self.tracker.size)
            rows = x.reshape(shape).expand(wide)
            self._add(x, rows, axis)
            return rows

        positional = tuple(rows_of(x) for x in args)
        return positional, {key: rows_of(x) for key, x in kwargs.items()}

    def _note_transpose(self, source: Any, result: Any) -> None:
        if not isinstance(source, Tensor) or not isinstance(result, Tensor):
            return
        is_matrix = id(source) in self.names and source.dim() == 2
        if is_matrix and result.shape == source.T.shape:
            self._transposed[id(result)] = (result, source)

    def _weight(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a product or a lookup with a trainable matrix and note it, or return None."""
        product = self._product(name, args, kwargs)
        if product is None:
            return None
        x, weight, bias = product.input, product.weight, product.bias
        axis = self.tracker.axis(x)
        read = [p for p in (weight, bias) if p is not None and self.tracker.state(p) is not None]
        if axis is None or any(id(p) not in self.names for p in (weight, *read)):
            return None
        if name != "embedding" and axis.dim >= x.dim() - 1:
            return None

        def name_of(p: Tensor | None) -> str:
            return self.names[id(p)] if any(p is other for other in read) else ""

        covered = [weight, *read, *product.given]
        outputs = list[Tensor]()
        self.tracker.cover(covered)
        try:
            result = function(*args, **kwargs)
            outputs.append(result)
        finally:
            self.tracker.uncover(covered, outputs)
        output_axis = self.tracker.axis(result)
        if output_axis is None or result.grad_fn is None:
            self.tracker.fail(name, "a trainable matrix is used outside its layer")
            return result
        use = WeightUse(
            name=name_of(weight),
            bias=name_of(bias),
            input=x.detach(),
            axis=axis,
            output_axis=output_axis,
            edge=get_gradient_edge(result),
            padding=product.padding,
            crosswise=product.crosswise,
        )
        self.weights.append(use)
        return result

    def _product(self, name: str, args: Any, kwargs: Any) -> _Product | None:
        """Return what a function is asked to multiply or look up, None where no rule is known."""
        if name == "embedding":
            given = name_arguments(("input", "weight", "padding_idx"), args, kwargs)
            if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
                return None
            return _Product(given["input"], given["weight"], padding=given.get("padding_idx"))
        if name == "linear":
            given = name_arguments(("input", "weight", "bias"), args, kwargs)
            return _Product(given["input"], given["weight"], given.get("bias"))
        x, matrix = args[:2] if name == "matmul" else args[1::-1]
        transposed = self._transposed.get(id(matrix))
        weight = matrix if transposed is None else transposed[1]
        if not isinstance(x, Tensor) or weight.dim() > 2:
            return None
        return _Product(x, weight, given=(matrix,), crosswise=transposed is None)


@dataclass(frozen=True)
class _Product:
    """Features times a matrix, or ids in a table.

    Attributes:
        input: features or ids.
        weight: the matrix or table.
        bias: what is added, or None.
        padding, crosswise: as of `WeightUse`.
        given: the tensor that the function was given in the place of the matrix.
    """

    input: Any
    weight: Any
    bias: Any = None
    padding: int | None = None
    crosswise: bool = False
    given: tuple[Tensor, ...] = ()


def _broadcast_shape(x: Tensor, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor with leading ones, so that it has `rank` dimensions."""
    return (1,) * (rank - x.dim()) + tuple(x.shape)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "").strip("_")
    if name == "get":
        return str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return name


def pulled_back(
    pairs: Sequence[tuple[Meeting, Tensor]], targets: Sequence[GradientEdge | Tensor], size: int
) -> Sequence[Tensor | None]:
    """Return the gradients of every example at public places of the graph.

    Args:
        pairs: meetings, with the gradients of their views.
        targets: outputs of layers that read a public input, and parameters.
        size: examples N.

    Returns:
        For each target `[N, ...]` of its shape, None where no meeting depends on it.
    """
    if not pairs or not targets:
        return [None] * len(targets)
    sources = []
    rows = []
    for meeting, gradient in pairs:
        sources.append(meeting.source)
        rows.append(meeting.gradients(gradient, size).to(meeting.source.dtype))
    grad = partial(
        torch.autograd.grad, sources, list(targets), retain_graph=True, allow_unused=True
    )
    try:
        return grad(rows, is_grads_batched=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
    # One of the operations has no batching rule.
    examples = [grad([g[i] for g in rows]) for i in range(size)]
    columns = zip(*examples, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]
