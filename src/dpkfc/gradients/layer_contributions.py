"""The contribution of every layer to a loss, as curvature reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.layers import MATRICES, Call, Calls, Layer
from dpkfc.gradients.loss_function import check_losses
from dpkfc.gradients.recurrence import has_batch_in_place
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import Block

_BY_INPUT = ("linear", "conv", "embedding")  # blocks that show inputs


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    For public probes: where the place of the examples is not proved, the leading axis is used.

    Under `torch.no_grad()` nothing is differentiated. Linear layers, convolutions and embeddings
    then show their inputs, with zeros for output gradients. Other layers are left out.

    Args:
        model: the model. Its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.

    Returns:
        Layer name to block, formed on access. `Patched.explicit` writes out the patches of
        a convolution. `b` holds gradients of the summed losses: row n belongs to example n, not
        divided by N.

    Raises:
        ValueError: as `Tape.backward`.
    """
    is_differentiated = torch.is_grad_enabled()
    recorded = layers
    if not is_differentiated:
        recorded = [layer for layer in layers if layer.rule in _BY_INPUT]
    tape = Tape(model, recorded, lenient=True)
    with tape:
        losses = loss(model)
    tape.check_enabled()
    check_losses(losses)
    # A loss may stand for several rows, but never for a part of one.
    if tape.size % max(1, len(losses)):
        check_losses(losses, tape.size)
    calls = tape.backward(losses) if is_differentiated else tape.inputs()
    return _Contributions(layers, calls, losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is read, without the patches of a convolution."""

    def __init__(self, layers: Sequence[Layer], calls: Calls, batch_size: int) -> None:
        self._layers = {}
        for layer in layers:
            if _has_rows(layer, calls.get(layer.name), batch_size):
                self._layers[layer.name] = layer
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block: Any = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        factors: Block = block.make_factor_block()
        return factors

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _has_rows(layer: Layer, calls: Sequence[Any] | None, batch_size: int) -> bool:
    """Return whether a layer was called, and every call shows which rows belong to which example.

    A matrix that is used outside of its layer too has no rows from which a factor could be made.
    """
    if calls is None:
        return False
    is_recorded = all(isinstance(call, Call) for call in calls)
    if layer.rule in MATRICES:
        return is_recorded
    if layer.rule != "recurrent":
        return True
    return is_recorded and all(has_batch_in_place(call, batch_size) for call in calls)
