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

__all__ = ["PER", "Moments", "squared_gradients"]

PER = ("example", "batch")
_CHUNK_ELEMENTS = 1 << 22
_ROLE = "weight"  # the one name of a matrix-shaped layer's moments


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


def squared_gradients(block: Block, per: str) -> Moments:
    """The moments of one micro-batch.

    Args:
        block: one layer's contribution, in the per-example scale.
        per: `example` squares every example's gradient, `batch` the mean over the micro-batch.

    Raises:
        ValueError: a gradient that is not finite.
        TypeError: a block of another kind.
    """
    with torch.no_grad():
        squares, groups = _squares(block, per)
    kinds: dict[type, str] = {PerExample: "elementwise", Lookup: "lookup", Tied: "tied", Outer: "outer"}
    if any(not bool(torch.isfinite(x).all()) for x in squares.values()):
        raise ValueError("NaN or infinity in the layer's gradients on the probe")
    dtype = next(x for x in _tensors(block)).dtype
    dtype = dtype if dtype == torch.float64 else torch.float32
    return Moments(kinds[type(block)], squares, block.batch_size if per == "example" else 1, dtype, groups)


def _tensors(block: Block) -> Iterator[Tensor]:
    match block:
        case PerExample():
            yield from block.grads.values()
        case Tied():
            yield block.outer.b
        case _:
            yield block.b


def _squares(block: Block, per: str) -> tuple[dict[str, Tensor], int]:
    """(role to Σ g² over examples, or to the square of the mean; groups)."""
    match block:
        case PerExample():
            grads = {role: g.detach().double() for role, g in block.grads.items()}
            if per == "batch":
                return {role: g.mean(0).square() for role, g in grads.items()}, 1
            return {role: g.square().sum(0) for role, g in grads.items()}, 1
        case Outer():
            block = block.explicit()
            squares = _outer_sum(block).square() if per == "batch" else _outer_squares(block)
            return {_ROLE: squares.mean(0)}, block.groups
        case Lookup():
            return {_ROLE: _lookup_squares(block, per).T}, 1
        case Tied():
            return {_ROLE: _tied_squares(block, per)}, 1
    raise TypeError(f"no second moments are known for a {type(block).__name__}")


def _outer_sum(block: Outer) -> Tensor:
    """The mean gradient over examples, `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1).flatten(1, 2) for x in (block.a, block.b))
    return b.mT @ a / block.batch_size


def _outer_squares(block: Outer) -> Tensor:
    """Σ_n g_n² `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1) for x in (block.a, block.b))
    if block.a.shape[1] == 1:
        return b[:, :, 0].square().mT @ a[:, :, 0].square()
    total = b.new_zeros(block.groups, b.shape[-1], a.shape[-1])
    for rows in _chunks(block.batch_size, total.numel()):
        total += (b[:, rows].mT @ a[:, rows]).square().sum(1)
    return total


def _lookup_squares(block: Lookup, per: str) -> Tensor:
    """`[V, d]`; rows that an example reads twice add up before they are squared."""
    n, v = block.batch_size, block.num_rows
    rows, total = block.b.double().flatten(0, 1), block.b.new_zeros(v, block.b.shape[-1], dtype=torch.float64)
    if per == "batch":
        return total.index_add_(0, block.ids.flatten(), rows).div_(n).square()
    example = torch.arange(n, device=block.ids.device).unsqueeze(1) * v
    keys, inverse = torch.unique((block.ids + example).flatten(), return_inverse=True)
    sums = rows.new_zeros(len(keys), rows.shape[1]).index_add_(0, inverse, rows)
    return total.index_add_(0, keys % v, sums.square())


def _tied_squares(block: Tied, per: str) -> Tensor:
    """`[V, d]` of the sum of both uses."""
    total = block.outer.b.new_zeros(block.lookup.num_rows, block.outer.a.shape[-1], dtype=torch.float64)
    if per == "batch":
        total += _outer_sum(block.outer)[0]
        rows = block.lookup.b.double().flatten(0, 1) / block.batch_size
        return total.index_add_(0, block.lookup.ids.flatten(), rows).square()
    for part in _chunks(block.batch_size, total.numel()):
        lookup = replace(block.lookup, ids=block.lookup.ids[part], b=block.lookup.b[part].double())
        outer = replace(block.outer, a=block.outer.a[part].double(), b=block.outer.b[part].double())
        total += Tied(lookup, outer).per_example().square().sum(0)
    return total


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, math.ceil(_CHUNK_ELEMENTS / max(1, elements_each)))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
