"""The privacy card of a federated run: what is promised against whom, by which mechanism, and what is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.server import Server
from dpkfc.privacy import events

__all__ = ["build_card", "to_markdown"]

FORMAT = 1
_NEIGHBOURS = {"add_or_remove_one": "one {} added or removed", "replace_one": "one {} replaced by another"}


def build_card(
    server: Server,
    records: Sequence[RoundRecord],
    *,
    title: str,
    chosen_by: str,
    results: Mapping[str, Any] | None = None,
    not_private: Mapping[str, str] | None = None,
    weights: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The card as plain values that JSON can hold.

    Args:
        server: of the run.
        records: of its rounds.
        title: of the model.
        chosen_by: how hyper-parameters were chosen.
        results: figures of the model, with what they were computed on.
        not_private: figure to the reason why ε does not protect it.
        weights: "file" and "sha256" of the final weights, where they lie in a file beside the card.
    """
    plan, config = server.plan, server.plan.config
    releases = server.ledger.count
    beside = events.cross_check(plan.event, releases, plan.delta) if releases else {"pld": 0.0, "rdp": 0.0}
    return {
        "format": FORMAT,
        "title": title,
        "caveats": list(plan.caveats),
        "guarantee": {
            "certified": plan.certified,
            "epsilon": _number(server.epsilon),
            "delta": plan.delta,
            "target_epsilon": plan.target_epsilon,
            "privacy_model": config.privacy.name,
            "against": config.against,
            "unit": f"one {config.privacy.unit}",
            "neighbours_differ_in": _NEIGHBOURS[config.adjacency].format(config.privacy.unit),
            "epsilon_for_others": {who: _number(e) for who, e in plan.views().items()},
            "releases": releases,
            "planned_releases": plan.releases,
            "epsilon_by": {name: None if e is None else _number(e) for name, e in beside.items()},
        },
        "mechanism": plan.describe() | {"secure_aggregation": _secure_aggregation(plan)},
        "rounds": {
            "sent": releases // plan.per_round,
            "dropped": sum(record.dropped for record in records),
            "rejected_messages": dict(server.rejected),
        },
        "assumed_public": _PUBLIC,
        "chosen_by": chosen_by,
        "results": dict(results or {}),
        "not_private": dict(not_private or {}),
        "ledger": {"count": releases, "head": server.ledger.head},
        **({"weights": dict(weights)} if weights else {}),
        "plan_hash": plan.hash,
    }


_PUBLIC = {
    "clients": "how many are registered",
    "expected_records": "of all clients together; a constant of the plan, no client's size is in a message",
    "who took part": "which clients answered in which round is known to the server and taken to depend on nobody's records",
    "max_grad_norm, rounds, delta": "settings",
}


def _secure_aggregation(plan: FederatedPlan) -> str | None:
    """State what the masks hide, from how many parties, and what they do not; None where messages are in clear."""
    if not plan.config.privacy.masked:
        return None
    needed, colluding = plan.config.survivors, plan.config.known_shares
    return (
        f"pair masks by X25519, secrets shared with threshold {needed}. A server that follows the protocol learns only the sum "
        f"of the other clients' messages, also with up to {needed - 1} colluding clients. epsilon is computed for {colluding} "
        "colluding. Public keys are not authenticated: a server that replaces them can open single messages, at the epsilon "
        "for a server that sees every message"
    )


def to_markdown(card: Mapping[str, Any]) -> str:
    """The card for people."""
    promise, mechanism = card["guarantee"], card["mechanism"]
    parts = [f"# Privacy card: {card['title']}", _statement(card)]
    others = [(f"ε for {who}", _epsilon(e)) for who, e in promise["epsilon_for_others"].items()]
    by = ", ".join(f"{name.upper()}: {_epsilon(value)}" for name, value in promise["epsilon_by"].items())
    parts.append(
        _table("Guarantee", [
            ("ε spent", _epsilon(promise["epsilon"])),
            ("ε of the budget", _show(promise["target_epsilon"])),
            ("δ", f"{promise['delta']:g}"),
            ("privacy model", promise["privacy_model"]),
            ("protects from", promise["against"]),
            ("privacy unit", promise["unit"]),
            ("neighbours differ in", promise["neighbours_differ_in"]),
            *others,
            ("releases", f"{promise['releases']:,} of {promise['planned_releases']:,} planned"),
            ("ε by each accountant", by),
            ("certified", "yes" if promise["certified"] else "NO"),
        ])
    )  # fmt: skip
    parts.append(_table("Mechanism", _mechanism(mechanism)))
    rounds = card["rounds"]
    parts.append(_table("Rounds", [(name.replace("_", " "), _show(value)) for name, value in rounds.items()]))
    parts.append(_table("Taken as public", list(card["assumed_public"].items())))
    parts.append(_table("Hyper-parameters", [("chosen by", card["chosen_by"])]))
    parts.append(_table("Results", [(name, _show(value)) for name, value in card["results"].items()]))
    parts.append(_table("Figures that ε does NOT protect", list(card["not_private"].items())))
    head = [("plan", f"`{card['plan_hash']}`"), ("ledger, count", str(card["ledger"]["count"]))]
    head.append(("ledger, head", f"`{card['ledger']['head']}`"))
    head += [(f"weights, {name}", f"`{value}`") for name, value in card.get("weights", {}).items()]
    parts.append(_table("Provenance", head))
    return "\n\n".join(part for part in parts if part) + "\n"


def _statement(card: Mapping[str, Any]) -> str:
    promise = card["guarantee"]
    if card["caveats"]:
        reasons = "\n".join(f"> - {caveat}" for caveat in card["caveats"])
        return f"> **NOT PRIVATE**\n>\n> There is no certified guarantee for this model:\n>\n{reasons}"
    spent = f"(ε = {_epsilon(promise['epsilon'])}, δ = {promise['delta']:g})"
    return (
        f"The released weights are **{spent}-differentially private** for {promise['unit']}: neighbouring data differ in "
        f"{promise['neighbours_differ_in']}. Protected from {promise['against']}."
    )


def _mechanism(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = (
        "clients", "rounds", "local", "rule", "max_grad_norm", "sensitivity", "noise_multiplier", "stddev", "share_of_a_client",
        "noise", "min_survivors", "colluding", "example_rate", "client_rate", "secure_aggregation", "divisor",
        "preconditioner", "metric", "readout", "postprocess",
    )  # fmt: skip
    return [(name.replace("_", " "), _show(held[name])) for name in shown if held.get(name) not in (None, [], {})]


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", "|  |  |", "| --- | --- |"]
    return "\n".join(lines + [f"| {name} | {str(text).replace('|', chr(92) + '|')} |" for name, text in rows])


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _epsilon(value: float | str | None) -> str:
    """Four decimals, rounded up: a printed ε is never below the true one."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if isinstance(value, (int, float)) else _show(value)


def _show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "; ".join(_show(item) for item in value)
    return str(value)
