"""The privacy card: what is promised for a model, by which mechanism, on which assumptions, and what is not covered."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dpkfc.checkpoint import file_digest
from dpkfc.config import Plan
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.server import RoundRecord, Server
from dpkfc.privacy import accounting
from dpkfc.privacy import accounting as events
from dpkfc.privacy.ledger import Ledger
from dpkfc.report.numbers import number, plain, rounded_up

# --------------------------------------------------------------------------------------------------
# What `dpkfc audit` left in a card: one row a check, what failed, and what the checks were about.

_ABOUT = (
    "The rows of ledger, card and membership are about this run. All others are about its settings with the code of that day, "
    "not about the training that made these weights: one step at fresh initial weights, and for canaries in one run a "
    "training of their own. Two worlds bounds one release, without sampling."
)
_PARTS = ("ledger", "card", "step", "one_run", "membership")


def audit_rows(audit: Any) -> list[tuple[str, str, str, str, str]]:
    """Check, measured, allowed, verdict and how, of every check in the section of a card; nothing in it is trusted."""
    rows = []
    for part in ("ledger", "card"):
        if part in _mapping(audit):
            rows.append(_row(_mapping(audit[part])))
    findings = _mapping(_mapping(audit).get("step")).get("findings")
    rows += [_row(_mapping(finding)) for finding in (findings if isinstance(findings, list) else [])]
    for name in ("one_run", "membership"):
        found = _mapping(_mapping(audit).get(name))
        if found:
            lower, claimed = number(found.get("epsilon_lower")), number(found.get("claimed_epsilon"))
            least = _text(found.get("epsilon_lower")) if lower is None else f"{lower:.3g}"
            most = _text(found.get("claimed_epsilon")) if claimed is None else rounded_up(claimed, 4)
            rows.append((name.replace("_", " "), f"ε ≥ {least}", f"ε ≤ {most}", _held(found), _text(found.get("detail"))))
    return rows


def failed_checks(audit: Any) -> list[str]:
    """The checks that failed."""
    return [row[0] for row in audit_rows(audit) if row[3] != "held"]


def audited(audit: Any) -> str:
    """When it was, and what it was about."""
    parts = [_mapping(_mapping(audit).get(name)) for name in _PARTS]
    dates = sorted({part["date"] for part in parts if isinstance(part.get("date"), str)})
    return f"Audited {', '.join(dates) or 'at an unknown time'}. {_ABOUT}"


def _row(finding: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    check, measured, bound, detail = (_text(finding.get(key)) for key in ("check", "measured", "bound", "detail"))
    return check, measured, bound, _held(finding), detail


def _held(found: Mapping[str, Any]) -> str:
    return "held" if found.get("passed") is True else "FAILED"


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _text(value: Any) -> str:
    return "–" if value is None or value == "" else plain(value)


# --------------------------------------------------------------------------------------------------

FORMAT = 1
_RELATIONS = {"add_or_remove_one": "one {} added or removed", "replace_one": "one {} replaced by another"}
_PACKAGES = ("dpkfc", "torch", "dp-accounting", "numpy", "scipy")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says beside the plan.

    Attributes:
        title: of the model or run.
        releases: noisy sums that were released.
        ledger: "file", "head" and "releases" of the ledger.
        assumed_public: setting to (value, why it is public).
        chosen_by: how hyper-parameters were chosen.
        not_private: figure to the reason why ε does not protect it.
        results: figures of the model, with what they were computed on.
        seeds: public seeds.
        refreshes: step, digest and scale of every preconditioner that was used.
        settings: hyper-parameters of training that the plan does not hold.
        device: where the noise was drawn.
        limited: whether the plan's steps end the run; an engine may go on for as long as its script does.
        weights: "file" and "sha256" of the weights, where they lie in a file.
    """

    title: str
    releases: int
    ledger: Mapping[str, Any]
    assumed_public: Mapping[str, tuple[Any, str]]
    chosen_by: str
    not_private: Mapping[str, str]
    device: str
    results: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    refreshes: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    limited: bool = True
    weights: Mapping[str, str] = field(default_factory=dict)


def stamp(plan: Plan) -> str:
    """What is written across the card and the plots of a run without a certified guarantee; empty where it has one."""
    if plan.certified:
        return ""
    if plan.test_mode:
        return "NOT PRIVATE: test mode"
    return "NOT PRIVATE" if any(text.startswith("NOT PRIVATE") for text in plan.caveats) else "UNCERTIFIED"


def build_card(plan: Plan, facts: CardFacts) -> dict[str, Any]:
    """The card as plain values that JSON can hold.

    Args:
        plan: of the run.
        facts: everything else.

    Raises:
        ValueError: another number of releases than in the ledger, or more than the plan allows.
    """
    _check_releases(plan, facts)
    described = plan.describe()
    spent = plan.epsilon(facts.releases)
    return {
        "format": FORMAT,
        "title": facts.title,
        "stamp": stamp(plan) or None,
        "caveats": list(plan.caveats),
        "guarantee": {
            "certified": plan.certified,
            "epsilon": _number(spent),
            "delta": plan.delta,
            "target_epsilon": plan.target_epsilon,
            "unit": described["privacy_unit"],
            "neighbouring_relation": plan.neighbouring_relation,
            "neighbours_differ_in": _RELATIONS[plan.neighbouring_relation].format(plan.config.unit),
            "releases": facts.releases,
            "planned_steps": plan.steps if facts.limited else None,
        },
        "mechanism": {
            "sampler": described["sampler"],
            "clipping": plan.clipping,
            "max_grad_norm": plan.max_grad_norm,
            "sensitivity": plan.sensitivity,
            "noise_multiplier": plan.noise_multiplier,
            "stddev": plan.stddev,
            "divisor": plan.expected_batch_size,
            "event": described["event"],
            "noise": _NOISE[plan.noise],
            "noise_generator": _generator(plan, facts.device),
            **{name: described[name] for name in _AROUND if described.get(name) not in (None, [], 1, "whitened")},
        },
        "accounting": _accounting(plan, facts.releases),
        "curvature": _curvature(described["preconditioner"], facts.refreshes),
        "assumed_public": {name: {"value": value, "why": why} for name, (value, why) in facts.assumed_public.items()},
        "hyper_parameters": {"chosen_by": facts.chosen_by, **facts.settings},
        "not_private": dict(facts.not_private),
        "results": dict(facts.results),
        "public_seeds": dict(facts.seeds),
        "ledger": dict(facts.ledger),
        **({"weights": dict(facts.weights)} if facts.weights else {}),
        "plan_hash": plan.hash,
        "software": software(),
    }


def _check_releases(plan: Plan, facts: CardFacts) -> None:
    """ε is that of all releases in the ledger, not of those that somebody counted."""
    held = facts.ledger.get("releases")
    if held != facts.releases:
        raise ValueError(
            f"the card is to say {facts.releases} releases, and its ledger holds {held}; give both from the ledger: "
            "releases=ledger.count, ledger={'file': …, 'releases': ledger.count, 'head': ledger.head}"
        )
    if facts.limited and facts.releases > plan.steps:
        raise ValueError(
            f"{facts.releases} releases are more than the plan's {plan.steps}: this is the plan of another run, or that of an "
            "engine without a limit, whose card wants limited=False"
        )


def dataset_size(plan: Plan) -> dict[str, tuple[int, str]]:
    """What a card says of N among what is taken as public: of examples, or of the units that are protected."""
    unit = plan.config.unit if plan.config.max_records_per_unit is not None else ""
    name = f"number of units N (each one {unit}, with all records)" if unit else "number of examples N"
    return {name: (int(plan.dataset_size), "sampling rate and divisor follow from it")}


# What may stand before the clip and behind the noise, and how the card calls it; shown where a run departs from the defaults.
_AROUND = {
    "augmentations": "views of an example, averaged before the clip",
    "readout": "read-out",
    "postprocess": "between release and optimizer",
    "weight_average": "average of the weights, which is what is delivered",
}


# How noise meets the sum in a computer.
_NOISE = {
    "gaussian": "Gaussian in floating-point numbers, whose rounding is not accounted for",
    "rounded": "Gaussian, sum and noise rounded to one grid, which the sensitivity accounts for",
}


def _generator(plan: Plan, device: str) -> str:
    if plan.test_mode:
        return "repeatable: NOT PRIVATE"
    ciphers = "AES-256 in counter mode, ChaCha20 for large draws" if device.startswith("cuda") else "AES-256 in counter mode"
    return f"{ciphers}, with a fresh key of the operating system for each release"


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _accounting(plan: Plan, releases: int) -> dict[str, Any]:
    if releases == plan.steps:
        checked = plan.cross_check()
    else:
        checked = events.cross_check(plan.event, releases, plan.delta, plan.neighbouring_relation)
    beside = {name: None if value is None else _number(value) for name, value in checked.items()}
    return {"accountant": plan.accountant, "library": "dp-accounting", "epsilon_by": beside}


def _curvature(described: Mapping[str, Any] | None, refreshes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if described is None:
        return None
    return {**described, "refreshes": [dict(refresh) for refresh in refreshes]}


def software() -> dict[str, str]:
    """Versions of what computed the model."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions


def to_markdown(card: Mapping[str, Any]) -> str:
    """The card for people."""
    parts = [f"# Privacy card: {card['title']}", _statement(card)]
    parts += [_table("Guarantee", _guarantee_rows(card)), _table("Mechanism", _mechanism_rows(card["mechanism"]))]
    parts.append(_curvature_text(card["curvature"]))
    public = [(name, _show(entry["value"]), entry["why"]) for name, entry in card["assumed_public"].items()]
    parts.append(_table("Taken as public", public, ("setting", "value", "why")))
    chosen = [(name.replace("_", " "), _show(value)) for name, value in card["hyper_parameters"].items()]
    parts.append(_table("Hyper-parameters", chosen))
    parts.append(_table("Results", [(name, _show(value)) for name, value in card["results"].items()]))
    parts.append(_audit_text(card.get("audit")))
    hidden = list(card["not_private"].items())
    parts.append(_table("Figures that ε does NOT protect", hidden, ("figure", "why")))
    rest = [("plan", f"`{card['plan_hash']}`")]
    rest += [(f"ledger, {name}", f"`{value}`") for name, value in card["ledger"].items()]
    rest += [(f"weights, {name}", f"`{value}`") for name, value in card.get("weights", {}).items()]
    rest += [(f"public seed, {name}", str(value)) for name, value in card["public_seeds"].items()]
    rest += [(name, version) for name, version in card["software"].items()]
    parts.append(_table("Provenance", rest))
    return "\n\n".join(part for part in parts if part) + "\n"


def _audit_text(audit: Mapping[str, Any] | None) -> str:
    """What `dpkfc audit` found; empty where none was made."""
    if not audit:
        return ""
    rows = [row[:3] + row[4:] for row in audit_rows(audit)]
    failed = failed_checks(audit)
    held = "Every check held. An audit that holds proves nothing; one that fails disproves."
    said = f"**FAILED: {', '.join(failed)}.**" if failed else held
    title, table = _table("Audit", rows, ("check", "measured", "allowed", "how")).split("\n", 1)
    return f"{title}\n\n{audited(audit)}\n{table}\n\n{said}"


def _statement(card: Mapping[str, Any]) -> str:
    promise = card["guarantee"]
    if failed := failed_checks(card.get("audit")):
        return (
            f"> **AUDIT FAILED: {', '.join(failed)}**\n>\n> What this card states was disproved, or is not what lies beside it: "
            "do not rely on any of it. See the section Audit."
        )
    if card["stamp"]:
        reasons = "\n".join(f"> - {caveat}" for caveat in card["caveats"])
        return f"> **{card['stamp']}**\n>\n> There is no certified guarantee for this model:\n>\n{reasons}"
    spent = f"(ε = {_epsilon(promise['epsilon'])}, δ = {promise['delta']:g})"
    return (
        f"The released weights are **{spent}-differentially private** for {promise['unit']}: "
        f"neighbouring data sets differ in {promise['neighbours_differ_in']}."
    )


def _guarantee_rows(card: Mapping[str, Any]) -> list[tuple[str, ...]]:
    promise, accounting = card["guarantee"], card["accounting"]
    by = ", ".join(f"{name.upper()}: {_epsilon(value)}" for name, value in accounting["epsilon_by"].items())
    return [
        ("ε spent", _epsilon(promise["epsilon"])),
        ("ε of the budget", _show(promise["target_epsilon"])),
        ("δ", f"{promise['delta']:g}"),
        ("privacy unit", promise["unit"]),
        ("neighbouring relation", f"{promise['neighbouring_relation']} ({promise['neighbours_differ_in']})"),
        ("releases", _releases(promise)),
        ("accountant", f"{accounting['accountant'].upper()} of {accounting['library']}"),
        ("ε by each accountant", by),
        ("certified", "yes" if promise["certified"] else "NO"),
    ]


def _releases(promise: Mapping[str, Any]) -> str:
    planned = promise["planned_steps"]
    return f"{promise['releases']:,}" + (", without a limit" if planned is None else f" of {planned:,} planned")


def _mechanism_rows(mechanism: Mapping[str, Any]) -> list[tuple[str, ...]]:
    sampler = {**mechanism["sampler"]}
    how = sampler.pop("name", "")
    hidden = ("neighbouring_relation", "certified", "dataset_size")
    rest = [f"{name.replace('_', ' ')} {_show(value)}" for name, value in sampler.items() if name not in hidden]
    return [
        ("sampler", ", ".join([how, *rest])),
        ("clipping", f"{mechanism['clipping']}, C = {_show(mechanism['max_grad_norm'])}"),
        ("noise multiplier σ", _show(mechanism["noise_multiplier"])),
        ("sensitivity of the sum", _show(mechanism["sensitivity"])),
        ("standard deviation on the sum", _show(mechanism["stddev"])),
        ("divisor (expected batch size)", _show(mechanism["divisor"])),
        ("noise", mechanism["noise"]),
        ("noise generator", mechanism["noise_generator"]),
        *((text, _described(mechanism[name])) for name, text in _AROUND.items() if name in mechanism),
    ]


def _described(value: Any) -> str:
    """A setting, the description of a step, or several of them."""
    if isinstance(value, list):
        return "; ".join(map(_described, value))
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {_show(item)}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')} ({rest})" if value.get("name") else rest
    return _show(value)


def _curvature_text(curvature: Mapping[str, Any] | None) -> str:
    if curvature is None:
        return "## Curvature\n\nNo preconditioner was used."
    sources = {"comes from": curvature["probe"], "output factors come from": curvature.get("output_probe")}
    rows = [(what, ", ".join(f"{name} {_show(v)}" for name, v in probe.items())) for what, probe in sources.items() if probe]
    rows.append(("uses private data", "yes: NOT PRIVATE" if curvature.get("uses_private_data") else "no"))
    skipped = {"probe", "output_probe", "refreshes", "uses_private_data", "curvature_source"}
    rows += [(name.replace("_", " "), _show(value)) for name, value in curvature.items() if name not in skipped]
    refreshes = curvature["refreshes"]
    rows.append(("refreshes", f"{len(refreshes)}, before steps {', '.join(str(r['step']) for r in refreshes[:12])}"))
    if len(refreshes) > 12:
        rows[-1] = ("refreshes", f"{rows[-1][1]}, … {refreshes[-1]['step']}")
    if refreshes:
        rows.append(("digest of the last", f"`{refreshes[-1].get('digest', 'not known')}`"))
        rows += [("note", note) for note in dict.fromkeys(r["note"] for r in refreshes if r.get("note"))]
    return _table("Curvature", rows)


def _table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ("", "")) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines)


def _epsilon(value: float | str | None) -> str:
    """Four decimals, rounded up: a printed ε is never below the true one."""
    return rounded_up(value, 4) if isinstance(value, (int, float)) else _show(value)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(item) for item in value)
    return str(value)


# --------------------------------------------------------------------------------------------------
# The privacy card of a run of one's own: what a `Session` or a `PrivacyEngine` knows is taken from
# it, not written by hand.


def session_card(
    session: Any,
    *,
    title: str,
    chosen_by: str,
    not_private: Mapping[str, str],
    results: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The card of a training, as plain values; `report.card.to_markdown` shows it to people.

    Releases, the head of the ledger, the device of the noise, the refreshes of the preconditioner and the number of units are
    those of the session; it may be closed.

    Args:
        session: a `Session`, or a `PrivacyEngine` that has made a model private.
        title: of the model.
        chosen_by: how hyper-parameters were chosen; ε does not cover it.
        not_private: figure to the reason why ε does not protect it: whatever you publish beside the weights.
        results: figures of the model, with what they were computed on.
        settings: hyper-parameters that the plan does not hold, such as the learning rate.
        weights: the file that is delivered; its digest goes into the card, and `dpkfc ledger verify` compares it.

    Raises:
        RuntimeError: an engine that has made nothing private.
        OSError: the weights cannot be read.
    """
    trained = getattr(session, "_private", session)  # an engine keeps what it trains there
    plan, ledger = trained.plan, trained.ledger
    file = None if weights is None else Path(weights)
    facts = CardFacts(
        title=title,
        releases=ledger.count,
        ledger={"file": _name_of(ledger), "releases": ledger.count, "head": ledger.head},
        assumed_public=dataset_size(plan),
        chosen_by=chosen_by,
        not_private=not_private,
        device=str(next(p.device for p in trained.model.parameters() if p.requires_grad)),
        results=results or {},
        refreshes=_refreshes(trained),
        settings={"gradients": trained.gradients, **(settings or {})},
        limited=ledger.max_releases is not None,
        weights={} if file is None else {"file": file.name, "sha256": file_digest(file)},
    )
    return build_card(plan, facts)


def _name_of(ledger: Ledger) -> str:
    return "in memory, gone with the process" if ledger.path is None else ledger.path.name


def _refreshes(trained: Any) -> list[dict[str, Any]]:
    """Steps before which the preconditioner was rebuilt, with the digest of the one in force."""
    current, steps = trained.preconditioner, list(trained._pipeline.preconditioning.refreshed)
    if current is None:
        return []
    if current.step not in steps:  # it came with a checkpoint
        steps.insert(0, current.step)
    rows: list[dict[str, Any]] = [{"step": step} for step in steps]
    rows[steps.index(current.step)] |= {"digest": current.digest, "scale": current.scale}
    if steps[0] > 0:
        rows[0]["note"] = f"refreshes before step {steps[0]} came before the checkpoint that was restored and are not listed"
    return rows


# --------------------------------------------------------------------------------------------------
# The privacy card of a federated run: what is promised against whom, by which mechanism, and what
# is not.

_NEIGHBOURS = {"add_or_remove_one": "one {} added or removed", "replace_one": "one {} replaced by another"}


def build_federated_card(
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
    beside = accounting.cross_check(plan.event, releases, plan.delta) if releases else {"pld": 0.0, "rdp": 0.0}
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
            "against": config.adversaries,
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


def federated_markdown(card: Mapping[str, Any]) -> str:
    """The card for people."""
    promise, mechanism = card["guarantee"], card["mechanism"]
    parts = [f"# Privacy card: {card['title']}", _federated_statement(card)]
    others = [(f"ε for {who}", _federated_epsilon(e)) for who, e in promise["epsilon_for_others"].items()]
    by = ", ".join(f"{name.upper()}: {_federated_epsilon(value)}" for name, value in promise["epsilon_by"].items())
    parts.append(
        _federated_table("Guarantee", [
            ("ε spent", _federated_epsilon(promise["epsilon"])),
            ("ε of the budget", _show_federated(promise["target_epsilon"])),
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
    parts.append(_federated_table("Mechanism", _mechanism(mechanism)))
    rounds = card["rounds"]
    parts.append(_federated_table("Rounds", [(name.replace("_", " "), _show_federated(value)) for name, value in rounds.items()]))
    parts.append(_federated_table("Taken as public", list(card["assumed_public"].items())))
    parts.append(_federated_table("Hyper-parameters", [("chosen by", card["chosen_by"])]))
    parts.append(_federated_table("Results", [(name, _show_federated(value)) for name, value in card["results"].items()]))
    parts.append(_federated_table("Figures that ε does NOT protect", list(card["not_private"].items())))
    head = [("plan", f"`{card['plan_hash']}`"), ("ledger, count", str(card["ledger"]["count"]))]
    head.append(("ledger, head", f"`{card['ledger']['head']}`"))
    head += [(f"weights, {name}", f"`{value}`") for name, value in card.get("weights", {}).items()]
    parts.append(_federated_table("Provenance", head))
    return "\n\n".join(part for part in parts if part) + "\n"


def _federated_statement(card: Mapping[str, Any]) -> str:
    promise = card["guarantee"]
    if card["caveats"]:
        reasons = "\n".join(f"> - {caveat}" for caveat in card["caveats"])
        return f"> **NOT PRIVATE**\n>\n> There is no certified guarantee for this model:\n>\n{reasons}"
    spent = f"(ε = {_federated_epsilon(promise['epsilon'])}, δ = {promise['delta']:g})"
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
    return [(name.replace("_", " "), _show_federated(held[name])) for name in shown if held.get(name) not in (None, [], {})]


def _federated_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", "|  |  |", "| --- | --- |"]
    return "\n".join(lines + [f"| {name} | {str(text).replace('|', chr(92) + '|')} |" for name, text in rows])


def _federated_epsilon(value: float | str | None) -> str:
    """Four decimals, rounded up: a printed ε is never below the true one."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if isinstance(value, (int, float)) else _show_federated(value)


def _show_federated(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show_federated(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "; ".join(_show_federated(item) for item in value)
    return str(value)
