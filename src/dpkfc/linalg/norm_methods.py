"""The method by which norms of a layer are computed: from its widths, or as a setting names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Lookup, MaterializedGradients, PerExample, Tied

METHODS = ("gram", "materialised")
"""Methods that a layer with several positions can be told to use."""
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
            is_small = block.d_out * block.outer.a.shape[-1] <= _SMALL_TABLE
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


def check_methods(methods: Mapping[str, str], layers: Iterable[str] | None = None) -> None:
    """Refuse an unknown method, or a method for a layer that does not exist.

    Args:
        methods: layer name to method.
        layers: the names of all layers. None leaves the names unchecked.

    Raises:
        ValueError: naming the layer and the choices.
    """
    for layer, method in methods.items():
        if method not in METHODS:
            choices = " or ".join(METHODS)
            raise ValueError(f"norm_methods: layer '{layer}' can use {choices}, not {method!r}")
    if layers is None:
        return
    unknown = sorted(set(methods) - set(layers))
    if unknown:
        names = ", ".join(unknown)
        raise ValueError(
            f"norm_methods names layers that the model does not have: {names}; "
            "`dpkfc doctor` lists them"
        )
