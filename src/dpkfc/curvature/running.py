"""What refreshes keep for the next one: sums of factors that decay, where the eigenvectors pointed, and how far they moved.

With share β of the past, rows x of refresh t and n_t examples in it, the factor of a side is

    S_t / N_t,     S_t = β S_{t−1} + Σ x xᵀ,     N_t = β N_{t−1} + n_t,

a mean of the refreshes' factors with weights β^(age) that needs no correction at the start. Probes can then be small: about
1/(1 − β) of them stand behind every factor. Everything kept here is a function of probes and released parameters.

Source: the running average is that of Martens and Grosse (2015), section 5, in the weights of Adam's corrected means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dpkfc.curvature.factors import FactorAccumulator
from dpkfc.curvature.layers import LayerAccumulator, LayerFactors
from dpkfc.curvature.shares import Team

__all__ = ["Running", "drift_of", "running_from", "running_of", "running_state", "with_past"]

Running = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""

_KEY = "running"


def with_past(layers: Mapping[str, LayerAccumulator], past: Running, share: float) -> dict[str, LayerAccumulator]:
    """What the probe has just shown on top of what is kept, of which `share` counts; layers without a past as they are."""
    return {name: layer.after(past[name], share) if name in past else layer for name, layer in layers.items()}


def running_of(layers: Mapping[str, LayerAccumulator], factors: Mapping[str, LayerFactors]) -> Running:
    """What is kept of a refresh: its sums, and the eigenvectors that the next decomposition of a wide side begins with."""
    kept: dict[str, dict[str, FactorAccumulator]] = {}
    for name, layer in layers.items():
        kept[name] = {side: sums.apart() for side, sums in layer.sides.items()}
        for side, sums in kept[name].items():
            sums.remember(factors[name].sides[side])
    return kept


def drift_of(layers: Mapping[str, LayerAccumulator], past: Running, team: Team | None = None) -> float:
    """How far the factors of a probe lie from those that are kept.

    Args:
        layers: what the probe shows; of several processes, the layers that this one owns.
        past: what is kept of all layers.
        team: the processes, None for this one alone.

    Returns:
        The mean over all sides of ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius), A kept and B new; infinite where a layer is new.
        Two probes of n examples each at the same parameters differ by their sampling noise, about √(1/n) times a number that
        grows with the effective rank.
    """

    def distances() -> list[float]:
        return [
            past[name][side].distance(sums) if name in past else float("inf")
            for name, layer in layers.items()
            for side, sums in layer.sides.items()
        ]

    parts = [distances()] if team is None else team.everyone(team.together(distances))
    found = [distance for part in parts for distance in part]
    return sum(found) / len(found) if found else 0.0


def running_state(running: Sequence[Running]) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Tensors under names of their own and JSON-able values, for the state of a preconditioner; one entry a probe."""
    tensors: dict[str, Tensor] = {}
    values: list[list[Any]] = []
    for probe, layers in enumerate(running):
        for name, sides in layers.items():
            for side, sums in sides.items():
                held, more = sums.state()
                tensors |= {f"{_KEY}.{len(values)}.{what}": x for what, x in held.items()}
                values.append([probe, name, side, sorted(held), more])
    return tensors, values


def running_from(tensors: Mapping[str, Tensor], values: Sequence[Sequence[Any]]) -> tuple[Running, ...]:
    """What `running_state` was taken of.

    Raises:
        ValueError: a tensor is missing.
    """
    found: dict[int, dict[str, dict[str, FactorAccumulator]]] = {}
    for i, (probe, name, side, held, more) in enumerate(values):
        try:
            own = {what: tensors[f"{_KEY}.{i}.{what}"] for what in held}
        except KeyError as error:
            raise ValueError(f"not the state of a preconditioner, or a damaged one: {error!r}") from error
        found.setdefault(probe, {}).setdefault(name, {})[side] = FactorAccumulator.from_state(own, more)
    return tuple(found.values())
