"""What a ledger says was spent, from its lines alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting

from dpkfc.checkpoint import remembered_ledger
from dpkfc.privacy.events import epsilon, event_from_dict
from dpkfc.privacy.ledger import Verified, verify
from dpkfc.recipes.config import ConfigError

__all__ = ["spent"]


def spent(path: Path, delta: float | None = None) -> dict[str, Any]:
    """Check a ledger and account for its releases.

    A privacy card and a checkpoint beside the ledger must agree with it: lines that were cut off at the end leave a valid chain,
    and only something that remembers a later head can tell.

    Args:
        path: the ledger.
        delta: δ of the ε that is reported; None takes that of the card beside the ledger, or 1e-5 where there is none.

    Returns:
        What there is to say, by name.

    Raises:
        LedgerError: the chain does not hold.
        ConfigError: the card beside it is damaged, it or the checkpoint remembers another head, or no accountant can treat what
            was released.
        CheckpointError: the checkpoint beside it is damaged.
    """
    found = verify(path)
    card = path.parent / "privacy_card.json"
    if card.is_file():
        remembered, stated = _remembered(card)
        delta = stated if delta is None else delta
        _check_kept(path, found, remembered["releases"], remembered["head"], "privacy card")
    if kept := remembered_ledger(path.parent / "checkpoint"):
        _check_kept(path, found, *kept, "checkpoint")
    facts = {
        "chain": "holds",
        "releases": len(found.releases),
        "head": found.heads[-1],
        "plan": found.header.get("plan_hash", "not stated"),
        "certified": found.header.get("certified"),
        "noise generator": found.header.get("rng"),
    }
    try:
        return facts | _cost(found.releases, 1e-5 if delta is None else delta)
    except (ValueError, ArithmeticError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the chain of the ledger {path} holds, but its ε cannot be computed: {reason}") from error


def _check_kept(path: Path, found: Verified, releases: int, head: str, what: str) -> None:
    """Raise unless a ledger still begins with the history that something beside it remembers."""
    if releases >= len(found.heads) or found.heads[releases] != head:
        raise ConfigError(
            f"the ledger {path} has {len(found.releases)} releases, the {what} beside it was written after {releases} with "
            "another head: lines were removed or replaced"
        )


def _remembered(card: Path) -> tuple[dict[str, Any], float]:
    """What a privacy card says of its ledger, and its δ."""
    try:
        content = json.loads(card.read_text("utf-8"))
        remembered, delta = content["ledger"], float(content["guarantee"]["delta"])
        releases = int(remembered["releases"])
        if releases < 0 or not 0 < delta < 1:
            raise ValueError(f"{releases} releases at δ = {delta}")
        return {"releases": releases, "head": str(remembered["head"])}, delta
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"the privacy card {card} is damaged ({type(error).__name__}: {error}): what the ledger held when it was written "
            "cannot be compared; move it away to look at the ledger alone"
        ) from None


def _cost(releases: list[dict[str, Any]], delta: float) -> dict[str, Any]:
    if not releases:
        return {"ε": 0.0}
    kinds: dict[str, int] = {}
    for release in releases:
        text = json.dumps(release["event"], sort_keys=True)
        kinds[text] = kinds.get(text, 0) + 1
    events = [(event_from_dict(json.loads(text)), count) for text, count in kinds.items()]
    replaced = isinstance(events[0][0], dp_accounting.SampledWithoutReplacementDpEvent)
    relation, accountants = ("replace_one", ("rdp",)) if replaced else ("add_or_remove_one", ("pld", "rdp"))
    if len(events) == 1:
        event, count = events[0]
    else:
        event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(e, c) for e, c in events])
        count = 1
    by = {f"ε by {name.upper()} at δ = {delta:g}": epsilon(event, count, delta, name, relation) for name in accountants}
    return {"neighbouring relation": relation, **by}
