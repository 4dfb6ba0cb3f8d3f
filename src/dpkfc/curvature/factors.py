"""The forms of a curvature factor: its eigenpairs (`Eigen`), a diagonal, or a multiple of I."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.curvature.eigen import Eigen, FactorForm

# A smaller mean eigenvalue belongs to a side without a gradient. Its root would magnify rounding.
_NEGLIGIBLE = 1e-30


@dataclass(frozen=True)
class DiagonalFactor(FactorForm):
    """A diagonal factor, `values` float64 `[d]` in the order of the coordinates."""

    values: Tensor

    @property
    def dim(self) -> int:
        """Size d."""
        return self.values.numel()

    @property
    def trace(self) -> float:
        """Sum of the entries."""
        return float(self.values.sum())

    def scale_by(self, factor: float) -> DiagonalFactor:
        """Return the factor times a number that is not negative."""
        return DiagonalFactor(self.values * factor)


@dataclass(frozen=True)
class IsotropicFactor:
    """A factor replaced by the multiple of the identity with the same trace."""

    dim: int
    mean: float

    @property
    def rank(self) -> int:
        """d, or 0 for the zero factor."""
        if self.mean > 0:
            return self.dim
        return 0

    @property
    def trace(self) -> float:
        """Trace of the factor that it replaces."""
        return self.mean * self.dim

    @property
    def values(self) -> Tensor:
        """The one distinct eigenvalue, float64 `[1]`."""
        return torch.tensor([self.mean], dtype=torch.float64)

    @property
    def spectrum(self) -> Tensor:
        """The one distinct eigenvalue."""
        return self.values

    def scale_by(self, factor: float) -> IsotropicFactor:
        """Return the factor times a number that is not negative."""
        return IsotropicFactor(self.dim, self.mean * factor)


Factor = Eigen | DiagonalFactor | IsotropicFactor


def is_empty(factor: Factor) -> bool:
    """Return whether a factor is practically zero: a dead layer, or a new LoRA adapter."""
    return not factor.mean > _NEGLIGIBLE
