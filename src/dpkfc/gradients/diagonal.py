"""A diagonal metric from one factor a parameter entry, in the layout that the norm engine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dpkfc.gradients.accumulate import matrix_of
from dpkfc.gradients.layers import Layer
from dpkfc.metric import Eigenbasis, Elementwise, Entry, Metric

__all__ = ["diagonal_metric"]

_MATRICES = ("linear", "conv", "embedding", "tied")


def diagonal_metric(layers: Sequence[Layer], scales: Mapping[str, Tensor]) -> Metric:
    """The map `z = scale ⊙ g`.

    Args:
        layers: of the model.
        scales: parameter name to positive factors of its shape. The groups of a convolution share the mean of theirs.

    Returns:
        One entry a layer: without rotations for matrix-shaped layers (the bias is the last column), by role for others.
    """
    return {layer.name: _entry(layer, scales) for layer in layers}


def _entry(layer: Layer, scales: Mapping[str, Tensor]) -> Entry:
    if layer.rule not in _MATRICES:
        return Elementwise({role: scales[full] for role, full in layer.parameters.items()})
    matrix = matrix_of(layer, scales)
    if layer.rule == "embedding":
        return Eigenbasis(matrix.T.contiguous())
    groups = getattr(layer.module, "groups", 1)
    return Eigenbasis(matrix.view(groups, -1, matrix.shape[-1]).mean(0))
