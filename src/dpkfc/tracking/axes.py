"""Where the examples of a batch lie inside a tensor, and how views and products move that place.

A tracked pass gives every tensor one of five states. A public tensor depends on no example and has
no entry. The others are values of this module. `docs/design.md`, "One gradient, one example",
explains the proof that they make up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


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
        return self.move(self.dim + by)

    def move(self, dim: int) -> BatchAxis:
        """Return the same axis in another dimension."""
        return BatchAxis(dim, self.pre, self.post)

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

    def __repr__(self) -> str:
        return "public"


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
    """

    operation: str
    reason: str


State = BatchAxis | Parametric | Public | Total | Unknown
"""What a tracked pass knows of a tensor that is not public."""


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
    inner = axis.post * math.prod(shape[axis.dim + 1 :])
    if inner == 0 or math.prod(new_shape) == 0:
        return None
    right = 1
    for dim in reversed(range(len(new_shape))):
        length = new_shape[dim]
        post, rest = divmod(inner, right)
        if rest == 0 and post > 0 and length % (size * post) == 0:
            return BatchAxis(dim, length // (size * post), post)
        right *= length
        if right > inner:
            return None
    return None


def example_first(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`: examples in front; pre and post are dimensions if longer than 1.

    Args:
        x: a tensor with this axis.
        axis: where its examples lie.
        size: examples N.
    """
    if axis.pre == 1 and axis.post == 1:
        return x if axis.dim == 0 else x.movedim(axis.dim, 0)
    x = x.unflatten(axis.dim, (axis.pre, size, axis.post)).movedim(axis.dim + 1, 0)
    if axis.post == 1:
        x = x.squeeze(axis.dim + 2)
    return x.squeeze(axis.dim + 1) if axis.pre == 1 else x


def names_of_shapes(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of some tensors as they appear in messages."""
    return " and ".join(str(list(x.shape)) for x in tensors[:3])


# --------------------------------------------------------------------------------------------------
# One ATen operation of a tracked pass, as a batch rule sees it.


@dataclass(slots=True)
class Operation:
    """Give a rule the operands, the outputs and the states of one operation.

    Attributes:
        function: the ATen overload.
        args: positional arguments.
        kwargs: keyword arguments.
        output: what the operation returned.
        size: examples N of the pass, at least 2.
        state: maps a tensor to its state, None for a public one.
        trusts_public_rows: a public tensor with a row for each example may hold the examples' own
            rows.
    """

    function: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any
    size: int
    state: Callable[[Tensor], State | None]
    trusts_public_rows: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensor operands, those inside lists too."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def outputs(self) -> list[Tensor]:
        """Return all tensor outputs."""
        return list(tensors_in((self.output,)))

    def axis(self, x: Any) -> BatchAxis | None:
        """Return the batch axis of an operand, None for a public tensor or for no tensor."""
        state = self.state(x) if isinstance(x, Tensor) else None
        return state if isinstance(state, BatchAxis) else None

    def is_batched(self, x: Any) -> bool:
        """Return whether an operand has a batch axis."""
        return self.axis(x) is not None

    def argument(self, name: str) -> Any:
        """Return an argument by its name in the schema, with the schema's default."""
        if name in self.kwargs:
            return self.kwargs[name]
        place, default = arguments_of(self.function)[name]
        return self.args[place] if place < len(self.args) else default

    def has_argument(self, name: str) -> bool:
        """Return whether the schema has an argument of this name."""
        return name in arguments_of(self.function)

    def lost(self, why: str) -> Unknown:
        """Return the state of an output whose examples cannot be told any more."""
        batched = [x for x in self.tensors if self.is_batched(x)]
        return Unknown(
            str(self.function), f"{why} (shapes {names_of_shapes(batched or self.tensors)})"
        )


@cache
def arguments_of(function: OpOverload) -> dict[str, tuple[int, Any]]:
    """Return name to (place, default) of the arguments of an operation."""
    found = {}
    for place, argument in enumerate(function._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        found[argument.name] = (place, default)
    return found


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some values and inside the lists and tuples among them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(x)
