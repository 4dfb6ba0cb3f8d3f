"""Eigendecompositions of curvature factors that never return a NaN.

A factor may be zero, denormal, huge, or of a rank far below its size. Values are kept in float64
whatever the dtype of the vectors, so that damping is added without rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.linalg import vector_norm

_log = logging.getLogger(__name__)

# Gram eigenvalues below this fraction of the largest are rounding of the float32 rows they come
# from.
_RELATIVE_RANK = 1e-10
_ORTHONORMAL = 1e-6
_JITTERS = (0.0, 1e-12, 1e-9, 1e-6)
# Below this size all pairs cost no more than the first few do.
_SMALL = 640
_COLUMNS = 128  # of RᵀR formed at a time on a CPU
_ITERATIONS = 8
_FOLLOWING = 2  # rounds from the pairs of an earlier refresh
# Largest residual as a fraction of the mean eigenvalue, far below a damping of a tenth of that
# mean.
_RESIDUAL = 1e-3
_CHECK = "check the model's output on the probe"


class FactorForm:
    """What the forms of a factor share.

    Attributes:
        dim: size d.
        trace: sum of the eigenvalues.
        values: float64, the eigenvalues that are stored.
    """

    @property
    def rank(self: Any) -> int:
        """Number of stored eigenvalues above zero."""
        return int((self.values > 0).sum())

    @property
    def mean(self: Any) -> float:
        """Mean of all d eigenvalues."""
        return float(self.trace / self.dim)

    @property
    def spectrum(self: Any) -> Any:
        """The stored eigenvalues, float64."""
        return self.values


@dataclass(frozen=True)
class Eigen(FactorForm):
    """A positive semi-definite matrix `[d, d]` as its first eigenpairs and the trace of the rest.

    Attributes:
        vectors: orthonormal columns `[d, k]`.
        values: float64 `[k]`, descending, not negative.
        rest: sum of the d − k other eigenvalues, which are taken to be equal.
    """

    vectors: Tensor
    values: Tensor
    rest: float = 0.0

    @property
    def dim(self) -> int:
        """Size d of the matrix."""
        return self.vectors.shape[0]

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.values.sum()) + self.rest

    @property
    def floor(self) -> float:
        """Mean of the other eigenvalues; 0 without any."""
        missing = self.dim - self.values.numel()
        return self.rest / max(1, missing)

    @property
    def spectrum(self) -> Tensor:
        """The stored values and the mean of the others for each of them, float64."""
        if self.rest == 0.0:
            return self.values
        missing = self.dim - self.values.numel()
        others = self.values.new_full((missing,), self.floor)
        return torch.cat([self.values, others])

    def scale_by(self, factor: float) -> Eigen:
        """Return the matrix times a factor that is not negative."""
        return replace(self, values=self.values * factor, rest=self.rest * factor)

    def first(self, keep: int) -> Eigen:
        """Return the first pairs, with the sum of the others in `rest`."""
        rest = self.rest + float(self.values[keep:].sum())
        return Eigen(self.vectors[:, :keep].contiguous(), self.values[:keep], rest)


def eigh(matrix: Tensor) -> Eigen:
    """Return the eigenpairs of a symmetric positive semi-definite matrix.

    The matrix is brought to unit scale first and the values are scaled back in float64, so that
    denormal and huge entries behave as any others. float32 is tried first, then float64, then
    float64 with jitter, until a result is finite.

    Args:
        matrix: symmetric `[d, d]`, float32 or float64.

    Returns:
        All d eigenpairs, negative values (rounding) set to zero; vectors in the dtype of the
        matrix.

    Raises:
        ValueError: an entry that is NaN or infinite.
        RuntimeError: no decomposition was found even with jitter.
    """
    dim = matrix.shape[0]
    scale = largest_entry(matrix)
    if not math.isfinite(scale):
        raise ValueError(f"a factor of size {dim} contains NaN or infinity; {_CHECK}")
    if scale == 0.0:
        basis = torch.eye(dim).to(matrix)
        zeros = torch.zeros(dim, dtype=torch.float64)
        return Eigen(basis, zeros.to(matrix.device))
    unit = matrix.double() / scale
    unit = (unit + unit.T) / 2
    # Ascending values `[d]` and columns `[d, d]`.
    values, vectors = _decompose(unit, matrix.dtype)
    values = values.double()
    values.clamp_(min=0)
    vectors = vectors.flip(1)
    vectors = vectors.to(matrix.dtype)
    return Eigen(vectors.contiguous(), values.flip(0) * scale)


def _decompose(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ascending eigenpairs of a float64 matrix of unit scale: the first finite result."""
    dim = unit.shape[0]
    attempts = [(torch.float64, jitter) for jitter in _JITTERS]
    if dtype != torch.float64:
        attempts.insert(0, (torch.float32, 0.0))
    for precision, jitter in attempts:
        attempt = unit.to(precision, copy=True)
        attempt.diagonal().add_(jitter)
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError as error:
            text = "eigh of size %d in %s with jitter %g failed: %s"
            _log.debug(text, dim, precision, jitter, error)
            continue
        if torch.isfinite(values).all() and torch.isfinite(vectors).all():
            return values, vectors
        _log.debug("eigh of size %d in %s with jitter %g is not finite", dim, precision, jitter)
    raise RuntimeError(
        f"no eigendecomposition of a factor of size {dim} was found; use a larger probe"
    )


def decompose_leading(matrix: Tensor, keep: int, start: Tensor | None = None) -> Eigen:
    """Return the first eigenpairs of a symmetric positive semi-definite matrix.

    Args:
        matrix: symmetric `[d, d]`, float32 or float64, finite and not zero.
        keep: pairs k < d.
        start: see `_iterate`.
    """
    scale = largest_entry(matrix)
    unit = matrix / scale
    trace = float(unit.diagonal().double().sum())
    pairs = _iterate(lambda x: unit @ x, matrix.shape[0], trace, keep, start, matrix)
    return pairs.scale_by(scale)


def _iterate(
    product: Callable[[Tensor], Tensor],
    dim: int,
    trace: float,
    keep: int,
    start: Tensor | None,
    like: Tensor,
) -> Eigen:
    """Return the first eigenpairs of C by subspace iteration.

    A quarter more columns than wanted, and a Rayleigh-Ritz step each time. The iteration stops when
    the residuals ‖C v − λ v‖ are small against the mean eigenvalue, at the latest after a few
    rounds. Pairs at the end of a flat spectrum may then be mixed among themselves. Their values and
    `rest` still add up to the trace. The random columns are fixed, so the same matrix gives the
    same pairs.

    Args:
        product: maps columns X `[d, m]` to C X; C is symmetric, positive semi-definite and of
            about unit scale.
        dim: d.
        trace: of C.
        keep: pairs k < d.
        start: pairs `[d, m]` of an earlier, similar matrix, m ≤ k. The first product then shows
            whether they have moved, and one more round follows them if they have.
        like: the dtype and device of products and vectors.

    Source: Halko, Martinsson and Tropp (2011), algorithm 4.4; one round for each change of the
    matrix as in SOAP (Vyas et al. 2024).
    """
    generator = torch.Generator().manual_seed(dim)
    columns = min(dim, keep + max(16, keep // 4))
    basis = torch.randn(dim, columns, generator=generator, dtype=torch.float64)
    basis = basis.to(like.device)
    rounds = _ITERATIONS
    if start is not None:
        known = start[:, :keep]
        basis[:, : known.shape[1]] = known
        rounds = _FOLLOWING
    mean = trace / dim
    for _ in range(rounds):
        basis = torch.linalg.qr(basis).Q
        image = product(basis.to(like.dtype)).double()
        small = basis.T @ image
        small = (small + small.T) / 2
        values, rotation = torch.linalg.eigh(small)
        # The largest eigenvalues come first.
        rotation = rotation.flip(1)
        wanted = values.flip(0)[:keep]
        vectors = basis @ rotation[:, :keep]
        basis = image @ rotation
        difference = basis[:, :keep] - vectors * wanted
        residuals = vector_norm(difference, dim=0)
        if residuals.max() <= _RESIDUAL * mean:
            break
    kept = wanted.clamp(min=0)
    rest = trace - float(kept.sum())
    vectors = _orthonormalize(vectors)
    vectors = vectors.to(like.dtype)
    return Eigen(vectors.contiguous(), kept, max(0.0, rest))


def gram(rows: Tensor) -> Tensor:
    """Return RᵀR `[d, d]` of rows `[n, d]`.

    On a CPU only the blocks on and above the diagonal are multiplied, little more than half of all.
    """
    d = rows.shape[1]
    if rows.is_cuda or d <= 2 * _COLUMNS:
        return rows.T @ rows
    out = rows.new_empty(d, d)
    for start in range(0, d, _COLUMNS):
        stop = min(d, start + _COLUMNS)
        columns = rows[:, start:stop]
        part = out[start:stop]
        torch.matmul(columns.T, rows[:, start:], out=part[:, start:])
        out[stop:, start:stop] = part[:, stop:].T
    return out


def eigen_of_rows(rows: Tensor, keep: int | None = None, start: Tensor | None = None) -> Eigen:
    """Return eigenpairs of RᵀR for finite rows R, without a d×d matrix if n < d.

    With n < d the n×n Gram matrix RRᵀ is decomposed in float64: its eigenvectors u give the
    factor's as Rᵀu / ‖Rᵀu‖. Pairs below 1e-10 of the largest eigenvalue are dropped (eigenvalue
    exactly zero). Vectors that rounding made oblique are orthonormalised again.

    Args:
        rows: `[n, d]`, float32 or float64.
        keep: number of first pairs of a wide matrix, besides the trace of the rest; None for all.
        start: pairs of an earlier, similar matrix; see `_iterate`. With them not even the products
            of the rows are formed.

    Returns:
        k ≤ min(n, d) eigenpairs.
    """
    n, d = rows.shape
    scale = largest_entry(rows)
    if scale == 0.0:
        basis = rows.new_zeros(d, 0)
        return Eigen(basis, basis.new_zeros(0, dtype=torch.float64))
    factor = scale * scale
    if start is not None and _is_few(keep, d):
        own = rows / scale
        trace = float(own.double().square().sum())
        pairs = _iterate(lambda x: own.T @ (own @ x), d, trace, keep, start, rows)
        return pairs.scale_by(factor)
    unit = rows.double() / scale
    if n >= d:
        covariance = gram(unit)
        covariance = covariance.to(rows.dtype)
        return eigen_of_covariance(covariance, keep, start).scale_by(factor)
    products = gram(unit.T)
    pairs = eigen_of_covariance(products, keep)
    least = _RELATIVE_RANK * pairs.values[0]
    kept = pairs.values > least
    vectors = unit.T @ pairs.vectors[:, kept]
    vectors = vectors / vector_norm(vectors, dim=0)
    vectors = _orthonormalize(vectors)
    pairs = Eigen(vectors.to(rows.dtype), pairs.values[kept], pairs.rest)
    return pairs.scale_by(factor)


def eigen_of_covariance(
    covariance: Tensor, keep: int | None = None, start: Tensor | None = None
) -> Eigen:
    """Return eigenpairs of a covariance.

    Args:
        covariance: symmetric positive semi-definite `[d, d]`.
        keep: number of first pairs of a wide matrix, besides the trace of the rest; None for all.
        start: see `decompose_leading`.
    """
    dim = covariance.shape[0]
    if not _is_few(keep, dim):
        return eigh(covariance)
    # Below a size all pairs cost no more than the first few, unless these are nearly known.
    if start is not None or dim >= _SMALL:
        if 0 < largest_entry(covariance) < math.inf:
            return decompose_leading(covariance, keep, start)
    return eigh(covariance).first(keep)


def _is_few(keep: int | None, dim: int) -> TypeGuard[int]:
    """Return whether a matrix is so wide that the mean of the other pairs stands for them."""
    return keep is not None and dim >= 4 * keep


def _orthonormalize(vectors: Tensor) -> Tensor:
    """Return orthonormal columns, in their order: the first (largest) ones move least."""
    overlap = vectors.T @ vectors
    overlap.diagonal().sub_(1)
    if float(overlap.abs().max()) <= _ORTHONORMAL:
        return vectors
    return torch.linalg.qr(vectors).Q


def largest_entry(rows: Tensor) -> float:
    """Return the largest absolute entry, without a copy; NaN if there is one."""
    if not rows.numel():
        return 0.0
    low, high = torch.aminmax(rows)
    return float(torch.maximum(-low, high))
