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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpkfc.gradients.accumulate import ClippedSummer
from dpkfc.gradients.calls import Calls
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.materialised import blocks_of_one
from dpkfc.gradients.micro import batch_tracker
from dpkfc.gradients.model_state import restored_state
from dpkfc.gradients.tape import Tape, custom_function, nodes_of
from dpkfc.integrations._modes import ScriptModes
from dpkfc.tracking import BatchAxis, State, Total, Tracker, Unknown

__all__ = ["BatchRecording", "ModelCall", "one_example", "unwrap_containers"]

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
