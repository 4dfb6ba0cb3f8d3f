"""What a refresh reports of each side of a layer, as plain values for cards and figures."""

from __future__ import annotations

from typing import Any

FACTOR_LETTERS = {"input": "A", "output": "G"}
"""The sides of a matrix-shaped layer, by the letters of their factors."""
UNREACHED = "not reached by the probe"


def factor_letter(side: str) -> str:
    """Return the letter of a side; the role of an elementwise parameter stays as it is."""
    return FACTOR_LETTERS.get(side, side)


def report_row(
    layer: str,
    *,
    side: str = "",
    kind: str = "identity",
    dim: int = 0,
    rank: int = 0,
    trace: float = 0.0,
    conditions: tuple[float, float] = (1.0, 1.0),
    note: str = UNREACHED,
) -> dict[str, Any]:
    """Return one row of a report; by default of a layer that keeps the identity.

    Args:
        layer: its name.
        side: input, output or the role of a parameter; empty for the whole layer.
        kind: the form of the map.
        dim: size of the side.
        rank: eigenvalues above zero.
        trace: of the undamped factor.
        conditions: largest ÷ smallest eigenvalue before and after damping.
        note: for people.
    """
    return {
        "layer": layer,
        "side": side,
        "dim": dim,
        "kind": kind,
        "rank": rank,
        "trace": trace,
        "condition_before": conditions[0],
        "condition_after": conditions[1],
        "note": note,
    }
