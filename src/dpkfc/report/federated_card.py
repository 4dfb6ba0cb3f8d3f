"""Build the privacy card of a federated run.

It has the sections that `dpkfc.report.card` lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dpkfc.privacy.cross_check import cross_check
from dpkfc.privacy.events import is_gaussian
from dpkfc.report.card import (
    budget_section,
    check_total,
    describe_guarantee,
    explain_meaning,
    json_numbers,
    make_introduction,
    neighbours,
)
from dpkfc.report.officer import Declared

if TYPE_CHECKING:
    from dpkfc.federated.plan import FederatedPlan
    from dpkfc.privacy.ledger import Ledger

_FEDERATED_PUBLIC = {
    "clients": "how many are registered",
    "expected_records": (
        "of all clients together; a constant of the plan, no client's size is in a message"
    ),
    "who took part": (
        "which clients answered in which round is known to the server and taken to depend on "
        "nobody's records"
    ),
    "max_grad_norm, rounds, delta": "settings",
}


class Round(Protocol):
    """What a card reads of one round."""

    @property
    def dropped(self) -> bool: ...  # noqa: D102


class FederatedRun(Protocol):
    """What a card reads of the server of a run."""

    @property
    def plan(self) -> FederatedPlan: ...  # noqa: D102
    @property
    def ledger(self) -> Ledger: ...  # noqa: D102
    @property
    def epsilon(self) -> float: ...  # noqa: D102
    @property
    def rejected(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def unprotected_figures(self) -> Mapping[str, str]: ...  # noqa: D102


def build_federated_card(
    server: FederatedRun,
    records: Sequence[Round],
    *,
    title: str,
    chosen_by: str,
    results: Mapping[str, Any] | None = None,
    not_private: Mapping[str, str] | None = None,
    declared: Declared | None = None,
    total: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the card of a federated run, which also names the parties that ε protects from.

    Args:
        server: of the run.
        records: of its rounds.
        title: of the model.
        chosen_by: how hyper-parameters were chosen.
        results: figures of the model, with what they were computed on.
        not_private: figure to the reason why ε does not protect it.
        declared: what only the owner knows.
        total: "epsilon", "delta" and "runs" of several runs on the same data.

    Returns:
        The card, with the sections that this module lists.

    Raises:
        ValueError: the total is below the ε of this run alone.
    """
    plan, privacy = server.plan, server.plan.config.privacy
    releases = server.ledger.count
    check_total(total, [(plan.event, releases)])
    checked: Mapping[str, float | None] = {"pld": 0.0, "rdp": 0.0}
    if releases:
        checked = cross_check(plan.event, releases, plan.delta)
    promise = {
        "privacy_model": privacy.name,
        "against": plan.config.adversaries,
        "unit": f"one {privacy.unit}",
        "neighbours_differ_in": neighbours(plan.config.adjacency, privacy.unit),
        "epsilon_for_others": json_numbers(plan.views()),
        "releases": releases,
        "planned_releases": plan.releases,
        "epsilon_by": json_numbers(checked),
    }
    start = str(server.ledger.header.get("created", ""))
    # A client is sampled with all its records, so these take part independently only where all do.
    meaning = explain_meaning(
        plan,
        plan.event,
        releases,
        server.epsilon,
        relation="add_or_remove_one",
        independent=is_gaussian(plan.event),
    )
    return {
        **make_introduction(title, declared or Declared(), start, total),
        "caveats": list(plan.caveats),
        "guarantee": describe_guarantee(plan, server.epsilon) | promise,
        "meaning": meaning,
        "mechanism": plan.describe() | {"secure_aggregation": _secure_aggregation(plan)},
        "rounds": {
            "sent": releases // plan.per_round,
            "dropped": sum(record.dropped for record in records),
            "rejected_messages": dict(server.rejected),
        },
        "assumed_public": _FEDERATED_PUBLIC,
        "chosen_by": chosen_by,
        "results": dict(results or {}),
        "not_private": {**server.unprotected_figures, **(not_private or {})},
        "ledger": {"count": releases, "head": server.ledger.head},
        **budget_section(server.ledger.receipt),
        "plan_hash": plan.hash,
        "plan": plan.describe_mechanism(),
    }


def _secure_aggregation(plan: FederatedPlan) -> str | None:
    """Return what the masks hide and what they do not, None for messages in the clear."""
    if not plan.config.privacy.masked:
        return None
    needed, colluding = plan.config.survivors, plan.config.known_shares
    return (
        f"pair masks by X25519, secrets shared with threshold {needed}. A server that follows the "
        f"protocol learns only the sum of the other clients' messages, also with up to "
        f"{needed - 1} colluding clients. epsilon is computed for {colluding} colluding. Public "
        "keys are not authenticated: a server that replaces them can open single messages, at the "
        "epsilon for a server that sees every message"
    )
