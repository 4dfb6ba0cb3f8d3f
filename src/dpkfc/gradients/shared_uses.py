"""Parameters and shared tensors that meet the examples: class tokens, positions, tied weights.

A tensor that all examples share has one gradient for the whole batch. Its gradient for each
example appears where it meets a batched tensor. There the tape hands on a view with one row an
example. The values are the same, and the backward pass brings every example its own gradient.
From there it is pulled back through the public part of the graph.

None of this is part of the proof. A use that is not followed here leaves its parameter as it is.
The tracker then sees that it meets the examples outside of a layer, and the gradients are
computed one example at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dpkfc.gradients.autograd_graph import pull_rows
from dpkfc.gradients.full_precision import same_autocast
from dpkfc.gradients.layers import name_arguments, tensors_of
from dpkfc.gradients.repeated_use import RepeatedUse
from dpkfc.linalg.blocks import Lookup
from dpkfc.tensors import Tensors
from dpkfc.tracking.batch_rules import are_places_equal, split_names
from dpkfc.tracking.states import PARAMETRIC, BatchAxis, example_first
from dpkfc.tracking.tracker import Tracker

_ELEMENTWISE = split_names(
    "add iadd radd sub isub rsub subtract mul imul rmul multiply div idiv rdiv truediv "
    "itruediv rtruediv divide true_divide where maximum minimum pow lerp addcmul addcdiv "
    "clamp clip cosine_similarity pairwise_distance hypot atan2 logaddexp remainder vecdot "
    "mse_loss l1_loss smooth_l1_loss huber_loss"
)
_BATCHED_PRODUCTS = split_names("matmul imatmul rmatmul bmm scaled_dot_product_attention cdist")
_LOOKUPS = split_names("getitem index_select")
_WEIGHT_USES = _LOOKUPS | split_names("linear embedding matmul mm rmatmul")
# Functions that are repeated for each example; the first ones read a table.
_SELECTING = split_names("getitem gather take_along_dim")
_REPEATED = _SELECTING | split_names(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm "
    "instance_norm batch_norm rms_norm prelu cdist addmm baddbmm mv inner tensordot"
)
_SPREADING = split_names("expand expand_as broadcast_to repeat tile repeat_interleave")
# How many trailing dimensions do not broadcast.
_TRAILING = {**dict.fromkeys(_ELEMENTWISE, 0), **dict.fromkeys(_BATCHED_PRODUCTS, 2)}
# Entries of an indexed table, a computed matrix or an operand of einsum that get a row an example.
_SMALL = 1 << 16
_EINSUM = re.compile("[a-zA-Z]+(,[a-zA-Z]+)*->[a-zA-Z]*")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_TRANSPOSING = split_names("t T mT transpose swapaxes permute")


def sum_copies(gradient: Tensor, axis: BatchAxis, size: int, shape: Sequence[int]) -> Tensor:
    """Return gradients `[N, *shape]` of a tensor from the gradient of a view with its copies."""
    rows = example_first(gradient, axis, size)
    if axis.extra_dims:
        first = axis.dim + 1
        rows = rows.sum([*range(first, first + axis.extra_dims)])
    return rows.reshape(size, *shape)


def expand_rows(x: Tensor, rank: int, dim: int, length: int) -> Tensor:
    """Return a view of a tensor with a row for each example, as broadcasting would show it.

    Args:
        x: the tensor, of length 1 along the dimension or without it.
        rank: dimensions of the result.
        dim: where the examples lie.
        length: of that dimension.
    """
    shape = _broadcast_shape(x, rank)
    wide = list(shape)
    wide[dim] = length
    return x.reshape(shape).expand(wide)


def _broadcast_shape(x: Tensor, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor with leading ones, so that it has `rank` dimensions."""
    missing = rank - x.dim()
    return (*[1] * missing, *x.shape)


@dataclass(frozen=True)
class SharedTensorUse:
    """A place where a shared tensor got a row for each example.

    Attributes:
        source: the shared tensor.
        axis: the batch axis of the view that was handed on.
        edge: where the gradients of the view arrive.
    """

    source: Tensor
    axis: BatchAxis
    edge: GradientEdge

    def gradients(self, gradient: Tensor, size: int) -> Tensor:
        """Return gradients `[N, *source.shape]` from the gradient of the view."""
        return sum_copies(gradient, self.axis, size, self.source.shape)


@dataclass(frozen=True)
class _Product:
    """Features times a matrix, or ids in a table.

    Attributes:
        input: features or ids.
        weight: the matrix or table.
        bias: what is added, or None.
        padding: row whose gradient is left out, or None.
        crosswise: the weight lies as `[d_in, d_out]`, or is a vector `[d_in]`.
        given: the tensor that the function was given in the place of the matrix.
    """

    input: Any
    weight: Any
    bias: Any = None
    padding: int | None = None
    crosswise: bool = False
    given: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class WeightUse:
    """A trainable matrix that a function read itself.

    The function is `F.linear(x, weight)`, `F.embedding(ids, weight)` or `weight[ids]`.

    Attributes:
        product: what the function computed, its input detached.
        names: id of the weight and of the bias to its name in the model. Those that a layer covers
            or that were computed are absent.
        axis: the batch axis of the input.
        output_axis: the batch axis of the output.
        edge: where the gradients of the output arrive.
    """

    product: _Product
    names: Mapping[int, str]
    axis: BatchAxis
    output_axis: BatchAxis
    edge: GradientEdge

    def gradients(self, gradient: Tensor, size: int) -> Tensors:
        """Return name to gradients `[N, *parameter.shape]`."""
        product = self.product
        b = example_first(gradient, self.output_axis, size)
        a = example_first(product.input, self.axis, size)
        if a.is_floating_point():
            a = a.reshape(size, -1, a.shape[-1])
            b = b.reshape(size, a.shape[1], -1)
            a = a.to(b.dtype)
            of_weight = a.mT @ b if product.crosswise else b.mT @ a
        else:
            count = len(product.weight)
            b = b.reshape(*a.shape, product.weight.shape[1:].numel())
            lookup = Lookup.build(a % count, b, size, count, product.padding)
            of_weight = lookup.per_example()
        both = ((product.weight, of_weight), (product.bias, b.sum(1)))
        gradients = {}
        for p, g in both:
            if id(p) in self.names:
                gradients[self.names[id(p)]] = g.reshape(size, *p.shape)
        return gradients


@dataclass(frozen=True)
class ComputedWeightUse:
    """A tensor that was computed from parameters alone, and read as one of the other uses is.

    Attributes:
        source: the tensor.
        use: where it was read; it has the name "" there.
    """

    source: Tensor
    use: WeightUse | RepeatedUse

    @property
    def edge(self) -> GradientEdge:
        """Return where the gradients of the output arrive."""
        return self.use.edge

    def gradients(self, gradient: Tensor, size: int) -> Tensor:
        """Return gradients `[N, *source.shape]` from the gradient of the output."""
        return self.use.gradients(gradient, size)[""]


Meeting = SharedTensorUse | ComputedWeightUse


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
    weights: list[WeightUse | RepeatedUse] = field(default_factory=list)
    _transposed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, with one row per example in place of a shared tensor."""
        if PARAMETRIC not in self.tracker.states((*args, *kwargs.values())):
            return function(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # Inside a checkpoint the pass is repeated without this.
            return function(*args, **kwargs)
        name = _name_of(function)
        if name in _SPREADING:
            return self._spread(function, args, kwargs)
        if name in _TRANSPOSING:
            return self._transpose(function, args, kwargs)
        if name in _WEIGHT_USES:
            used = self._weight(function, name, args, kwargs)
            if used is not None:
                return used
        if name in _TRAILING:
            args, kwargs = self._expand_rows(args, kwargs, _TRAILING[name])
        if name == "einsum":
            args = self._expand_einsum(*args)
        if name in _REPEATED:
            used = self._repeat(function, name, args, kwargs)
            if used is not None:
                return used
        return function(*args, **kwargs)

    def _transpose(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `permute` or a relative, and note which trainable matrix it has transposed."""
        result = function(*args, **kwargs)
        source = args[0]
        if id(source) in self.names and source.dim() == 2:
            expected = source.T
            # A permutation may leave a square matrix as it is.
            if (result.shape, result.stride()) == (expected.shape, expected.stride()):
                self._transposed[id(result)] = (result, source)
        return result

    def _spread(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `expand`, `repeat` or a relative, and note a meeting with the examples.

        It is one where a single dimension grows from 1 to N, or is repeated N times.
        """
        source = args[0]
        result = function(*args, **kwargs)
        if self.tracker.state(source) is not PARAMETRIC or result.grad_fn is None:
            return result
        if result.dim() < source.dim():
            # It is flattened: its first axis holds entries of the parameter.
            return result
        before = _broadcast_shape(source, result.dim())
        grown = [dim for dim, length in enumerate(result.shape) if length != before[dim]]
        if len(grown) == 1:
            (dim,) = grown
            size = self.tracker.size
            if (before[dim], result.shape[dim]) == (1, size):
                self._add(source, result, BatchAxis(dim))
            elif _name_of(function) == "repeat" and result.shape[dim] == before[dim] * size:
                rows = expand_rows(
                    source.reshape(before).unsqueeze(dim), len(before) + 1, dim, size
                )
                self._add(source, rows, BatchAxis(dim))
                return rows.flatten(dim, dim + 1)
        return result

    def _add(self, source: Tensor, rows: Tensor, axis: BatchAxis) -> None:
        """Note that `rows` shows `source` to every example.

        Without a graph nothing can be brought back.
        """
        self.tracker.set_state(rows, axis)
        if rows.requires_grad:
            edge = get_gradient_edge(rows)
            self.meetings.append(SharedTensorUse(source, axis, edge))

    def _expand_rows(self, args: Any, kwargs: Any, trailing: int) -> tuple[Any, Any]:
        """Return the arguments with shared tensors expanded along the batch axis.

        The `trailing` dimensions do not broadcast.
        """
        tensors = tensors_of((args, kwargs))
        rank = max(x.dim() for x in tensors)
        own_axes = [(self.tracker.axis(x), rank - x.dim()) for x in tensors]
        axes = {axis.shift(missing) for axis, missing in own_axes if axis is not None}
        if len(axes) != 1:
            return args, kwargs
        axis = axes.pop()
        if axis.dim >= rank - trailing:
            return args, kwargs

        def expand(x: Tensor) -> Tensor:
            if self.tracker.state(x) is not PARAMETRIC or x.dim() < trailing:
                return x
            if _broadcast_shape(x, rank)[axis.dim] != 1:
                own = axis.shift(x.dim() - rank)
                # A state that began as equal public rows.
                if not self._has_equal_rows(x, own):
                    return x
                x = x.narrow(own.dim, 0, 1)
            rows = expand_rows(x, rank, axis.dim, axis.length(self.tracker.size))
            self._add(x, rows, axis)
            return rows

        return tree_map_only(Tensor, expand, (args, kwargs))

    def _has_equal_rows(self, x: Tensor, axis: BatchAxis) -> bool:
        """Return whether a tensor of parameters has one row for each example, all of them equal."""
        size = self.tracker.size
        is_row = axis.length(1) == 1 and x.shape[axis.dim] == size
        return is_row and are_places_equal(x, axis, size)

    def _expand_einsum(self, equation: Any, *operands: Any) -> tuple[Any, ...]:
        """Return the arguments of `einsum` with one row per example in place of shared tensors."""
        unchanged = (equation, *operands)
        if not isinstance(equation, str) or not _EINSUM.fullmatch(equation.replace(" ", "")):
            return unchanged
        left, right = equation.replace(" ", "").split("->")
        names = left.split(",")
        if len(names) != len(operands):
            return unchanged
        axes = [self.tracker.axis(x) for x in operands]
        pairs = zip(names, axes, strict=True)
        of_examples = {(name[axis.dim], axis.pre, axis.post) for name, axis in pairs if axis}
        if len(of_examples) != 1:
            return unchanged
        letter, *parts = of_examples.pop()
        if parts != [1, 1] or letter not in right:
            return unchanged
        changed = list(operands)
        for i, x in enumerate(operands):
            is_small = x.numel() <= _SMALL
            if is_small and self.tracker.state(x) is PARAMETRIC and letter not in names[i]:
                changed[i] = expand_rows(x, x.dim() + 1, 0, self.tracker.size)
                names[i] = letter + names[i]
                self._add(x, changed[i], BatchAxis(0))
        return f"{','.join(names)}->{right}", *changed

    def _weight(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a product or a lookup with a trainable matrix and note it, or return None."""
        product = self._product(name, args, kwargs)
        if product is None:
            return None
        x, weight = product.input, product.weight
        axis = self.tracker.axis(x)
        both = (weight, product.bias)
        read = [p for p in both if self.tracker.state(p) is PARAMETRIC]
        others = [p for p in both if self.tracker.state(p) is not None]
        if axis is None or not read or len(others) > len(read):
            return None
        computed = [p for p in read if id(p) not in self.names]
        # What is formed for every example.
        formed = read if name in _LOOKUPS else computed
        if sum(p.numel() for p in formed) > _SMALL:
            return None
        if x.is_floating_point() and axis.dim >= x.dim() - 1:
            return None
        result, output_axis = self._call_covered([*read, *product.given], function, args, kwargs)
        if output_axis is None or result.grad_fn is None:
            self.tracker.fail(name, "a trainable matrix is used outside its layer")
            return result
        names = {id(p): self.names[id(p)] for p in read if id(p) in self.names}
        product = replace(product, input=x.detach())
        edge = get_gradient_edge(result)
        self._note_use(WeightUse(product, names, axis, output_axis, edge), computed)
        return result

    def _call_covered(
        self, tensors: Sequence[Tensor], function: Any, args: Any, kwargs: Any
    ) -> tuple[Any, BatchAxis | None]:
        """Call a function with tensors of parameters as public ones; return its axis too."""
        covered = [*tensors, *(p._base for p in tensors if p._base is not None)]
        outputs: list[Tensor] = []
        self.tracker.cover(covered)
        try:
            result = function(*args, **kwargs)
            outputs.append(result)
        finally:
            self.tracker.uncover(covered, outputs)
        return result, self.tracker.axis(result)

    def _note_use(self, use: WeightUse | RepeatedUse, computed: Sequence[Tensor]) -> None:
        """Note a use of parameters, and of tensors that were computed from parameters."""
        if use.names:
            self.weights.append(use)
        for p in computed:
            if p.requires_grad:
                self.meetings.append(ComputedWeightUse(p, replace(use, names={id(p): ""})))

    def _repeat(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that is repeated for each example and note it, or return None."""
        values, spec = tree_flatten((args, kwargs))
        axes: dict[int, BatchAxis] = {}
        own: dict[int, Tensor] = {}
        read: list[Tensor] = []
        for i, x in enumerate(values):
            state = self.tracker.state(x)
            if isinstance(state, BatchAxis):
                axes[i] = state
            elif state is PARAMETRIC:
                read.append(x)
                # Places that are computed from parameters have no gradient.
                if x.requires_grad:
                    own[i] = x
            elif state is not None:
                return None
        if not axes or not read:
            return None
        trained = [*own.values()]
        computed = [p for p in trained if id(p) not in self.names]
        limited = trained if name in _SELECTING else computed
        is_large = sum(p.numel() for p in limited) > _SMALL
        has_twice = len({*map(id, trained)}) < len(trained)
        if is_large or has_twice:
            return None
        batched = [(values[i].detach(), axis) for i, axis in axes.items()]
        result, output_axis = self._call_covered(read, function, args, kwargs)
        if output_axis is None or result.grad_fn is None:
            self.tracker.fail(name, "a trainable parameter is used outside its layer")
            return result
        places = [*axes, *own]
        public = [None if i in places else x for i, x in enumerate(values)]
        autocast = same_autocast(result.device.type)

        def compute(example: Sequence[Tensor], *parameters: Tensor) -> list[Tensor]:
            given = list(public)
            for i, x in zip(places, (*example, *parameters), strict=True):
                given[i] = x
            own_args, own_kwargs = tree_unflatten(given, spec)
            with autocast:
                return [function(*own_args, **own_kwargs)]

        names = {id(p): self.names[id(p)] for p in trained if id(p) in self.names}
        edge = get_gradient_edge(result)
        use = RepeatedUse(compute, trained, batched, names, output_axis, edge)
        self.tracker.pause()
        try:
            fits = use.fits(result, self.tracker.size)
        finally:
            self.tracker.resume()
        if not fits:
            self.tracker.fail(name, "an example alone gives another shape")
            return result
        self._note_use(use, computed)
        return result

    def _product(self, name: str, args: Any, kwargs: Any) -> _Product | None:
        """Return what a function is asked to multiply or look up, None where no rule is known."""
        if name == "embedding":
            given = name_arguments(_EMBEDDING, args, kwargs)
            if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
                return None
            padding = given.get("padding_idx")
            if padding is not None:
                padding %= len(given["weight"])
            return _Product(given["input"], given["weight"], padding=padding)
        if name in _LOOKUPS:
            values = [*args, *kwargs.values()]
            weight, *dim, ids = values
            is_lookup = isinstance(ids, Tensor) and ids.dtype in (torch.long, torch.int)
            # `index_select` also names an axis: the first one holds the rows.
            return _Product(ids, weight) if is_lookup and dim in ([], [0]) else None
        bias = None
        if name == "linear":
            given = name_arguments(("input", "weight", "bias"), args, kwargs)
            x, matrix, bias = given["input"], given["weight"], given.get("bias")
            if bias is not None and bias.shape != matrix.shape[:-1]:
                return None
        elif len(args) < 2:
            return None
        elif name == "rmatmul":
            matrix, x = args[:2]
        else:
            x, matrix = args[:2]
        _, weight = self._transposed.get(id(matrix), (matrix, matrix))
        if not isinstance(x, Tensor) or weight.dim() > 2:
            return None
        crosswise = (weight is matrix) != (name == "linear")
        return _Product(x, weight, bias, given=(matrix,), crosswise=crosswise)


def _name_of(function: Any) -> str:
    """Return the name of a function of torch; for one that reads an attribute, the attribute's."""
    name: str = getattr(function, "__name__", "").strip("_")
    if name == "get":
        attribute = getattr(function, "__self__", None)
        name = getattr(attribute, "__name__", "")
    return name


def pull_back(
    meetings: Sequence[Meeting],
    arrived: dict[Any, Tensor | None],
    targets: Sequence[GradientEdge | Tensor],
    size: int,
) -> Sequence[Tensor | None]:
    """Return the gradients of every example at public places of the graph.

    Args:
        meetings: whose gradients are pulled back.
        arrived: edge to the gradient of the view there, None where none arrived.
        targets: outputs of layers that read a public input, and parameters.
        size: examples N.

    Returns:
        For each target `[N, ...]` of its shape, None where no meeting depends on it.
    """
    sources = []
    rows = []
    for meeting in meetings:
        gradient = arrived[meeting.edge]
        if gradient is not None:
            sources.append(meeting.source)
            rows.append(meeting.gradients(gradient, size).to(meeting.source.dtype))
    return pull_rows(sources, rows, targets, size)
