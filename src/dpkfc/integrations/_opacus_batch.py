"""Record the passes over one physical batch of an Opacus-shaped script, up to `loss.backward()`.

The modes of a tracker are on while the script works on a batch. They see what the script does with
the batch, what the model computes and how the loss is reduced. Meanwhile `Tensor.backward` is
replaced, so that the recording takes `loss.backward()` over: it asks for the gradient of every
example and writes nothing into `p.grad`.
`PrivateStep` (`_opacus_step`) then has the recording add the gradients to a clipped sum.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.autograd_graph import (
    custom_function,
    depends_on,
    hide_saved_tensors_hooks,
    is_differentiable,
    used_parameters,
)
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.layer_matrices import blocks_of_one
from dpkfc.gradients.layers import Arguments, Calls, Keywords, Layer, tensors_of
from dpkfc.gradients.loss_state import own_variables
from dpkfc.gradients.one_pass import batch_tracker
from dpkfc.gradients.replica import Replica
from dpkfc.gradients.state import own_pass
from dpkfc.gradients.tape import Tape
from dpkfc.integrations._opacus_model_check import NO_BATCH
from dpkfc.integrations._opacus_numbers import ScriptNumbers
from dpkfc.public_rows.rows import unwrap_containers
from dpkfc.tracking.batch_rules import are_places_equal
from dpkfc.tracking.modes import modes_of
from dpkfc.tracking.states import (
    OF_EARLIER_BATCH,
    BatchAxis,
    State,
    Total,
    Unknown,
    one_example_a_row,
)
from dpkfc.tracking.trace import Trace
from dpkfc.tracking.tracker import Tracker
from dpkfc.verification.accepted_rows import is_whole_squeeze

# --------------------------------------------------------------------------------------------------
# Modes of torch that stay on from one line of a script to another, outside of any `with`.
#
# A mode can leave its stack only while it is on top. A finished mode stays on its stack, switched
# off, until nothing lies on it. The modes of a batch whose loop was left do the same.

_FINISHED: weakref.WeakSet[Any] = weakref.WeakSet()  # modes that are switched off for good


class ScriptModes:
    """Modes with an attribute `is_on`, entered when this object is made.

    Args:
        owner: the object that the modes serve. They end when it is freed, so they must not refer
            to it.
        modes: in the order in which they are entered.
    """

    def __init__(self, owner: object, modes: Sequence[Any]) -> None:
        remove_finished_modes()
        self._modes = list(modes)
        self.is_suspended = False
        for mode in self._modes:
            mode.__enter__()
        weakref.finalize(owner, _finish, self._modes)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Switch all modes off inside the body."""
        before = [mode.is_on for mode in self._modes]
        for mode in self._modes:
            mode.is_on = False
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
            for mode, was_on in zip(self._modes, before, strict=True):
                mode.is_on = was_on

    def end(self) -> None:
        """Switch all modes off for good, and take off those that can be."""
        _finish(self._modes)
        remove_finished_modes()


def _finish(modes: Sequence[Any]) -> None:
    for mode in modes:
        mode.is_on = False
        _FINISHED.add(mode)


def remove_finished_modes() -> None:
    """Take the finished modes from the top of both stacks."""
    for top in (_get_current_function_mode, _get_current_dispatch_mode):
        while (mode := top()) is not None and mode in _FINISHED:
            mode.__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------

Indices = np.ndarray[Any, np.dtype[np.int64]]
# From here on, a power of two before the loss comes from a GradScaler.
_LARGEST_SCALE = 2.0**8


@dataclass(frozen=True, eq=False)
class PhysicalBatch:
    """A physical batch that the loader yields.

    Attributes:
        size: the number of its examples. PRIVATE.
        first, last: whether a logical batch begins or ends with this physical batch.
        logical: the indices of its logical batch, the same object in all of its parts. PRIVATE.
    """

    size: int
    first: bool
    last: bool
    logical: Indices


@dataclass(frozen=True)
class _Inputs:
    """One call of the model on the whole batch.

    Attributes:
        args, kwargs: its inputs.
        output: what it returned.
        versions: the tensors among the inputs, each with the write counter that it had.
    """

    args: Arguments
    kwargs: Keywords
    output: Any
    versions: list[tuple[Tensor, int]]


# Recordings that take `loss.backward()` over. A mode could not do it and be gone after a refusal: a
# mode cannot leave its stack from inside of a function that it has intercepted.
_FOLLOWED: weakref.WeakSet[BatchRecording] = weakref.WeakSet()
_TORCH_BACKWARD = Tensor.backward
_GRADIENT_READ = cast(Any, Tensor.grad).__get__
_VALUE_CLIP = inspect.unwrap(nn.utils.clip_grad_value_).__code__


@wraps(_TORCH_BACKWARD)
def _take_over_backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    options = {"gradient": gradient, "inputs": inputs}
    for recording in list(_FOLLOWED):
        # In another thread no operation was followed.
        is_followed = recording.thread == threading.get_ident() and not recording.modes.is_suspended
        if is_followed and recording.differentiate(self, options):
            return
        if is_followed and not self.requires_grad:
            recording.check_enabled()
    _TORCH_BACKWARD(self, gradient, retain_graph, create_graph, inputs)


class _NoSamples:
    """Says why a parameter has no gradients of single examples; a script may put values there."""

    def __get__(self, parameter: Tensor | None, kind: type) -> NoReturn:
        raise AttributeError(
            "a parameter has no grad_sample here: gradients of single examples are private; read"
            " p.grad after optimizer.step()"
        )


def _replace_functions() -> None:
    """Put what stands above into torch while a recording needs it, and what torch has otherwise."""
    Tensor.backward = _take_over_backward if _FOLLOWED else _TORCH_BACKWARD  # type: ignore[method-assign]
    names = vars(nn.Parameter)
    if _FOLLOWED and "grad_sample" not in names:
        nn.Parameter.grad_sample = _NoSamples()  # type: ignore[attr-defined]
    elif not _FOLLOWED and "grad_sample" in names:
        del nn.Parameter.grad_sample  # type: ignore[attr-defined]


class _PublicDivisors(TorchFunctionMode):
    """Gives losses over class labels public divisors, and inputs gradients of their examples.

    A batch of one keeps its batch axis, as larger ones do, where the script calls `squeeze()`.
    """

    def __init__(self, recording: BatchRecording, followed: Any = None) -> None:
        super().__init__()
        # A strong reference in the stack of modes would keep an abandoned batch alive.
        self._recording = weakref.ref(recording)
        self._followed = followed
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        recording = self._recording()
        if recording is None or not self.is_on:
            return func(*args, **kwargs)
        if func in _CLASS_LOSSES:
            return _apply_public_divisor(recording, self._run, func, args, kwargs)
        if recording.size > 1:
            return recording.call(self._run, func, args, kwargs)
        if recording.size == 1:
            is_whole = is_whole_squeeze(func, args, kwargs)
            if is_whole and isinstance(recording.tracker.state(args[0]), Total):
                return self._run(func, (*args, tuple(range(1, args[0].dim()))), {})
            return self._run(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(
                "the model takes no empty batch, which sampling may draw; write before it: if"
                " len(y) == 0: optimizer.step(); continue"
            ) from error

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function as the mode of the tracker does, which costs more on a stack of modes."""
        if self._followed is None:
            return func(*args, **kwargs)
        return self._followed.__torch_function__(func, (), args, kwargs)


class _EarlyReads(TorchFunctionMode):
    """Says why `p.grad` is None between `loss.backward()` and `optimizer.step()`.

    torch's `clip_grad_value_` fails without naming a cause where no parameter has a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = set(map(id, model.parameters()))
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        result = func(*args, **(kwargs or {}))
        is_read = self.is_on and func == _GRADIENT_READ
        if is_read and result is None and id(args[0]) in self._own:
            # A comprehension has a frame of its own before Python 3.12.
            readers = islice(traceback.walk_stack(inspect.currentframe()), 5)
            if any(frame.f_code is _VALUE_CLIP for frame, _ in readers):
                raise ValueError(
                    "clip_grad_value_ finds no gradient before optimizer.step(), which adds noise;"
                    " leave it out: max_grad_norm= of make_private clips every example"
                )
            warnings.warn(
                "p.grad is None before optimizer.step(), which adds noise: read it after the step,"
                " and leave out clip_grad_norm_, since max_grad_norm= clips every example",
                UserWarning,
                stacklevel=2,
            )
        return result


Run = Callable[[Any, Any, Any], Any]
"""Runs a function of torch on its arguments and keyword arguments."""
_GRAD = inspect.signature(torch.autograd.grad)
_BEGIN_GRAPHS = {Tensor.requires_grad_, torch.zeros_like, torch.zeros, torch.ones_like}
_CLASS_LOSSES = {loss: inspect.signature(loss) for loss in (F.cross_entropy, F.nll_loss)}


def _apply_public_divisor(
    recording: BatchRecording, run: Run, loss: Any, args: Any, kwargs: Any
) -> Any:
    """Call a loss over class labels so that its mean divides by the number of all targets.

    torch divides by the number of targets that are not ignored. That number is private: as a
    divisor it would let one example change the gradients of others. A loss that does not depend on
    the model is left alone.
    """
    bound = _CLASS_LOSSES[loss].bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    is_plain_mean = (
        options["weight"] is None
        and options["reduction"] == "mean"
        and options["ignore_index"] < 0
        and options["size_average"] is None
        and options["reduce"] is None
        and not options["target"].is_floating_point()
    )
    if not is_plain_mean or not depends_on(recording.model, options["input"]):
        return run(loss, args, kwargs)
    options["reduction"] = "none"
    losses = run(loss, bound.args, bound.kwargs)
    return run(Tensor.mean, (losses,), {})


class BatchRecording:
    """Everything that is known of one physical batch, until its optimizer step.

    Args:
        model: the model.
        layers: its layers.
        physical: the batch. It may be empty: N may be 0.
        batch: what the loader yields.
        reduction: of the loss, "mean" or "sum".
        exact: the reason to run the model on one example at a time, or None.
        numbers: of the script, in earlier batches.

    Attributes:
        tracker: follows the examples of a batch of two or more.
        calls: the calls of the layers, once the loss was differentiated.
        gradients: the gradients of every example instead, where the batch was not proved.
        passes: how often a loss of the batch was differentiated.
        forwards: how often the script called the model.
        called_disabled: whether the script called the model with gradients disabled.
        replica: of the model, in the passes over the batch.
        variables: closes replicas of what its code reaches.
        runs_single_examples: whether the recording itself runs the model, on single examples.
        modes: follow the script.
        thread: in which the script iterates over the loader.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        physical: PhysicalBatch,
        batch: Any,
        *,
        reduction: str,
        exact: Unknown | None,
        numbers: ScriptNumbers,
    ) -> None:
        self.model = model
        self.layers = layers
        self.physical = physical
        self.size = physical.size
        self.batch = batch
        self.reduction = reduction
        self.exact = exact
        self.numbers = numbers
        self.tracker: Tracker
        self.tape: Tape | None = None
        self.calls: Calls = {}
        self.gradients: list[dict[str, Tensor]] = []
        self.passes = 0
        self.forwards = 0
        self.called_disabled = False
        # Differentiable outputs that the script got, and the outputs of each example alone.
        self._outputs: list[Tensor] = []
        self._singles: list[list[Tensor]] = [[] for _ in range(self.size)]
        self._inputs: list[_Inputs] = []
        self._altered: Unknown | None = None
        # What the script itself has done and read before a call of the model.
        self._trace: Trace = []
        self._has_shown = False
        self.replica: Replica | None = None
        self.variables = ExitStack()
        self.runs_single_examples = False
        modes: list[Any] = []
        if self.size:
            self.tracker = batch_tracker(model, unwrap_containers(batch), self.size)
            self.tracker.trace = []
            if exact is None and self.size > 1:
                self.tape = Tape(model, layers, tracker=self.tracker)
                self.tape.__enter__()
            modes += modes_of(self.tracker)
        *modes, followed = modes or [None]
        self.thread = threading.get_ident()
        self.modes = ScriptModes(self, [*modes, _PublicDivisors(self, followed)])
        weakref.finalize(self, _replace_functions)  # called after the set has lost the recording
        _FOLLOWED.add(self)
        _replace_functions()

    def end(self) -> None:
        """Let go of the script, and leave torch as it was."""
        self._close_tape()
        self.modes.end()
        _FOLLOWED.discard(self)
        _replace_functions()

    def _close_tape(self) -> None:
        if self.tape is not None:
            self.tape.close_hooks()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Follow no operation of the body."""
        if self.size < 2:
            yield
            return
        self.tracker.pause()
        try:
            yield
        finally:
            self.tracker.resume()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Leave out the body, which runs the model on public rows inside of its own call."""
        tape = self.tape
        if tape is not None:
            tape.is_paused = True
        try:
            with self.modes.suspend():
                yield
        finally:
            if tape is not None:
                tape.is_paused = False

    # -- the model --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Record, before a call of the model, whether the script altered its batch."""
        if self.size > 1:
            self._altered = self._altered or self.tracker.altered
            # The model itself is compared in batches of several sizes.
            self._trace, self.tracker.trace = self.tracker.trace or self._trace, None
            self._has_shown = self.tracker.has_shown

    def end_forward(self, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """Record a call of the model; return outputs that replace its own, or None to keep them."""
        self.forwards += 1
        if self.size < 2:
            return None
        self.tracker.trace = self._trace
        self.exact = (
            self.exact
            or self.tracker.failure
            or self._find_unknown(output)
            or self._find_unread((args, kwargs))
        )
        if self.exact is None:
            versions = [(x, x._version) for x in tensors_of((args, kwargs))]
            self._inputs.append(_Inputs(args, kwargs, output, versions))
            return None
        self._close_tape()
        return self._run_one_by_one(args, kwargs, output)

    def _find_unknown(self, output: Any) -> Unknown | None:
        """Return the state of the first output whose examples cannot be told; None without one."""
        for x in filter(is_differentiable, tree_leaves(output)):
            state = self.tracker.state(x)
            if isinstance(state, Unknown):
                return state
        return None

    def _find_unread(self, arguments: Any) -> Unknown | None:
        """Return a state where the model takes lists of examples; None without one."""
        leaves = tree_leaves(arguments, is_leaf=self._is_list_of_examples)
        if not any(map(self._is_list_of_examples, leaves)):
            return None
        why = "it takes values that are not tensors, which no operation shows to be read"
        return Unknown("model", why)

    def _run_one_by_one(self, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """Run the model on each example alone; return the outputs put together."""
        tracker = self.tracker
        joined, spec = tree_flatten(output)
        states: dict[int, State] = {}
        with self.pause():
            singles = self._run_singles(args, kwargs)
            for i, whole in enumerate(joined):
                parts = [single[i] for single in singles]
                if is_differentiable(parts[0]):
                    joined[i], states[i] = self._join(whole, parts)
        tracker.failure = None
        tracker.altered = None
        tracker.has_shown = self._has_shown
        for i, state in states.items():
            tracker.set_state(joined[i], state)
        self._keep_outputs(joined, singles, list(states))
        return tree_unflatten(joined, spec)

    def _keep_outputs(self, joined: list[Any], singles: list[list[Any]], places: list[int]) -> None:
        """Keep the outputs of a call at some places, of the batch and of each example alone."""
        self._outputs += [joined[i] for i in places]
        for kept, leaves in zip(self._singles, singles, strict=True):
            kept += [leaves[i] for i in places]

    def _run_singles(self, args: Arguments, kwargs: Keywords) -> list[list[Any]]:
        """Return the flattened outputs of the model for each example alone."""
        outputs = []
        assert self.replica is not None
        self.variables.close()
        self.runs_single_examples = True
        try:
            with self.replica.suspend(), hide_saved_tensors_hooks():
                for own_args, own_kwargs in self.examples(args, kwargs):
                    with own_pass(self.model), own_variables(None, self.model, "the model"):
                        output = self.model(*own_args, **own_kwargs)
                    outputs.append(tree_leaves(output))
        finally:
            self.runs_single_examples = False
        return outputs

    def _join(self, whole: Tensor, parts: list[Tensor]) -> tuple[Tensor, State]:
        """Return the outputs of single examples as the output of a batch, and its batch axis."""
        one = parts[0]
        if not whole.dim():
            stacked = torch.stack(parts)
            if self.reduction == "mean":
                return stacked.mean(), Total(is_mean=True)
            return stacked.sum(), Total()
        for dim, length in enumerate(one.shape):
            expected = list(one.shape)
            expected[dim] = self.size * length
            if list(whole.shape) == expected:
                axis = BatchAxis(dim, 1, max(1, length))
                return torch.cat(parts, dim), axis
        raise ValueError(
            f"the model gives {list(one.shape)} for one example, and no axis of it grows with the "
            "batch; an output needs one axis for the examples"
        )

    def examples(self, args: Arguments, kwargs: Keywords) -> Iterator[tuple[Arguments, Keywords]]:
        """Yield the arguments of a call for each example alone.

        Raises:
            ValueError: the examples in an argument cannot be separated.
        """
        leaves = tree_leaves((args, kwargs))
        for container in filter(_holds_tensors, leaves):
            raise ValueError(
                f"the examples inside a {type(container).__name__} cannot be separated; call the "
                "model with the tensors of the batch"
            )
        states = map(self.tracker.state, tensors_of(leaves))
        if not any(isinstance(state, (BatchAxis, Unknown)) for state in states):
            raise ValueError(NO_BATCH)
        for i in range(self.size):
            pick = partial(self._pick_example, i)
            yield tree_map(pick, (args, kwargs), is_leaf=self._is_list_of_examples)

    def _is_list_of_examples(self, x: Any) -> bool:
        """Return whether an argument has a value for each example, and no value is a tensor."""
        if isinstance(x, np.ndarray):
            return self.tracker.is_opaque and x.shape[:1] == (self.size,)
        is_list = self.tracker.is_opaque and isinstance(x, (list, tuple))
        return is_list and len(x) == self.size and not tensors_of(x)

    def _pick_example(self, i: int, x: Any) -> Any:
        """Return the part of an argument that belongs to example i."""
        if not isinstance(x, Tensor):
            return x[i : i + 1] if self._is_list_of_examples(x) else x
        state = self.tracker.state(x)
        if self.forwards > 1 and depends_on(self.model, x):
            raise ValueError(
                "a call of the model takes what an earlier call returned; let one module make both "
                "calls in its forward"
            )
        if isinstance(state, Unknown):
            reason = state.reason.partition(" (shapes")[0]
            fix = "change each example by itself"
            if "slice" in state.operation:
                fix = "for parts of a batch use BatchMemoryManager"
            raise ValueError(
                f"an input of the model was made by {state.operation}, which hides its examples:"
                f" {reason:.45}; {fix}"
            )
        if isinstance(state, BatchAxis):
            return one_example_a_row(x, state, self.size)[i]
        return x

    # -- gradients at inputs -----------------------------------------------------------------------

    def call(self, run: Run, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch; follow gradients that the script takes at inputs."""
        if func is torch.autograd.grad:
            run_grad = partial(run, func, ())
            return self._take_input_gradients(run_grad, _GRAD.bind(*args, **kwargs).arguments)
        result = run(func, args, kwargs)
        if func in _BEGIN_GRAPHS and result.requires_grad and self.tracker.state(result) is None:
            axis = BatchAxis(0)
            # A perturbation that begins as zeros has a row for each example.
            if result.shape[:1] == (self.size,) and are_places_equal(result, axis, self.size):
                self.tracker.set_state(result, axis)
        return result

    def _take_input_gradients(self, run: Callable[[Keywords], Any], named: Keywords) -> Any:
        """Call `torch.autograd.grad`; at rows of examples a sum over them has their gradients.

        Where the sum is a mean, each gradient is times N: a batch of that example alone gives it.

        Raises:
            ValueError: the gradients shall be differentiated again.
        """
        outputs, inputs = tensors_of(named["outputs"]), tensors_of(named["inputs"])
        if named.get("create_graph") and any(depends_on(self.model, x) for x in outputs):
            raise ValueError(
                "torch.autograd.grad(create_graph=True) hides which example a gradient is of; train"
                " with dpkfc.Session, whose losses may use it"
            )
        state = self.tracker.state(outputs[0])
        axes = [self.tracker.axis(x) for x in inputs]
        # A mean over entries may divide by a length that follows the longest example.
        is_sum = isinstance(state, Total) and not state.is_quotient and state.entries == 1
        is_weighted = named.get("grad_outputs") is not None or named.get("is_grads_batched")
        # Behind the outputs of single examples nothing mixes.
        is_torch = custom_function(outputs[0], self._outputs) is None
        if not (is_sum and all(axes) and is_torch) or len(outputs) > 1 or is_weighted:
            return run(named)
        with self.pause():
            found = run(named)
            if cast(Total, state).is_mean:
                found = tuple(None if x is None else x * self.size for x in found)
        for x, axis in zip(found, axes, strict=True):
            if x is not None:
                self.tracker.set_state(x, axis)
        return found

    # -- the loss ---------------------------------------------------------------------------------

    def differentiate(self, loss: Tensor, options: Keywords) -> bool:
        """Differentiate a loss for every example; return False if it is not of this batch.

        Args:
            loss: of the script.
            options: the keywords of `loss.backward()`. A `gradient` multiplies the loss.

        Raises:
            ValueError: a loss that is not a sum over examples, or the option `inputs`.
        """
        if not self.forwards or not depends_on(self.model, loss):
            return False
        if options["gradient"] is not None:
            loss = loss * options["gradient"]
        state = self.tracker.state(loss) if self.size else None
        if self.size > 1 and not isinstance(state, (Total, Unknown, BatchAxis)):
            return False
        self.passes += 1
        if self.passes > 1 or self.size == 0:
            return True
        # The script is followed no further. Later calls of `backward()` are still taken over.
        self._close_tape()
        self.modes.end()
        try:
            if options["inputs"] is not None:
                raise ValueError(
                    "backward(inputs=...) is not supported: for inputs use torch.autograd.grad, and"
                    " freeze the other parameters before make_private"
                )
            # Anomaly mode would end the run at the first record with a NaN.
            with torch.autograd.set_detect_anomaly(False):
                self._take_gradients(loss, state)
        except BaseException:
            self.passes = 0  # a refused batch is not stepped
            self.end()
            raise
        self.modes = ScriptModes(self, [_EarlyReads(self.model)])
        return True

    def check_enabled(self) -> None:
        """Check, where no pass was differentiated, that the script ran none without gradients.

        Raises:
            ValueError: it did, naming the setting of a checkpoint that does so.
        """
        if self.tape is not None:
            self.tape.check_enabled()
        if self.called_disabled:
            raise ValueError(
                "the model was called with gradients disabled: pass use_reentrant=False to"
                " checkpoint(), or leave out torch.no_grad()"
            )

    def _take_gradients(self, loss: Tensor, state: State | None) -> None:
        """Take the gradients of all examples from a loss with this tracker state."""
        if self.size == 1:
            if state == OF_EARLIER_BATCH:
                self._sum_factor(state)
            self.gradients = [self._parameter_gradients([loss], None)]
            return
        factor = self._sum_factor(state)
        self.tracker.check_arrays()
        altered = self._altered or self.tracker.altered
        if altered is not None:
            # No proof covers what the script did to its batch or its loss.
            raise ValueError(
                f"between loader and loss.backward() stands {altered.operation}: "
                f"{altered.reason[:80]}"
            )
        total = loss * factor
        if self.exact is None and self.tape is not None:
            self.exact = self.tape.failure_of_pass(total)
            if self.exact is None:
                self.calls = self.tape.gradients(total)
                return
        self._differentiate_singles(total)

    def _sum_factor(self, state: State | None) -> float:
        """Return the factor that makes the loss the sum of the losses of its examples.

        Raises:
            ValueError: the loss is not a sum over examples, by name of the operation. Or its
                reduction is not the declared one, or its factor differs from earlier batches.
        """
        if isinstance(state, Unknown):
            fix = "; reduce losses by mean() or sum()"
            if "nll_loss" in state.operation:
                fix = "; write reduction='none', then mean()"
            elif "read of" in state.reason or "made of single" in state.reason:
                fix = "; read values after loss.backward()"
            elif state.reason.startswith("a trainable parameter"):
                fix = "; use it in forward; a penalty: docs/how-to-opacus.md#penalties"
            reason = state.reason.partition(" (shapes")[0]
            text = f"the loss is not a sum over examples: {state.operation}, {reason}"
            raise ValueError(textwrap.shorten(text, 160 - len(fix), placeholder="") + fix)
        if isinstance(state, BatchAxis):
            raise ValueError(
                "backward() needs one number; reduce the losses of the examples by mean() or sum()"
            )
        return self._check_reduction(cast(Total, state))

    def _check_reduction(self, state: Total) -> float:
        """Return the factor of a loss whose reduction and constant factor are the run's."""
        if state.is_quotient and self.reduction == "sum":
            # N happens to divide a constant of the script.
            state = replace(state, is_mean=False, number=state.number / self.size)
        actual = "mean" if state.is_mean else "sum"
        if actual != self.reduction:
            raise ValueError(
                f"the loss is a {actual} over the examples, but loss_reduction="
                f"'{self.reduction}' was declared; use make_private(loss_reduction='{actual}')"
            )
        if state.number >= _LARGEST_SCALE and math.frexp(state.number)[0] == 0.5:
            raise ValueError(
                f"the loss is multiplied by {state.number:.0f}, as a GradScaler does, whose steps "
                "follow private overflows; train in bfloat16 without a GradScaler"
            )
        lengths = [n for x in tensors_of(unwrap_containers(self.batch)) for n in x.shape]
        is_read = self.tracker.has_shown or self.tracker.is_opaque
        self.numbers.check(
            state.factor,
            self.tracker.trace or [],
            lengths,
            is_read=is_read,
            is_proved=self.exact is None,
        )
        if state.is_mean:
            return float(self.size)
        return 1.0

    def _differentiate_singles(self, total: Tensor) -> None:
        """Pull the gradients at the outputs back through the calls of single examples.

        Raises:
            ValueError: the loss has a backward pass in Python, which may mix examples, or uses
                parameters where no example alone shows it.
        """
        self._repeat_for_singles()
        outputs = self._outputs
        custom = custom_function(total, outputs)
        if custom is not None:
            raise ValueError(
                f"the loss is computed by {custom.operation}, whose backward pass in Python may "
                "mix examples; use operations of torch"
            )
        beside = used_parameters(self.model, total, outputs)
        if beside:
            raise ValueError(
                f"the loss uses '{min(beside)}' beside the outputs of the model: compute that in"
                " forward; a penalty: docs/how-to-opacus.md#penalties"
            )
        output_gradients = torch.autograd.grad(total, outputs, allow_unused=True, retain_graph=True)
        gradients = []
        for i, singles in enumerate(self._singles):
            starts: list[Tensor] = []
            rows: list[Tensor] = []
            for output, gradient, single in zip(outputs, output_gradients, singles, strict=True):
                if gradient is not None and single.requires_grad:
                    starts.append(single)
                    rows.append(self._example_row(output, gradient, single, i))
            gradients.append(self._parameter_gradients(starts, rows))
        self.gradients = gradients

    def _repeat_for_singles(self) -> None:
        """Repeat the calls of the whole batch on single examples.

        Raises:
            RuntimeError: an input was written since the call.
        """
        inputs, self._inputs = self._inputs, []
        for call in inputs:
            if any(x._version != version for x, version in call.versions):
                raise RuntimeError(
                    "an input of the model was changed in place before loss.backward(); change a"
                    " copy"
                )
            singles = self._run_singles(call.args, call.kwargs)
            leaves = tree_leaves(call.output)
            places = [i for i, x in enumerate(leaves) if is_differentiable(x)]
            self._keep_outputs(leaves, singles, places)

    def _example_row(self, output: Tensor, gradient: Tensor, single: Tensor, i: int) -> Tensor:
        """Return the gradient at the output of example i."""
        if not output.dim():
            if self.reduction == "mean":
                return gradient / self.size
            return gradient
        dim = 0
        while output.shape[dim] == single.shape[dim]:
            dim += 1
        length = single.shape[dim]
        return gradient.narrow(dim, i * length, length)

    def _parameter_gradients(
        self, outputs: list[Tensor], output_gradients: list[Tensor] | None
    ) -> dict[str, Tensor]:
        if not outputs:
            return {}
        parameters = trainable_tensors(self.model)
        values = torch.autograd.grad(
            outputs,
            list(parameters.values()),
            output_gradients,
            allow_unused=True,
            retain_graph=True,
        )
        gradients = {}
        for name, gradient in zip(parameters, values, strict=True):
            if gradient is not None:
                gradients[name] = gradient.to_dense().detach()
        return gradients

    # -- the sum ----------------------------------------------------------------------------------

    def add_to(self, summer: ClippedSummer) -> None:
        """Clip and add every example."""
        if self.calls:
            summer.add(self.calls, self.size)
        for gradient in self.gradients:
            blocks = blocks_of_one(self.layers, gradient)
            if blocks:
                summer.add(blocks, 1)
        # The release needs memory.
        self.calls = {}
        self.gradients = []


def _holds_tensors(x: Any) -> bool:
    """Return whether an argument that is not a tensor has tensors inside."""
    if isinstance(x, Tensor):
        return False
    parts = [x]
    if hasattr(x, "__dict__"):
        parts += vars(x).values()
    unwrapped = list(map(unwrap_containers, parts))
    return bool(tensors_of(unwrapped))
