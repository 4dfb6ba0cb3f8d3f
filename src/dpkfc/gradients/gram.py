"""Squared norms through Gram matrices, each a function of its own example and sure of its first two digits.

What rounding may take from a square is bounded beside it; where that is more than a small share of the square, the rows of
that example, and of it alone, are taken again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Outer
from dpkfc.gradients.lengths import TINY, lengths, within_reach
from dpkfc.gradients.put_off import any_of
from dpkfc.gradients.reread import Reread

__all__ = ["SURE", "chunks", "gram_norms", "input_squares", "lookup_squares", "magnitudes_of_rows", "roundoff"]

_CHUNK_ELEMENTS = 1 << 24
_DEPTH = 256  # entries of rows whose products are added up in float32
SURE = 2.0**-8  # share of a squared norm that rounding may move; beyond it the norm is taken in float64
_LEAST = torch.finfo(torch.float32).tiny  # below it numbers lose bits, and then vanish


def gram_norms(block: Outer, reread: Reread | None = None) -> Tensor:
    """Upper bounds of ‖Σ_t b_t a_tᵀ‖ `[N * groups]` in float64; `reread` has what other layers have made of the same inputs."""
    t, size = block.a.shape[1], block.d_in + block.b.shape[2]
    pieces = [block.b.new_zeros(0, dtype=torch.float64)]
    for rows in chunks(block.a.shape[0], t * t):
        part = replace(block, a=block.a[rows], b=block.b[rows])
        square, magnitudes, positions = _gram_squares(part, reread or Reread())
        square = torch.where(positions == 1, magnitudes.square(), square)
        rounding = (positions + size) * roundoff(block.a) * magnitudes.square()
        pieces.append((square.clamp(min=0) + rounding + 0 * square).sqrt())  # NaN in the Gram stays NaN
    return torch.cat(pieces)


def _gram_squares(block: Outer, reread: Reread) -> tuple[Tensor, Tensor, Tensor]:
    """‖Σ_t b_t a_tᵀ‖², Σ_t ‖a_t‖‖b_t‖ and the number of positions that count, each `[n]` in float64."""
    into = reread.of(block.a, ("lengths", block.homogeneous), lambda: input_squares(block).sqrt())
    inputs = reread.of(block.a, ("products", block.homogeneous), lambda: _input_products(block))
    out, outputs = lengths(block.b), _products(block.b)
    magnitudes, positions = (into * out).sum(1), (out > 0).sum(1)
    square = (inputs * outputs).sum((1, 2)).double()
    if block.b.dtype != torch.float32:
        return square, magnitudes, positions
    widths = (min(block.d_in, _DEPTH + 2), min(block.b.shape[2], _DEPTH + 2))
    size = sum(widths) + 2 * math.log2(block.a.shape[1]) + 8
    terms = size + block.d_in + block.b.shape[2]  # products of tiny rows may vanish, and are taken times those of huge ones
    lost = terms * _LEAST * (into.sum(1) + out.sum(1) + positions).square()
    unsure = ~(size * roundoff(block.b) * magnitudes.square() <= SURE * square) | (square <= lost / SURE)
    unsure &= magnitudes > 0
    if any_of(unsure):
        rows = unsure.nonzero()[:, 0]
        closer = _gram_rounding(inputs[rows], outputs[rows], into[rows], out[rows], widths)
        rows = rows[~(closer <= SURE * square[rows]) | (square[rows] <= lost[rows] / SURE)]
        if len(rows):
            exact = replace(block, a=block.a[rows].double(), b=block.b[rows].double())
            square[rows] = _gram_squares(exact, Reread())[0]
    return square, magnitudes, positions


def _input_products(block: Outer) -> Tensor:
    """Inner products of the inputs `[n, t, t]`, with the implied coordinate."""
    products = _products(block.a)
    return products.add_(1) if block.homogeneous else products


def _products(x: Tensor) -> Tensor:
    """Inner products of the rows `[n, t, t]` of `[n, t, d]`; of long float32 rows piece by piece, which are added in float64."""
    if x.dtype != torch.float32 or x.shape[2] <= _DEPTH:
        return torch.bmm(x, x.mT)
    found = x.new_zeros(*x.shape[:2], x.shape[1], dtype=torch.float64)
    for part in x.split(_DEPTH, 2):
        found += torch.bmm(part, part.mT)
    return found


def _gram_rounding(inputs: Tensor, outputs: Tensor, into: Tensor, out: Tensor, widths: tuple[int, int]) -> Tensor:
    """Upper bound `[n]` of what rounding moves the sum of inputs ⊙ outputs by.

    Entries of the one are off by d u of the lengths that they come from, which counts by the size of the other (d is the depth
    of a piece, where rows are long); adding up costs the depth of the sum.
    """
    u, t = torch.finfo(torch.float32).eps / 2, inputs.shape[1]
    a, b = inputs.abs().double(), outputs.abs().double()
    along_in = torch.einsum("ns,nst,nt->n", into, b, into)
    along_out = torch.einsum("ns,nst,nt->n", out, a, out)
    depth = 2 * math.log2(t) + 8
    return u * (widths[0] * along_in + widths[1] * along_out + depth * (a * b).sum((1, 2)))


def input_squares(block: Outer) -> Tensor:
    """‖a_t‖² with the implied coordinate, `[N * groups, T]`."""
    return within_reach(lengths(block.a), block.a).square() + float(block.homogeneous)


def magnitudes_of_rows(block: Outer) -> tuple[Tensor, Tensor]:
    """Upper bounds of Σ_t ‖a_t‖‖b_t‖, and how many positions have a gradient, each `[N * groups]`."""
    out = lengths(block.b)
    return (input_squares(block).sqrt() * out).sum(1), (out > 0).sum(1)


def lookup_squares(ids: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t e(id_t) b_tᵀ‖² and what rounding may take from it, `[n]` in float64."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    long = lengths(b)
    square = (torch.bmm(b, b.transpose(1, 2)) * same).sum((1, 2)).double()
    products = torch.einsum("nt,nts,ns->n", long, same.double(), long)
    slack = ((long > 0).sum(1) + b.shape[-1]) * roundoff(b) * products
    unsure = (~(slack <= SURE * square) | (square < TINY)) & (products > 0)
    if b.dtype == torch.float32 and any_of(unsure):
        square[unsure] = lookup_squares(ids[unsure], b[unsure].double())[0]
    return square, slack


def roundoff(x: Tensor) -> float:
    """Unit roundoff of the type of a tensor."""
    return torch.finfo(x.dtype).eps / 2


def chunks(count: int, elements_each: int) -> Iterator[slice]:
    """Slices of 0 … count, each of which holds a bounded number of elements."""
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
