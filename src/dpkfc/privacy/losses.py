"""The distribution of the privacy loss of one release, by dp-accounting, on a grid that is as fine as the losses need."""

from __future__ import annotations

import functools

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution

from dpkfc.privacy.event_values import parts
from dpkfc.privacy.truncated import two_parts

__all__ = ["RELATIONS", "interval_of", "pld_of_one"]

RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_INTERVAL = 1e-4  # of the grid, wider where a release loses much


def pld_of_one(
    event: dp_accounting.DpEvent, relation: str, interval: float | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """The distribution of the privacy loss of one sampled release, pessimistically rounded to a grid, by default its own."""
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        full, ordinary, replacing = two_parts(event)
        shared = interval_of(event)  # a mixture is of parts on one grid
        found = pld_of_one(ordinary, relation, shared)
        return pld_of_one(replacing, relation, shared).compute_mixture(found, full) if full > 0 else found
    noise = event.event.noise_multiplier
    return _sampled_pld(event.sampling_probability, noise, relation, interval or _interval_at(noise))


@functools.lru_cache(maxsize=8)
def _sampled_pld(
    rate: float, noise: float, relation: str, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise,
        sampling_prob=rate,
        neighboring_relation=RELATIONS[relation],
        value_discretization_interval=interval,
    )


def interval_of(event: dp_accounting.DpEvent) -> float:
    """Of the coarsest grid that a part of the event is held on."""
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return max(interval_of(one) for one in two_parts(event)[1:])
    return max((_interval_at(part.noise_multiplier) for part in parts(event) if hasattr(part, "noise_multiplier")), default=0.0)


def _interval_at(noise: float) -> float:
    """A release loses up to about 1/(2·noise²): the grid grows with it below 0.5, so that its size and the time stay the same."""
    return _INTERVAL * max(1.0, (0.5 / noise) ** 2)
