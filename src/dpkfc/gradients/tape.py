"""Record a forward pass so that one backward pass yields the inputs and gradients of every layer.

Hooks note the calls of covered modules while a tracker follows the batch axis. The pass computes
what the plain model computes. The only operations added are views where parameters that all
examples share meet the examples. Nothing stays on the model once the tape is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only

from dpkfc.distributed.fsdp import find_graph_tensor, trainable_tensors
from dpkfc.gradients.attention import ARGUMENTS, INPUTS, AttentionCall, expected_axis
from dpkfc.gradients.autograd_graph import (
    custom_function,
    depends_on,
    gradient_of,
    is_differentiable,
    leads_to,
)
from dpkfc.gradients.eager_mode import is_in_backward, run_eagerly
from dpkfc.gradients.full_precision import full_precision
from dpkfc.gradients.hook import Hook
from dpkfc.gradients.layer_matrices import add_blocks, blocks_of_one
from dpkfc.gradients.layers import (
    Arguments,
    Axes,
    Call,
    Calls,
    Keywords,
    Layer,
    name_arguments,
    tensors_of,
)
from dpkfc.gradients.loss_function import check_losses
from dpkfc.gradients.recurrence import expected_places
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.shared_uses import SharedTensorUse, SharedUses, WeightUse, pull_back
from dpkfc.rng_state import all_states, has_drawn
from dpkfc.tensors import Tensors
from dpkfc.tracking.batch_rules import are_places_equal
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import PARAMETRIC, BatchAxis, Parametric, State, Unknown
from dpkfc.tracking.tracker import Tracker

_SINGLE_OUTPUT = ("linear", "conv", "embedding", "tied", "norm")
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_RNN_MODULE = nn.LSTM.__module__


@dataclass
class _Record:
    """One call of one module, before its output gradients are known.

    Attributes:
        layers: those that the module belongs to.
        call: the call without output gradients.
        outputs: its tensor outputs as (shape, type, device).
        edges: where their gradients arrive, None without a gradient.
        versions: the inputs, each with the counter of writes that it had.
        is_public: the call read no example, so that all examples share its outputs.
        arrival: sees the gradient at the output before hooks of other code; of a norm layer.
    """

    layers: tuple[Layer, ...]
    call: Call
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    edges: list[GradientEdge | None]
    versions: list[tuple[Tensor, int]]
    is_public: bool
    arrival: _Arrival | None = None


class _Arrival:
    """A hook at an output of a layer, which keeps none of its inputs alive.

    Attributes:
        use: takes the gradient when it arrives, in a pass whose calls are wanted.
    """

    use: Callable[[Tensor | None], None] | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        """Hand on the gradient."""
        if self.use is not None:
            self.use(gradient)


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
        self._own_tracker = tracker is None

    def __enter__(self) -> Tape:
        """Start to record; what an earlier use recorded is dropped."""
        self._meetings: Sequence[SharedTensorUse] = ()
        self._weights: Sequence[WeightUse] = ()
        self._records: list[_Record] = []
        self.output_dtypes: set[torch.dtype] = set()
        self._hidden: dict[str, Layer] = {}
        self._calls: list[tuple[nn.Module, _OpenCall]] = []
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
        if is_in_backward():
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
        axes = [self._axis(x) for x in tensors]
        kinds = set(map(type, map(self.tracker.state, tensors)))
        call = _OpenCall(parameters, tensors, axes, kinds)
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
            return _guessed_axis(x, self.size)
        return None

    def _end_call(self, call: _OpenCall, outputs: Sequence[Tensor] = ()) -> None:
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
        if is_in_backward() or not self._calls or self._calls[-1][0] is not module:
            return None
        call = self._calls.pop()[1]
        outputs = tensors_of(output)
        bases = [base for x in outputs if (base := _whole_base(x, module)) is not None]
        self._end_call(call, [*outputs, *filter(self.tracker.axis, bases)])
        if output is None:
            return None
        if call.paused:
            self._declare_recurrent(module, call, outputs)
        should_have_gradients = self._is_differentiated or not self.lenient
        if should_have_gradients and not torch.is_grad_enabled():
            self._hidden.update({layer.name: layer for layer in layers})
            return None
        if sum(map(is_differentiable, outputs)) > 1:
            # Otherwise an output would receive the gradients of another one made of it.
            output = tree_map_only(Tensor, _view_of_output, output)
        self._record(layers, module, (args, kwargs), tensors_of(output), call)
        return output

    def _declare_recurrent(
        self, module: nn.Module, call: _OpenCall, outputs: Sequence[Tensor]
    ) -> None:
        """Declare where the outputs of a recurrent layer have the batch, from its inputs."""
        if not self._is_followed:
            return
        lost = Unknown(
            type(module).__name__,
            "its input is packed, has the batch in another place, or dropout is drawn between "
            "layers",
        )
        states: list[State] = [lost] * len(outputs)
        if _has_recurrent_batch(self.tracker, module, call):
            sequence_axis, state_axis, _ = expected_places(module)
            states = [sequence_axis, state_axis, state_axis]
        elif not any(call.axes) and Unknown not in call.kinds:
            states = [PARAMETRIC] * len(outputs)
        for x, state in zip(outputs, states, strict=False):
            self.tracker.set_state(x, state)

    def _record(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        given: tuple[Arguments, Keywords],
        outputs: Sequence[Tensor],
        call: _OpenCall,
    ) -> None:
        output_axes = self._declare_outputs(layers[0], call, outputs)
        if call.states is not None and has_drawn(call.states):
            why = "it holds parameters and draws random numbers"
            self.tracker.fail(type(module).__name__, why)
        if call.attention is not None and not self._check_attention(module, given):
            return
        is_public = not any(output_axes)
        if is_public and self._is_followed and layers[0].rule not in _SINGLE_OUTPUT:
            return
        args, kwargs = call.given or self._detach_arguments(*given)
        arrival = None
        if layers[0].rule == "norm" and not (is_public or self.lenient):
            if is_differentiable(outputs[0]):
                arrival = _Arrival()
                outputs[0].register_hook(arrival)
        self._records.append(
            _Record(
                layers=layers,
                call=Call(module, args, kwargs, [], call.axes, output_axes, call.attention),
                outputs=[(x.shape, x.dtype, x.device) for x in outputs],
                edges=[_edge(x, module) for x in outputs],
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

    def _declare_outputs(self, layer: Layer, call: _OpenCall, outputs: Sequence[Tensor]) -> Axes:
        """Declare outputs that the tracker takes for public, and return the axes of all outputs."""
        tracker = self.tracker
        axes = [self._axis(x) for x in outputs]
        if not self._is_followed:
            return axes
        is_public = not any((*call.axes, *axes))
        if is_public and _has_public_rows(tracker, layer, call, outputs):
            # The rows are followed from here.
            for i, x in enumerate(call.tensors):
                if x.shape[:1] == (tracker.size,):
                    call.axes[i] = BatchAxis(0)
            for x in outputs:
                tracker.set_state(x, BatchAxis(0))
            return [BatchAxis(0)] * len(outputs)
        if not any(axes) and _has_equal_rows(tracker, layer, call, outputs):
            for x in outputs:
                tracker.set_state(x, BatchAxis(0))
            return [BatchAxis(0)] * len(outputs)
        for x, axis in zip(outputs, axes, strict=True):
            if axis is None and not isinstance(tracker.state(x), Unknown):
                # Without examples it depends on the parameters of its layer.
                tracker.set_state(x, PARAMETRIC)
                if layer.rule not in _SINGLE_OUTPUT:
                    # Their gradients come through the graph.
                    tracker.read.update(map(id, call.parameters))
        return axes

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
            "it is called with gradients disabled; checkpoints need use_reentrant=False "
            "(in transformers by gradient_checkpointing_kwargs)",
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
        early = _EarlyBlocks(self.size)
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
            call = _call(record, [None] * len(record.outputs))
            if record.is_public:
                rows = call.gradient.expand(size, *record.outputs[0][0])
                call = _shared_call(record, rows, size)
            _add_call(calls, record, call)
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
        records: Sequence[_Record],
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
            _add_call(calls if is_used else unused, record, _call(record, arrived))
        for name, several in unused.items():
            calls.setdefault(name, several)
        return calls

    def _add_shared(
        self,
        arrived: dict[Any, Tensor | None],
        public: dict[Any, _Record],
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
                rows = gradient.reshape(self.size, *record.outputs[0][0])
                _add_call(calls, record, _shared_call(record, rows, self.size))
        pairs = zip(parameters, gradients[len(public) :], strict=True)
        own = {name: gradient for name, gradient in pairs if gradient is not None}
        add_blocks(self.layers, own, calls)


class _EarlyBlocks:
    """Makes blocks of norm layers while the backward pass runs.

    A block has one row an example, and what it is made of is freed. To keep it until the end of the
    pass would take as much memory as all activations.

    Attributes:
        blocks: layer name to its blocks.
        waiting: calls at whose outputs no gradient has arrived.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrivals: list[_Arrival] = []
        self.blocks: Calls = {}
        self.waiting: dict[int, _Record] = {}

    def take(self, records: Sequence[_Record], edges: Sequence[GradientEdge]) -> list[_Record]:
        """Take the records whose gradients arrive on the way to others, and return the others.

        Args:
            records: of calls that read examples, in their order.
            edges: where gradients are wanted besides.
        """
        ends = [*edges, *(edge for x in records if x.arrival is None for edge in x.edges)]
        wanted = {edge.node for edge in ends if edge is not None}
        others = []
        for key, record in enumerate(records):
            edge = record.edges[0]
            if record.arrival is None or edge is None:
                others.append(record)
            elif leads_to(edge.node, wanted):
                self.waiting[key] = record
            else:
                others.append(record)
                wanted.add(edge.node)
        return others

    def __enter__(self) -> None:
        """Begin to make blocks."""
        for key, record in self.waiting.items():
            assert record.arrival is not None
            record.arrival.use = partial(self._make, key)
            self._arrivals.append(record.arrival)

    def __exit__(self, *error: object) -> None:
        """Leave later gradients alone."""
        for arrival in self._arrivals:
            arrival.use = None

    def _make(self, key: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        record = self.waiting.pop(key)
        layer = record.layers[0]
        with full_precision():
            block = blocks_of(layer, [_call(record, [gradient])], self._size)
        self.blocks.setdefault(layer.name, []).append(block)


@dataclass
class _OpenCall:
    """A call of a covered module that has started.

    Attributes:
        parameters: those that it covers.
        tensors: its tensor inputs.
        axes: batch axis of each.
        kinds: of states that the inputs have.
        paused: whether the tracker is.
        states: of the random generators when it began, of a module that runs again.
        given: its detached inputs before it began, of a module that runs again.
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    axes: Axes
    kinds: set[type]
    paused: bool = False
    states: tuple[Any, ...] | None = None
    given: tuple[Arguments, Keywords] | None = None
    attention: AttentionCall | None = None


def _call(record: _Record, arrived: Sequence[Tensor | None]) -> Call:
    """Return a call with its output gradients, zeros where none arrived."""
    gradients: list[Tensor | None] = []
    for gradient, (shape, dtype, device) in zip(arrived, record.outputs, strict=True):
        if gradient is not None:
            gradients.append(gradient.reshape(shape))
        elif dtype.is_floating_point or dtype.is_complex:
            zero = torch.zeros((), dtype=dtype, device=device)
            gradients.append(zero.expand(shape))
        else:
            gradients.append(None)
    if record.call.attention is not None:
        # The weights of attention are returned where they are asked for.
        record.call.attention.gradients = (*arrived, None)[:2]
    return replace(record.call, output_gradients=gradients)


def _add_call(calls: Calls, record: _Record, call: Call) -> None:
    """Add a call to the calls of all layers that its module belongs to."""
    for layer in record.layers:
        calls.setdefault(layer.name, []).append(call)


def _call_unseen(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the tape, whose looks at tensors no mode need see."""
    with torch._C.DisableTorchFunction():
        return function(*arguments)


def _view_of_output(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x


def _edge(x: Tensor, module: nn.Module) -> GradientEdge | None:
    """Return where the gradients of an output arrive, None without a gradient."""
    if not is_differentiable(x):
        return None
    base = _whole_base(x, module)
    return get_gradient_edge(x if base is None else base)


def _whole_base(x: Tensor, module: nn.Module) -> Tensor | None:
    """Return the product that an output of a linear layer on sequences is a view of, else None.

    Where that view is changed in place later (`ReLU(inplace=True)`), it gets no gradient of its
    own, but the product does.
    """
    base = x._base
    if not isinstance(module, nn.Linear) or base is None or base.grad_fn is None:
        return None
    is_whole = base.numel() == x.numel() and base.is_contiguous() and x.is_contiguous()
    return base if is_whole else None


def _has_recurrent_batch(tracker: Tracker, module: nn.Module, call: _OpenCall) -> bool:
    """Return whether the inputs of a recurrent layer have the batch where the layer takes it."""
    if module.training and getattr(module, "num_layers", 1) > 1 and module.dropout:
        return False  # dropout is drawn between layers
    sequence_axis, state_axis, rank = expected_places(module)
    if call.kinds & {Parametric, Unknown} or call.axes[:1] != [sequence_axis]:
        return False
    x, *states = call.tensors
    for state, axis in zip(states, call.axes[1:], strict=True):
        if axis not in (None, state_axis):
            return False
        if axis is None and not _has_equal_places(tracker, state, state_axis):
            return False
    return x.dim() == rank


def _has_equal_places(tracker: Tracker, x: Tensor, axis: BatchAxis) -> bool:
    """Return whether a public tensor is equal for all examples, or may hold undeclared ones."""
    return tracker.trusts_public_rows or are_places_equal(x, axis, tracker.size)


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


def _shared_call(record: _Record, gradient: Tensor, size: int) -> Call:
    """Return a call that reads a public input, with the input repeated for every example.

    Args:
        record: of the call.
        gradient: at its output, `[N, *output.shape]`.
        size: examples N.
    """

    def repeat(x: Tensor) -> Tensor:
        return x.expand(size, *x.shape).flatten(0, 1)

    call = record.call
    args, kwargs = tree_map_only(Tensor, repeat, (call.args, call.kwargs))
    axes: Axes = []
    for x, _ in record.versions:
        length = max(1, x.shape[0])
        axes.append(BatchAxis(0, 1, length))
    output_length = max(1, gradient.shape[1])
    output_axis = BatchAxis(0, 1, output_length)
    rows = gradient.flatten(0, 1)
    return Call(call.module, args, kwargs, [rows], axes, [output_axis])


def _has_public_rows(
    tracker: Tracker, layer: Layer, call: _OpenCall, outputs: Sequence[Tensor]
) -> bool:
    """Return whether a call on public inputs has a row for each example, equal for all of them.

    Position ids `[N, T]` have. Where the rows may be undeclared examples, their number decides.
    """
    if layer.rule not in _SINGLE_OUTPUT or layer.paths or call.kinds & {Parametric, Unknown}:
        return False
    x = call.tensors[0]
    for rows in (x, outputs[0]):
        if rows.dim() < 2 or len(rows) != tracker.size:
            return False
    return _has_equal_places(tracker, x, BatchAxis(0))


def _has_equal_rows(
    tracker: Tracker, layer: Layer, call: _OpenCall, outputs: Sequence[Tensor]
) -> bool:
    """Return whether a module that runs again for each example gives all of them equal rows.

    Positions in BART read the shape of the token ids alone. In Whisper they read public rows of
    ids, whose axes are noted. Another public tensor may be as long as the batch by chance.
    """
    if layer.rule != "fallback" or call.kinds & {Parametric, Unknown}:
        return False
    size, rank = tracker.size, max((x.dim() for x in call.tensors), default=0)
    for x in outputs:
        has_rows = x.dim() >= rank and len(x) == size and tracker.state(x) is None
        if not has_rows or not are_places_equal(x, BatchAxis(0), size):
            return False
    for i, x in enumerate(call.tensors):
        is_row_each = x.shape[:1] == (size,) and are_places_equal(x, BatchAxis(0), size)
        if call.axes[i] is None and is_row_each:
            if x.dtype != torch.long or x.dim() < 2 or x.shape != outputs[0].shape[:-1]:
                return False
            call.axes[i] = BatchAxis(0)
    return any(call.axes)


def _guessed_axis(x: Tensor, size: int) -> BatchAxis | None:
    if x.dim() and x.shape[0] and x.shape[0] % size == 0:
        return BatchAxis(0, 1, x.shape[0] // size)
    for dim, length in enumerate(x.shape):
        if length == size:
            return BatchAxis(dim)
    return None
