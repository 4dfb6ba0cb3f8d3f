"""What an ε means: success rates of any membership attack, and ε for several records of one person.

An attack decides whether a unit was in the data. Where δ(ε) is the privacy profile, every pair (ε,
δ) bounds each attack with false alarms α: it finds at most the share min(δ + e^ε α, 1 - e^-ε (1 -
δ - α)) of members (Kairouz, Oh and Viswanath 2015). At even odds it is right with probability
1/2 + (e^ε - 1 + 2 δ) / (2 (e^ε + 1)) at most. The least bound of many pairs is the trade-off
function of the accountant (Dong, Roth and Su 2022).
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

from dpkfc.privacy import accounting
from dpkfc.privacy.integration import Losses, epsilon_of, gaussian_epsilon, integration_grid

if TYPE_CHECKING:
    import dp_accounting

_POINTS = 24
_MOST_ITERATIONS = 100


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
    event: dp_accounting.DpEvent | None,
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
    if event is not None and 0 < count and epsilon <= accounting.VOID:
        profile, by = _profile(_serialise(event), count, epsilon, relation)
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
        shares.append(d + math.exp(e) * false_alarms)
        shares.append(1 - math.exp(-e) * (1 - d - false_alarms))
    return min(shares)


def _serialise(event: dp_accounting.DpEvent) -> str:
    """Return an event as text, which a cache can take for a key."""
    values = accounting.event_to_dict(event)
    return json.dumps(values, sort_keys=True)


@functools.lru_cache(maxsize=64)
def _profile(
    event_text: str, count: int, largest: float, relation: str
) -> tuple[list[tuple[float, float]], str]:
    """Return pairs (ε, δ) from 0 to the ε of the run, and what computed them."""
    event = accounting.event_from_dict(json.loads(event_text))
    grid = np.linspace(0, max(largest, 1.0), _POINTS)
    if accounting.has_no_noise(event):
        return [], "no noise"
    if accounting.is_gaussian(event):
        mu = math.sqrt(count) / event.noise_multiplier
        log_above = scipy.special.log_ndtr(mu / 2 - grid / mu)
        log_below = grid + scipy.special.log_ndtr(-mu / 2 - grid / mu)
        deltas = np.exp(log_above) - np.exp(log_below)
        return _pairs(grid, deltas), "the trade-off of the Gaussian mechanism"
    deltas = accounting.deltas_of_epsilons(event, count, grid, relation)
    by = "RDP" if relation == "replace_one" else "the privacy loss distribution"
    return _pairs(grid, deltas), by


def _pairs(grid: np.ndarray, deltas: np.ndarray) -> list[tuple[float, float]]:
    pairs = []
    for epsilon, delta in zip(grid.tolist(), deltas.tolist(), strict=True):
        bounded = min(1.0, max(0.0, delta))
        pairs.append((epsilon, bounded))
    return pairs


# --------------------------------------------------------------------------------------------------
# ε for several records of one person.


def group_epsilon(
    event: dp_accounting.DpEvent,
    count: int,
    delta: float,
    size: int,
    relation: str = "add_or_remove_one",
    *,
    independent: bool = True,
) -> tuple[float, str]:
    """Return ε at the same δ for neighbours that differ in several units, and how it was computed.

    Full batches of a Gaussian mechanism have a closed form. Under Poisson sampling the number of
    the units in a batch is binomial, and the pair of a mixture of Gaussians against one Gaussian
    dominates (Schuchardt et al. 2024); its ε is integrated numerically and raised by the tolerance
    of the integration. Everywhere else the bound for groups holds: (k ε', δ' Σ e^(i ε')).

    Args:
        event: of one release.
        count: releases.
        delta: δ, the same for the group.
        size: units of the group, k.
        relation: "add_or_remove_one" or "replace_one".
        independent: units are sampled independently of each other. False where a client is sampled
            with all its records.

    Returns:
        ε, infinite where no bound is known, and "exact" or "bound".
    """
    if count == 0:
        return 0.0, "exact"
    if accounting.has_no_noise(event):
        return math.inf, "exact"
    return _group_epsilon(_serialise(event), count, delta, size, relation, independent)


@functools.lru_cache(maxsize=256)
def _group_epsilon(
    event_text: str, count: int, delta: float, size: int, relation: str, independent: bool
) -> tuple[float, str]:
    import dp_accounting

    event = accounting.event_from_dict(json.loads(event_text))
    if accounting.is_gaussian(event):
        noise = event.noise_multiplier / math.sqrt(count) / size
        return gaussian_epsilon(noise, delta), "exact"
    sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if sampled and independent and accounting.is_gaussian(event.event):
        rate = event.sampling_probability
        present, absent = _losses_of_group(rate, event.event.noise_multiplier, size)
        integral = max(epsilon_of(present, count, delta), epsilon_of(absent, count, delta))
        error = accounting.INTEGRAL_TOLERANCE * (1 + integral)
        return integral + error, "exact"
    return _bound_of_group(event, count, delta, size, relation), "bound"


def _losses_of_group(rate: float, stddev: float, size: int) -> tuple[Losses, Losses]:
    """Return the losses of the presence of a group against its absence, and the reverse."""
    x, cell = integration_grid(stddev, size)
    shifts = np.arange(size + 1)[:, None]
    log_weights = scipy.stats.binom.logpmf(shifts, size, rate)
    log_ratios = shifts * (x - shifts / 2) / stddev**2
    loss = scipy.special.logsumexp(log_weights + log_ratios, axis=0)
    log_density = -0.5 * (x / stddev) ** 2 + math.log(cell)
    present = Losses(loss, np.exp(log_density + loss))
    absent = Losses(-loss, np.exp(log_density))
    return present, absent


def _bound_of_group(
    event: dp_accounting.DpEvent, count: int, delta: float, size: int, relation: str
) -> float:
    """Return k ε' with the δ' that the group bound turns into δ; infinite where none is found."""
    log_delta = math.log(delta)
    smaller = delta
    for _ in range(_MOST_ITERATIONS):
        # RDP has no smallest δ that it resolves, unlike PLD.
        one = accounting.epsilon(event, count, smaller, "rdp", relation)
        log_factor = float(scipy.special.logsumexp(one * np.arange(size)))
        if math.log(smaller) + log_factor <= log_delta:
            return size * one
        log_smaller = log_delta - log_factor - 0.5
        if log_smaller < math.log(1e-300):
            break
        smaller = min(smaller, math.exp(log_smaller))
    return math.inf
