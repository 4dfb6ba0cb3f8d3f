"""Rows for people: what became of each side of each layer."""

from __future__ import annotations

from typing import Any

from dpkfc.curvature.damping import Damping, condition_numbers
from dpkfc.curvature.factors import is_empty
from dpkfc.curvature.layers import LayerFactors
from dpkfc.curvature.linalg import Eigen
from dpkfc.metric import Dense, Diagonal, Elementwise, Entry, Identity, LowRank, Side

__all__ = ["UNREACHED", "identity_row", "layer_rows"]

UNREACHED = "not reached by the probe"


def layer_rows(
    name: str, factors: LayerFactors, used: LayerFactors, entry: Entry, damping: Damping
) -> list[dict[str, Any]]:
    """One row a side: what it is, how large, and its condition number before and after damping.

    Args:
        name: the layer.
        factors: its factors as measured.
        used: its factors as they were damped.
        entry: its map.
        damping: what was added.
    """
    rows = []
    for side, factor in factors.sides.items():
        before, after = condition_numbers(used.sides[side], damping)
        notes = [factors.notes.get(side, ""), "no signal on the probe" if is_empty(factor) else ""]
        if isinstance(factor, Eigen) and factor.rest > 0:
            notes.append(f"first {factor.values.numel()} eigenpairs, the others by their mean")
        rows.append(
            {
                "layer": name,
                "side": side,
                "dim": factor.dim,
                "kind": "diagonal" if isinstance(entry, Elementwise) else _kind(getattr(entry, side)),
                "rank": factor.rank,
                "trace": factor.trace,
                "condition_before": before,
                "condition_after": after,
                "note": "; ".join(note for note in notes if note),
            }
        )
    return rows


def identity_row(name: str, why: str = UNREACHED) -> dict[str, Any]:
    """The row of a layer without factors: it keeps the identity."""
    return {
        "layer": name,
        "side": "",
        "dim": 0,
        "kind": "identity",
        "rank": 0,
        "trace": 0.0,
        "condition_before": 1.0,
        "condition_after": 1.0,
        "note": why,
    }


def _kind(side: Side) -> str:
    match side:
        case Identity():
            return "identity"
        case Diagonal():
            return "diagonal"
        case Dense():
            return "dense"
        case LowRank():
            return "lowrank"
