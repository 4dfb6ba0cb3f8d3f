"""Record a forward pass so that one backward pass yields the inputs and output gradients of every layer.

Hooks note the calls of covered modules while a tracker follows the batch axis. The pass computes what the plain model computes:
no operation is added, but for views where parameters that all examples share meet the examples (`gradients.shared`). Nothing
stays on the model once the tape is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from dpkfc.fsdp import in_graph
from dpkfc.gradients.attention import ARGUMENTS, AttentionCall, expected_axis
from dpkfc.gradients.calls import Call, Calls
from dpkfc.gradients.fallback import block_of_gradients, blocks_of_one, gradient_of
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.shared_parameters import Meeting, SharedUses, WeightUse, pulled_back
from dpkfc.rng_state import random_states
from dpkfc.tracking.axes import PARAMETRIC, BatchAxis, Unknown
from dpkfc.tracking.tracker import Tracker

# --------------------------------------------------------------------------------------------------
# Activation checkpointing, seen from the tape: parts of the model run a second time during the
# backward pass.


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread, so that a forward call is a repeated one."""
    return torch._C._current_graph_task_id() != -1


# --------------------------------------------------------------------------------------------------
# Passes that are followed run uncompiled: a compiled graph shows no call of a layer.


class _Stance:
    """The setting of torch while any pass is followed. Scripts may leave passes open and end them in any order."""

    def __init__(self) -> None:
        self._passes = 0
        self._eager: Any = None

    def begin(self) -> None:
        if self._passes == 0:
            self._eager = torch.compiler.set_stance("force_eager")
        self._passes += 1

    def end(self) -> None:
        self._passes -= 1
        if self._passes == 0:
            self._eager.__exit__(None, None, None)


_STANCE = _Stance()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run the functions that `torch.compile` has compiled as they were written, inside the body."""
    _STANCE.begin()
    try:
        yield
    finally:
        _STANCE.end()


# --------------------------------------------------------------------------------------------------

_BUILTIN_NODES = ("AccumulateGrad", "CopySlices", "torch::autograd::AccumulateGrad", "torch::autograd::CopySlices")
_SINGLE_OUTPUT = ("linear", "conv", "embedding", "tied", "norm")
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass
class _Record:
    """One call of one module, before its output gradients are known.

    Attributes:
        layers: those that the module belongs to.
        module: the module.
        args, kwargs: its detached inputs.
        axes: batch axis of every tensor among the inputs, None for a public one.
        outputs: its tensor outputs as (shape, type, device).
        output_axes: batch axis of each, None for a public one.
        edges: where their gradients arrive, None where none does.
        versions: the inputs, each with the counter of writes that it had.
        attention: of torch's attention.
    """

    layers: tuple[Layer, ...]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axes: list[BatchAxis | None]
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    output_axes: list[BatchAxis | None]
    edges: list[GradientEdge | None]
    versions: list[tuple[Tensor, int]]
    attention: AttentionCall | None = None

    @property
    def is_public(self) -> bool:
        """Return whether the call read no example, so that all examples share its outputs."""
        return all(axis is None for axis in self.output_axes)


class Tape:
    """Context manager that records the calls of covered modules and differentiates them once.

    Usage: `with tape: losses = loss_fn(model, batch)`, then `tape.backward(losses)`.

    Args:
        model: what is recorded.
        layers: its layers.
        batch_size: examples N; None takes the leading axis of the first tensor that the model is called with.
        tracker: of a pass that is followed from outside, with the batch declared; None makes one of the tape's own, which takes
            the inputs of the model for the batch.
        lenient: take the leading axis for the batch where the tracker cannot tell. For public probes alone: the rows are those
            of the layers then, but nothing proves which example they belong to.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        batch_size: int | None = None,
        *,
        tracker: Tracker | None = None,
        lenient: bool = False,
    ) -> None:
        self.model = model
        self.layers = layers
        self.tracker = tracker
        self.lenient = lenient
        self._given_size = batch_size
        self._size = batch_size
        self._own_tracker = tracker is None
        self._shared: SharedUses | None = None
        self._records: list[_Record] = []
        self._hidden: dict[str, Layer] = {}
        self._calls: list[tuple[nn.Module, _OpenCall]] = []
        self._called: set[int] = set()
        self._is_differentiated = True
        self._stack = ExitStack()

    @property
    def size(self) -> int | None:
        """Return the examples N of the pass, None before it has begun."""
        return self._size

    # -- recording ------------------------------------------------------------------------------------------

    def __enter__(self) -> Tape:
        """Start to record; what an earlier use recorded is dropped."""
        self._records, self._hidden, self._calls, self._called = [], {}, [], set()
        self._stack = ExitStack()
        self._is_differentiated = torch.is_grad_enabled()
        torch.clear_autocast_cache()  # the cast of a weight in an earlier pass was not seen in this one
        self._stack.enter_context(run_eagerly())
        if self._own_tracker:
            self.tracker, self._size = None, self._given_size
            if self._size is not None and self._size > 1:
                self._begin_tracker(self._size)
            handle = self.model.register_forward_pre_hook(self._declare_inputs, with_kwargs=True)
            self._stack.callback(handle.remove)
        else:
            self._share_parameters()
        members: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers:
            if layer.is_hooked:
                for module in layer.modules:
                    members.setdefault(module, []).append(layer)
        for module, layers in members.items():
            before = module.register_forward_pre_hook(self._before(tuple(layers)), with_kwargs=True)
            after = module.register_forward_hook(
                self._after(tuple(layers)), with_kwargs=True, prepend=True, always_call=True
            )
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop to record and take every hook off; after an error nothing recorded is kept."""
        self.close_hooks()
        if error is not None:
            self._records = []

    def close_hooks(self) -> None:
        """Take every hook off; what was recorded stays."""
        self._stack.close()
        for _, call in reversed(self._calls):  # torch calls no hook after a KeyboardInterrupt
            self._end_call(call)
        self._calls = []

    def _begin_tracker(self, size: int) -> None:
        self.tracker = Tracker(size, self.model.buffers(), trusts_public_rows=True)
        self.tracker.declare_parameters(in_graph(p) for p in self.model.parameters() if p.requires_grad)
        self._share_parameters()
        self._stack.enter_context(self.tracker.following())

    def _share_parameters(self) -> None:
        tracker = self.tracker
        if tracker is None:
            return
        names = {id(in_graph(p)): name for name, p in self.model.named_parameters() if p.requires_grad}
        self._shared = SharedUses(tracker, names)
        tracker.call = self._shared.call
        self._stack.callback(lambda: setattr(tracker, "call", None))

    def _declare_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the inputs of the model for the batch, where the tape follows a pass of its own."""
        if self._size is None:
            self._size = leading_size((args, kwargs))
            if self._size is not None and self._size > 1:
                self._begin_tracker(self._size)
        if self.tracker is not None:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and x.dim() and x.shape[0] == self._size and not self.tracker.is_declared(x):
                    self.tracker.set_state(x, BatchAxis(0))

    def _before(self, layers: tuple[Layer, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_backward():
                return
            parameters = _parameters_of(module, layers)
            if parameters is None:
                return  # functional_call has put other tensors in their place
            keys = {id(p) for p in parameters}
            if not keys.isdisjoint(self._called):
                torch.clear_autocast_cache()  # what an earlier call has cast counts as outside of this one
            self._called |= keys
            tensors = tensors_of((args, kwargs))
            call = _OpenCall(parameters, tensors, [self._axis(x) for x in tensors])
            if layers[0].paths:
                call.attention = AttentionCall.record(module, args, kwargs)
            if self.tracker is not None:
                call.parametric = any(self.tracker.state(x) is PARAMETRIC for x in tensors)
                call.unknown = any(isinstance(self.tracker.state(x), Unknown) for x in tensors)
                self.tracker.cover(parameters)
                if isinstance(module, _RECURRENT):
                    self.tracker.pause()
                    call.paused = True
                if isinstance(module, nn.EmbeddingBag) and tensors and tensors[0].dim() == 1:
                    self.tracker.fail("EmbeddingBag", "its offsets count from the beginning of the batch")
            if layers[0].rule == "fallback":
                call.states = random_states(parameters[0].device)
            self._calls.append((module, call))

        return hook

    def _axis(self, x: Tensor) -> BatchAxis | None:
        """Return the batch axis of an input or an output."""
        if self._size == 1:
            return BatchAxis(0, 1, max(1, x.shape[0])) if x.dim() else None
        axis = self.tracker.axis(x) if self.tracker is not None else None
        if axis is None and self.lenient and self._size:
            state = self.tracker.state(x) if self.tracker is not None else None
            if self.tracker is None or isinstance(state, Unknown):
                axis = _guessed_axis(x, self._size)
        return axis

    def _end_call(self, call: _OpenCall, outputs: Sequence[Tensor] = ()) -> None:
        if self.tracker is not None:
            self.tracker.uncover(call.parameters, outputs)
            if call.paused:
                self.tracker.resume()

    def _after(self, layers: tuple[Layer, ...]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if in_backward() or not self._calls or self._calls[-1][0] is not module:
                return None
            call = self._calls.pop()[1]
            self._end_call(call, tensors_of(output))
            if output is None:
                return None
            if call.paused:
                self._declare_recurrent(module, call, tensors_of(output))
            is_hidden = self._is_differentiated or not self.lenient
            if is_hidden and not torch.is_grad_enabled():
                self._hidden.update({layer.name: layer for layer in layers})
                return None
            separate = sum(x.is_floating_point() and x.requires_grad for x in tensors_of(output)) > 1
            if separate:  # or an output would receive what another one, which was made of it, passes on
                output = tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x, output)
            self._record(layers, module, (args, kwargs), tensors_of(output), call)
            return output if separate else None

        return hook

    def _declare_recurrent(self, module: nn.Module, call: _OpenCall, outputs: Sequence[Tensor]) -> None:
        """Declare where the outputs of a recurrent layer have the batch, from where its inputs have it."""
        if self.tracker is None:
            return
        cell = isinstance(module, nn.RNNCellBase)
        first = BatchAxis(0) if cell or getattr(module, "batch_first", False) else BatchAxis(1)
        states = BatchAxis(0) if cell else BatchAxis(1)
        expected = [first, *[states] * (len(call.axes) - 1)]
        given = zip(call.axes, expected, strict=True)
        draws = (
            not cell
            and module.training
            and bool(getattr(module, "dropout", 0))
            and getattr(module, "num_layers", 1) > 1
        )
        fits = (
            not draws
            and call.axes[:1] == [first]
            and all(axis in (None, place) for axis, place in given)
            and not call.unknown
        )
        if call.parametric or not fits or call.tensors[0].dim() != (2 if cell else 3):
            lost = Unknown(
                type(module).__name__,
                "its input is packed, has the batch in another place, or dropout is drawn between layers",
            )
            public = all(axis is None for axis in call.axes) and not call.unknown
            for x in outputs:
                self.tracker.set_state(x, PARAMETRIC if public else lost)
            return
        for i, x in enumerate(outputs):
            self.tracker.set_state(x, first if i == 0 else states)

    def _record(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: Sequence[Tensor],
        call: _OpenCall,
    ) -> None:
        axes, output_axes = call.axes, [self._axis(x) for x in outputs]
        size = self._size or 0
        if (
            self.tracker is not None
            and _public_rows(layers[0], call, outputs, size)
            and all(x is None for x in (*axes, *output_axes))
        ):
            # one row an example by its shape: what becomes of the rows is followed from here
            axes = [BatchAxis(0) if x.dim() and x.shape[0] == size else None for x in call.tensors]
            output_axes = [BatchAxis(0)] * len(outputs)
            for x in outputs:
                self.tracker.set_state(x, BatchAxis(0))
        if self.tracker is not None and None in output_axes:
            self._declare_public(layers[0], call, outputs, output_axes)
        if call.states is not None and not _same(call.states, call.parameters[0].device) and self.tracker is not None:
            self.tracker.fail(type(module).__name__, "it holds parameters and draws random numbers")
        args, kwargs = (tree_map(_detached, x) for x in given)
        if call.attention is not None and not self._check_attention(module, given):
            return
        if (
            layers[0].rule not in _SINGLE_OUTPUT
            and all(axis is None for axis in output_axes)
            and self.tracker is not None
        ):
            return
        self._records.append(
            _Record(
                layers=layers,
                module=module,
                args=args,
                kwargs=kwargs,
                axes=axes,
                outputs=[(x.shape, x.dtype, x.device) for x in outputs],
                output_axes=output_axes,
                edges=[_edge(x, module) if x.requires_grad and x.is_floating_point() else None for x in outputs],
                versions=[(x.detach(), x._version) for x in call.tensors],
                attention=call.attention,
            )
        )

    def _declare_public(
        self, layer: Layer, call: _OpenCall, outputs: Sequence[Tensor], axes: Sequence[BatchAxis | None]
    ) -> None:
        """Declare that outputs without examples depend on the parameters of their layer."""
        assert self.tracker is not None
        reached = layer.rule not in _SINGLE_OUTPUT
        for x, axis in zip(outputs, axes, strict=True):
            if axis is None and not isinstance(self.tracker.state(x), Unknown):
                self.tracker.set_state(x, PARAMETRIC)
                if reached:  # through the graph
                    self.tracker.read.update(id(p) for p in call.parameters)

    def _check_attention(self, module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """Return whether queries, keys and values have the batch where attention takes it to be."""
        named = dict(zip(ARGUMENTS, given[0], strict=False)) | given[1]
        fits = all(self._axis(named[name]) == expected_axis(module) for name in ARGUMENTS[:3])
        if not fits and self.tracker is not None:
            self.tracker.fail(
                type(module).__name__, "queries, keys or values have the batch in another place than it takes"
            )
        return fits

    # -- differentiation ------------------------------------------------------------------------------------

    def failure(self, losses: Tensor) -> Unknown | None:
        """Return why the pass is not proved to give every example its own gradient; None where it is proved.

        Args:
            losses: `[N]`, from the pass that was recorded.
        """
        tracker = self.tracker
        if tracker is None:
            return Unknown("pass", "no operation was followed")
        if tracker.failure is not None:
            return tracker.failure
        state = tracker.state(losses)
        if isinstance(state, Unknown):
            return state
        if state != BatchAxis(0):
            return Unknown("loss", f"the losses have the batch in another place than their only axis ({state})")
        return self.failure_of_pass(losses)

    def _without_gradients(self) -> Unknown | None:
        """Return the first layer that was called with gradients disabled alone, None where there is none."""
        recorded = {layer.name for record in self._records for layer in record.layers}
        for name, layer in self._hidden.items():
            if name not in recorded:
                return Unknown(
                    f"layer '{layer.display_name}'",
                    "it is called with gradients disabled; checkpoints need use_reentrant=False (in transformers by "
                    "gradient_checkpointing_kwargs)",
                )
        return None

    def check_enabled(self) -> None:
        """Raise where a layer was called with gradients disabled alone: noise alone would train it.

        Raises:
            ValueError: naming the layer, and the setting of a checkpoint that hides it.
        """
        hidden = self._without_gradients()
        if hidden is not None:
            raise ValueError(f"{hidden.operation}: {hidden.reason}")

    def failure_of_pass(self, losses: Tensor) -> Unknown | None:
        """Return why the gradients of a followed pass are not proved, whatever its losses are; None where they are."""
        if (hidden := self._without_gradients()) is not None:
            return hidden
        for record in self._records:
            if any(x._version != version for x, version in record.versions):
                return Unknown(record.layers[0].display_name, "its input was changed in place after it had read it")
        used = [(r.module, layer, role) for r in self._records for layer in r.layers for role in layer.parameters]
        covered = {id(in_graph(layer.tensor_of(module, role))) for module, layer, role in used}
        read = self.tracker.read if self.tracker is not None else set[int]()
        if self._shared is not None and self._shared.meetings and covered & read:
            return Unknown("parameter", "a parameter is used by its layer and outside of it")
        return custom_function(losses)

    def backward(self, losses: Tensor) -> Calls:
        """Differentiate the sum of per-example losses at every noted output.

        Args:
            losses: `[N]`, one loss an example, computed while the tape was open.

        Returns:
            For each layer that was called, its calls with inputs and output gradients, or blocks of gradients.

        Raises:
            ValueError: losses of the wrong shape, or on no path to a layer; an operation hides the batch axis.
        """
        check_losses(losses)
        self.check_depends(losses)
        failure = self.failure(losses) if self._own_tracker and not self.lenient and len(losses) > 1 else None
        if failure is not None:
            raise ValueError(f"{failure.operation} hides the batch axis: {failure.reason}")
        return self.gradients(losses.sum())

    def gradients(self, total: Tensor) -> Calls:
        """Differentiate a sum of per-example losses at every noted output; as `backward`."""
        if self._size == 1 and not self.lenient:
            self._records = []
            return blocks_of_one(self.layers, gradient_of(self.model, total))
        records, self._records = self._records, []
        meetings = self._shared.meetings if self._shared is not None else []
        weights = self._shared.weights if self._shared is not None else []
        batched = [record for record in records if not record.is_public]
        edges: list[Any] = [edge for record in batched for edge in record.edges if edge is not None]
        asked = [*dict.fromkeys([*edges, *(m.edge for m in meetings), *(w.edge for w in weights)])]
        if asked:
            arrived: Sequence[Tensor | None] = torch.autograd.grad(
                total, asked, allow_unused=True, retain_graph=bool(meetings)
            )
        else:
            arrived = ()
        found = dict(zip(asked, arrived, strict=True))
        calls = self._calls_of(batched, found)
        self._add_shared([(m, g) for m in meetings if (g := found[m.edge]) is not None], records, calls)
        self._add_weights([(w, g) for w in weights if (g := found[w.edge]) is not None], calls)
        return calls

    def inputs(self) -> Calls:
        """Return the calls of a pass without gradients, with zeros for the gradients at the outputs."""
        records, self._records = self._records, []
        calls: Calls = {}
        for record in records:
            zeros = [
                torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in record.outputs
            ]
            call = Call(
                record.module, record.args, record.kwargs, list(zeros), record.axes, record.output_axes, record.attention
            )
            if record.is_public:
                call = _shared_call(record, zeros[0].expand(self._size or 1, *record.outputs[0][0]), self._size or 1)
            for layer in record.layers:
                calls.setdefault(layer.name, []).append(call)
        return calls

    def check_depends(self, losses: Tensor) -> None:
        """Raise unless the losses depend on a trainable layer.

        Raises:
            ValueError: they do not.
        """
        if losses.grad_fn is None:
            raise ValueError(
                "the losses do not depend on any trainable layer of the model that the session was given: call that model, "
                "uncompiled, inside loss_fn"
            )

    def _calls_of(self, records: Sequence[_Record], found: dict[Any, Tensor | None]) -> Calls:
        """Return the calls of every layer; those on which no loss depends are left out where the layer has another."""
        rows = [(r, [None if edge is None else found.get(edge) for edge in r.edges]) for r in records]
        used = {layer.name for r, gradients in rows for layer in r.layers if any(g is not None for g in gradients)}
        calls: Calls = {}
        for record, gradients in rows:
            reached = any(g is not None for g in gradients)
            for layer in record.layers:
                if reached or layer.name not in used:
                    calls.setdefault(layer.name, []).append(_call(record, gradients))
        return calls

    def _add_shared(self, pairs: Sequence[tuple[Meeting, Tensor]], records: Sequence[_Record], calls: Calls) -> None:
        """Add the gradients of parameters that all examples share to the calls."""
        if not pairs or self.tracker is None:
            return
        size = self.tracker.size
        public = [record for record in records if record.is_public and record.edges and record.edges[0] is not None]
        parameters = [(name, in_graph(p)) for name, p in self.model.named_parameters() if p.requires_grad]
        named = {id(p): (name, p) for name, p in parameters}
        direct = [named[key] for key in self.tracker.read if key in named]
        edges = [edge for record in public if (edge := record.edges[0]) is not None]
        targets: list[Any] = [*edges, *(p for _, p in direct)]
        gradients = pulled_back(pairs, targets, size)
        for record, gradient in zip(public, gradients[: len(public)], strict=True):
            if gradient is not None:
                rows = gradient.reshape(size, *record.outputs[0][0])
                for layer in record.layers:
                    calls.setdefault(layer.name, []).append(_shared_call(record, rows, size))
        self._add_parameters(
            {name: g for (name, _), g in zip(direct, gradients[len(public) :], strict=True) if g is not None}, calls
        )

    def _add_weights(self, pairs: Sequence[tuple[WeightUse, Tensor]], calls: Calls) -> None:
        if self.tracker is None:
            return
        for use, gradient in pairs:
            size, shapes = (
                self.tracker.size,
                {name: self.model.get_parameter(name).shape for name in (use.name, use.bias) if name},
            )
            rows = shapes[use.name][0] if use.is_lookup else 0
            found = use.gradients(gradient, size, rows)
            self._add_parameters({name: found[name].reshape(size, *shape) for name, shape in shapes.items()}, calls)

    def _add_parameters(self, gradients: dict[str, Tensor], calls: Calls) -> None:
        """Add gradients `[N, *parameter.shape]` to the layers that the parameters belong to."""
        for layer in self.layers:
            own = {role: gradients[full] for role, full in layer.parameters.items() if full in gradients}
            if own:
                calls.setdefault(layer.name, []).append(block_of_gradients(layer, own))


@dataclass
class _OpenCall:
    """A call of a covered module that has begun.

    Attributes:
        parameters: those that it covers.
        tensors: its tensor inputs.
        axes: batch axis of each.
        parametric, unknown: whether an input is.
        paused: whether the tracker is.
        states: of the random generators when it began.
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    axes: list[BatchAxis | None]
    parametric: bool = False
    unknown: bool = False
    paused: bool = False
    states: Sequence[Tensor] | None = None
    attention: AttentionCall | None = field(default=None)


def _call(record: _Record, gradients: Sequence[Tensor | None]) -> Call:
    outputs = [
        (torch.zeros(shape, dtype=dtype, device=device) if g is None else g.reshape(shape))
        if dtype.is_floating_point
        else None
        for g, (shape, dtype, device) in zip(gradients, record.outputs, strict=True)
    ]
    if record.attention is not None:
        record.attention.gradients = [None if g is None else y for g, y in zip(gradients, outputs, strict=True)]
    return Call(record.module, record.args, record.kwargs, outputs, record.axes, record.output_axes, record.attention)


def _edge(x: Tensor, module: nn.Module) -> GradientEdge:
    """Return where the gradients of an output arrive.

    A linear layer on sequences returns a view of its product. Where that is changed in place later (`ReLU(inplace=True)`), the
    view gets no gradient of its own, and the product does.
    """
    base = x._base if x._is_view() and isinstance(module, nn.Linear) else None
    whole = base is not None and base.numel() == x.numel() and base.is_contiguous() and x.is_contiguous()
    if base is not None and whole and base.grad_fn is not None:
        return get_gradient_edge(base)
    return get_gradient_edge(x)


def _parameters_of(module: nn.Module, layers: Sequence[Layer]) -> list[Tensor] | None:
    """Return the parameters of a module that its layers cover; None where other tensors stand in their place."""
    try:
        return [layer.tensor_of(module, role) for layer in layers for role in layer.parameters]
    except AttributeError:
        return None


def _shared_call(record: _Record, gradient: Tensor, size: int) -> Call:
    """Return a call that reads a public input, with the input repeated for every example.

    Args:
        record: of the call.
        gradient: at its output, `[N, *output.shape]`.
        size: examples N.
    """
    repeated = tree_map(lambda x: _repeated(x, size) if isinstance(x, Tensor) else x, (record.args, record.kwargs))
    axes: list[BatchAxis | None] = [BatchAxis(0, 1, max(1, x.shape[0])) for x, _ in record.versions]
    length = max(1, gradient.shape[1])
    output = gradient.flatten(0, 1)
    return Call(record.module, repeated[0], repeated[1], [output], axes, [BatchAxis(0, 1, length)], None)


def _repeated(x: Tensor, size: int) -> Tensor:
    return x.expand(size, *x.shape).flatten(0, 1)


def _public_rows(layer: Layer, call: _OpenCall, outputs: Sequence[Tensor], size: int) -> bool:
    """Return whether a call on public inputs has a row for each example by its shape: ids `[N, T]`, noise `[N, d]`."""
    if (
        layer.rule not in _SINGLE_OUTPUT
        or layer.paths
        or not call.tensors
        or not outputs
        or call.parametric
        or call.unknown
    ):
        return False
    x, y = call.tensors[0], outputs[0]
    return x.dim() >= 2 and x.shape[0] == size and y.dim() >= 2 and y.shape[0] == size


def _guessed_axis(x: Tensor, size: int) -> BatchAxis | None:
    if not x.dim():
        return None
    if x.shape[0] % size == 0 and x.shape[0]:
        return BatchAxis(0, 1, x.shape[0] // size)
    for dim, length in enumerate(x.shape):
        if length == size:
            return BatchAxis(dim)
    return None


def _same(states: Sequence[Tensor], device: torch.device) -> bool:
    now = random_states(device)
    return len(now) == len(states) and all(torch.equal(a, b) for a, b in zip(states, now, strict=True))


def custom_function(losses: Tensor, ends: Sequence[Tensor] = ()) -> Unknown | None:
    """Return the first node of the graph whose backward pass is Python code of its own; None where there is none.

    Args:
        losses: where the graph begins.
        ends: tensors behind which it is not looked at.
    """
    for node in nodes_of(losses, ends):
        name = node.name()
        if name[-1:].isdigit() and "Backward" in name or name in _BUILTIN_NODES:
            continue
        origin = getattr(type(node), "_forward_cls", type(node))
        if not str(origin.__module__).startswith("torch.distributed."):
            return Unknown(name, "the backward pass of a custom autograd function is not followed")
    return None


def nodes_of(losses: Tensor, ends: Sequence[Tensor] = ()) -> Iterator[Any]:
    """Yield all nodes of the graph of some losses, down to those of `ends`, which are left out."""
    left_out = {x.grad_fn for x in ends}
    if losses.grad_fn in left_out:
        return
    waiting, seen = [losses.grad_fn], {losses.grad_fn, *left_out}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors inside some values."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def leading_size(inputs: Any) -> int | None:
    """Return the leading axis of the first tensor of the inputs that has one."""
    tensors: Iterable[Tensor] = (x for x in tensors_of(inputs) if x.dim())
    return next((x.shape[0] for x in tensors), None)


def check_losses(losses: Tensor, batch_size: int | None = None) -> None:
    """Raise unless losses is a float vector with one entry an example.

    Raises:
        ValueError: naming the shape and the fix.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_fn must return one loss per example, a vector [batch]; got {shape}. Use reduction='none' and, for "
            "sequences, average over each example's own positions."
        )
    if not losses.is_floating_point():
        raise ValueError(f"losses must be floating point, got {losses.dtype}")
    if batch_size is not None and losses.shape[0] != batch_size:
        raise ValueError(
            f"loss_fn returned {losses.shape[0]} losses for {batch_size} examples; the leading axis must be the batch"
        )
