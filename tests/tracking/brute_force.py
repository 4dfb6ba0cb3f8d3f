"""Check what the tracker says of one call against brute force."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpkfc.tracking.batch_rules import Operation, tensors_in
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import BatchAxis, Parametric, State, Total, Unknown
from dpkfc.tracking.tracker import Tracker

Draw = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Operand:
    """A tensor of a call: its values can be drawn again, and `axis` says where its examples lie."""

    shape: tuple[int, ...]
    axis: BatchAxis | None
    draw: Draw


@dataclass(frozen=True)
class Case:
    """A call whose states are checked.

    `answer` is "axis" where the tracker must follow the call, "unknown" where it must not, None
    where it may.
    """

    name: str
    size: int
    call: Callable[..., Any]
    operands: tuple[Operand, ...]
    answer: str | None = None
    is_random: bool = False


@dataclass
class Seen:
    """The names of the rules that were used."""

    names: set[str] = field(default_factory=set)


def _seed(number: int) -> None:
    """Seed the generator of the CPU alone, which takes less time than `torch.manual_seed`."""
    torch.default_generator.manual_seed(number)


def draw_normal(shape: Sequence[int]) -> Tensor:
    return torch.rand(tuple(shape), dtype=torch.float64) * 0.8 + 0.1


def draw_integers(low: int, high: int) -> Draw:
    return lambda shape: torch.randint(low, high, tuple(shape))


def truths(shape: Sequence[int]) -> Tensor:
    return torch.rand(tuple(shape)) < 0.5


def batched(
    size: int,
    shape: Sequence[int],
    dim: int = 0,
    pre: int = 1,
    post: int = 1,
    draw: Draw = draw_normal,
) -> Operand:
    """Return an operand whose batch axis is inserted into `shape` at `dim`."""
    whole_shape = (*shape[:dim], pre * size * post, *shape[dim:])
    return Operand(whole_shape, BatchAxis(dim, pre, post), draw)


def public(*shape: int, draw: Draw = draw_normal) -> Operand:
    return Operand(shape, None, draw)


def by_example(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return a view `[N, ...]` of a tensor."""
    return x.unflatten(axis.dim, (axis.pre, size, axis.post)).movedim(axis.dim + 1, 0)


def change_examples(xs: Sequence[Tensor], case: Case, examples: Sequence[int]) -> list[Tensor]:
    """Return the operands with other values for some examples."""
    result = []
    for x, operand in zip(xs, case.operands, strict=True):
        x = x.clone()
        if operand.axis is not None:
            generator_state = torch.random.get_rng_state()
            _seed(1000)
            other = operand.draw(operand.shape)
            torch.random.set_rng_state(generator_state)
            for i in examples:
                by_example(x, operand.axis, case.size)[i] = by_example(
                    other, operand.axis, case.size
                )[i]
        result.append(x)
    return result


def permute(xs: Sequence[Tensor], case: Case, order: Tensor) -> list[Tensor]:
    """Return the operands with their examples in another order."""
    result = []
    for x, operand in zip(xs, case.operands, strict=True):
        y = x.clone()
        if operand.axis is not None:
            by_example(y, operand.axis, case.size).copy_(
                by_example(x, operand.axis, case.size)[order]
            )
        result.append(y)
    return result


class Watched(Tracker):
    """Notes which rules are applied."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.names: set[str] = set()

    def _states_of_outputs(self, operation: Operation, states: Mapping[type, State]) -> Any:
        if states.keys() & {BatchAxis, Total} and not states.keys() & {Unknown, Parametric}:
            self.names.add(operation.name)
        return super()._states_of_outputs(operation, states)


def run(
    case: Case, xs: Sequence[Tensor], seen: Seen | None = None
) -> tuple[list[Tensor], list[State | None]]:
    """Run a call under a tracker and return its outputs with their states."""
    tracker = Watched(case.size)
    copies = [x.clone() for x in xs]
    for x, operand in zip(copies, case.operands, strict=True):
        tracker.set_state(x, operand.axis)
    _seed(0)
    with follow(tracker):
        output = case.call(*copies)
    outputs = list(tensors_in((output,)))
    if seen is not None:
        seen.names |= tracker.names
    return outputs, [tracker.state(y) for y in outputs]


def plain(case: Case, xs: Sequence[Tensor]) -> list[Tensor]:
    _seed(0)
    return list(tensors_in((case.call(*[x.clone() for x in xs]),)))


def are_equal(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    if x.is_floating_point() or x.is_complex():
        return torch.allclose(x, y, rtol=1e-7, atol=1e-9, equal_nan=True)
    return torch.equal(x, y)


def faults(case: Case, seen: Seen | None = None) -> list[str]:
    """Return what the tracker says wrongly of a call."""
    _seed(7)
    xs = [operand.draw(operand.shape) for operand in case.operands]
    outputs, states = run(case, xs, seen)
    found = []
    if case.answer == "axis" and any(isinstance(state, Unknown) for state in states):
        found.append(f"{case.name}: not followed, {states}")
    if case.answer == "unknown" and not all(isinstance(state, Unknown) for state in states):
        found.append(f"{case.name}: followed, {states}")
    if all(isinstance(state, Unknown) for state in states):
        return found
    for i in range(case.size):
        others = plain(case, change_examples(xs, case, [i]))
        for place, (y, z, state) in enumerate(zip(outputs, others, states, strict=True)):
            if not _is_kept(y, z, state, i, case.size):
                found.append(
                    f"{case.name}: example {i} changes other entries of output {place}, {state}"
                )
    found += [] if case.is_random else _unordered(case, xs, outputs, states)
    return found + _sums(case, xs, states)


def _is_kept(y: Tensor, z: Tensor, state: State | None, i: int, size: int) -> bool:
    """Return whether all entries but those of example i are as before."""
    if state is None:
        return are_equal(y, z)
    if not isinstance(state, BatchAxis):
        return True
    if y.shape != z.shape or y.shape[state.dim] != state.length(size):
        return False
    rest = [j for j in range(size) if j != i]
    return are_equal(by_example(y, state, size)[rest], by_example(z, state, size)[rest])


def _unordered(
    case: Case, xs: Sequence[Tensor], outputs: Sequence[Tensor], states: Sequence[State | None]
) -> list[str]:
    """Return the outputs that do not permute as their examples do."""
    order = torch.arange(case.size).roll(1)
    others = plain(case, permute(xs, case, order))
    found = []
    for place, (y, z, state) in enumerate(zip(outputs, others, states, strict=True)):
        if not isinstance(state, BatchAxis):
            continue
        if y.shape[state.dim] != state.length(case.size):
            found.append(
                f"{case.name}: output {place} of shape {list(y.shape)} cannot have {state}"
            )
        elif not are_equal(by_example(y, state, case.size)[order], by_example(z, state, case.size)):
            found.append(
                f"{case.name}: output {place} depends on the places of the examples, {state}"
            )
    return found


def _sums(case: Case, xs: Sequence[Tensor], states: Sequence[State | None]) -> list[str]:
    """Return the totals that are no sums over examples."""
    if not any(isinstance(state, Total) for state in states):
        return []
    values = [
        _totals(case, change_examples(xs, case, examples)) for examples in ([], [0], [1], [0, 1])
    ]
    none, one, other, both = values
    pairs = zip(none, one, other, both, strict=True)
    return [
        f"{case.name}: the total is not a sum"
        for a, b, c, d in pairs
        if not are_equal(d - b, c - a)
    ]


def _totals(case: Case, xs: Sequence[Tensor]) -> list[Tensor]:
    outputs, states = run(case, xs)
    totals = []
    for y, state in zip(outputs, states, strict=True):
        if isinstance(state, Total):
            count = case.size if state.is_mean else 1
            totals.append(y * (count / state.number))
    return totals
