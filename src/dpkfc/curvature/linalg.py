"""Eigendecompositions of curvature factors that never return a NaN.

A factor may be zero, denormal, huge, or of a rank far below its size. Values are kept in float64 whatever the dtype of
the vectors, so that damping is added without rounding.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Eigen", "eigen_of_covariance", "eigen_of_rows", "eigh", "gram", "leading"]

_log = logging.getLogger(__name__)

# Gram eigenvalues below this fraction of the largest are rounding of the float32 rows they come from.
_RELATIVE_RANK = 1e-10
_ORTHONORMAL = 1e-6
_JITTERS = (1e-12, 1e-9, 1e-6)
# Below this size all pairs cost no more than the first few do.
_SMALL = 640
_COLUMNS = 128  # of a product RᵀR that are formed at a time on a CPU
_ITERATIONS = 8
_RESIDUAL = 1e-3  # of the mean eigenvalue: far below any damping that is a tenth of it
_CHECK = "check the model's output on the probe"


@dataclass(frozen=True)
class Eigen:
    """A positive semi-definite matrix `[d, d]` through its first eigenpairs and the trace of what they leave out.

    Attributes:
        vectors: orthonormal columns `[d, k]`.
        values: float64 `[k]`, descending, not negative.
        rest: sum of the d − k eigenvalues that are left out; 0 where they are zero. They are taken to be equal.
    """

    vectors: Tensor
    values: Tensor
    rest: float = 0.0

    @property
    def dim(self) -> int:
        """Size d of the matrix."""
        return self.vectors.shape[0]

    @property
    def rank(self) -> int:
        """Number of eigenpairs above zero among those that are held."""
        return int((self.values > 0).sum())

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.values.sum()) + self.rest

    @property
    def floor(self) -> float:
        """Mean of the eigenvalues that are left out; 0 where none is."""
        return self.rest / max(1, self.dim - self.values.numel())

    @property
    def spectrum(self) -> Tensor:
        """The values held, and where others are left out their mean in place of each, float64."""
        if self.rest == 0.0:
            return self.values
        return torch.cat([self.values, self.values.new_full((self.dim - self.values.numel(),), self.floor)])

    @property
    def mean(self) -> float:
        """Mean of all d eigenvalues."""
        return self.trace / self.dim

    def scaled(self, factor: float) -> Eigen:
        """The matrix times a factor that is not negative."""
        return replace(self, values=self.values * factor, rest=self.rest * factor)

    def dense(self) -> Tensor:
        """The matrix `[d, d]` in the dtype of the vectors."""
        matrix = (self.vectors * (self.values - self.floor).to(self.vectors.dtype)) @ self.vectors.T
        matrix.diagonal().add_(self.floor)
        return matrix


def eigh(matrix: Tensor) -> Eigen:
    """Eigenpairs of a symmetric positive semi-definite matrix.

    The matrix is brought to unit scale first and the values are scaled back in float64, so that denormal and huge
    entries behave as any others. float32 is tried first; where it fails or is not finite, float64; then float64 with
    jitter.

    Args:
        matrix: symmetric `[d, d]`, float32 or float64.

    Returns:
        All d eigenpairs, negative values (rounding) set to zero; the vectors in the dtype of the matrix.

    Raises:
        ValueError: not a square matrix, or an entry that is NaN or infinite.
        RuntimeError: no decomposition was found even with jitter.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"a factor must be a square matrix, got shape {tuple(matrix.shape)}")
    scale = float(matrix.abs().max()) if matrix.numel() else 0.0
    if not math.isfinite(scale):
        raise ValueError(f"a factor of size {matrix.shape[0]} contains NaN or infinity; {_CHECK}")
    if scale == 0.0:
        zeros = torch.zeros(matrix.shape[0], dtype=torch.float64, device=matrix.device)
        return Eigen(torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device), zeros)
    unit = matrix.double() / scale
    unit = (unit + unit.T) / 2
    values, vectors = _decomposed(unit, matrix.dtype)
    values = values.double().clamp(min=0).flip(0) * scale
    return Eigen(vectors.flip(1).to(matrix.dtype).contiguous(), values)


def _decomposed(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ascending eigenpairs of a matrix of unit scale (float64), by the first attempt that is finite."""
    attempts: list[tuple[torch.dtype, float]] = [(torch.float64, jitter) for jitter in (0.0, *_JITTERS)]
    if dtype != torch.float64:
        attempts.insert(0, (torch.float32, 0.0))
    for precision, jitter in attempts:
        attempt = unit.to(precision)
        if jitter:
            attempt = attempt + jitter * torch.eye(unit.shape[0], dtype=precision, device=unit.device)
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError as error:
            _log.debug("eigh of size %d in %s with jitter %g failed: %s", unit.shape[0], precision, jitter, error)
            continue
        if torch.isfinite(values).all() and torch.isfinite(vectors).all():
            return values, vectors
        _log.debug("eigh of size %d in %s with jitter %g is not finite", unit.shape[0], precision, jitter)
    raise RuntimeError(f"no eigendecomposition of a factor of size {unit.shape[0]} was found; use a larger probe")


def leading(matrix: Tensor, keep: int, start: Tensor | None = None) -> Eigen:
    """The first eigenpairs of a symmetric positive semi-definite matrix, and the trace of the others.

    Subspace iteration with a quarter more columns than asked for and a Rayleigh-Ritz step each time: d² · keep
    multiplications instead of d³. It stops when the residuals ‖C v − λ v‖ are small against the mean eigenvalue, at the
    latest after a few rounds. Pairs at the end of a flat spectrum may then be mixed among themselves; what they hold and
    what they leave out still add up to the trace. The start is fixed, so that the same matrix gives the same pairs.

    Args:
        matrix: symmetric `[d, d]`, float32 or float64, finite and not zero.
        keep: pairs k < d.
        start: columns `[d, m]` to begin with, such as the pairs of a matrix that has changed little since; m ≤ k.

    Source: Halko, Martinsson and Tropp (2011), algorithm 4.4.
    """
    dim, scale = matrix.shape[0], float(matrix.abs().max())
    unit = matrix / scale
    mean = float(unit.diagonal().double().sum()) / dim
    generator = torch.Generator().manual_seed(dim)
    drawn = torch.randn(dim, min(dim, keep + max(16, keep // 4)), generator=generator, dtype=torch.float64).to(unit.device)
    if start is not None and start.shape[0] == dim:
        drawn[:, : min(keep, start.shape[1])] = start[:, :keep]
    basis = torch.linalg.qr(drawn).Q
    for _ in range(_ITERATIONS):
        image = (unit @ basis.to(unit.dtype)).double()
        small = basis.T @ image
        values, rotation = torch.linalg.eigh((small + small.T) / 2)
        values, rotation = values.flip(0), rotation.flip(1)
        image, vectors = image @ rotation, basis @ rotation
        residuals = torch.linalg.vector_norm(image[:, :keep] - vectors[:, :keep] * values[:keep], dim=0)
        if float(residuals.max()) <= _RESIDUAL * mean:
            break
        basis = torch.linalg.qr(image).Q
    held = values[:keep].clamp(min=0) * scale
    rest = max(0.0, mean * dim * scale - float(held.sum()))
    return Eigen(_orthonormal(vectors[:, :keep]).to(matrix.dtype).contiguous(), held, rest)


def gram(rows: Tensor) -> Tensor:
    """RᵀR `[d, d]` of rows `[n, d]`.

    On a CPU by its blocks on and above the diagonal: little more than half the multiplications of a plain product.
    """
    d = rows.shape[1]
    if rows.is_cuda or d <= 2 * _COLUMNS:
        return rows.T @ rows
    out = rows.new_empty(d, d)
    for start in range(0, d, _COLUMNS):
        stop = min(d, start + _COLUMNS)
        torch.matmul(rows[:, start:stop].T, rows[:, start:], out=out[start:stop, start:])
        out[stop:, start:stop] = out[start:stop, stop:].T
    return out


def _is_wide(dim: int, keep: int | None) -> bool:
    """Whether the first pairs alone are cheaper than all of them."""
    return keep is not None and dim >= max(_SMALL, 4 * keep)


def eigen_of_rows(rows: Tensor, n_total: float, keep: int | None = None) -> Eigen:
    """Eigenpairs of RᵀR / n_total for rows R, without a d×d matrix when there are fewer rows than columns.

    With n < d the n×n Gram matrix RRᵀ is decomposed in float64: its eigenvectors u give those of the factor as
    Rᵀu / ‖Rᵀu‖. Pairs below 1e-10 of the largest eigenvalue are dropped (eigenvalue exactly zero), and the vectors are
    re-orthonormalised where rounding made them oblique.

    Args:
        rows: `[n, d]`, float32 or float64.
        n_total: positive divisor (often the number of examples, not n).
        keep: of a wide matrix only so many first pairs and the trace of the rest; None for all.

    Returns:
        k ≤ min(n, d) eigenpairs.

    Raises:
        ValueError: rows that are not a matrix, not finite, or a divisor that is not positive.
    """
    if rows.dim() != 2:
        raise ValueError(f"rows must be a matrix [n, d], got shape {tuple(rows.shape)}")
    if not n_total > 0:
        raise ValueError(f"the number of samples must be positive, got {n_total}")
    scale = float(rows.abs().max()) if rows.numel() else 0.0
    if not math.isfinite(scale):
        raise ValueError(f"rows of width {rows.shape[1]} contain NaN or infinity; {_CHECK}")
    if scale == 0.0:
        empty = torch.zeros(0, dtype=torch.float64, device=rows.device)
        return Eigen(rows.new_zeros(rows.shape[1], 0), empty)
    unit = rows.double() / scale
    factor = scale * scale / n_total
    if rows.shape[0] >= rows.shape[1]:
        return eigen_of_covariance(gram(unit).to(rows.dtype), factor, keep)
    products = gram(unit.T)
    pairs = leading(products, keep) if keep is not None and _is_wide(rows.shape[0], keep) else eigh(products)
    kept = pairs.values > _RELATIVE_RANK * pairs.values[0]
    vectors = unit.T @ pairs.vectors[:, kept]
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=0)
    return Eigen(_orthonormal(vectors).to(rows.dtype), pairs.values[kept] * factor, pairs.rest * factor)


def eigen_of_covariance(
    covariance: Tensor, factor: float, keep: int | None = None, start: Tensor | None = None
) -> Eigen:
    """Eigenpairs of `factor · covariance`, the product formed in float64 on the eigenvalues alone.

    Args:
        covariance: symmetric positive semi-definite `[d, d]`.
        factor: not negative.
        keep: of a wide matrix only so many first pairs and the trace of the rest; None for all.
        start: see `leading`.
    """
    if keep is not None and _is_wide(covariance.shape[0], keep):
        largest = float(covariance.abs().max())
        if math.isfinite(largest) and largest > 0:
            return leading(covariance, keep, start).scaled(factor)
    return eigh(covariance).scaled(factor)


def _orthonormal(vectors: Tensor) -> Tensor:
    """Columns made orthonormal where they are not, in their order: the first (largest) ones move least."""
    overlap = vectors.T @ vectors
    overlap.diagonal().sub_(1)
    if float(overlap.abs().max()) <= _ORTHONORMAL:
        return vectors
    return torch.linalg.qr(vectors).Q
