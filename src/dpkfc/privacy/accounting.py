"""The privacy loss of composed events, by dp-accounting: PLD (tight) and RDP (a guard beside it).

An event describes one release; a run composes it with itself. Every ε returned is an upper bound.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpkfc.privacy.integration import (
    divergence_of_mixture,
    gaussian_epsilon,
    integrated_epsilon,
    neighbouring_sizes,
    two_parts,
)

if TYPE_CHECKING:
    import dp_accounting

# --------------------------------------------------------------------------------------------------
# Events of dp-accounting as plain values, for ledgers and cards, and what can be read off them.

NEGLIGIBLE_NOISE = 1e-3  # over the sensitivity


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """The event as plain values that JSON keeps exactly: its class under "type", then its fields."""
    return {"type": type(event).__name__} | {name: _plain(getattr(event, name)) for name in fields(event)}


def event_from_dict(data: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """The event that `event_to_dict` described.

    Raises:
        ValueError: an unknown class of event, or fields that do not fit it.
    """
    import dp_accounting

    kind = getattr(dp_accounting, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(f"unknown privacy event {data.get('type')!r}; expected the name of a dp_accounting event")
    fields = {name: _rich(value) for name, value in data.items() if name != "type"}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"the fields {sorted(fields)} do not fit the event {data['type']}: {error}") from error


def fields(event: dp_accounting.DpEvent) -> list[str]:
    """Names of the fields; events are attrs classes, which list them there."""
    return [field.name for field in type(event).__attrs_attrs__]


def _plain(value: Any) -> Any:
    import dp_accounting

    if isinstance(value, dp_accounting.DpEvent):
        return event_to_dict(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _rich(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    return [_rich(v) for v in value] if isinstance(value, list) else value


def parts(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    """The event and all events within it."""
    import dp_accounting

    yield event
    for name in fields(event):
        value = getattr(event, name)
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, dp_accounting.DpEvent):
                yield from parts(inner)


def has_no_noise(event: dp_accounting.DpEvent) -> bool:
    """Whether a part of the event releases something without noise, or with too little to hide anything: ε is infinite.

    A release at a thousandth of the sensitivity may lose 5·10⁵; to say so exactly helps nobody, and overflows further on.
    """
    import dp_accounting

    gaussian = (dp_accounting.GaussianDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent)
    return any(
        isinstance(part, dp_accounting.NonPrivateDpEvent)
        or (isinstance(part, gaussian) and part.noise_multiplier < NEGLIGIBLE_NOISE)
        for part in parts(event)
    )


def convolutions(event: dp_accounting.DpEvent) -> int:
    """How many sampled releases PLD convolves for an event."""
    import dp_accounting

    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return int(event.count) * convolutions(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(convolutions, event.events))
    return 0 if is_gaussian(event) else 1  # Gaussian losses add up in closed form


def is_gaussian(event: dp_accounting.DpEvent) -> bool:
    """Whether it is one Gaussian release without sampling."""
    import dp_accounting

    return isinstance(event, dp_accounting.GaussianDpEvent)


# --------------------------------------------------------------------------------------------------
# The distribution of the privacy loss of one release, by dp-accounting, on a grid that is as fine
# as the losses need.

RELATIONS = ("add_or_remove_one", "replace_one")
_INTERVAL = 1e-4  # of the grid, wider where a release loses much


def pld_of_one(
    event: dp_accounting.DpEvent, relation: str, interval: float | None = None
) -> dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The distribution of the privacy loss of one sampled release, pessimistically rounded to a grid, by default its own."""
    import dp_accounting

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
) -> dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution:
    import dp_accounting

    return dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise,
        sampling_prob=rate,
        neighboring_relation=dp_accounting.NeighboringRelation[relation.upper()],
        value_discretization_interval=interval,
    )


def interval_of(event: dp_accounting.DpEvent) -> float:
    """Of the coarsest grid that a part of the event is held on."""
    import dp_accounting

    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return max(interval_of(one) for one in two_parts(event)[1:])
    return max((_interval_at(part.noise_multiplier) for part in parts(event) if hasattr(part, "noise_multiplier")), default=0.0)


def _interval_at(noise: float) -> float:
    """A release loses up to about 1/(2·noise²): the grid grows with it below 0.5, so that its size and the time stay the same."""
    return _INTERVAL * max(1.0, (0.5 / noise) ** 2)


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
ACCOUNTANTS = ("pld", "rdp")
PLD_RDP_TOLERANCE = 1e-3
INTEGRAL_TOLERANCE = 0.01  # absolute and relative
VOID = 1000.0  # an ε that promises nothing
_GRID_RATIO = 1.2  # of the step counts at which upper_bound evaluates the accountant
_RARE = 1e-3  # of δ: what full batches may take of it before their loss is looked at
_REMEMBERED = 4096  # values of ε: calibration, the check before a run and the card ask for the same ones
_values: dict[tuple[Any, ...], float] = {}
_forwarded: set[str] = set()


def epsilon(
    event: dp_accounting.DpEvent,
    count: int,
    delta: float,
    accountant: str = "pld",
    neighbouring_relation: str = "add_or_remove_one",
) -> float:
    """ε of `count` adaptive repetitions of an event, at δ.

    Args:
        event: one release.
        count: number of releases, >= 0.
        delta: δ in (0, 1).
        accountant: "pld" or "rdp".
        neighbouring_relation: "add_or_remove_one" or "replace_one".

    Returns:
        ε >= 0; infinite for an event without noise, 0 for no release.

    Raises:
        ValueError: an accountant that cannot treat the event under this relation, a negative count, δ outside (0, 1).
    """
    return EpsilonCurve(event, delta, neighbouring_relation, accountant).at(count)


def delta_of_epsilon(
    event: dp_accounting.DpEvent,
    count: int,
    epsilon: float,
    accountant: str = "pld",
    neighbouring_relation: str = "add_or_remove_one",
) -> float:
    """δ of `count` adaptive repetitions of an event, at ε >= 0; 1 for an event without noise.

    Raises:
        ValueError: an accountant that cannot treat the event under this relation, a negative count, ε negative or NaN.
    """
    import dp_accounting

    _check_pair(event, accountant, neighbouring_relation)
    _check_count(count)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    if count == 0:
        return 0.0
    if has_no_noise(event):
        return 1.0
    with quiet_accountants():
        if accountant == "rdp":
            compute_delta = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
            curves = [_rdp_of_one(one, neighbouring_relation) for one in neighbouring_sizes(event)]
            return max(float(compute_delta(orders, count * of_one, epsilon)[0]) for orders, of_one in curves)
        if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            losses = [pld_of_one(one, neighbouring_relation).self_compose(count) for one in neighbouring_sizes(event)]
            found = max(float(one.get_delta_for_epsilon(epsilon)) for one in losses)
        else:
            found = float(_composed(event, count, accountant, neighbouring_relation).get_delta(epsilon))
        return min(1.0, found + _rounding(event, count))


def cross_check(
    event: dp_accounting.DpEvent, count: int, delta: float, neighbouring_relation: str = "add_or_remove_one"
) -> dict[str, float | None]:
    """ε by PLD and by RDP, for the card, held against each other and against a numerical integration of our own.

    PLD may exceed RDP, the looser bound of the same loss, by 10⁻³ and what its grid of losses can add; both may fall below the
    integral, and PLD rise above it, by 1 % and 0.01.

    Returns:
        `{"pld": ε or None where PLD cannot treat the event or resolve δ, "rdp": ε}`.

    Raises:
        ValueError: neither accountant treats the event under this relation, or one of them went wrong.
    """
    by_rdp = epsilon(event, count, delta, "rdp", neighbouring_relation)
    applies = neighbouring_relation != "replace_one" and pld_resolves(event, count, delta)
    by_pld = epsilon(event, count, delta, "pld", neighbouring_relation) if applies else None
    if count > 0 and not has_no_noise(event):
        _compare(event, count, delta, by_pld, by_rdp)
    return {"pld": by_pld, "rdp": by_rdp}


def _compare(event: dp_accounting.DpEvent, count: int, delta: float, by_pld: float | None, by_rdp: float) -> None:
    grid = interval_of(event) / 2 * math.sqrt(2 * count * math.log(1 / delta))
    wrong = ""
    if by_pld is not None and by_pld > by_rdp + PLD_RDP_TOLERANCE + grid:
        wrong = f"PLD gives epsilon {by_pld}, above the {by_rdp} of RDP, which is a looser bound of the same loss"
    elif (integral := _integral(event, count, delta)) is not None:
        slack = INTEGRAL_TOLERANCE * (1 + integral)
        for name, found in (("PLD", by_pld), ("RDP", by_rdp)):
            if found is not None and not found >= integral - slack:
                wrong = f"{name} gives epsilon {found}, numerical integration {integral}: the bound is none"
        if by_pld is not None and not by_pld <= integral + slack + grid:
            wrong = f"PLD gives epsilon {by_pld}, numerical integration {integral}"
    if wrong:
        raise ValueError(
            f"the accountants disagree on {count} x {event} at delta = {delta}: {wrong}; report neither before the cause is "
            "found, and train nothing on them"
        )


def check_before_a_run(event: dp_accounting.DpEvent, count: int, delta: float, neighbouring_relation: str) -> None:
    """`cross_check`, unless ε is above 1,000: that promises nothing, and PLD would take minutes to say so.

    Raises:
        ValueError: as `cross_check`.
    """
    integral = None if has_no_noise(event) else _integral(event, count, delta)
    if integral is None or integral <= VOID:
        cross_check(event, count, delta, neighbouring_relation)


def _integral(event: dp_accounting.DpEvent, count: int, delta: float) -> float | None:
    key = (repr(event), delta, "integral", count)
    if key not in _values:
        found = integrated_epsilon(event, count, delta)
        _keep(key, math.nan if found is None else found)
    return None if math.isnan(_values[key]) else _values[key]


def _keep(key: tuple[Any, ...], value: float) -> None:
    if len(_values) >= _REMEMBERED:
        _values.pop(next(iter(_values)), None)
    _values[key] = value


def pld_resolves(event: dp_accounting.DpEvent, count: int, delta: float) -> bool:
    """Whether δ is large enough for PLD, which convolves without a tilt: rounding leaves an absolute error in δ."""
    return delta > 2 * _rounding(event, count)


class EpsilonCurve:
    """ε as a function of the number of releases of one event, remembered.

    Args:
        event: one release.
        delta: δ in (0, 1).
        relation: "add_or_remove_one" or "replace_one".
        accountant: "pld" or "rdp".
        horizon: planned number of releases; `upper_bound` never looks beyond it for a count below it.

    Raises:
        ValueError: an accountant that cannot treat the event under this relation, δ outside (0, 1).
    """

    def __init__(
        self,
        event: dp_accounting.DpEvent,
        delta: float,
        relation: str = "add_or_remove_one",
        accountant: str = "pld",
        horizon: int | None = None,
    ) -> None:
        _check_pair(event, accountant, relation)
        if not 0 < delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        self.event, self.delta, self.relation, self.accountant = event, delta, relation, accountant
        self._horizon = horizon
        self._known: dict[int, float] = {0: 0.0}
        self._one_step: Any = None

    def at(self, count: int) -> float:
        """ε after `count` releases, as dp-accounting computes it.

        Raises:
            ValueError: a negative count.
        """
        _check_count(count)
        if count not in self._known:
            self._known[count] = math.inf if has_no_noise(self.event) else self._remembered(count)
        return self._known[count]

    def upper_bound(self, count: int, every: int = 0) -> float:
        """An ε that is at least that of `count` releases, never falls with the count, and rarely costs a computation.

        It is the value at the next count of a fixed set: a geometric grid, the horizon, and the multiples of `every`. What has
        been computed elsewhere plays no part, or a count that happens to be known would lie below the one before it.

        Args:
            count: releases.
            every: multiples of this are computed anyway, and are exact; 0 for none.

        Raises:
            ValueError: a negative count.
        """
        _check_count(count)
        if count == 0:
            return 0.0
        point = 1
        while point < count:
            point = max(point + 1, int(point * _GRID_RATIO))
        if self._horizon is not None and count <= self._horizon:
            point = min(point, self._horizon)
        if every > 0:
            point = min(point, -(-count // every) * every)
        return self.at(point)

    def _remembered(self, count: int) -> float:
        """The value of an equal curve, where this process has computed it."""
        key = (repr(self.event), self.delta, self.relation, self.accountant, count)
        if key not in _values:
            _keep(key, self._compute(count))
        return _values[key]

    def _compute(self, count: int) -> float:
        import dp_accounting

        if isinstance(self.event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            full = count * max(two_parts(one)[0] for one in neighbouring_sizes(self.event))
            if full <= _RARE * self.delta:  # a full batch may as well give everything away
                ordinary = two_parts(self.event)[1]
                return EpsilonCurve(ordinary, self.delta - full, self.relation, self.accountant).at(count)
        sampled = isinstance(
            self.event, (dp_accounting.PoissonSampledDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent)
        )
        with quiet_accountants():
            if is_gaussian(self.event) and self.accountant == "pld":
                return gaussian_epsilon(self.event.noise_multiplier / math.sqrt(count), self.delta) * (1 + 1e-9) + 1e-9
            if self.accountant == "pld" and not sampled:
                composed = _composed(self.event, count, "pld", self.relation)
                return float(composed.get_epsilon(self._resolved(count)))
            if self._one_step is None:  # one release costs most and does not depend on the count
                of_one = _rdp_of_one if self.accountant == "rdp" else pld_of_one
                self._one_step = [of_one(event, self.relation) for event in neighbouring_sizes(self.event)]
            return max(self._repeated(one, count) for one in self._one_step)

    def _repeated(self, one: Any, count: int) -> float:
        import dp_accounting

        if self.accountant == "rdp":  # adds up
            orders, of_one = one
            return float(dp_accounting.rdp.compute_epsilon(orders, count * of_one, self.delta)[0])
        return float(one.self_compose(count).get_epsilon_for_delta(self._resolved(count)))

    def _resolved(self, count: int) -> float:
        """δ less what the rounding of `count` convolutions may have taken from it."""
        if not pld_resolves(self.event, count, self.delta):
            raise ValueError(
                f"PLD cannot resolve delta = {self.delta} after {count:,} releases, of which rounding alone may make "
                f"{_rounding(self.event, count):.1e}; choose a larger delta, or accountant='rdp'"
            )
        return self.delta - _rounding(self.event, count)


def _rounding(event: dp_accounting.DpEvent, count: int) -> float:
    """What rounding may take from the δ of PLD: the FFT of one release is raised to the power of the count.

    Against an integration under a tilt (tests/audit) δ is short by up to 8e-17 a release, and PLD then no upper bound: for
    10⁵ releases at δ = 1e-10 its ε is 0.07 too small.
    """
    return 2.0**-52 * (count * convolutions(event) + 256)


def _check_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"the number of releases must be >= 0, got {count}")


def _check_pair(event: dp_accounting.DpEvent, accountant: str, relation: str) -> None:
    """Refuse what the accountant would not bound, or would bound on another scale of the noise multiplier."""
    import dp_accounting

    if accountant not in ACCOUNTANTS:
        raise ValueError(f"unknown accountant {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}")
    if relation not in RELATIONS:
        raise ValueError(f"unknown neighbouring relation {relation!r}; choose one of {', '.join(RELATIONS)}")
    without_replacement = any(isinstance(p, dp_accounting.SampledWithoutReplacementDpEvent) for p in parts(event))
    if without_replacement and accountant == "pld":
        raise ValueError("PLD cannot account for sampling without replacement; use accountant='rdp'")
    if without_replacement != (relation == "replace_one"):
        raise ValueError(
            f"the event {event} cannot be accounted for under {relation!r}: sampling without replacement goes with "
            "'replace_one', Poisson sampling (truncated or not) and full batches with 'add_or_remove_one'"
        )
    by_parts = accountant == "rdp" and isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent)
    if not by_parts and not _accountant(accountant, relation).supports(event):
        raise ValueError(f"the accountant {accountant!r} does not support the event {event} under {relation!r}")


def _accountant(accountant: str, relation: str) -> dp_accounting.PrivacyAccountant:
    import dp_accounting

    kind = dp_accounting.pld.PLDAccountant if accountant == "pld" else dp_accounting.rdp.RdpAccountant
    return kind(neighboring_relation=dp_accounting.NeighboringRelation[relation.upper()])


def _composed(
    event: dp_accounting.DpEvent, count: int, accountant: str, relation: str
) -> dp_accounting.PrivacyAccountant:
    return _accountant(accountant, relation).compose(event, count)


def _rdp_of_one(event: dp_accounting.DpEvent, relation: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Orders and Rényi divergences of one release; infinite where rounding left nothing of a divergence.

    dp-accounting would take a divergence that came out as zero or below for an ε of zero.
    """
    import dp_accounting

    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        full, ordinary, replacing = two_parts(event)
        orders, of_ordinary = _rdp_of_one(ordinary, relation)
        return orders, divergence_of_mixture(orders, full, of_ordinary, _rdp_of_one(replacing, relation)[1])
    composed = _composed(event, 1, "rdp", relation)
    values = np.where(composed.rdp > 0, composed.rdp, np.inf)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent) and is_gaussian(event.event):
        # Both data sets draw the same numbers, so that this is a mixture too: equal batches, and with probability m / n batches
        # of which one example is replaced. The bound in dp-accounting is the better one only where m / n is small.
        replaced = composed.orders / (2 * event.event.noise_multiplier**2)
        rate = event.sample_size / event.source_dataset_size
        values = np.minimum(values, divergence_of_mixture(composed.orders, rate, np.zeros_like(values), replaced))
    return composed.orders, values


@contextlib.contextmanager
def quiet_accountants() -> Iterator[None]:
    """Hand the first warning that an order of RDP was left out to our own logger, and drop its repetitions.

    dp-accounting logs one line an order through absl; the bound becomes looser by it and never wrong. Its other warnings pass.
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
