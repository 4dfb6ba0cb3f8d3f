"""Whether the privacy card in a run folder is what its settings and its ledger give, and its weights those it names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import LedgerError, verify
from dpkfc.recipes.beside import Card, CardError, agrees, check_weights, read_card
from dpkfc.report.card import CardFacts, build_card

__all__ = ["card_finding"]

_COMPARED = ("plan_hash", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature")
_MISSING = "nothing"


def card_finding(ledger: Path, plan: Plan, device: str) -> Finding | None:
    """Whether the card beside a ledger states what plan and ledger give, and the weights beside it are those it names.

    Args:
        ledger: of the run folder.
        plan: of the settings in the folder.
        device: of the settings.

    Returns:
        None where no card lies there: the run has not ended.
    """
    try:
        card = read_card(ledger)
        if card is None:
            return None
        wrong = _unlike(card, plan, len(verify(ledger).releases), device) or _other_weights(card)
    except (CardError, LedgerError) as error:
        wrong = str(error)
    return Finding(
        check="card", measured="differs" if wrong else "as plan and ledger give it", bound="what plan and ledger give",
        passed=not wrong, detail=wrong or "ε, mechanism and plan are those of settings and ledger, the weights those it names",
    )  # fmt: skip


def _unlike(card: Card, plan: Plan, releases: int, device: str) -> str:
    """The first statement of a card that is not what it would be; empty where all are."""
    kept = {"releases": releases}
    facts = CardFacts(title="", releases=releases, ledger=kept, assumed_public={}, chosen_by="", not_private={}, device=device)
    try:
        expected = _compared(json.loads(json.dumps(build_card(plan, facts))))
    except ValueError as error:  # more releases than the plan's
        return str(error)
    held = _compared(card.content)
    for name in _COMPARED:
        if where := _difference(held.get(name), expected.get(name), name):
            return where
    return ""


def _compared(content: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that plan and ledger decide: without the refreshes, and without the number of an accelerator."""
    parts = {name: content.get(name) for name in _COMPARED}
    if isinstance(curvature := parts["curvature"], Mapping):
        parts["curvature"] = {name: value for name, value in curvature.items() if name != "refreshes"}
    if isinstance(mechanism := parts["mechanism"], Mapping):
        noise = re.sub(r" on ([a-z]+):\d+,", r" on \1,", str(mechanism.get("noise_generator")))
        parts["mechanism"] = {**mechanism, "noise_generator": noise}
    return parts


def _difference(stated: Any, expected: Any, where: str) -> str:
    """Where two values differ first, and how; empty where they agree."""
    if agrees(stated, expected):
        return ""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        for name in [*expected, *(name for name in stated if name not in expected)]:
            both = stated.get(name, _MISSING), expected.get(name, _MISSING)
            if found := _difference(*both, f"{where}, {str(name)[:60]}"):
                return found
    return f"{where}: the card says {_told(stated)}, plan and ledger give {_told(expected)}"


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:120]


def _other_weights(card: Card) -> str:
    told = check_weights(card)
    return "" if told.startswith("those of") else f"weights {told}"
