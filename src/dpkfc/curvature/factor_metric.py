"""From the factors of a refresh to a metric: damped roots, shared sides, what is reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dpkfc.curvature.damping import Damping, condition_numbers, damp_side, elementwise_scale
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import is_empty
from dpkfc.curvature.layer_factors import Factors, LayerFactors, Rules
from dpkfc.curvature.report import report_row
from dpkfc.linalg.metric import Elementwise, Entry, Kronecker, Metric
from dpkfc.linalg.sides import Side

_log = logging.getLogger(__name__)


def form_metric(
    layers: Factors,
    damping: Damping,
    widest: int,
) -> Metric:
    """Return the damped roots of all layers; layers with the same eigenpairs share a side.

    Args:
        layers: factors.
        damping: the number that is added, and the root.
        widest: no matrix is formed for a wider side.
    """
    known: dict[Any, Side] = {}

    def make_side(side: str, factors: LayerFactors) -> Side:
        factor = factors.sides[side]
        key: Any = id(factor)
        if isinstance(factor, Eigen):
            key = (id(factor.vectors), factor.trace)
        if key not in known:
            known[key] = damp_side(factor, damping, factors.dtype, widest_dense=widest)
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
            metric[name] = Kronecker(make_side("input", factors), make_side("output", factors))
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
