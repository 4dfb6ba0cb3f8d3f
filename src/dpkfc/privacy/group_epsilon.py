"""What an ε means for several records of a person: ε for neighbours that differ in all of them."""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING

import numpy as np
import scipy

from dpkfc.privacy.accounting import epsilon
from dpkfc.privacy.events import event_from_dict, has_no_noise, is_gaussian, serialise_event
from dpkfc.privacy.gaussian_pairs import Pair, gaussian_epsilon
from dpkfc.privacy.loss_distribution import epsilon_of_releases

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_MOST_ITERATIONS = 100


def group_epsilon(
    event: DpEvent,
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
    dominates (Schuchardt et al. 2024). Everywhere else the bound for groups holds: (k ε', δ' Σ e^(i
    ε')).

    Args:
        event: of one release.
        count: releases.
        delta: δ, the same for the group.
        size: units of the group, k.
        relation: "add_or_remove_one" or "replace_one".
        independent: units are sampled independently of each other. False where a client is sampled
            with all its records, or units take turns: several need not take the same one.

    Returns:
        ε, infinite where no bound is known, and "exact" or "bound".
    """
    if count == 0:
        return 0.0, "exact"
    if has_no_noise(event):
        return math.inf, "exact"
    return _group_epsilon(serialise_event(event), count, delta, size, relation, independent)


@functools.lru_cache(maxsize=256)
def _group_epsilon(
    event_text: str, count: int, delta: float, size: int, relation: str, independent: bool
) -> tuple[float, str]:
    import dp_accounting

    event = event_from_dict(json.loads(event_text))
    if is_gaussian(event):
        noise = event.noise_multiplier / math.sqrt(count) / size
        return gaussian_epsilon(noise, delta), "exact" if independent else "bound"
    sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if sampled and independent and is_gaussian(event.event):
        rate = event.sampling_probability
        pair = Pair(1.0, rate, event.event.noise_multiplier, units=size)
        return epsilon_of_releases([((pair,), count)], delta), "exact"
    return _bound_of_group(event, count, delta, size, relation), "bound"


def _bound_of_group(event: DpEvent, count: int, delta: float, size: int, relation: str) -> float:
    """Return k ε' with the δ' that the group bound turns into δ; infinite without such a δ'."""
    log_delta = math.log(delta)
    smaller = delta
    for _ in range(_MOST_ITERATIONS):
        # RDP has no smallest δ that it resolves, unlike PLD.
        one = epsilon(event, count, smaller, "rdp", relation)
        log_factor = float(scipy.special.logsumexp(one * np.arange(size)))
        if math.log(smaller) + log_factor <= log_delta:
            return size * one
        log_smaller = log_delta - log_factor - 0.5
        if log_smaller < math.log(1e-300):
            break
        smaller = min(smaller, math.exp(log_smaller))
    return math.inf
