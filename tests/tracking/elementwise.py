"""Calls of every elementwise operation of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.tracking.brute_force import (
    Case,
    Draw,
    Operand,
    batched,
    draw_integers,
    draw_normal,
    public,
    truths,
)

N = 3
_SCALARS = {"Scalar": 0.5, "float": 0.5, "int": 1, "bool": False, "SymInt": 1}
# In these, a number must be of one kind, or another argument decides.
_STRINGS = {"rounding_mode": "floor", "approximate": "none"}


def overloads() -> list[Any]:
    """Return the overloads that torch tags as elementwise."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
        if packet is not None and (schema.overload_name or "default") in packet.overloads():
            function = getattr(packet, schema.overload_name or "default")
            if torch.Tag.pointwise in function.tags:
                found.append(function)
    return found


def layouts(count: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield places of the examples in `count` operands: (name, constructors that take a draw)."""

    def at(*shape: int, dim: int = 0, pre: int = 1, post: int = 1):
        return lambda draw: batched(N, shape, dim, pre, post, draw)

    def shared(*shape: int):
        return lambda draw: public(*shape, draw=draw)

    yield "first", [at(2)] * count
    yield "last, folded", [at(2, dim=1, pre=2, post=2)] * count
    if count == 1:
        return
    yield "public after", [at(2), *[shared(2)] * (count - 1)]
    yield "public before", [*[shared(1, 2)] * (count - 1), at(2)]
    yield "column and row", [at(1), *[at()] * (count - 1)]
    yield "broadcast", [at(4, 2, dim=1), *[at(1)] * (count - 1)]


def elementwise_cases(function: Any) -> Iterator[Case]:
    """Yield calls of one overload with all places of the examples."""
    arguments = function._schema.arguments
    tensors = [x for x in arguments if "Tensor" in str(x.type) and not x.is_out]
    outs = [x for x in arguments if x.is_out]
    if any("List" in str(x.type) for x in tensors) or not tensors:
        return
    if any(str(x.type) == "Optional[Tensor]" for x in tensors):
        tensors = [x for x in tensors if str(x.type) == "Tensor"] + [
            x for x in tensors if str(x.type) != "Tensor"
        ]
    names = [x.name for x in tensors]
    for layout, makers in layouts(len(tensors)):
        for draws in _draws(names):
            operands = tuple(make(draw) for make, draw in zip(makers, draws, strict=True))
            call = _call(function, names, [x.name for x in outs])
            if _runs(call, operands):
                yield Case(f"{function} {layout}", N, call, operands)
                break


def _draws(names: list[str]) -> Iterator[list[Draw]]:
    special = {"condition": truths, "mask": truths}
    for draw in (
        draw_normal,
        draw_integers(0, 3),
        truths,
        lambda shape: torch.complex(draw_normal(shape), draw_normal(shape)),
    ):
        yield [special.get(name, draw) for name in names]


def _call(function: Any, names: list[str], outs: list[str]):
    def call(*tensors: Any) -> Any:
        given = dict(zip(names, tensors, strict=True))
        positional, named = [], {}
        for x in function._schema.arguments:
            if x.is_out:
                named[x.name] = torch.empty(0, dtype=tensors[0].dtype)
            elif x.name in given and x.kwarg_only:
                named[x.name] = given[x.name]
            elif x.name in given:
                positional.append(given[x.name])
            elif x.kwarg_only:
                if not x.has_default_value() or x.name == "rounding_mode":
                    named[x.name] = _STRINGS.get(x.name, 1)
            else:
                kind = str(x.type).removeprefix("Optional[").removesuffix("]")
                is_missing = not x.has_default_value()
                positional.append(_SCALARS.get(kind, 1) if is_missing else x.default_value)
        return function(*positional, **named)

    return call


def _runs(call: Any, operands: tuple[Operand, ...]) -> bool:
    try:
        call(*[x.draw(x.shape) for x in operands])
    except Exception:
        return False
    return True
