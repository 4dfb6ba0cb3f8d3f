"""Recording a forward pass so that ONE backward pass yields every layer's inputs and output gradients.

While the tape is open, each covered module runs with its own trainable parameters marked as constants. Autograd
therefore never computes a weight gradient; output gradients are asked for at the edges the tape has noted. The model is
not wrapped and nothing stays on it once the tape is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from dpkfc.blocks import Block, Outer
from dpkfc.gradients.conv import ConvBlock
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import Call, blocks_of

__all__ = ["Tape", "capture", "check_losses"]


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
class _Record:
    """One call of one module, before its output gradients are known (or, listening, with those that have arrived)."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edges: list[GradientEdge | None]
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    versions: list[tuple[Tensor, int]]
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)


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
    """

    model: nn.Module
    layers: Sequence[Layer]
    on_gradient: Callable[[Tape], None] | None = None
    scale: float = 1.0
    _records: dict[str, list[_Record]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _frozen: dict[nn.Module, list[Tensor]] = field(default_factory=dict)

    def __enter__(self) -> Tape:
        """Start recording; records of an earlier use are dropped."""
        self.close()
        self._anchor = torch.zeros((), requires_grad=True)
        for layer in self.layers:
            for module in layer.modules:
                self._handles.append(module.register_forward_pre_hook(self._freeze(layer), with_kwargs=True))
                self._handles.append(
                    module.register_forward_hook(self._note(layer), with_kwargs=True, prepend=True, always_call=True)
                )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop recording and remove every hook; after an error nothing recorded is kept."""
        self._remove_hooks()
        if kind is not None:
            self._records = {}

    def close(self) -> None:
        """Drop all hooks and records."""
        self._remove_hooks()
        self._records = {}

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in list(self._frozen):
            self._thaw(module)

    def _thaw(self, module: nn.Module) -> None:
        for parameter in self._frozen.pop(module, []):
            parameter.requires_grad_(True)

    def _freeze(self, layer: Layer) -> Callable[..., None]:
        """A pre-hook that marks the layer's trainable parameters as constants for the length of one call."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and layer.rule != "fallback" and module not in self._frozen:
                self._frozen[module] = [module.get_parameter(role) for role in layer.parameters]
                for parameter in self._frozen[module]:
                    parameter.requires_grad_(False)

        return hook

    def _note(self, layer: Layer) -> Callable[..., Any]:
        """A hook that thaws the parameters and notes inputs and output edges of one call."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401
            self._thaw(module)
            if output is None or not torch.is_grad_enabled():
                return None
            return self._record(layer, module, args, kwargs, output)

        return hook

    def _record(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        anchored = tree_map(self._attach, output)
        leaves = [x for x in tree_flatten(anchored)[0] if isinstance(x, Tensor)]
        listening = self.on_gradient is not None
        record = _Record(
            module=module,
            args=tree_map(_detached, args),
            kwargs=tree_map(_detached, kwargs),
            edges=[] if listening else [get_gradient_edge(x) if x.is_floating_point() else None for x in leaves],
            outputs=[(x.shape, x.dtype, x.device) for x in leaves],
            versions=[(x.detach(), x._version) for x in inputs],
        )
        for i, x in enumerate(leaves):
            if listening and x.is_floating_point():
                x.register_hook(partial(self._arrive, record, i))
        self._records.setdefault(layer.name, []).append(record)
        return anchored

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
            ValueError: losses of the wrong shape or without a path to any layer; an input overwritten in place.
        """
        check_losses(losses)
        flat = self._take()
        edges = [edge for _, record in flat for edge in record.edges if edge is not None]
        if not edges or losses.grad_fn is None:
            raise ValueError("the losses do not depend on any trainable layer of the model that the session was given")
        gradients = iter(torch.autograd.grad(losses.sum(), edges, allow_unused=True))
        calls: dict[str, list[Call]] = {}
        for name, record in flat:
            outputs = [
                None if edge is None else _or_zeros(next(gradients), *spec)
                for edge, spec in zip(record.edges, record.outputs, strict=True)
            ]
            calls.setdefault(name, []).append(Call(record.module, record.args, record.kwargs, outputs))
        return calls

    def _take(self) -> list[tuple[str, _Record]]:
        """The records, which are used up; raise if an input is not what the layer has read."""
        records, self._records = self._records, {}
        flat = [(name, record) for name, calls in records.items() for record in calls]
        for name, record in flat:
            if any(x._version != version for x, version in record.versions):
                raise ValueError(
                    f"the input of layer '{name}' was changed in place after the layer had read it; "
                    "use the out-of-place form of that operation (for example x = x + y instead of x += y)"
                )
        return flat

    def _arrive(self, record: _Record, i: int, gradient: Tensor) -> None:
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
        calls: dict[str, list[Call]] = {}
        for name, record in self._take():
            if any(len(gradients) > 1 for gradients in record.arrived.values()):
                raise ValueError(
                    "one forward pass was differentiated twice; add the losses and call backward() once (a penalty on "
                    "gradients has no per-example form here)"
                )
            outputs = [
                _or_zeros(record.arrived.get(i, [None])[0], *spec) if spec[1].is_floating_point else None
                for i, spec in enumerate(record.outputs)
            ]
            calls.setdefault(name, []).append(Call(record.module, record.args, record.kwargs, outputs))
        return calls


def _detached(x: Any) -> Any:  # noqa: ANN401
    return x.detach() if isinstance(x, Tensor) else x


def _or_zeros(gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient


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


def capture(model: nn.Module, layers: Sequence[Layer], loss: Callable[[nn.Module], Tensor]) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    Args:
        model: the model; its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.

    Returns:
        Layer name to block, formed on access; `b` is the gradient of each example's own loss, whatever N is.

    Raises:
        ValueError: as `Tape.backward`.
    """
    tape = Tape(model, layers)
    with torch.enable_grad(), tape:
        losses = loss(model)
    return _Contributions(layers, tape.backward(losses), losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is asked for: the patches of one convolution are in memory at a time."""

    def __init__(self, layers: Sequence[Layer], calls: dict[str, list[Call]], batch_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers if layer.name in calls}
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        block = block.outer() if isinstance(block, ConvBlock) else block
        return block.explicit() if isinstance(block, Outer) else block

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
