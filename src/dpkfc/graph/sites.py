"""The gradients of every example at the sites of a graph: nodes at which parameters meet examples.

Each kind of operation has a value here. It knows which tensors of a pass it needs, and makes of
them and of the gradients at its output either a block of `linalg` or one gradient a row for each
operand. `passes.py` chooses for every layer of the model which of the two is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from dpkfc.gradients.repeated_use import differentiate_again
from dpkfc.gradients.shared_uses import sum_copies
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, raise_precision
from dpkfc.tracking.states import BatchAxis, example_first, one_example_a_row


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


class _WeightAndBias:
    """What sites have in common whose operation takes a weight and a bias."""

    x: fx.Node
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


@dataclass(frozen=True)
class Product(_WeightAndBias):
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

    def reads_parameter(self, *, transposed: bool) -> bool:
        """Return whether the weight is a parameter `[d_out, d_in]`, or `[d_in, d_out]`."""
        weight = self.weight
        if weight is None or weight.parameter is None:
            return False
        return (weight.crosswise != self.is_left) == transposed

    def _rows(self, x: Tensor, axis: BatchAxis, size: int) -> Tensor:
        if not self.is_left:
            x, axis = x.mT, axis.move(1 - axis.dim)
        return example_first(x, axis, size)

    def outer(self, run: Pass, *, has_bias: bool) -> Outer:
        """Return the block of a layer, whose bias is the addend."""
        x = None if self.weight is None else self._rows(run.tensors[self.x], self.axis, run.size)
        b = self._rows(run.gradient(self.output), self.output_axis, run.size)
        return Outer.build(x, b, run.size, homogeneous=has_bias)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        outer = self.outer(run, has_bias=False)
        if operand is self.weight:
            g = outer.per_example()
            return g.mT if self.is_left else g
        return _fold(outer.b.sum(1), operand.shape)


@dataclass(frozen=True)
class Convolution(_WeightAndBias):
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
class Embedding(_WeightAndBias):
    """A lookup of rows x in a table."""

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    output_axis: BatchAxis
    weight: Operand
    padding: int | None
    bias: None = None

    def lookup(self, run: Pass) -> Lookup:
        """Return the block of a layer."""
        ids = example_first(run.tensors[self.x], self.axis, run.size)
        b = example_first(run.gradient(self.output), self.output_axis, run.size)
        return Lookup.build(ids, b, run.size, self.weight.shape[0], self.padding)

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        return self.lookup(run).per_example().reshape(run.size, *operand.shape)


@dataclass(frozen=True)
class Norm(_WeightAndBias):
    """A normalisation over trailing dimensions, or over groups of channels.

    Attributes:
        output: where gradients arrive.
        x: what is normalised.
        axis: of both.
        weight: None where it is not trained.
        bias: None where it is not trained.
        normalise: maps x to what the weight multiplies.
        has_channels: weight and bias belong to dimension 1.
    """

    output: fx.Node
    x: fx.Node
    axis: BatchAxis
    weight: Operand | None
    bias: Operand | None
    normalise: Callable[[Tensor], Tensor]
    has_channels: bool

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        b = run.gradient(self.output)
        if operand is self.weight:
            b = b * self.normalise(run.tensors[self.x].to(b.dtype))
        if self.has_channels:
            b = b.reshape(*b.shape[:2], -1).sum(2)
        rows = example_first(b, self.axis, run.size)
        return rows.reshape(run.size, -1, *operand.shape).sum(1)


@dataclass(frozen=True)
class Rows:
    """An operand that has got a row for each example in the graph.

    Attributes:
        output: the operand with these rows.
        axis: of it.
        operands: the operand.
        needs: no nodes.
    """

    output: fx.Node
    axis: BatchAxis
    operands: Sequence[Operand]
    needs: Sequence[fx.Node] = ()

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        return sum_copies(run.gradient(self.output), self.axis, run.size, operand.shape)


@dataclass(frozen=True)
class Other:
    """Any other operation: it is differentiated again for each example, by `torch.vmap`.

    Attributes:
        outputs: where gradients arrive, by the place of the output.
        function: the operation.
        args: its arguments; sizes that grow with the batch are the sizes of one example.
        axes: of the batched operands.
        output_axes: by the place of the output.
        operands: those that are trained.
        public: other operands without a batch.
    """

    outputs: Mapping[int, fx.Node]
    function: Any
    args: tuple[Any, Any]
    axes: Mapping[fx.Node, BatchAxis]
    output_axes: Mapping[int, BatchAxis]
    operands: Sequence[Operand]
    public: Sequence[fx.Node]

    @property
    def output(self) -> fx.Node:
        """Return the first output."""
        return next(iter(self.outputs.values()))

    @property
    def needs(self) -> list[fx.Node]:
        """Return the nodes whose values are kept."""
        return [*self.axes, *self.public, *(x.node for x in self.operands)]

    def gradient(self, run: Pass, operand: Operand) -> Tensor:
        """Return gradients `[N, *operand.shape]` of an operand."""
        values = [run.tensors[x.node].detach() for x in self.operands]
        rows = [one_example_a_row(run.tensors[x], a, run.size) for x, a in self.axes.items()]
        arrived = {}
        for place, node in self.outputs.items():
            g = run.gradients[node]
            if g is not None:
                arrived[place] = one_example_a_row(g, self.output_axes[place], run.size)

        def compute(example: Sequence[Tensor], *trained: Tensor) -> list[Tensor]:
            known = {x: run.tensors[x] for x in self.public}
            known |= dict(zip(self.axes, example, strict=True))
            known |= {x.node: y for x, y in zip(self.operands, trained, strict=True)}
            args, kwargs = fx.node.map_arg(self.args, known.__getitem__)
            result = self.function(*args, **kwargs)
            every = result if isinstance(result, (list, tuple)) else [result]
            return [every[place] for place in arrived]

        found = differentiate_again(compute, values, rows, list(arrived.values()))
        place = [x is operand for x in self.operands].index(True)
        return raise_precision(found[place].detach())


AnySite = Product | Convolution | Embedding | Norm | Rows | Other


def _fold(gradients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return gradients `[N, *shape]` of an addend that was broadcast over `[d_out]`."""
    size = len(gradients)
    if len(shape) == 0 or shape[-1] == 1:
        gradients = gradients.sum(-1)
    return gradients.reshape(size, *shape)
