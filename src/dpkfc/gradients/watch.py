"""Which examples the check of per-example gradients looks at, and when it looks again.

Two examples show that a model or a loss mixes examples only where they differ in what is mixed: padding shows on texts of two
lengths, class weights that are divided by their mean over the batch on two labels. So the examples of a check are chosen for
their differences; where a batch has none, later ones are looked at. Another loss, or modules in another mode, are checked anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.random_state import begin_at, fresh_seed, kept_numbers

__all__ = ["Watch", "code_of", "differences", "partners"]

Feature = tuple[int, str]  # number of a leaf of the batch, and what of it: its length or its value
_FIRST, _LATER = 64, 16  # records that are looked at in the first batch, and in each later one
_BATCHES = 20  # later ones
_PARTNERS = 4  # examples that are chosen for what they differ in
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
    """What a loss function does, as a value: its code and that of the functions it holds; of another object, the type."""
    while isinstance(function, partial):
        function = function.func
    function = function.__func__ if isinstance(function, MethodType) else function
    function = unwrap(function) if isinstance(function, FunctionType) else function
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return cast("Hashable", type(function))
    if depth == 0:
        return code
    return (code, *(code_of(held, depth - 1) for held in _held(function)))


def _held(function: Any) -> list[Any]:
    """Callables in the closure of a function."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return [x for x in found if callable(x)]


@dataclass
class _Case:
    """One loss in one mode of the model.

    Attributes:
        passed: it was checked.
        missing: in what no two examples that were checked differ; None before the first look.
        left: batches that are still looked at for that.
    """

    passed: bool = False
    missing: frozenset[Feature] | None = None
    left: int = _BATCHES

    @property
    def due(self) -> bool:
        return not self.passed or bool(self.missing and self.left)


@dataclass
class Watch:
    """What has been checked so far."""

    _cases: dict[Hashable, _Case] = field(default_factory=dict)

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
        key = (tuple(module.training for module in model.modules()), code_of(loss_fn))
        case = self._cases.setdefault(key, _Case())
        if not count or not case.due:
            return
        with kept_numbers():

            def decide() -> _Look:
                begun = seed()
                begin_at(begun)  # of what datasets draw
                return begun, _chosen(case, reader(), count, most)

            begun, chosen = agreed(decide)
            begin_at(begun)
            rows, batch_of = chosen.rows, reader()
            worth = chosen.shown or not case.passed
            together = min(most, len(rows))
            passed = worth and check(lambda *some: batch_of(*(rows[i] for i in some)), together, beside=chosen.beside)
        if passed:
            case.passed, case.missing = True, chosen.missing
        elif case.passed:
            case.left -= 1


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
    leaves = [(i, x) for i, x in enumerate(tree_flatten(first)[0]) if isinstance(x, Tensor)]
    every = {(i, "value") for i, _ in leaves} | {(i, "length") for i, x in leaves if x.dim() > 1}
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
