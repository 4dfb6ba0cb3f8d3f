"""Per-example gradient norms on the probe, for the scale of a metric and for figures.

These norms choose a number and draw pictures; no sensitivity rests on them. The certified ones are in `gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpkfc.blocks import Block, Lookup, Outer, PerExample
from dpkfc.metric import Diagonal, Elementwise, Identity, Kronecker, Metric

__all__ = ["layer_squares", "probe_norms"]

_CHUNK_ELEMENTS = 1 << 22


def probe_norms(blocks: Mapping[str, Block], *metrics: Metric) -> list[Tensor]:
    """‖P g_n‖ over all layers for each of several metrics, `[N]` in float64 on the CPU.

    Layers without an entry in a metric count as they are. Every block is looked up once, so a mapping that forms them
    on demand holds one at a time.
    """
    totals: list[Tensor] = []
    for name in blocks:
        block = blocks[name]
        squares = [layer_squares(block, metric.get(name)).cpu() for metric in metrics]
        totals = [total + s for total, s in zip(totals, squares, strict=True)] if totals else squares
    return [total.sqrt() for total in totals]


def layer_squares(block: Block, entry: Kronecker | Elementwise | None) -> Tensor:
    """‖P g_n‖² of one layer, `[N]` in float64."""
    match block:
        case PerExample():
            scale = entry.scale if isinstance(entry, Elementwise) else {}
            mapped = [g * scale[role] if role in scale else g for role, g in block.grads.items()]
            return torch.stack([_squares(g.flatten(1)) for g in mapped]).sum(0)
        case Lookup():
            return _lookup_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
        case Outer():
            squares = _outer_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
            return squares.view(-1, block.groups).sum(1)


def _squares(x: Tensor) -> Tensor:
    """Σ x² over the last axis without overflow or underflow in float32."""
    return x.double().square().sum(-1)


def _outer_squares(block: Outer, entry: Kronecker) -> Tensor:
    """`[N * groups]`, from the cheaper of Gram matrices and materialised gradients."""
    positions, d_in, d_out = block.a.shape[1], block.a.shape[2], block.b.shape[2]
    if positions == 1:
        return _squares(entry.input.apply(block.a[:, 0])) * _squares(entry.output.apply(block.b[:, 0]))
    gram = positions * (d_in + d_out) < d_in * d_out
    size = positions * (positions + d_in + d_out) if gram else d_in * d_out
    step = max(1, _CHUNK_ELEMENTS // size)
    pieces = []
    for start in range(0, block.a.shape[0], step):
        a, b = block.a[start : start + step], block.b[start : start + step]
        if gram:
            a, b = entry.input.apply(a), entry.output.apply(b)
            pieces.append((torch.bmm(a, a.mT).double() * torch.bmm(b, b.mT).double()).sum((1, 2)).clamp(min=0))
        else:
            pieces.append(_squares(entry.whiten(torch.bmm(b.mT, a)).flatten(1)))
    return torch.cat(pieces)


def _lookup_squares(block: Lookup, entry: Kronecker) -> Tensor:
    """Rows with the same id add up first: a Gram matrix restricted to equal ids."""
    b = entry.output.apply(block.b).double()
    match entry.input:
        case Diagonal():
            b = b * entry.input.scale.double()[block.ids].unsqueeze(-1)
        case Identity():
            b = b * entry.input.factor
        case _:
            raise ValueError("the input side of an embedding must be diagonal or the identity")
    positions = block.ids.shape[1]
    step = max(1, _CHUNK_ELEMENTS // max(1, positions * positions))
    pieces = []
    for start in range(0, b.shape[0], step):
        rows, ids = b[start : start + step], block.ids[start : start + step]
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        pieces.append((torch.bmm(rows, rows.mT) * same).sum((1, 2)).clamp(min=0))
    return torch.cat(pieces)
