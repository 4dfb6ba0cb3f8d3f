"""Follow the batch axis through every operation of a forward pass.

So every gradient is proved to belong to one example. The tracker keeps the state of every tensor.
`modes.py` shows it the operations.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from dpkfc.tracking.batch_rules import (
    DRAWS,
    Operation,
    are_places_equal,
    counts_up,
    has_tag,
    is_shared,
    rule_name,
    split_names,
    tensors_in,
)
from dpkfc.tracking.harmless_reads import is_harmless
from dpkfc.tracking.lookups import is_mask
from dpkfc.tracking.rule_application import apply_rule
from dpkfc.tracking.states import (
    OF_EARLIER_BATCH,
    OUTSIDE_OF_LAYER,
    PARAMETRIC,
    PRIVATE,
    PUBLIC,
    BatchAxis,
    Parametric,
    State,
    Total,
    Unknown,
    names_of_shapes,
)
from dpkfc.tracking.trace import Trace, trace_of

_READS = split_names("_local_scalar_dense is_nonzero equal item allclose")
# Operations in place whose result does not depend on the old values.
_OVERWRITES = split_names(
    "copy fill zero normal uniform random exponential bernoulli cauchy geometric "
    "log_normal _foreach_copy _foreach_zero"
)
# Finds names of operations whose results have private shapes, beside those that torch marks.
_HAVE_OTHER_SHAPES = re.compile("to_sparse|_pack_padded|_pad_packed")
_MEETS_RUNNING_STATISTICS = split_names("native_batch_norm cudnn_batch_norm miopen_batch_norm")


class _Reference(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


def _state_of_unseen(x: Tensor) -> State | None:
    """Return the state of a tensor that no followed operation has made."""
    if x.requires_grad and x.grad_fn is not None:
        return Unknown(
            "autograd",
            "a tensor was made where no operation is seen, as by a compiled function or a kernel",
        )
    if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
        return Unknown(type(x).__name__, "tensors of this type are not followed")
    return None


class Tracker:
    """Keep the state of every tensor of one forward pass over N examples.

    In a batch of one nothing can mix. There a state only says that a tensor depends on it, or on an
    earlier batch.

    Args:
        size: examples N.
        persistent: tensors that outlive the pass (buffers), which no example may be written into.
        trusts_public_rows: not all of the batch is declared, so a public tensor with a row for each
            example may be part of it.

    Attributes:
        failure: the first reason why the pass is not proved, or None.
        altered: the first of them that does more than read values, or None.
        is_opaque: the batch holds values that are not tensors.
        has_shown: values of the examples were shown to the program.
        trace: what was done with the examples; None while it is not noted.
        pauses: how often following was stopped and not taken up again.
        open_calls: calls of functions of torch that run now.
        call: calls a function of torch in the place of the function mode; None calls it as it is.
        read: ids of the declared parameters that were read outside of a layer that covers them.
    """

    # The tracker of the batch before, which knows the tensors that this batch has left.
    _of_last_batch: Tracker | None = None

    def __init__(
        self, size: int, persistent: Iterable[Tensor] = (), *, trusts_public_rows: bool = False
    ) -> None:
        self.size = size
        self.trusts_public_rows = trusts_public_rows
        self.failure: Unknown | None = None
        self.altered: Unknown | None = None
        self.is_opaque = False
        self.has_shown = False
        self.trace: Trace | None = None
        # Tensors whose memory an array shares, with their write counters and values.
        self._shared: list[tuple[Tensor, int, Tensor]] = []
        self.call: Callable[[Any, Any, Any], Any] | None = None
        self.read: set[int] = set()
        self._shown_numbers: set[float] = set()
        self._parameters: set[int] = set()
        self._states: dict[int, State] = {}
        self._references: dict[int, _Reference] = {}
        self.declare_persistent(persistent)
        self._covered: set[int] = set()
        self._interiors: list[list[int]] = []
        self._rewritten: dict[int, Unknown] = {}
        self._aliases: dict[int, int] = {}
        # Memory of the examples: the storage, the layout of a tensor in it, and its state.
        self._memories: dict[int, tuple[_Reference, Any, State]] = {}
        self._has_equal_places = partial(are_places_equal, size=size)
        self.pauses = 0
        self.open_calls = 0

    # -- states ------------------------------------------------------------------------------------

    def state(self, x: Any) -> State | None:
        """Return what is known of a value, None if no example and no parameter decide it."""
        with torch._C.DisableTorchFunction():
            return self._look(x)

    def states(self, values: Iterable[Any]) -> list[State | None]:
        """Return the states of the tensors among some values and in the lists among them."""
        with torch._C.DisableTorchFunction():
            return [self._look(x) for x in tensors_in(values)]

    def _look(self, x: Any) -> State | None:
        """Return what is known of a value, where no mode sees that it is looked at."""
        if not isinstance(x, Tensor) or is_lazy(x):
            return None  # a lazy one has no values yet, and no operation may look at it
        return self._state(x)

    def _look_for_axis(self, x: Any) -> BatchAxis | None:
        state = self._look(x)
        return state if isinstance(state, BatchAxis) else None

    def _state(self, x: Tensor) -> State | None:
        base = x._base
        if base is not None and id(base) in self._rewritten:
            return self._rewritten[id(base)]
        key = id(x)
        if key in self._covered:
            return None
        known = self._states.get(key)
        if known is not None and known is not PUBLIC:
            return known
        # A view that was noted as public may show what was written into its base since.
        if base is not None and id(base) in self._states:
            return self._state_of_view(x)
        if known is PUBLIC:
            return None
        return _state_of_unseen(x) or self._state_of_memory(x)

    def _state_of_memory(self, x: Tensor) -> State | None:
        """Return the state of an unseen tensor by the examples that may lie in its memory."""
        storage = _storage(x)
        address = _address(storage)
        if not address:
            return None
        known = self._memories.get(address)
        if known is None and not storage.resizable():
            # An array may begin inside of a tensor.
            for other in list(self._memories.values()):
                whole = other[0]()
                if whole is not None and 0 <= address - other[0].key < whole.nbytes():
                    known = other
        if known is None:
            return None
        _, layout, state = known
        if isinstance(state, Unknown) or layout == _layout(x):
            return state
        return Unknown("memory", "a tensor shows the examples in a form that no operation made")

    def _note_memory(self, storage: Any, layout: Any, state: State) -> None:
        """Note the examples in some memory, for tensors made of it where no operation is seen."""
        address = _address(storage)
        if not address:
            return
        known = self._memories.get(address)
        if known is None:
            reference = _Reference(storage, self._forget_memory)
            reference.key = address
        elif isinstance(known[2], Unknown):
            return
        else:
            reference = known[0]
        self._memories[address] = reference, layout, state

    def _forget_memory(self, reference: Any) -> None:
        self._memories.pop(reference.key, None)

    def _state_of_view(self, x: Tensor) -> State | None:
        """Return the state of a view whose base was written after it was made."""
        base: Any = x._base
        state = self.state(base)
        if not isinstance(state, BatchAxis):
            return state
        lost = Unknown("view", "a view of a tensor that the examples were written into")
        return _same_memory(state, base, x, self.size) or lost

    def is_declared(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter, or it or its memory was seen before."""
        return id(x) in self._states or self._state_of_memory(x) is not None

    def axis(self, x: Any) -> BatchAxis | None:
        """Return the batch axis of a tensor, None without one."""
        state = self.state(x)
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
        if isinstance(state, PRIVATE):
            self._note_memory(_storage(x), _layout(x), state)

    def _remember(self, x: Tensor) -> None:
        """Forget what is noted of a tensor as soon as it is freed."""
        key = id(x)
        if key not in self._references:
            reference = _Reference(x, self._forget)
            reference.key = key
            self._references[key] = reference

    def _forget(self, reference: Any) -> None:
        for table in (self._states, self._references, self._rewritten, self._aliases):
            table.pop(reference.key, None)

    def note_alias(self, x: Tensor) -> None:
        """Record a tensor that aliases another without being a view of it."""
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
            elif self.size == 1:
                self.set_state(x, Total())
            elif x.shape[:1] == (self.size,):
                self.set_state(x, BatchAxis(0))
            else:
                shape = list(x.shape)
                why = f"a tensor {shape} of the batch does not have {self.size} examples in front"
                self.set_state(x, Unknown("batch", why))

    def declare_persistent(self, tensors: Iterable[Tensor]) -> None:
        """Declare tensors that outlive the operations on the batch; earlier ones do not count."""
        self._persistent = set(map(_memory, tensors))

    def declare_earlier_batches(self) -> None:
        """Declare that tensors which earlier batches have left depend on other examples."""
        earlier = Tracker._of_last_batch
        Tracker._of_last_batch = self
        if earlier is None:
            return
        # A collection meanwhile removes entries: a copy of a dictionary is made in one go.
        for key, reference in earlier._references.copy().items():
            x = reference()
            state = earlier._states.get(key)
            if x is None or not isinstance(state, PRIVATE):
                continue
            if _memory(x) not in self._persistent:
                self.set_state(x, OF_EARLIER_BATCH)
        for held, _, _ in earlier._memories.copy().values():
            storage = held()
            if storage is not None and storage._cdata not in self._persistent:
                self._note_memory(storage, None, OF_EARLIER_BATCH)

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
        if is_read:
            self.has_shown = True
        else:
            self.altered = self.altered or failure
        return failure

    def note_array(self, x: Tensor) -> None:
        """Remember the values of a tensor whose memory an array is about to share."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._shared.append((x, x._version, x.detach().clone()))

    def check_arrays(self) -> None:
        """Note a write into an array that has changed a tensor of the examples."""
        for x, version, old in self._shared:
            if x._version == version and not torch.equal(x.nan_to_num(), old.nan_to_num()):
                self.fail("numpy", "an array was written that shares its memory with the examples")

    # -- what a layer reads itself -----------------------------------------------------------------

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Begin to treat parameters as public; the call of their layer gives their gradients."""
        self._covered.update(map(id, parameters))
        self._interiors.append([])

    def uncover(self, parameters: Iterable[Tensor], outputs: Sequence[Tensor]) -> None:
        """End to treat parameters as public.

        Args:
            parameters: as of `cover`.
            outputs: of the call. What else was computed in it depends on the parameters in a way
                that the call does not show.
        """
        self._covered.difference_update(map(id, parameters))
        interior = self._states.keys() & self._interiors.pop()
        for key in interior.difference(map(id, outputs)):
            # A tensor may be freed meanwhile.
            state = self._states.get(key)
            if state is not None:
                self._states[key] = OUTSIDE_OF_LAYER.get(type(state), state)

    def pause(self) -> None:
        """Stop following operations, inside a module whose outputs the caller declares."""
        self.pauses += 1

    def resume(self) -> None:
        """Follow operations again."""
        self.pauses -= 1

    def values_before(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[int, Tensor]:
        """Return copies of public tensors whose memory an operation is about to write.

        Old values can be part of the result: `table[:N].clone().add_(x)` adds the row of the place
        that an example has in the batch.
        """
        if self.pauses or not _written_arguments(function):
            return {}
        read = tensors_in(args)
        operands = [*read, *tensors_in(kwargs.values())]
        if not self.is_any_private(operands):
            return {}
        targets = tensors_in((kwargs.get("out"),))
        if str(function.overloadpacket.__name__).endswith("_"):
            targets += tensors_in(args[:1])
        # The rest of a base stays where a view is written over.
        bases = [x._base for x in targets if x._base is not None]
        if rule_name(function) in _OVERWRITES:
            read = operands[1:]
        memories = set(map(_memory, targets))
        copies = {}
        for x in [*bases, *read]:
            if _memory(x) in memories and self.state(x) is None:
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
        if self.pauses:
            return
        if function is torch.ops.aten.detach.default:
            self.note_alias(output)
        is_made = function is torch.ops.aten.lift_fresh.default and not self.open_calls
        # Unpickling puts a tensor on bytes that it has read.
        if is_made or (self.has_shown and rule_name(function) == "set"):
            why = "a tensor was made of values where no function of torch was called"
            self.set_state(output, Unknown(str(function), why))
            return
        states = self._states_of_operands(args, kwargs)
        if states or self._has_shown_number(args, kwargs):
            operation = Operation(
                function,
                rule_name(function),
                args,
                kwargs,
                output,
                self.size,
                self._look,
                self._look_for_axis,
                self.trusts_public_rows,
                before,
                self._has_equal_places,
                counts_up,
            )
            self._note(operation, states)
        elif rule_name(function) in DRAWS and kwargs.get("generator") is None:
            self._note_draw(function, _operands(args, kwargs), output)

    def _states_of_operands(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[type, State]:
        """Return the first state of each kind that the operands have.

        A public operand counts where it has a history of its own.
        """
        states: dict[type, State] = {}
        for x in _operands(args, kwargs):
            state = self._look(x)
            if state is None:
                if type(x) is Tensor and not (x.requires_grad or x._is_view()):
                    continue
                state = PUBLIC
            states.setdefault(type(state), state)
            if state is PARAMETRIC and id(x) in self._parameters:
                self.read.add(id(x))
        return states

    def _note_draw(self, function: Any, operands: Iterable[Tensor], x: Tensor) -> None:
        """Give random numbers of the length of the batch to the examples.

        A batch of one draws them too. The numbers must have one distribution, so operands that hold
        means or probabilities may have one value only.
        """
        if not function._schema.name.endswith("_like"):
            for y in operands:
                first = y.flatten()[:1]
                if y is not x and not torch.equal(y, first.expand_as(y)):
                    return
        is_kept = x._is_view() or _memory(x) in self._persistent
        has_place = x.shape[:1] == (self.size,) or x.shape.count(self.size) == 1
        if has_place and not is_kept:
            self.set_state(x, BatchAxis(x.shape.index(self.size)))

    def _note(self, operation: Operation, states: Mapping[type, State]) -> None:
        """Take note of the outputs of an operation, of what it reads and of what it writes."""
        is_private = not states.keys().isdisjoint(PRIVATE)
        answer = self._states_of_outputs(operation, states)
        if is_private:
            self._note_reads(operation)
            keeps_axis = bool(operation.outputs) and isinstance(answer[0], BatchAxis)
            if keeps_axis and self.trace is not None:
                self.trace += trace_of(operation)
        # An operation of several forms may have fewer outputs than its rule has answers.
        for x, state in zip(operation.outputs, answer, strict=False):
            if state is None:
                continue
            if _written_arguments(operation.function):
                self._write(operation, x, state)
            else:
                self.set_state(x, state)
        if is_private:
            self._write_into_operands(operation)
        elif not operation.outputs:
            # FSDP2 gathers parameters into keyword arguments, which stay parameters.
            self._write_into_operands(replace(operation, kwargs={}))

    def _states_of_outputs(
        self, operation: Operation, states: Mapping[type, State]
    ) -> Sequence[State | None]:
        """Return the states of the outputs, from the first state of each kind of the operands."""
        function = operation.function
        if Unknown in states:
            answer: Any = states[Unknown]
        elif self.size == 1 and not states.keys().isdisjoint(PRIVATE):
            answer = Total()
        elif self._has_shown_number(operation.args, operation.kwargs):
            answer = Unknown(str(function), "it computes with a number read of the examples")
        elif states.keys().isdisjoint((BatchAxis, Total)):
            answer = states.get(Parametric, PUBLIC)
        elif Parametric in states:
            shapes = names_of_shapes(operation.tensors)
            why = f"a trainable parameter is used outside its layer (shapes {shapes})"
            answer = Unknown(str(function), why)
        else:
            answer = apply_rule(operation, has_total=Total in states)
        count = len(operation.outputs)
        return list(answer) if isinstance(answer, (list, tuple)) else [answer] * count

    def _has_shown_number(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an argument is a number that was read of the examples."""
        if not self._shown_numbers:
            return False
        numbers = (*args, *kwargs.values())
        return any(isinstance(x, float) and x in self._shown_numbers for x in numbers)

    def _note_reads(self, operation: Operation) -> None:
        """Note an operation on the examples that shows values of them to the program."""
        function, name = operation.function, operation.name
        has_private_shape = _has_other_shape(function)
        if name == "index":
            has_private_shape = self.is_any_private(filter(is_mask, tensors_in(operation.args[1])))
        if has_private_shape and not (name == "_ctc_loss" and is_harmless()):
            self.fail(function, "the shape of a tensor depends on the examples", is_read=True)
        if name in _READS and not is_harmless(operation.output):
            why = "the program reads a value that depends on the examples"
            self.fail(function, why, is_read=True)
            # A constant of the program has rarely the same digits.
            if isinstance(operation.output, float) and not operation.output.is_integer():
                self._shown_numbers.add(operation.output)

    def is_any_private(self, values: Iterable[Any]) -> bool:
        """Return whether a tensor among some values depends on the examples."""
        return any(isinstance(state, PRIVATE) for state in self.states(values))

    def has_numbers(self, values: Sequence[Any]) -> bool:
        """Return whether tensors of the examples lie inside lists from which a tensor is made."""
        return self.is_any_private(x for x in values if not isinstance(x, Tensor))

    def _write_into_operands(self, operation: Operation) -> None:
        """Take note of operands that an operation writes into without returning them."""
        names = _written_arguments(operation.function)
        if operation.name in _MEETS_RUNNING_STATISTICS and operation.argument("training"):
            names = ["running_mean", "running_var"]
        if not names:
            return
        returned = set(map(id, operation.outputs))
        written = Unknown(str(operation.function), "it writes into its operands")
        for x in tensors_in(map(operation.argument, names)):
            if id(x) not in returned:
                self._write(operation, x, written)

    def _write(self, operation: Operation, x: Tensor, state: State) -> None:
        """Set the state of a tensor that was written into, and of the tensor that it views."""
        if isinstance(state, PRIVATE):
            state = self._check_target(operation.function, x, state)
        whole, state_of_whole = x, state
        if x._base is not None:
            whole, state_of_whole = x._base, self._state_of_base(operation, x, state)
        if isinstance(state_of_whole, Unknown):
            # Other views of it show the same memory.
            self._rewritten[id(whole)] = state_of_whole
        self.set_state(whole, state_of_whole)
        self.set_state(x, state)

    def _check_target(self, function: Any, x: Tensor, state: State) -> State:
        """Note where more than x shows the examples that were written into it.

        Returns:
            The state of x, which is unknown where it outlives the pass.
        """
        memory = _memory(x)
        if memory in self._persistent:
            why = "the examples are written into a tensor that outlives the pass"
            state = self.fail(function, why)
        is_of_batch = x.layout is not torch.strided or self.axis(x) is not None
        checks = (
            (
                not is_of_batch and not x.untyped_storage().resizable(),
                "the examples are written into memory that an array may share",
            ),
            (
                memory in self._aliases.values(),
                "the examples are written into memory that .data or .detach() shares",
            ),
            (
                x.is_inference(),
                "the examples are written in inference mode, in which views are not known",
            ),
        )
        for applies, why in checks:
            if applies:
                self.fail(function, why)
        return state

    def _state_of_base(self, operation: Operation, view: Tensor, state: State) -> State:
        """Return the state of a tensor after a view of it was written.

        Args:
            operation: what wrote.
            view: the view.
            state: of the view.
        """
        base: Any = view._base
        known = self._states.get(id(base))
        if isinstance(known, Unknown):
            return known
        if not isinstance(state, BatchAxis):
            return state
        moved = _same_memory(state, view, base, self.size)
        if moved is None or known not in (None, PUBLIC, moved):
            why = "the examples are written into a part of a tensor that cannot be followed"
            return Unknown(str(operation.function), why)
        was_public = id(base) in operation.before
        if was_public and not is_shared(operation, base, moved):
            why = "the examples are written beside entries of their places"
            return Unknown(str(operation.function), why)
        return moved


def is_known_private(x: Tensor) -> bool:
    """Return whether the tracker of the last batch has seen a tensor that depends on examples."""
    tracker = Tracker._of_last_batch
    return tracker is not None and isinstance(tracker.state(x), PRIVATE)


@contextmanager
def forget_batches() -> Iterator[None]:
    """Forget after the body which tensors its batches have left: they hold public rows."""
    before = Tracker._of_last_batch
    try:
        yield
    finally:
        Tracker._of_last_batch = before


@cache
def _written_arguments(function: Any) -> list[str]:
    """Return the names of the arguments that an operation writes into."""
    arguments = function._schema.arguments
    return [x.name for x in arguments if getattr(x.alias_info, "is_write", False)]


@cache
def _has_other_shape(function: Any) -> bool:
    """Return whether values decide the shape of what an operation returns."""
    is_dynamic = has_tag(function, torch.Tag.dynamic_output_shape)
    return is_dynamic or _HAVE_OTHER_SHAPES.search(rule_name(function)) is not None


def _storage(x: Tensor) -> Any:
    """Return the storage of a tensor, None for a sparse tensor or one that wraps others."""
    try:
        with torch._C.DisableTorchFunction():
            return x.untyped_storage()
    except RuntimeError:
        return None


def _memory(x: Tensor) -> int:
    """Return a number that is the same for all tensors that share their memory."""
    storage = _storage(x)
    return id(x) if storage is None else int(storage._cdata)


def _address(storage: Any) -> int:
    """Return where the values of a storage lie, 0 without values."""
    if storage is None:
        return 0
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.storage_offset(), x.shape, x.stride()


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among some arguments, but for those in lists of keyword arguments."""
    return tensors_in(args) + [x for x in kwargs.values() if isinstance(x, Tensor)]


def _same_memory(axis: BatchAxis, one: Tensor, other: Tensor, size: int) -> BatchAxis | None:
    """Return where the axis of a tensor lies in another that shares its memory, else None."""
    begin = min(one.storage_offset(), other.storage_offset())
    step = one.stride(axis.dim) * axis.post
    for dim, length in enumerate(other.shape):
        stride = other.stride(dim)
        if stride == 0:
            continue
        post, rest = divmod(step, stride)
        if rest == 0 and post >= 1 and length % (size * post) == 0:
            found = BatchAxis(dim, length // (size * post), post)
            blocks = (one, axis), (other, found)
            if all(_has_own_blocks(x, own, size, int(begin)) for x, own in blocks):
                return found
    return None


def _has_own_blocks(x: Tensor, axis: BatchAxis, size: int, begin: int) -> bool:
    """Return whether example i lies in every N-th block of the memory from `begin` on, from i."""
    stride = x.stride(axis.dim)
    block = stride * axis.post
    last = (x.storage_offset() - begin) % (size * block) + block - stride
    for dim, length in enumerate(x.shape):
        if dim != axis.dim and x.stride(dim) % (size * block):
            last += (length - 1) * x.stride(dim)
    return last < block
