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

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.eigen import (
    Eigen,
    FactorForm,
    eigen_of_covariance,
    eigen_of_rows,
    gram,
    largest_entry,
)
from dpkfc.linalg.metric import NamedTensors, Tensors

# --------------------------------------------------------------------------------------------------
# The forms of a factor: its eigenpairs (`Eigen`), a diagonal, or a multiple of the identity.

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

    def scaled(self, factor: float) -> DiagonalFactor:
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

    def scaled(self, factor: float) -> IsotropicFactor:
        """Return the factor times a number that is not negative."""
        return IsotropicFactor(self.dim, self.mean * factor)


Factor = Eigen | DiagonalFactor | IsotropicFactor


def is_empty(factor: Factor) -> bool:
    """Return whether a factor is practically zero: a dead layer, or a new LoRA adapter."""
    return not factor.mean > _NEGLIGIBLE


def inner_product(first: Factor, second: Factor) -> float:
    """Return tr(F S) of two factors of the same size, without forming either."""
    match first, second:
        case IsotropicFactor(), _:
            return first.mean * second.trace
        case _, IsotropicFactor():
            return second.mean * first.trace
        case DiagonalFactor(), DiagonalFactor():
            return float(first.values @ second.values)
        case Eigen(), Eigen():
            cosines = first.vectors.double().T @ second.vectors.double()
            overlap = cosines.square()
            f = first.floor
            s = second.floor
            above = (first.values - f) @ overlap @ (second.values - s)
            # tr(F S) is tr(F' S') and this, for F = F' + f I and S = S' + s I.
            rest = f * (second.trace - s * first.dim)
            rest += s * (first.trace - f * first.dim)
            rest += f * s * first.dim
            return float(above) + rest
        case Eigen(), DiagonalFactor():
            squares = first.vectors.double().square()
            above = second.values @ squares @ (first.values - first.floor)
            return float(above) + first.floor * second.trace
        case _:
            return inner_product(second, first)


# --------------------------------------------------------------------------------------------------
# Layers that read the same tensor (queries, keys and values) have the same input factor. The cache
# notices equal rows as they arrive, so that their product and its eigenpairs are formed once.

_REMEMBERED = 1 << 24  # most entries of cached rows


class FactorCache:
    """Rows, products and eigendecompositions that consecutive layers share, formed once.

    The cache keeps the last two tensors of rows, their products and the last eigendecompositions.
    It compares contents, so a cached result is the one that would have been computed.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._products: list[tuple[Tensor, float, Tensor]] = []
        self._eigen: list[tuple[Tensor, Any, Eigen]] = []

    def rows(self, rows: Tensor) -> Tensor:
        """Return these rows, as the tensor of an earlier layer if that is equal."""
        for earlier in self._rows:
            if _are_equal(earlier, rows):
                return earlier
        if rows.numel() <= _REMEMBERED:
            last = self._rows[:1]
            self._rows = [rows, *last]
        return rows

    def product(self, rows: Tensor, scale: float, make: Callable[[], Tensor]) -> Tensor:
        """Return the product of these rows (the same tensor) in this scale, by `make` if new."""
        for known_rows, known_scale, product in self._products:
            if known_rows is rows and known_scale == scale:
                return product
        product = make()
        # Rows that are not kept do not come again.
        is_kept = any(rows is known for known in self._rows)
        if is_kept:
            self._products = [(rows, scale, product), *self._products[:1]]
        return product

    def eigen(self, matrix: Tensor, key: Any, make: Callable[[], Eigen]) -> Eigen:
        """Return the decomposition of an equal matrix under an equal key, by `make` if new."""
        for known, known_key, eigen in self._eigen:
            if known_key == key and _are_equal(known, matrix):
                return eigen
        eigen = make()
        self._eigen = [(matrix, key, eigen), *self._eigen[:1]]
        return eigen

    def forget(self) -> None:
        """Drop the rows and products of a micro-batch."""
        self._rows = []
        self._products = []


def _are_equal(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x, y)


# --------------------------------------------------------------------------------------------------

# Of the rows that a side too wide for a matrix keeps, one in this many may be of earlier refreshes.
_PAST = 4
# Attributes in a stored state.
_STORED = ("dim", "shape", "max_size", "oversize", "scale", "count", "reads", "note")


class FactorAccumulator:
    """One factor from rows that arrive in pieces.

    Rows are kept while there are fewer than columns, then summed to a covariance. A side wider than
    `max_size` never gets a d×d matrix. It keeps up to `max_size` rows (low rank) and takes the form
    `oversize` beyond that. With "low_rank" it keeps all rows, and the caller adds at most
    `most_rows`. Sums are kept relative to the largest entry, so that 1e-25 and 1e25 neither vanish
    nor overflow.

    Args:
        dim: columns d.
        shape: full, diagonal or isotropic.
        max_size: largest matrix to decompose.
        oversize: diagonal, identity or low_rank.
        decays: whether sums of earlier refreshes are kept.
        shared: results that several layers share; None shares nothing.
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
        self.shape = shape
        self.max_size = max_size
        self.oversize = "isotropic" if oversize == "identity" else oversize
        self._decays = decays
        self._shared = shared
        self.scale = 0.0
        self.count = 0.0
        self._rows: list[Tensor] = []
        self._sum: Tensor | None = None
        self._start: Tensor | None = None
        # Trace of past rows that are no longer kept.
        self._rest = 0.0
        self.reads = 0.0
        self.note = ""
        if self.most_rows is not None:
            self.note = f"{dim} > max_factor_size = {max_size}: low rank, from drawn rows"

    @property
    def most_rows(self) -> int | None:
        """Rows that may be added in one refresh, None for any number.

        Rows of earlier refreshes need a place too.
        """
        if self.shape != "full" or self.oversize != "low_rank" or self.dim <= self.max_size:
            return None
        most = self.max_size
        if self._decays:
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
        if self._shared is not None and self.shape == "full":
            rows = self._shared.rows(rows)
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
        self._sum = squares if self._sum is None else self._sum + squares

    @property
    def _row_count(self) -> int:
        """Return how many rows are kept."""
        return sum(map(len, self._rows))

    def _take(self, rows: Tensor, largest: float) -> None:
        """Keep rows until there are too many, and add them to the sum afterwards."""
        if self.shape != "full" or self._sum is not None:
            self._accumulate(rows, largest)
            return
        self._rows.append(rows)
        if self._row_count < min(self.dim, self.max_size + 1) or self.most_rows is not None:
            return
        if self.dim > self.max_size:
            self.shape = self.oversize
            self.note = f"{self.dim} > max_factor_size = {self.max_size}: {self.shape}"
        self._fold_rows()

    def _fold_rows(self) -> None:
        """Replace the kept rows by their sum."""
        kept = self._rows
        self._rows = []
        for rows in kept:
            self._accumulate(rows, largest_entry(rows))

    def _accumulate(self, rows: Tensor, largest: float) -> None:
        if largest > self.scale:
            exponent = math.ceil(math.log2(largest))
            scale = 2.0**exponent
            if self._sum is not None:
                ratio = self.scale / scale
                self._sum = self._sum * ratio**2
            self.scale = scale
        if self._shared is not None and self.shape == "full":
            term = self._shared.product(rows, self.scale, lambda: self._term(rows))
        else:
            term = self._term(rows)
        self._sum = term if self._sum is None else self._sum + term

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

    def detached_copy(self, shared: FactorCache | None = None) -> FactorAccumulator:
        """Return a copy with a cache of its own."""
        twin = copy.copy(self)
        twin._shared = shared
        twin._rows = list(self._rows)
        return twin

    def cost(self, parts: int) -> float:
        """Return the multiplications of a decomposition after this many such parts are joined."""
        if self.shape != "full":
            return 0.0
        rows = float(self.dim)
        if self._sum is None:
            rows = float(min(self.dim, self._row_count * parts))
        return rows**3 + rows**2 * self.dim

    def decayed(self, share: float, shared: FactorCache | None = None) -> FactorAccumulator:
        """Return a copy in which everything added so far counts `share` of its weight.

        A side too wide for a matrix keeps nothing but the rows of `remembered`, and these with
        `oversize="low_rank"` alone: others would outgrow their limit.
        """
        twin = self.detached_copy(shared)
        is_too_wide = self.dim > self.max_size and self.shape == "full"
        if is_too_wide and (self._start is None or self.most_rows is None):
            twin.count = 0.0
            twin._rows = []
            twin._start = None
            twin._rest = 0.0
            return twin
        twin.count = share * self.count
        twin.reads = share * self.reads
        twin._rest = share * self._rest
        twin._rows = [math.sqrt(share) * rows for rows in self._rows]
        if self._sum is not None:
            twin._sum = share * self._sum
        return twin

    def remembered(self, factor: Factor) -> FactorAccumulator:
        """Return what the next refresh needs of a sum whose `result` is `factor`.

        That is the sum itself where all its pairs are known, and else the pairs as one row each,
        with the trace of the others. The next decomposition starts from their directions.
        """
        twin = self.detached_copy()
        twin._start = None
        if not isinstance(factor, Eigen) or not 0 < factor.values.numel() < self.dim:
            return twin
        keep = factor.values.numel()
        if self.most_rows is not None:
            keep = min(keep, max(1, self.max_size // _PAST))
        pairs = factor.first(keep).scaled(self.count)
        # Files keep no memory order, and products of another order differ in their last bits.
        twin._start = pairs.vectors.contiguous()
        lengths = pairs.values.sqrt().to(pairs.vectors)
        twin._rows = [(lengths.unsqueeze(1) * pairs.vectors.T).contiguous()]
        twin._sum = None
        twin.scale = 0.0
        twin._rest = pairs.rest
        return twin

    def distance(self, other: FactorAccumulator) -> float:
        """Return ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius) for this factor A and the other B.

        The distance of two zero factors is 0, of a zero factor to another one 1.
        """
        own = self._inner(self)
        theirs = other._inner(other)
        if max(own, theirs) <= 0:
            return 0.0
        if min(own, theirs) <= 0:
            return 1.0
        both = self._inner(other)
        ratio = self._total() / other._total()
        squared = 1 - 2 * ratio * both / own + ratio**2 * theirs / own
        return math.sqrt(max(0.0, squared))

    def _total(self) -> float:
        """Return the trace of the sum."""
        if self._sum is None:
            squares = [float(rows.double().square().sum()) for rows in self._rows]
            return sum(squares) + self._rest
        diagonal = _diagonal(self._sum).double()
        return float(diagonal.sum()) * self.scale**2 + self._rest

    def _inner(self, other: FactorAccumulator) -> float:
        """Return Σ_ij A_ij B_ij of two sums; a trace without rows is spread evenly."""
        spread = self._rest * other._total() + other._rest * self._total()
        spread = spread - self._rest * other._rest
        return self._product(other) + spread / self.dim

    def _product(self, other: FactorAccumulator) -> float:
        """Return Σ_ij A_ij B_ij of rows and sums."""
        if self._sum is None and other._sum is not None:
            return other._product(self)
        total = 0.0
        if self._sum is None:
            for mine, theirs in itertools.product(self._rows, other._rows):
                overlap = mine.double() @ theirs.double().T
                total += float(overlap.square().sum())
            return total
        mine = self._spread_sum()
        if other._sum is None:
            for rows in other._rows:
                wide = rows.double()
                image = wide @ mine if mine.dim() == 2 else wide * mine
                total += float((image * wide).sum())
            return total * self.scale**2
        theirs = other._spread_sum()
        if mine.dim() != theirs.dim():
            mine = _diagonal(mine)
            theirs = _diagonal(theirs)
        product = mine * theirs
        scale = self.scale * other.scale
        return float(product.sum()) * scale**2

    def _spread_sum(self) -> Tensor:
        """Return the sum as a matrix, or as a diagonal; a trace is spread evenly."""
        assert self._sum is not None
        total = self._sum.double()
        if total.dim() == 0:
            mean = total / self.dim
            total = mean.expand(self.dim)
        return total

    def state(self) -> tuple[NamedTensors, dict[str, Any]]:
        """Return tensors and JSON-able values, from which `restore` restores the sum."""
        tensors = {}
        # Copies: layers share sums, and a metric its directions; a file holds each tensor once.
        if self._sum is not None:
            tensors["sum"] = self._sum.clone()
        if self._rows:
            tensors["rows"] = torch.cat(self._rows)
        if self._start is not None:
            tensors["start"] = self._start.clone()
        values = {name: getattr(self, name) for name in _STORED}
        if self._rest:
            values["rest"] = self._rest
        return tensors, values

    @classmethod
    def restore(cls, tensors: Tensors, values: Mapping[str, Any]) -> FactorAccumulator:
        """Return the sum whose state `state` returned."""
        restored = cls(values["dim"])
        for name in _STORED:
            setattr(restored, name, values[name])
        restored._rest = values.get("rest", 0.0)
        restored._sum = tensors.get("sum")
        restored._start = tensors.get("start")
        rows = tensors.get("rows")
        if rows is not None:
            restored._rows = [rows]
        return restored

    def merge(self, other: FactorAccumulator) -> None:
        """Add the sum of another one, as if its rows had come after the rows of this one."""
        self.count += other.count
        self.reads += other.reads
        self._rest += other._rest
        self.note = self.note or other.note
        if self._sum is None and other._sum is not None:
            self.shape = other.shape
            self._fold_rows()
        for rows in other._rows:
            self._take(rows, largest_entry(rows))
        if other._sum is not None:
            scale = max(self.scale, other.scale)
            unit = scale or 1.0
            total = other._sum * (other.scale / unit) ** 2
            if self._sum is not None:
                total = self._sum * (self.scale / unit) ** 2 + total
            self._sum = total
            self.scale = scale

    def result(self, keep: int | None = None) -> Factor:
        """Return the factor.

        Args:
            keep: number of eigenpairs of a wide side, besides the trace of the rest; None for all.

        Raises:
            ValueError: nothing was added, and the factor is not isotropic.
        """
        if self.count <= 0:
            # No differentiated example has reached the layer.
            if self.shape == "isotropic":
                return IsotropicFactor(self.dim, 0.0)
            raise ValueError("a factor was asked for before any probe example was added")
        start = self._start
        rest = self._rest / self.count
        if self._sum is None:
            rows = torch.cat(self._rows)
            pairs = self._eigen(rows, keep, lambda: eigen_of_rows(rows, 1.0, keep, start))
            pairs = pairs.scaled(1.0 / self.count)
            return replace(pairs, rest=pairs.rest + rest)
        total = self._sum
        factor = self.scale**2 / self.count
        if self.shape == "full":
            pairs = self._eigen(total, keep, lambda: eigen_of_covariance(total, 1.0, keep, start))
            pairs = pairs.scaled(factor)
            return replace(pairs, rest=pairs.rest + rest)
        if self.shape == "diagonal":
            return DiagonalFactor(total * factor)
        trace = float(total) * factor
        return IsotropicFactor(self.dim, trace / self.dim)

    def _eigen(self, matrix: Tensor, keep: int | None, make: Callable[[], Eigen]) -> Eigen:
        if self._shared is None:
            return make()
        return self._shared.eigen(matrix, keep, make)


def _diagonal(x: Tensor) -> Tensor:
    """Return the diagonal of a matrix; a vector or a number is one already."""
    if x.dim() == 2:
        return x.diagonal()
    return x
