"""Which way the norms of a layer are computed: by a rule on its widths, or as it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dpkfc.metric import Dense, Diagonal, Kronecker, LowRank, Side

__all__ = ["METHODS", "Choice", "check_methods", "choose_method", "is_formed", "side_cost"]

METHODS = ("gram", "materialised")
"""What a layer with several positions can be told to use."""

_NARROW = 32  # the narrower side of a layer up to which gradients are formed
_SMALL = 1 << 18  # entries of a convolution's gradient up to which it is formed
_IDENTITY = Kronecker()


@dataclass(frozen=True)
class Choice:
    """The norm method of a layer for a shape, with the two costs (multiplications an example) it was chosen by."""

    method: str
    gram_cost: float
    materialised_cost: float

    @property
    def reason(self) -> str:
        """Why, in one phrase: multiplications an example of the method, and of the other."""
        if self.method == "rank-one":
            return "one position"
        chosen, other = self.gram_cost, self.materialised_cost
        if self.method == "materialised":
            chosen, other = other, chosen
        return f"{chosen:.2g} (else {other:.2g})"


def side_cost(side: Side, d: int) -> int:
    """Multiplications to map one row of width d."""
    match side:
        case Dense():
            return d * d
        case LowRank():
            return 2 * d * side.vectors.shape[1]
        case Diagonal():
            return d
        case _:
            return 0


def choose_method(
    positions: int, d_in: int, d_out: int, metric: Kronecker = _IDENTITY, *, patches: bool = False
) -> Choice:
    """Pick the norm method of a layer. Only the widths decide, so that an example's bound cannot follow the length of others.

    Args:
        positions: shared axis T; with one position the norm is a product, whatever the widths.
        d_in: input features, homogeneous coordinate included.
        d_out: output features.
        metric: the layer's map; its sides decide what whitening costs.
        patches: a convolution, where forming `a` costs a copy.
    """
    cost_in, cost_out = side_cost(metric.input, d_in), side_cost(metric.output, d_out)
    gram = positions * (cost_in + cost_out) + positions**2 * (d_in + d_out) + patches * positions * d_in * 8.0
    formed = float(positions * d_in * d_out + d_out * cost_in + d_in * cost_out)
    if positions == 1:
        return Choice("rank-one", cost_in + cost_out + d_in + d_out, formed)
    return Choice("materialised" if is_formed(d_in, d_out, patches) else "gram", gram, formed)


def is_formed(d_in: int, d_out: int, patches: bool) -> bool:
    """Whether gradients of these widths are formed for their norms; `patches` of a convolution."""
    return d_in * d_out <= _SMALL if patches else min(d_in, d_out) <= _NARROW


def check_methods(methods: Mapping[str, str], layers: Iterable[str] | None = None) -> None:
    """Raise where a layer is told to use a method that there is not, or where there is no such layer.

    Args:
        methods: layer name to method.
        layers: the names there are; None leaves them unchecked.

    Raises:
        ValueError: naming the layer and the choices.
    """
    for layer, method in methods.items():
        if method not in METHODS:
            raise ValueError(f"norm_methods: layer '{layer}' can use {' or '.join(METHODS)}, not {method!r}")
    unknown = sorted(set(methods) - set(methods if layers is None else layers))
    if unknown:
        raise ValueError(f"norm_methods names layers that the model has not: {', '.join(unknown)}; `dpkfc doctor` lists them")
