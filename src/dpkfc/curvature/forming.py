"""The metric of a refresh from its factors, and what is said beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpkfc.curvature.damping import Damping, elementwise_scale, side_of
from dpkfc.curvature.layers import LayerFactors
from dpkfc.curvature.linalg import Eigen
from dpkfc.curvature.report import identity_row
from dpkfc.metric import Elementwise, Kronecker, Metric, Side

__all__ = ["left_alone", "metric_of", "shapes_of"]

_log = logging.getLogger(__name__)


def metric_of(
    layers: Mapping[str, LayerFactors], damping: Damping, widest: int, rank: Callable[[str, str], int | None]
) -> Metric:
    """The damped roots of all layers; layers that share the eigenpairs of a side share the side.

    Args:
        layers: factors.
        damping: what is added, and the root.
        widest: no matrix is formed for a wider side.
        rank: maps layer and side to the eigenpairs kept of it, 0 for all; None where the damping's rule holds.
    """
    known: dict[tuple[int, float, int | None], Side] = {}

    def side(name: str, which: str, factors: LayerFactors) -> Side:
        factor, own = factors.sides[which], rank(name, which)
        if not isinstance(factor, Eigen):
            return side_of(factor, damping, factors.dtype, widest_dense=widest)
        key = (id(factor.vectors), factor.trace, own)
        if key not in known:
            known[key] = side_of(factor, damping, factors.dtype, widest_dense=widest, rank=own)
        return known[key]

    metric: dict[str, Kronecker | Elementwise] = {}
    for name, factors in layers.items():
        if factors.kind == "elementwise":
            scales = {
                role: elementwise_scale(factor, damping, factors.shapes[role], factors.dtype).to(factors.device)
                for role, factor in factors.sides.items()
            }
            metric[name] = Elementwise(scales)
        else:
            metric[name] = Kronecker(*(side(name, which, factors) for which in ("input", "output")))
    return metric


def left_alone(metric: Metric, unknown: Mapping[str, str], rules: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the layers that keep the identity."""
    unreached = [name for name in rules if name not in metric and name not in unknown]
    if unreached:
        _log.warning("the probe does not reach these layers, which keep the identity: %s", ", ".join(unreached))
    if unknown:
        _log.warning("no factors are known for these layers, which keep the identity: %s", ", ".join(unknown))
    rows = [identity_row(name, f"no factors are known for a {kind}") for name, kind in unknown.items()]
    return rows + [identity_row(name) for name in unreached]


def shapes_of(model: nn.Module, name: str, factors: LayerFactors) -> dict[str, Any]:
    """What `Preconditioner.check` compares: kind, sizes of the sides, and the weight's own shape where it has one."""
    shapes: dict[str, Any] = {"kind": factors.kind, **{side: list(x) for side, x in factors.shapes.items()}}
    try:
        weight = getattr(model.get_submodule(name), "weight", None)
    except AttributeError:
        weight = None
    return shapes | {"stored": list(weight.shape)} if isinstance(weight, Tensor) else shapes
