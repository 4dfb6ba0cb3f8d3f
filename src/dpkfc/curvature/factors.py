"""Undamped curvature factors, accumulated over probe micro-batches in the per-example scale.

For a layer with inputs a and output gradients b at T positions:

    expand   A = 1/N Σ_n Σ_t a aᵀ        G = 1/(N·T) Σ_n Σ_t b bᵀ
    reduce   A = 1/N Σ_n ā āᵀ            G = 1/N Σ_n b̄ b̄ᵀ         ā = mean_t a (its homogeneous 1 stays 1), b̄ = Σ_t b

so that tr(A)·tr(G) is E‖g‖² of a per-example gradient if a and b were independent. `b` is the gradient of each
example's own loss, so neither factor depends on the probe's size or on a loss reduction. Groups of a convolution are
averaged.

Source: Martens and Grosse (2015); Eschenhagen et al. (2023) for expand and reduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpkfc.blocks import Block, Lookup, Outer, PerExample
from dpkfc.curvature.linalg import Eigen, eigen_of_covariance, eigen_of_rows

__all__ = [
    "DiagonalFactor",
    "Factor",
    "FactorAccumulator",
    "IsotropicFactor",
    "LayerAccumulator",
    "LayerFactors",
    "Structure",
    "is_empty",
    "kronecker_factors",
]

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

    def scaled(self, factor: float) -> IsotropicFactor:
        """The factor times a number that is not negative."""
        return IsotropicFactor(self.dim, self.mean * factor)


Factor = Eigen | DiagonalFactor | IsotropicFactor


def is_empty(factor: Factor) -> bool:
    """Whether a factor is zero for all purposes: a dead layer, or a LoRA adapter before its first step."""
    return not factor.mean > _NEGLIGIBLE


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How factors are formed.

    Attributes:
        sharing: expand or reduce, for layers with several positions.
        sides: both, input or output; the other side becomes isotropic.
        max_factor_size: largest matrix that is decomposed.
        oversize: what a wider side with more rows than that becomes, diagonal or identity (isotropic).
        rules: kinds of layers that are preconditioned, None for all; the others become isotropic.
    """

    sharing: str = "expand"
    sides: str = "both"
    max_factor_size: int = 4096
    oversize: str = "diagonal"
    rules: tuple[str, ...] | None = None

    def shape_of(self, side: str, rule: str | None) -> str:
        """full or isotropic, for the `input` or `output` side or the elementwise scale of a layer."""
        left_out = self.rules is not None and rule not in self.rules
        other = self.sides != "both" and side in ("input", "output") and side != self.sides
        return "isotropic" if left_out or other else "full"


class FactorAccumulator:
    """One factor from rows that arrive in pieces.

    Rows are kept while there are fewer than columns, then folded into a covariance. A side wider than `max_size` never
    gets a d×d matrix: it keeps its rows up to `max_size` of them (low rank) and becomes `oversize` beyond that. Sums
    are kept relative to the largest entry seen, so that entries of 1e-25 or 1e25 neither vanish nor overflow.

    Args:
        dim: columns d.
        shape: full, diagonal or isotropic.
        max_size: largest matrix to decompose.
        oversize: diagonal or identity.
    """

    def __init__(self, dim: int, *, shape: str = "full", max_size: int = 4096, oversize: str = "diagonal") -> None:
        self.dim = dim
        self._shape = shape
        self._max_size = max_size
        self._oversize = "isotropic" if oversize == "identity" else oversize
        self._scale = 0.0
        self._count = 0.0
        self._rows: list[Tensor] = []
        self._kept = 0
        self._sum: Tensor | None = None
        self.note = ""

    def add(self, rows: Tensor, count: float) -> None:
        """Add rows `[m, d]` that stand for `count` samples (the divisor of their sum of outer products).

        Raises:
            ValueError: rows that are not finite or of another width.
        """
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"a factor of size {self.dim} was given rows of shape {tuple(rows.shape)}")
        self._count += count
        largest = float(rows.abs().max()) if rows.numel() else 0.0
        if not math.isfinite(largest):
            raise ValueError("NaN or infinity in the layer's inputs or output gradients on the probe")
        if self._shape == "full" and self._sum is None:
            self._rows.append(rows.detach())
            self._kept += rows.shape[0]
            self._fold_when_many()
        else:
            self._accumulate(rows, largest)

    def add_diagonal(self, squares: Tensor, count: float) -> None:
        """Add a diagonal `[d]` (sums of squares over `count` samples); the factor becomes diagonal."""
        self._count += count
        self._shape = "diagonal" if self._shape == "full" else self._shape
        squares = squares.double()
        self._scale = self._scale or 1.0
        squares = squares.sum() if self._shape == "isotropic" else squares
        self._sum = squares if self._sum is None else self._sum + squares

    def _fold_when_many(self) -> None:
        """Leave the kept rows for a sum once they outnumber what is worth keeping."""
        if self._kept < min(self.dim, self._max_size + 1):
            return
        if self.dim > self._max_size:
            self._shape = self._oversize
            self.note = f"{self.dim} > max_factor_size = {self._max_size}: {self._shape}"
        rows, self._rows = self._rows, []
        for piece in rows:
            self._accumulate(piece, float(piece.abs().max()) if piece.numel() else 0.0)

    def _accumulate(self, rows: Tensor, largest: float) -> None:
        if largest > self._scale:
            scale = 2.0 ** math.ceil(math.log2(largest))
            if self._sum is not None:
                self._sum = self._sum * (self._scale / scale) ** 2
            self._scale = scale
        # The scale is a power of two, so this rounds nothing; denormals are divided where they are normal numbers.
        unit = (rows if self._scale > 1e-30 else rows.double()) / (self._scale or 1.0)
        unit = unit.to(rows.dtype)
        match self._shape:
            case "full":
                piece = unit.T @ unit
            case "diagonal":
                piece = unit.square().sum(0).double()
            case _:
                piece = unit.square().sum().double()
        self._sum = piece if self._sum is None else self._sum + piece

    def result(self) -> Factor:
        """The factor.

        Raises:
            ValueError: nothing was added.
        """
        if self._count <= 0:
            raise ValueError("a factor was asked for before any probe example was added")
        if self._sum is None:
            return eigen_of_rows(torch.cat(self._rows), self._count)
        factor = self._scale**2 / self._count
        if self._shape == "full":
            return eigen_of_covariance(self._sum, factor)
        if self._shape == "diagonal":
            return DiagonalFactor(self._sum * factor)
        return IsotropicFactor(self.dim, float(self._sum) * factor / self.dim)


@dataclass(frozen=True, kw_only=True)
class LayerFactors:
    """The undamped factors of one layer.

    Attributes:
        kind: outer (matrix-shaped), lookup (embedding) or elementwise.
        sides: `input` and `output`, or one diagonal factor per role of an elementwise layer.
        shapes: size of each side, or shape of the parameter of each role.
        dtype, device: of the layer's gradients.
        notes: side to what became of it, where that needs saying.
    """

    kind: str
    sides: Mapping[str, Factor]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    notes: Mapping[str, str] = field(default_factory=dict)

    def normalised(self) -> LayerFactors:
        """Every factor divided by its mean eigenvalue; an empty factor stays as it is."""
        sides = {name: f if is_empty(f) else f.scaled(1 / f.mean) for name, f in self.sides.items()}
        return replace(self, sides=sides)


class LayerAccumulator:
    """The factors of one layer from blocks that arrive in pieces.

    Args:
        block: the first block; it is not added yet.
        structure: how factors are formed.
        rule: the layer's rule, None where it does not matter.
    """

    def __init__(self, block: Block, structure: Structure, rule: str | None = None) -> None:
        self._structure = structure
        self._dtype, self._device = torch.float32, torch.device("cpu")
        match block:
            case PerExample():
                self.kind = "elementwise"
                shapes = {role: tuple(g.shape[1:]) for role, g in block.grads.items()}
            case Lookup():
                self.kind = "lookup"
                shapes = {"input": (block.num_rows,), "output": (block.b.shape[-1],)}
            case Outer():
                self.kind = "outer"
                shapes = {"input": (block.a.shape[-1],), "output": (block.b.shape[-1],)}
        self._shapes: dict[str, tuple[int, ...]] = shapes
        self._sides = {name: self._side(name, math.prod(shape), rule) for name, shape in shapes.items()}

    def _side(self, name: str, dim: int, rule: str | None) -> FactorAccumulator:
        shape = self._structure.shape_of(name if self.kind != "elementwise" else "elementwise", rule)
        diagonal = self.kind == "elementwise" or (self.kind == "lookup" and name == "input")
        return FactorAccumulator(
            dim,
            shape="diagonal" if diagonal and shape == "full" else shape,
            max_size=self._structure.max_factor_size,
            oversize=self._structure.oversize,
        )

    def add(self, block: Block) -> None:
        """Add one probe micro-batch.

        Raises:
            ValueError: values that are not finite, or a block of another size.
        """
        match block:
            case PerExample():
                for role, g in block.grads.items():
                    self._note_kind(g)
                    self._sides[role].add(_at_least_float32(g).flatten(1), block.batch_size)
            case Lookup():
                self._note_kind(block.b)
                self._sides["input"].add_diagonal(_row_counts(block, self._structure.sharing), block.batch_size)
                self._sides["output"].add(*_output_rows(block.b, self._structure.sharing))
            case Outer():
                self._note_kind(block.b)
                self._sides["input"].add(*_input_rows(block.a, self._structure.sharing))
                self._sides["output"].add(*_output_rows(block.b, self._structure.sharing))

    def _note_kind(self, gradient: Tensor) -> None:
        self._dtype, self._device = _at_least_float32(gradient).dtype, gradient.device

    def result(self) -> LayerFactors:
        """The layer's factors."""
        return LayerFactors(
            kind=self.kind,
            sides={name: side.result() for name, side in self._sides.items()},
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
            notes={name: side.note for name, side in self._sides.items() if side.note},
        )


def _at_least_float32(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()


def _input_rows(a: Tensor, sharing: str) -> tuple[Tensor, int]:
    """(rows, divisor) of A from `[N * groups, T, d_in]`."""
    a = _at_least_float32(a)
    rows = a.flatten(0, 1) if sharing == "expand" else a.mean(1)
    return rows, a.shape[0]


def _output_rows(b: Tensor, sharing: str) -> tuple[Tensor, int]:
    """(rows, divisor) of G from `[N * groups, T, d_out]`."""
    b = _at_least_float32(b)
    rows = b.flatten(0, 1) if sharing == "expand" else b.sum(1)
    return rows, rows.shape[0]


def _row_counts(block: Lookup, sharing: str) -> Tensor:
    """Diagonal of Σ_n a aᵀ for one-hot inputs, `[num_rows]`: how often each row is read."""
    if sharing == "expand":
        return torch.bincount(block.ids.flatten(), minlength=block.num_rows)
    total = torch.zeros(block.num_rows, dtype=torch.float64, device=block.ids.device)
    for ids in block.ids:
        total += (torch.bincount(ids, minlength=block.num_rows) / ids.numel()).square()
    return total


def kronecker_factors(block: Outer, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """The factors of a matrix-shaped layer as dense matrices.

    Args:
        block: inputs and output gradients of N examples.
        sharing: expand or reduce.

    Returns:
        (A `[d_in, d_in]`, G `[d_out, d_out]`), undamped.
    """
    a, n_a = _input_rows(block.a, sharing)
    b, n_b = _output_rows(block.b, sharing)
    return a.T @ a / n_a, b.T @ b / n_b
