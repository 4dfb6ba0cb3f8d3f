"""Norms of one weight `[V, d]` that is an embedding table and a linear layer's weight.

The norm is of the SUM of its uses.

With rows read `id_s` and gradients c_s at the embedding's output, inputs a_t and gradients b_t of
the linear layer,

    g = Σ_s e(id_s) c_sᵀ + Σ_t b_t a_tᵀ
    ‖g‖² = Σ_{s,s'} [id_s = id_s'] c_s·c_s' + Σ_{t,t'} (a_t·a_t')(b_t·b_t')
           + 2 Σ_{s,t} b_t[id_s] (c_s·a_t)

and no gradient of V·d entries is formed. In a metric `U_out g U_in` with diagonal U_out = diag(o)
the same holds for `o[id_s] U_in c_s`, `U_in a_t` and `o b_t`.

Rounding, with u the unit roundoff, γ_k = min(k, 4 √k) u for a dot product of length k (Higham and
Mary 2019) and M = Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖: the squared norm loses at most (γ_d + γ_V + 4 u)
M², where entries are added in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.linalg.blocks import Outer, Tied, roundoff, sum_squares
from dpkfc.linalg.deferred_flags import is_any_set
from dpkfc.linalg.magnitudes import bound_magnitudes, count_uses
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norm_bounds import MAX_ROUNDING_FRACTION, LayerNorms, MatrixMap, is_unsure, root
from dpkfc.linalg.norm_methods import choose_norm_method
from dpkfc.linalg.row_norms import dot_rounding, exact_row_norms, limit_inputs, row_norms

_TIED_ROUNDING_LIMIT = 2.0**-3  # fraction of a square; beyond it the square needs float64


def tied_norms(block: Tied, metric: MatrixMap, method: str | None) -> LayerNorms:
    """Return the norms of ‖U_out g_n U_in‖ and the block to sum.

    Args:
        block: the uses of the weight.
        metric: input side over d, output side over V.
        method: gram or materialised, None for the rule.

    Raises:
        ValueError: an output side that is neither diagonal nor the identity.
    """
    if isinstance(metric, Eigenbasis):
        return LayerNorms(_eigenbasis_tied_norms(block, metric), block)
    if not metric.output.is_diagonal:
        raise ValueError(
            "the output side of a tied embedding runs over its rows and must be diagonal or the "
            f"identity, not {type(metric.output).__name__}"
        )
    method = method or choose_norm_method(block)
    if method == "materialised":
        return LayerNorms(_materialised_tied_norms(block, metric), block)
    rows = _whiten_tied(block, metric)
    return LayerNorms(_gram_tied_norms(rows), rows, whitened=True)


def _whiten_tied(block: Tied, metric: Kronecker) -> Tied:
    """Return the rows `o[id] U_in c`, `U_in a` and `o b`."""
    if metric.is_identity:
        return block
    a = metric.input.apply(block.outer.a)
    b = metric.output.apply(block.outer.b)
    c = metric.input.apply(block.lookup.b)
    c = metric.output.apply_at(c, block.lookup.ids)
    lookup = replace(block.lookup, b=c)
    return Tied(lookup, Outer(a, b))


def _gram_tied_norms(block: Tied) -> Tensor:
    """Return norms by products of rows; those that nearly cancel are computed in float64."""
    s = block.lookup.ids.shape[1]
    _, t, d = block.outer.a.shape
    v = block.d_out
    tiny = torch.finfo(block.like.dtype).tiny
    units = dot_rounding(d) + dot_rounding(v) + 4
    rounding = units * roundoff(block.like)

    def bound(part: Tied) -> Tensor:
        magnitudes, rows_together = _tied_magnitudes(part)
        square = _tied_gram_squares(part)
        slack = rounding * magnitudes.square()
        # Products of tiny rows may vanish, and are multiplied with products of huge rows.
        sizes = rows_together + count_uses(part)
        lost = (d + v) * tiny * sizes.square()
        # Where positions cancel, rounding follows the shapes, and with them the other examples.
        unsure = is_unsure(square, slack, lost, _TIED_ROUNDING_LIMIT)
        unsure &= magnitudes > 0
        if part.like.dtype == torch.float32 and is_any_set(unsure):
            exact = part.select(unsure).double()
            square[unsure] = _tied_gram_squares(exact)
        return root(square, slack)

    return block.map_examples(bound, (s + t) ** 2)


def _tied_gram_squares(block: Tied) -> Tensor:
    """Return ‖g_n‖² `[n]`, added in float64."""
    a = block.outer.a
    b = block.outer.b
    c = block.lookup.b
    lookup_products = torch.bmm(c, c.mT)
    lookup_products *= block.lookup.find_same_ids()
    outer_products = torch.bmm(a, a.mT)
    outer_products *= torch.bmm(b, b.mT)
    mixed_products = torch.bmm(a, c.mT)
    mixed_products *= block.read_outputs()
    squares = _sum_products(lookup_products) + _sum_products(outer_products)
    return squares + 2 * _sum_products(mixed_products)


def _sum_products(x: Tensor) -> Tensor:
    """Return the sum of each matrix of `[n, s, t]`, in float64."""
    return x.sum((1, 2), dtype=torch.float64)


def _materialised_tied_norms(block: Tied, metric: Kronecker) -> Tensor:
    """Return norms of gradients that are formed in chunks; the sum comes from one product."""
    u = roundoff(block.like)
    unit = u * metric.input.operator_norm * metric.output.operator_norm
    terms = 2 * math.sqrt(block.num_entries)
    if not metric.is_identity:
        whitening = math.sqrt(block.d_in) + math.sqrt(block.d_out)
        terms = 4 * whitening + terms

    def bound(part: Tied) -> Tensor:
        g = part.per_example()
        plain = exact_row_norms(g.flatten(1))
        norms = plain
        if not metric.is_identity:
            z = metric.apply(g)
            norms = exact_row_norms(z.flatten(1))
        magnitudes, _ = _tied_magnitudes(part)
        positions = count_uses(part)
        slack = positions * magnitudes + terms * plain
        # If positions cancel almost completely, the norm depends on their order.
        order = positions.double().sqrt() / MAX_ROUNDING_FRACTION * magnitudes
        least = torch.where(positions > 1, unit * order, 0.0)
        return torch.maximum(norms + unit * slack, least)

    return block.map_examples(bound, block.num_entries)


def _tied_magnitudes(block: Tied) -> tuple[Tensor, Tensor]:
    """Return Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖ and Σ_s ‖c_s‖ + Σ_t (‖a_t‖ + ‖b_t‖), each `[N]`."""
    inputs = block.outer.a
    a = limit_inputs(exact_row_norms(inputs), inputs)
    b = exact_row_norms(block.outer.b)
    c = exact_row_norms(block.lookup.b).sum(1)
    products = (a * b).sum(1)
    sums = (a + b).sum(1)
    return c + products, c + sums


def _eigenbasis_tied_norms(block: Tied, metric: Eigenbasis) -> Tensor:
    """Return norms of gradients that are formed and rotated in chunks."""

    def square(part: Tied) -> Tensor:
        z = metric.apply(part.per_example())
        return sum_squares(z.flatten(1))

    norms = block.map_examples(square, block.num_entries).sqrt()
    magnitudes, positions = bound_magnitudes(block.outer)
    lookup_norms = row_norms(block.lookup.b)
    magnitudes += lookup_norms.sum(1)
    uses = positions + (lookup_norms > 0).sum(1)
    rotation = 8 * math.sqrt(block.d_in + block.d_out)
    terms = uses + rotation
    slack = terms * roundoff(block.like) * metric.operator_norm * magnitudes
    return norms + slack
