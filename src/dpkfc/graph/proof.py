"""Prove on a captured graph that every loss depends on one example; find the uses of parameters.

The nodes run on tensors without data, with a large prime number P in the place of the number of
examples: a size is a multiple of P exactly where it grows with the batch. The rules of `tracking`
tell where the examples lie in every result. The graph has no hidden state, no write and no value
that Python reads, so that this is all there is to prove.

A node at which a tensor of parameters meets the examples is a site. There the parameters count as
public: the gradients of every example come from what the operation was given and from the
gradients at its outputs (`sites`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dpkfc.graph.capture import Capture, NotCapturedError
from dpkfc.tracking.batch_rules import (
    DRAWS,
    UNFILLED,
    Operation,
    arguments_of,
    dimension_of,
    rule_name,
    split_names,
)
from dpkfc.tracking.rule_application import apply_rule
from dpkfc.tracking.states import PARAMETRIC, BatchAxis, Parametric, State, Total, Unknown

P = 1_000_003
"""Stands for the number of examples in a proof."""

_FILLS = UNFILLED | split_names(
    "zeros ones full scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full"
)
_VIEWS = split_names(
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select alias "
    "clone contiguous _to_copy lift_fresh_copy detach repeat"
)
_SIZES = split_names("size shape repeats N")
_PLACES = split_names("start end split_size split_sizes")


@dataclass(frozen=True)
class Site:
    """A node at which parameters meet the examples.

    Attributes:
        node: what is computed.
        function: the ATen operation.
        args: its arguments as nodes and values.
        operands: places of the arguments that depend on parameters.
        axes: node of a batched operand to its axis.
        outputs: the axes of its outputs.
        rank: dimensions of its first output.
    """

    node: fx.Node
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    operands: Sequence[fx.Node]
    axes: Mapping[fx.Node, BatchAxis]
    outputs: Sequence[BatchAxis | None]
    rank: int
    is_pointwise: bool


@dataclass
class Proof:
    """What has been proved of one graph at one choice of its other sizes.

    Attributes:
        sites: in the order of the graph.
        values: node to tensors without data.
    """

    sites: list[Site] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)


def fill_memory(graph: fx.Graph) -> None:
    """Fill new memory of a graph with zeros: what was there before is not part of the program."""
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and rule_name(node.target) in UNFILLED:
            with graph.inserting_after(node):
                filled = graph.call_function(torch.ops.aten.zeros_like.default, (node,))
            node.replace_all_uses_with(filled, lambda user, filled=filled: user is not filled)


def prove(capture: Capture, sizes: Mapping[Any, int]) -> Proof:
    """Return the proof of a graph.

    Args:
        capture: the graph.
        sizes: symbol to number, of all symbols but the number of examples.

    Raises:
        NotCapturedError: naming the first operation that cannot be followed.
    """
    return _Prover(capture, sizes).prove()


class _Prover:
    def __init__(self, capture: Capture, sizes: Mapping[Any, int]) -> None:
        self._capture = capture
        batch = capture.batch_symbols
        self._sizes = {**sizes, **dict.fromkeys(batch, P)}
        self._batch_symbols = batch
        self._proof = Proof()
        self._states: dict[int, State] = {}
        self._constants: set[int] = set()  # all entries are equal
        self._counting: set[int] = set()  # 0, 1, …, N - 1
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def prove(self) -> Proof:
        """Return the proof."""
        given = iter(zip(self._capture.inputs, self._capture.fakes, strict=True))
        values = self._proof.values
        for node in self._capture.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._input(*next(given))
            elif node.op == "get_attr":
                constant = getattr(self._capture.module, node.target)
                with self._mode:
                    values[node] = self._mode.from_tensor(constant, static_shapes=True)
            elif node.op == "call_function":
                self._check_size(node)
                values[node] = self._call(node)
            elif node.op == "output":
                self._check_losses(node.args[0])
            else:
                raise NotCapturedError(str(node.target), "it is not followed")
        return self._proof

    def _input(self, given: Any, fake: Any) -> Any:
        if not isinstance(fake, Tensor):
            return self._number(fake)
        shape = [self._number(size) for size in fake.shape]
        stride = [self._number(step) for step in fake.stride()]
        fixed = shape[1:] if given.kind == "batch" else shape
        if any(map(counts_examples, fixed)):
            raise NotCapturedError(given.name, "another axis has the length of the batch")
        with self._mode:
            x = torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)
        if given.kind == "batch":
            self._states[id(x)] = BatchAxis(0)
        if given.kind == "parameter":
            self._states[id(x)] = PARAMETRIC
        return x

    def _number(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        number = size.node.expr.xreplace(self._sizes)
        if getattr(number, "free_symbols", None):
            raise NotCapturedError(str(size), "a size is not known")
        return int(number)

    def _check_size(self, node: fx.Node) -> None:
        """Refuse numbers that depend on the size of the batch in another way than as a multiple."""
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return
        expression = value.node.expr
        if self._batch_symbols.isdisjoint(expression.free_symbols):
            return
        if isinstance(value, torch.SymBool):
            why = "the program decides by the number of examples"
            raise NotCapturedError(f"{node.name} = {expression}", why)
        factors = expression.factor().as_ordered_factors()
        others = [x for x in factors if x not in self._batch_symbols]
        if any(x.free_symbols & self._batch_symbols or x.is_negative for x in others):
            why = "a number depends on how many examples there are"
            raise NotCapturedError(f"{node.name} = {expression}", why)

    def _check_losses(self, results: Any) -> None:
        (losses,) = tree_leaves(results)
        x = self._proof.values[losses]
        state = self._state(x)
        if isinstance(state, Unknown):
            raise NotCapturedError(state.operation, state.reason)
        if state != BatchAxis(0) or x.shape != (P,):
            raise NotCapturedError("loss", "it is not one number for each example")

    # -- one operation -----------------------------------------------------------------------------

    def _state(self, x: Any) -> State | None:
        return self._states.get(id(x))

    def _axis(self, x: Any) -> BatchAxis | None:
        state = self._states.get(id(x))
        return state if isinstance(state, BatchAxis) else None

    def _call(self, node: fx.Node) -> Any:
        values = self._proof.values
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        function: Any = node.target
        if not isinstance(function, torch._ops.OpOverload):
            return function(*args, **kwargs)
        with self._mode:
            output = function(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in tree_leaves(output)):
            return output
        operation = Operation(
            function,
            rule_name(function),
            args,
            kwargs,
            output,
            P,
            self._state,
            self._axis,
            trusts_public_rows=False,
            before={},
            has_equal_places=lambda x, axis: id(x) in self._constants,
            is_counting=lambda x, length: id(x) in self._counting and length == P,
        )
        if function._schema.is_mutable:
            raise NotCapturedError(str(function), "it writes into its operands")
        self._note(node, operation)
        return output

    def _note(self, node: fx.Node, operation: Operation) -> None:
        """Set the states of the outputs of a node."""
        read = operation.tensors
        found = [state for state in map(self._state, read) if state is not None]
        unknown = next((x for x in found if isinstance(x, Unknown)), None)
        answer: Any
        if unknown is not None:
            answer = unknown
        elif self._has_batch_as_number(operation):
            answer = Unknown(str(operation.function), "it computes with the number of examples")
        elif any(isinstance(x, (BatchAxis, Total)) for x in found):
            answer = apply_rule(operation, has_total=any(isinstance(x, Total) for x in found))
            if PARAMETRIC in found:
                self._note_site(node, operation, answer)
            if operation.name in _FILLS:
                answer = self._fill(operation)
        elif PARAMETRIC in found:
            answer = self._parametric(node, operation)
        else:
            answer = self._public(operation)
        outputs = operation.outputs
        if not isinstance(answer, (list, tuple)):
            answer = [answer] * len(outputs)
        for x, state in zip(outputs, answer, strict=False):
            noted = state
            if isinstance(state, BatchAxis):
                repeats = state.pre * state.post
                if repeats >= P // 2 or _grows(x, but=state.dim):
                    why = "what it makes of an example grows with their number"
                    noted = Unknown(str(operation.function), why)
            if noted is not None:
                self._states[id(x)] = noted

    def _has_batch_as_number(self, operation: Operation) -> bool:
        """Return whether an operation takes the number of examples as more than a size."""
        if operation.name == "arange":
            return False
        for name in arguments_of(operation.function):
            leaves = tree_leaves(operation.argument(name))
            counts = any(type(x) in (int, float) and counts_examples(x) for x in leaves)
            if counts and not _is_size(operation, name):
                return True
        return False

    # -- operations on what no example decides -----------------------------------------------------

    def _public(self, operation: Operation) -> Any:
        """Return the state of a result that depends on no example and no parameter."""
        name = operation.name
        if name in _FILLS:
            return self._fill(operation)
        if name in DRAWS and operation.kwargs.get("generator") is None:
            if not operation.tensors or name.endswith("_like"):
                return self._rows_of(operation.result)
        if name == "arange" and operation.result.shape == (P,):
            is_plain = operation.argument("start", 0) == 0 and operation.argument("step", 1) == 1
            if is_plain:
                self._counting.add(id(operation.result))
        tensors = operation.tensors
        is_kept = name in _VIEWS or torch.Tag.pointwise in operation.function.tags
        if tensors and is_kept and all(id(x) in self._constants for x in tensors):
            self._constants.update(map(id, operation.outputs))
            return self._rows_of(operation.result)
        if name in _VIEWS and tensors and id(tensors[0]) in self._counting:
            self._counting.add(id(operation.result))
        return self._find_repeated_axis(operation) or self._sized(operation)

    def _fill(self, operation: Operation) -> State | None:
        x = operation.result
        self._constants.add(id(x))
        return self._rows_of(x)

    def _rows_of(self, x: Tensor) -> State | None:
        """Return the axis of rows that are alike or drawn, one for each example."""
        if list(x.shape).count(P) == 1:
            return BatchAxis(list(x.shape).index(P))
        if _grows(x) and id(x) not in self._constants:
            return Unknown("shape", "its rows cannot be given to the examples")
        return None

    def _find_repeated_axis(self, operation: Operation) -> BatchAxis | None:
        """Return the axis along which a tensor has been repeated for every example."""
        if operation.name not in ("expand", "repeat"):
            return None
        x, y = operation.args[0], operation.result
        grown = [i for i, size in enumerate(y.shape) if counts_examples(size)]
        if len(grown) != 1 or _grows(x):
            return None
        (dim,) = grown
        if operation.name == "repeat" and operation.args[1][dim] != P:
            return None
        return BatchAxis(dim, 1, y.shape[dim] // P)

    def _sized(self, operation: Operation) -> State | None:
        """Return unknown where a public result depends on how many examples there are."""
        leaves = tree_leaves((list(operation.args), dict(operation.kwargs)))
        counts = any(isinstance(x, int) and counts_examples(x) for x in leaves)
        if counts or any(map(_grows, operation.outputs)):
            if id(operation.result) in self._counting:
                return None
            return Unknown(str(operation.function), "it depends on how many examples there are")
        if any(id(x) in self._counting for x in operation.tensors):
            return Unknown(str(operation.function), "it depends on the places of the examples")
        return None

    def _parametric(self, node: fx.Node, operation: Operation) -> Any:
        """Return the state of a result that depends on parameters and on no example."""
        if operation.function is torch.ops.aten.detach.default:
            return None
        axis = self._find_repeated_axis(operation)
        if axis is not None:
            self._note_site(node, operation, axis)
            return axis
        state = self._sized(operation)
        return PARAMETRIC if state is None else state

    def _note_site(self, node: fx.Node, operation: Operation, answer: Any) -> None:
        values = self._proof.values
        operands = []
        axes = {}
        for x in node.all_input_nodes:
            state = self._state(values[x])
            if isinstance(state, Parametric):
                operands.append(x)
            elif isinstance(state, BatchAxis):
                axes[x] = state
        outputs = operation.outputs
        states = list(answer) if isinstance(answer, (list, tuple)) else [answer] * len(outputs)
        if any(isinstance(x, Unknown) for x in states[:1]):
            return
        found = [x if isinstance(x, BatchAxis) else None for x in states]
        is_pointwise = torch.Tag.pointwise in operation.function.tags
        self._proof.sites.append(
            Site(
                node,
                operation.function,
                node.args,
                node.kwargs,
                operands,
                axes,
                found,
                operation.result.dim(),
                is_pointwise,
            )
        )


def counts_examples(number: float) -> bool:
    """Return whether a number stands for a multiple of the number of examples."""
    return number != 0 and number % P == 0


def _is_size(operation: Operation, argument: str) -> bool:
    """Return whether an argument is a size, or a place along an axis that grows with the batch."""
    if argument in _PLACES:
        x = operation.tensors[0]
        return x.shape[dimension_of(operation, x)] >= P // 2
    # The stride of a convolution is not one of memory.
    return argument in _SIZES or (argument == "stride" and "strided" in operation.name)


def _grows(x: Tensor, but: int | None = None) -> bool:
    """Return whether a tensor has an axis that grows with the batch, but for one axis."""
    return any(size >= P // 2 for dim, size in enumerate(x.shape) if dim != but)
