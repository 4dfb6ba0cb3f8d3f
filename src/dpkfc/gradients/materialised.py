"""Gradients of examples that were computed by autograd, in the form in which layers are clipped and summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpkfc.blocks import Formed, PerExample
from dpkfc.gradients.calls import Calls
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.sharded import in_graph

__all__ = ["MATRICES", "block_of_gradients", "blocks_of_one", "gradient_of"]

MATRICES = ("linear", "conv", "embedding", "tied")
"""Rules of layers whose weight and bias are one matrix."""


def block_of_gradients(layer: Layer, gradients: Mapping[str, Tensor]) -> Formed | PerExample:
    """Return per-example gradients of a layer's parameters as a block.

    Args:
        layer: the layer.
        gradients: role to gradients `[N, *parameter.shape]`; a role that is absent has none.

    Returns:
        For a matrix-shaped layer `[N * groups, d_out, d_in]` with the bias as last column (an embedding: `[N, rows, d]`), for
        another layer the gradients by role. Both in float32, or in float64 where they are.
    """
    like = next(iter(gradients.values()))
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    full = {
        role: gradients[role].to(dtype)
        if role in gradients
        else like.new_zeros(len(like), *layer.tensor(role).shape, dtype=dtype)
        for role in layer.parameters
    }
    if layer.rule not in MATRICES:
        return PerExample(full)
    columns = []
    if "weight" in full:
        weight = full["weight"]
        columns.append(weight.mT if layer.transposed else weight.flatten(2))
    if "bias" in full:
        columns.append(full["bias"].unsqueeze(2))
    matrix = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
    groups = int(getattr(layer.module, "groups", 1))
    rows = matrix.reshape(len(like) * groups, -1, matrix.shape[-1])
    return Formed(rows, groups, crosswise=layer.rule == "embedding")


def gradient_of(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """Return parameter name to gradient of a number, dense; parameters that it does not depend on are absent."""
    parameters = {name: in_graph(p) for name, p in model.named_parameters() if p.requires_grad}
    with torch.autocast(total.device.type, enabled=False):
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}


def blocks_of_one(layers: Sequence[Layer], gradient: Mapping[str, Tensor]) -> Calls:
    """Return the gradient of one example or privacy unit as the blocks of its layers.

    Args:
        layers: of the model.
        gradient: parameter name to gradient.
    """
    calls: Calls = {}
    for layer in layers:
        own = {role: gradient[full].unsqueeze(0) for role, full in layer.parameters.items() if full in gradient}
        if own:
            calls[layer.name] = [block_of_gradients(layer, own)]
    return calls
