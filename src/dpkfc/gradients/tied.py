"""One weight `[V, d]` used as an embedding table and as the weight of a linear layer: the norm of the SUM of its uses.

With rows read `id_s` and gradients c_s at the embedding's output, inputs a_t and gradients b_t of the linear layer,

    g = Σ_s e(id_s) c_sᵀ + Σ_t b_t a_tᵀ
    ‖g‖² = Σ_{s,s'} [id_s = id_s'] c_s·c_s' + Σ_{t,t'} (a_t·a_t')(b_t·b_t') + 2 Σ_{s,t} b_t[id_s] (c_s·a_t)

and no gradient of V·d entries is formed. In a metric `U_out g U_in` with diagonal U_out = diag(o) the same holds for
`o[id_s] U_in c_s`, `U_in a_t` and `o b_t`.

Rounding, with u the unit roundoff, γ_k = min(k, 4 √k) u for a dot product of length k (Higham and Mary 2019) and
M = Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖: the squared norm loses at most (γ_d + γ_V + 4 u) M², entries being added up in float64. A
gradient that is formed once for its norm and again for the sum is bounded as in `norms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Outer, Tied
from dpkfc.gradients.lengths import within_reach
from dpkfc.gradients.put_off import any_of
from dpkfc.metric import Dense, Diagonal, Identity, Kronecker, LowRank

__all__ = ["tied_costs", "tied_norms"]

_CHUNK_ELEMENTS = 1 << 24
_SMALL = 1 << 14  # entries of a table up to which its gradients are formed
_SURE = 2.0**-8  # share of a norm that the order of its terms may move
_CANCELS = 2.0**-3  # slack over squared norm from which on the norm is taken in float64


def tied_costs(block: Tied, metric: Kronecker) -> tuple[str, float, float]:
    """(method, multiplications an example for Gram matrices, and for the gradient formed); the widths alone decide."""
    s, (t, d) = block.lookup.ids.shape[1], block.outer.a.shape[1:]
    v = block.lookup.num_rows
    match metric.input:
        case Dense():
            a_row = d * d
        case LowRank():
            a_row = 2 * d * metric.input.vectors.shape[1]
        case _:
            a_row = d
    gram = (s + t) * a_row + t * v + s * s * d + t * t * (v + d) + s * t * d
    formed = t * v * d + v * a_row + v * d
    return "materialised" if v * d <= _SMALL else "gram", float(gram), float(formed)


def tied_norms(block: Tied, metric: Kronecker, method: str | None = None) -> tuple[Tensor, Tied, bool]:
    """Upper bounds of ‖U_out g_n U_in‖ `[N]`, what the clipped sum is to be taken of, and whether that is whitened.

    Args:
        block: the uses of the weight.
        metric: input side over d, output side over V.
        method: gram or materialised to overrule the cost rule.

    Raises:
        ValueError: an output side that is neither diagonal nor the identity.
    """
    if not isinstance(metric.output, (Identity, Diagonal)):
        raise ValueError(
            "the output side of a tied embedding runs over its rows and must be diagonal or the identity, not "
            f"{type(metric.output).__name__}"
        )
    if (method or tied_costs(block, metric)[0]) == "materialised":
        return _formed_norms(block, metric), block, False
    rows = _whitened(block, metric)
    return _gram_norms(rows), rows, True


def _whitened(block: Tied, metric: Kronecker) -> Tied:
    """The rows `o[id] U_in c`, `U_in a` and `o b`."""
    if metric.is_identity:
        return block
    c, a = metric.input.apply(block.lookup.b), metric.input.apply(block.outer.a)
    if isinstance(metric.output, Diagonal):
        c = c * metric.output.scale[block.lookup.ids].unsqueeze(-1)
    else:
        c = metric.output.apply(c)
    return Tied(replace(block.lookup, b=c), Outer(a, metric.output.apply(block.outer.b)))


def _gram_norms(block: Tied) -> Tensor:
    s, t = block.lookup.ids.shape[1], block.outer.a.shape[1]
    info, size = torch.finfo(block.outer.b.dtype), block.outer.a.shape[2] + block.lookup.num_rows
    rounding = (_dot(block.outer.a.shape[2]) + _dot(block.lookup.num_rows) + 4) * info.eps / 2
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for rows in _chunks(block.batch_size, (s + t) ** 2):
        part = _examples(block, rows)
        magnitudes, rows_together = _magnitudes(part)
        square, slack = _gram_squares(part), rounding * magnitudes.square()
        lost = size * info.tiny * (rows_together + _own_positions(part)).square()  # products of tiny rows, times huge ones
        # Where positions cancel, what rounding makes of them follows the shapes, and with those the other examples.
        unsure = (~(slack <= _CANCELS * square) | (square <= lost / _CANCELS)) & (magnitudes > 0)
        if part.outer.b.dtype == torch.float32 and any_of(unsure):
            square[unsure] = _gram_squares(_in_double(part, unsure))
        pieces.append((square.clamp(min=0) + slack + 0 * square).sqrt())  # NaN in a Gram matrix stays NaN
    return torch.cat(pieces)


def _gram_squares(block: Tied) -> Tensor:
    """‖g_n‖² `[n]`, added up in float64."""
    ids, c, a, b = block.lookup.ids, block.lookup.b, block.outer.a, block.outer.b
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    read = b.gather(2, ids.unsqueeze(1).expand(-1, a.shape[1], -1))
    return (
        _total(torch.bmm(c, c.mT) * same)
        + _total(torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT)))
        + 2 * _total(torch.bmm(a, c.mT).mul_(read))
    )


def _in_double(block: Tied, rows: Tensor) -> Tied:
    """Some of the examples in float64."""
    lookup = replace(block.lookup, ids=block.lookup.ids[rows], b=block.lookup.b[rows].double())
    return Tied(lookup, Outer(block.outer.a[rows].double(), block.outer.b[rows].double()))


def _formed_norms(block: Tied, metric: Kronecker) -> Tensor:
    """Gradients formed in chunks for their norms, while the sum comes from one product over the batch."""
    d, v = block.outer.a.shape[2], block.lookup.num_rows
    unit = torch.finfo(block.outer.b.dtype).eps / 2 * metric.input.bound * metric.output.bound
    whitening = 0.0 if metric.is_identity else 4 * (math.sqrt(d) + math.sqrt(v))
    pieces = [block.outer.b.new_zeros(0, dtype=torch.float64)]
    for rows in _chunks(block.batch_size, v * d):
        part = _examples(block, rows)
        g = part.per_example()
        plain = _lengths(g.flatten(1))
        norms = plain if metric.is_identity else _lengths(metric.whiten(g).flatten(1))
        magnitudes, positions = _magnitudes(part)[0], _own_positions(part)
        slack = positions * magnitudes + (whitening + 2 * math.sqrt(v * d)) * plain
        order = positions.double().sqrt() / _SURE * magnitudes  # cancelled so far that the norm is a matter of their order
        pieces.append(torch.maximum(norms + unit * slack, torch.where(positions > 1, unit * order, 0.0)))
    return torch.cat(pieces)


def _magnitudes(block: Tied) -> tuple[Tensor, Tensor]:
    """Σ_s ‖c_s‖ + Σ_t ‖a_t‖‖b_t‖ and Σ_s ‖c_s‖ + Σ_t ‖a_t‖ + ‖b_t‖, each `[N]`."""
    c, b = _lengths(block.lookup.b).sum(1), _lengths(block.outer.b)
    a = within_reach(_lengths(block.outer.a), block.outer.a)
    return c + (a * b).sum(1), c + (a + b).sum(1)


def _own_positions(block: Tied) -> Tensor:
    """Uses of each example that have a gradient `[N]`."""
    return sum((b != 0).any(-1).sum(1) for b in (block.lookup.b, block.outer.b))  # type: ignore[return-value]


def _examples(block: Tied, rows: slice) -> Tied:
    lookup = replace(block.lookup, ids=block.lookup.ids[rows], b=block.lookup.b[rows])
    return Tied(lookup, Outer(block.outer.a[rows], block.outer.b[rows]))


def _dot(length: int) -> float:
    return min(float(length), 4 * math.sqrt(length))


def _lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _total(x: Tensor) -> Tensor:
    return x.sum((1, 2), dtype=torch.float64)


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
