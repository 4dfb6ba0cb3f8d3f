"""Per-example gradient norms on the probe, for the scale of a metric and for figures.

These norms choose a number and draw pictures; no sensitivity rests on them. The certified ones are in `gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Block, Lookup, Outer, Patched, PerExample, Tied
from dpkfc.metric import Diagonal, Eigenbasis, Elementwise, Entry, Identity, Kronecker, Metric

__all__ = ["KNOWN", "layer_squares", "probe_norms"]

KNOWN = (Outer, Patched, Lookup, PerExample, Tied)
_CHUNK_ELEMENTS = 1 << 22


def probe_norms(blocks: Mapping[str, Block], *metrics: Metric, last: int | None = None) -> list[Tensor]:
    """‖P g_n‖ over all layers for each of several metrics, `[N]` in float64 on the CPU.

    Layers without an entry in a metric count as they are. Every block is looked up once, so a mapping that forms them
    on demand holds one at a time.

    Args:
        blocks: of one micro-batch.
        metrics: one or more.
        last: only so many examples at the end of it; None for all.
    """
    totals: list[Tensor] = []
    for name in blocks:
        block = blocks[name]
        if not isinstance(block, KNOWN):  # keeps the identity in every metric; its share cannot be told here
            continue
        block = block if last is None else _tail(block, last)
        squares = [layer_squares(block, metric.get(name)).cpu() for metric in metrics]
        totals = [total + s for total, s in zip(totals, squares, strict=True)] if totals else squares
    return [total.sqrt() for total in totals]


def _tail(block: Block, count: int) -> Block:
    """The last examples of a block."""
    match block:
        case Patched():
            return block.examples(slice(block.batch_size - count, block.batch_size))
        case Outer():
            rows = slice(-count * block.groups, None)
            return replace(block, a=block.a[rows], b=block.b[rows])
        case Lookup():
            return replace(block, ids=block.ids[-count:], b=block.b[-count:])
        case PerExample():
            return PerExample({role: g[-count:] for role, g in block.grads.items()})
        case Tied():
            lookup = replace(block.lookup, ids=block.lookup.ids[-count:], b=block.lookup.b[-count:])
            return Tied(lookup, replace(block.outer, a=block.outer.a[-count:], b=block.outer.b[-count:]))
    return block


def layer_squares(block: Block, entry: Entry | None) -> Tensor:
    """‖P g_n‖² of one layer, `[N]` in float64."""
    if isinstance(block, Patched):  # a few examples' patches at a time
        step = max(1, _CHUNK_ELEMENTS // (block.b.shape[1] * block.d_in * block.groups))
        ends = range(0, block.batch_size, step)
        parts = (block.examples(slice(start, min(block.batch_size, start + step))) for start in ends)
        return torch.cat([layer_squares(part.explicit(), entry) for part in parts])
    if isinstance(entry, Eigenbasis):
        return _eigenbasis_squares(block, entry)
    match block:
        case PerExample():
            scale = entry.scale if isinstance(entry, Elementwise) else {}
            mapped = [g * scale[role] if role in scale else g for role, g in block.grads.items()]
            return torch.stack([_squares(g.reshape(len(g), -1)) for g in mapped]).sum(0)
        case Lookup():
            return _lookup_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
        case Outer():
            squares = _outer_squares(block.explicit(), entry if isinstance(entry, Kronecker) else Kronecker())
            return squares.view(-1, block.groups).sum(1)
        case Tied():
            return _tied_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
    raise ValueError(f"norms of a {type(block).__name__} are not known here")


def _eigenbasis_squares(block: Block, entry: Eigenbasis) -> Tensor:
    """By formed gradients, a few examples at a time."""
    entry = entry.complete()
    match block:
        case Lookup():
            rows = block.b if entry.output is None else block.b @ entry.output
            return _lookup_squares(replace(block, b=rows * entry.scale.T[block.ids]), Kronecker())
        case Outer() | Tied():
            groups = block.groups if isinstance(block, Outer) else 1
            step = max(1, _CHUNK_ELEMENTS // entry.scale.numel())
            count = block.batch_size
            pieces = []
            for start in range(0, count, step):
                part = _tail(_head(block, min(count, start + step)), min(step, count - start))
                assert isinstance(part, Outer | Tied)
                z = entry.rotate(part.per_example()) * entry.scale
                pieces.append(_squares(z.flatten(1)).view(-1, groups).sum(1))
            return torch.cat(pieces)
    raise ValueError(f"norms of a {type(block).__name__} are not known in an eigenbasis")


def _head(block: Outer | Tied, count: int) -> Outer | Tied:
    """The first examples of a block."""
    if isinstance(block, Outer):
        return replace(block, a=block.a[: count * block.groups], b=block.b[: count * block.groups])
    lookup = replace(block.lookup, ids=block.lookup.ids[:count], b=block.lookup.b[:count])
    return Tied(lookup, replace(block.outer, a=block.outer.a[:count], b=block.outer.b[:count]))


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


def _tied_squares(block: Tied, entry: Kronecker) -> Tensor:
    """‖z‖² of the sum of both uses: that of the lookup, that of the head, and twice their inner product."""
    if not isinstance(entry.output, Identity):
        raise ValueError("the output side of a tied embedding must be the identity")
    lookup, outer = block.lookup, block.outer
    squares = _lookup_squares(lookup, Kronecker(entry.output, entry.input))
    if outer.a.shape[1] == 0:
        return squares
    squares = squares + _outer_squares(outer, entry)
    positions, rows = outer.a.shape[1], max(1, lookup.ids.shape[1])
    step = max(1, _CHUNK_ELEMENTS // (positions * rows))
    cross = []
    for start in range(0, outer.a.shape[0], step):
        part = slice(start, start + step)
        a, c = entry.input.apply(outer.a[part]).double(), entry.input.apply(lookup.b[part]).double()
        ids = lookup.ids[part].unsqueeze(1).expand(-1, positions, -1)
        cross.append((torch.bmm(a, c.mT) * outer.b[part].gather(2, ids)).sum((1, 2)))
    return (squares + 2 * entry.output.factor**2 * torch.cat(cross)).clamp(min=0)
