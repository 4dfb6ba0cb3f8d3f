"""What every layer contributes to a loss, for whoever looks at curvature: blocks that are formed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.blocks import Block, Outer
from dpkfc.gradients.attention import Attended
from dpkfc.gradients.broadcast import leading_size, spread
from dpkfc.gradients.compiled import refuse_tracing
from dpkfc.gradients.conv import ConvBlock
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import Call, blocks_of
from dpkfc.gradients.tape import Tape

__all__ = ["capture"]

_BY_INPUT = ("linear", "conv", "embedding")  # rules whose blocks hold the inputs as they are read


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
    batch_size: int | None = None,
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    Under `torch.no_grad()` there is no backward pass: linear layers, convolutions and embeddings show what they have read, with
    zeros for output gradients, and other layers are left out.

    Args:
        model: the model; its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.
        batch_size: examples N, as for `Tape`.

    Returns:
        Layer name to block, formed on access; `blocks.formed` writes out the patches of a convolution. `b` is
        the gradient of each example's own loss, whatever N is.

    Raises:
        ValueError: as `Tape.backward`.
    """
    if not torch.is_grad_enabled():
        seen = _Inputs(model, [layer for layer in layers if layer.rule in _BY_INPUT], batch_size)
        losses = seen.run(loss)
        return _Contributions(layers, seen.calls, losses.shape[0])
    tape = Tape(model, layers, batch_size=batch_size)
    with tape:
        losses = loss(model)
    return _Contributions(layers, tape.backward(losses), losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is asked for; of a convolution not even then are its patches."""

    def __init__(self, layers: Sequence[Layer], calls: dict[str, list[Call]], batch_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers if layer.name in calls}
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        if isinstance(block, ConvBlock):
            return block.patched()
        return block.explicit() if isinstance(block, Outer) else block

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class _Inputs:
    """What layers read in one forward pass without gradients.

    Inputs are not copied. Whether one was overwritten later, and whose the rows of shared inputs are, is seen by a pass with
    gradients alone: a refresh has one over its last examples.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], batch_size: int | None) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._model = model
        self._size = batch_size
        self._users: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            for module in layer.modules:
                self._users.setdefault(module, []).append(layer)

    def run(self, loss: Callable[[nn.Module], Tensor]) -> Tensor:
        """The loss, while every call of a layer is noted."""
        handles = [m.register_forward_hook(self._note, with_kwargs=True, prepend=True) for m in self._users]
        if self._size is None:
            handles.append(self._model.register_forward_pre_hook(self._measure, with_kwargs=True))
        try:
            return loss(self._model)
        finally:
            for handle in handles:
                handle.remove()

    def _measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._size = leading_size((args, kwargs))

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        refuse_tracing()
        read = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        users = self._users[module]
        if users[0].paths:
            attended = Attended.begun(module, args, kwargs)
            for layer in users:
                self.calls.setdefault(layer.name, []).append(Call(module, args, kwargs, [], attended=attended))
            return
        rows, _ = spread(users[0], module, read, output, self._size)
        for layer in users:
            self.calls.setdefault(layer.name, []).append(Call(module, args, kwargs, [rows.new_zeros(()).expand(rows.shape)]))
