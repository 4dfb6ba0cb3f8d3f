"""Sums of factors that refreshes keep for the next one.

With share β of the past, rows x of refresh t and n_t examples in it, the factor of a side is

    S_t / N_t,     S_t = β S_{t−1} + Σ x xᵀ,     N_t = β N_{t−1} + n_t,

a mean of the refreshes' factors with weights β^(age), which needs no correction at the start.
About 1/(1 − β) probes stand behind every factor, so probes can be small. Of a wide side the first
eigenpairs of S_t are kept and the trace of the others, so no matrix lies in memory between
refreshes. Everything kept is a function of probes and released parameters.

Source: the running average of Martens and Grosse (2015), section 5, with the weights of Adam's
corrected means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from torch import Tensor

from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.layer_factors import LayerAccumulator, LayerFactors
from dpkfc.curvature.refresh_group import RefreshGroup, gather_from_all

History = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""


def keep_history(layer: LayerAccumulator, factors: LayerFactors) -> dict[str, FactorAccumulator]:
    """Return the sums of a layer by side, of a wide side as the first eigenpairs."""
    return {side: sums.remember(factors.sides[side]) for side, sums in layer.sides.items()}


def measure_drift(
    layers: Mapping[str, LayerAccumulator], past: History, team: RefreshGroup | None = None
) -> float:
    """Measure how far the factors of a probe lie from those that are kept.

    Args:
        layers: sums of this probe; of several processes, the layers that this one owns.
        past: sums that are kept of all layers.
        team: the processes, None for this one alone.

    Returns:
        The mean over all sides of ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius), A kept and B new;
        infinite for a new layer. Two probes of n examples at the same parameters differ by their
        sampling noise: about √(1/n) times a number that grows with the effective rank.
    """

    def measure_own() -> list[float]:
        distances = []
        for name, layer in layers.items():
            for side, sums in layer.sides.items():
                distance = math.inf
                if name in past:
                    distance = measure_distance(past[name][side], sums)
                distances.append(distance)
        return distances

    distances = list(itertools.chain.from_iterable(gather_from_all(team, measure_own)))
    return sum(distances) / max(1, len(distances))


def measure_distance(first: FactorAccumulator, second: FactorAccumulator) -> float:
    """Return ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius) of two factors A and B of one size.

    The distance of two zero factors is 0, of a zero factor to another one 1.
    """
    own = _inner_product(first, first)
    theirs = _inner_product(second, second)
    if max(own, theirs) <= 0:
        return 0.0
    if min(own, theirs) <= 0:
        return 1.0
    both = _inner_product(first, second)
    ratio = _trace(first) / _trace(second)
    squared = 1 - 2 * ratio * both / own + ratio**2 * theirs / own
    return math.sqrt(max(0.0, squared))


def _trace(sums: FactorAccumulator) -> float:
    total = _spread_total(sums)
    if total is None:
        return sum(float(rows.double().square().sum()) for rows in sums.rows) + sums.rest
    return float(_diagonal(total).sum()) + sums.rest


def _inner_product(first: FactorAccumulator, second: FactorAccumulator) -> float:
    """Return Σ_ij A_ij B_ij of two sums; a trace without rows is spread evenly."""
    spread = first.rest * _trace(second) + second.rest * _trace(first)
    spread = spread - first.rest * second.rest
    return _product_of_sums(first, second) + spread / first.dim


def _product_of_sums(first: FactorAccumulator, second: FactorAccumulator) -> float:
    """Return Σ_ij A_ij B_ij of rows and sums, without the traces beside them."""
    one = _spread_total(first)
    other = _spread_total(second)
    product = 0.0
    if one is None and other is None:
        for x, y in itertools.product(first.rows, second.rows):
            overlap = x.double() @ y.double().T
            product += float(overlap.square().sum())
        return product
    if one is None:
        return _product_of_sums(second, first)
    if other is None:
        for rows in second.rows:
            wide = rows.double()
            image = wide @ one if one.dim() == 2 else wide * one
            product += float((image * wide).sum())
        return product
    if one.dim() != other.dim():
        one = _diagonal(one)
        other = _diagonal(other)
    return float((one * other).sum())


def _spread_total(sums: FactorAccumulator) -> Tensor | None:
    """Return the sum as a matrix or a diagonal, float64; a trace is spread evenly."""
    if sums.total is None:
        return None
    total = sums.total.double() * sums.scale**2
    if total.dim() == 0:
        mean = total / sums.dim
        return mean.expand(sums.dim)
    return total


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal() if x.dim() == 2 else x
