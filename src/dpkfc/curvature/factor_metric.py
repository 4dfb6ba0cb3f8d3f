"""From the factors of a refresh to a metric: damped roots, shared sides, and what is reported.

Single sides may keep a number of eigenpairs of their own, whatever their width: `{"conv1.A": 32,
"head.G": 0}`, 0 for all. They change the metric, as `max_rank` does. The privacy guarantee holds
for every metric.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dpkfc._checks import LARGEST_INTEGER, show_value
from dpkfc.curvature.damping import Damping, condition_numbers, damp_side, elementwise_scale
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import is_empty
from dpkfc.curvature.layer_factors import Factors, LayerFactors, Rules
from dpkfc.curvature.report import FACTOR_LETTERS, factor_letter, report_row
from dpkfc.linalg.metric import Elementwise, Entry, Kronecker, Metric
from dpkfc.linalg.sides import Side

_log = logging.getLogger(__name__)


def side_name(layer: str, side: str) -> str:
    """Return for example `conv1.A` for the input factor of conv1."""
    return f"{layer}.{factor_letter(side)}"


def check_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return a copy, after a check.

    Raises:
        ValueError: naming a key that is not a side, or a number that is negative or not whole.
    """
    checked = dict(ranks)
    for side, rank in checked.items():
        is_side = isinstance(side, str) and side.endswith((".A", ".G"))
        if not is_side or type(rank) is not int or not 0 <= rank <= LARGEST_INTEGER:
            raise ValueError(
                "ranks maps sides, such as 'conv1.A', to the pairs they keep, 0 for all; "
                f"got {show_value(side, 30)}: {show_value(rank, 30)}"
            )
    return checked


def check_sides(ranks: Mapping[str, int], layers: Mapping[str, Iterable[str]]) -> None:
    """Refuse ranks of sides that the model does not have.

    Args:
        ranks: by side.
        layers: layer name to the sides of its factors.

    Raises:
        ValueError: naming the sides.
    """
    known: set[str] = set()
    for layer, sides in layers.items():
        known |= {side_name(layer, side) for side in sides if side in FACTOR_LETTERS}
    unknown = sorted(set(ranks) - known)
    if unknown:
        raise ValueError(
            f"ranks names sides that the model does not have: {', '.join(unknown)}; "
            "`dpkfc doctor` lists its layers"
        )


def form_metric(
    layers: Factors,
    damping: Damping,
    widest: int,
    ranks: Mapping[str, int],
) -> Metric:
    """Return the damped roots of all layers; layers with the same eigenpairs share a side.

    Args:
        layers: factors.
        damping: the number that is added, and the root.
        widest: no matrix is formed for a wider side.
        ranks: the `rank` of `damp_side` by `side_name`, for sides that have one of their own.
    """
    known: dict[Any, Side] = {}

    def make_side(name: str, side: str, factors: LayerFactors) -> Side:
        factor = factors.sides[side]
        rank = ranks.get(side_name(name, side))
        key: Any = id(factor)
        if isinstance(factor, Eigen):
            key = (id(factor.vectors), factor.trace, rank)
        if key not in known:
            known[key] = damp_side(factor, damping, factors.dtype, widest_dense=widest, rank=rank)
        return known[key]

    metric: dict[str, Kronecker | Elementwise] = {}
    for name, factors in layers.items():
        if factors.kind == "elementwise":
            scales = {}
            for role, factor in factors.sides.items():
                scale = elementwise_scale(factor, damping, factors.shapes[role], factors.dtype)
                scales[role] = scale.to(factors.device)
            metric[name] = Elementwise(scales)
        else:
            first = make_side(name, "input", factors)
            second = make_side(name, "output", factors)
            metric[name] = Kronecker(first, second)
    return metric


def layer_rows(
    name: str, factors: LayerFactors, used: LayerFactors, entry: Entry, damping: Damping
) -> list[dict[str, Any]]:
    """Return one row a side: its form, size, and condition number before and after damping.

    Args:
        name: the layer.
        factors: its factors as measured.
        used: its factors as they were damped.
        entry: its map.
        damping: the number that was added.
    """
    rows = []
    for side, factor in factors.sides.items():
        notes = [factors.notes.get(side, "")]
        if is_empty(factor):
            notes.append("no signal on the probe")
        kind = "diagonal" if entry.is_elementwise else getattr(entry, side).kind
        row = report_row(
            name,
            side=side,
            kind=kind,
            dim=factor.dim,
            rank=factor.rank,
            trace=factor.trace,
            conditions=condition_numbers(used.sides[side], damping),
            note="; ".join(filter(None, notes)),
        )
        rows.append(row)
    return rows


def report_identity_layers(
    metric: Metric, unknown: Mapping[str, str], rules: Rules
) -> list[dict[str, Any]]:
    """Return the rows of layers that keep the identity, and log a warning.

    Args:
        metric: of the other layers.
        unknown: layer name to the kind of its block, for layers without factors.
        rules: layer name to rule, for all layers.
    """
    unreached = [name for name in rules if name not in metric and name not in unknown]
    reasons = {"the probe does not reach": unreached, "no factors are known for": [*unknown]}
    for reason, names in reasons.items():
        if names:
            text = "%s these layers, which keep the identity: %s"
            _log.warning(text, reason, ", ".join(names))
    rows = [
        report_row(name, note=f"no factors are known for a {kind}")
        for name, kind in unknown.items()
    ]
    return rows + [report_row(name) for name in unreached]
