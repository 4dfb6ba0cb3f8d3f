"""Weight and bias of a layer in the form of the clipped sum: one matrix, the bias last.

Gradients of examples that autograd has computed become blocks of this form here, and sums become
tensors by parameter again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dpkfc.gradients.layers import MATRICES, Calls, Layer
from dpkfc.linalg.blocks import MaterializedGradients, PerExample, raise_precision
from dpkfc.tensors import Tensors


def map_groups(layer: Layer, matrix: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `work` to the `[d_out, d_in]` matrix of each group of a layer.

    `work` gets all of them at once, `[..., d_out, d_in]`. An embedding has one, the transpose of
    `matrix`. The results are stacked in the shape of `matrix`.
    """
    if layer.rule == "embedding":
        return work(matrix.T).T
    by_group = matrix.view(layer.groups, -1, matrix.shape[-1])
    return work(by_group).reshape(matrix.shape)


def matrix_of(layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's weight and bias as the matrix that `split_sum` cuts, the bias last."""
    rows = {role: tensors[name].unsqueeze(0) for role, name in layer.parameters.items()}
    return matrices_of(layer, rows)[0]


def split_sum(layer: Layer, value: Tensor | Tensors) -> Tensors:
    """Cut a layer's sum, for example a matrix `[d_out, d_in (+1)]`, into tensors by parameter."""
    names = layer.parameters
    if isinstance(value, dict):
        return {names[role]: tensor for role, tensor in value.items()}
    result: Tensors = {}
    if "bias" in names:
        value, bias = value[:, :-1], value[:, -1]
        result[names["bias"]] = bias.contiguous()
    if "weight" in names:
        weight = value.T if layer.transposed else value
        result[names["weight"]] = weight.reshape(layer.tensor("weight").shape)
    return result


def block_of_gradients(layer: Layer, gradients: Tensors) -> MaterializedGradients | PerExample:
    """Return per-example gradients of a layer's parameters as a block.

    Args:
        layer: the layer.
        gradients: role to gradients `[N, *parameter.shape]`. An absent role has zeros.

    Returns:
        For a matrix-shaped layer `[N * groups, d_out, d_in]` with the bias as last column (an
        embedding: `[N, rows, d]`), for another layer the gradients by role. Both are in float32, or
        in float64 where they are.
    """
    like = raise_precision(next(iter(gradients.values())))
    by_role = {}
    for role in layer.parameters:
        if role in gradients:
            by_role[role] = gradients[role].to(like.dtype)
        else:
            by_role[role] = like.new_zeros(len(like), *layer.tensor(role).shape)
    if layer.rule not in MATRICES:
        return PerExample(by_role)
    matrix = matrices_of(layer, by_role)
    rows = matrix.reshape(len(like) * layer.groups, -1, matrix.shape[-1])
    return MaterializedGradients(rows, layer.groups, crosswise=layer.rule == "embedding")


def matrices_of(layer: Layer, tensors: Tensors) -> Tensor:
    """Return `[N, d_out, columns]` from `[N, *parameter.shape]` by role, the bias last."""
    columns = []
    if "weight" in tensors:
        weight = tensors["weight"]
        weight = weight.mT if layer.transposed else weight.flatten(2)
        columns.append(weight)
    if "bias" in tensors:
        columns.append(tensors["bias"].unsqueeze(2))
    if len(columns) == 1:
        return columns[0]
    return torch.cat(columns, 2)


def add_blocks(layers: Sequence[Layer], gradients: Tensors, calls: Calls) -> None:
    """Add gradients to the calls of the layers that the parameters belong to.

    Args:
        layers: of the model.
        gradients: parameter name to gradients `[N, *parameter.shape]`.
        calls: layer name to its calls or blocks.
    """
    for layer in layers:
        names = layer.parameters.items()
        by_role = {role: gradients[name] for role, name in names if name in gradients}
        if by_role:
            block = block_of_gradients(layer, by_role)
            calls.setdefault(layer.name, []).append(block)


def blocks_of_one(layers: Sequence[Layer], gradient: Tensors) -> Calls:
    """Return the gradient of one example or privacy unit as the blocks of its layers.

    Args:
        layers: of the model.
        gradient: parameter name to gradient.
    """
    calls: Calls = {}
    add_blocks(layers, {name: g.unsqueeze(0) for name, g in gradient.items()}, calls)
    return calls


def add_gradients(total: Tensors, gradients: Tensors) -> None:
    """Add gradients to the sums of others, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient
