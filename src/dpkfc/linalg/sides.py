"""Sides: the maps of inputs and of outputs that a Kronecker map is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from dpkfc.linalg.row_norms import has_columns
from dpkfc.linalg.thin_products import multiply


class _Side:
    """What all sides share.

    Attributes:
        kind: name of the class, for reports.
        is_diagonal: the side mixes no two coordinates.
    """

    kind: ClassVar[str]
    is_diagonal: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        raise NotImplementedError

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.apply(x.mT).mT

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]`."""
        ones = x.new_ones(*x.shape[:-1], 1)
        homogeneous = torch.cat([x, ones], -1)
        return self.apply(homogeneous)

    def apply_at(self, x: Tensor, index: Tensor) -> Tensor:
        """Map rows x `[..., n]` that stand at the coordinates `index` `[...]` of this side.

        Raises:
            ValueError: a side that mixes coordinates.
        """
        raise ValueError("the input side of an embedding must be diagonal or the identity")

    @property
    def label(self) -> str:
        """Return the kind of the side, with its rank where that is low."""
        return self.kind


@dataclass(frozen=True)
class Identity(_Side):
    """The side `U = factor · I`."""

    factor: float = 1.0
    kind: ClassVar[str] = "identity"
    is_diagonal: ClassVar[bool] = True

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        if self.factor == 1.0:
            return x
        return x * self.factor

    def apply_at(self, x: Tensor, index: Tensor) -> Tensor:
        """Map rows x `[..., n]` that stand at the coordinates `index` `[...]` of this side."""
        return self.apply(x)

    @property
    def operator_norm(self) -> float:
        """Return the operator norm of U."""
        return abs(self.factor)

    def scale_by(self, factor: float) -> Identity:
        """Return the side `factor · U`."""
        return Identity(self.factor * factor)

    def inverse(self) -> Identity:
        """Return the side `U⁻¹`."""
        return Identity(1 / self.factor)

    def square_diagonal(self) -> Tensor:
        """Return the diagonal of U², as something that broadcasts over `[d]`."""
        return torch.tensor([self.factor**2], dtype=torch.float64)


@dataclass(frozen=True)
class Diagonal(_Side):
    """The side `U = diag(scale)`, scale `[d]`."""

    scale: Tensor
    kind: ClassVar[str] = "diagonal"
    is_diagonal: ClassVar[bool] = True

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        return x * self.scale

    def apply_at(self, x: Tensor, index: Tensor) -> Tensor:
        """Map rows x `[..., n]` that stand at the coordinates `index` `[...]` of this side."""
        return x * self.scale[index].unsqueeze(-1)

    # Cached: a GPU is read once a metric and not in every step.
    @cached_property
    def operator_norm(self) -> float:
        """Return the operator norm of U."""
        return float(self.scale.abs().max())

    def scale_by(self, factor: float) -> Diagonal:
        """Return the side `factor · U`."""
        return Diagonal(self.scale * factor)

    def inverse(self) -> Diagonal:
        """Return the side `U⁻¹`."""
        return Diagonal(1 / self.scale)

    def square_diagonal(self) -> Tensor:
        """Return the diagonal of U² `[d]`."""
        return self.scale.square()


@dataclass(frozen=True)
class Dense(_Side):
    """The side `U = root`, a symmetric matrix `[d, d]` whose operator norm is `norm`."""

    root: Tensor
    norm: float
    kind: ClassVar[str] = "dense"

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`, which costs d² per row."""
        return x @ self.root

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        rows = x.reshape(-1, x.shape[-1])
        mapped = torch.addmm(self.root[-1], rows, self.root[:-1])
        return mapped.view(*x.shape[:-1], -1)

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.root @ x

    @property
    def operator_norm(self) -> float:
        """Return the operator norm of U."""
        return self.norm

    def scale_by(self, factor: float) -> Dense:
        """Return the side `factor · U`."""
        root = self.root * factor
        return Dense(root, self.norm * abs(factor))

    def inverse(self) -> Dense:
        """Return the side `U⁻¹`."""
        inverse = torch.linalg.inv(self.root.double())
        norm = float(torch.linalg.matrix_norm(inverse, 2))
        return Dense(inverse.to(self.root.dtype), norm)

    def square_diagonal(self) -> Tensor:
        """Return the diagonal of U² `[d]`."""
        return self.root.square().sum(1)


@dataclass(frozen=True)
class LowRank(_Side):
    """The side `U = tail · I + V diag(scale − tail) Vᵀ`, orthonormal V `[d, k]` and scale `[k]`.

    It is the exact root of a factor that has only k eigenvalues besides its damping. It costs
    2·k·d per row instead of d².
    """

    vectors: Tensor
    scale: Tensor
    tail: float
    kind: ClassVar[str] = "lowrank"

    @property
    def label(self) -> str:
        """Return the kind of the side with its rank."""
        rank = self.vectors.shape[1]
        return f"{self.kind}{rank}"

    @property
    def _excess(self) -> Tensor:
        """Return what the scale has above the tail `[k]`."""
        return self.scale - self.tail

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        if has_columns(x):
            return self.apply_left(x.mT).mT
        rows = x.reshape(-1, x.shape[-1])
        coordinates = self.project(rows) * self._excess
        mapped = multiply(coordinates, self.vectors.T)
        return mapped.add_(rows, alpha=self.tail).view(x.shape)

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        d = x.shape[-1]
        rows = x.reshape(-1, d)
        coordinates = multiply(rows, self.vectors[:-1])
        coordinates += self.vectors[-1]
        coordinates *= self._excess
        out = multiply(coordinates, self.vectors.T)
        out[:, :d].add_(rows, alpha=self.tail)
        out[:, d] += self.tail
        return out.view(*x.shape[:-1], d + 1)

    def project(self, x: Tensor) -> Tensor:
        """Return the coordinates x V `[..., k]` of rows x `[..., d]`."""
        rows = x.reshape(-1, x.shape[-1])
        return multiply(rows, self.vectors).view(*x.shape[:-1], self.vectors.shape[1])

    def project_left(self, x: Tensor) -> Tensor:
        """Return Vᵀ x `[n, k, t]` of columns x `[n, d, t]`."""
        vectors = self.vectors.expand(len(x), *self.vectors.shape)
        return torch.bmm(vectors.mT, x)

    @cached_property
    def defect(self) -> float:
        """Return ‖VᵀV − I‖, which is rounding where the columns are orthonormal."""
        vectors = self.vectors.double()
        products = vectors.T @ vectors
        products.diagonal().sub_(1)
        return float(products.norm())

    def square_excess(self) -> Tensor:
        """Return what the squared scale has above the squared tail, `[k]` in float64."""
        return self.scale.double().square() - self.tail**2

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        each = x.reshape(-1, *x.shape[-2:])
        vectors = self.vectors.expand(len(each), *self.vectors.shape)
        coordinates = self.project_left(each) * self._excess.unsqueeze(-1)
        return torch.baddbmm(each, vectors, coordinates, beta=self.tail).view(x.shape)

    def map_columns_(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Map columns x `[n, d, t]` in their own memory, given Vᵀ x `[n, k, t]`."""
        vectors = self.vectors.expand(len(x), *self.vectors.shape)
        scaled = coordinates * self._excess.unsqueeze(-1)
        return x.baddbmm_(vectors, scaled, beta=self.tail)

    # Cached: a GPU is read once a metric and not in every step.
    @cached_property
    def operator_norm(self) -> float:
        """Return the operator norm of U."""
        if not self.scale.numel():
            return abs(self.tail)
        largest = float(self.scale.abs().max())
        return max(largest, abs(self.tail))

    def scale_by(self, factor: float) -> LowRank:
        """Return the side `factor · U`."""
        return replace(self, scale=self.scale * factor, tail=self.tail * factor)

    def inverse(self) -> LowRank:
        """Return the side `U⁻¹`."""
        return replace(self, scale=1 / self.scale, tail=1 / self.tail)

    def square_diagonal(self) -> Tensor:
        """Return the diagonal of U² `[d]`."""
        tail = self.tail**2
        excess = self.scale.square() - tail
        return tail + self.vectors.square() @ excess


Side = Identity | Diagonal | Dense | LowRank
