"""The method by which norms of a layer are computed, from its widths."""

from __future__ import annotations

from dpkfc.linalg.blocks import (
    AnyBlock,
    ConvBlock,
    Lookup,
    MaterializedGradients,
    Outer,
    PerExample,
    Tied,
)

_MATERIALISED_WIDTH = 32  # of the narrower side, at most
_SMALL = 1 << 18  # entries of a materialised convolution, at most
_SMALL_TABLE = 1 << 14  # entries of a materialised tied table, at most


def choose_norm_method(block: AnyBlock) -> str:
    """Return the norm method that `per_example_norms` takes for a block.

    Only the widths decide, so that an example's bound cannot follow the length of others. With one
    position the norm is a product, whatever the widths.
    """
    match block:
        case PerExample() | MaterializedGradients():
            return "materialised"
        case Lookup():
            return "lookup"
        case Tied():
            is_small = block.num_entries <= _SMALL_TABLE
        case _:
            positions, d_in, d_out = block.dimensions
            if positions == 1:
                return "rank-one"
            is_small = is_materialised(d_in, d_out, isinstance(block, ConvBlock))
    return "materialised" if is_small else "gram"


def is_materialised(d_in: int, d_out: int, patches: bool) -> bool:
    """Return whether gradients of these widths (of a convolution: `patches`) are formed."""
    if patches:
        return d_in * d_out <= _SMALL
    return min(d_in, d_out) <= _MATERIALISED_WIDTH


def form_cheaply(block: AnyBlock) -> AnyBlock:
    """Return a PUBLIC block with its gradients formed where products of its rows would cost more.

    The number of its positions decides, which may not decide the bound of a private example.
    """
    if not isinstance(block, Outer):
        return block
    positions, d_in, d_out = block.dimensions
    if d_in * d_out > positions**2:
        return block
    return MaterializedGradients(block.per_example(), block.groups)
