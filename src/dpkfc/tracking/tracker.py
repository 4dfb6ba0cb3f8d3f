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
from dataclasses import replace
from functools import cache
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpkfc.tracking.batch_rules import (
    PARAMETRIC,
    PUBLIC,
    RULES,
    TOTAL_RULES,
    BatchAxis,
    Operation,
    Parametric,
    Public,
    Rule,
    State,
    Total,
    Unknown,
    are_places_equal,
    names_of_shapes,
    pointwise,
    rule_name,
    tensors_in,
)

_BATCH, _TOTAL, _PARAMETRIC, _UNKNOWN, _HISTORY = 1, 2, 4, 8, 16
_READS = frozenset("_local_scalar_dense is_nonzero equal item allclose".split())
_LEAVES_TORCH = frozenset(
    (
        "numpy tolist __array__ __dlpack__ untyped_storage storage data_ptr __reduce_ex__ "
        "__deepcopy__ apply_ map_ map2_ _typed_storage"
    ).split()
)
_WRITES_VALUES = frozenset("apply_ map_ map2_".split())
_CREATES = frozenset(
    ("tensor as_tensor from_numpy asarray frombuffer from_dlpack new_tensor").split()
)
# Operations in place whose result has nothing of the old values.
_OVERWRITES = frozenset(
    (
        "copy fill zero normal uniform random exponential bernoulli cauchy geometric "
        "log_normal _foreach_copy _foreach_zero"
    ).split()
)
# Memory that these return holds what was there before, which is no part of the program.
_UNFILLED = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)
_TAKES_LISTS = frozenset("__getitem__ __setitem__ new".split())
_MEETS_RUNNING_STATISTICS = frozenset(
    ("native_batch_norm cudnn_batch_norm miopen_batch_norm").split()
)
_DRAWS = frozenset(
    ("rand randn randint bernoulli uniform normal exponential random log_normal").split()
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
        self._persistent = set(map(_memory, persistent))
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
        base = x._base if x._is_view() else None
        known = self._states.get(key)
        # A view that was noted as public may show what was written into its base since.
        is_stale = type(known) is Public and base is not None and id(base) in self._states
        if known is not None and not is_stale:
            if base is not None and id(base) in self._rewritten:
                return self._rewritten[id(base)]
            return None if key in self._covered or type(known) is Public else known
        if key in self._covered:
            return None
        if base is not None and id(base) in self._states:
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

    def _state_of_view(self, x: Tensor, base: Tensor) -> State | None:
        """Return the state of a view whose base was written after it was made."""
        state = self.state(base)
        if not isinstance(state, BatchAxis):
            return state
        lost = Unknown("view", "a view of a tensor that the examples were written into")
        return _same_memory(state, base, x, self.size) or lost

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
            if not isinstance(x, Tensor):
                self.is_opaque = self.is_opaque or x is not None
            elif x.dim() and x.shape[0] == self.size:
                self.set_state(x, BatchAxis(0))
            else:
                shape = list(x.shape)
                why = f"a tensor {shape} of the batch does not have {self.size} examples in front"
                self.set_state(x, Unknown("batch", why))

    def declare_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Declare the trainable parameters."""
        for p in parameters:
            self.set_state(p, PARAMETRIC)
            self._parameters.add(id(p))

    def fail(self, operation: Any, reason: str, *, is_read: bool = False) -> Unknown:
        """Note that the pass is not proved, and return why; the first reason stays.

        Args:
            operation: what was called.
            reason: what it did.
            is_read: values were shown to Python code, and no tensor or gradient was changed.
        """
        failure = Unknown(str(operation), reason)
        self.failure = self.failure or failure
        if not is_read:
            self.altered = self.altered or failure
        return failure

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
        known = set(map(id, outputs))
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

    def values_before(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[int, Tensor]:
        """Return copies of public tensors whose memory an operation is about to write.

        Old values can be part of the result: `table[:N].clone().add_(x)` adds the row of the place
        that an example has in the batch.
        """
        if self._paused or not _writes(function):
            return {}
        operands = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if not self._is_any_private(operands):
            return {}
        targets = [*tensors_in((kwargs.get("out"),))]
        if _is_in_place(function):
            targets += tensors_in(args[:1])
        # The rest of a base stays where a view is written over.
        bases = [x._base for x in targets if x._is_view() and x._base is not None]
        is_overwritten = rule_name(function) in _OVERWRITES
        read = operands[1:] if is_overwritten else [*tensors_in(args)]
        memories = set(map(_memory, targets))
        copies = {}
        for x in [*bases, *read]:
            if _memory(x) in memories and isinstance(self.state(x), (Public, type(None))):
                copies[id(x)] = torch.ops.aten.clone.default(x)
        return copies

    def follow(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        before: Mapping[int, Tensor],
    ) -> None:
        """Take note of one ATen operation that was made, and of what it has changed in place."""
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
        kinds, unknown = self._kinds_of_operands(args, kwargs)
        if kinds:
            operation = Operation(
                function,
                args,
                kwargs,
                output,
                self.size,
                self.state,
                self.trusts_public_rows,
                before,
            )
            self._note(operation, kinds, unknown)
        elif torch.Tag.nondeterministic_seeded in function.tags:
            self._note_draw(function, _operands(args, kwargs), output)

    def _kinds_of_operands(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, Unknown | None]:
        """Return which kinds of states the operands have, and the first unknown one."""
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
        return kinds, unknown

    def _note_draw(self, function: Any, operands: Iterable[Tensor], x: Tensor) -> None:
        """Give random numbers of the length of the batch to the examples.

        A batch of one draws them too. The numbers must have one distribution, so operands that hold
        means or probabilities may have one value only.
        """
        if rule_name(function).removesuffix("_like") not in _DRAWS:
            return
        if not function._schema.name.endswith("_like"):
            for y in operands:
                if y is not x and not torch.equal(y, y.flatten()[:1].expand_as(y)):
                    return
        places = [dim for dim, length in enumerate(x.shape) if length == self.size]
        if not places or x._is_view() or _memory(x) in self._persistent:
            return
        if len(places) == 1 or places[0] == 0:
            self.set_state(x, BatchAxis(places[0]))

    def _note(self, operation: Operation, kinds: int, unknown: Unknown | None) -> None:
        function, outputs = operation.function, operation.outputs
        answer: Any
        if unknown is not None:
            answer = unknown
        elif kinds == _HISTORY:
            answer = PUBLIC
        elif not kinds & (_BATCH | _TOTAL):
            answer = PARAMETRIC
        elif kinds & _PARAMETRIC:
            shapes = names_of_shapes(operation.tensors)
            why = f"a trainable parameter is used outside its layer (shapes {shapes})"
            answer = Unknown(str(function), why)
        else:
            answer = self._apply(operation, bool(kinds & _TOTAL))
        depends = not isinstance(answer, (Parametric, Public))
        if torch.Tag.dynamic_output_shape in function.tags and depends:
            if self._has_private_shape(operation):
                self.fail(function, "the shape of a tensor depends on the examples", is_read=True)
        if not outputs:
            self._note_without_output(operation, depends)
            return
        answers = answer if isinstance(answer, (list, tuple)) else [answer] * len(outputs)
        writes = function._schema.is_mutable
        for x, state in zip(outputs, answers, strict=False):
            if writes:
                self._write(function, x, state, operation.before)
            elif state is not None:
                self.set_state(x, state)
        if depends:
            self._write_into_operands(operation)

    def _has_private_shape(self, operation: Operation) -> bool:
        """Return whether values of the examples decide the number of entries of a result."""
        if rule_name(operation.function) != "index":
            return True
        indices = operation.args[1]
        masks = [x for x in indices if x is not None and x.dtype in (torch.bool, torch.uint8)]
        return self._is_any_private(masks)

    def _is_any_private(self, values: Any) -> bool:
        """Return whether a tensor among some values depends on the examples."""
        return any(isinstance(self.state(x), (BatchAxis, Unknown)) for x in tensors_in(values))

    def _write_into_operands(self, operation: Operation) -> None:
        """Take note of operands that an operation writes into without returning them."""
        schema = operation.function._schema
        writes_statistics = rule_name(operation.function) in _MEETS_RUNNING_STATISTICS
        if not (writes_statistics or schema.is_mutable):
            return
        returned = set(map(id, operation.outputs))
        written = Unknown(str(operation.function), "it writes into its operands")
        for argument in schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if writes_statistics and argument.name in ("running_mean", "running_var"):
                is_written = bool(operation.argument("training"))
            if is_written:
                for x in tensors_in((operation.argument(argument.name),)):
                    if id(x) not in returned:
                        self._write(operation.function, x, written)

    def _apply(self, operation: Operation, has_total: bool) -> Any:
        function = operation.function
        if function not in self._rules:
            name = rule_name(function)
            rule = RULES.get(name)
            if torch.Tag.pointwise in function.tags and name != "clone":
                rule = pointwise
            self._rules[function] = rule, TOTAL_RULES.get(name)
        chosen = self._rules[function][has_total]
        if chosen is None:
            why = "no batch rule is registered for it"
            if has_total:
                why = "a sum over the examples is used here"
            return operation.lost(why)
        try:
            return chosen(operation)
        # A run must not stop where a rule meets operands that it does not expect.
        except Exception as error:
            return operation.lost(f"its batch rule failed: {error!r:.60}")

    def _note_without_output(self, operation: Operation, depends: bool) -> None:
        """Note an operation that returns no tensor: it reads values, or writes its operands."""
        function = operation.function
        is_read = rule_name(function) in _READS
        if not is_read and function._schema.is_mutable:
            # FSDP2 gathers parameters into keyword arguments, which stay parameters.
            kwargs = operation.kwargs if depends else {}
            self._write_into_operands(replace(operation, kwargs=kwargs))
        elif depends and is_read and not self._permitted and not _is_harmless():
            why = "the program reads a value that depends on the examples"
            self.fail(function, why, is_read=True)

    def _write(
        self,
        function: Any,
        x: Tensor,
        state: State | None,
        before: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Set the state of a tensor that was written into, and of the tensor that it views."""
        is_private = not isinstance(state, (Parametric, Public, type(None)))
        memory = _memory(x)
        if is_private and memory in self._persistent:
            why = "the examples are written into a tensor that outlives the pass"
            state = self.fail(function, why)
        if is_private and memory in self._aliases.values():
            why = "the examples are written into memory that .data or .detach() shares"
            self.fail(function, why)
        if is_private and x.is_inference():
            why = "the examples are written in inference mode, in which views are not known"
            self.fail(function, why)
        if state is None:
            return
        base = x._base if x._is_view() else None
        if base is not None:
            base_state = self._state_of_base(function, x, state, before.get(id(base)))
            self.set_state(base, base_state)
            if isinstance(base_state, Unknown):
                self._rewritten[id(base)] = base_state  # other views of it show the same memory
        elif isinstance(state, Unknown):
            self._rewritten[id(x)] = state
        self.set_state(x, state)

    def _state_of_base(
        self, function: Any, view: Tensor, state: State, before: Tensor | None
    ) -> State:
        """Return the state of a tensor after a view of it was written.

        Args:
            function: what wrote.
            view: the view.
            state: of the view.
            before: the old values of the tensor, None where it was not public.
        """
        base: Any = view._base
        known = self.state(base) if id(base) in self._states else None
        if isinstance(known, Unknown):
            return known
        if not isinstance(state, BatchAxis):
            return state
        moved = _same_memory(state, view, base, self.size)
        if moved is None or (isinstance(known, BatchAxis) and known != moved):
            why = "the examples are written into a part of a tensor that cannot be followed"
            return Unknown(str(function), why)
        if before is not None and not self.trusts_public_rows:
            if not are_places_equal(before, moved, self.size):
                why = "the examples are written beside entries of their places"
                return Unknown(str(function), why)
        return moved


@cache
def _writes(function: Any) -> bool:
    """Return whether an operation writes into operands."""
    return bool(function._schema.is_mutable)


@cache
def _is_in_place(function: Any) -> bool:
    """Return whether an operation changes its first operand."""
    return _writes(function) and str(function.overloadpacket.__name__).endswith("_")


class _Mode:
    """What the two modes of a tracker hold; one that is off shows nothing."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.is_on = True


class _Dispatch(_Mode, TorchDispatchMode):
    """Show every ATen operation to a tracker."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and follow it."""
        kwargs = kwargs or {}
        before = self._tracker.values_before(func, args, kwargs) if self.is_on else {}
        output = func(*args, **kwargs)
        if self.is_on:
            if func in _UNFILLED:
                torch.ops.aten.zero_.default(output)
            self._tracker.follow(func, args, kwargs, output, before)
        return output


class _Functions(_Mode, TorchFunctionMode):
    """Show what Python code calls to a tracker."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        self._tracker._calls += 1
        try:
            return self._call(func, args, kwargs or {})
        finally:
            self._tracker._calls -= 1

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracker = self._tracker
        if tracker._paused or not self.is_on:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_data = getattr(getattr(func, "__self__", None), "__name__", "") == "data"
        self._check(name, is_data, args, kwargs)
        if name in _CREATES and (tracker.is_opaque or self._has_numbers(args, kwargs)):
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                lost = Unknown(f"torch.{name}", "a tensor was made of single values")
                tracker.set_state(result, lost)
            return result
        if name == "__get__" and is_data:
            result = func(*args, **kwargs)
            tracker.set_state(result, tracker.state(args[0]))
            tracker._note_alias(result)
            return result
        if name == "one_hot" and _number_of_classes(args, kwargs) > 0:
            # It reads values only to check them.
            tracker._permitted += 1
            try:
                return func(*args, **kwargs)
            finally:
                tracker._permitted -= 1
        if tracker.call is not None and torch.is_grad_enabled():
            return tracker.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, name: str, is_data: bool, args: Any, kwargs: Any) -> None:
        """Note a call that moves values, or changes gradients, where no operation is seen."""
        tracker = self._tracker
        if name in _LEAVES_TORCH and not tracker._permitted:
            if tracker._is_any_private(args) and not _is_harmless():
                why = "values that depend on the examples leave torch"
                tracker.fail(f"Tensor.{name}", why, is_read=name not in _WRITES_VALUES)
        elif name in _TAKES_LISTS:
            values = args[1] if type(args[1]) is tuple else args[1:]
            if self._has_numbers(values, kwargs):
                why = "a list of values that depend on the examples becomes a tensor"
                tracker.fail(f"Tensor.{name}", why)
        elif name == "register_hook" and tracker._is_any_private(args[:1]):
            # The hooks of FSDP2 gather parameters and return the gradient as it is.
            if not str(args[1].__module__).startswith("torch.distributed.fsdp."):
                tracker.fail(
                    "Tensor.register_hook", "a hook may change the gradients of the examples"
                )
        elif name == "__set__" and is_data and tracker._is_any_private(args[1:]):
            tracker.fail("Tensor.data", "the examples are written into a tensor by .data")

    def _has_numbers(self, args: Any, kwargs: Any) -> bool:
        """Return whether tensors of the examples lie inside lists from which a tensor is made."""
        values = (*args, *kwargs.values())
        lists = [x for x in values if isinstance(x, (list, tuple))]
        return self._tracker._is_any_private(lists)


def _number_of_classes(args: Any, kwargs: Any) -> int:
    return int(args[1] if len(args) > 1 else kwargs.get("num_classes", -1))


def _memory(x: Tensor) -> int:
    """Return a number that is the same for all tensors that share their memory."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)


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
