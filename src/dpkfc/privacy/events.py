"""The privacy loss of composed events, by dp-accounting: PLD (tight) and RDP (a guard beside it).

An event describes one release; a run composes it with itself. Every ε returned is an upper bound.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import dp_accounting
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution

__all__ = [
    "ACCOUNTANTS",
    "EpsilonCurve",
    "cross_check",
    "delta_of_epsilon",
    "epsilon",
    "event_from_dict",
    "event_to_dict",
]

logger = logging.getLogger(__name__)

ACCOUNTANTS = ("pld", "rdp")
PLD_RDP_TOLERANCE = 1e-3
_RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_GRID_RATIO = 1.2  # of the step counts at which upper_bound evaluates the accountant
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
    _check_pair(event, accountant, neighbouring_relation)
    _check_count(count)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    if count == 0:
        return 0.0
    if _has_no_noise(event):
        return 1.0
    with _quiet_accountants():
        return float(_composed(event, count, accountant, neighbouring_relation).get_delta(epsilon))


def cross_check(
    event: dp_accounting.DpEvent, count: int, delta: float, neighbouring_relation: str = "add_or_remove_one"
) -> dict[str, float | None]:
    """ε by PLD and by RDP, for the card.

    Returns:
        `{"pld": ε or None where PLD cannot treat the event, "rdp": ε}`.

    Raises:
        ValueError: neither accountant treats the event under this relation, or PLD exceeds RDP by more than 1e-3: both
            bound the same loss and RDP is the looser one, so one of them went wrong.
    """
    by_rdp = epsilon(event, count, delta, "rdp", neighbouring_relation)
    if neighbouring_relation == "replace_one":
        return {"pld": None, "rdp": by_rdp}
    by_pld = epsilon(event, count, delta, "pld", neighbouring_relation)
    if by_pld > by_rdp + PLD_RDP_TOLERANCE:
        raise ValueError(
            f"the accountants disagree on {count} x {event}: PLD gives epsilon {by_pld}, above the {by_rdp} of RDP, "
            "which is a looser bound of the same loss; report neither before the cause is found"
        )
    return {"pld": by_pld, "rdp": by_rdp}


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
            self._known[count] = math.inf if _has_no_noise(self.event) else self._compute(count)
        return self._known[count]

    def upper_bound(self, count: int) -> float:
        """An ε that is at least that of `count` releases and rarely costs a computation.

        It is the value at the next count that is known or lies on a geometric grid: ε never falls with the count.

        Raises:
            ValueError: a negative count.
        """
        _check_count(count)
        point = 1
        while point < count:
            point = max(point + 1, int(point * _GRID_RATIO))
        if count == 0:
            return 0.0
        if self._horizon is not None and count <= self._horizon:
            point = min(point, self._horizon)
        return self.at(min((n for n in self._known if count <= n <= point), default=point))

    def _compute(self, count: int) -> float:
        with _quiet_accountants():
            if self.accountant == "rdp":
                return self._by_rdp(count)
            if isinstance(self.event, dp_accounting.PoissonSampledDpEvent):
                return self._by_one_step(count)
            return float(_composed(self.event, count, "pld", self.relation).get_epsilon(self.delta))

    def _by_rdp(self, count: int) -> float:
        """RDP adds up: only the curve of one release is kept."""
        if self._one_step is None:
            self._one_step = _composed(self.event, 1, "rdp", self.relation)
        value, _ = rdp.compute_epsilon(self._one_step.orders, count * self._one_step.rdp, self.delta)
        return float(value)

    def _by_one_step(self, count: int) -> float:
        """The distribution of one release costs most and does not depend on the count."""
        if self._one_step is None:
            self._one_step = privacy_loss_distribution.from_gaussian_mechanism(
                standard_deviation=self.event.event.noise_multiplier,
                sampling_prob=self.event.sampling_probability,
                neighboring_relation=_RELATIONS[self.relation],
            )
        return float(self._one_step.self_compose(count).get_epsilon_for_delta(self.delta))


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """The event as plain values that JSON keeps exactly: its class under "type", then its fields."""
    return {"type": type(event).__name__} | {name: _plain(getattr(event, name)) for name in _fields(event)}


def event_from_dict(data: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """The event that `event_to_dict` described.

    Raises:
        ValueError: an unknown class of event, or fields that do not fit it.
    """
    kind = getattr(dp_accounting, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(f"unknown privacy event {data.get('type')!r}; expected the name of a dp_accounting event")
    fields = {name: _rich(value) for name, value in data.items() if name != "type"}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"the fields {sorted(fields)} do not fit the event {data['type']}: {error}") from error


def _fields(event: dp_accounting.DpEvent) -> list[str]:
    """Names of the fields; events are attrs classes, which list them there."""
    return [field.name for field in type(event).__attrs_attrs__]


def _plain(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return event_to_dict(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _rich(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    return [_rich(v) for v in value] if isinstance(value, list) else value


def _parts(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    yield event
    for name in _fields(event):
        value = getattr(event, name)
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, dp_accounting.DpEvent):
                yield from _parts(inner)


def _has_no_noise(event: dp_accounting.DpEvent) -> bool:
    """Whether a part of the event releases something without noise: then ε is infinite."""
    return any(
        isinstance(part, dp_accounting.NonPrivateDpEvent)
        or (isinstance(part, dp_accounting.GaussianDpEvent) and part.noise_multiplier == 0)
        for part in _parts(event)
    )


def _check_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"the number of releases must be >= 0, got {count}")


def _check_pair(event: dp_accounting.DpEvent, accountant: str, relation: str) -> None:
    """Refuse what the accountant would not bound, or would bound on another scale of the noise multiplier."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"unknown accountant {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}")
    if relation not in _RELATIONS:
        raise ValueError(f"unknown neighbouring relation {relation!r}; choose one of {', '.join(_RELATIONS)}")
    without_replacement = any(isinstance(p, dp_accounting.SampledWithoutReplacementDpEvent) for p in _parts(event))
    if without_replacement and accountant == "pld":
        raise ValueError("PLD cannot account for sampling without replacement; use accountant='rdp'")
    if without_replacement != (relation == "replace_one"):
        raise ValueError(
            f"the event {event} cannot be accounted for under {relation!r}: sampling without replacement goes with "
            "'replace_one', Poisson sampling and full batches with 'add_or_remove_one'"
        )
    if not _accountant(accountant, relation).supports(event):
        raise ValueError(f"the accountant {accountant!r} does not support the event {event} under {relation!r}")


def _accountant(accountant: str, relation: str) -> dp_accounting.PrivacyAccountant:
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    return kind(neighboring_relation=_RELATIONS[relation])


def _composed(
    event: dp_accounting.DpEvent, count: int, accountant: str, relation: str
) -> dp_accounting.PrivacyAccountant:
    return _accountant(accountant, relation).compose(event, count)


@contextlib.contextmanager
def _quiet_accountants() -> Iterator[None]:
    """Hand the first warning of each kind that dp-accounting logs through absl to our own logger; drop repetitions.

    They say that an order of RDP was left out, which makes the bound looser and never wrong.
    """

    def forward_once(record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if message not in _forwarded:
            _forwarded.add(message)
            logger.log(record.levelno, "dp-accounting (said once): %s", record.getMessage())
        return False

    absl = logging.getLogger("absl")
    absl.addFilter(forward_once)
    try:
        yield
    finally:
        absl.removeFilter(forward_once)
