"""What a ledger says was spent, from its lines alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dp_accounting

from dpkfc.privacy.events import epsilon, event_from_dict
from dpkfc.privacy.ledger import Verified
from dpkfc.recipes.beside import CardError, check_copy, check_promise, check_weights, history, read_card

__all__ = ["spent"]

# What the first line of a ledger may say of its run, and how it is called here.
_STATED = {"unit": "privacy unit", "dataset_size": "number of units", "steps": "planned releases", "delta": "planned δ"}
_STATED |= {"dpkfc": "version of dpkfc", "created": "begun"}


def spent(path: Path, delta: float | None = None, *, copy: tuple[str, int] | None = None) -> dict[str, Any]:
    """Check a ledger and account for its releases.

    A privacy card and a checkpoint beside the ledger must agree with it: lines that were cut off at the end leave a valid chain,
    and only something that remembers a later head can tell. The chain has no key; what it proves is in docs/accounting.md.

    Args:
        path: the ledger.
        delta: δ of the ε that is reported; None takes that of the card beside the ledger, else that of its first line, else 1e-5.
        copy: a head and the number of releases after which it was taken, as somebody else has kept them.

    Returns:
        What there is to say, by name; what speaks against the guarantee comes first.

    Raises:
        LedgerError: the chain does not hold.
        CardError: the card beside it is damaged or states something else; it, the checkpoint or the copy remembers another
            head; the weights beside it are not those of the card; or no accountant can treat what was released.
        CheckpointError: the checkpoint beside it is damaged.
    """
    found, card = history(path), read_card(path)
    if copy is not None:
        check_copy(path, found, *copy)
    doubt = _doubt(found)
    facts: dict[str, Any] = {"guarantee": doubt} if doubt else {}
    facts |= {"chain": "holds", "releases": len(found.releases), "head": found.heads[-1]}
    facts |= {"plan": found.header["plan_hash"], "certified": found.header.get("certified")}
    facts |= {"noise generator": found.header.get("rng")}
    facts |= {name: str(found.header[key]) for key, name in _STATED.items() if key in found.header}
    if card is not None:
        check_promise(card, found, functools.partial(_epsilon_of, path))
        facts |= {"privacy card": "states what the ledger shows", "weights": check_weights(card)}
    if delta is None:
        delta = card.delta if card is not None else _stated_delta(found)
    relation, accountants = _relation(found.releases)
    facts |= {"neighbouring relation": found.header.get("neighbouring_relation", relation)}
    if not found.releases:
        return facts | {"ε": 0.0}
    named = "ε if it were certified," if doubt else "ε"
    return facts | {
        f"{named} by {name.upper()} at δ = {delta:g}": _epsilon_of(path, found.releases, delta, name) for name in accountants
    }


def _doubt(found: Verified) -> str:
    """What the first line says against the guarantee; empty where it says nothing."""
    header = found.header
    if header.get("rng") not in ("secure", None):
        return "NOT PRIVATE: the noise repeats from a seed"
    if header.get("certified") is True:
        return "" if header.get("rng") == "secure" else "UNCERTIFIED: the ledger does not say where its noise came from"
    if any(release["noise_multiplier"] == 0 for release in found.releases):
        return "NOT PRIVATE: releases without noise"
    return "UNCERTIFIED: the run that wrote this ledger had no certified guarantee"


def _stated_delta(found: Verified) -> float:
    """δ of the first line, 1e-5 where it states none that could be one."""
    stated = found.header.get("delta")
    return stated if isinstance(stated, float) and 0 < stated < 1 else 1e-5


def _relation(releases: Sequence[dict[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Neighbouring relation of the events, and the accountants that can treat them."""
    replaced = bool(releases) and releases[0]["event"].get("type") == dp_accounting.SampledWithoutReplacementDpEvent.__name__
    return ("replace_one", ("rdp",)) if replaced else ("add_or_remove_one", ("pld", "rdp"))


def _epsilon_of(path: Path, releases: Sequence[dict[str, Any]], delta: float, accountant: str) -> float:
    """ε of these releases together.

    Raises:
        CardError: the accountant cannot treat them.
    """
    if not releases:
        return 0.0
    kinds: dict[str, int] = {}
    for release in releases:
        text = json.dumps(release["event"], sort_keys=True)
        kinds[text] = kinds.get(text, 0) + 1
    try:
        events = [(event_from_dict(json.loads(text)), count) for text, count in kinds.items()]
        if len(events) == 1:
            event, count = events[0]
        else:
            event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(e, c) for e, c in events])
            count = 1
        return epsilon(event, count, delta, accountant, _relation(releases)[0])
    except (ValueError, ArithmeticError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CardError(f"the chain of the ledger {path} holds, but its ε cannot be computed: {reason}") from error
