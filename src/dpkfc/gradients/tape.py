"""Record a forward pass so that one backward pass yields the inputs and gradients of every layer.

Hooks note the calls of covered modules while a tracker follows the batch axis. The pass computes
what the plain model computes. The only operations added are views where parameters that all
examples share meet the examples. Nothing stays on the model once the tape is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only

from dpkfc.distributed.fsdp import find_graph_tensor, trainable_tensors
from dpkfc.gradients.attention import ARGUMENTS, INPUTS, AttentionCall, expected_axis
from dpkfc.gradients.autograd_graph import (
    custom_function,
    depends_on,
    gradient_of,
    is_differentiable,
)
from dpkfc.gradients.eager_mode import is_in_backward, run_eagerly
from dpkfc.gradients.early_blocks import EarlyBlocks
from dpkfc.gradients.hook import Hook
from dpkfc.gradients.layer_matrices import add_blocks, blocks_of_one
from dpkfc.gradients.layers import (
    Arguments,
    Call,
    Calls,
    Keywords,
    Layer,
    name_arguments,
    tensors_of,
)
from dpkfc.gradients.loss_function import check_losses
from dpkfc.gradients.output_axes import (
    SINGLE_OUTPUT,
    declare_outputs,
    declare_recurrent,
    guess_axis,
)
from dpkfc.gradients.recorded_call import (
    Arrival,
    OpenCall,
    RecordedCall,
    find_edge,
    find_whole_base,
)
from dpkfc.gradients.repeated_use import RepeatedUse
from dpkfc.gradients.shared_uses import Meeting, SharedUses, WeightUse, pull_back
from dpkfc.rng_state import all_states, has_drawn
from dpkfc.tensors import Tensors
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import BatchAxis, Unknown
from dpkfc.tracking.tracker import Tracker

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_RNN_MODULE = nn.LSTM.__module__


class Tape:
    """Context manager that records the calls of covered modules and differentiates them once.

    Usage: `with tape: losses = loss_fn(model, batch)`, then `tape.backward(losses)`.

    Args:
        model: what is recorded.
        layers: its layers.
        tracker: of a pass that is followed from outside, with the batch declared. None makes a
            tracker of the tape's own, which takes the inputs of the model for the batch, and the
            leading axis of the first of them for its size. It does not follow a batch of one.
        lenient: use the leading axis as the batch where the tracker cannot tell. Only for public
            probes: nothing proves which example the rows belong to.

    Attributes:
        size: examples N of the pass, 0 before they are known.
        is_paused: calls are not recorded, since the library runs the model inside a pass.
        output_dtypes: of the calls that were differentiated.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        tracker: Tracker | None = None,
        lenient: bool = False,
    ) -> None:
        self.model = model
        self.layers = layers
        self.tracker = tracker or Tracker(0)
        self.lenient = lenient
        self.size = self.tracker.size
        self.is_paused = False
        self._own_tracker = tracker is None

    def __enter__(self) -> Tape:
        """Start to record; what an earlier use recorded is dropped."""
        self._meetings: Sequence[Meeting] = ()
        self._weights: Sequence[WeightUse | RepeatedUse] = ()
        self._records: list[RecordedCall] = []
        self.output_dtypes: set[torch.dtype] = set()
        self._hidden: dict[str, Layer] = {}
        self._calls: list[tuple[nn.Module, OpenCall]] = []
        self._called: set[int] = set()
        self._stack = ExitStack()
        self._is_differentiated = torch.is_grad_enabled()
        # The tracker has not seen the cast of a weight in an earlier pass.
        torch.clear_autocast_cache()
        self._stack.enter_context(run_eagerly())
        if self._own_tracker:
            self.size = 0
            self._begin_tracker()
        else:
            self._share_parameters()
        if _has_any_global_hook():
            why = "it may change what a layer is given and returns"
            self.tracker.fail("global module hook", why)
        members: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers:
            if layer.is_hooked:
                for module in layer.modules:
                    members.setdefault(module, []).append(layer)
        for module, layers in members.items():
            # A module that runs again for each example applies the pre-hooks of its owner again,
            # which may compute its weights, and no forward hook.
            before = module.register_forward_pre_hook(
                Hook(partial(_call_unseen, self._begin_call, tuple(layers))),
                with_kwargs=True,
                prepend=all(layer.rule == "fallback" for layer in layers),
            )
            after = module.register_forward_hook(
                Hook(partial(_call_unseen, self._finish_call, tuple(layers))),
                with_kwargs=True,
                prepend=True,
                always_call=True,
            )
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        if self._own_tracker:
            handle = self.model.register_forward_pre_hook(
                self._declare_inputs, with_kwargs=True, prepend=True
            )
            self._stack.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to record and take every hook off; after an error nothing recorded is kept."""
        self.close_hooks()
        if error is not None:
            self._records = []

    def close_hooks(self) -> None:
        """Take every hook off; what was recorded stays."""
        self._stack.close()
        # Torch calls no hook after a KeyboardInterrupt.
        for _, call in reversed(self._calls):
            self._end_call(call)
        self._calls = []

    def _begin_tracker(self) -> None:
        """Follow the pass from here on, as soon as it is known to have several examples."""
        self.tracker = Tracker(self.size, self.model.buffers(), trusts_public_rows=True)
        if self.size < 2:
            self.tracker.fail("pass", "no operation was followed")
            return
        parameters = trainable_tensors(self.model)
        self.tracker.declare_parameters(parameters.values())
        self._share_parameters()
        self._stack.enter_context(follow(self.tracker))

    @property
    def _is_followed(self) -> bool:
        """Return whether operations are followed: in a batch of several, or from outside."""
        return self.size > 1 or not self._own_tracker

    def _share_parameters(self) -> None:
        tracker = self.tracker
        names = {id(p): name for name, p in trainable_tensors(self.model).items()}
        shared = SharedUses(tracker, names)
        self._meetings = shared.meetings
        self._weights = shared.weights
        tracker.call = shared.call
        self._stack.callback(setattr, tracker, "call", None)

    def _declare_inputs(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Take the inputs of the model for the batch, where the tape follows a pass of its own."""
        tensors = tensors_of((args, kwargs))
        if not self.size:
            self.size = next((len(x) for x in tensors if x.dim()), 0)
            if self.size:
                self._begin_tracker()
        if self.size < 2:
            return
        for x in tensors:
            has_rows = x.shape[:1] == (self.size,)
            if has_rows and not self.tracker.is_declared(x):
                self.tracker.set_state(x, BatchAxis(0))

    def _begin_call(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        args: Arguments,
        kwargs: Keywords,
    ) -> None:
        """Note that a covered module is called."""
        if is_in_backward() or self.is_paused:
            return
        parameters = _parameters_of(module, layers)
        if parameters is None:
            return
        keys = set(map(id, parameters))
        if not keys.isdisjoint(self._called):
            # A cast by an earlier call would count as outside of this one.
            torch.clear_autocast_cache()
        self._called |= keys
        tensors = tensors_of((*args, *kwargs.values()))
        if not tensors and layers[0].rule == "fallback":
            return  # its parameters are followed to where they meet the examples
        axes = [self._axis(x) for x in tensors]
        kinds = set(map(type, map(self.tracker.state, tensors)))
        call = OpenCall(parameters, tensors, axes, kinds)
        if layers[0].paths:
            call.attention = AttentionCall.record(module, args, kwargs)
        self.tracker.cover(parameters)
        if isinstance(module, _RECURRENT) and module.forward.__module__ == _RNN_MODULE:
            self.tracker.pause()
            call.paused = True
        if isinstance(module, nn.EmbeddingBag) and tensors and tensors[0].dim() == 1:
            why = "its offsets count from the beginning of the batch"
            self.tracker.fail("EmbeddingBag", why)
        if layers[0].rule in ("fallback", "custom"):
            call.states = all_states()
            # A call may fill a list, a dictionary or a cache that it is given.
            call.given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self._calls.append((module, call))

    def _axis(self, x: Tensor) -> BatchAxis | None:
        """Return the batch axis of an input or an output."""
        if self.size == 1 and x.dim():
            return BatchAxis(0, 1, max(1, x.shape[0]))
        state = self.tracker.state(x)
        if isinstance(state, BatchAxis):
            return state
        if self.lenient and isinstance(state, Unknown) and self.size:
            return guess_axis(x, self.size)
        return None

    def _end_call(self, call: OpenCall, outputs: Sequence[Tensor] = ()) -> None:
        self.tracker.uncover(call.parameters, outputs)
        if call.paused:
            self.tracker.resume()

    def _finish_call(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        args: Arguments,
        kwargs: Keywords,
        output: Any,
    ) -> Any:
        """Record a call, and return its outputs, as views where they had to be distinguished."""
        if is_in_backward() or self.is_paused:
            return None
        if not self._calls or self._calls[-1][0] is not module:
            return None
        call = self._calls.pop()[1]
        outputs = tensors_of(output)
        bases = [base for x in outputs if (base := find_whole_base(x, module)) is not None]
        self._end_call(call, [*outputs, *filter(self.tracker.axis, bases)])
        if output is None:
            return None
        if call.paused and self._is_followed:
            declare_recurrent(self.tracker, module, call, outputs)
        should_have_gradients = self._is_differentiated or not self.lenient
        if should_have_gradients and not torch.is_grad_enabled():
            self._hidden.update({layer.name: layer for layer in layers})
            return None
        if sum(map(is_differentiable, outputs)) > 1:
            # Otherwise an output would receive the gradients of another one made of it.
            output = tree_map_only(Tensor, _view_of_output, output)
        self._record(layers, module, (args, kwargs), tensors_of(output), call)
        return output

    def _record(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        given: tuple[Arguments, Keywords],
        outputs: Sequence[Tensor],
        call: OpenCall,
    ) -> None:
        layer = layers[0]
        output_axes = [self._axis(x) for x in outputs]
        if self._is_followed:
            output_axes = declare_outputs(self.tracker, layer, call, outputs, output_axes)
        if call.states is not None and has_drawn(call.states):
            why = "it holds parameters and draws random numbers"
            self.tracker.fail(type(module).__name__, why)
        if call.attention is not None and not self._check_attention(module, given):
            return
        is_public = not any(output_axes)
        if is_public and self._is_followed and layer.rule not in SINGLE_OUTPUT:
            return
        args, kwargs = call.given or self._detach_arguments(*given)
        arrival = None
        if layer.rule == "norm" and not (is_public or self.lenient):
            if is_differentiable(outputs[0]):
                arrival = Arrival()
                outputs[0].register_hook(arrival)
        self._records.append(
            RecordedCall(
                layers=layers,
                call=Call(module, args, kwargs, [], call.axes, output_axes, call.attention),
                outputs=[(x.shape, x.dtype, x.device) for x in outputs],
                edges=[find_edge(x, module) for x in outputs],
                versions=[(self._detach(x), x._version) for x in call.tensors],
                is_public=is_public,
                arrival=arrival,
            )
        )

    def _detach(self, x: Tensor) -> Tensor:
        """Return a tensor without its graph; the tracker notes it, and need follow no operation."""
        if type(x) is not Tensor:
            return x.detach()
        with torch._C._DisableTorchDispatch():
            detached = x.detach()
        self.tracker.note_alias(detached)
        return detached

    def _detach_arguments(self, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        if not kwargs and all(isinstance(x, Tensor) for x in args):
            return tuple(map(self._detach, args)), {}
        given: tuple[Arguments, Keywords] = tree_map_only(Tensor, self._detach, (args, kwargs))
        return given

    def _check_attention(self, module: nn.Module, given: tuple[Arguments, Keywords]) -> bool:
        """Return whether queries, keys and values have the batch where attention takes it to be."""
        named = name_arguments(ARGUMENTS, *given)
        expected = expected_axis(module)
        fits = all(self._axis(named[name]) == expected for name in INPUTS)
        if not fits:
            why = "queries, keys or values have the batch in another place than it takes"
            self.tracker.fail(type(module).__name__, why)
        return fits

    def failure(self, losses: Tensor) -> Unknown | None:
        """Return why the pass is not proved to give every example its gradient, or None.

        Args:
            losses: `[N]`, from the pass that was recorded.
        """
        if self.tracker.failure is not None:
            return self.tracker.failure
        state = self.tracker.state(losses)
        if isinstance(state, Unknown):
            return state
        if state != BatchAxis(0):
            why = f"the losses have the batch in another place than their only axis ({state})"
            return Unknown("loss", why)
        return self.failure_of_pass(losses)

    def _find_hidden_layer(self) -> Unknown | None:
        """Return the first layer that was called only with gradients disabled, or None."""
        hidden = dict(self._hidden)
        for record in self._records:
            for layer in record.layers:
                hidden.pop(layer.name, None)
        if not hidden:
            return None
        first = next(iter(hidden.values()))
        return Unknown(
            f"layer '{first.display_name}'",
            "called without gradients: leave torch.no_grad(); checkpoints need "
            "use_reentrant=False (transformers: gradient_checkpointing_kwargs)",
        )

    def check_enabled(self) -> None:
        """Raise where a layer was called only with gradients disabled: only noise would train it.

        Raises:
            ValueError: naming the layer, and the setting of a checkpoint that hides it.
        """
        hidden = self._find_hidden_layer()
        if hidden is not None:
            raise ValueError(f"{hidden.operation}: {hidden.reason}")

    def failure_of_pass(self, losses: Tensor) -> Unknown | None:
        """Return why the gradients of a followed pass are not proved, whatever its losses are.

        Args:
            losses: where the graph of the pass begins.

        Returns:
            None where they are proved.
        """
        hidden = self._find_hidden_layer()
        if hidden is not None:
            return hidden
        for record in self._records:
            if any(x._version != version for x, version in record.versions):
                why = "its input was changed in place after it had read it"
                return Unknown(record.layers[0].display_name, why)
        if self._meetings and self._covered_parameters() & self.tracker.read:
            why = "a parameter is used by its layer and outside of it"
            return Unknown("parameter", why)
        return custom_function(losses)

    def _covered_parameters(self) -> set[int]:
        """Return the ids of the parameters whose layers were called."""
        covered: set[int] = set()
        for record in self._records:
            parameters = _parameters_of(record.call.module, record.layers) or ()
            covered.update(id(find_graph_tensor(p)) for p in parameters)
        return covered

    def backward(self, losses: Tensor) -> Calls:
        """Differentiate the sum of per-example losses at every noted output.

        Args:
            losses: `[N]`, one loss an example, computed while the tape was open.

        Returns:
            For each layer that was called, its calls with inputs and output gradients, or blocks of
            gradients.

        Raises:
            ValueError: losses of the wrong shape, or on no path to a layer; an operation hides the
                batch axis.
        """
        check_losses(losses)
        self.check_depends(losses)
        if self._own_tracker and not self.lenient and len(losses) > 1:
            failure = self.failure(losses)
            if failure is not None:
                raise ValueError(f"{failure.operation} hides the batch axis: {failure.reason}")
        return self.gradients(losses.sum())

    def gradients(self, total: Tensor) -> Calls:
        """Differentiate a sum of per-example losses at every noted output; as `backward`."""
        records, self._records = self._records, []
        if self.size == 1 and not self.lenient:
            return blocks_of_one(self.layers, gradient_of(self.model, total))
        self.output_dtypes = {
            dtype
            for record in records
            for edge, (_, dtype, _) in zip(record.edges, record.outputs, strict=True)
            if edge is not None
        }
        public = {record.edges[0]: record for record in records if record.is_public}
        batched = [record for record in records if not record.is_public]
        del records
        uses: list[Any] = [*self._meetings, *self._weights]
        early = EarlyBlocks(self.size)
        batched = early.take(batched, [use.edge for use in uses])
        all_edges = [edge for record in batched for edge in record.edges]
        all_edges += [use.edge for use in uses]
        edges = [edge for edge in dict.fromkeys(all_edges) if edge is not None]
        gradients: dict[Any, Tensor | None] = {}
        if edges:
            keeps_graph = bool(self._meetings)
            with early:
                arrived = torch.autograd.grad(
                    total, edges, allow_unused=True, retain_graph=keeps_graph
                )
            gradients = dict(zip(edges, arrived, strict=True))
        calls = self._calls_of([*batched, *early.waiting.values()], gradients, early.blocks)
        if self._meetings:
            self._add_shared(gradients, public, calls)
        for use in self._weights:
            gradient = gradients[use.edge]
            if gradient is not None:
                add_blocks(self.layers, use.gradients(gradient, self.size), calls)
        return calls

    def inputs(self) -> Calls:
        """Return the calls of a pass without gradients, with zeros for the output gradients."""
        records, self._records = self._records, []
        calls: Calls = {}
        size = self.size or 1
        for record in records:
            call = record.with_gradients([None] * len(record.outputs))
            if record.is_public:
                rows = call.gradient.expand(size, *record.outputs[0][0])
                call = record.repeat_public(rows, size)
            record.add_to(calls, call)
        return calls

    def check_depends(self, losses: Tensor) -> None:
        """Raise unless the losses depend on a trainable layer.

        Raises:
            ValueError: they do not.
        """
        if not depends_on(self.model, losses):
            raise ValueError(
                "the losses do not depend on any trainable layer of the model that the session was "
                "given: call that model, uncompiled, inside loss_fn"
            )

    def _calls_of(
        self,
        records: Sequence[RecordedCall],
        gradients: dict[Any, Tensor | None],
        blocks: Mapping[str, list[Any]],
    ) -> Calls:
        """Return the calls of every layer, and blocks of those that were made early.

        Calls that no loss depends on are left out where the layer has another call.
        """
        calls: Calls = dict(blocks)
        unused: Calls = {}
        for record in records:
            arrived = [gradients.get(edge) for edge in record.edges]
            is_used = any(gradient is not None for gradient in arrived)
            record.add_to(calls if is_used else unused, record.with_gradients(arrived))
        for name, several in unused.items():
            calls.setdefault(name, several)
        return calls

    def _add_shared(
        self,
        arrived: dict[Any, Tensor | None],
        public: dict[Any, RecordedCall],
        calls: Calls,
    ) -> None:
        """Add the gradients of parameters that all examples share to the calls.

        Args:
            arrived: edge to gradient.
            public: edge to record; a public record has one output.
            calls: of all layers.
        """
        public.pop(None, None)
        parameters: Tensors = {}
        for name, p in trainable_tensors(self.model).items():
            if id(p) in self.tracker.read:
                parameters[name] = p
        targets: list[Any] = [*public, *parameters.values()]
        gradients = pull_back(self._meetings, arrived, targets, self.size)
        for record, gradient in zip(public.values(), gradients, strict=False):
            if gradient is not None:
                record.add_to(calls, record.repeat_public(gradient, self.size))
        pairs = zip(parameters, gradients[len(public) :], strict=True)
        own = {name: gradient for name, gradient in pairs if gradient is not None}
        add_blocks(self.layers, own, calls)


def _call_unseen(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the tape, whose looks at tensors no mode need see."""
    with torch._C.DisableTorchFunction():
        return function(*arguments)


def _parameters_of(module: nn.Module, layers: Sequence[Layer]) -> list[Tensor] | None:
    """Return the parameters of a module that its layers cover.

    It is None where `functional_call` has put other tensors in their place.
    """
    parameters = []
    try:
        for layer in layers:
            parameters += [layer.tensor(role, module) for role in layer.parameters]
    except AttributeError:
        return None
    return parameters


def _view_of_output(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x
