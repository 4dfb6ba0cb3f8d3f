"""Follow the batch axis through every operation of a forward pass.

Two modes of torch do it. The dispatch mode sees every ATen operation and keeps the state of every
tensor: this is the proof. The function mode sees what Python code calls. It notes reads that leave
torch, and it gives parameters that meet the examples a row for each of them (`gradients.shared`),
which is no part of the proof.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpkfc.tracking.axes import (
    PARAMETRIC,
    PUBLIC,
    BatchAxis,
    Operation,
    Parametric,
    Public,
    State,
    Total,
    Unknown,
    tensors_in,
)
from dpkfc.tracking.batch_rules import RULES, TOTAL_RULES, Rule, pointwise, rule_name

_BATCH, _TOTAL, _PARAMETRIC, _UNKNOWN, _HISTORY = 1, 2, 4, 8, 16
_READS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item", "allclose"})
_LEAVES_TORCH = frozenset(
    {
        *("numpy", "tolist", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr"),
        *("__reduce_ex__", "__deepcopy__", "apply_", "map_", "map2_", "_typed_storage"),
    }
)
_WRITES_VALUES = frozenset({"apply_", "map_", "map2_"})
_CREATES = frozenset(
    {"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer", "from_dlpack", "new_tensor"}
)
_TAKES_LISTS = frozenset({"__getitem__", "__setitem__", "new"})
_MEETS_RUNNING_STATISTICS = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
)
_DRAWS = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "bernoulli",
        "uniform",
        "normal",
        "exponential",
        "random",
        "log_normal",
    }
)
# Functions whose branches on values only choose between forms with equal results, or only check
# values.
_HARMLESS_READS = frozenset(
    {
        ("transformers.masking_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"),
        ("transformers.masking_utils", "find_packed_sequence_indices"),
        ("transformers.modeling_attn_mask_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.modeling_attn_mask_utils", "_prepare_4d_attention_mask_for_sdpa"),
        ("transformers.modeling_utils", "warn_if_padding_and_no_attention_mask"),
        ("torch.nn.functional", "multi_head_attention_forward"),
    }
)


class UnknownOperation(ValueError):
    """An operation whose effect on the batch axis is not known, under `verify="strict"`."""


class _Reference(weakref.ref[Tensor]):
    __slots__ = ("key",)
    key: int


class Tracker:
    """Keep the state of every tensor of one forward pass over N >= 2 examples.

    Args:
        size: examples N.
        persistent: tensors that outlive the pass (buffers), which no example may be written into.
        trusts_public_rows: not all of the batch is declared, so a public tensor with a row for each
            example may be part of it.

    Attributes:
        failure: the first reason why the pass is not proved, or None.
        altered: the first of them that is no mere read of values, or None.
        is_opaque: the batch holds values that are no tensors.
        call: calls a function of torch in the place of the function mode; None calls it as it is.
        read: ids of the declared parameters that were read outside of a layer that covers them.
    """

    def __init__(
        self, size: int, persistent: Iterable[Tensor] = (), *, trusts_public_rows: bool = False
    ) -> None:
        self.size = size
        self.trusts_public_rows = trusts_public_rows
        self.failure: Unknown | None = None
        self.altered: Unknown | None = None
        self.is_opaque = False
        self.call: Callable[[Any, Any, Any], Any] | None = None
        self.read: set[int] = set()
        self._parameters: set[int] = set()
        self._states: dict[int, State] = {}
        self._references: dict[int, _Reference] = {}
        self._persistent = {_memory(x) for x in persistent}
        self._covered: set[int] = set()
        self._interiors: list[list[int]] = []
        self._rewritten: dict[int, Unknown] = {}
        self._aliases: dict[int, int] = {}
        self._paused = 0
        self._calls = 0
        self._permitted = 0
        self._rules: dict[Any, tuple[Rule | None, Rule | None]] = {}

    # -- states ------------------------------------------------------------------------------------

    def state(self, x: Tensor) -> State | None:
        """Return what is known of a tensor, None if no example and no parameter decide it."""
        if is_lazy(x):
            return None  # it has no values yet, and no operation of torch may look at it
        key = id(x)
        if key in self._states and not self._shows_base(x):
            state = self._states[key]
            if self._rewritten and x._is_view() and id(x._base) in self._rewritten:
                return self._rewritten[id(x._base)]
            return None if key in self._covered or type(state) is Public else state
        if key in self._covered:
            return None
        if x._is_view() and (base := x._base) is not None and id(base) in self._states:
            return self._state_of_view(x, base)
        if x.requires_grad:
            if x.grad_fn is None:
                return PARAMETRIC
            return Unknown(
                "autograd",
                "a tensor was made where no operation is seen, as by a compiled function or a"
                " kernel",
            )
        if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
            return Unknown(type(x).__name__, "tensors of this type are not followed")
        return None

    def _shows_base(self, x: Tensor) -> bool:
        """Return whether a tensor is a view, noted as public, whose base may be written since."""
        return type(self._states[id(x)]) is Public and x._is_view() and id(x._base) in self._states

    def _state_of_view(self, x: Tensor, base: Tensor) -> State | None:
        """Return the state of a view whose base was written after it was made."""
        state = self.state(base)
        if not isinstance(state, BatchAxis):
            return state
        moved = _same_memory(state, base, x, self.size)
        return (
            moved
            if moved is not None
            else Unknown("view", "a view of a tensor that the examples were written into")
        )

    def is_declared(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter, or was seen before."""
        return id(x) in self._parameters or id(x) in self._states

    def axis(self, x: Any) -> BatchAxis | None:
        """Return the batch axis of a tensor, None where it has none."""
        state = self.state(x) if isinstance(x, Tensor) else None
        return state if isinstance(state, BatchAxis) else None

    def set_state(self, x: Tensor, state: State | None) -> None:
        """Declare what a tensor is."""
        key = id(x)
        if state is None:
            self._states.pop(key, None)
            return
        self._states[key] = state
        if self._interiors:
            self._interiors[-1].append(key)
        self._remember(x)

    def _remember(self, x: Tensor) -> None:
        """Forget what is noted of a tensor as soon as it is freed."""
        key = id(x)
        if key not in self._references:
            reference = _Reference(x, self._forget)
            reference.key = key
            self._references[key] = reference

    def _forget(self, reference: Any) -> None:
        self._states.pop(reference.key, None)
        self._references.pop(reference.key, None)
        self._rewritten.pop(reference.key, None)
        self._aliases.pop(reference.key, None)

    def _note_alias(self, x: Tensor) -> None:
        """Note a tensor that shares memory with another one, of which it is no view."""
        self._remember(x)
        self._aliases[id(x)] = _memory(x)

    def declare_batch(self, batch: Any) -> None:
        """Declare that every tensor of a batch has its examples in front, or is unknown.

        Values of other types are not followed: where a batch has them, tensors that are made of
        values are unknown too.
        """
        for x in tree_leaves(batch):
            if isinstance(x, Tensor):
                leads = x.dim() > 0 and x.shape[0] == self.size
                lost = Unknown(
                    "batch",
                    f"a tensor {list(x.shape)} of the batch does not have {self.size} examples in"
                    " front",
                )
                self.set_state(x, BatchAxis(0) if leads else lost)
            elif x is not None:
                self.is_opaque = True

    def declare_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Declare the trainable parameters."""
        for p in parameters:
            self.set_state(p, PARAMETRIC)
            self._parameters.add(id(p))

    def fail(self, operation: str, reason: str, *, is_read: bool = False) -> None:
        """Note that the pass is not proved; the first reason stays.

        Args:
            operation: what was called.
            reason: what it did.
            is_read: values were shown to Python code, and no tensor or gradient was changed.
        """
        failure = Unknown(operation, reason)
        self.failure = self.failure or failure
        if not is_read:
            self.altered = self.altered or failure

    # -- what a layer reads itself -----------------------------------------------------------------

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Begin to treat parameters as public; the call of their layer gives their gradients."""
        self._covered.update(id(p) for p in parameters)
        self._interiors.append([])

    def uncover(self, parameters: Iterable[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        """End to treat parameters as public.

        Args:
            parameters: as of `cover`.
            outputs: of the call. What else was computed in it depends on the parameters in a way
                that the call does not show.
        """
        self._covered.difference_update(id(p) for p in parameters)
        known = {id(x) for x in outputs}
        for key in self._interiors.pop():
            state = self._states.get(key)
            if key in known or state is None:
                continue
            if isinstance(state, Public):
                self._states[key] = PARAMETRIC
            elif isinstance(state, (BatchAxis, Total)):
                self._states[key] = Unknown(
                    "layer", "what a layer computes inside is used outside of it"
                )

    def pause(self) -> None:
        """Stop following operations, inside a module whose outputs the caller declares."""
        self._paused += 1

    def resume(self) -> None:
        """Follow operations again."""
        self._paused -= 1

    # -- modes -------------------------------------------------------------------------------------

    def modes(self) -> tuple[Any, Any]:
        """Return the two modes that follow operations, for a caller who enters and leaves them."""
        return _Dispatch(self), _Functions(self)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow all operations of the body."""
        with _Dispatch(self), _Functions(self):
            yield

    def follow(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Take note of one ATen operation that was made."""
        if self._paused:
            return
        if function is torch.ops.aten.detach.default:
            self._note_alias(output)
        if function is torch.ops.aten.lift_fresh.default and not self._calls:
            self.set_state(
                output,
                Unknown(
                    str(function),
                    "a tensor was made of values where no function of torch was called",
                ),
            )
            return
        states = self._states
        kinds = 0
        unknown = None
        for x in _operands(args, kwargs):
            state = states.get(id(x))
            if state is None or type(state) is Public or id(x) in self._covered:
                if type(x) is Tensor and not (x.requires_grad or x._is_view()):
                    continue
                kinds |= _HISTORY
                state = self.state(x)
            if type(state) is BatchAxis:
                kinds |= _BATCH
            elif type(state) is Unknown:
                kinds |= _UNKNOWN
                unknown = unknown or state
            elif type(state) is Total:
                kinds |= _TOTAL
            elif state is not None:
                kinds |= _PARAMETRIC
                if id(x) in self._parameters:
                    self.read.add(id(x))
        if kinds:
            self._note(function, args, kwargs, output, kinds, unknown)
        elif (
            torch.Tag.nondeterministic_seeded in function.tags
            and rule_name(function).removesuffix("_like") in _DRAWS
        ):
            values = () if function._schema.name.endswith("_like") else _operands(args, kwargs)
            if all(y is output or torch.equal(y, y.flatten()[:1].expand_as(y)) for y in values):
                self._note_draw(output)

    def _note_draw(self, x: Tensor) -> None:
        """Give random numbers of the length of the batch to the examples.

        A batch of one draws them too.

        The numbers must have one distribution, so the caller looks at tensors of means or
        probabilities.
        """
        places = [dim for dim, length in enumerate(x.shape) if length == self.size]
        if not places or x._is_view() or _memory(x) in self._persistent:
            return
        if len(places) == 1 or places[0] == 0:
            self.set_state(x, BatchAxis(places[0]))

    def _note(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        kinds: int,
        unknown: Unknown | None,
    ) -> None:
        outputs = list(tensors_in((output,)))
        answer: Any
        if unknown is not None:
            answer = unknown
        elif kinds == _HISTORY:
            answer = PUBLIC
        elif not kinds & (_BATCH | _TOTAL):
            answer = PARAMETRIC
        elif kinds & _PARAMETRIC:
            answer = Unknown(
                str(function),
                f"a trainable parameter is used outside its layer (shapes {_shapes(args, kwargs)})",
            )
        else:
            answer = self._apply(function, args, kwargs, output, bool(kinds & _TOTAL))
        if torch.Tag.dynamic_output_shape in function.tags and self._has_private_shape(
            function, args, answer
        ):
            self.fail(str(function), "the shape of a tensor depends on the examples", is_read=True)
        if not outputs:
            self._note_without_output(function, args, answer)
            return
        answers = answer if isinstance(answer, (list, tuple)) else [answer] * len(outputs)
        writes = function._schema.is_mutable
        for x, state in zip(outputs, answers, strict=False):
            if writes:
                self._write(function, x, state)
            elif state is not None:
                self.set_state(x, state)
        if not isinstance(answer, (Parametric, Public)):
            self._write_into_operands(function, args, kwargs, outputs)

    def _has_private_shape(self, function: Any, args: Any, answer: Any) -> bool:
        """Return whether values of the examples decide the number of entries of a result."""
        if isinstance(answer, (Parametric, Public)):
            return False
        if rule_name(function) != "index":
            return True
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        return any(_is_private(self.state(x)) for x in masks)

    def _write_into_operands(
        self, function: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> None:
        """Take note of operands that an operation writes into without returning them."""
        name = rule_name(function)
        writes_statistics = name in _MEETS_RUNNING_STATISTICS
        if not (writes_statistics or function._schema.is_mutable):
            return
        returned = {id(x) for x in outputs}
        operation = Operation(function, args, kwargs, outputs, self.size, self.state)
        for argument in function._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if writes_statistics and argument.name in ("running_mean", "running_var"):
                is_written = bool(operation.argument("training"))
            if is_written:
                for x in tensors_in((operation.argument(argument.name),)):
                    if id(x) not in returned:
                        self._write(
                            function, x, Unknown(str(function), "it writes into its operands")
                        )

    def _apply(self, function: Any, args: Any, kwargs: Any, output: Any, has_total: bool) -> Any:
        if function not in self._rules:
            name = rule_name(function)
            rule = RULES.get(name)
            if torch.Tag.pointwise in function.tags and name != "clone":
                rule = pointwise
            self._rules[function] = rule, TOTAL_RULES.get(name)
        rule, total_rule = self._rules[function]
        operation = Operation(
            function, args, kwargs, output, self.size, self.state, self.trusts_public_rows
        )
        chosen = total_rule if has_total else rule
        if chosen is None:
            return operation.lost(
                "a sum over the examples is used here"
                if has_total
                else "no batch rule is registered for it"
            )
        try:
            return chosen(operation)
        except (
            Exception
        ) as error:  # a run must not stop where a rule meets operands that it does not expect
            return operation.lost(f"its batch rule failed: {error!r:.60}")

    def _note_without_output(self, function: Any, args: Any, answer: Any) -> None:
        """Note an operation that returns no tensor: it reads values, or writes its operands."""
        name = rule_name(function)
        if name in _READS or not function._schema.is_mutable:
            has_batch = not isinstance(answer, (Parametric, Public))
            if has_batch and name in _READS and not self._permitted and not _is_harmless():
                self.fail(
                    str(function),
                    "the program reads a value that depends on the examples",
                    is_read=True,
                )
            return
        self._write_into_operands(function, args, {}, [])

    def _write(self, function: Any, x: Tensor, state: State | None) -> None:
        """Set the state of a tensor that was written into, and of the tensor that it views."""
        is_private = state is not None and not isinstance(state, (Parametric, Public))
        memory = _memory(x)
        if is_private and memory in self._persistent:
            self.fail(
                str(function), "the examples are written into a tensor that outlives the pass"
            )
            state = Unknown(
                str(function), "the examples were written into a tensor that outlives the pass"
            )
        if is_private and memory in self._aliases.values():
            self.fail(
                str(function), "the examples are written into memory that .data or .detach() shares"
            )
        if is_private and x.is_inference():
            self.fail(
                str(function),
                "the examples are written in inference mode, in which views are not known",
            )
        if state is None:
            return
        base = x._base if x._is_view() else None
        if base is not None:
            known = self.state(base) if id(base) in self._states else None
            moved: State | None = state
            if isinstance(state, BatchAxis):
                moved = _same_memory(state, x, base, self.size)
                if moved is None or (isinstance(known, BatchAxis) and known != moved):
                    moved = Unknown(
                        str(function),
                        "the examples are written into a part of a tensor that cannot be followed",
                    )
            if isinstance(known, Unknown):
                moved = known
            self.set_state(base, moved)
            if isinstance(moved, Unknown):
                self._rewritten[id(base)] = moved  # other views of it show the same memory
        elif isinstance(state, Unknown):
            self._rewritten[id(x)] = state
        self.set_state(x, state)


class _Dispatch(TorchDispatchMode):
    """Show every ATen operation to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and follow it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.is_on:
            self._tracker.follow(func, args, kwargs, output)
        return output


class _Functions(TorchFunctionMode):
    """Show what Python code calls to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        self._tracker._calls += 1
        try:
            return self._call(func, args, kwargs or {})
        finally:
            self._tracker._calls -= 1

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracker = self._tracker
        name = getattr(func, "__name__", "")
        if tracker._paused or not self.is_on:
            return func(*args, **kwargs)
        if name in _CREATES and (tracker.is_opaque or _has_private_numbers(tracker, args, kwargs)):
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                tracker.set_state(
                    result, Unknown(f"torch.{name}", "a tensor was made of single values")
                )
            return result
        if name in _LEAVES_TORCH and not tracker._permitted:
            if any(_is_private(tracker.state(x)) for x in tensors_in(args)) and not _is_harmless():
                is_read = name not in _WRITES_VALUES
                tracker.fail(
                    f"Tensor.{name}",
                    "values that depend on the examples leave torch",
                    is_read=is_read,
                )
        if name in _TAKES_LISTS and _has_private_numbers(
            tracker, args[1] if type(args[1]) is tuple else args[1:], kwargs
        ):
            tracker.fail(
                f"Tensor.{name}", "a list of values that depend on the examples becomes a tensor"
            )
        if (
            name == "register_hook"
            and _is_private(tracker.state(args[0]))
            and not _only_gathers(args[1])
        ):
            tracker.fail("Tensor.register_hook", "a hook may change the gradients of the examples")
        if name == "one_hot" and _number_of_classes(args, kwargs) > 0:
            return _permitted(tracker, func, args, kwargs)
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "data":
            result = func(*args, **kwargs)
            tracker.set_state(result, tracker.state(args[0]))
            tracker._note_alias(result)
            return result
        if (
            name == "__set__"
            and getattr(func.__self__, "__name__", "") == "data"
            and _is_private(tracker.state(args[1]))
        ):
            tracker.fail("Tensor.data", "the examples are written into a tensor by .data")
        if tracker.call is not None and torch.is_grad_enabled():
            return tracker.call(func, args, kwargs)
        return func(*args, **kwargs)


def _has_private_numbers(tracker: Tracker, args: Any, kwargs: Any) -> bool:
    """Return whether tensors of the examples lie inside lists from which a tensor is made."""
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
    return any(_is_private(tracker.state(x)) for x in tensors_in(lists))


def _memory(x: Tensor) -> int:
    """Return a number that is the same for all tensors that share their memory."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)


def _permitted(tracker: Tracker, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that reads values only to check them."""
    tracker._permitted += 1
    try:
        return func(*args, **kwargs)
    finally:
        tracker._permitted -= 1


def _number_of_classes(args: Any, kwargs: Any) -> int:
    return int(args[1] if len(args) > 1 else kwargs.get("num_classes", -1))


def _only_gathers(hook: Any) -> bool:
    """Return whether a hook is one of FSDP2.

    It gathers parameters for the backward pass and returns the gradient as it is.
    """
    return str(hook.__module__).startswith("torch.distributed.fsdp.")


def _is_private(state: State | None) -> bool:
    return isinstance(state, (BatchAxis, Unknown))


def _is_harmless() -> bool:
    """Return whether a listed function reads the value; its branches give one result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_name) in _HARMLESS_READS:
            return True
        # a user's function reads what it wants
        if module.partition(".")[0] not in (
            "torch",
            "dpkfc",
            "transformers",
        ):
            return False
        frame = frame.f_back
    return False


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) is list or type(x) is tuple:
            yield from tensors_in(x)
    for x in kwargs.values():
        if isinstance(x, Tensor):
            yield x


def _shapes(args: Any, kwargs: Any) -> str:
    return " and ".join(str(list(x.shape)) for x in list(_operands(args, kwargs))[:3])


def _same_memory(axis: BatchAxis, one: Tensor, other: Tensor, size: int) -> BatchAxis | None:
    """Return where the axis of a tensor lies in another that shares its memory, else None."""
    step = one.stride(axis.dim) * axis.post
    for dim, length in enumerate(other.shape):
        stride = other.stride(dim)
        if stride == 0:
            continue
        post, rest = divmod(step, stride)
        if rest == 0 and post >= 1 and length % (size * post) == 0:
            return BatchAxis(dim, length // (size * post), post)
    return None
