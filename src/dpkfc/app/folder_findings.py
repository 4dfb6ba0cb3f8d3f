"""Check the ledger, the card and the weights of a run folder against its plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpkfc.audit import Finding
from dpkfc.checkpoint import CheckpointError
from dpkfc.config import Plan
from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import verify
from dpkfc.privacy.ledger_lines import LedgerError, Verified
from dpkfc.report.card import CardFacts, build_card
from dpkfc.report.promise import agrees
from dpkfc.report.verify import check_recorded, check_texts, check_weights, verify_history
from dpkfc.report.written_card import Card, CardError, read_card

_COMPARED = ["plan_hash", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature"]
_COMPARED += ["meaning"]
_MISSING = "nothing"


def card_finding(ledger: Path, plan: Plan, device: str) -> Finding | None:
    """Check that the card next to a ledger states what plan and ledger give, and names its weights.

    Args:
        ledger: of the run folder.
        plan: of the settings in the folder.
        device: of the settings.

    Returns:
        The finding, or None before the run has ended and written a card.
    """
    try:
        card = read_card(ledger)
        if card is None:
            return None
        releases = verify(ledger).releases
        problem = _card_problem(card, plan, releases, device)
        if not problem:
            weights = check_weights(card)
            problem = "" if weights.startswith("equal to") else f"weights {weights}"
        if not problem:
            check_texts(card)
    except (CardError, LedgerError) as error:
        problem = str(error)
    return make_finding(
        "card",
        "differs" if problem else "as plan and ledger give it",
        "what plan and ledger give",
        problem,
        "ε, mechanism and plan agree with settings and ledger, weights with their hashes",
    )


def make_finding(check: str, measured: str, bound: str, problem: str, agreed: str) -> Finding:
    """Return a finding that has failed if there is a problem."""
    return Finding(
        check=check, measured=measured, bound=bound, passed=not problem, detail=problem or agreed
    )


def _card_problem(
    card: Card, plan: Plan, releases: Sequence[Mapping[str, Any]], device: str
) -> str:
    """Return the first statement of a card that differs from what it should be, or nothing."""
    facts = CardFacts(
        title="",
        releases=len(releases),
        ledger={"releases": len(releases)},
        assumed_public={},
        chosen_by="",
        not_private={},
        device=device,
        extra=describe_extra(releases, plan.delta),
    )
    try:
        expected = _compared_parts(json.loads(json.dumps(build_card(plan, facts))))
    except ValueError as error:
        # The ledger holds more releases than the plan has.
        return str(error)
    stated = _compared_parts(card.content)
    for name in _COMPARED:
        difference = _difference(stated.get(name), expected.get(name), name)
        if difference:
            return difference
    return ""


def _compared_parts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plan and ledger decide, which leaves out refreshes."""
    parts = {name: content.get(name) for name in _COMPARED}
    curvature = parts["curvature"]
    if isinstance(curvature, Mapping):
        parts["curvature"] = {n: value for n, value in curvature.items() if n != "refreshes"}
    return parts


def _difference(stated: Any, expected: Any, where: str) -> str:
    """Return where two values differ first, and how; nothing where they agree."""
    if agrees(stated, expected):
        return ""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        for name in dict.fromkeys([*expected, *stated]):
            inner = _difference(
                stated.get(name, _MISSING),
                expected.get(name, _MISSING),
                f"{where}, {str(name)[:60]}",
            )
            if inner:
                return inner
    return f"{where}: the card says {_show(stated)}, plan and ledger give {_show(expected)}"


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:120]


def ledger_finding(path: Path, plan: Plan) -> Finding:
    """Check a run's ledger: its chain, what card and checkpoint remember, and the plan's releases.

    Args:
        path: the ledger.
        plan: of the run's settings.
    """
    problem = ""
    measured = "cannot be trusted"
    try:
        ledger = verify_history(path)
        check_recorded(path, ledger, None)
        measured = f"{len(ledger.releases):,} releases"
        _check_ledger(ledger, plan)
    except (LedgerError, CardError, CheckpointError) as error:
        problem = str(error)
    return make_finding(
        "ledger of the run",
        measured,
        f"at most the plan's {plan.steps:,}, each with its event",
        problem,
        "the chain holds; card and checkpoint remember the same history",
    )


def _check_ledger(ledger: Verified, plan: Plan) -> None:
    """Refuse a ledger that says what its plan does not."""
    header = ledger.header
    if header["plan_hash"] != plan.hash:
        raise LedgerError("it belongs to another plan than the settings in the folder")
    if header.get("certified") is not plan.certified:
        raise LedgerError(
            f"it says certified: {header.get('certified')}, the plan {plan.certified}"
        )
    planned: dict[str, Plan | ExtraRelease] = {"": plan}
    most = {"": plan.steps, **plan.extra_counts}
    planned |= {kind.purpose: kind for kind in plan.extra_releases}
    counts = Counter(release.get("purpose", "") for release in ledger.releases)
    for purpose, count in counts.items():
        kind = f" for {purpose}" if purpose else ""
        if count > most.get(purpose, 0):
            raise LedgerError(
                f"it has more releases{kind} than the plan's {most.get(purpose, 0):,}"
            )
    for release in ledger.releases:
        number = release.get("release")
        for name, value in _expect_charge(planned[release.get("purpose", "")]).items():
            if release.get(name) != value:
                raise LedgerError(
                    f"release {number} was charged with another {name} than the plan's"
                )


def _expect_charge(kind: Plan | ExtraRelease) -> dict[str, Any]:
    """Return what every line of a kind of releases states."""
    return {
        "event": event_to_dict(kind.event),
        "noise_multiplier": kind.noise_multiplier,
        "stddev": kind.stddev,
        "sensitivity": kind.sensitivity,
    }
