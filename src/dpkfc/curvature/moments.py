"""Second moments of gradients, entry by entry: what diagonal metrics are made of.

    example    v = 1/N Σ_n g_n²                     the diagonal of the Fisher information (labels drawn from the model)
    batch      v = 1/M Σ_m (1/B Σ_(n in m) g_n)²    squares of mini-batch means, as RMSProp sees public data (AdaDPS)

Moments of a matrix-shaped layer have the layout of its metric: `[d_out, d_in]` with the bias in the last column, averaged
over the groups of a convolution, `[d, V]` for an embedding and `[V, d]` for a tied table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.blocks import Block, Lookup, Outer, PerExample, Tied
from dpkfc.metric import Eigenbasis, Elementwise, Entry

__all__ = ["PER", "Moments", "Sums", "squared_gradients", "summed_gradients"]

PER = ("example", "batch")
_CHUNK_ELEMENTS = 1 << 22
_ROLE = "weight"  # the one name of a matrix-shaped layer's moments
_KINDS: dict[type, str] = {PerExample: "elementwise", Lookup: "lookup", Tied: "tied", Outer: "outer"}


@dataclass(frozen=True)
class Moments:
    """Σ of squares of one layer over `count` gradients; both add up over micro-batches.

    Attributes:
        kind: outer, lookup, tied or elementwise, as in `LayerFactors`.
        squares: float64, role to the layout above (`weight` alone for matrix-shaped layers).
        count: gradients that were squared.
        dtype: of the layer's gradients.
        groups: of a convolution.
    """

    kind: str
    squares: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype
    groups: int = 1

    def plus(self, other: Moments) -> Moments:
        """The moments of both."""
        squares = {role: x + other.squares[role] for role, x in self.squares.items()}
        return replace(self, squares=squares, count=self.count + other.count)

    @property
    def mean(self) -> dict[str, Tensor]:
        """v, float64."""
        return {role: x / self.count for role, x in self.squares.items()}

    def entry(self, scale: Mapping[str, Tensor]) -> Entry:
        """The diagonal map with these factors, in the layout of `squares`."""
        typed = {role: x.to(self.dtype).contiguous() for role, x in scale.items()}
        return Elementwise(typed) if self.kind == "elementwise" else Eigenbasis(typed[_ROLE])

    @property
    def shapes(self) -> dict[str, Any]:
        """Kind and sizes of the sides, for `Preconditioner.check`."""
        if self.kind == "elementwise":
            return {"kind": self.kind, **{role: list(x.shape) for role, x in self.squares.items()}}
        d_out, d_in = self.squares[_ROLE].shape
        return {"kind": self.kind, "input": [d_in], "output": [d_out]}


@dataclass(frozen=True)
class Sums:
    """Σ g of one layer over `count` examples, which add up over the parts of a mini-batch.

    Attributes:
        kind: as in `Moments`.
        sums: float64, role to `[groups, d_out, d_in]`, `[V, d]` of a table, or the shape of the parameter.
        count: examples.
        dtype: of the layer's gradients.
    """

    kind: str
    sums: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        sums = {role: x + other.sums[role] for role, x in self.sums.items()}
        return replace(self, sums=sums, count=self.count + other.count)

    def squared(self, size: int | None = None) -> Moments:
        """The moments of one mini-batch: the square of the mean over `size` examples, by default those that were added.

        Raises:
            ValueError: a gradient that is not finite.
        """
        squares = {role: (x / (size or self.count)).square() for role, x in self.sums.items()}
        groups = squares[_ROLE].shape[0] if self.kind == "outer" else 1
        if self.kind == "outer":
            squares = {_ROLE: squares[_ROLE].mean(0)}
        elif self.kind == "lookup":
            squares = {_ROLE: squares[_ROLE].T}
        _check_finite(squares)
        return Moments(self.kind, squares, 1, self.dtype, groups)


def summed_gradients(block: Block) -> Sums:
    """The sum of one layer's gradients over the examples of a block.

    Raises:
        TypeError: a block of another kind.
    """
    with torch.no_grad():
        match block:
            case PerExample():
                sums = {role: g.detach().double().sum(0) for role, g in block.grads.items()}
            case Outer():
                sums = {_ROLE: _outer_sum(block.explicit())}
            case Lookup():
                sums = {_ROLE: _scattered(block, block.b.new_zeros(block.num_rows, block.b.shape[-1], dtype=torch.float64))}
            case Tied():
                sums = {_ROLE: _scattered(block.lookup, _outer_sum(block.outer)[0])}
            case _:
                raise _unknown(block)
    return Sums(_KINDS[type(block)], sums, block.batch_size, _dtype(block))


def squared_gradients(block: Block, per: str) -> Moments:
    """The moments of one micro-batch.

    Args:
        block: one layer's contribution, in the per-example scale.
        per: `example` squares every example's gradient, `batch` the mean over the micro-batch.

    Raises:
        ValueError: a gradient that is not finite.
        TypeError: a block of another kind.
    """
    if per == "batch":
        return summed_gradients(block).squared()
    with torch.no_grad():
        squares, groups = _squares(block)
    _check_finite(squares)
    return Moments(_KINDS[type(block)], squares, block.batch_size, _dtype(block), groups)


def _check_finite(squares: Mapping[str, Tensor]) -> None:
    if any(not bool(torch.isfinite(x).all()) for x in squares.values()):
        raise ValueError("NaN or infinity in the layer's gradients on the probe")


def _dtype(block: Block) -> torch.dtype:
    dtype = next(x for x in _tensors(block)).dtype
    return dtype if dtype == torch.float64 else torch.float32


def _tensors(block: Block) -> Iterator[Tensor]:
    match block:
        case PerExample():
            yield from block.grads.values()
        case Tied():
            yield block.outer.b
        case _:
            yield block.b


def _unknown(block: Any) -> TypeError:
    return TypeError(f"no second moments are known for a {type(block).__name__}")


def _squares(block: Block) -> tuple[dict[str, Tensor], int]:
    """(role to Σ g² over examples, groups)."""
    match block:
        case PerExample():
            return {role: g.detach().double().square().sum(0) for role, g in block.grads.items()}, 1
        case Outer():
            return {_ROLE: _outer_squares(block.explicit()).mean(0)}, block.groups
        case Lookup():
            return {_ROLE: _lookup_squares(block).T}, 1
        case Tied():
            return {_ROLE: _tied_squares(block)}, 1
    raise _unknown(block)


def _outer_sum(block: Outer) -> Tensor:
    """Σ g over examples, `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1).flatten(1, 2) for x in (block.a, block.b))
    return b.mT @ a


def _scattered(block: Lookup, total: Tensor) -> Tensor:
    """`total` `[V, d]` with the gradients of the rows that are read added to it."""
    return total.index_add_(0, block.ids.flatten(), block.b.double().flatten(0, 1))


def _outer_squares(block: Outer) -> Tensor:
    """Σ_n g_n² `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1) for x in (block.a, block.b))
    if block.a.shape[1] == 1:
        return b[:, :, 0].square().mT @ a[:, :, 0].square()
    total = b.new_zeros(block.groups, b.shape[-1], a.shape[-1])
    for rows in _chunks(block.batch_size, total.numel()):
        total += (b[:, rows].mT @ a[:, rows]).square().sum(1)
    return total


def _lookup_squares(block: Lookup) -> Tensor:
    """`[V, d]`; rows that an example reads twice add up before they are squared."""
    n, v = block.batch_size, block.num_rows
    rows, total = block.b.double().flatten(0, 1), block.b.new_zeros(v, block.b.shape[-1], dtype=torch.float64)
    example = torch.arange(n, device=block.ids.device).unsqueeze(1) * v
    keys, inverse = torch.unique((block.ids + example).flatten(), return_inverse=True)
    sums = rows.new_zeros(len(keys), rows.shape[1]).index_add_(0, inverse, rows)
    return total.index_add_(0, keys % v, sums.square())


def _tied_squares(block: Tied) -> Tensor:
    """`[V, d]` of the sum of both uses."""
    total = block.outer.b.new_zeros(block.lookup.num_rows, block.outer.a.shape[-1], dtype=torch.float64)
    for part in _chunks(block.batch_size, total.numel()):
        lookup = replace(block.lookup, ids=block.lookup.ids[part], b=block.lookup.b[part].double())
        outer = replace(block.outer, a=block.outer.a[part].double(), b=block.outer.b[part].double())
        total += Tied(lookup, outer).per_example().square().sum(0)
    return total


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, math.ceil(_CHUNK_ELEMENTS / max(1, elements_each)))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
