"""Norms of rows: upper bounds, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpkfc.linalg.deferred_flags import is_on_accelerator

TINY = 2.0**-80
"""Squared norms below it may have lost terms that are too small for float32."""
_SHORT = 64  # longest piece of a row that is summed in float32
_GRAM_DEPTH = 288  # most columns that are multiplied at once in float32, 256 and a few
_CACHED = 1 << 18  # entries whose copy in float64 stays in the caches of a processor
_REACH = 2.0**100


def count_pieces(d: int) -> int:
    """Return into how many pieces rows of d columns are cut for a Gram matrix."""
    return max(1, -(-d // _GRAM_DEPTH))


def count_terms(d: int) -> int:
    """Return how many terms of an entry of a Gram matrix are added one after another."""
    pieces = count_pieces(d)
    columns_of_a_piece = -(-d // pieces)
    return columns_of_a_piece + pieces


def row_norms(x: Tensor, products: Tensor | None = None) -> Tensor:
    """Return upper bounds of the norms over the last axis, in float64, each of its own row.

    The sum of k squares in float32 is off by a fraction of at most (k + 2) u. Rows are therefore
    cut into short pieces, whose sums are added in float64. The bound is tight, since another method
    may bound the same example in a neighbouring batch, where it may move by rounding alone. Rows
    whose squares leave the range of float32 are recomputed in float64. On a GPU, whose values
    the host does not wait for, such rows are bounded by √d times their largest entry.

    Args:
        x: rows `[..., d]`.
        products: inner products of the rows `[n, t, t]` where they are known, with the squares on
            their diagonal.
    """
    d = x.shape[-1]
    if x.dtype != torch.float32:
        return exact_row_norms(x)
    if products is None:
        terms = min(d, _SHORT)
        norms = _join_norms_of_pieces(x)
    else:
        terms = count_terms(d)
        norms = products.diagonal(dim1=1, dim2=2).double().sqrt()
    fraction_lost = (terms + 2) * torch.finfo(x.dtype).eps
    norms = norms * math.sqrt(1 + fraction_lost)
    if not x.numel():
        return norms
    return _mend_range(x, norms)


def _mend_range(x: Tensor, norms: Tensor) -> Tensor:
    """Return the norms of float32 rows, other ones where squares have left the range of float32."""
    d = x.shape[-1]
    # Each entry may lose a square that is too small for float32.
    least = 2 * math.sqrt(TINY * max(1.0, d / 4096))
    if is_on_accelerator(x):
        largest_entries = vector_norm(x, math.inf, dim=-1)
        bounds = largest_entries.double() * math.sqrt(d)
        return torch.where(_is_in_range(norms, least), norms, bounds)
    smallest, largest = norms.aminmax()
    if float(smallest) >= least and float(largest) < math.inf:
        return norms
    is_outside = ~_is_in_range(norms, least)
    norms[is_outside] = exact_row_norms(x[is_outside])
    return norms


def _is_in_range(norms: Tensor, least: float) -> Tensor:
    """Return which norms can be trusted; False for NaN."""
    return (norms >= least) & (norms < math.inf)


def has_columns(x: Tensor) -> bool:
    """Return whether rows `[n, t, d]` lie in memory as columns `[n, d, t]`."""
    return x.dim() == 3 and x.stride(-1) != 1 and x.mT.is_contiguous()


def _join_norms_of_pieces(x: Tensor) -> Tensor:
    """Return the norms over the last axis in float64, in float32 within a piece of `_SHORT`."""
    if has_columns(x):
        # Squares of rows that lie side by side are added much faster than along a row.
        sums = []
        for piece in x.mT.split(_SHORT, 1):
            squares = piece.square()
            sums.append(squares.sum(1))
        total = torch.stack(sums).sum(0, dtype=torch.float64)
        return total.sqrt()
    d = x.shape[-1]
    # Columns in whole pieces; the others are one shorter piece.
    whole = d - d % _SHORT
    if not whole:
        return vector_norm(x, dim=-1).double()
    pieces = x[..., :whole].unflatten(-1, (-1, _SHORT))
    norms = vector_norm(pieces, dim=-1)
    if whole < d:
        norm_of_rest = vector_norm(x[..., whole:], dim=-1, keepdim=True)
        norms = torch.cat([norms, norm_of_rest], -1)
    return vector_norm(norms, dim=-1, dtype=torch.float64)


def exact_row_norms(x: Tensor) -> Tensor:
    """Return the norms over the last axis, computed in float64."""
    is_small = x.numel() <= _CACHED or x.dtype == torch.float64
    if is_small or is_on_accelerator(x):
        return vector_norm(x, dim=-1, dtype=torch.float64)
    # A few rows at a time: a copy of all rows in float64 would leave the caches of a processor.
    d = x.shape[-1]
    rows_at_once = max(1, _CACHED // d)
    norms = []
    for rows in x.reshape(-1, d).split(rows_at_once):
        wide = rows.double()
        norms.append(vector_norm(wide, dim=-1))
    return torch.cat(norms).view(x.shape[:-1])


def limit_inputs(norms: Tensor, inputs: Tensor) -> Tensor:
    """Return norms of a layer's inputs, infinite beyond 2¹⁰⁰ in float32, which drops the example.

    The sum would multiply such inputs with output gradients times a clip factor below the least
    normal number. Their rounding would be more than the clip allows.
    """
    if inputs.dtype != torch.float32:
        return norms
    return norms.masked_fill(norms > _REACH, math.inf)


def dot_rounding(length: int) -> float:
    """Return how many units of roundoff a dot product loses (Higham and Mary 2019)."""
    return min(float(length), 4 * math.sqrt(length))
