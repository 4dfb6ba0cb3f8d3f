"""What an ε means for one person: the success of any membership attack.

An attack decides whether a unit was in the data. Where δ(ε) is the privacy profile, every pair
(ε, δ) bounds each attack with false alarms α: it finds at most the share min(δ + e^ε α, 1 - e^-ε (1
- δ - α)) of members (Kairouz, Oh and Viswanath 2015). At even odds it is right with probability 1/2
+ (e^ε - 1 + 2 δ) / (2 (e^ε + 1)) at most. The least bound of many pairs is the trade-off function
of the accountant (Dong, Roth and Su 2022).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy

from dpkfc.privacy.cross_check import VOID
from dpkfc.privacy.dp_accountants import deltas_of_epsilons
from dpkfc.privacy.events import event_from_dict, has_no_noise, is_gaussian, serialise_event

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_POINTS = 24
_LARGEST_EXPONENT = 700.0  # e to the power of more than 709 is not a float


@dataclass(frozen=True)
class AttackRates:
    """Upper bounds of the success of every attack on one unit, whatever the attacker knows.

    Attributes:
        right: probability of a right answer where a unit is in the data with probability 1/2.
        found: share of members found with the given share of false alarms.
        by: what the bounds follow from.
    """

    right: float
    found: float
    by: str


def attack_rates(
    event: DpEvent | None,
    count: int,
    epsilon: float,
    delta: float,
    relation: str = "add_or_remove_one",
    *,
    false_alarms: float = 0.01,
) -> AttackRates:
    """Return bounds of every attack on the unit of a guarantee.

    Args:
        event: of one release; None where there are several, and (ε, δ) alone is used.
        count: releases.
        epsilon: ε that the run spent; infinite without a guarantee.
        delta: δ of that ε.
        relation: "add_or_remove_one" or "replace_one".
        false_alarms: α, the share of others that the attack takes for members.
    """
    if not math.isfinite(epsilon):
        return AttackRates(1.0, 1.0, "no guarantee")
    points = [(epsilon, delta)]
    by = "ε and δ"
    if event is not None and 0 < count and epsilon <= VOID:
        profile, by = _profile(serialise_event(event), count, epsilon, relation)
        points += profile
    return AttackRates(bound_right(points), bound_found(points, false_alarms), by)


def bound_right(points: Sequence[tuple[float, float]]) -> float:
    """Return the most right answers at even odds that all pairs (ε, δ) allow."""
    rates = [1.0]
    for e, d in points:
        advantage = math.tanh(e / 2)
        rates.append(0.5 + 0.5 * (advantage + d * (1 - advantage)))
    return min(rates)


def bound_found(points: Sequence[tuple[float, float]], false_alarms: float) -> float:
    """Return the largest share of members found at a share of false alarms, for pairs (ε, δ)."""
    shares = [1.0]
    for e, d in points:
        if e < _LARGEST_EXPONENT:
            shares.append(d + math.exp(e) * false_alarms)
        shares.append(1 - math.exp(-e) * (1 - d - false_alarms))
    return min(shares)


@functools.lru_cache(maxsize=64)
def _profile(
    event_text: str, count: int, largest: float, relation: str
) -> tuple[list[tuple[float, float]], str]:
    """Return pairs (ε, δ) from 0 to the ε of the run, and what computed them."""
    event = event_from_dict(json.loads(event_text))
    grid = np.linspace(0, max(largest, 1.0), _POINTS)
    if has_no_noise(event):
        return [], "no noise"
    if is_gaussian(event):
        mu = math.sqrt(count) / event.noise_multiplier
        places = grid / mu
        log_above = scipy.special.log_ndtr(mu / 2 - places)
        log_below = grid + scipy.special.log_ndtr(-mu / 2 - places)
        deltas = np.exp(log_above) - np.exp(log_below)
        by = "the trade-off of the Gaussian mechanism"
    else:
        deltas = deltas_of_epsilons(event, count, grid, relation)
        by = "RDP" if relation == "replace_one" else "the privacy loss distribution"
    bounded = np.clip(deltas, 0.0, 1.0)
    return list(zip(grid.tolist(), bounded.tolist(), strict=True)), by
