"""The two modes of torch that show a pass to a tracker.

The dispatch mode sees every ATen operation: this is the proof. The function mode sees what Python
code calls. It notes reads that leave torch, and it gives parameters that meet the examples a row
for each of them (`gradients/shared_uses.py`), which is not part of the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpkfc.tracking.batch_rules import UNFILLED, rule_name
from dpkfc.tracking.harmless_reads import is_of_torch
from dpkfc.tracking.pooling import run_operation
from dpkfc.tracking.python_calls import (
    CHECKS_OF_CALLS,
    NOTES_OF_RESULTS,
    call_one_hot,
    number_of_classes,
)
from dpkfc.tracking.tracker import Tracker


def modes_of(tracker: Tracker) -> tuple[Any, Any]:
    """Return the two modes that follow operations, for a caller who enters and leaves them."""
    return _Dispatch(tracker), _Functions(tracker)


@contextmanager
def follow(tracker: Tracker) -> Iterator[None]:
    """Show all operations of the body to a tracker."""
    with _Dispatch(tracker), _Functions(tracker):
        yield


class _Mode:
    """What the two modes of a tracker hold; one that is off shows nothing."""

    is_on = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def _note_error(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note an error: the program may catch it, and go on in another way for all examples."""
        tracker = self._tracker
        if self.is_on and tracker.is_any_private((*args, *kwargs.values())):
            name = getattr(function, "__name__", function)
            why = "it raises an error, which the values of an example may decide"
            tracker.fail(name, why, is_read=True)


class UncompiledMode(TorchDispatchMode):
    """A mode of passes that run uncompiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's mark for the compiler would import it."""
        return False


class _Dispatch(_Mode, UncompiledMode):
    """Show every ATen operation to a tracker."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and follow it."""
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            before = self._tracker.values_before(func, args, kwargs)
        try:
            output = run_operation(func, args, kwargs)
        except Exception:
            self._note_error(func, args, kwargs)
            raise
        if rule_name(func) in UNFILLED:
            torch.ops.aten.zero_.default(output)
        with torch._C.DisableTorchFunction():
            self._tracker.follow(func, args, kwargs, output, before)
        return output


class _Functions(_Mode, TorchFunctionMode):
    """Show what Python code calls to a tracker."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        self._tracker.open_calls += 1
        try:
            return self._call(func, args, kwargs)
        except Exception:
            self._note_error(func, args, kwargs)
            raise
        finally:
            self._tracker.open_calls -= 1

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracker = self._tracker
        if tracker.pauses or not self.is_on:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            name = f"{attribute}.{name}"
        self._check(name, args, kwargs)
        if name == "one_hot" and number_of_classes(args, kwargs) > 0:
            return call_one_hot(func, args, kwargs)
        call = tracker.call
        if call is None or not torch.is_grad_enabled():
            result = func(*args, **kwargs)
        else:
            result = call(func, args, kwargs)
        note = NOTES_OF_RESULTS.get(name)
        if note is not None:
            note(tracker, name, [*args, *kwargs.values()], result)
        return result

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a call that moves values, or changes gradients, where no operation is seen."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and not is_of_torch(getattr(hooks[0], "__module__", "")):
            why = "a hook may change what the backward pass reads"
            self._tracker.fail("saved_tensors_hooks", why)
        check = CHECKS_OF_CALLS.get(name)
        if check is not None:
            check(self._tracker, name, [*args, *kwargs.values()])
