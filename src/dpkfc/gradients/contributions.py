"""What every layer contributes to a loss, for whoever looks at curvature: blocks that are formed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpkfc.blocks import Block, Formed, Outer
from dpkfc.gradients.calls import Call, Calls
from dpkfc.gradients.conv import ConvBlock
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.recurrent import has_batch_in_place
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape, check_losses

__all__ = ["capture"]

_BY_INPUT = ("linear", "conv", "embedding")  # rules whose blocks hold the inputs as they are read


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
    batch_size: int | None = None,
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    For public probes: where the place of the examples is not proved, the leading axis is taken for it.

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
    differentiated = torch.is_grad_enabled()
    chosen = layers if differentiated else [layer for layer in layers if layer.rule in _BY_INPUT]
    tape = Tape(model, chosen, batch_size, lenient=True)
    with tape:
        losses = loss(model)
    tape.check_enabled()
    check_losses(losses)
    if tape.size is not None and tape.size % max(1, len(losses)):  # a loss may stand for several rows, never for a part of one
        check_losses(losses, tape.size)
    calls: Calls = tape.backward(losses) if differentiated else tape.inputs()
    return _Contributions(layers, calls, losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is asked for; of a convolution not even then are its patches."""

    def __init__(self, layers: Sequence[Layer], calls: dict[str, list[Call]], batch_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers if _has_rows(layer, calls.get(layer.name), batch_size)}
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        assert not isinstance(block, Formed)
        if isinstance(block, ConvBlock):
            return block.patched()
        return block.explicit() if isinstance(block, Outer) else block

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _has_rows(layer: Layer, calls: Sequence[Call | Formed] | None, batch_size: int) -> bool:
    """Return whether a layer was called, and every call shows which rows belong to which example.

    A matrix that is used outside of its layer too has no rows from which a factor could be made.
    """
    if calls is None or any(isinstance(call, Formed) for call in calls):
        return False
    if layer.rule != "recurrent":
        return True
    return all(isinstance(call, Call) and has_batch_in_place(call, batch_size) for call in calls)
