"""Is the script's loss the mean (or sum) of losses of single examples? What the loss makes of parts of a batch tells.

`loss.backward()` shows the engine the gradient at the model's output and nothing else: whether the loss of one example depends on
the outputs for others cannot be seen in it. A criterion that the engine is given, a module called as `criterion(output, target)`,
can be called again: on single examples, and on parts of the batch that together are the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpkfc.gradients.broadcast import leading_size
from dpkfc.gradients.model_state import restored_state
from dpkfc.gradients.random_state import drawn_since_now, kept_numbers
from dpkfc.integrations._checks import Hook
from dpkfc.integrations._loss_form import TOLERANCE
from dpkfc.integrations._rows import Inputs, picker

__all__ = ["CriterionCheck"]

_SINGLE = 8  # examples that are looked at one by one


class CriterionCheck:
    """Looks at the calls 1, 2, 4, 8, … of a criterion whose result can be differentiated.

    Args:
        criterion: the script's own; it gets a hook until `remove`.
        reduction: "mean" or "sum".

    Attributes:
        passed: whether it was found to be such a reduction; not whether the script differentiates anything else besides.
    """

    def __init__(self, criterion: nn.Module, reduction: str) -> None:
        self._criterion, self._reduction = criterion, reduction
        self._calls, self._next, self._busy, self._tolerance = 0, 1, False, 1e-3
        self.passed = False
        self._handle: RemovableHandle = criterion.register_forward_hook(Hook(self._called), with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
        size = leading_size((args, kwargs))
        if self._busy or module is not self._criterion or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        self._calls += 1
        if self._calls < self._next or loss.dim() or not size or size < 2 or not bool(loss.isfinite()):
            return  # still due where this batch says nothing
        self._busy = True
        try:
            with torch.no_grad(), kept_numbers(), restored_state(module):
                self._look((args, kwargs), size, loss.detach())
        finally:
            self._busy = False
        while self._next <= self._calls:
            self._next *= 2

    def _look(self, inputs: Inputs, size: int, loss: Tensor) -> None:
        drawn, self._tolerance = drawn_since_now(loss.device), TOLERANCE.get(loss.dtype, 1e-3)
        few = range(min(_SINGLE, size))
        starts = [0, *(2**i for i in range(size.bit_length()) if 2**i < size), size]
        parts = [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
        try:
            alike = self._adds_up(inputs, size, few, [[i] for i in few]) and self._adds_up(inputs, size, range(size), parts)
        except (RuntimeError, TypeError, LookupError, ValueError):
            return  # its batch is not the leading axis (CTC), or it wants several: taken on trust, with the warning of those
        if drawn():
            return  # of a random loss two calls differ anyway
        if not alike:
            raise ValueError(self._told())
        self.passed = True

    def _adds_up(self, inputs: Inputs, size: int, rows: Sequence[int], parts: Sequence[Sequence[int]]) -> bool:
        pick, mean = picker(inputs, size), self._reduction == "mean"

        def total(chosen: Sequence[int]) -> Tensor:
            args, kwargs = pick(*chosen)
            found: Tensor = self._criterion(*args, **kwargs).double()
            return found * len(chosen) if mean else found

        whole, each = total(rows), torch.stack([total(part) for part in parts])
        return bool((whole - each.sum()).abs() <= self._tolerance * each.abs().sum() + 1e-6)  # NaN where it divides by nothing

    def _told(self) -> str:
        return (
            f"{type(self._criterion).__name__} is not the {self._reduction} of the losses of single examples: called on each of "
            "them alone, or on parts of a batch, it adds up to something else. Either the loss of an example depends on others "
            "(contrastive pairs within the batch, Cox, AUC, batch statistics, Dice over the batch), or it divides by more than "
            "their number; one example then changes the gradients of the others, and clipping does not bound it. Use a loss of "
            f"each example by itself, reduced by a {self._reduction}"
        )
