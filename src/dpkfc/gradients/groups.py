"""Several rows of a batch as ONE example of the mechanism: one gradient, one norm, one clip.

A privacy unit with k records (or one example in k augmented views) is k consecutive rows whose losses carry weights. In
the normal form its gradient is `Σ_r Σ_t b_rt a_rtᵀ`: the rows' positions are simply concatenated, so norms and clipped
sums need nothing new. Weights are factors of the losses and arrive in `b`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from dpkfc.blocks import Formed, Lookup, Outer, PerExample, Tied
from dpkfc.gradients.computed import Computed
from dpkfc.gradients.conv import AnyBlock, ConvBlock

__all__ = ["Groups", "grouped"]


@dataclass(frozen=True)
class Groups:
    """The first `count · size` rows of a batch, `size` consecutive rows each; any further rows are padding.

    Attributes:
        count: groups U.
        size: rows a group k.
    """

    count: int
    size: int = 1


def grouped(block: AnyBlock | Computed, groups: Groups) -> AnyBlock:
    """The block of `count` examples whose gradients are the sums over the rows of each group.

    Args:
        block: of N >= count · size rows.
        groups: which rows belong together.

    Returns:
        A block of `count` examples with `size` times the positions.
    """
    rows, k = groups.count * groups.size, groups.size
    match block:
        case PerExample():
            first = {role: g[:rows] for role, g in block.grads.items()}
            return PerExample({r: g if k == 1 else g.view(-1, k, *g.shape[1:]).sum(1) for r, g in first.items()})
        case Formed():
            g = block.gradients[: rows * block.groups]
            if k > 1:
                g = g.view(groups.count, k, block.groups, *g.shape[1:]).sum(1).flatten(0, 1)
            return replace(block, gradients=g)
        case Lookup():
            return _lookup(block, groups)
        case Tied():
            return Tied(_lookup(block.lookup, groups), _outer(block.outer, groups))
        case Computed():
            return block.mapped(partial(grouped, groups=groups)).per_example()
        case ConvBlock():
            return replace(block.examples(slice(0, rows)), views=block.views * k)
        case Outer():
            return _outer(block, groups)


def _lookup(block: Lookup, groups: Groups) -> Lookup:
    u, k = groups.count, groups.size
    (_, t), d = block.ids.shape, block.b.shape[-1]
    return replace(block, ids=block.ids[: u * k].reshape(u, k * t), b=block.b[: u * k].reshape(u, k * t, d))


def _outer(block: Outer, groups: Groups) -> Outer:
    return replace(block, a=_joined(block.a, groups, block.groups), b=_joined(block.b, groups, block.groups))


def _joined(x: Tensor, groups: Groups, channels: int) -> Tensor:
    """`[N · channels, T, d]` to `[count · channels, size · T, d]`."""
    _, t, d = x.shape
    x = x[: groups.count * groups.size * channels]
    if groups.size == 1:
        return x
    if channels == 1:
        return x.reshape(groups.count, groups.size * t, d)
    split = x.view(groups.count, groups.size, channels, t, d).transpose(1, 2)
    return split.reshape(groups.count * channels, groups.size * t, d)
