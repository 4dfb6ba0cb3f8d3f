"""Metrics: the preconditioner maps, and how gradients are mapped by them.

A metric assigns each layer a linear map `z = U_out g U_in` of its per-example gradient. Norms are
taken of z, the clipped sum is mapped once, and noise is added in the coordinates of z. A layer
without an entry keeps the identity. Each entry maps a matrix (`apply`) or gradients by role
(`apply_roles`), inverts and scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dpkfc.linalg.sides import Diagonal, Identity, LowRank, Side
from dpkfc.tensors import NamedTensors, Tensors

Shape = tuple[int, ...]
_Scaled = TypeVar("_Scaled", bound="_ScaledEntry")


class _Entry:
    """What all entries share.

    Attributes:
        is_elementwise: the map is one of gradients by role, and otherwise one of a matrix.
    """

    is_elementwise: ClassVar[bool] = False

    @property
    def sides(self) -> Kronecker | None:
        """Return the entry if it has a map of inputs and one of outputs, else None."""
        return None

    @property
    def is_identity(self) -> bool:
        """Return whether the map changes nothing; such an entry is mostly left out of a metric."""
        return False

    @property
    def scales(self) -> NamedTensors:
        """Return the scale of every entry by role; empty for a Kronecker product."""
        return {}

    def apply_roles(self, gradients: Tensors) -> Tensors:
        """Return the map of gradients by role; a map of matrices returns them as they are."""
        return gradients

    def compact(self: Any) -> Any:
        """Return the same map up to rounding, in a form with cheaper norms where one is known."""
        return self


class _ScaledEntry(_Entry):
    """An entry that is determined by its scales: a function of them gives another such entry."""

    def _map_scales(self: _Scaled, function: Callable[[Any], Any]) -> _Scaled:
        raise NotImplementedError

    def scale_by(self: _Scaled, factor: float) -> _Scaled:
        """Return the map `factor · z`."""
        return self._map_scales(lambda scale: scale * factor)

    def inverse(self: _Scaled) -> _Scaled:
        """Return the map that undoes this one."""
        return self._map_scales(lambda scale: 1 / scale)


@dataclass(frozen=True)
class Kronecker(_Entry):
    """The map `z = output · g · input` of a matrix-shaped gradient g `[..., d_out, d_in]`.

    `input` acts on the input features (the homogeneous coordinate last), `output` on the output
    features.
    """

    input: Side = field(default_factory=Identity)
    output: Side = field(default_factory=Identity)

    @property
    def sides(self) -> Kronecker:
        """Return the product itself, which is a map of inputs and one of outputs."""
        return self

    @property
    def is_identity(self) -> bool:
        """Return whether the map changes nothing."""
        return self.input == Identity() and self.output == Identity()

    @property
    def operator_norm(self) -> float:
        """Return the operator norm of the map."""
        return self.input.operator_norm * self.output.operator_norm

    def merge_scalar(self) -> Kronecker:
        """Return the same map, with a factor of the output side moved to a cheap input side.

        Rows of output gradients, or whole gradients, are then not copied for a multiplication.
        """
        if not isinstance(self.output, Identity) or self.output.factor == 1.0:
            return self
        if not isinstance(self.input, LowRank | Diagonal):
            return self
        return Kronecker(self.input.scale_by(self.output.factor))

    def apply(self, g: Tensor) -> Tensor:
        """Return z for g `[..., d_out, d_in]`."""
        sides = self.merge_scalar()
        mapped = sides.input.apply(g)
        return sides.output.apply_left(mapped)

    def map_factors(self, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return v, c and s such that s ⊙ v cᵀ is the map of u aᵀ up to a rotation, s None for 1.

        Args:
            u: `[..., d_out]`.
            a: `[..., d_in]`.
        """
        return self.output.apply(u), self.input.apply(a), None

    def scale_by(self, factor: float) -> Kronecker:
        """Return the map `factor · z`."""
        return replace(self, output=self.output.scale_by(factor))

    def inverse(self) -> Kronecker:
        """Return the map that undoes this one."""
        into = self.input.inverse()
        return Kronecker(into, self.output.inverse())

    def variance(self) -> Tensor:
        """Return the variance of every entry of `apply(z)` for z of unit white noise.

        It broadcasts to `[d_out, d_in]`.
        """
        output = self.output.square_diagonal()
        into = self.input.square_diagonal()
        # An identity lies on no device.
        if isinstance(self.output, Identity):
            output = output.to(into.device)
        into = into.to(output.device)
        return torch.outer(output, into)


@dataclass(frozen=True)
class Eigenbasis(_ScaledEntry):
    """The symmetric map `z = Q_out (scale ⊙ (Q_outᵀ g Q_in)) Q_inᵀ` of g `[..., d_out, d_in]`.

    It is what the root of a Kronecker product becomes when its eigenvalues are changed one by one
    (a floor on the product). Without rotations it is any diagonal map. Norms do not factor over
    several positions, so gradients are materialised.

    Attributes:
        scale: `[d_out, d_in]`, positive.
        input: Q_in `[d_in, d_in]` with orthonormal columns, None for the identity. The homogeneous
            coordinate is the last row.
        output: Q_out `[d_out, d_out]`, None for the identity.
        rest: the one scale, positive, of the orthogonal complement where Q_in has only k columns
            `[d_in, k]` and scale is `[d_out, k]`. None where Q_in is complete.
    """

    scale: Tensor
    input: Tensor | None = None
    output: Tensor | None = None
    rest: float | None = None

    # Cached: a GPU is read once a metric and not in every step.
    @cached_property
    def operator_norm(self) -> float:
        """Return the operator norm of the map."""
        largest = float(self.scale.abs().max())
        return max(largest, self._complement_scale)

    @property
    def _complement_scale(self) -> float:
        """Return the scale of the orthogonal complement, 0 where Q_in is complete."""
        return self.rest or 0.0

    def rotate(self, g: Tensor) -> Tensor:
        """Return Q_outᵀ g Q_in for g `[..., d_out, d_in]`."""
        if self.input is not None:
            g = g @ self.input
        if self.output is not None:
            g = self.output.T @ g
        return g

    def rotate_back(self, z: Tensor) -> Tensor:
        """Return Q_out z Q_inᵀ."""
        if self.input is not None:
            z = z @ self.input.T
        if self.output is not None:
            z = self.output @ z
        return z

    def apply(self, g: Tensor) -> Tensor:
        """Return the map of g `[..., d_out, d_in]`."""
        if self.rest is None:
            scaled = self.rotate(g) * self.scale
            return self.rotate_back(scaled)
        excess = self.scale - self.rest
        scaled = self.rotate(g) * excess
        return g * self.rest + self.rotate_back(scaled)

    @property
    def scales(self) -> NamedTensors:
        """Return the scale of every entry by role; the matrix is "weight"."""
        return {"weight": self.scale}

    def replace_scales(self, scales: NamedTensors) -> Eigenbasis:
        """Return the map with other scales, laid out as `scales`."""
        return replace(self, scale=scales["weight"])

    def map_factors(self, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return v, c and s such that s ⊙ v cᵀ is the map of u aᵀ up to a rotation.

        Args:
            u: `[..., d_out]`.
            a: `[..., d_in]`.
        """
        whole = self.complete_basis()
        if whole.output is not None:
            u = u @ whole.output
        if whole.input is not None:
            a = a @ whole.input
        return u, a, whole.scale.to(u)

    def compact(self) -> Entry:
        """Return the same map up to rounding, in a form whose norms cost less.

        A floor on the eigenvalues gives most input directions one common scale. If no direction has
        another scale, the map is a multiple of the identity. With up to a quarter of the directions
        above the floor, the map rotates to these alone.
        """
        if self.input is None or self.rest is not None:
            return self
        largest = float(self.scale.max())
        is_active = (self.scale < largest).any(0)
        active = torch.nonzero(is_active).flatten()
        if not len(active):
            return Kronecker(Identity(largest))
        if 4 * len(active) > self.scale.shape[1]:
            return self
        scale = self.scale[:, active]
        basis = self.input[:, active].contiguous()
        return Eigenbasis(scale, basis, self.output, largest)

    def split_low_rank(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of z along the columns of Q_in, and its orthogonal complement.

        The first is rotated, `[..., d_out, k]`. The squares of both add up to ‖z‖².
        """
        rotated, complement = self.split_inputs(g)
        if self.output is not None:
            rotated = self.output.T @ rotated
        return rotated * self.scale, complement * self._complement_scale

    def split_inputs(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates of rows a `[..., d_in]` in Q_in, and what lies outside of it."""
        assert self.input is not None
        rotated = a @ self.input
        return rotated, a - rotated @ self.input.T

    def complete_basis(self) -> Eigenbasis:
        """Return the same map with all of Q_in written out."""
        if self.rest is None or self.input is None:
            return self
        d_out, k = self.scale.shape
        complete, _ = torch.linalg.qr(self.input.double(), mode="complete")
        complement = complete[:, k:].to(self.input)
        basis = torch.cat([self.input, complement], 1)
        rest = self.scale.new_full((d_out, complement.shape[1]), self.rest)
        scale = torch.cat([self.scale, rest], 1)
        return Eigenbasis(scale, basis, self.output)

    def _map_scales(self, function: Callable[[Any], Any]) -> Eigenbasis:
        rest = None
        if self.rest is not None:
            rest = function(self.rest)
        return replace(self, scale=function(self.scale), rest=rest)

    def variance(self) -> Tensor:
        """Return the variance of every entry of `apply(z)` for z of unit white noise.

        It is (Q_out²) scale² (Q_in²)ᵀ, `[d_out, d_in]`.
        """
        complement = self._complement_scale**2
        squares = self.scale.square() - complement
        if self.input is not None:
            squares = squares @ self.input.square().T
        if self.output is not None:
            squares = self.output.square() @ squares
        return squares + complement


@dataclass(frozen=True)
class Elementwise(_ScaledEntry):
    """The map `z = scale ⊙ g`, one tensor of the parameter's shape per role."""

    scale: NamedTensors
    is_elementwise: ClassVar[bool] = True

    @property
    def scales(self) -> NamedTensors:
        """Return the scale of every entry by role."""
        return self.scale

    def replace_scales(self, scales: NamedTensors) -> Elementwise:
        """Return the map with other scales, laid out as `scales`."""
        return Elementwise(scales)

    def apply(self, g: Tensor) -> Tensor:
        """Refuse to map a matrix.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "this layer needs a Kronecker metric, but the preconditioner holds an elementwise one"
        )

    def apply_roles(self, gradients: Tensors) -> Tensors:
        """Return the map of gradients by role. A role without a scale keeps its gradient."""
        mapped = dict(gradients)
        for role in gradients.keys() & self.scale.keys():
            mapped[role] = gradients[role] * self.scale[role]
        return mapped

    def _map_scales(self, function: Callable[[Any], Any]) -> Elementwise:
        scales = {role: function(scale) for role, scale in self.scale.items()}
        return Elementwise(scales)


Entry = Kronecker | Eigenbasis | Elementwise
Metric = Mapping[str, Entry]


def scale_metric(metric: Metric, factor: float) -> Metric:
    """Return the metric `factor · U` for a positive finite factor.

    Raises:
        ValueError: the factor is not positive and finite.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"a metric can only be scaled by a positive finite factor, got {factor}")
    return {name: entry.scale_by(factor) for name, entry in metric.items()}
