"""The table of batch rules, and one ATen operation as a rule sees it.

A rule gets an `Operation`. None of its operands is unknown, and at least one has a batch axis. The
rule returns the state of every output: one state for all of them, or a list. A rule that cannot
follow the examples returns `operation.lose_examples(...)`, or ends at `operation.require(...)`.

A rule is correct under two conditions. Perturbing one example of the inputs changes only the
entries of this example in the outputs. Permuting the batch permutes the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from dpkfc.tracking.states import BatchAxis, State, Unknown, names_of_shapes

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
        has_equal_places: whether a public tensor has the same entries for all places along an axis.
        is_counting: whether a public index counts 0, 1, … up to so many.
        tensors: all tensor operands, those inside lists too.
        outputs: all tensor outputs.
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
    has_equal_places: Callable[[Tensor, BatchAxis], bool]
    is_counting: Callable[[Tensor, int], bool]
    tensors: list[Tensor] = field(init=False)
    outputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = tensors_in((*self.args, *self.kwargs.values()))
        self.outputs = tensors_in((self.output,))

    @property
    def result(self) -> Tensor:
        """Return the first tensor output."""
        return self.outputs[0]

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

    def lose_examples(self, why: str) -> Unknown:
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
            raise LostExamples(self.lose_examples(why))
        return value


@cache
def arguments_of(function: OpOverload) -> dict[str, tuple[int, Any]]:
    """Return name to (place, default) of the arguments of an operation."""
    arguments = enumerate(function._schema.arguments)
    return {argument.name: (place, argument.default_value) for place, argument in arguments}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values and inside the lists and tuples among them."""
    found = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(x)
    return found


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
            public output, or `operation.lose_examples(why)` where the examples are mixed or cannot
            be followed. A list holds one state for each tensor output.

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


UNFILLED = split_names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
"""Memory that these return holds what was there before, which is not part of the program."""
DRAWS = split_names(
    "rand randn randint bernoulli uniform normal exponential random log_normal rand_like"
    " randn_like randint_like"
)


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


@cache
def has_tag(function: Any, tag: torch.Tag) -> bool:
    """Return whether torch marks an operation with a tag."""
    return tag in function.tags


def rule_for(names: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Register a rule under some names, divided by spaces."""

    def add(rule: Rule) -> Rule:
        for name in names.split():
            table[name] = rule
        return rule

    return add


def rule_of_first(names: str) -> Callable[[_FirstRule], _FirstRule]:
    """Register a rule that is given the first operand too, which has to have the batch."""

    def add(rule: _FirstRule) -> _FirstRule:
        @rule_for(names)
        def run(operation: Operation) -> Answer:
            x = operation.args[0]
            axis = operation.require(operation.axis(x), "a batched operand in an unusual place")
            return rule(operation, x, axis)

        return rule

    return add


def dimension_of(operation: Operation, x: Tensor, name: str = "dim", default: int = 0) -> int:
    """Return an argument that names a dimension of x, counted from the front."""
    dim = int(operation.argument(name, default))
    return dim % max(1, x.dim())


def fits(
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
            expected = axis.shift(-missing)
        known = operation.axis(x)
        if known is None:
            if not is_shared(operation, x, expected):
                return False
        elif known != expected:
            return False
    return True


def is_shared(operation: Operation, x: Tensor, axis: BatchAxis) -> bool:
    """Return whether a public tensor has the same entries for all places along an axis.

    A batch of one takes the first entries of `x + table[:N]`, whatever place its example had
    before. Of a tensor that the operation has changed in place, the old entries count. One that it
    has written over counts as shared.
    """
    x = operation.before.get(id(x), x)
    if not 0 <= axis.dim < x.dim():
        return True
    is_one_row = x.shape[axis.dim] == 1 or x.stride(axis.dim) == 0
    if is_one_row or id(x) in map(id, operation.outputs):
        return True
    if not operation.has_length(x, axis):
        return False
    return operation.trusts_public_rows or operation.has_equal_places(x, axis)


def counts_up(x: Tensor, length: int) -> bool:
    """Return whether an index is 0, 1, …, length - 1 in its order in memory."""
    return torch.equal(x.flatten(), torch.arange(length, device=x.device))


def are_places_equal(x: Tensor, axis: BatchAxis, size: int) -> bool:
    """Return whether a public tensor has the same entries for all `size` places along an axis."""
    shape = (axis.pre, size, axis.post)
    # No other tracker may take this for a read of the program: a tape outside may look at its rows.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        parts = x.detach().unflatten(axis.dim, shape)
        first = parts.narrow(axis.dim + 1, 0, 1)
        return torch.equal(parts, first.expand_as(parts))
