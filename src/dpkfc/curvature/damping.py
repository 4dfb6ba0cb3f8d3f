"""Damping and matrix roots: from an undamped factor to one side of a metric.

Relative damping (default) gives each factor its own multiple of the identity,

    A + ρ · tr(A)/d_A · I        and        G + ρ · tr(G)/d_G · I.

This is the split of Martens and Grosse of one damping λ over the two factors. They add π√λ to A
and √λ/π to G with π² = (tr(A)/d_A) / (tr(G)/d_G), which balances the two error terms. For
λ = ρ² · (tr(A)/d_A) · (tr(G)/d_G):

    π √λ = ρ √( (tr A/d_A)² )    = ρ · tr(A)/d_A
    √λ/π = ρ √( (tr G/d_G)² )    = ρ · tr(G)/d_G.

So ρ has no unit: it means the same for every layer, loss scale and input scale.

Absolute damping follows the DP-KFC paper (Algorithm 1): π added to the factors and γ inside the
root. The sides are (A + πI + γI)^(−p) and (G + πI + γI)^(−p).

Source: Martens and Grosse (2015), section 6.3; DP-KFC, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc._checks import (
    check_in_range,
    check_not_negative,
    check_one_of,
    check_optional_integer,
    check_positive,
)
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor, is_empty
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank, Side


@dataclass(frozen=True, kw_only=True)
class Damping:
    """The number added to a factor, and the root taken of the sum.

    Attributes:
        value: ρ (relative) or π (absolute), positive.
        mode: relative or absolute.
        gamma: γ of the absolute mode, not negative.
        exponent: p in (0, 1/2]; a side is (factor + damping)^(−p). 1/2 is full whitening.
        rank_tolerance: eigenvalues below this fraction of the damping are not kept in a low-rank
            side.
        max_rank: eigenpairs k kept of a side at least 4k wide. Narrower sides keep all that matter,
            and so do all sides with None.
        tail_mass: fraction of the trace that may be dropped, 0 for none. A side keeps the fewest
            eigenpairs that hold the rest.
    """

    value: float = 0.1
    mode: str = "relative"
    gamma: float = 0.0
    exponent: float = 0.5
    rank_tolerance: float = 1e-2
    max_rank: int | None = 32
    tail_mass: float = 0.0

    def __post_init__(self) -> None:
        check_positive("damping", self.value)
        check_one_of("damping_mode", self.mode, ("relative", "absolute"))
        check_not_negative("gamma", self.gamma)
        if self.gamma > 0 and self.mode == "relative":
            raise ValueError(
                f"gamma={self.gamma} is read only with damping_mode='absolute'; set gamma=0"
            )
        check_in_range("exponent", self.exponent, "(0, 0.5]")
        check_in_range("rank_tolerance", self.rank_tolerance, "[0, 1)")
        check_in_range("tail_mass", self.tail_mass, "[0, 1)")
        check_optional_integer("max_rank", self.max_rank, 1)

    def shift(self, factor: Factor) -> float:
        """Return the number added to every eigenvalue.

        The number is 0 only for an empty factor under relative damping.
        """
        if self.mode == "absolute":
            return self.value + self.gamma
        if is_empty(factor):
            return 0.0
        return self.value * factor.mean

    def root(self, values: Tensor, shift: float) -> Tensor:
        """Return (values + shift)^(−p), float64."""
        damped = values.double() + shift
        return damped.pow(-self.exponent)


def damp_side(
    factor: Factor,
    damping: Damping,
    dtype: torch.dtype,
    *,
    widest_dense: int = 4096,
) -> Side:
    """Return the side (factor + damping)^(−p) of a metric.

    A factor with few eigenvalues that matter (kept ones ≤ d/2, or d > widest_dense) becomes
    `LowRank`. Eigenvalues below `rank_tolerance` times the damping, and those beyond the first
    `max_rank` of a wide side, are replaced by their mean, which keeps the trace. The metric IS then
    that map: norms, sums and noise all use the same one, so no guarantee rests on the
    approximation. Otherwise the side is `Dense` and exact. An empty factor under relative damping
    (a LoRA adapter at its start, a dead layer) gives the identity of unit scale.

    Args:
        factor: undamped.
        damping: the number to add and the root to take.
        dtype: of the resulting side.
        widest_dense: no d×d matrix is formed for a wider side.
    """
    shift = damping.shift(factor)
    if shift == 0.0:
        return Identity()
    match factor:
        case IsotropicFactor():
            return Identity((factor.mean + shift) ** -damping.exponent)
        case DiagonalFactor():
            return Diagonal(damping.root(factor.values, shift).to(dtype))
        case Eigen():
            kept = _count_kept_pairs(factor, damping, shift)
            return _eigen_side(factor, damping, kept, dtype, widest_dense)


def _count_kept_pairs(factor: Eigen, damping: Damping, shift: float) -> int:
    """Return the number of eigenpairs that a side keeps."""
    values = factor.values
    kept = factor.rank
    if damping.rank_tolerance:
        is_large = values >= damping.rank_tolerance * shift
        kept = int(is_large.sum())
    if damping.max_rank is not None and factor.dim >= 4 * damping.max_rank:
        kept = min(kept, damping.max_rank)
    if damping.tail_mass:
        left = factor.trace - values.cumsum(0)
        is_needed = left > damping.tail_mass * factor.trace
        needed = 1 + int(is_needed.sum())
        kept = min(kept, needed)
    return kept


def _eigen_side(
    factor: Eigen, damping: Damping, kept: int, dtype: torch.dtype, widest_dense: int
) -> Side:
    values = factor.values
    vectors = factor.vectors
    shift = damping.shift(factor)
    if 0 < kept and factor.dim < 2 * kept and factor.dim <= widest_dense:
        # A dense side uses all stored pairs.
        tail = (factor.floor + shift) ** -damping.exponent
        scale = damping.root(values, shift)
        above = scale - tail
        above = above.to(vectors.dtype)
        root = (vectors * above) @ vectors.T
        root.diagonal().add_(tail)
        root = (root + root.T) / 2
        norm = float(scale.max())
        if len(scale) < factor.dim:
            norm = max(tail, norm)
        return Dense(root.to(dtype), norm)
    dropped = float(values[kept:].sum()) + factor.rest
    mean = dropped / max(1, factor.dim - kept)
    tail = (mean + shift) ** -damping.exponent
    if kept == 0:
        return Identity(tail)
    scale = damping.root(values[:kept], shift)
    vectors = vectors[:, :kept].to(dtype)
    return LowRank(vectors.contiguous(), scale.to(dtype), tail)


def elementwise_scale(
    factor: Factor, damping: Damping, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return (v + damping)^(−p) in a parameter's shape, for the second moment v of its gradient.

    An empty v gives ones.
    """
    shift = damping.shift(factor)
    if shift == 0.0:
        return torch.ones(shape, dtype=dtype, device=factor.values.device)
    scale = damping.root(factor.values, shift)
    scale = scale.to(dtype)
    scale = scale.expand(math.prod(shape))
    return scale.reshape(shape).contiguous()


def condition_numbers(factor: Factor, damping: Damping) -> tuple[float, float]:
    """Return largest ÷ smallest eigenvalue before and after damping; infinite if singular.

    The mean of the dropped eigenvalues counts as the smallest, as in the side.
    """
    values = factor.values
    largest = 0.0
    smallest = 0.0
    if values.numel():
        largest = float(values.max())
        smallest = float(values.min())
    if isinstance(factor, Eigen) and values.numel() < factor.dim:
        smallest = factor.floor
    shift = damping.shift(factor)
    before = largest / smallest if smallest > 0 else math.inf
    after = (largest + shift) / (smallest + shift) if shift > 0 else 1.0
    return before, after
