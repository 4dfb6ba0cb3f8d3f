"""Which examples the check of per-example gradients looks at, and when it looks again.

Two examples show that a model or a loss mixes examples only where they differ in what is mixed: padding shows on texts of two
lengths, class weights that are divided by their mean over the batch on two labels. So the examples of a check are chosen for
their differences; where a batch has none, later ones are looked at. Another loss, or modules in another mode, are checked anew,
and so is everything at steps 2, 4, 8, 16, ...: what a schedule switches on may lie where nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.random_state import begin_at, fresh_seed, kept_numbers

__all__ = ["Watch", "code_of", "differences", "partners"]

Feature = tuple[int, str]  # number of a leaf of the batch, and what of it: its length or its value
_FIRST, _LATER = 64, 16  # records that are looked at in the first batch, and in each later one
_BATCHES = 20  # later ones
_PARTNERS = 4  # examples that are chosen for what they differ in
_PLAIN = (bool, int, float, str)
_DEPTH = 3  # functions that a loss function holds, and those that they hold


def differences(one: Any, other: Any) -> frozenset[Feature]:
    """In what two batches of one example each differ, leaf by leaf."""
    found = set[Feature]()
    for i, (a, b) in enumerate(zip(*(tree_flatten(batch)[0] for batch in (one, other)), strict=False)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.layout != torch.strided or b.layout != torch.strided or a.is_nested or b.is_nested:
                found.add((i, "value"))  # sparse, or of several lengths: not compared
            elif a.shape != b.shape:
                found |= {(i, "length"), (i, "value")}
            elif not torch.equal(a, b):
                found.add((i, "value"))
        elif type(a) is not type(b) or (isinstance(a, _PLAIN) and a != b):
            found.add((i, "value"))
        elif isinstance(a, np.ndarray) and not np.array_equal(a, b):
            found.add((i, "value"))
    return frozenset(found)


def partners(found: Sequence[frozenset[Feature]], most: int, missing: Iterable[Feature]) -> list[int]:
    """Few of the examples, which together differ from the first in as much as all of them do.

    Args:
        found: in what each differs from the first.
        most: how many may be chosen.
        missing: what counts.
    """
    left, chosen = set(missing), list[int]()
    while len(chosen) < most:
        best = max(range(len(found)), key=lambda i: len(found[i] & left), default=None)
        if best is None or not found[best] & left:
            return chosen
        chosen.append(best)
        left -= found[best]
    return chosen


def code_of(function: Any, depth: int = _DEPTH) -> Hashable:
    """What a loss function does, as a value: its code, that of the functions it holds, and what the numbers it holds switch on.

    Numbers count as zero or not, so that a weight that grows from step to step is one switch; texts count as they are. Of an
    object it is the type, with the plain values among its attributes.
    """
    switches = list[Hashable]()
    while isinstance(function, partial):
        switches += _switches({str(i): x for i, x in enumerate(function.args)} | function.keywords)
        function = function.func
    if isinstance(function, MethodType):
        switches += _switches(vars(function.__self__) if hasattr(function.__self__, "__dict__") else {})
        function = function.__func__
    function = unwrap(function) if isinstance(function, FunctionType) else function
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        switches += _switches(getattr(function, "__dict__", {}))
        return (type(function), *switches) if switches else cast("Hashable", type(function))
    held = _held(function)
    switches += _switches({name: function.__globals__[name] for name in code.co_names if name in function.__globals__})
    if depth == 0:
        return (code, *switches)
    return (code, *switches, *_switches(held), *(code_of(x, depth - 1) for x in held.values() if callable(x)))


def _switches(held: Mapping[str, Any]) -> list[Hashable]:
    """Of the plain values that something holds: which numbers are not zero, and the texts."""
    return [(name, x if isinstance(x, str) else bool(x)) for name, x in sorted(held.items()) if isinstance(x, _PLAIN)]


def _held(function: Any) -> dict[str, Any]:
    """What a function holds in its closure, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, getattr(function, "__closure__", None) or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


@dataclass
class _Case:
    """One loss in one mode of the model.

    Attributes:
        passed: it was checked.
        together: rows that were checked together, at most.
        missing: in what no two examples that were checked differ; None before the first look.
        left: batches that are still looked at for that.
    """

    passed: bool = False
    together: int = 0
    missing: frozenset[Feature] | None = None
    left: int = _BATCHES


@dataclass
class Watch:
    """What has been checked so far."""

    _cases: dict[Hashable, _Case] = field(default_factory=dict)
    _steps: int = 0
    _again: int = 2  # step at which whatever comes is checked anew

    def look(
        self,
        model: nn.Module,
        loss_fn: Any,
        reader: Callable[[], Callable[..., Any]],
        count: int,
        *,
        most: int,
        check: Callable[..., bool],
        seed: Callable[[], int] = fresh_seed,
        agreed: Callable[[Callable[[], _Look]], _Look] = lambda decide: decide(),
    ) -> None:
        """Check some examples of a batch, where that is due.

        It is due for a loss or a mode that comes first, where a batch has more rows than were ever looked at together (two make
        no triplet), where something is missing that examples may differ in, and at steps 2, 4, 8, 16, ...

        Args:
            model: in the mode it is trained in.
            loss_fn: the loss.
            reader: makes a function of numbers of rows to the batch of them, which reads every row once.
            count: rows of the batch.
            most: rows that are checked together, at least 2.
            check: `check_examples` on chosen rows, how many of them together and which beside the first: whether they could
                show a fault.
            seed: of the random numbers of a look, drawn for each: what one look has not shown, the next may show.
            agreed: makes one process decide for all, where all must make the same passes: with the same rows and numbers.

        Raises:
            ValueError: what `check` raises.
        """
        self._steps += 1
        case = self._cases.setdefault((_switched_on(model), code_of(loss_fn)), _Case())
        anew = not case.passed or self._steps >= self._again or min(count, most) > case.together
        if not count or not (anew or (case.missing and case.left)):
            return
        with kept_numbers():

            def decide() -> _Look:
                begun = seed()
                begin_at(begun)  # of what datasets draw
                return begun, _chosen(case, reader(), count, most)

            begun, chosen = agreed(decide)
            begin_at(begun)
            rows, batch_of = chosen.rows, reader()
            together = min(most, len(rows))
            worth = anew or chosen.shown
            passed = worth and check(lambda *some: batch_of(*(rows[i] for i in some)), together, beside=chosen.beside)
        if self._steps >= self._again:
            self._again = 2 * self._steps
        if passed:
            case.passed, case.missing, case.together = True, chosen.missing, max(case.together, together)
        elif case.passed:
            case.left -= 1


def _switched_on(model: nn.Module) -> Hashable:
    """The mode of every module, and what the plain values among its attributes switch on."""
    return tuple(tuple(_switches(vars(module))) for module in model.modules())


@dataclass(frozen=True)
class _Choice:
    """Rows to check, which of them beside the first, what they show that was missing, and what is missing still."""

    rows: list[int]
    beside: list[int]
    shown: frozenset[Feature]
    missing: frozenset[Feature]


_Look: TypeAlias = tuple[int, _Choice]  # the seed of a look, and what is looked at


def _chosen(case: _Case, batch_of: Callable[..., Any], count: int, most: int) -> _Choice:
    first = batch_of(0)
    leaves = [(i, x) for i, x in enumerate(tree_flatten(first)[0]) if isinstance(x, (Tensor, np.ndarray, *_PLAIN))]
    every = {(i, "value") for i, _ in leaves} | {(i, "length") for i, x in leaves if isinstance(x, Tensor) and x.dim() > 1}
    missing = frozenset(every) if case.missing is None else case.missing
    found = list[frozenset[Feature]]()
    for row in range(1, min(count, _LATER if case.passed else _FIRST)):
        found.append(differences(first, batch_of(row)))
        if missing <= frozenset[Feature]().union(*found):
            break
    second = [1] if count > 1 else []  # as it was drawn: rare ones may have no gradient
    known = found[0] if second else frozenset()
    others = [*second, *(1 + i for i in partners(found, _PARTNERS, missing - known))]
    shown = known.union(*(found[row - 1] for row in others)) & missing
    rows = [0, *others, *(row for row in range(1, min(count, most)) if row not in others)]
    return _Choice(rows, list(range(1, 1 + len(others))), shown, missing - shown)
