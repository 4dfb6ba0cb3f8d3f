"""Undamped curvature factors in the per-example scale, and their accumulation from rows that arrive in pieces.

For a layer with inputs a and output gradients b at T positions:

    expand   A = 1/N Σ_n Σ_t a aᵀ        G = 1/(N·T) Σ_n Σ_t b bᵀ
    reduce   A = 1/N Σ_n ā āᵀ            G = 1/N Σ_n b̄ b̄ᵀ         ā = mean_t a (its homogeneous 1 stays 1), b̄ = Σ_t b

so that tr(A)·tr(G) is E‖g‖² of a per-example gradient if a and b were independent. `b` is the gradient of each
example's own loss, so neither factor depends on the probe's size or on a loss reduction. Groups of a convolution are
averaged. Padded positions, where the probe says which ones they are, count neither in a sum nor in T.

An embedding has the diagonal factor of how often its rows are read. A weight that is an embedding table and a head at once
has a gradient `[V, d]` from both uses; its factor is the sum of both contributions to E gᵀg over the d columns,

    1/N Σ_n ( Σ_t ‖b_t‖² a_t a_tᵀ  +  Σ_s c_s c_sᵀ )

with the head's inputs a and output gradients b and the gradients c at the embedding's output; the rows V stay isotropic.

`layers` forms the rows of each kind of layer.

Source: Martens and Grosse (2015); Eschenhagen et al. (2023) for expand and reduce.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.linalg.blocks import Outer

# --------------------------------------------------------------------------------------------------
# Eigendecompositions of curvature factors that never return a NaN.
#
# A factor may be zero, denormal, huge, or of a rank far below its size. Values are kept in float64
# whatever the dtype of the vectors, so that damping is added without rounding.

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


def decompose_leading(matrix: Tensor, keep: int, start: Tensor | None = None) -> Eigen:
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
    pairs = decompose_leading(products, keep) if keep is not None and _is_wide(rows.shape[0], keep) else eigh(products)
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
            return decompose_leading(covariance, keep, start).scaled(factor)
    return eigh(covariance).scaled(factor)


def _orthonormal(vectors: Tensor) -> Tensor:
    """Columns made orthonormal where they are not, in their order: the first (largest) ones move least."""
    overlap = vectors.T @ vectors
    overlap.diagonal().sub_(1)
    if float(overlap.abs().max()) <= _ORTHONORMAL:
        return vectors
    return torch.linalg.qr(vectors).Q


# --------------------------------------------------------------------------------------------------
# The structures of a factor: its eigenpairs (`linalg.Eigen`), a diagonal, or a multiple of the
# identity.


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


# --------------------------------------------------------------------------------------------------
# What several layers have in common, formed once.
#
# Layers that read the same tensor (queries, keys and values) have the same input factor. Equal rows
# are noticed as they arrive, so that their product and its eigenpairs are formed once. Nothing is
# approximated by it.

_REMEMBERED = 1 << 24  # entries of a tensor that may be kept a little longer to see whether the next layer reads it too


class FactorCache:
    """What consecutive layers have in common, formed once.

    It remembers the last two tensors of rows, their products and the last eigendecompositions. Equality is by content,
    so what is shared is what would have been computed.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._products: list[tuple[Tensor, float, Tensor]] = []
        self._eigen: list[tuple[Tensor, Any, Eigen]] = []

    def rows(self, rows: Tensor) -> Tensor:
        """These rows, as the tensor that was seen before where that is equal."""
        for held in self._rows:
            if held.shape == rows.shape and held.dtype == rows.dtype and torch.equal(held, rows):
                return held
        if rows.numel() <= _REMEMBERED:
            self._rows = [rows, *self._rows[:1]]
        return rows

    def product(self, rows: Tensor, scale: float, make: Callable[[], Tensor]) -> Tensor:
        """What was made of these rows (the same tensor) in this scale, or what `make` makes."""
        for held, of, product in self._products:
            if held is rows and of == scale:
                return product
        made = make()
        if any(rows is held for held in self._rows):
            self._products = [(rows, scale, made), *self._products[:1]]
        return made

    def eigen(self, matrix: Tensor, key: Any, make: Callable[[], Eigen]) -> Eigen:
        """The decomposition of an equal matrix under an equal key, or what `make` makes."""
        for held, of, eigen in self._eigen:
            if of == key and held.shape == matrix.shape and held.dtype == matrix.dtype and torch.equal(held, matrix):
                return eigen
        made = make()
        self._eigen = [(matrix, key, made), *self._eigen[:1]]
        return made

    def forget(self) -> None:
        """Drop the rows and products of a micro-batch."""
        self._rows, self._products = [], []


# --------------------------------------------------------------------------------------------------

_PAST = 4  # of the rows that a side too wide for a matrix keeps, one in so many may be of refreshes before


class FactorAccumulator:
    """One factor from rows that arrive in pieces.

    Rows are kept while there are fewer than columns, then folded into a covariance. A side wider than `max_size` never
    gets a d×d matrix: it keeps its rows up to `max_size` of them (low rank) and becomes `oversize` beyond that, or, as
    "low_rank", keeps all rows, of which whoever adds them draws no more than `most_rows`. Sums are kept relative to the
    largest entry seen, so that entries of 1e-25 or 1e25 neither vanish nor overflow.

    Args:
        dim: columns d.
        shape: full, diagonal or isotropic.
        max_size: largest matrix to decompose.
        oversize: diagonal, identity or low_rank.
        decays: whether refreshes before leave something in it.
        shared: what is formed once for several layers; None shares nothing.
    """

    def __init__(
        self,
        dim: int,
        *,
        shape: str = "full",
        max_size: int = 4096,
        oversize: str = "diagonal",
        decays: bool = False,
        shared: FactorCache | None = None,
    ) -> None:
        self.dim = dim
        self._shape = shape
        self._max_size = max_size
        self._oversize = "isotropic" if oversize == "identity" else oversize
        self._decays = decays
        self._shared = shared
        self._scale = 0.0
        self._count = 0.0
        self._rows: list[Tensor] = []
        self._kept = 0
        self._sum: Tensor | None = None
        self._start: Tensor | None = None
        self._rest = 0.0  # trace of past rows that are kept no more
        self.reads = 0.0
        self.note = "" if self.most_rows is None else f"{dim} > max_factor_size = {max_size}: low rank, from drawn rows"

    @property
    def most_rows(self) -> int | None:
        """Rows that may be added in one refresh, None for any number: what is kept of earlier ones needs a place too."""
        if self._shape != "full" or self._oversize != "low_rank" or self.dim <= self._max_size:
            return None
        return max(1, self._max_size - (self._max_size // _PAST if self._decays else 0))

    def add(self, rows: Tensor, count: float) -> None:
        """Add rows `[m, d]` that stand for `count` samples (the divisor of their sum of outer products).

        Raises:
            ValueError: rows that are not finite or of another width.
        """
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"a factor of size {self.dim} was given rows of shape {tuple(rows.shape)}")
        self._count += count
        rows = rows.detach()
        if self._shared is not None and self._shape == "full":
            rows = self._shared.rows(rows)
        largest = _largest(rows)
        if not math.isfinite(largest):
            raise ValueError("NaN or infinity in the layer's inputs or output gradients on the probe")
        if self._shape == "full" and self._sum is None:
            self._rows.append(rows)
            self._kept += rows.shape[0]
            self._fold_when_many()
        else:
            self._accumulate(rows, largest)

    def add_diagonal(self, squares: Tensor, count: float, reads: float = 0.0) -> None:
        """Add a diagonal `[d]` (sums of squares over `count` samples); the factor becomes diagonal. `reads`: of a table."""
        self._count += count
        self.reads += reads
        self._shape = "diagonal" if self._shape == "full" else self._shape
        squares = squares.double()
        self._scale = self._scale or 1.0
        squares = squares.sum() if self._shape == "isotropic" else squares
        self._sum = squares if self._sum is None else self._sum + squares

    def _fold_when_many(self) -> None:
        """Leave the kept rows for a sum once they outnumber what is worth keeping."""
        if self._kept < min(self.dim, self._max_size + 1) or self.most_rows is not None:
            return
        if self.dim > self._max_size:
            self._shape = self._oversize
            self.note = f"{self.dim} > max_factor_size = {self._max_size}: {self._shape}"
        rows, self._rows = self._rows, []
        for piece in rows:
            self._accumulate(piece, _largest(piece))

    def _accumulate(self, rows: Tensor, largest: float) -> None:
        if largest > self._scale:
            scale = 2.0 ** math.ceil(math.log2(largest))
            if self._sum is not None:
                self._sum = self._sum * (self._scale / scale) ** 2
            self._scale = scale
        if self._shared is not None and self._shape == "full":
            piece = self._shared.product(rows, self._scale, lambda: self._piece(rows))
        else:
            piece = self._piece(rows)
        self._sum = piece if self._sum is None else self._sum + piece

    def _piece(self, rows: Tensor) -> Tensor:
        """What rows add to the sum, in units of the scale; the scale is a power of two, so this rounds nothing."""
        wide = rows if self._scale > 1e-30 else rows.double()  # denormals are divided where they are normal numbers
        unit = (wide / (self._scale or 1.0)).to(rows.dtype)
        match self._shape:
            case "full":
                return gram(unit)
            case "diagonal":
                return unit.square().sum(0).double()
            case _:
                return unit.square().sum().double()

    def detached_copy(self, shared: FactorCache | None = None) -> FactorAccumulator:
        """A copy that shares what it forms with others."""
        twin = copy.copy(self)
        twin._shared, twin._rows = shared, list(self._rows)
        return twin

    def cost(self, parts: int) -> float:
        """What a decomposition costs, in multiplications, once so many parts of about this size have been joined."""
        if self._shape != "full":
            return 0.0
        rows = float(min(self.dim, self._kept * parts) if self._sum is None else self.dim)
        return rows**3 + rows**2 * self.dim

    def decayed(self, share: float, shared: FactorCache | None = None) -> FactorAccumulator:
        """A copy in which everything added so far counts `share` of what it did.

        Of a side too wide for a matrix nothing stays, as its rows would outgrow what is kept of them; of one that is to stay
        low-rank, the first eigenpairs that `remember` was shown, and the trace of the others.
        """
        twin = self.detached_copy(shared)
        if self.dim > self._max_size and self._shape == "full":
            twin._count, twin._rows, twin._kept, twin._start, twin._rest = 0.0, [], 0, None, 0.0
            return twin if self.most_rows is None or self._start is None else self._cut(twin, self._start, share)
        twin._count, twin.reads = share * self._count, share * self.reads
        twin._rows = [math.sqrt(share) * rows for rows in self._rows]
        twin._sum = None if self._sum is None else share * self._sum
        return twin

    def _cut(self, twin: FactorAccumulator, vectors: Tensor, share: float) -> FactorAccumulator:
        """`twin` with the part of the sum along eigenvectors `[d, k]` in k rows, and the trace of the rest, at their share."""
        rows, vectors = torch.cat(self._rows).double(), vectors.double()  # in one piece, as a checkpoint gives them back
        held = (rows @ vectors).square().sum(0)
        twin._rows = [((share * held).sqrt().unsqueeze(1) * vectors.T).to(self._rows[0].dtype)]
        twin._rest = share * max(0.0, float(rows.square().sum()) + self._rest - float(held.sum()))
        twin._count, twin._kept = share * self._count, vectors.shape[1]
        return twin

    def distance(self, other: FactorAccumulator) -> float:
        """‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius) for the factor A here and B of the other; 0 where both are zero."""
        own, both, theirs = self._inner(self), self._inner(other), other._inner(other)
        if own <= 0 or theirs <= 0:
            return 0.0 if own <= 0 and theirs <= 0 else 1.0
        ratio = self._total() / other._total()
        return math.sqrt(max(0.0, 1 - 2 * ratio * both / own + ratio**2 * theirs / own))

    def _total(self) -> float:
        """Trace of the sum."""
        if self._sum is None:
            return sum(float(rows.double().square().sum()) for rows in self._rows) + self._rest
        diagonal = self._sum.diagonal() if self._shape == "full" else self._sum
        return float(diagonal.double().sum()) * self._scale**2

    def _inner(self, other: FactorAccumulator) -> float:
        """Σ_ij A_ij B_ij of two sums, with what they keep the trace of alone spread evenly."""
        spread = self._rest * other._total() + other._rest * self._total() - self._rest * other._rest
        return self._product(other) + spread / self.dim

    def _product(self, other: FactorAccumulator) -> float:
        """Σ_ij A_ij B_ij of rows and sums."""
        if self._sum is None and other._sum is None:
            pairs = ((mine, theirs) for mine in self._rows for theirs in other._rows)
            return sum(float((mine.double() @ theirs.double().T).square().sum()) for mine, theirs in pairs)
        if self._sum is None:
            return other._product(self)
        if other._sum is None:
            with_sum = (self._times(rows.double()) for rows in other._rows)
            products = zip(with_sum, other._rows, strict=True)
            return sum(float((left * rows.double()).sum()) for left, rows in products) * self._scale**2
        mine, theirs = self._sum.double(), other._sum.double()
        if mine.dim() != theirs.dim():  # of a full and a diagonal one, or of either and the identity's multiple
            mine, theirs = (x.diagonal() if x.dim() == 2 else x for x in (mine, theirs))
            mean = self.dim if not (mine.dim() and theirs.dim()) else 1
        else:
            mean = 1 if mine.dim() else self.dim
        return float((mine * theirs).sum()) / mean * (self._scale * other._scale) ** 2

    def _times(self, rows: Tensor) -> Tensor:
        """Rows `[m, d]` times the sum."""
        total = self._sum.double() if self._sum is not None else rows.new_zeros(())
        return rows @ total if total.dim() == 2 else rows * (total if total.dim() else total / self.dim)

    def warm_start_from(self, factor: Factor) -> None:
        """Let the next decomposition of what grows out of this one begin with the directions of `factor`."""
        cut = isinstance(factor, Eigen) and 0 < factor.values.numel() < self.dim
        self._start = factor.vectors if cut and isinstance(factor, Eigen) else None
        if self._start is not None and self.most_rows is not None:
            self._start = self._start[:, : max(1, self._max_size // _PAST)].contiguous()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON-able values, from which `from_state` makes it again."""
        tensors = {} if self._sum is None else {"sum": self._sum}
        tensors |= {"rows": torch.cat(self._rows)} if self._rows else {}
        tensors |= {} if self._start is None else {"start": self._start}
        values = {
            "dim": self.dim, "shape": self._shape, "max_size": self._max_size, "oversize": self._oversize,
            "scale": self._scale, "count": self._count, "reads": self.reads, "note": self.note,
            **({"rest": self._rest} if self._rest else {}),
        }  # fmt: skip
        return tensors, values

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> FactorAccumulator:
        """What `state` was taken of."""
        made = cls(values["dim"], shape=values["shape"], max_size=values["max_size"], oversize=values["oversize"])
        made._scale, made._count, made.reads = values["scale"], values["count"], values["reads"]
        made._sum, made._start, made.note = tensors.get("sum"), tensors.get("start"), values["note"]
        made._rest = values.get("rest", 0.0)
        made._rows = [tensors["rows"]] if "rows" in tensors else []
        made._kept = sum(rows.shape[0] for rows in made._rows)
        return made

    def merge(self, other: FactorAccumulator) -> None:
        """Add what another one has added up, as if its rows had come after the own ones."""
        self._count += other._count
        self.reads += other.reads
        self._rest += other._rest
        self.note = self.note or other.note
        if self._sum is None and other._sum is not None:
            self._shape, rows, self._rows = other._shape, self._rows, []
            for piece in rows:
                self._accumulate(piece, _largest(piece))
        for piece in other._rows:
            if self._sum is not None:
                self._accumulate(piece, _largest(piece))
            else:
                self._rows.append(piece)
                self._kept += piece.shape[0]
                self._fold_when_many()
        if other._sum is not None:
            scale = max(self._scale, other._scale)
            theirs = other._sum * (other._scale / (scale or 1.0)) ** 2
            self._sum = theirs if self._sum is None else self._sum * (self._scale / (scale or 1.0)) ** 2 + theirs
            self._scale = scale

    def result(self, keep: int | None = None) -> Factor:
        """The factor.

        Args:
            keep: of a wide side only so many eigenpairs, and the trace of the rest; None for all.

        Raises:
            ValueError: nothing was added; an isotropic factor is zero then.
        """
        if self._count <= 0 and self._shape == "isotropic":
            return IsotropicFactor(self.dim, 0.0)  # of a layer that no differentiated example has reached
        if self._count <= 0:
            raise ValueError("a factor was asked for before any probe example was added")
        if self._sum is None:
            rows = torch.cat(self._rows)
            found = self._eigen(rows, keep, lambda: eigen_of_rows(rows, 1.0, keep))
            return replace(found, rest=found.rest + self._rest).scaled(1.0 / self._count)
        total, factor = self._sum, self._scale**2 / self._count
        if self._shape == "full":
            return self._eigen(total, keep, lambda: eigen_of_covariance(total, 1.0, keep, self._start)).scaled(factor)
        if self._shape == "diagonal":
            return DiagonalFactor(total * factor)
        return IsotropicFactor(self.dim, float(total) * factor / self.dim)

    def _eigen(self, matrix: Tensor, keep: int | None, make: Callable[[], Eigen]) -> Eigen:
        return make() if self._shared is None else self._shared.eigen(matrix, keep, make)


def _largest(rows: Tensor) -> float:
    """Largest absolute entry, without a copy; NaN where there is one."""
    if not rows.numel():
        return 0.0
    low, high = torch.aminmax(rows)
    return float(torch.maximum(-low, high))


def kronecker_factors(block: Outer, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """The factors of a matrix-shaped layer as dense matrices, all positions of the block counted.

    Args:
        block: inputs and output gradients of N examples.
        sharing: expand or reduce.

    Returns:
        (A `[d_in, d_in]`, G `[d_out, d_out]`), undamped.
    """
    a, b = block.explicit().a, block.b
    if sharing == "reduce":
        a, b = a.mean(1, keepdim=True), b.sum(1, keepdim=True)
    rows, columns = a.flatten(0, 1), b.flatten(0, 1)
    return rows.T @ rows / a.shape[0], columns.T @ columns / columns.shape[0]
