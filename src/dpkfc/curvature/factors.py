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
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.blocks import Outer
from dpkfc.curvature.linalg import Eigen, eigen_of_covariance, eigen_of_rows, gram
from dpkfc.curvature.shared import Shared
from dpkfc.curvature.structures import DiagonalFactor, Factor, IsotropicFactor, is_empty

__all__ = ["DiagonalFactor", "Factor", "FactorAccumulator", "IsotropicFactor", "is_empty", "kronecker_factors"]

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
        shared: Shared | None = None,
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

    def apart(self, shared: Shared | None = None) -> FactorAccumulator:
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

    def decayed(self, share: float, shared: Shared | None = None) -> FactorAccumulator:
        """A copy in which everything added so far counts `share` of what it did.

        Of a side too wide for a matrix nothing stays, as its rows would outgrow what is kept of them; of one that is to stay
        low-rank, the first eigenpairs that `remember` was shown, and the trace of the others.
        """
        twin = self.apart(shared)
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

    def remember(self, factor: Factor) -> None:
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

    def take_in(self, other: FactorAccumulator) -> None:
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
