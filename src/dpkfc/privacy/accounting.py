"""ε of many releases, by dp-accounting: PLD (tight) and RDP (to check PLD).

An event describes one release, and a run composes it with itself. Every returned ε is an upper
bound. Searches and what a run shows take `quick_epsilon`, from our own distribution of the loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpkfc._checks import LARGEST_INTEGER, show_value
from dpkfc.privacy.dp_accountants import (
    check_pair,
    epsilon_by_pld,
    epsilon_by_rdp,
    pld_resolves,
    remember,
)
from dpkfc.privacy.events import (
    compose,
    event_from_dict,
    has_no_noise,
    is_gaussian,
    merge,
    neighbouring_sizes,
    relation_of,
)
from dpkfc.privacy.quick_epsilon import epsilon_of_gaussians, quick_epsilon, simplify

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from dpkfc.privacy.events import Charges

_GRID_RATIO = 1.2  # of the step counts of upper_bound
_values: dict[tuple[Any, ...], float] = {}


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

    parts = merge(charges)
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
        name = accountant or suitable_accountant(event, count, delta, relation)
        return epsilon(event, count, delta, name, relation)
    # Truncated batches have two kinds of neighbours: of one record less, and of one more.
    return max(_epsilon_of_parts(parts, kind, delta, accountant, relation) for kind in (0, -1))


def suitable_accountant(event: DpEvent, count: int, delta: float, relation: str) -> str:
    """Return "pld" where PLD treats the event and resolves δ, else "rdp"."""
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
    accountant = accountant or suitable_accountant(event, 1, delta, relation)
    if accountant == "pld":
        return epsilon(event, 1, delta, "pld", relation)
    for part, _ in neighbours:
        check_pair(part, "rdp", relation)
    return epsilon_by_rdp(neighbours, delta, relation)


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
        check_pair(event, accountant, relation)
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
            raise ValueError(f"the number of releases must be >= 0, got {show_value(count)}")
        if count > LARGEST_INTEGER:
            raise ValueError(f"the number of releases must be below 2**63, got {show_value(count)}")
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
        return remember(_values, key, lambda: self._compute(count))

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
        ((event, count),), delta = simplify([(self.event, count)], self.delta)
        if event is not self.event:
            return epsilon(event, count, delta, self.accountant, self.relation)
        neighbours = neighbouring_sizes(event)
        if self.accountant == "rdp":
            return max(epsilon_by_rdp([(e, count)], delta, self.relation) for e in neighbours)
        if is_gaussian(event):
            return epsilon_of_gaussians(event.noise_multiplier, count, delta)
        return max(epsilon_by_pld(e, count, delta, self.relation) for e in neighbours)
