"""What dp-accounting says of a release: its privacy loss by PLD, and its divergences by RDP.

PLD takes a grid that suits the losses, and a δ that its rounding cannot hide. RDP is kept from
reading a divergence that was rounded away as none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dpkfc.privacy.events import (
    convolutions,
    events_in,
    field_names,
    is_gaussian,
    is_of_a_sampler,
    is_truncated,
    neighbouring_sizes,
    relation_of,
    single_events,
    two_parts,
)
from dpkfc.privacy.gaussian_pairs import Floats
from dpkfc.privacy.loss_grid import bound_rounding

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    from dpkfc.privacy.events import Charges

logger = logging.getLogger(__name__)
T = TypeVar("T")
ACCOUNTANTS = ("pld", "rdp")
# Above this ε by RDP, PLD would take minutes and gigabytes for a figure that nobody can use.
MOST_BY_PLD = 1e6
RELATIONS = ("add_or_remove_one", "replace_one")
_LARGEST_EXPONENT = 700.0  # whose exponential a float holds
_INTERVAL = 1e-4  # of the grid, wider for large losses
# Calibration, the check before a run and the card ask for the same values.
_CACHE_SIZE = 4096
_divergences: dict[tuple[Any, ...], tuple[Floats, Floats]] = {}
_forwarded: set[str] = set()


def check_pair(event: DpEvent, accountant: str, relation: str) -> None:
    """Refuse an event that the accountant would not bound at this noise multiplier."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(
            f"unknown accountant {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}"
        )
    if relation not in RELATIONS:
        raise ValueError(
            f"unknown neighbouring relation {relation!r}; choose one of {', '.join(RELATIONS)}"
        )
    is_without_replacement = relation_of(event) == "replace_one"
    if is_without_replacement and accountant == "pld":
        raise ValueError(
            "PLD cannot account for sampling without replacement; use accountant='rdp'"
        )
    if is_without_replacement != (relation == "replace_one"):
        raise ValueError(
            f"the event {event} cannot be accounted for under {relation!r}; use 'replace_one' for"
            " sampling without replacement, 'add_or_remove_one' otherwise"
        )
    if accountant == "rdp" and is_truncated(event):
        # Its two parts are accounted for.
        return
    if not _make_accountant(accountant, relation).supports(event):
        raise ValueError(
            f"the accountant {accountant!r} does not support the event {event} under {relation!r}"
        )


def _make_accountant(accountant: str, relation: str) -> dp_accounting.PrivacyAccountant:
    """Return an empty accountant of dp-accounting."""
    import dp_accounting

    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    if accountant == "pld":
        return dp_accounting.pld.PLDAccountant(neighboring_relation=neighbours)
    return dp_accounting.rdp.RdpAccountant(neighboring_relation=neighbours)


@contextlib.contextmanager
def quiet_accountants() -> Iterator[None]:
    """Pass the first warning on a skipped order of RDP to our logger; drop repetitions.

    dp-accounting logs one line an order through absl. A skipped order makes the bound looser and
    never wrong. All other warnings pass.
    """

    def forward_once(record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if "Excluding this order" not in message:
            return True
        if message not in _forwarded:
            _forwarded.add(message)
            logger.info("dp-accounting (said once): %s", record.getMessage())
        return False

    absl = logging.getLogger("absl")
    absl.addFilter(forward_once)
    try:
        yield
    finally:
        absl.removeFilter(forward_once)


def remember(cache: dict[tuple[Any, ...], T], key: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """Return the value of a key, computed where it is not known; the oldest make room."""
    if key not in cache:
        value = compute()
        if len(cache) >= _CACHE_SIZE:
            oldest = next(iter(cache))
            cache.pop(oldest, None)
        cache[key] = value
    return cache[key]


# --------------------------------------------------------------------------------------------------
# PLD.


def pld_of_one(event: DpEvent, relation: str) -> PrivacyLossDistribution:
    """Return the distribution of the privacy loss of one release, rounded up to a grid.

    Args:
        event: the release of a sampler.
        relation: one of `RELATIONS`.
    """
    return _pld_on_grid(event, relation, interval_of(event))


@functools.lru_cache(maxsize=16)
def _pld_on_grid(event: DpEvent, relation: str, interval: float) -> PrivacyLossDistribution:
    """Return the distribution of the privacy loss of one release on this grid."""
    import dp_accounting

    if is_truncated(event):
        full, ordinary, replacing = two_parts(event)
        distribution = _pld_on_grid(ordinary, relation, interval)
        if full == 0:
            return distribution
        full_batch = _pld_on_grid(replacing, relation, interval)
        return full_batch.compute_mixture(distribution, full)
    rate = 1.0
    if not is_gaussian(event):
        rate = event.sampling_probability
        event = event.event
    return dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=event.noise_multiplier,
        sampling_prob=rate,
        neighboring_relation=dp_accounting.NeighboringRelation[relation.upper()],
        value_discretization_interval=interval,
    )


# A card asks for the profile of the losses whose ε has been computed.
@functools.lru_cache(maxsize=4)
def _compose(one: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    """Return the distribution of the privacy loss of `count` releases."""
    return one.self_compose(count)


def interval_of(event: DpEvent) -> float:
    """Return the interval of the coarsest grid of a part of the event."""
    if is_truncated(event):
        _, ordinary, replacing = two_parts(event)
        return max(interval_of(ordinary), interval_of(replacing))
    widest = 0.0
    for part in events_in(event):
        if "noise_multiplier" in field_names(part):
            interval = _interval_for_noise(part.noise_multiplier)
            widest = max(widest, interval)
    return widest


def _interval_for_noise(noise: float) -> float:
    """Return the interval of the grid for one release.

    A release loses up to about 1/(2·noise²). Below 0.5 the grid grows with it, so that its size and
    the time stay the same.
    """
    growth = (0.5 / noise) ** 2
    return _INTERVAL * max(1.0, growth)


def bound_pld_rounding(event: DpEvent, count: int) -> float:
    """Return a bound of the rounding in the δ of PLD, which takes a power of an FFT.

    Compared with an integration under a tilt (tests/audit), δ is too small by up to 8e-17 a
    release. PLD is then not an upper bound: for 10⁵ releases at δ = 1e-10 its ε is 0.07 too small.
    """
    return bound_rounding(count * convolutions(event))


def pld_resolves(event: DpEvent, count: int, delta: float) -> bool:
    """Return whether δ is large enough for PLD, whose rounding leaves an absolute error in δ."""
    return delta > 2 * bound_pld_rounding(event, count)


def epsilon_by_pld(event: DpEvent, count: int, delta: float, relation: str) -> float:
    """Return ε of an event; the analysis of each release of a sampler is remembered.

    Raises:
        ValueError: PLD cannot resolve δ.
    """
    rounding = bound_pld_rounding(event, count)
    if not pld_resolves(event, count, delta):
        raise ValueError(
            f"PLD cannot resolve delta = {delta:g} in {count:,} releases; choose a delta above"
            f" {2.1 * rounding:.1e}, or accountant='rdp'"
        )
    charges = list(single_events([(event, count)]))
    with quiet_accountants():
        if not all(is_of_a_sampler(part) for part, _ in charges):
            accountant = _make_accountant("pld", relation)
            return float(accountant.compose(event, count).get_epsilon(delta - rounding))
        interval = interval_of(event)
        if interval > _INTERVAL:
            by_rdp = epsilon_by_rdp(charges, delta, relation)
            if MOST_BY_PLD < by_rdp < math.inf:
                return by_rdp
        losses = [_losses_of_charge(part, number, relation, interval) for part, number in charges]
        total = functools.reduce(lambda one, other: one.compose(other), losses)
        return float(total.get_epsilon_for_delta(delta - rounding))


def _losses_of_charge(
    event: DpEvent, count: int, relation: str, interval: float
) -> PrivacyLossDistribution:
    import dp_accounting

    if is_gaussian(event):
        together = dp_accounting.GaussianDpEvent(event.noise_multiplier / math.sqrt(count))
        return _pld_on_grid(together, relation, interval)
    return _compose(_pld_on_grid(event, relation, interval), count)


# --------------------------------------------------------------------------------------------------
# RDP.


def _rdp_of_one(event: DpEvent, relation: str) -> tuple[Floats, Floats]:
    """Return orders and Rényi divergences of one release; infinite if rounding took one.

    dp-accounting would read a divergence of zero or below as an ε of zero. It leaves out orders of
    a sampled Gaussian whose series does not converge, and its bound for batches of fixed size is
    loose unless the rate is small. So each order has the smaller of its bound and this one: given
    the draws of all other examples, two neighbours differ only where the one example is drawn, with
    probability q. A release is a mixture of equal pairs and, with weight q, of pairs without
    sampling, whose divergence is R. exp((α - 1) D) is an f-divergence, so jointly convex (van
    Erven, Harremoës 2014, arXiv 1206.2459), and D <= log(1 - q + q exp((α - 1) R)) / (α - 1) <= R:
    sampling never costs more than no sampling. This holds for either neighbour as the first, under
    both relations, whatever was released before, so the bounds of an order add over releases.
    """
    # A composed event holds a list, which has no hash.
    key = (repr(event), relation)
    return remember(_divergences, key, lambda: _compute_rdp_of_one(event, relation))


def _compute_rdp_of_one(event: DpEvent, relation: str) -> tuple[Floats, Floats]:

    if is_truncated(event):
        full, ordinary, replacing = two_parts(event)
        orders, ordinary_divergences = _rdp_of_one(ordinary, relation)
        _, replacing_divergences = _rdp_of_one(replacing, relation)
        mixture = _mix_divergences(orders, full, ordinary_divergences, replacing_divergences)
        return orders, mixture
    composed = _make_accountant("rdp", relation).compose(event)
    divergences = np.where(composed.rdp > 0, composed.rdp, np.inf)
    rate = _rate_of_gaussian(event)
    if rate is not None:
        equal = np.zeros_like(divergences)
        unsampled = composed.orders / (2 * event.event.noise_multiplier**2)
        mixture = _mix_divergences(composed.orders, rate, equal, unsampled)
        mixture = np.where(mixture > 0, mixture, np.inf)
        divergences = np.minimum(divergences, mixture)
    return composed.orders, divergences


def _rate_of_gaussian(event: DpEvent) -> float | None:
    """Return the probability that one example is in the batch; None unless noise is Gaussian."""
    import dp_accounting

    if isinstance(event, dp_accounting.PoissonSampledDpEvent) and is_gaussian(event.event):
        return float(event.sampling_probability)
    without_replacement = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
    if without_replacement and is_gaussian(event.event):
        return float(event.sample_size / event.source_dataset_size)
    return None


def _mix_divergences(
    orders: Floats,
    full: float,
    ordinary: Floats,
    replacing: Floats,
) -> Floats:
    """Return a bound of the Rényi divergences of a mixture of two pairs.

    Args:
        orders: α > 1 `[n]`.
        full: weight of the second pair.
        ordinary: divergences of the first pair `[n]`.
        replacing: divergences of the second pair `[n]`.
    """
    if full == 0:
        return ordinary
    if full == 1:
        return replacing
    powers = orders - 1
    with np.errstate(over="ignore", invalid="ignore"):
        first = powers * ordinary
        second = powers * replacing
        gap = second - first
        # Exact for a small divergence, which a logarithm of a sum near 1 would round away.
        small = first + np.log1p(full * np.expm1(gap))
        large = np.logaddexp(np.log1p(-full) + first, np.log(full) + second)
        total = np.where(gap < _LARGEST_EXPONENT, small, large)
        return np.asarray(total / powers)


def epsilon_by_rdp(charges: Charges, delta: float, relation: str) -> float:
    """Return ε of several events; each is analysed alone, so that no rounding hides in the sum."""
    import dp_accounting

    orders = np.zeros(0)
    total = np.zeros(1)
    with quiet_accountants():
        for event, count in charges:
            orders, divergences = _rdp_of_one(event, relation)
            total = total + count * divergences
        spent, _ = dp_accounting.rdp.compute_epsilon(orders, total, delta)
    return float(spent)


# --------------------------------------------------------------------------------------------------
# δ at many ε.


def deltas_of_epsilons(event: DpEvent, count: int, epsilons: Floats, relation: str) -> Floats:
    """Return δ at many ε of `count` sampled releases, from one composition.

    Args:
        event: one sampled release, whose noise is not zero.
        count: number of releases, > 0.
        epsilons: values >= 0 `[n]`.
        relation: "add_or_remove_one" (by PLD) or "replace_one" (by RDP).

    Returns:
        Upper bounds `[n]`.
    """
    import dp_accounting

    curves = []
    with quiet_accountants():
        for neighbour in neighbouring_sizes(event):
            if relation == "replace_one":
                orders, divergences = _rdp_of_one(neighbour, relation)
                total = count * divergences
                compute = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
                deltas = [compute(orders, total, e)[0] for e in epsilons]
            else:
                losses = _compose(pld_of_one(neighbour, relation), count)
                # For several values at once dp-accounting walks over all losses in Python.
                deltas = [losses.get_delta_for_epsilon(float(e)) for e in epsilons]
            curves.append(deltas)
    largest = np.max(curves, axis=0) + bound_pld_rounding(event, count)
    return np.asarray(np.clip(largest, 0.0, 1.0))
