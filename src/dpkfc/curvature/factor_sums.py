"""Undamped curvature factors in the per-example scale, summed over rows that arrive in pieces.

For a layer with inputs a and output gradients b at T positions:

    expand   A = 1/N Σ_n Σ_t a aᵀ        G = 1/(N·T) Σ_n Σ_t b bᵀ
    reduce   A = 1/N Σ_n ā āᵀ            G = 1/N Σ_n b̄ b̄ᵀ

with ā = mean_t a (its homogeneous 1 stays 1) and b̄ = Σ_t b. Then tr(A)·tr(G) is E‖g‖² of a
per-example gradient if a and b are independent. `b` is the gradient of each example's own loss, so
neither factor depends on the probe's size or on a loss reduction. Groups of a convolution are
averaged. Masked positions count neither in a sum nor in T.

An embedding has a diagonal factor: how often its rows are read. A weight that is an embedding table
and a head at once has a gradient `[V, d]` from both uses. Its factor is the sum of both
contributions to E gᵀg over the d columns,

    1/N Σ_n ( Σ_t ‖b_t‖² a_t a_tᵀ  +  Σ_s c_s c_sᵀ )

with the head's inputs a and output gradients b and the gradients c at the embedding's output. The
rows V stay isotropic.

`layer_factors` forms the rows of each kind of layer.

Source: Martens and Grosse (2015); Eschenhagen et al. (2023) for expand and reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from dpkfc.curvature.eigen import (
    Eigen,
    eigen_of_covariance,
    eigen_of_rows,
    gram,
    largest_entry,
)
from dpkfc.curvature.factor_cache import FactorCache, R
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor

# Of the rows that a side too wide for a matrix keeps, one in this many may be of earlier refreshes.
_PAST = 4


@dataclass(eq=False)
class FactorAccumulator:
    """One factor from rows that arrive in pieces.

    Rows are kept while there are fewer than columns, then summed to a covariance. A side wider than
    `max_size` never gets a d×d matrix. It keeps up to `max_size` rows (low rank) and takes the form
    `oversize` beyond that. With "low_rank" it keeps all rows, and the caller adds at most
    `most_rows`. Sums are kept relative to the largest entry, so that 1e-25 and 1e25 neither vanish
    nor overflow.

    Attributes:
        dim: columns d.
        shape: full, diagonal or isotropic.
        max_size: largest matrix to decompose.
        oversize: diagonal, identity or low_rank.
        decays: whether sums of earlier refreshes are kept.
        shared: results that several layers share; None shares nothing.
        count: samples, the divisor of the sum.
        reads: number of reads of a table.
        note: what became of a wide side.
        rows: kept rows `[m, d]`.
        total: the sum `[d, d]`, `[d]` or `[]`, in units of `scale`²; None while rows are kept.
        scale: a power of two near the largest entry.
        start: eigenvectors `[d, k]` of an earlier refresh, from which a decomposition starts.
        rest: trace of past rows that are no longer kept.
    """

    dim: int
    _: KW_ONLY
    shape: str = "full"
    max_size: int = 4096
    oversize: str = "diagonal"
    decays: bool = False
    shared: FactorCache | None = None
    count: float = 0.0
    reads: float = 0.0
    note: str = ""
    rows: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None
    scale: float = 0.0
    start: Tensor | None = None
    rest: float = 0.0

    def __post_init__(self) -> None:
        if self.most_rows is not None:
            self.note = f"{self.dim} > max_factor_size = {self.max_size}: low rank, from drawn rows"

    @property
    def most_rows(self) -> int | None:
        """Rows that may be added in one refresh, None for any number.

        Rows of earlier refreshes need a place too.
        """
        if self.shape != "full" or self.oversize != "low_rank" or self.dim <= self.max_size:
            return None
        most = self.max_size
        if self.decays:
            most -= self.max_size // _PAST
        return max(1, most)

    def add(self, rows: Tensor, count: float) -> None:
        """Add rows `[m, d]` of `count` samples, the divisor of their sum of outer products.

        Raises:
            ValueError: rows that are not finite or of another width.
        """
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(
                f"a factor of size {self.dim} was given rows of shape {tuple(rows.shape)}"
            )
        self.count += count
        rows = rows.detach()
        rows = self._recall("rows", rows, None, lambda: rows)
        largest = largest_entry(rows)
        if not math.isfinite(largest):
            raise ValueError(
                "NaN or infinity in the layer's inputs or output gradients on the probe"
            )
        self._take(rows, largest)

    def add_diagonal(self, squares: Tensor, count: float, reads: float = 0.0) -> None:
        """Add a diagonal `[d]`, sums of squares over `count` samples; the factor becomes diagonal.

        Args:
            squares: the diagonal.
            count: samples.
            reads: number of reads of a table.
        """
        self.count += count
        self.reads += reads
        if self.shape == "full":
            self.shape = "diagonal"
        squares = squares.double()
        self.scale = self.scale or 1.0
        if self.shape == "isotropic":
            squares = squares.sum()
        self._add_term(squares)

    @property
    def row_count(self) -> int:
        """Return how many rows are kept."""
        return sum(map(len, self.rows))

    def _take(self, rows: Tensor, largest: float) -> None:
        """Keep rows until there are too many, and add them to the sum afterwards."""
        if self.shape != "full" or self.total is not None:
            self._accumulate(rows, largest)
            return
        self.rows.append(rows)
        if self.row_count < min(self.dim, self.max_size + 1) or self.most_rows is not None:
            return
        if self.dim > self.max_size:
            self.shape = "isotropic" if self.oversize == "identity" else self.oversize
            self.note = f"{self.dim} > max_factor_size = {self.max_size}: {self.shape}"
        self._fold_rows()

    def _fold_rows(self) -> None:
        """Replace the kept rows by their sum."""
        kept = self.rows
        self.rows = []
        for rows in kept:
            self._accumulate(rows, largest_entry(rows))

    def _accumulate(self, rows: Tensor, largest: float) -> None:
        if largest > self.scale:
            exponent = math.ceil(math.log2(largest))
            scale = 2.0**exponent
            if self.total is not None:
                ratio = self.scale / scale
                self.total = self.total * ratio**2
            self.scale = scale
        term = self._recall("product", rows, self.scale, lambda: self._term(rows))
        self._add_term(term)

    def _add_term(self, term: Tensor) -> None:
        self.total = term if self.total is None else self.total + term

    def _term(self, rows: Tensor) -> Tensor:
        """Return the term of these rows in the sum, in units of the scale.

        The scale is a power of two, so the division rounds nothing.
        """
        # Denormal float32 numbers are normal in float64.
        wide = rows
        if self.scale <= 1e-30:
            wide = rows.double()
        unit = wide / (self.scale or 1.0)
        unit = unit.to(rows.dtype)
        if self.shape == "full":
            return gram(unit)
        squares = unit.square()
        if self.shape == "diagonal":
            return squares.sum(0).double()
        return squares.sum().double()

    def _recall(self, kind: str, tensor: Tensor, key: object, make: Callable[[], R]) -> R:
        """Return a result that layers with a full factor share, by `make` if it is new."""
        if self.shared is None or self.shape != "full":
            return make()
        return self.shared.recall(kind, tensor, key, make)

    def detached_copy(self, shared: FactorCache | None = None) -> FactorAccumulator:
        """Return a copy with a cache of its own."""
        return replace(self, shared=shared, rows=list(self.rows))

    def cost(self, parts: int) -> float:
        """Return the multiplications of a decomposition after this many such parts are joined."""
        if self.shape != "full":
            return 0.0
        rows = float(self.dim)
        if self.total is None:
            rows = float(min(self.dim, self.row_count * parts))
        return rows**3 + rows**2 * self.dim

    def decay(self, share: float, shared: FactorCache | None = None) -> FactorAccumulator:
        """Return a copy in which everything added so far counts `share` of its weight.

        A side too wide for a matrix keeps nothing but the rows of `remembered`, and these with
        `oversize="low_rank"` alone: others would outgrow their limit.
        """
        is_too_wide = self.dim > self.max_size and self.shape == "full"
        if is_too_wide and (self.start is None or self.most_rows is None):
            return replace(self, shared=shared, count=0.0, rows=[], start=None, rest=0.0)
        return replace(
            self,
            shared=shared,
            count=share * self.count,
            reads=share * self.reads,
            rest=share * self.rest,
            rows=[math.sqrt(share) * rows for rows in self.rows],
            total=None if self.total is None else share * self.total,
        )

    def remember(self, factor: Factor) -> FactorAccumulator:
        """Return what the next refresh needs of a sum whose `result` is `factor`.

        That is the sum itself where all its pairs are known, and else the pairs as one row each,
        with the trace of the others. The next decomposition starts from their directions.
        """
        if not isinstance(factor, Eigen) or not 0 < factor.values.numel() < self.dim:
            return replace(self, shared=None, rows=list(self.rows), start=None)
        keep = factor.values.numel()
        if self.most_rows is not None:
            keep = min(keep, max(1, self.max_size // _PAST))
        pairs = factor.first(keep).scale_by(self.count)
        lengths = pairs.values.sqrt().to(pairs.vectors)
        # Files keep no memory order, and products of another order differ in their last bits.
        rows = (lengths.unsqueeze(1) * pairs.vectors.T).contiguous()
        return replace(
            self,
            shared=None,
            start=pairs.vectors.contiguous(),
            rows=[rows],
            total=None,
            scale=0.0,
            rest=pairs.rest,
        )

    def merge(self, other: FactorAccumulator) -> None:
        """Add the sum of another one, as if its rows had come after the rows of this one."""
        self.count += other.count
        self.reads += other.reads
        self.rest += other.rest
        self.note = self.note or other.note
        if self.total is None and other.total is not None:
            self.shape = other.shape
            self._fold_rows()
        for rows in other.rows:
            self._take(rows, largest_entry(rows))
        if other.total is not None:
            scale = max(self.scale, other.scale)
            unit = scale or 1.0
            total = other.total * (other.scale / unit) ** 2
            if self.total is not None:
                total = self.total * (self.scale / unit) ** 2 + total
            self.total = total
            self.scale = scale

    def result(self, keep: int | None = None) -> Factor:
        """Return the factor.

        Args:
            keep: number of eigenpairs of a wide side, besides the trace of the rest; None for all.
        """
        if self.count <= 0:
            # No differentiated example has reached the layer, or none at any position.
            return IsotropicFactor(self.dim, 0.0)
        start = self.start
        rest = self.rest / self.count
        if self.total is None:
            rows = torch.cat(self.rows)
            pairs = self._recall("eigen", rows, keep, lambda: eigen_of_rows(rows, keep, start))
            pairs = pairs.scale_by(1.0 / self.count)
            return replace(pairs, rest=pairs.rest + rest)
        total = self.total
        factor = self.scale**2 / self.count
        if self.shape == "full":
            pairs = self._recall(
                "eigen", total, keep, lambda: eigen_of_covariance(total, keep, start)
            )
            pairs = pairs.scale_by(factor)
            return replace(pairs, rest=pairs.rest + rest)
        if self.shape == "diagonal":
            return DiagonalFactor(total * factor)
        trace = float(total) * factor
        return IsotropicFactor(self.dim, trace / self.dim)
