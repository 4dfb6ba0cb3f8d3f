"""The passes over one physical batch of an Opacus-shaped script: followed from the loader to `loss.backward()`.

The modes of a tracker are on while the script works on a batch. They see what the script does with it, what the model computes,
and how the loss is reduced. `loss.backward()` itself is taken over: the gradients of every example are asked for, and nothing is
written into `p.grad`.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader

from dpkfc.gradients.calls import Calls
from dpkfc.gradients.clipped_sum import batch_tracker
from dpkfc.gradients.clipping import ClippedSummer
from dpkfc.gradients.fallback import blocks_of_one
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.state import evaluation_mode, restored_state
from dpkfc.gradients.tape import Tape, custom_function, nodes_of
from dpkfc.memory import is_out_of_memory
from dpkfc.tracking.axes import BatchAxis, State, Total, Unknown, example_first
from dpkfc.tracking.tracker import Tracker
from dpkfc.verification import draw_public_rows
from dpkfc.verification.examples import Verdict, check_on_public_rows
from dpkfc.verification.public_rows import PublicRows

# --------------------------------------------------------------------------------------------------
# Modes of torch that are on from one line of a script to another, outside of any `with`.
#
# A mode can leave its stack only while it is on top. A mode that has ended stays there, switched
# off, until nothing lies on it. So do the modes of a batch whose loop a script has left.

_OVER: weakref.WeakSet[Any] = weakref.WeakSet()  # modes that are switched off for good


class ScriptModes:
    """Modes with an attribute `is_on`, entered when this is made.

    Args:
        owner: the object they serve. They end when it is freed, so they must not refer to it.
        modes: in the order in which they are entered.
    """

    def __init__(self, owner: object, modes: Sequence[Any]) -> None:
        _take_off()
        self._modes = list(modes)
        for mode in self._modes:
            mode.__enter__()
        weakref.finalize(owner, _finish, self._modes)

    def switch_off(self, all_but: type | tuple[type, ...] = ()) -> None:
        """Switch off the modes, but for those of some types."""
        for mode in self._modes:
            mode.is_on = mode.is_on and isinstance(mode, all_but)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Switch all of them off inside the body."""
        before = [mode.is_on for mode in self._modes]
        self.switch_off()
        try:
            yield
        finally:
            for mode, was_on in zip(self._modes, before, strict=True):
                mode.is_on = was_on

    def end(self) -> None:
        """Switch all of them off for good, and take off those that can be."""
        _finish(self._modes)
        _take_off()


def _finish(modes: Sequence[Any]) -> None:
    for mode in modes:
        mode.is_on = False
        _OVER.add(mode)


def _take_off() -> None:
    """Take the modes that are over from the top of both stacks."""
    for top in (_get_current_function_mode, _get_current_dispatch_mode):
        while (mode := top()) is not None and mode in _OVER:
            mode.__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------

_LARGEST_SCALE = 2.0**8  # from here on a power of two before the loss is a GradScaler's


@dataclass(frozen=True)
class ModelCall:
    """One call of the model on the batch, made for one example at a time.

    Attributes:
        outputs: floating-point outputs that the script got.
        singles: for each example its outputs.
    """

    outputs: list[Tensor]
    singles: list[list[Tensor]]


@dataclass(frozen=True)
class _Inputs:
    """One call of the model on the whole batch.

    Attributes:
        args, kwargs: its inputs.
        output: what it returned.
        versions: the tensors among the inputs, each with the counter of writes that it had.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    versions: list[tuple[Tensor, int]]

    def check(self) -> None:
        """Raise unless the inputs are what the model was called with.

        Raises:
            RuntimeError: one was written since, so that the model cannot be run again on single examples.
        """
        if any(x._version != version for x, version in self.versions):
            raise RuntimeError("an input of the model was changed in place before loss.backward(); change a copy of it")


def _note_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> _Inputs:
    """Return a call that was just made, with the write counters of its inputs."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return _Inputs(args, kwargs, output, [(x, x._version) for x in tensors])


class _TakeOver(TorchFunctionMode):
    """Hand `loss.backward()` to a recording in the place of autograd, and give its losses over class labels public divisors."""

    def __init__(self, recording: BatchRecording) -> None:
        super().__init__()
        self._recording = weakref.ref(recording)  # the stack of modes would keep a batch that is left behind
        self.is_on = True
        self.is_done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        recording = self._recording() if self.is_on and func in _TAKEN_OVER else None
        if recording is None:
            return func(*args, **kwargs)
        if func is not Tensor.backward:
            return func(*args, **kwargs) if self.is_done else _with_public_divisor(recording, func, args, kwargs)
        if recording.differentiate(args[0]):
            self.is_done = True
            return None
        return func(*args, **kwargs)


_TAKEN_OVER = (Tensor.backward, F.cross_entropy, F.nll_loss)


def _with_public_divisor(recording: BatchRecording, loss: Any, args: Any, kwargs: Any) -> Any:
    """Call a loss over class labels whose mean divides by the number of all targets, not of those that are not ignored.

    How many targets of a batch are ignored is private: as a divisor it would let one example change the gradients of others.
    What does not depend on the model is left alone.
    """
    given = inspect.signature(loss).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    target = options["target"]
    plain = options["weight"] is None and options["reduction"] == "mean" and options["ignore_index"] < 0
    if not plain or options["size_average"] is not None or options["reduce"] is not None or target.is_floating_point():
        return loss(*args, **kwargs)
    if not recording.reaches_the_model(options["input"]):
        return loss(*args, **kwargs)
    options["reduction"] = "none"
    return loss(*given.args, **given.kwargs).mean()


class BatchRecording:
    """Everything that is known of one physical batch, until its optimizer step.

    Args:
        model: the model.
        layers: its layers.
        size: examples N in the batch, 0 for an empty one.
        batch: what the loader hands out.
        reduction: of the loss, "mean" or "sum".
        exact: run the model on one example at a time.
        entry_weight: the factor of each entry of an example in the loss of earlier batches, None where there was none.

    Attributes:
        calls: of the layers, once the loss was differentiated.
        gradients: of every example instead, where the batch was not proved.
        passes: how often a loss of the batch was differentiated.
        runs_single_examples: the recording itself runs the model, on single examples.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        size: int,
        batch: Any,
        *,
        reduction: str,
        exact: Unknown | None,
        entry_weight: float | None = None,
    ) -> None:
        self.model = model
        self.layers = layers
        self.size = size
        self.reduction = reduction
        self.exact = exact
        self.entry_weight = entry_weight
        self.tracker: Tracker | None = None
        self.tape: Tape | None = None
        self.calls: Calls | None = None
        self.gradients: list[dict[str, Tensor]] | None = None
        self.passes = 0
        self.forwards = 0
        self._model_calls: list[ModelCall] = []
        self._inputs: list[_Inputs] = []
        self._altered: Unknown | None = None
        self.runs_single_examples = False
        self._modes = ScriptModes(self, self._begin(batch))

    # -- modes ----------------------------------------------------------------------------------------------

    def _begin(self, batch: Any) -> list[Any]:
        """Begin to record; return the modes that follow the script."""
        modes: list[Any] = []
        if self.size > 1:
            self.tracker = batch_tracker(self.model, unwrap_containers(batch), self.size)
            if self.exact is None:
                self.tape = Tape(self.model, self.layers, self.size, tracker=self.tracker)
                self.tape.__enter__()
            modes += self.tracker.modes()
        return [*modes, _TakeOver(self)]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not follow what the body does."""
        with self._modes.suspended():
            yield

    def _end_following(self) -> None:
        """Stop to follow the script. What it differentiates from here on is taken over still."""
        if self.tape is not None:
            self.tape.close_hooks()
        self._modes.switch_off(all_but=_TakeOver)

    def end(self) -> None:
        """Let go of the script."""
        if self.tape is not None:
            self.tape.close_hooks()
        self._modes.end()

    # -- the model ------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Take note of what the script has done to its batch before a call of the model."""
        if self.tracker is not None:
            self._altered = self._altered or self.tracker.altered

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take note of a call of the model; return outputs in the place of its own, or None to keep them."""
        self.forwards += 1
        if self.size < 2 or self.tracker is None:
            return None
        if self.exact is None and self.tracker.failure is None:
            states = [self.tracker.state(x) for x in _floats(output)]
            lost = next((state for state in states if isinstance(state, Unknown)), None)
            if lost is None:
                self._inputs.append(_note_inputs(args, kwargs, output))
                return None
            self.exact = lost
        if self.exact is None:
            self.exact = self.tracker.failure
        if self.tape is not None:
            self.tape.close_hooks()
        return self._one_by_one(args, kwargs, output)

    def _one_by_one(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Run the model on each example alone; return its outputs put together."""
        assert self.tracker is not None
        tracker = self.tracker
        leaves, spec = tree_flatten(output)
        with self._unfollowed():
            each = self._singles(args, kwargs)
            joined, declared = list(leaves), list[tuple[Tensor, State]]()
            for place, whole in enumerate(leaves):
                parts = [single[place] for single in each]
                if isinstance(whole, Tensor) and whole.is_floating_point() and parts[0].requires_grad:
                    joined[place], state = self._joined(whole, parts)
                    declared.append((joined[place], state))
        tracker.failure = tracker.altered = None
        for value, state in declared:
            tracker.set_state(value, state)
        places = [i for i, x in enumerate(leaves) if joined[i] is not x]
        self._model_calls.append(
            ModelCall([joined[i] for i in places], [[single[i] for i in places] for single in each])
        )
        return tree_unflatten(joined, spec)

    def _singles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        """Return the flattened outputs of the model for each example alone."""
        self.runs_single_examples = True
        try:
            with restored_state(self.model):
                return [tree_flatten(self.model(*a, **k))[0] for a, k in self.examples(args, kwargs)]
        finally:
            self.runs_single_examples = False

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        assert self.tracker is not None
        self.tracker.pause()
        try:
            yield
        finally:
            self.tracker.resume()

    def _joined(self, whole: Tensor, parts: list[Tensor]) -> tuple[Tensor, State]:
        """Return the outputs of single examples as the output of a batch, and where the batch lies in it."""
        one = parts[0]
        if not whole.dim():
            stacked = torch.stack(parts)
            mean = self.reduction == "mean"
            return (stacked.mean() if mean else stacked.sum()), Total(is_mean=mean)
        for dim in range(whole.dim()):
            others = whole.shape[:dim] + whole.shape[dim + 1 :] == one.shape[:dim] + one.shape[dim + 1 :]
            if one.dim() == whole.dim() and others and whole.shape[dim] == self.size * one.shape[dim]:
                return torch.cat(parts, dim), BatchAxis(dim, 1, max(1, one.shape[dim]))
        raise ValueError(
            f"the model gives {list(whole.shape)} for {self.size} examples and {list(one.shape)} for one: an output needs one "
            "axis for the examples"
        )

    def examples(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments of a call for each example alone.

        Raises:
            ValueError: an argument whose examples cannot be told.
        """
        assert self.tracker is not None
        tracker = self.tracker
        leaves = tree_leaves((args, kwargs))
        held = next((x for x in leaves if _holds_tensors(x)), None)
        if held is not None:
            raise ValueError(
                f"the examples inside a {type(held).__name__} cannot be separated; call the model with the tensors of the batch"
            )
        if not any(isinstance(x, Tensor) and isinstance(tracker.state(x), (BatchAxis, Unknown)) for x in leaves):
            raise ValueError("no argument of the model is of the loader's batch; call the model with the tensors of the batch")
        for i in range(self.size):

            def pick(x: Any, i: int = i) -> Any:
                if not isinstance(x, Tensor):
                    return x
                state = tracker.state(x)
                if self.forwards > 1 and x.grad_fn is not None:
                    raise ValueError(
                        "a call of the model takes what an earlier one returned; let one module make both calls in its forward"
                    )
                if isinstance(state, Unknown):
                    raise ValueError(
                        f"an input of the model {list(x.shape)} was made by {state.operation}, which hides its examples; make it "
                        "inside forward"
                    )
                return one_example(x, state, self.size, i) if isinstance(state, BatchAxis) else x

            yield tree_map(pick, args), tree_map(pick, kwargs)

    # -- the loss -------------------------------------------------------------------------------------------

    def differentiate(self, loss: Tensor) -> bool:
        """Differentiate a loss for every example; return False where it does not belong to this batch."""
        if not self.forwards or not self.reaches_the_model(loss):
            return False
        state = self.tracker.state(loss) if self.tracker is not None else None
        if self.tracker is not None and not isinstance(state, (Total, Unknown, BatchAxis)):
            return False
        self.passes += 1
        if self.passes > 1 or self.size == 0:
            return True
        self._end_following()
        try:
            self._take_gradients(loss, state)
        except BaseException:
            self.passes = 0  # a batch whose loss was refused is not stepped
            raise
        return True

    def _take_gradients(self, loss: Tensor, state: State | None) -> None:
        """Take the gradients of all examples.

        Args:
            loss: of the batch.
            state: of the loss.
        """
        if self.size == 1:
            self.gradients = [self._of_parameters([loss], None)]
            return
        factor = self._factor(state)
        self._check_unaltered()
        scaled = loss * factor
        if self._model_calls:
            self._of_single_calls(scaled)
        else:
            self._of_the_batch(scaled)

    def _check_unaltered(self) -> None:
        """Raise where the script did to its batch or its loss what no proof covers.

        Raises:
            ValueError: by name of the operation.
        """
        assert self.tracker is not None
        altered = self._altered or self.tracker.altered
        if altered is not None:
            raise ValueError(f"between loader and loss.backward() stands {altered.operation}: {altered.reason[:80]}")

    def reaches_the_model(self, x: Tensor) -> bool:
        """Return whether a tensor depends on a parameter of the model, and not on other models alone."""
        own = {id(p) for p in self.model.parameters() if p.requires_grad}
        return any(id(getattr(node, "variable", None)) in own for node in nodes_of(x))

    def _factor(self, state: State | None) -> float:
        """Return the factor that makes the loss the sum of the losses of its examples.

        Raises:
            ValueError: the loss is not such a sum, by name of the operation; its reduction is not the declared one; or it is
                multiplied by another number than in earlier batches.
        """
        if isinstance(state, Unknown):
            raise ValueError(
                f"the loss is not a sum over examples: {state.operation}, {state.reason[:70]}; reduce losses by mean() "
                "or sum()"
            )
        if isinstance(state, BatchAxis):
            raise ValueError("backward() needs one number; reduce the losses of the examples by mean() or sum()")
        assert isinstance(state, Total)
        if state.is_quotient and self.reduction == "sum":  # a constant that N happens to divide
            state = replace(state, is_mean=False, number=state.number / self.size)
        actual = "mean" if state.is_mean else "sum"
        if actual != self.reduction:
            raise ValueError(
                f"the loss is a {actual} over the examples, but loss_reduction='{self.reduction}' was declared; use "
                f"make_private(loss_reduction='{actual}')"
            )
        if state.number >= _LARGEST_SCALE and torch.log2(torch.tensor(state.number)).frac() == 0:
            raise ValueError(
                f"the loss is multiplied by {state.number:.0f}, as a GradScaler does, whose steps follow overflows; train in "
                "bfloat16 without one"
            )
        if self.entry_weight is not None and not math.isclose(state.factor, self.entry_weight, rel_tol=1e-6):
            raise ValueError(
                "the loss is divided by another number than in earlier batches: average each example over its own positions, "
                "and divide by constants"
            )
        self.entry_weight = state.factor
        return float(self.size) if state.is_mean else 1.0

    def _of_the_batch(self, total: Tensor) -> None:
        """Take the gradients of all examples from one backward pass, where that is proved to be right."""
        assert self.tape is not None and self.tracker is not None
        failure = self.tape.failure_of_pass(total)
        if failure is None:
            self.calls = self.tape.gradients(total)
            return
        self.exact = failure
        self._of_single_calls(total)

    def _of_single_calls(self, total: Tensor) -> None:
        """Pull the gradients at the outputs back through the calls of single examples.

        Raises:
            ValueError: the loss has a backward pass in Python, which may mix them.
        """
        self._repeat_for_singles()
        outputs = [x for call in self._model_calls for x in call.outputs]
        custom = custom_function(total, outputs)
        if custom is not None:
            raise ValueError(f"the loss is computed by {custom.operation}, whose backward pass in Python may mix examples")
        arrived = torch.autograd.grad(total, outputs, allow_unused=True, retain_graph=True)
        found = []
        for i in range(self.size):
            starts, rows = list[Tensor](), list[Tensor]()
            place = 0
            for call in self._model_calls:
                for output, own in zip(call.outputs, call.singles[i], strict=True):
                    gradient = arrived[place]
                    place += 1
                    if gradient is not None and own.requires_grad:
                        starts.append(own)
                        rows.append(self._row(output, gradient, own, i))
            found.append(self._of_parameters(starts, rows) if starts else {})
        self.gradients = found

    def _repeat_for_singles(self) -> None:
        """Make the calls again on single examples that were made on the whole batch."""
        inputs, self._inputs = self._inputs, []
        for call in inputs:
            call.check()
            each, leaves = self._singles(call.args, call.kwargs), tree_flatten(call.output)[0]
            places = [
                i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
            ]
            self._model_calls.append(
                ModelCall([leaves[i] for i in places], [[single[i] for i in places] for single in each])
            )

    def _row(self, output: Tensor, gradient: Tensor, own: Tensor, i: int) -> Tensor:
        """Return the gradient at the output of one example."""
        if not output.dim():
            return gradient / self.size if self.reduction == "mean" else gradient
        dim = next(d for d in range(output.dim()) if output.shape[d] != own.shape[d])
        return gradient.narrow(dim, i * own.shape[dim], own.shape[dim])

    def _of_parameters(self, outputs: list[Tensor], gradients: list[Tensor] | None) -> dict[str, Tensor]:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(outputs, list(parameters.values()), gradients, allow_unused=True, retain_graph=True)
        pairs = zip(parameters, found, strict=True)
        return {name: g.to_dense().detach() if g.is_sparse else g for name, g in pairs if g is not None}

    # -- the sum --------------------------------------------------------------------------------------------

    def add_to(self, summer: ClippedSummer) -> list[Tensor]:
        """Clip and add every example; return their norms. PRIVATE."""
        if self.size == 0:
            return []
        if self.calls is not None:
            calls, self.calls = self.calls, None
            return [summer.add(calls, self.size).norms.detach()] if calls else []
        norms = []
        for gradient in self.gradients or ():
            blocks = blocks_of_one(self.layers, gradient)
            if blocks:
                norms.append(summer.add(blocks, 1).norms.detach())
        self.gradients = None
        return norms


def _floats(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]


def unwrap_containers(batch: Any) -> Any:
    """Return a batch with dicts and lists in the place of other mappings and sequences, inside which tensors are not found."""
    if isinstance(batch, Mapping):
        return {key: unwrap_containers(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [unwrap_containers(value) for value in batch]
    return batch


def _holds_tensors(x: Any) -> bool:
    """Return whether an argument that is no tensor has tensors inside."""
    if isinstance(x, Tensor) or not hasattr(x, "__dict__") and not isinstance(x, (Mapping, list, tuple)):
        return False
    parts = [x, *vars(x).values()] if hasattr(x, "__dict__") else [x]
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves([unwrap_containers(part) for part in parts]))


def one_example(x: Tensor, axis: BatchAxis, size: int, i: int) -> Tensor:
    """Return what a batch of example i alone would hold."""
    if axis.pre == axis.post == 1:
        return x.narrow(axis.dim, i, 1)
    parts = x.unflatten(axis.dim, (axis.pre, size, axis.post)).select(axis.dim + 1, i)
    return parts.flatten(axis.dim, axis.dim + 1)


# --------------------------------------------------------------------------------------------------
# The check of a script's model on public rows, drawn to the shapes of what the script calls it
# with.


@dataclass(frozen=True)
class _Call:
    """How a script calls its model.

    Attributes:
        leaves: the flattened arguments.
        spec: how they are put together.
        axes: batch axis of each, None for one without.
        size: examples in them.
    """

    leaves: list[Any]
    spec: Any
    axes: list[BatchAxis | None]
    size: int

    def record(self) -> list[Tensor]:
        """Return what belongs to the first example; only types and shapes of it are used."""
        pairs = zip(self.leaves, self.axes, strict=True)
        return [one_example(x, axis, self.size, 0) for x, axis in pairs if axis is not None]

    def collate(self, records: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return the batched arguments of some examples."""
        joined = []
        for place, axis in enumerate(axis for axis in self.axes if axis is not None):
            parts = [record[place].unflatten(axis.dim, (axis.pre, 1, axis.post)) for record in records]
            joined.append(torch.cat(parts, axis.dim + 1).flatten(axis.dim, axis.dim + 2))
        return joined

    def outputs(self, model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
        """Call the model with these rows; return its floating-point outputs that have axes."""
        given = iter(rows)
        leaves = [x if axis is None else next(given) for x, axis in zip(self.leaves, self.axes, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return [
            x
            for x in tree_leaves(model(*args, **kwargs))
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim()
        ]


def check_model(
    model: nn.Module, layers: Sequence[Layer], args: Any, kwargs: Any, tracker: Tracker, expected: int, strict: bool
) -> Verdict:
    """Check on public rows that a model gives every example outputs of its own.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        args: of a call by the script; types and shapes are read.
        kwargs: of that call.
        tracker: that knows where they have the batch.
        expected: rows of a logical batch.
        strict: raise where an operation has no batch rule.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix, by name of the operation; no argument has examples.
    """
    leaves, spec = tree_flatten((args, kwargs))
    states = [tracker.state(x) if isinstance(x, Tensor) else None for x in leaves]
    lost = next((state for state in states if isinstance(state, Unknown)), None)
    if lost is not None:
        return Verdict(operation=lost)
    axes = [state if isinstance(state, BatchAxis) else None for state in states]
    if not any(axes):
        raise ValueError("no argument of the model is of the loader's batch; call the model with the tensors of the batch")
    call = _Call(leaves, spec, axes, tracker.size)
    places = _output_axes(model, call)

    def losses(net: nn.Module, rows: list[Tensor]) -> Tensor:
        return _projected(call.outputs(net, rows), places, len(rows_of(call, rows)))

    attempts = [partial(_rows, call, integers) for integers in ("tokens", "bits", "ones")]
    return check_on_public_rows(model, layers, losses, attempts, expected=expected, strict=strict)


def rows_of(call: _Call, rows: list[Tensor]) -> range:
    """Return the numbers of the examples in batched arguments."""
    axis = next(axis for axis in call.axes if axis is not None)
    return range(rows[0].shape[axis.dim] // (axis.pre * axis.post))


def _rows(call: _Call, integers: str, count: int) -> PublicRows:
    return draw_public_rows(call.record(), count, call.collate, integers)


def _output_axes(model: nn.Module, call: _Call) -> list[BatchAxis | None]:
    """Return where the outputs of a model have the batch: as a tracker finds, or the axis that grows with the batch."""
    for integers in ("bits", "ones"):
        rows = draw_public_rows(call.record(), 3, call.collate, integers)
        try:
            three, two = rows.batch(range(3)), rows.batch(range(2))
            tracker = batch_tracker(model, None, 3)
            for x, given in zip(three, (axis for axis in call.axes if axis is not None), strict=True):
                tracker.set_state(x, given)
            with torch.no_grad(), restored_state(model), tracker.following():
                many = call.outputs(model, three)
            with torch.no_grad(), restored_state(model):
                few = call.outputs(model, two)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue
        found: list[BatchAxis | None] = []
        for x, y in zip(many, few, strict=True):
            axis = tracker.axis(x)
            grown = [d for d in range(x.dim()) if 2 * x.shape[d] == 3 * y.shape[d] and x.shape[d]]
            if axis is None and grown:
                axis = BatchAxis(grown[0], 1, x.shape[grown[0]] // 3)
            found.append(axis)
        return found
    return []


def _projected(outputs: Sequence[Tensor], places: Sequence[BatchAxis | None], size: int) -> Tensor:
    """Return a number for every example `[N]` that all outputs of the model enter, not linearly: a batch mean must show."""
    rows = [
        example_first(x, axis, size).reshape(size, -1)
        for x, axis in zip(outputs, places, strict=False)
        if axis is not None
    ]
    if not rows:
        raise ValueError("no output of the model has an axis for the examples")
    row = torch.cat([x.to(rows[0].dtype) for x in rows], 1)
    return (row + 0.5 * row.square()) @ torch.cos(torch.arange(row.shape[1], dtype=row.dtype, device=row.device))


def check_padding(model: nn.Module, args: Any, kwargs: Any, batch: Any, source: DataLoader[Any]) -> None:
    """Check on public records that the outputs for a short one do not depend on how far a longer one makes it padded.

    Args:
        model: the model.
        args: of a call by the script.
        kwargs: of that call.
        batch: what the loader has handed out.
        source: the script's own loader.

    Raises:
        ValueError: they do.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = _places(leaves, tree_leaves(unwrap_containers(batch)))
    if places is None:
        return
    for integers in ("tokens", "bits", "ones"):
        rows = draw_public_rows(source.dataset[0], 0, source.collate_fn, integers)
        if len(rows.longer) < 2:
            return
        try:
            together, alone = (
                _outputs_of(model, leaves, spec, places, rows.collate(list(chosen)))
                for chosen in (rows.longer[:2], rows.longer[:1])
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue  # records of several lengths cannot be batched, or the model does not take these numbers
        if any(not _agree(x, y) for x, y in zip(together, alone, strict=True)):
            raise ValueError(
                "an example that is padded to the length of a longer one has other outputs than alone: mask the padding, or pad "
                "every batch to one length"
            )


def _places(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[int, int] | None:
    """Return which argument is which leaf of the batch; None where one cannot be told."""
    found = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not x.dim():
            continue
        same = [j for j, y in enumerate(batch) if y is x]
        alike = [j for j, y in enumerate(batch) if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype]
        chosen = same or alike
        if len(chosen) != 1:
            return None
        found[i] = chosen[0]
    return found or None


def _outputs_of(model: nn.Module, leaves: list[Any], spec: Any, places: dict[int, int], batch: Any) -> list[Tensor]:
    rows = tree_leaves(unwrap_containers(batch))
    given = [rows[places[i]].to(x.device) if i in places else x for i, x in enumerate(leaves)]
    args, kwargs = tree_unflatten(given, spec)
    with torch.no_grad(), restored_state(model), evaluation_mode(model):
        output = model(*args, **kwargs)
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]


def _agree(together: Tensor, alone: Tensor) -> bool:
    """Return whether the first row of a batch is that of the record alone where both have positions."""
    if together.dim() != alone.dim():  # squeeze() has taken the batch axis away
        alone = alone.reshape(1, *alone.shape) if alone.dim() == together.dim() - 1 else alone
    if together.dim() != alone.dim():
        return True
    together = together[:1]
    shortest = [min(a, b) for a, b in zip(together.shape, alone.shape, strict=True)]
    fronts = [z[tuple(slice(0, k) for k in shortest)] for z in (together, alone)]
    backs = [z[tuple(slice(n - k, n) for n, k in zip(z.shape, shortest, strict=True))] for z in (together, alone)]
    return any(torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in (fronts, backs))
