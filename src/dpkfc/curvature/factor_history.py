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

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from dpkfc.curvature.factors import FactorAccumulator
from dpkfc.curvature.layer_factors import LayerAccumulator, LayerFactors
from dpkfc.curvature.refresh_group import RefreshGroup, gather_from_all
from dpkfc.linalg.metric import NamedTensors, Tensors

History = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""
_KEY = "running"


def keep_history(layer: LayerAccumulator, factors: LayerFactors) -> dict[str, FactorAccumulator]:
    """Return the sums of a layer by side, of a wide side as the first eigenpairs."""
    return {side: sums.remembered(factors.sides[side]) for side, sums in layer.sides.items()}


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
                    distance = past[name][side].distance(sums)
                distances.append(distance)
        return distances

    distances = list(chain.from_iterable(gather_from_all(team, measure_own)))
    return sum(distances) / max(1, len(distances))


def history_state(histories: Sequence[History]) -> tuple[NamedTensors, list[list[Any]]]:
    """Return tensors and JSON-able values for the state of a preconditioner, one entry a probe."""
    tensors = {}
    values: list[list[Any]] = []
    for probe, layers in enumerate(histories):
        for name, sides in layers.items():
            for side, sums in sides.items():
                own_tensors, own_values = sums.state()
                number = len(values)
                for key, tensor in own_tensors.items():
                    tensors[f"{_KEY}.{number}.{key}"] = tensor
                values.append([probe, name, side, sorted(own_tensors), own_values])
    return tensors, values


def history_from_state(tensors: Tensors, values: Sequence[Sequence[Any]]) -> tuple[History, ...]:
    """Return the histories whose state `history_state` returned.

    Raises:
        ValueError: a tensor is missing.
    """
    histories: dict[int, dict[str, dict[str, FactorAccumulator]]] = {}
    for i, (probe, name, side, keys, own_values) in enumerate(values):
        try:
            own_tensors = {key: tensors[f"{_KEY}.{i}.{key}"] for key in keys}
        except KeyError as error:
            raise ValueError(
                f"not the state of a preconditioner, or a damaged one: {error!r}"
            ) from error
        sides = histories.setdefault(probe, {}).setdefault(name, {})
        sides[side] = FactorAccumulator.restore(own_tensors, own_values)
    return tuple(histories.values())
