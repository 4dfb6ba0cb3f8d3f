"""Weighted sums of per-example gradients: the second half of clipping, without forming a gradient again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dpkfc.blocks import Formed, Lookup, Outer, PerExample, Tied
from dpkfc.gradients.conv import AnyBlock, ConvBlock

__all__ = ["weighted_sum"]


def weighted_sum(block: AnyBlock, weights: Tensor, broken: Tensor | None = None) -> Tensor | dict[str, Tensor]:
    """Σ_n weights_n g_n of one layer.

    Args:
        block: the layer's contribution.
        weights: `[N]`.
        broken: mask `[N]` of examples whose gradient is not finite, or None; their rows are zeroed first, since 0 · NaN
            is NaN.

    Returns:
        A matrix `[groups * d_out, d_in]` (an embedding: `[num_rows, d_out]`), or role to tensor for materialised blocks.
    """
    match block:
        case PerExample():
            return {
                role: torch.tensordot(weights.to(g.dtype), _without(g, broken), dims=1)
                for role, g in block.grads.items()
            }
        case Formed():
            g = _without(block.gradients, broken, block.groups)
            flat = weights.to(g.dtype) @ g.reshape(weights.shape[0], -1)
            return flat.view(-1, g.shape[-1])
        case Lookup():
            rows = _without(block.b, broken) * weights.to(block.b.dtype).view(-1, 1, 1)
            total = rows.new_zeros(block.num_rows, rows.shape[-1])
            return total.index_add_(0, block.ids.flatten(), rows.flatten(0, 1))
        case Tied():
            total = _outer_sum(block.outer, weights.to(block.outer.b.dtype), broken)
            rows = _without(block.lookup.b, broken) * weights.to(block.lookup.b.dtype).view(-1, 1, 1)
            return total.index_add_(0, block.lookup.ids.flatten(), rows.flatten(0, 1))
        case ConvBlock():
            x, b = (_without(side, broken, block.views) for side in (block.x, block.b))
            clean = replace(block, x=x, b=b)
            return clean.weighted_sum(weights.to(block.b.dtype))
        case Outer():
            return _outer_sum(block, weights.to(block.b.dtype), broken)


def _outer_sum(block: Outer, weights: Tensor, broken: Tensor | None) -> Tensor:
    a, b = _without(block.a, broken, block.groups), _without(block.b, broken, block.groups)
    n, g = weights.shape[0], block.groups
    if g == 1:
        scaled = (b * weights.view(-1, 1, 1)).flatten(0, 1)
        total = scaled.T @ a.flatten(0, 1)
        return torch.cat([total, scaled.sum(0).unsqueeze(1)], 1) if block.homogeneous else total
    scaled = b * weights.repeat_interleave(g).view(-1, 1, 1)
    pair = (scaled.view(n, g, *scaled.shape[1:]), a.view(n, g, *a.shape[1:]))
    return torch.einsum("ngto,ngti->goi", *pair).flatten(0, 1)


def _without(x: Tensor, broken: Tensor | None, each: int = 1) -> Tensor:
    """x with the rows of broken examples set to zero, `each` rows an example."""
    if broken is None:
        return x
    rows = broken if each == 1 else broken.repeat_interleave(each)
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), 0)
