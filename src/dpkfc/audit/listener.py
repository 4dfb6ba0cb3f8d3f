"""Listen in the releases of a run for canaries, one step at a time.

A canary's score in a step is the inner product of its unit gradient, in the coordinates of the
metric, with the release: its share of the step and Gaussian noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.audit.step_canaries import Scores
from dpkfc.gradients.layer_matrices import matrix_of
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Entry, Metric
from dpkfc.privacy.mechanism import Released


class Listener:
    """Scores canaries u aᵀ in the releases of one layer.

    Args:
        layer: with the planted gradients.
        u: `[m, d_out]`.
        a: `[m, d_in]`, with a last column of ones if the layer trains a bias.
        entries: row and column of the one entry of the weight that each canary holds `[m]`, if
            each holds but one; then a step costs no more than m numbers.
    """

    def __init__(
        self, layer: Layer, u: Tensor, a: Tensor, entries: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.layer = layer
        self._u = u
        self._a = a
        self._entries = entries
        if entries is not None:
            # The numbers in the one row and column.
            self._row_values = u.gather(1, entries[0].to(u.device)[:, None]).squeeze(1)
            self._column_values = a.gather(1, entries[1].to(a.device)[:, None]).squeeze(1)
        self._entry: Entry | None = None
        self._norms: Tensor | None = None

    def listen(self, released: Released, metric: Metric) -> Scores:
        """Return the inner product of each canary's unit gradient with one release `[m]`.

        It has the noise of one entry of the release, whatever the metric.
        """
        entry = metric.get(self.layer.name)
        release = matrix_of(self.layer, released.gradients)
        if self._norms is None or entry is not self._entry:
            self._entry = entry
            self._norms = self._measure_canaries(release).clamp(min=1e-300)
        # The map is symmetric, so ⟨g, mapped release⟩ = ⟨whitened g, release⟩.
        mapped = _map_again(self.layer, entry, release)
        products = self._multiply(mapped).double() / self._norms
        return np.nan_to_num(products.cpu().numpy())

    def _multiply(self, matrix: Tensor) -> Tensor:
        """Return uᵀ M a of each canary `[m]`."""
        if self._entries is None:
            u, a = self._u.to(matrix), self._a.to(matrix)
            return ((u @ matrix) * a).sum(1)
        rows, columns = self._entries
        products = matrix[rows, columns] * self._column_values
        if "bias" in self.layer.parameters:
            products = products + matrix[rows, -1]
        return products * self._row_values

    def _measure_canaries(self, like: Tensor) -> Tensor:
        """Return the norms of the canaries in the metric in force `[m]`."""
        u, a, scale = _transform_factors(
            self.layer, self._entry, self._u.to(like), self._a.to(like)
        )
        if scale is None:
            return (u.norm(dim=1) * a.norm(dim=1)).double()
        squares = ((u.square() @ scale.square()) * a.square()).sum(1)
        return squares.sqrt().double()


def _map_again(layer: Layer, entry: Entry | None, matrix: Tensor) -> Tensor:
    """Apply the metric's own map once more."""
    if entry is None:
        return matrix
    if entry.is_elementwise:
        return matrix * _scale_matrix(layer, entry, matrix)
    return entry.apply(matrix)


def _scale_matrix(layer: Layer, entry: Entry, like: Tensor) -> Tensor:
    """Return the scales of an elementwise entry as a matrix."""
    scales = {}
    for role, name in layer.parameters.items():
        ones = torch.ones_like(layer.tensor(role))
        scales[name] = entry.scales.get(role, ones)
    matrix = matrix_of(layer, scales)
    return matrix.to(like)


def _transform_factors(
    layer: Layer, entry: Any, u: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return u, a and scale such that scale ⊙ u aᵀ are the preconditioned canaries.

    They are so up to a rotation.
    """
    if entry is None:
        return u, a, None
    if entry.is_elementwise:
        return u, a, _scale_matrix(layer, entry, u)
    factors: tuple[Tensor, Tensor, Tensor | None] = entry.map_factors(u, a)
    return factors
