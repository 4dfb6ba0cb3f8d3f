"""Recording a forward pass so that ONE backward pass yields every layer's inputs and output gradients.

While the tape is open, each covered module runs with its own trainable parameters marked as constants. Autograd
therefore never computes a weight gradient; output gradients are asked for at the edges the tape has noted. The model is
not wrapped and nothing stays on it once the tape is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpkfc.gradients.attention import Attended
from dpkfc.gradients.broadcast import Doubt, ambiguous, leading_size, marked_gradients, settle, spread
from dpkfc.gradients.checkpointing import clear_checkpoint_errors, in_backward, refuse_hidden
from dpkfc.gradients.compiled import refuse_shortcuts, refuse_tracing, shortcuts
from dpkfc.gradients.direct import Passed, Uses, direct_parameters
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.record import Record, calls_of, note_of
from dpkfc.gradients.rules import Call

__all__ = ["Tape", "check_losses"]


class _Anchor(torch.autograd.Function):
    """Makes an output that depends on no trainable input differentiable, without a copy."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:  # noqa: ANN401 - torch's own signature
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ANN401
        return None, None


@dataclass
class Tape:
    """Context manager that records the calls of covered modules and differentiates them once.

    Usage: `with tape: losses = loss_fn(model, batch)`, then `tape.backward(losses)`.

    A tape with `on_gradient` listens instead, for a caller who differentiates a loss of their own: the outputs keep the
    gradients that `loss.backward()` brings them, and `tape.collect()` returns the calls. It refers to nothing of the
    graph: a forward pass that is never differentiated leaves nothing behind.

    Attributes:
        model, layers: what is recorded.
        on_gradient: called with the tape whenever an output receives a gradient.
        scale: what a listening tape multiplies gradients by, so that the caller's loss counts as a sum of per-example
            losses: N for a mean over N examples.
        batch_size: examples N, by which inputs that all examples share are told from a batch; None takes the leading axis
            of the first tensor that the model is called with.
    """

    model: nn.Module
    layers: Sequence[Layer]
    on_gradient: Callable[[Tape], None] | None = None
    scale: float = 1.0
    batch_size: int | None = None
    _records: list[Record] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _frozen: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    _hidden: dict[str, Layer] = field(default_factory=dict)
    _open: list[tuple[nn.Module, Uses | Attended]] = field(default_factory=list)

    def __enter__(self) -> Tape:
        """Start recording; records of an earlier use are dropped."""
        self.close()
        self._anchor = torch.zeros((), requires_grad=True)
        self._size = self.batch_size
        self._hidden = {}
        if self.batch_size is None:
            self._handles.append(self.model.register_forward_pre_hook(self._measure, with_kwargs=True))
        self._watch(repeating=False)
        return self

    def _watch(self, *, repeating: bool) -> None:
        """Put hooks on every covered module; repeating, they do what they did before and record nothing."""
        members: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers:
            for module in layer.modules:
                members.setdefault(module, []).append(layer)
        for module, layers in members.items():
            before, after = self._freeze(layers, repeating), self._note(tuple(layers), repeating)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop recording and remove every hook; after an error nothing recorded is kept."""
        self._remove_hooks()
        if error is None:
            return
        if hasattr(error, "add_note"):
            for note in dict.fromkeys(map(note_of, filter(lambda r: r.spread, self._records))):
                error.add_note(note)
        self._records = []

    def close(self) -> None:
        """Drop all hooks and records."""
        self._remove_hooks()
        self._records = []

    def _measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._size = leading_size((args, kwargs))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._open:  # torch calls no hook after a KeyboardInterrupt
            seen = self._open.pop()[1]
            if isinstance(seen, Uses):
                seen.__exit__(None, None, None)
        for module in list(self._frozen):
            self._thaw(module)

    def _thaw(self, module: nn.Module) -> None:
        for parameter in self._frozen.pop(module, []):
            parameter.requires_grad_(True)

    def _freeze(self, layers: Sequence[Layer], repeating: bool) -> Callable[..., None]:
        """A pre-hook that marks the layers' trainable parameters as constants for the length of one call."""
        roles = [(layer, role) for layer in layers if layer.rule != "fallback" for role in layer.parameters]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            refuse_tracing()
            if torch.is_grad_enabled() and roles and module not in self._frozen and repeating == in_backward():
                self._frozen[module] = [layer.tensor_of(module, role) for layer, role in roles]
                for parameter in self._frozen[module]:
                    parameter.requires_grad_(False)
            if torch.is_grad_enabled() and repeating == in_backward():
                self._begin(layers, module, args, kwargs)

        return hook

    def _begin(self, layers: Sequence[Layer], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what has to be known of a call before it is made."""
        attended = Attended.begun(module, args, kwargs) if layers[0].paths else None
        parameters = direct_parameters(layers, module, self._size) if self.on_gradient is None else None
        if attended is not None:
            self._open.append((module, attended))
        elif parameters is not None:
            uses = Uses(parameters, self._size or 0, layers[0].direct)
            uses.__enter__()
            self._open.append((module, uses))

    def _ended(self, module: nn.Module, output: Any) -> Uses | Attended | None:  # noqa: ANN401
        """What was begun for the call that ends now."""
        if not self._open or self._open[-1][0] is not module:
            return None
        seen = self._open.pop()[1]
        if isinstance(seen, Uses):
            seen.__exit__(None, None, None)
            seen.end(output)
        return seen

    def _note(self, layers: tuple[Layer, ...], repeating: bool) -> Callable[..., Any]:
        """A hook that thaws the parameters and notes inputs and output edges of one call."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401
            refuse_tracing()
            self._thaw(module)
            seen = self._ended(module, output)
            if output is None or repeating != in_backward():
                return None
            if not torch.is_grad_enabled():
                self._hidden.update({layer.name: layer for layer in layers})
                return None
            return self._record(layers, module, (args, kwargs), output, seen, keep=not repeating)

        return hook

    def _record(
        self,
        layers: tuple[Layer, ...],
        module: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,  # noqa: ANN401
        seen: Uses | Attended | None,
        *,
        keep: bool,
    ) -> Any:  # noqa: ANN401
        args, kwargs = given
        inputs = [x for x in tree_flatten(given)[0] if isinstance(x, Tensor)]
        leaves, structure = tree_flatten(tree_map(self._attach, output))
        if sum(isinstance(x, Tensor) and x.is_floating_point() for x in leaves) > 1:
            leaves = [_apart(x) for x in leaves]
        doubts: list[Doubt | None] = []
        was_spread = False
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                known = x.is_floating_point()
                leaves[i], doubt = spread(layers[0], module, inputs, x, self._size) if known else (x, None)
                doubts.append(doubt)
                was_spread = was_spread or leaves[i] is not x
        if not keep:
            return tree_unflatten(leaves, structure)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        listening = self.on_gradient is not None
        record = Record(
            layers=layers,
            module=module,
            args=tree_map(_detached, args),
            kwargs=tree_map(_detached, kwargs),
            edges=[] if listening else [get_gradient_edge(x) if x.is_floating_point() else None for x in tensors],
            outputs=[(x.shape, x.dtype, x.device) for x in tensors],
            versions=[(x.detach(), x._version) for x in inputs],
            doubts=doubts,
            spread=was_spread,
            uses=seen if isinstance(seen, Uses) else None,
            attended=seen if isinstance(seen, Attended) else None,
        )
        for i, x in enumerate(tensors):
            if listening and x.is_floating_point():
                x.register_hook(partial(self._arrive, record, i))
        self._records.append(record)
        return tree_unflatten(leaves, structure)

    def _attach(self, x: Any) -> Any:  # noqa: ANN401
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if x.requires_grad:  # a parameter that is itself an output must not keep a hook
            return x.view_as(x) if x.is_leaf and self.on_gradient is not None else x
        return _Anchor.apply(x.clone() if x._is_view() else x, self._anchor)

    def backward(self, losses: Tensor) -> dict[str, list[Call]]:
        """Differentiate the sum of per-example losses at every noted output.

        Args:
            losses: `[N]`, one loss an example, computed while the tape was open.

        Returns:
            For each layer that was called, its calls with inputs and output gradients.

        Raises:
            ValueError: losses of the wrong shape, on no path to a layer or on one past it; an input overwritten in place.
        """
        check_losses(losses)
        records = self._take()
        edges: list[Any] = [edge for record in records for edge in record.edges if edge is not None]
        if not edges or losses.grad_fn is None:
            raise ValueError(
                "the losses do not depend on any trainable layer of the model that the session was given (or, where the function "
                "that calls the layers is compiled, its graph is from before the session: leave that function uncompiled)"
            )
        doubtful = [
            (edge, doubt)
            for record in records
            for edge, doubt in zip(record.edges, record.doubts, strict=True)
            if edge is not None and doubt is not None
        ]
        past = shortcuts(self.layers, {layer.name for record in records for layer in record.layers})
        direct = Passed([(r.layers[0], r.uses) for r in records if r.uses is not None], len(losses))
        self._watch(repeating=True)
        try:
            with clear_checkpoint_errors():
                marked = marked_gradients(losses, [*(edge for edge, _ in doubtful), *direct.doubtful])
                asked = [edges, list(past.values()), direct.edges, direct.parameters]
                arrived = iter(torch.autograd.grad(losses.sum(), [x for several in asked for x in several], allow_unused=True))
        finally:
            self._remove_hooks()
        gradients, reached, of_rows, summed = ([next(arrived) for _ in several] for several in asked)
        refuse_shortcuts(past, reached)
        found = dict(zip(edges, gradients, strict=True))
        for (edge, doubt), other in zip(doubtful, marked, strict=False):
            settle(doubt, found[edge], other, losses)
        own = direct.gradients(of_rows, summed, marked[len(doubtful) :], losses)
        return calls_of([(r, [None if edge is None else found[edge] for edge in r.edges]) for r in records], own)

    def _take(self) -> list[Record]:
        """The records, which are used up; raise if an input is not what the layer has read."""
        records, self._records = self._records, []
        self._remove_hooks()
        refuse_hidden(self._hidden, {layer.name for record in records for layer in record.layers})
        for record in records:
            if any(x._version != version for x, version in record.versions):
                raise ValueError(
                    f"the input of layer '{record.layers[0].name}' was changed in place after the layer had read it; "
                    "use the out-of-place form of that operation (for example x = x + y instead of x += y)"
                )
        return records

    def _arrive(self, record: Record, i: int, gradient: Tensor) -> None:
        if not self._handles and in_backward():  # until the end of this backward pass
            self._watch(repeating=True)
            torch.autograd.Variable._execution_engine.queue_callback(self._remove_hooks)
        record.arrived.setdefault(i, []).append(gradient.detach() * self.scale)  # a copy: autograd may reuse its own
        if self.on_gradient is not None:
            self.on_gradient(self)

    def collect(self) -> dict[str, list[Call]]:
        """What a listening tape has heard of the caller's own backward pass.

        Returns:
            As `backward`; zeros at outputs that the loss does not depend on.

        Raises:
            ValueError: an output was differentiated twice; an input overwritten in place.
        """
        records = self._take()
        for record in records:
            if any(len(gradients) > 1 for gradients in record.arrived.values()):
                raise ValueError(
                    "one forward pass was differentiated twice; add the losses and call backward() once (a penalty on "
                    "gradients has no per-example form here)"
                )
            for doubt, spec in zip(record.doubts, record.outputs, strict=True):
                if doubt is not None and doubt.ids:
                    raise ValueError(ambiguous(doubt.layer, spec[0][0]))
        return calls_of([(r, [r.arrived.get(i, [None])[0] for i in range(len(r.outputs))]) for r in records])


def _apart(x: Any) -> Any:  # noqa: ANN401
    """A node of its own for one of several outputs: what the module makes of one for another is not to arrive there too."""
    return x.clone() if isinstance(x, Tensor) and x.is_floating_point() else x


def _detached(x: Any) -> Any:  # noqa: ANN401
    return x.detach() if isinstance(x, Tensor) else x


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
