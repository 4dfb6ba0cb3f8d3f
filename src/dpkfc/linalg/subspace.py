"""A public subspace: an orthonormal basis L over groups of layers.

    embedding w = Lᵀ g,   residual r = g − L w,   stacked (α w / S₁, β r / S₂)

The two parts are clipped to the norms α and β. One Gaussian is added to the stacked vector, whose
sensitivity is √(α² + β²): √2 with both parts, 1 for the embedding alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpkfc.linalg.metric import Entry
from dpkfc.tensors import NamedTensors, Tensors

EMBEDDING = "<embedding>"
"""Name of the released embedding, next to the names of parameters."""


def clipping_of(residual_norm: float | None) -> str:
    """Return the name of the clipping with the residual or without, which gives the sensitivity."""
    return "embedding" if residual_norm is None else "embedding_residual"


@dataclass(frozen=True)
class Span:
    """One layer's rows of the basis of its group.

    Attributes:
        vectors: the k directions of the group, role to `[k, *parameter.shape]`. A layer whose
            weight and bias are one matrix has them under "" alone, `[k, d_out, d_in]`, in the form
            of its clipped sum.
        start: where those k begin in the embedding of the whole gradient.
        length: Frobenius norm of the vectors.
    """

    vectors: NamedTensors
    start: int
    length: float

    @property
    def rank(self) -> int:
        """Return the number of directions k."""
        directions = next(iter(self.vectors.values()))
        return len(directions)

    @property
    def size(self) -> int:
        """Return the entries of one direction."""
        return sum(v[0].numel() for v in self.vectors.values())

    @property
    def columns(self) -> slice:
        """Return the entries of the embedding that belong to this layer's group."""
        return slice(self.start, self.start + self.rank)

    def combine(self, embedding: Tensor) -> Tensor | Tensors:
        """Return this layer's part of L w, in the form of its clipped sum.

        Args:
            embedding: w of the whole gradient `[K]`.
        """
        w = embedding[self.columns]

        def combine(v: Tensor) -> Tensor:
            return torch.tensordot(w.to(v.dtype), v, dims=1)

        return self._map(combine)

    @cached_property
    def diagonal(self) -> Tensor | Tensors:
        """Return this layer's part of the diagonal of L Lᵀ.

        It is the variance of L w for w of unit white noise.
        """
        return self._map(lambda v: v.square().sum(0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Tensor | Tensors:
        """Return role to a function of the role's vectors, or the one tensor of a matrix."""
        tensors = {role: function(v) for role, v in self.vectors.items()}
        return tensors.get("", tensors)


@dataclass(frozen=True, eq=False)
class Subspace(Mapping[str, Entry]):
    """A metric that leaves every layer as it is, and a basis that splits the gradient in two.

    Attributes:
        spans: layer name to its rows. The gradient of an absent layer is residual alone.
        embedding_norm: S₁.
        residual_norm: S₂. None drops the residual.
        share: α² / 2 where there are two parts, with α² + β² = 2. It is the embedding's fraction
            of what a release costs.
        defect: upper bound of ‖Lᵀ L − I‖.
    """

    spans: Mapping[str, Span]
    embedding_norm: float
    residual_norm: float | None
    share: float = 0.5
    defect: float = 0.0

    @property
    def clipping(self) -> str:
        """Return the clipping that this split needs."""
        return clipping_of(self.residual_norm)

    @property
    def embedding_scale(self) -> float:
        """Return α / S₁."""
        alpha = 1.0
        if self.residual_norm is not None:
            alpha = math.sqrt(2 * self.share)
        return alpha / self.embedding_norm

    @property
    def residual_scale(self) -> float:
        """Return β / S₂, or 0 where the residual is dropped."""
        if self.residual_norm is None:
            return 0.0
        beta = math.sqrt(2 * (1 - self.share))
        return beta / self.residual_norm

    @property
    def width(self) -> int:
        """Return the entries K of the embedding."""
        return max(span.columns.stop for span in self.spans.values())

    def __getitem__(self, name: str) -> Entry:
        """Refuse: no layer has a map of its own."""
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Return an empty iterator."""
        return iter(())

    def __len__(self) -> int:
        """Return 0."""
        return 0
