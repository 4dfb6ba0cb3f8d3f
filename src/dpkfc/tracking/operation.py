"""One ATen operation of a tracked pass, as a batch rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from dpkfc.tracking.axes import BatchAxis, State, Unknown, names_of_shapes

__all__ = ["Operation"]


class Operation:
    """Give a rule the operands, the outputs and the states of one operation.

    Attributes:
        function: the ATen overload.
        args: positional arguments.
        kwargs: keyword arguments.
        output: what the operation returned.
        size: examples N of the pass, at least 2.
        trusts_public_rows: a public tensor with a row for each example may hold the examples' own rows.
    """

    __slots__ = ("_state_of", "args", "function", "kwargs", "output", "size", "trusts_public_rows")

    def __init__(
        self,
        function: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        size: int,
        state_of: Callable[[Tensor], State | None],
        trusts_public_rows: bool = False,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.size = size
        self._state_of = state_of
        self.trusts_public_rows = trusts_public_rows

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensor operands, those inside lists too."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def outputs(self) -> list[Tensor]:
        """Return all tensor outputs."""
        return list(tensors_in((self.output,)))

    def state(self, x: Tensor) -> State | None:
        """Return the state of a tensor, None for a public one."""
        return self._state_of(x)

    def axis(self, x: Any) -> BatchAxis | None:
        """Return the batch axis of an operand, None for a public tensor and for what is not a tensor."""
        state = self._state_of(x) if isinstance(x, Tensor) else None
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
        return Unknown(str(self.function), f"{why} (shapes {names_of_shapes(batched or self.tensors)})")


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
