"""What the lines of a ledger say was spent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc._errors import one_line
from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.events import event_from_dict, relation_of
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.report.written_card import CardError

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def doubt_of(ledger: Verified) -> str:
    """Return what the ledger says against the guarantee, "" if nothing."""
    header = ledger.header
    generator = header.get("rng")
    if generator not in ("secure", None):
        return "NOT PRIVATE: the noise repeats from a seed"
    if header.get("certified") is True:
        if generator == "secure":
            return ""
        return "UNCERTIFIED: the ledger does not say where its noise came from"
    if any(release["noise_multiplier"] == 0 for release in ledger.releases):
        return "NOT PRIVATE: releases without noise"
    return "UNCERTIFIED: the run that wrote this ledger had no certified guarantee"


def relation_of_releases(releases: Sequence[dict[str, Any]]) -> str:
    """Return the neighbouring relation under which releases can be accounted for."""
    return relation_of(event_from_dict(releases[0]["event"])) if releases else "add_or_remove_one"


def charges_of(releases: Sequence[dict[str, Any]], groups: int = 1) -> list[tuple[DpEvent, int]]:
    """Return each distinct event of these releases, with the number of times that it counts.

    Args:
        releases: lines of a ledger, from the first on.
        groups: of the ledger; so many consecutive steps cost a unit one event.
    """
    texts = [json.dumps(release["event"], sort_keys=True) for release in releases]
    of_steps = {t for t, release in zip(texts, releases, strict=True) if "purpose" not in release}
    counts = Counter(texts)
    if len(of_steps) == 1:
        steps = sum("purpose" not in release for release in releases)
        # Rounded up in integers: a forged number of groups may be too large for a float.
        rounds = (steps + groups - 1) // groups
        counts[of_steps.pop()] -= steps - rounds
    return [(event_from_dict(json.loads(text)), count) for text, count in counts.items()]


def epsilon_of_releases(
    path: Path, groups: int, releases: Sequence[dict[str, Any]], delta: float, accountant: str
) -> float:
    """Return ε of these releases together.

    Raises:
        CardError: the accountant cannot treat them.
    """
    try:
        return total_epsilon(charges_of(releases, groups), delta, accountant)
    except (TypeError, ValueError, ArithmeticError, MemoryError, AssertionError) as error:
        # dp-accounting asserts that rates and orders are possible.
        reason = one_line(error)
        raise CardError(
            f"the chain of the ledger {path} holds, but its ε cannot be computed: {reason}"
        ) from error
