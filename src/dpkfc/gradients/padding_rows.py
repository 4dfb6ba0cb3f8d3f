"""The rows of embedding tables that stand for padding, in which no example has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dpkfc.gradients.layers import Layer


def find_padding_rows(layers: Sequence[Layer]) -> dict[str, int]:
    """Return the row of padding of each embedding table that nothing else uses, by its name."""
    rows = {}
    for layer in layers:
        indices = {
            module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
            for module in layer.modules
        }
        if len(indices) == 1 and "weight" in layer.parameters:
            index = indices.pop()
            if index is not None:
                rows[layer.parameters["weight"]] = index
    return rows
