"""Eigenpairs that single sides keep, whatever the rule by widths says: `{"conv1.A": 32, "head.G": 0}`, 0 for all.

They change which map the metric is, as `max_rank` does, and never what is guaranteed under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["SHORT", "check_ranks", "check_sides", "rank_of", "side_name"]

SHORT = {"input": "A", "output": "G"}


def side_name(layer: str, side: str) -> str:
    """`conv1.A` for the input factor of conv1."""
    return f"{layer}.{SHORT.get(side, side)}"


def rank_of(ranks: Mapping[str, int], layer: str, side: str) -> int | None:
    """Eigenpairs that this side keeps, 0 for all; None where nothing is said of it."""
    return ranks.get(side_name(layer, side))


def check_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """A copy.

    Raises:
        ValueError: naming what is no side, or a number that is not whole or is negative.
    """
    for side, rank in dict(ranks).items():
        if not (isinstance(side, str) and side.endswith((".A", ".G")) and type(rank) is int and rank >= 0):
            raise ValueError(f"ranks maps sides, such as 'conv1.A', to the pairs they keep, 0 for all; got {side!r}: {rank!r}")
    return dict(ranks)


def check_sides(ranks: Mapping[str, int], layers: Mapping[str, Iterable[str]]) -> None:
    """Raise where eigenpairs are asked of a side that there is not.

    Args:
        ranks: by side.
        layers: layer name to the sides of its factors.

    Raises:
        ValueError: naming it.
    """
    known = {side_name(layer, side) for layer, sides in layers.items() for side in sides if side in SHORT}
    unknown = sorted(set(ranks) - known)
    if unknown:
        raise ValueError(f"ranks names sides that the model has not: {', '.join(unknown)}; `dpkfc doctor` lists its layers")
