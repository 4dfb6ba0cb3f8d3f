"""The structures of a factor: its eigenpairs (`linalg.Eigen`), a diagonal, or a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.curvature.linalg import Eigen

__all__ = ["DiagonalFactor", "Factor", "IsotropicFactor", "is_empty"]

# Below this a mean eigenvalue belongs to a side without a gradient: its root would only magnify rounding.
_NEGLIGIBLE = 1e-30


@dataclass(frozen=True)
class DiagonalFactor:
    """A diagonal factor, `values` float64 `[d]` in the order of the coordinates."""

    values: Tensor

    @property
    def dim(self) -> int:
        """Size d."""
        return self.values.numel()

    @property
    def spectrum(self) -> Tensor:
        """The entries."""
        return self.values

    @property
    def rank(self) -> int:
        """Number of entries above zero."""
        return int((self.values > 0).sum())

    @property
    def trace(self) -> float:
        """Sum of the entries."""
        return float(self.values.sum())

    @property
    def mean(self) -> float:
        """Mean of the entries."""
        return self.trace / self.dim

    def scaled(self, factor: float) -> DiagonalFactor:
        """The factor times a number that is not negative."""
        return DiagonalFactor(self.values * factor)


@dataclass(frozen=True)
class IsotropicFactor:
    """A factor replaced by the multiple of the identity with the same trace."""

    dim: int
    mean: float

    @property
    def rank(self) -> int:
        """d, or 0 for the zero factor."""
        return self.dim if self.mean > 0 else 0

    @property
    def trace(self) -> float:
        """Trace of the factor it stands for."""
        return self.mean * self.dim

    @property
    def values(self) -> Tensor:
        """The one distinct eigenvalue, float64 `[1]`."""
        return torch.tensor([self.mean], dtype=torch.float64)

    @property
    def spectrum(self) -> Tensor:
        """The one distinct eigenvalue."""
        return self.values

    def scaled(self, factor: float) -> IsotropicFactor:
        """The factor times a number that is not negative."""
        return IsotropicFactor(self.dim, self.mean * factor)


Factor = Eigen | DiagonalFactor | IsotropicFactor


def is_empty(factor: Factor) -> bool:
    """Whether a factor is zero for all purposes: a dead layer, or a LoRA adapter before its first step."""
    return not factor.mean > _NEGLIGIBLE
