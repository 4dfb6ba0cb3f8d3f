"""The privacy loss of composed events, by dp-accounting: PLD (tight) and RDP (to check PLD).

An event describes one release, and a run composes it with itself. Every returned ε is an upper
bound. Searches and what a run shows take `quick_epsilon`, from our own distribution of the loss;
both are compared before a run. The last part says what an ε means for one person.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import scipy

from dpkfc.privacy.integration import (
    Floats,
    Losses,
    divergence_of_mixture,
    epsilon_of,
    gaussian_epsilon,
    integrated_epsilon,
    integration_grid,
    is_truncated,
    neighbouring_sizes,
    two_parts,
)
from dpkfc.privacy.loss_distribution import (
    ACCURACY,
    Grid,
    Release,
    choose_grid,
    epsilon_of_releases,
)

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    Charges = Sequence[tuple[DpEvent, int]]

# --------------------------------------------------------------------------------------------------
# Events of dp-accounting as plain values, for ledgers and cards, and their properties.

NEGLIGIBLE_NOISE = 1e-3  # over the sensitivity


def event_to_dict(event: DpEvent) -> dict[str, Any]:
    """Return the event as plain values that JSON keeps exactly: "type" and its fields."""
    values: dict[str, Any] = {"type": type(event).__name__}
    for name in field_names(event):
        value = getattr(event, name)
        values[name] = _encode_value(value)
    return values


def event_from_dict(data: Mapping[str, Any]) -> DpEvent:
    """Return the event that `event_to_dict` described.

    Raises:
        ValueError: an unknown class of event, or fields that do not fit it.
    """
    import dp_accounting

    kind = getattr(dp_accounting, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(
            f"unknown privacy event {data.get('type')!r}; expected the name of a dp_accounting"
            " event"
        )
    fields = {name: _decode_value(value) for name, value in data.items() if name != "type"}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(
            f"the fields {sorted(fields)} do not fit the event {data['type']}: {error}"
        ) from error


def field_names(event: DpEvent) -> list[str]:
    """Return the names of the fields of an event, which is an attrs class."""
    return [field.name for field in type(event).__attrs_attrs__]


def _encode_value(value: Any) -> Any:
    if _is_event(value):
        return event_to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_encode_value(item) for item in value]
    return value


def _decode_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    if isinstance(value, list):
        return [_decode_value(item) for item in value]
    return value


def _is_event(value: Any) -> bool:
    import dp_accounting

    return isinstance(value, dp_accounting.DpEvent)


def events_in(event: DpEvent) -> Iterator[DpEvent]:
    """Yield the event and all events within it."""
    yield event
    for name in field_names(event):
        value = getattr(event, name)
        values = value if isinstance(value, (list, tuple)) else [value]
        for inner in values:
            if _is_event(inner):
                yield from events_in(inner)


def has_no_noise(event: DpEvent) -> bool:
    """Return whether a part of the event is released without noise, or nearly so.

    Its ε is infinite. A release at a thousandth of the sensitivity may lose 5·10⁵: an exact figure
    is useless, and would overflow.
    """
    import dp_accounting

    return any(
        isinstance(part, dp_accounting.NonPrivateDpEvent)
        or ((is_gaussian(part) or is_truncated(part)) and part.noise_multiplier < NEGLIGIBLE_NOISE)
        for part in events_in(event)
    )


def convolutions(event: DpEvent) -> int:
    """Return the number of sampled releases that PLD convolves for an event."""
    import dp_accounting

    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return int(event.count) * convolutions(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(convolutions, event.events))
    # Gaussian losses add up in closed form.
    if is_gaussian(event):
        return 0
    return 1


def is_gaussian(event: DpEvent) -> bool:
    """Return whether the event is one Gaussian release without sampling."""
    import dp_accounting

    return isinstance(event, dp_accounting.GaussianDpEvent)


# --------------------------------------------------------------------------------------------------
# The distribution of the privacy loss of one release, by dp-accounting, on a grid that suits the
# losses.

RELATIONS = ("add_or_remove_one", "replace_one")
_INTERVAL = 1e-4  # of the grid, wider for large losses


def pld_of_one(event: DpEvent, relation: str) -> PrivacyLossDistribution:
    """Return the distribution of the privacy loss of one release, rounded up to a grid.

    Args:
        event: the release of a sampler.
        relation: one of `RELATIONS`.
    """
    return _pld_on_grid(event, relation, interval_of(event))


@functools.lru_cache(maxsize=16)
def _pld_on_grid(event: DpEvent, relation: str, interval: float) -> PrivacyLossDistribution:
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


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
T = TypeVar("T")
ACCOUNTANTS = ("pld", "rdp")
PLD_RDP_TOLERANCE = 1e-3
INTEGRAL_TOLERANCE = 0.01  # absolute and relative
VOID = 1000.0  # an ε without any meaning
# Above this ε by RDP, PLD would take minutes and gigabytes for a figure that nobody can use.
MOST_BY_PLD = 1e6
_GRID_RATIO = 1.2  # of the step counts of upper_bound
_RARE = 1e-3  # of δ, for the loss of full batches
# Calibration, the check before a run and the card ask for the same values of ε.
_CACHE_SIZE = 4096
_values: dict[tuple[Any, ...], float] = {}
_integrals: dict[tuple[Any, ...], float | None] = {}
_divergences: dict[tuple[Any, ...], tuple[Floats, Floats]] = {}
_forwarded: set[str] = set()


def epsilon(
    event: DpEvent,
    count: int,
    delta: float,
    accountant: str = "pld",
    neighbouring_relation: str = "add_or_remove_one",
) -> float:
    """Return ε of `count` adaptive repetitions of an event, at δ.

    Args:
        event: one release.
        count: number of releases, >= 0.
        delta: δ in (0, 1).
        accountant: "pld" or "rdp". Noise below half of the sensitivity, at which RDP gives more
            than `MOST_BY_PLD`, is left to RDP, whose bound is looser.
        neighbouring_relation: "add_or_remove_one" or "replace_one".

    Returns:
        ε >= 0; infinite for an event without noise, 0 for no release.

    Raises:
        ValueError: an accountant that cannot treat the event under this relation, a negative count,
            or δ outside (0, 1).
    """
    return EpsilonCurve(event, delta, neighbouring_relation, accountant).epsilon(count)


def total_epsilon(charges: Charges, delta: float, accountant: str = "") -> float:
    """Return ε of several runs on the same people together, composed adaptively, at δ.

    Args:
        charges: event of one release and number of such releases, of every run.
        delta: δ in (0, 1) of the total, whatever δ each run was planned for.
        accountant: "pld" or "rdp"; "" takes PLD where it treats the events and resolves δ.

    Returns:
        ε >= 0; infinite where an event has no noise, 0 for no release.

    Raises:
        ValueError: events of different neighbouring relations, δ outside (0, 1), or an accountant
            that cannot treat the events.
    """
    import dp_accounting

    parts = _merge(charges)
    relations = {relation_of(event) for event, _ in parts} or {"add_or_remove_one"}
    if len(relations) > 1:
        raise ValueError(
            "releases under add_or_remove_one and under replace_one have no common ε: total each"
            " kind alone"
        )
    relation = relations.pop()
    if not parts:
        parts = [(dp_accounting.NoOpDpEvent(), 0)]
    if len(parts) == 1:
        event, count = parts[0]
        name = accountant or _suitable_accountant(event, count, delta, relation)
        return epsilon(event, count, delta, name, relation)
    # Truncated batches have two kinds of neighbours: of one record less, and of one more.
    return max(_epsilon_of_parts(parts, kind, delta, accountant, relation) for kind in (0, -1))


def _merge(charges: Charges) -> list[tuple[DpEvent, int]]:
    """Return each kind of single releases once, and all Gaussian releases as one."""
    import dp_accounting

    counts: Counter[str] = Counter()
    # A composed event holds a list, which has no hash.
    events = {}
    precision = 0.0
    for event, count in _single_events(charges):
        if count and is_gaussian(event) and not has_no_noise(event):
            precision += count / event.noise_multiplier**2
            continue
        text = repr(event)
        events[text] = event
        counts[text] += count
    parts = [(events[text], count) for text, count in counts.items() if count]
    if precision:
        # Gaussian releases of full batches are together one Gaussian release.
        parts.append((dp_accounting.GaussianDpEvent(precision**-0.5), 1))
    return parts


def compose(charges: Charges) -> tuple[DpEvent, int]:
    """Return one event and its number that cost what all these releases cost together."""
    import dp_accounting

    if len(charges) == 1:
        return charges[0]
    parts = [dp_accounting.SelfComposedDpEvent(event, count) for event, count in charges]
    return dp_accounting.ComposedDpEvent(parts), 1


def _single_events(charges: Charges) -> Iterator[tuple[DpEvent, int]]:
    """Yield the releases of composed events one kind at a time; their order has no effect."""
    import dp_accounting

    for event, count in charges:
        if isinstance(event, dp_accounting.ComposedDpEvent):
            inner = [(part, count) for part in event.events]
            yield from _single_events(inner)
        elif isinstance(event, dp_accounting.SelfComposedDpEvent):
            yield from _single_events([(event.event, count * event.count)])
        else:
            yield event, count


def _suitable_accountant(event: DpEvent, count: int, delta: float, relation: str) -> str:
    if relation == "add_or_remove_one" and pld_resolves(event, count, delta):
        return "pld"
    return "rdp"


def _epsilon_of_parts(
    parts: Sequence[tuple[DpEvent, int]],
    kind: int,
    delta: float,
    accountant: str,
    relation: str,
) -> float:
    """Return ε of several events for one kind of neighbours."""
    neighbours = [(neighbouring_sizes(event)[kind], count) for event, count in parts]
    # The order of the runs does not change their composition, and must not miss the cache.
    neighbours.sort(key=lambda part: repr(part[0]))
    event, _ = compose(neighbours)
    if has_no_noise(event):
        return math.inf
    accountant = accountant or _suitable_accountant(event, 1, delta, relation)
    if accountant == "pld":
        return epsilon(event, 1, delta, "pld", relation)
    for part, _ in neighbours:
        _check_pair(part, "rdp", relation)
    return _epsilon_by_rdp(neighbours, delta, relation)


def _epsilon_by_rdp(charges: Charges, delta: float, relation: str) -> float:
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


def _is_of_a_sampler(event: DpEvent) -> bool:
    """Return whether the event is a release of a sampler that PLD can analyse."""
    import dp_accounting

    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return is_gaussian(event.event)
    return is_gaussian(event) or is_truncated(event)


def _epsilon_by_pld(event: DpEvent, count: int, delta: float, relation: str) -> float:
    """Return ε of an event; the analysis of each release of a sampler is remembered.

    Raises:
        ValueError: PLD cannot resolve δ.
    """
    _check_resolved(event, count, delta)
    resolved = delta - _rounding(event, count)
    charges = list(_single_events([(event, count)]))
    with quiet_accountants():
        if not all(_is_of_a_sampler(part) for part, _ in charges):
            accountant = _accountant("pld", relation)
            return float(accountant.compose(event, count).get_epsilon(resolved))
        interval = interval_of(event)
        if interval > _INTERVAL:
            by_rdp = _epsilon_by_rdp(charges, delta, relation)
            if MOST_BY_PLD < by_rdp < math.inf:
                return by_rdp
        losses = [_losses_of_charge(part, number, relation, interval) for part, number in charges]
        total = functools.reduce(lambda one, other: one.compose(other), losses)
        return float(total.get_epsilon_for_delta(resolved))


def _losses_of_charge(
    event: DpEvent, count: int, relation: str, interval: float
) -> PrivacyLossDistribution:
    import dp_accounting

    if is_gaussian(event):
        together = dp_accounting.GaussianDpEvent(event.noise_multiplier / math.sqrt(count))
        return _pld_on_grid(together, relation, interval)
    return _compose(_pld_on_grid(event, relation, interval), count)


def describe_extra(releases: Sequence[Mapping[str, Any]], delta: float) -> list[dict[str, Any]]:
    """Return what a ledger holds beside the steps, with ε of each kind alone at δ.

    Args:
        releases: lines of a ledger.
        delta: δ in (0, 1).
    """
    scale = ("noise_multiplier", "stddev", "sensitivity")
    kinds: dict[tuple[Any, ...], list[DpEvent]] = defaultdict(list)
    for line in releases:
        if line.get("purpose"):
            numbers = [line[name] for name in scale]
            event = event_from_dict(line["event"])
            kinds[(line["purpose"], *numbers)].append(event)
    rows = []
    for (purpose, *numbers), events in kinds.items():
        row: dict[str, Any] = {"purpose": purpose, "releases": len(events)}
        row |= zip(scale, numbers, strict=True)
        charges = [(event, 1) for event in events]
        row["epsilon_alone"] = total_epsilon(charges, delta)
        rows.append(row)
    return rows


def relation_of(event: DpEvent) -> str:
    """Return the neighbouring relation under which an event can be accounted for."""
    import dp_accounting

    kind = dp_accounting.SampledWithoutReplacementDpEvent
    replaces = any(isinstance(part, kind) for part in events_in(event))
    if replaces:
        return "replace_one"
    return "add_or_remove_one"


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
    largest = np.max(curves, axis=0) + _rounding(event, count)
    return np.asarray(np.clip(largest, 0.0, 1.0))


def cross_check(
    event: DpEvent,
    count: int,
    delta: float,
    neighbouring_relation: str = "add_or_remove_one",
    also: Charges = (),
) -> dict[str, float | None]:
    """Return ε by PLD and by RDP, after a comparison with each other and with `quick_epsilon`.

    PLD may exceed RDP, the looser bound of the same loss, by 10⁻³ and the error of its grid of
    losses. It may differ from our own distribution by what the grids and the rounding of both
    change, and RDP may not fall below that. RDP of batches of fixed size may not fall below an
    integral by more than 1 % and 0.01.

    Args:
        event: of one release.
        count: number of releases.
        delta: δ.
        neighbouring_relation: as for `epsilon`.
        also: other releases on the same people, whose total is compared in the same way.

    Returns:
        ε under the keys "pld" and "rdp". The first is None where PLD cannot treat the event or
        resolve δ.

    Raises:
        ValueError: neither accountant treats the event under this relation, or the figures
            disagree.
    """
    by_rdp = epsilon(event, count, delta, "rdp", neighbouring_relation)
    by_pld = None
    if _suitable_accountant(event, count, delta, neighbouring_relation) == "pld":
        by_pld = epsilon(event, count, delta, "pld", neighbouring_relation)
    is_comparable = not MOST_BY_PLD < by_rdp < math.inf
    if count > 0 and is_comparable and not has_no_noise(event):
        _compare(event, count, delta, by_pld, by_rdp)
    if not also:
        return {"pld": by_pld, "rdp": by_rdp}
    charges = [(event, count), *also]
    total_by_rdp = total_epsilon(charges, delta, "rdp")
    total_by_pld = None
    if by_pld is not None and pld_resolves(*compose(charges), delta):
        total_by_pld = total_epsilon(charges, delta, "pld")
        _compare_totals(charges, delta, by_pld, total_by_pld, total_by_rdp)
    return {"pld": total_by_pld, "rdp": total_by_rdp}


def _compare_totals(
    charges: Charges, delta: float, alone: float, by_pld: float, by_rdp: float
) -> None:
    """Refuse a total below one part's ε, above a looser bound, or different from our own ε."""
    event, _ = compose(charges)
    count = sum(n for _, n in charges)
    grid = _grid_error(event, count, delta)
    own = None if MOST_BY_PLD < by_rdp < math.inf else quick_epsilon(charges, delta)
    agrees = own is None or abs(by_pld - own.value) <= _agreement(own, event, count, delta)
    if agrees and alone - PLD_RDP_TOLERANCE - grid <= by_pld <= by_rdp + PLD_RDP_TOLERANCE + grid:
        return
    raise ValueError(
        f"the accountants disagree on a total: PLD says {by_pld:.8g}, RDP {by_rdp:.8g}, ours"
        f" {'nothing' if own is None else own.value}, a part {alone:.8g}; please report this"
    )


def _grid_error(event: DpEvent, count: int, delta: float) -> float:
    """Return about the error of ε that the grid of losses causes."""
    spread = math.sqrt(2 * count * math.log(1 / delta))
    return interval_of(event) / 2 * spread


def _compare(event: DpEvent, count: int, delta: float, by_pld: float | None, by_rdp: float) -> None:
    """Refuse figures that contradict each other."""
    problem = ""
    own = None if by_pld is None else quick_epsilon([(event, count)], delta)
    least: float | None
    if own is not None:
        slack = _agreement(own, event, count, delta)
        least = own.value - slack
    else:
        slack = 0.0
        least = _integral(event, count, delta)
        if least is not None:
            least -= INTEGRAL_TOLERANCE * (1 + least)
    grid = _grid_error(event, count, delta)
    if by_pld is not None and by_pld > by_rdp + PLD_RDP_TOLERANCE + grid:
        problem = f"PLD gives epsilon {by_pld}, above the {by_rdp} of RDP, a looser bound"
    elif own is not None and by_pld is not None and not abs(by_pld - own.value) <= slack:
        problem = f"PLD gives epsilon {by_pld}, our own distribution of the loss {own.value}"
    elif least is not None and not by_rdp >= least:
        problem = f"RDP gives epsilon {by_rdp}, below {least} by numerical integration"
    if problem:
        raise ValueError(
            f"the accountants disagree on {count} x {event} at delta = {delta}: {problem}; do not"
            " train, please report this"
        )


def check_before_a_run(
    event: DpEvent,
    count: int,
    delta: float,
    neighbouring_relation: str,
    also: Charges = (),
) -> None:
    """Run `cross_check` unless ε is above 1,000, where PLD would take minutes for a useless figure.

    Raises:
        ValueError: as `cross_check`.
    """
    spent = None
    if not has_no_noise(event):
        own = quick_epsilon([(event, count)], delta)
        spent = _integral(event, count, delta) if own is None else own.value
    if spent is None or spent <= VOID:
        cross_check(event, count, delta, neighbouring_relation, also)


def _integral(event: DpEvent, count: int, delta: float) -> float | None:
    key = (repr(event), delta, count)
    return _remember(_integrals, key, lambda: integrated_epsilon(event, count, delta))


def _remember(cache: dict[tuple[Any, ...], T], key: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """Return the value of a key, computed where it is not known; the oldest make room."""
    if key not in cache:
        value = compute()
        if len(cache) >= _CACHE_SIZE:
            oldest = next(iter(cache))
            cache.pop(oldest, None)
        cache[key] = value
    return cache[key]


def pld_resolves(event: DpEvent, count: int, delta: float) -> bool:
    """Return whether δ is large enough for PLD, whose rounding leaves an absolute error in δ."""
    return delta > 2 * _rounding(event, count)


def _check_resolved(event: DpEvent, count: int, delta: float) -> None:
    """Refuse a δ that PLD cannot resolve.

    Raises:
        ValueError: naming the least δ.
    """
    if not pld_resolves(event, count, delta):
        raise ValueError(
            f"PLD cannot resolve delta = {delta:g} in {count:,} releases; choose a delta above"
            f" {2.1 * _rounding(event, count):.1e}, or accountant='rdp'"
        )


# --------------------------------------------------------------------------------------------------
# ε from our own distribution of the loss: for searches, for what a run shows, and to compare with.


@dataclass(frozen=True)
class QuickEpsilon:
    """An upper bound of ε without dp-accounting, in milliseconds.

    Attributes:
        value: ε.
        grid: the losses it was computed on; None for a closed form.
    """

    value: float
    grid: Grid | None = None


def quick_epsilon(
    charges: Charges, delta: float, planned: Charges = (), accuracy: float = ACCURACY
) -> QuickEpsilon | None:
    """Return ε of releases on the same people together, from our own distribution of the loss.

    Args:
        charges: event of one release and number of such releases.
        delta: δ in (0, 1).
        planned: at least as many releases, whose grid is taken; by default the same. Values on one
            grid rise with the number of releases.
        accuracy: what the grid may add to ε, as a part of it.

    Returns:
        The bound; None for events that are not of a sampler, or a δ that rounding hides.
    """
    parts, delta = _simplify(_merge(charges), delta)
    if any(has_no_noise(event) for event, _ in parts):
        return QuickEpsilon(math.inf)
    if not all(_is_of_a_sampler(event) for event, _ in parts):
        return None
    if not parts:
        return QuickEpsilon(0.0)
    if len(parts) == 1 and is_gaussian(parts[0][0]):
        ((event, count),) = parts
        return QuickEpsilon(_epsilon_of_gaussians(event.noise_multiplier, count, delta))
    if not pld_resolves(*compose(parts), delta):
        return None
    wanted, _ = _simplify(_merge(planned), delta) if planned else (parts, delta)
    found = []
    for kind in (0, -1):
        releases, of_grid = (
            tuple((_make_release(neighbouring_sizes(event)[kind]), count) for event, count in some)
            for some in (parts, wanted)
        )
        grid = choose_grid(of_grid, delta, accuracy)
        found.append(QuickEpsilon(epsilon_of_releases(releases, delta, grid), grid))
        if not any(is_truncated(event) for event, _ in parts):
            break
    return max(found, key=lambda one: one.value)


def _simplify(
    parts: Sequence[tuple[DpEvent, int]], delta: float
) -> tuple[Sequence[tuple[DpEvent, int]], float]:
    """Return one event of truncated batches without its full batches, where δ may cover them."""
    if len(parts) == 1 and is_truncated(parts[0][0]):
        ((event, count),) = parts
        divided = [two_parts(neighbour) for neighbour in neighbouring_sizes(event)]
        full = count * max(share for share, _, _ in divided)
        if full <= _RARE * delta:
            _, ordinary, _ = divided[0]
            return [(ordinary, count)], delta - full
    return parts, delta


def _epsilon_of_gaussians(noise: float, count: int, delta: float) -> float:
    return gaussian_epsilon(noise / math.sqrt(count), delta) * (1 + 1e-9) + 1e-9


def _make_release(event: DpEvent) -> Release:
    """Return a release of a sampler as weighted pairs of distributions."""
    pairs = [(1.0, event)]
    if is_truncated(event):
        full, ordinary, replacing = two_parts(event)
        pairs = [(1 - full, ordinary), (full, replacing)]
    values = []
    for weight, part in pairs:
        if is_gaussian(part):
            values.append((weight, 1.0, part.noise_multiplier))
        else:
            values.append((weight, part.sampling_probability, part.event.noise_multiplier))
    return Release(tuple(values))


def _agreement(own: QuickEpsilon, event: DpEvent, count: int, delta: float) -> float:
    """Return how far dp-accounting and our own distribution may differ, by what both round."""
    rounding = 1e-6 * (1 + own.value)
    if own.grid is not None:
        grids = own.grid.error(own.value) + own.grid.error(own.value, interval_of(event))
        # dp-accounting leaves out tails of 1e-15.
        hidden = (_rounding(event, count) + 1e-14) / (delta * own.grid.tilt)
        # In a scan of rates, noises and counts the grids added up to 3.6 times this estimate. Both
        # programs add what their transforms round.
        rounding += 10 * grids + 2 * hidden
    return rounding


class EpsilonCurve:
    """ε as a function of the number of releases of one event, with a cache.

    Args:
        event: one release.
        delta: δ in (0, 1).
        relation: "add_or_remove_one" or "replace_one".
        accountant: "pld" or "rdp".
        horizon: planned number of releases; `upper_bound` does not evaluate beyond it for a smaller
            count.
        also: other releases on the same people, which every ε includes.
        separation: every unit takes part in at most one of so many following releases, so that
            they cost it one event.

    Raises:
        ValueError: an accountant that cannot treat the event under this relation, δ outside (0, 1).
    """

    def __init__(
        self,
        event: DpEvent,
        delta: float,
        relation: str = "add_or_remove_one",
        accountant: str = "pld",
        horizon: int | None = None,
        also: Charges = (),
        separation: int = 1,
    ) -> None:
        _check_pair(event, accountant, relation)
        if not 0 < delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        self.event = event
        self.delta = delta
        self.relation = relation
        self.accountant = accountant
        self._horizon = horizon
        self._also = tuple(also)
        self._separation = separation

    def _count_events(self, releases: int) -> int:
        return -(-releases // self._separation)

    def epsilon(self, count: int) -> float:
        """Return ε after `count` releases, as dp-accounting computes it.

        Raises:
            ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"the number of releases must be >= 0, got {count}")
        count = self._count_events(count)
        if self._also:
            charges = [(self.event, count), *self._also]
            return total_epsilon(charges, self.delta, self.accountant)
        if count == 0:
            return 0.0
        if has_no_noise(self.event):
            return math.inf
        # An equal curve of this process may have computed it.
        key = (repr(self.event), self.delta, self.relation, self.accountant, count)
        return _remember(_values, key, lambda: self._compute(count))

    def running_epsilon(self, count: int) -> float:
        """Return ε to show after `count` releases of a run, in milliseconds.

        It is an upper bound, from our own distribution of the loss, and never exceeds
        dp-accounting's ε of all planned releases. From there on it is dp-accounting's own.

        Raises:
            ValueError: a negative count.
        """
        horizon = self._horizon
        if count <= 0 or self.accountant == "rdp" or (horizon is not None and count >= horizon):
            return self.epsilon(count)
        planned = [(self.event, self._count_events(horizon or count)), *self._also]
        made = [(self.event, self._count_events(count)), *self._also]
        own = quick_epsilon(made, self.delta, planned)
        if own is None:
            return self.epsilon(count)
        return own.value if horizon is None else min(own.value, self.epsilon(horizon))

    def upper_bound(self, count: int, every: int = 0) -> float:
        """Return an upper bound of ε of `count` releases that never falls with the count.

        Few values are computed, because counts are rounded up to a fixed set.

        It is the value at the next count of a fixed set: a geometric grid, the horizon, and the
        multiples of `every`. Other known values are not used, because the bound could then fall
        with the count.

        Args:
            count: releases.
            every: multiples of it are computed anyway; 0 for none.

        Raises:
            ValueError: a negative count.
        """
        if count <= 0:
            return self.epsilon(count)
        point = 1
        while point < count:
            point = max(point + 1, int(point * _GRID_RATIO))
        if self._horizon is not None and count <= self._horizon:
            point = min(point, self._horizon)
        if every > 0:
            following = -(-count // every) * every
            point = min(point, following)
        return self.running_epsilon(point)

    def _compute(self, count: int) -> float:
        ((event, count),), delta = _simplify([(self.event, count)], self.delta)
        if event is not self.event:
            return epsilon(event, count, delta, self.accountant, self.relation)
        neighbours = neighbouring_sizes(event)
        if self.accountant == "rdp":
            return max(_epsilon_by_rdp([(e, count)], delta, self.relation) for e in neighbours)
        if is_gaussian(event):
            return _epsilon_of_gaussians(event.noise_multiplier, count, delta)
        return max(_epsilon_by_pld(e, count, delta, self.relation) for e in neighbours)


def _rounding(event: DpEvent, count: int) -> float:
    """Return a bound of the rounding in the δ of PLD, which takes a power of an FFT.

    Compared with an integration under a tilt (tests/audit), δ is too small by up to 8e-17 a
    release. PLD is then not an upper bound: for 10⁵ releases at δ = 1e-10 its ε is 0.07 too small.
    """
    return 2.0**-52 * (count * convolutions(event) + 256)


def _check_pair(event: DpEvent, accountant: str, relation: str) -> None:
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
    if not _accountant(accountant, relation).supports(event):
        raise ValueError(
            f"the accountant {accountant!r} does not support the event {event} under {relation!r}"
        )


def _accountant(accountant: str, relation: str) -> dp_accounting.PrivacyAccountant:
    import dp_accounting

    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    if accountant == "pld":
        return dp_accounting.pld.PLDAccountant(neighboring_relation=neighbours)
    return dp_accounting.rdp.RdpAccountant(neighboring_relation=neighbours)


def _rdp_of_one(event: DpEvent, relation: str) -> tuple[Floats, Floats]:
    """Return orders and Rényi divergences of one release; infinite if rounding took one.

    dp-accounting would read a divergence of zero or below as an ε of zero.
    """
    # A composed event holds a list, which has no hash.
    key = (repr(event), relation)
    return _remember(_divergences, key, lambda: _compute_rdp_of_one(event, relation))


def _compute_rdp_of_one(event: DpEvent, relation: str) -> tuple[Floats, Floats]:
    import dp_accounting

    if is_truncated(event):
        full, ordinary, replacing = two_parts(event)
        orders, ordinary_divergences = _rdp_of_one(ordinary, relation)
        _, replacing_divergences = _rdp_of_one(replacing, relation)
        mixture = divergence_of_mixture(orders, full, ordinary_divergences, replacing_divergences)
        return orders, mixture
    composed = _accountant("rdp", relation).compose(event)
    divergences = np.where(composed.rdp > 0, composed.rdp, np.inf)
    is_replaced = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
    if is_replaced and is_gaussian(event.event):
        # Both datasets draw the same numbers, so this is a mixture too: of equal batches and, with
        # probability m / n, of batches with one replaced example. The bound of dp-accounting is
        # better only where m / n is small.
        replaced = composed.orders / (2 * event.event.noise_multiplier**2)
        rate = event.sample_size / event.source_dataset_size
        equal = np.zeros_like(divergences)
        mixture = divergence_of_mixture(composed.orders, rate, equal, replaced)
        divergences = np.minimum(divergences, mixture)
    return composed.orders, divergences


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


# --------------------------------------------------------------------------------------------------
# What an ε means: success rates of any membership attack, and ε for several records of one person.
#
# An attack decides whether a unit was in the data. Where δ(ε) is the privacy profile, every pair
# (ε, δ) bounds each attack with false alarms α: it finds at most the share min(δ + e^ε α, 1 - e^-ε
# (1 - δ - α)) of members (Kairouz, Oh and Viswanath 2015). At even odds it is right with
# probability 1/2 + (e^ε - 1 + 2 δ) / (2 (e^ε + 1)) at most. The least bound of many pairs is the
# trade-off function of the accountant (Dong, Roth and Su 2022).


_POINTS = 24
_LARGEST_EXPONENT = 700.0  # e to the power of more than 709 is not a float
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
        if e < _LARGEST_EXPONENT:
            shares.append(d + math.exp(e) * false_alarms)
        shares.append(1 - math.exp(-e) * (1 - d - false_alarms))
    return min(shares)


def _serialise(event: DpEvent) -> str:
    """Return an event as text, which a cache can take for a key."""
    values = event_to_dict(event)
    return json.dumps(values, sort_keys=True)


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


# --------------------------------------------------------------------------------------------------
# ε for several records of one person.


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
    dominates (Schuchardt et al. 2024); its ε is integrated numerically and raised by the tolerance
    of the integration. Everywhere else the bound for groups holds: (k ε', δ' Σ e^(i ε')).

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
    return _group_epsilon(_serialise(event), count, delta, size, relation, independent)


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
        pair = _losses_of_group(rate, event.event.noise_multiplier, size)
        integral = max(epsilon_of(losses, count, delta) for losses in pair)
        error = INTEGRAL_TOLERANCE * (1 + integral)
        return integral + error, "exact"
    return _bound_of_group(event, count, delta, size, relation), "bound"


def _losses_of_group(rate: float, stddev: float, size: int) -> tuple[Losses, Losses]:
    """Return the losses of the presence of a group against its absence, and the reverse."""
    x, cell = integration_grid(stddev, size)
    # One row for each number of units in the batch.
    shifts = np.arange(size + 1)[:, None]
    log_weights = scipy.stats.binom.logpmf(shifts, size, rate)
    centred = x - shifts / 2
    log_ratios = shifts * centred / stddev**2
    loss = scipy.special.logsumexp(log_weights + log_ratios, axis=0)
    unit = x / stddev
    log_mass = -0.5 * unit**2 + math.log(cell)
    present = Losses(loss, np.exp(log_mass + loss))
    absent = Losses(-loss, np.exp(log_mass))
    return present, absent


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
