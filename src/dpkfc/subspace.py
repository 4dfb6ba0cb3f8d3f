"""The value in which a public subspace is handed to the norm engine: an orthonormal basis L over groups of layers.

    embedding w = Lᵀ g,   residual r = g − L w,   stacked (α w / S₁, β r / S₂), clipped to the norms α and β

One Gaussian is added to the stacked vector, whose sensitivity is √(α² + β²): √2 with both parts, 1 for the embedding alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dpkfc.metric import Entry

__all__ = ["EMBEDDING", "Span", "Subspace", "clipping_of"]

EMBEDDING = "<embedding>"  # name of the released embedding beside the names of parameters


def clipping_of(residual_norm: float | None) -> str:
    """What the clipping is called, with the residual or without; the sensitivity follows from the name."""
    return "embedding" if residual_norm is None else "embedding_residual"


@dataclass(frozen=True)
class Span:
    """One layer's rows of the basis of its group.

    Attributes:
        vectors: the k directions of the group, role to `[k, *parameter.shape]`; a layer whose weight and bias are one matrix
            has them under "" alone, `[k, d_out, d_in]`, in the form of its clipped sum.
        start: where those k begin in the embedding of the whole gradient.
        length: Frobenius norm of the vectors.
    """

    vectors: Mapping[str, Tensor]
    start: int
    length: float

    @property
    def rank(self) -> int:
        """Directions k."""
        return next(iter(self.vectors.values())).shape[0]

    @property
    def columns(self) -> slice:
        """The entries of the embedding that belong to this layer's group."""
        return slice(self.start, self.start + self.rank)

    def combine(self, embedding: Tensor) -> Tensor | dict[str, Tensor]:
        """This layer's part of L w, in the form of its clipped sum, for the embedding of the whole gradient `[K]`."""
        w = embedding[self.columns]
        return self._form({role: torch.tensordot(w.to(v.dtype), v, dims=1) for role, v in self.vectors.items()})

    @cached_property
    def diagonal(self) -> Tensor | dict[str, Tensor]:
        """This layer's part of the diagonal of L Lᵀ: the variance of L w for w of unit white noise."""
        return self._form({role: v.square().sum(0) for role, v in self.vectors.items()})

    @staticmethod
    def _form(tensors: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        return tensors[""] if "" in tensors else tensors


@dataclass(frozen=True, eq=False)
class Subspace(Mapping[str, Entry]):
    """A metric that leaves every layer as it is, and a basis along which the gradient is then split in two.

    Attributes:
        spans: layer name to its rows; the gradient of an absent layer is residual alone.
        embedding_norm: S₁.
        residual_norm: S₂; None drops the residual.
        share: α² / 2 where there are two parts, with α² + β² = 2: the embedding's share in what a release costs.
        defect: upper bound of ‖Lᵀ L − I‖.
    """

    spans: Mapping[str, Span]
    embedding_norm: float
    residual_norm: float | None
    share: float = 0.5
    defect: float = 0.0

    @property
    def clipping(self) -> str:
        """The clipping that this split needs."""
        return clipping_of(self.residual_norm)

    @property
    def embedding_scale(self) -> float:
        """α / S₁."""
        return (1.0 if self.residual_norm is None else math.sqrt(2 * self.share)) / self.embedding_norm

    @property
    def residual_scale(self) -> float:
        """β / S₂; 0 where the residual is dropped."""
        return 0.0 if self.residual_norm is None else math.sqrt(2 * (1 - self.share)) / self.residual_norm

    @property
    def width(self) -> int:
        """Entries K of the embedding."""
        return max(span.columns.stop for span in self.spans.values())

    def to(self, device: torch.device | str) -> Subspace:
        """The same on another device."""
        spans = {n: replace(s, vectors={r: v.to(device) for r, v in s.vectors.items()}) for n, s in self.spans.items()}
        return replace(self, spans=spans)

    def __getitem__(self, name: str) -> Entry:
        """No layer has a map of its own."""
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def __len__(self) -> int:
        """Zero."""
        return 0
