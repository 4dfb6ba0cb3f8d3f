"""Metrics: the values in which curvature hands a preconditioner to the norm engine.

A metric assigns each layer a linear map `z = U_out g U_in` of its per-example gradient. Norms are taken of z, the clipped
sum is mapped once, noise is added in the coordinates of z. A layer without an entry keeps the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Dense", "Diagonal", "Eigenbasis", "Elementwise", "Entry", "Identity", "Kronecker", "LowRank", "Metric", "Side"]


@dataclass(frozen=True)
class Identity:
    """The side `U = factor · I`."""

    factor: float = 1.0

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        return x if self.factor == 1.0 else x * self.factor

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return self.apply(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1))

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.apply(x)

    @property
    def bound(self) -> float:
        """Operator norm of U."""
        return abs(self.factor)

    def scaled(self, factor: float) -> Identity:
        """The side `factor · U`."""
        return Identity(self.factor * factor)

    def inverse(self) -> Identity:
        """The side `U⁻¹`."""
        return Identity(1 / self.factor)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U², as something that broadcasts over `[d]`."""
        return torch.tensor([self.factor**2], dtype=torch.float64)


@dataclass(frozen=True)
class Diagonal:
    """The side `U = diag(scale)`, scale `[d]`."""

    scale: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        return x * self.scale

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return self.apply(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1))

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return x * self.scale.unsqueeze(-1)

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of U."""
        return float(self.scale.abs().max())

    def scaled(self, factor: float) -> Diagonal:
        """The side `factor · U`."""
        return Diagonal(self.scale * factor)

    def inverse(self) -> Diagonal:
        """The side `U⁻¹`."""
        return Diagonal(1 / self.scale)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.scale.square()


@dataclass(frozen=True)
class Dense:
    """The side `U = root`, a symmetric matrix `[d, d]` whose operator norm is `norm`."""

    root: Tensor
    norm: float

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`; costs d² per row."""
        return x @ self.root

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return torch.addmm(self.root[-1], x.reshape(-1, x.shape[-1]), self.root[:-1]).view(*x.shape[:-1], -1)

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.root @ x

    @property
    def bound(self) -> float:
        """Operator norm of U."""
        return self.norm

    def scaled(self, factor: float) -> Dense:
        """The side `factor · U`."""
        return Dense(self.root * factor, self.norm * abs(factor))

    def inverse(self) -> Dense:
        """The side `U⁻¹`."""
        inverse = torch.linalg.inv(self.root.double())
        return Dense(inverse.to(self.root.dtype), float(torch.linalg.matrix_norm(inverse, 2)))

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.root.square().sum(1)


@dataclass(frozen=True)
class LowRank:
    """The side `U = tail · I + V diag(scale − tail) Vᵀ` with orthonormal V `[d, k]` and scale `[k]`.

    The exact root of a factor that has only k eigenvalues besides its damping: costs 2·k·d per row instead of d².
    """

    vectors: Tensor
    scale: Tensor
    tail: float

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        coordinates = (x @ self.vectors) * (self.scale - self.tail)
        flat = torch.addmm(
            x.reshape(-1, x.shape[-1]),
            coordinates.reshape(-1, coordinates.shape[-1]),
            self.vectors.T,
            beta=self.tail,
        )
        return flat.view(x.shape)

    def apply_(self, x: Tensor) -> Tensor:
        """Map the last axis of a contiguous x `[..., d]` in its own memory."""
        rows = x.view(-1, x.shape[-1])
        coordinates = (rows @ self.vectors).mul_(self.scale - self.tail)
        rows.addmm_(coordinates, self.vectors.T, beta=self.tail)
        return x

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        rows, d = x.reshape(-1, x.shape[-1]), x.shape[-1]
        coordinates = torch.addmm(self.vectors[-1], rows, self.vectors[:-1]).mul_(self.scale - self.tail)
        out = coordinates @ self.vectors.T
        out[:, :d].add_(rows, alpha=self.tail)
        out[:, d] += self.tail
        return out.view(*x.shape[:-1], d + 1)

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        coordinates = (self.scale - self.tail).unsqueeze(-1) * (self.vectors.T @ x)
        return self.tail * x + self.vectors @ coordinates

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of U."""
        return max(abs(self.tail), float(self.scale.abs().max()) if self.scale.numel() else 0.0)

    def scaled(self, factor: float) -> LowRank:
        """The side `factor · U`."""
        return LowRank(self.vectors, self.scale * factor, self.tail * factor)

    def inverse(self) -> LowRank:
        """The side `U⁻¹`."""
        return LowRank(self.vectors, 1 / self.scale, 1 / self.tail)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.tail**2 + self.vectors.square() @ (self.scale.square() - self.tail**2)


Side = Identity | Diagonal | Dense | LowRank


@dataclass(frozen=True)
class Kronecker:
    """The map `z = output · g · input` of a matrix-shaped gradient g `[..., d_out, d_in]`.

    `input` acts on the input features (the homogeneous coordinate last), `output` on the output features.
    """

    input: Side = field(default_factory=Identity)
    output: Side = field(default_factory=Identity)

    @property
    def is_identity(self) -> bool:
        """Whether the map changes nothing."""
        return self.input == Identity() and self.output == Identity()

    @property
    def folded(self) -> Kronecker:
        """The same map, with a multiple of the identity on the output side moved to an input side that is a few vectors.

        Rows of output gradients, or whole gradients, are then not multiplied by a number, which is a copy of each.
        """
        if isinstance(self.output, Identity) and self.output.factor != 1.0 and isinstance(self.input, LowRank | Diagonal):
            return Kronecker(self.input.scaled(self.output.factor))
        return self

    def whiten(self, g: Tensor) -> Tensor:
        """z for g `[..., d_out, d_in]`."""
        sides = self.folded
        return sides.output.apply_left(sides.input.apply(g))

    def whiten_(self, g: Tensor) -> None:
        """Put z into the memory of g `[n, d_out, d_in]`."""
        sides = self.folded
        if isinstance(sides.input, LowRank) and sides.output == Identity() and g.is_contiguous():
            sides.input.apply_(g)
        else:
            g.copy_(self.whiten(g))

    def scaled(self, factor: float) -> Kronecker:
        """The map `factor · z`."""
        return replace(self, output=self.output.scaled(factor))

    def inverse(self) -> Kronecker:
        """The map that undoes this one."""
        return Kronecker(self.input.inverse(), self.output.inverse())

    def variance(self) -> Tensor:
        """Variance of every entry of `whiten(z)` for z of unit white noise; broadcasts to `[d_out, d_in]`."""
        of_output, of_input = self.output.square_diagonal(), self.input.square_diagonal()
        device = of_input.device if isinstance(self.output, Identity) else of_output.device  # an identity is on none
        return torch.outer(of_output.to(device), of_input.to(device))


@dataclass(frozen=True)
class Eigenbasis:
    """The symmetric map `z = Q_out (scale ⊙ (Q_outᵀ g Q_in)) Q_inᵀ` of a matrix-shaped gradient `[..., d_out, d_in]`.

    What a root of a Kronecker product becomes when its eigenvalues are changed one by one (a floor on the product), and,
    without rotations, any diagonal map. Norms do not factor over several positions: gradients are formed.

    Attributes:
        scale: `[d_out, d_in]`, positive.
        input: Q_in `[d_in, d_in]` with orthonormal columns, None for the identity; the homogeneous coordinate is the last row.
        output: Q_out `[d_out, d_out]`, None for the identity.
        rest: where Q_in has only k columns `[d_in, k]` and scale is `[d_out, k]`: the one scale, positive, of all that is
            orthogonal to them; None where Q_in is complete.
    """

    scale: Tensor
    input: Tensor | None = None
    output: Tensor | None = None
    rest: float | None = None

    @property
    def is_identity(self) -> bool:
        """Never: an entry that changes nothing is left out of a metric."""
        return False

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of the map."""
        return max(float(self.scale.abs().max()), self.rest or 0.0)

    def rotate(self, g: Tensor) -> Tensor:
        """Q_outᵀ g Q_in for g `[..., d_out, d_in]`."""
        g = g if self.input is None else g @ self.input
        return g if self.output is None else self.output.T @ g

    def rotate_back(self, z: Tensor) -> Tensor:
        """Q_out z Q_inᵀ."""
        z = z if self.input is None else z @ self.input.T
        return z if self.output is None else self.output @ z

    def whiten(self, g: Tensor) -> Tensor:
        """The map of g `[..., d_out, d_in]`."""
        if self.rest is None:
            return self.rotate_back(self.rotate(g) * self.scale)
        return g * self.rest + self.rotate_back(self.rotate(g) * (self.scale - self.rest))

    def whiten_(self, g: Tensor) -> None:
        """Put z into the memory of g `[n, d_out, d_in]`."""
        g.copy_(self.whiten(g))

    def parted(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """What is turned and scaled `[..., d_out, k]`, and what keeps its direction, scaled; their squares add up to ‖z‖²."""
        assert self.rest is not None and self.input is not None
        turned = g @ self.input
        outside = (g - turned @ self.input.T) * self.rest
        return (turned if self.output is None else self.output.T @ turned) * self.scale, outside

    def complete(self) -> Eigenbasis:
        """The same map with all of Q_in written out."""
        if self.rest is None or self.input is None:
            return self
        k, d = self.scale.shape[1], self.input.shape[0]
        others = torch.linalg.qr(self.input.double(), mode="complete").Q[:, k:].to(self.input)
        even = self.scale.new_full((self.scale.shape[0], d - k), self.rest)
        return Eigenbasis(torch.cat([self.scale, even], 1), torch.cat([self.input, others], 1), self.output)

    def scaled(self, factor: float) -> Eigenbasis:
        """The map `factor · z`."""
        return replace(self, scale=self.scale * factor, rest=None if self.rest is None else self.rest * factor)

    def inverse(self) -> Eigenbasis:
        """The map that undoes this one."""
        return replace(self, scale=1 / self.scale, rest=None if self.rest is None else 1 / self.rest)

    def variance(self) -> Tensor:
        """Variance of every entry of `whiten(z)` for z of unit white noise `[d_out, d_in]`: (Q_out²) scale² (Q_in²)ᵀ."""
        even = 0.0 if self.rest is None else self.rest**2
        squares = self.scale.square() - even
        squares = squares if self.input is None else squares @ self.input.square().T
        return (squares if self.output is None else self.output.square() @ squares) + even


@dataclass(frozen=True)
class Elementwise:
    """The map `z = scale ⊙ g`, one tensor of the parameter's shape per role."""

    scale: Mapping[str, Tensor]

    def scaled(self, factor: float) -> Elementwise:
        """The map `factor · z`."""
        return Elementwise({role: s * factor for role, s in self.scale.items()})

    def inverse(self) -> Elementwise:
        """The map that undoes this one."""
        return Elementwise({role: 1 / s for role, s in self.scale.items()})


Entry = Kronecker | Eigenbasis | Elementwise
Metric = Mapping[str, Entry]


def scale_metric(metric: Metric, factor: float) -> Metric:
    """The metric `factor · U` for a positive finite factor.

    Raises:
        ValueError: if the factor is not positive and finite.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"a metric can only be scaled by a positive finite factor, got {factor}")
    return {name: entry.scaled(factor) for name, entry in metric.items()}
