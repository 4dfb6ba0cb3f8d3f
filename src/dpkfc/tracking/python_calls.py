"""What Python code calls that no ATen operation shows: reads, hooks, tensors made of values.

Each check or note is of one kind of call, and changes nothing that is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from traceback import walk_stack
from typing import Any

from torch import Tensor

from dpkfc.tracking.batch_rules import split_names
from dpkfc.tracking.harmless_reads import is_harmless, is_of_torch
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import Tracker

_LEAVES_TORCH = split_names(
    "numpy tolist __array__ __dlpack__ untyped_storage storage data_ptr __reduce_ex__ "
    "__deepcopy__ __repr__ __format__ apply_ map_ map2_ _typed_storage"
)
_WRITES_VALUES = split_names("apply_ map_ map2_")
_CREATES = split_names("tensor as_tensor from_numpy asarray frombuffer from_dlpack new_tensor")
# Python modules between a use of `grad_fn` and the code that asked for it.
_PASS_ON_GRADIENTS = (
    "dpkfc.tracking.modes",
    __name__,
    "torch.autograd.graph",
    "torch.overrides",
    "torch.utils._device",
)


def _check_values(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker.is_any_private(values) and not is_harmless():
        why = "values that depend on the examples leave torch"
        tracker.fail(f"Tensor.{name}", why, is_read=name not in _WRITES_VALUES)
        if name == "numpy":
            tracker.note_array(values[0])


def _check_lists(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    given = values[1:]
    # A tuple of indices holds tensors, which are followed; a tuple of numbers becomes a tensor.
    if name != "new" and type(values[1]) is tuple:
        given = values[1]
    if tracker.has_numbers(given):
        why = "a list of values that depend on the examples becomes a tensor"
        tracker.fail(f"Tensor.{name}", why)


def _check_hook(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    # The hooks of FSDP2 gather parameters and return the gradient as it is.
    if tracker.is_any_private(values):
        if not str(values[1].__module__).startswith("torch.distributed.fsdp."):
            why = "a hook may change the gradients of the examples"
            tracker.fail("Tensor.register_hook", why)


def _check_graph(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker.is_any_private(values):
        frames = walk_stack(sys._getframe(1))
        callers = (frame.f_globals.get("__name__", "") for frame, _ in frames)
        if not is_of_torch(next(x for x in callers if x not in _PASS_ON_GRADIENTS)):
            why = "a hook may change the gradients of the examples"
            tracker.fail("Tensor.grad_fn", why)


def _check_data(tracker: Tracker, name: str, values: Sequence[Any]) -> None:
    if tracker.is_any_private(values[1:]):
        tracker.fail("Tensor.data", "the examples are written into a tensor by .data")


def _note_created(tracker: Tracker, name: str, values: Sequence[Any], result: Tensor) -> None:
    if tracker.is_opaque or tracker.has_shown or tracker.has_numbers(values):
        tracker.set_state(result, Unknown(f"torch.{name}", "a tensor was made of single values"))


NOTES_OF_RESULTS = dict.fromkeys(_CREATES, _note_created)
# By name, a call that is checked before it is made.
CHECKS_OF_CALLS: dict[str, Callable[[Tracker, str, Sequence[Any]], None]] = {
    **dict.fromkeys(_LEAVES_TORCH, _check_values),
    **dict.fromkeys(("__getitem__", "__setitem__", "new"), _check_lists),
    "register_hook": _check_hook,
    "grad_fn.__get__": _check_graph,
    "data.__set__": _check_data,
}


def call_one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `one_hot` with a number of classes; it reads values only to check them."""
    return func(*args, **kwargs)


def number_of_classes(args: Any, kwargs: Any) -> int:
    """Return the number of classes that `one_hot` was given, -1 where it was given none."""
    if len(args) > 1:
        return int(args[1])
    return int(kwargs.get("num_classes", -1))
