"""The gradients of every example at the sites of a graph: nodes at which parameters meet examples.

Each kind of operation has a value here. It knows which tensors of a pass it needs, and makes of
them and of the gradients at its output either a block of `linalg` or one gradient a row for each
operand. `plan` chooses for every layer of the model which of the two is used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from dpkfc.graph.capture import Capture, NotCapturedError
from dpkfc.graph.proof import P, Proof, Site
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, raise_precision
from dpkfc.tracking.batch_rules import arguments_of
from dpkfc.tracking.states import BatchAxis, example_first, one_example_a_row

# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor of parameters that is used at a site.

    Attributes:
        node: in the graph.
        parameter: the parameter that it is, None where it is computed from parameters.
        crosswise: it is the transpose of the parameter.
        shape: of the operand.
    """

    node: fx.Node
    parameter: str | None
    crosswise: bool
    shape: tuple[int, ...]

    def orient(self, gradients: Tensor) -> Tensor:
        """Return gradients `[N, ...]` of the parameter from gradients of the operand."""
        return gradients.mT if self.crosswise else gradients


@dataclass(frozen=True)
class Pass:
    """One pass of a graph.

    Attributes:
        tensors: node to its value, of all nodes that the sites need.
        gradients: node to the gradient that has arrived at its output.
        size: examples N.
    """

    tensors: Mapping[fx.Node, Tensor]
    gradients: Mapping[fx.Node, Tensor | None]
    size: int

    def gradient(self, node: fx.Node) -> Tensor:
        """Return the gradient at an output, in full precision."""
        gradient = self.gradients[node]
        assert gradient is not None
        return raise_precision(gradient)


@dataclass(frozen=True)
class Product:
    """A matrix product, features times a matrix or a matrix times features, and an addend.

    Attributes:
        output: where gradients arrive.
        x: the features.
        axis: of the features.
        output_axis: of the output.
        is_left: the features are the first factor.
        weight: the matrix, None where it is not trained.
        bias: the addend, None where it is not trained.
    """

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    output_axis: BatchAxis
    is_left: bool
    weight: Operand | None
    bias: Operand | None

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [self.x] if self.weight is not None else []

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [x for x in (self.weight, self.bias) if x is not None]

    @property
    def is_plain(self) -> bool:
        """Return whether the weight is a parameter `[d_out, d_in]`."""
        weight = self.weight
        return (
            weight is not None
            and weight.parameter is not None
            and (weight.crosswise == self.is_left)
        )

    @property
    def is_transposed(self) -> bool:
        """Return whether the weight is a parameter `[d_in, d_out]`."""
        weight = self.weight
        return (
            weight is not None
            and weight.parameter is not None
            and (weight.crosswise != self.is_left)
        )

    def _rows(self, x: Tensor, axis: BatchAxis, size: int) -> Tensor:
        if not self.is_left:
            x, axis = x.mT, axis.move(1 - axis.dim)
        rows = example_first(x, axis, size)
        return rows.reshape(size, -1, x.shape[-1])

    def outer(self, run: Pass, *, has_bias: bool) -> Outer:
        """Return the block of a layer, whose bias is the addend."""
        b = self._rows(run.gradient(self.output), self.output_axis, run.size)
        if self.weight is None:
            return Outer(torch.ones_like(b[..., :1]), b)
        a = self._rows(run.tensors[self.x], self.axis, run.size).to(b.dtype)
        return Outer(a, b, homogeneous=has_bias)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        if operand is self.weight:
            g = self.outer(run, has_bias=False).per_example()
            return g.mT if self.is_left else g
        b = self._rows(run.gradient(self.output), self.output_axis, run.size)
        return _fold(b.sum(1), operand.shape)


@dataclass(frozen=True)
class Convolution:
    """A convolution; its settings are as in `ConvBlock`."""

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    output_axis: BatchAxis
    weight: Operand | None
    bias: Operand | None
    settings: Mapping[str, Any]

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [self.x]

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [x for x in (self.weight, self.bias) if x is not None]

    def block(self, run: Pass, *, weight: bool, bias: bool) -> ConvBlock:
        """Return the block of a layer."""
        b = example_first(run.gradient(self.output), self.output_axis, run.size)
        b = b.flatten(0, self.output_axis.extra_dims)
        x = example_first(run.tensors[self.x], self.axis, run.size).to(b.dtype)
        x = x.flatten(0, self.axis.extra_dims)
        views = len(b) // run.size
        return ConvBlock(x=x, b=b, weight=weight, bias=bias, views=views, **self.settings)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        is_weight = operand is self.weight
        g = self.block(run, weight=is_weight, bias=not is_weight).per_example()
        return g.reshape(run.size, *operand.shape)


@dataclass(frozen=True)
class Embedding:
    """A lookup in a table."""

    output: fx.Node
    ids: fx.Node
    axis: BatchAxis
    output_axis: BatchAxis
    weight: Operand
    padding: int | None

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [self.ids]

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [self.weight]

    def lookup(self, run: Pass) -> Lookup:
        """Return the block of a layer."""
        ids = example_first(run.tensors[self.ids], self.axis, run.size)
        ids = ids.reshape(run.size, -1).long()
        b = example_first(run.gradient(self.output), self.output_axis, run.size)
        b = b.reshape(run.size, ids.shape[1], -1)
        return Lookup(ids, b, self.weight.shape[0]).drop_row(self.padding)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        return self.lookup(run).per_example().reshape(run.size, *operand.shape)


@dataclass(frozen=True)
class LayerNorm:
    """A normalisation over trailing dimensions."""

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    weight: Operand | None
    bias: Operand | None
    shape: tuple[int, ...]
    eps: float

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [self.x] if self.weight is not None else []

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [x for x in (self.weight, self.bias) if x is not None]

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        b = run.gradient(self.output)
        if operand is self.weight:
            x = run.tensors[self.x].to(b.dtype)
            b = b * F.layer_norm(x, self.shape, eps=self.eps)
        rows = example_first(b, self.axis, run.size)
        return rows.reshape(run.size, -1, *self.shape).sum(1)


@dataclass(frozen=True)
class GroupNorm:
    """A normalisation over groups of channels."""

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    mean: fx.Node
    scale: fx.Node
    weight: Operand | None
    bias: Operand | None

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [self.x, self.mean, self.scale] if self.weight is not None else []

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [x for x in (self.weight, self.bias) if x is not None]

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        b = run.gradient(self.output)
        b = b.flatten(2) if b.dim() > 2 else b.unsqueeze(2)
        if operand is self.weight:
            x = run.tensors[self.x].to(b.dtype).reshape(b.shape)
            mean, scale = (run.tensors[y].to(b.dtype) for y in (self.mean, self.scale))
            x_hat = x.unflatten(1, (mean.shape[1], -1)) - mean[:, :, None, None]
            b = b * (x_hat * scale[:, :, None, None]).flatten(1, 2)
        rows = example_first(b.sum(2), self.axis, run.size)
        return rows.reshape(run.size, -1, b.shape[1]).sum(1)


@dataclass(frozen=True)
class Rows:
    """An operand that has got a row for each example in the graph.

    Attributes:
        output: the operand with these rows.
        axis: of it.
        operand: the operand.
    """

    output: fx.Node
    axis: BatchAxis
    operand: Operand

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return []

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return [self.operand]

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        rows = example_first(run.gradient(self.output), self.axis, run.size)
        if self.axis.extra_dims:
            first = self.axis.dim + 1
            rows = rows.sum([*range(first, first + self.axis.extra_dims)])
        return rows.reshape(run.size, *operand.shape)


@dataclass(frozen=True)
class Other:
    """Any other operation: it is differentiated again for each example, by `torch.vmap`.

    Attributes:
        outputs: where gradients arrive, by the place of the output.
        function: the operation.
        args: its arguments; sizes that grow with the batch are the sizes of one example.
        axes: of the batched operands.
        output_axes: by the place of the output.
        trained: the operands.
    """

    outputs: Mapping[int, fx.Node]
    function: Any
    args: tuple[Any, Any]
    axes: Mapping[fx.Node, BatchAxis]
    output_axes: Mapping[int, BatchAxis]
    trained: Sequence[Operand]
    public: Sequence[fx.Node]

    @property
    def output(self) -> fx.Node:
        """Return the first output."""
        return next(iter(self.outputs.values()))

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [*self.axes, *self.public, *(x.node for x in self.trained)]

    @property
    def operands(self) -> list[Operand]:
        """Return the operands that are trained."""
        return list(self.trained)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        values = [run.tensors[x.node].detach() for x in self.trained]
        rows = [one_example_a_row(run.tensors[x], a, run.size) for x, a in self.axes.items()]
        arrived = {}
        for place, node in self.outputs.items():
            g = run.gradients[node]
            if g is not None:
                arrived[place] = one_example_a_row(g, self.output_axes[place], run.size)

        def differentiate(example: list[Tensor], gradients: list[Tensor]) -> Any:
            def compute(*trained: Tensor) -> list[Tensor]:
                known = {x: run.tensors[x] for x in self.public}
                known |= dict(zip(self.axes, example, strict=True))
                known |= {x.node: y for x, y in zip(self.trained, trained, strict=True)}
                args, kwargs = fx.node.map_arg(self.args, known.__getitem__)
                result = self.function(*args, **kwargs)
                every = result if isinstance(result, (list, tuple)) else [result]
                return [every[place] for place in arrived]

            results, pull, *_ = torch.func.vjp(compute, *values)
            starts = [g.to(y.dtype) for g, y in zip(gradients, results, strict=True)]
            return pull(starts)

        with torch.enable_grad():
            found = torch.vmap(differentiate)(rows, list(arrived.values()))
        place = [x is operand for x in self.trained].index(True)
        return raise_precision(found[place].detach())


AnySite = Product | Convolution | Embedding | LayerNorm | GroupNorm | Rows | Other


def _fold(gradients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return gradients `[N, *shape]` of an addend that was broadcast over `[d_out]`."""
    size = len(gradients)
    if len(shape) == 0 or shape[-1] == 1:
        gradients = gradients.sum(-1)
    return gradients.reshape(size, *shape)


# --------------------------------------------------------------------------------------------------
# From the sites of a proof to these values.


class Planner:
    """Makes the sites of one proof, and notes what the graph has to keep for them.

    Args:
        capture: the graph.
        proof: of it.
    """

    def __init__(self, capture: Capture, proof: Proof) -> None:
        self._proof = proof
        self._names: dict[fx.Node, str] = {}
        placeholders = capture.module.graph.find_nodes(op="placeholder")
        for node, given in zip(placeholders, capture.inputs, strict=True):
            if given.kind == "parameter":
                self._names[node] = given.name
                node.meta["parameter"] = given.name

    def sites(self) -> list[AnySite]:
        """Return the sites."""
        found: list[AnySite] = []
        for site in self._proof.sites:
            found += self._site(site)
        return found

    def _operand(self, node: Any) -> Operand | None:
        """Return an operand, None for a value that depends on no parameter."""
        if node is None or node not in self._trained:
            return None
        shape = tuple(self._proof.values[node].shape)
        source, crosswise = node, False
        while source not in self._names:
            target = str(source.target)
            first = source.args[0] if source.args else None
            same = {"aten._to_copy.default", "aten.alias.default", "aten.clone.default"}
            crosses = {"aten.t.default", "aten.transpose.int", "aten.permute.default"}
            if target in crosses and len(shape) == 2 and self._is_crossed(source):
                crosswise = not crosswise
            elif target not in same:
                return Operand(node, None, False, shape)
            source = first
        return Operand(node, self._names[source], crosswise, shape)

    def _is_crossed(self, node: fx.Node) -> bool:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        x = self._proof.values[source]
        y = self._proof.values[node]
        return (
            x.dim() == 2
            and y.stride() == (x.stride(1), x.stride(0))
            and (y.shape == (x.shape[1], x.shape[0]))
        )

    def _site(self, site: Site) -> list[AnySite]:
        self._trained = set(site.operands)
        results = tree_leaves([self._proof.values[x] for x in (site.node, *site.axes)])
        if any(isinstance(x, Tensor) and x.is_complex() for x in results):
            raise NotCapturedError(str(site.function), "it meets parameters with complex numbers")
        name = site.function.overloadpacket.__name__
        if "batch_norm" in name:
            raise NotCapturedError(str(site.function), "its weights have no rule")
        made: AnySite | None = None
        if name in ("mm", "addmm"):
            made = self._product(site, name)
        elif name == "convolution":
            made = self._convolution(site)
        elif name == "embedding":
            made = self._embedding(site)
        elif name == "native_layer_norm":
            made = self._layer_norm(site)
        elif name == "native_group_norm":
            made = self._group_norm(site)
        elif name == "expand":
            made = self._expanded(site)
        elif site.is_pointwise:
            return self._rows(site)
        return [made or self._other(site)]

    def _product(self, site: Site, name: str) -> Product | None:
        arguments = _named(site)
        addend = arguments.get("input", arguments.get("self")) if name == "addmm" else None
        one, two = site.args[1:3] if name == "addmm" else site.args[:2]
        scales = (arguments.get("alpha", 1), arguments.get("beta", 1))
        both = [one in self._trained, two in self._trained]
        axis = _first(site.outputs)
        if scales != (1, 1) or all(both):
            return None
        is_left = one in site.axes
        x = one if is_left else two
        if x not in site.axes or (one in site.axes) == (two in site.axes):
            return None
        if axis.dim != (0 if is_left else 1) or site.axes[x].dim != axis.dim:
            return None
        bias = self._operand(addend)
        if bias is not None and (not is_left or not _is_row(bias.shape)):
            return None
        weight = self._operand(two if is_left else one)
        return Product(site.node, x, site.axes[x], axis, is_left, weight, bias)

    def _convolution(self, site: Site) -> Convolution | None:
        x, weight, bias, stride, padding, dilation, transposed, _, groups = site.args
        if transposed or x not in site.axes:
            return None
        kernel = tuple(self._proof.values[weight].shape[2:])
        settings = {"kernel": kernel, "groups": groups}
        for key, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
            lengths = tuple(value)
            settings[key] = lengths * len(kernel) if len(lengths) == 1 else lengths
        return Convolution(
            site.node,
            x,
            site.axes[x],
            _first(site.outputs),
            self._operand(weight),
            self._operand(bias),
            settings,
        )

    def _embedding(self, site: Site) -> Embedding | None:
        arguments = _named(site)
        weight = self._operand(arguments["weight"])
        ids = arguments["indices"]
        padding = arguments.get("padding_idx", -1)
        if arguments.get("scale_grad_by_freq", False):
            raise NotCapturedError("aten.embedding.default", "scale_grad_by_freq mixes examples")
        if weight is None or ids not in site.axes:
            return None
        # An index below zero means that no row is padding.
        row = padding if padding >= 0 else None
        axes = site.axes[ids], _first(site.outputs)
        return Embedding(site.node, ids, *axes, weight, row)

    def _layer_norm(self, site: Site) -> LayerNorm | None:
        x, shape, weight, bias, eps = site.args
        if x not in site.axes:
            return None
        output = _output(site.node, 0)
        axis = _first(site.outputs)
        operands = self._operand(weight), self._operand(bias)
        return LayerNorm(output, x, axis, *operands, tuple(shape), eps)

    def _group_norm(self, site: Site) -> GroupNorm | None:
        x, weight, bias, *_ = site.args
        if x not in site.axes or site.axes[x].dim != 0:
            return None
        outputs = [_output(site.node, place) for place in range(3)]
        operands = self._operand(weight), self._operand(bias)
        return GroupNorm(outputs[0], x, site.axes[x], outputs[1], outputs[2], *operands)

    def _expanded(self, site: Site) -> Rows | None:
        operand = self._operand(site.operands[0])
        assert operand is not None
        axis = _first(site.outputs)
        shape = list(self._proof.values[site.node].shape)
        entries = math.prod(shape) // shape[axis.dim]
        # A repetition of other dimensions too, or of several entries, is differentiated again.
        is_alone = entries == math.prod(operand.shape)
        return Rows(site.node, axis, operand) if is_alone else None

    def _rows(self, site: Site) -> list[AnySite]:
        """Give every operand of an elementwise operation a row for each example."""
        graph = site.node.graph
        axis = _first(site.outputs)
        found: list[AnySite] = []
        batched, own = next(iter(site.axes.items()))
        for node in site.operands:
            operand = self._operand(node)
            assert operand is not None
            with graph.inserting_before(site.node):
                length = graph.call_function(torch.ops.aten.sym_size.int, (batched, own.dim))
                rows = graph.call_function(expand_rows, (node, site.rank, axis.dim, length))
            site.node.replace_input_with(node, rows)
            found.append(Rows(rows, axis, operand))
        return found

    def _other(self, site: Site) -> Other:
        values = self._proof.values
        arguments = (list(site.args), dict(site.kwargs))
        inputs = [x for x in site.node.all_input_nodes if isinstance(values[x], Tensor)]
        public = [x for x in inputs if x not in site.axes and x not in site.operands]

        def of_one(x: Any) -> Any:
            if isinstance(x, fx.Node):
                if isinstance(values[x], Tensor):
                    return x
                x = values[x]
            if isinstance(x, int) and not isinstance(x, bool) and x and x % P == 0:
                return x // P
            return x

        args = tree_map(of_one, arguments, is_leaf=lambda x: isinstance(x, fx.Node))
        has_several = isinstance(values[site.node], (list, tuple))
        outputs = {}
        axes = {}
        results = values[site.node] if has_several else [values[site.node]]
        for place, (axis, y) in enumerate(zip(site.outputs, results, strict=False)):
            if axis is not None and y.is_floating_point():
                outputs[place] = _output(site.node, place) if has_several else site.node
                axes[place] = axis
        trained = [x for x in map(self._operand, site.operands) if x is not None]
        return Other(outputs, site.function, args, site.axes, axes, trained, public)


def expand_rows(x: Tensor, rank: int, dim: int, length: int) -> Tensor:
    """Return a tensor with a row for each example, as broadcasting would show it.

    Args:
        x: the tensor, of length 1 along the dimension or without it.
        rank: dimensions of the result.
        dim: where the examples lie.
        length: of that dimension.
    """
    shape = [1] * (rank - x.dim()) + list(x.shape)
    wide = list(shape)
    wide[dim] = length
    return x.reshape(shape).expand(wide)


def _named(site: Site) -> dict[str, Any]:
    names = list(arguments_of(site.function))
    return {**dict(zip(names, site.args, strict=False)), **site.kwargs}


def _first(axes: Sequence[BatchAxis | None]) -> BatchAxis:
    axis = axes[0]
    assert axis is not None
    return axis


def _is_row(shape: tuple[int, ...]) -> bool:
    """Return whether an addend of a product has no rows of its own."""
    return len(shape) < 2 or shape[0] == 1


def _output(node: fx.Node, place: int) -> fx.Node:
    """Return the node of one of several outputs."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    with node.graph.inserting_after(node):
        return node.graph.call_function(operator.getitem, (node, place))
