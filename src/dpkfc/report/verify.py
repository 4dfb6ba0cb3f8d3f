"""What lies beside a ledger, and whether it agrees with it: the privacy card, the checkpoint and the weights."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.checkpoint import file_digest, remembered_ledger
from dpkfc.privacy.accounting import epsilon, event_from_dict
from dpkfc.privacy.ledger import Verified, verify

CARD = "privacy_card.json"
_TINY = 1e-6  # what two machines may differ by in an ε; a card that was edited differs by more


class CardError(ValueError):
    """A ledger, or what lies beside it, disagrees with the other, is damaged, or cannot be accounted for."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a privacy card says, as far as it can be compared.

    Attributes:
        path: the file.
        content: all of it.
        releases, head: of the ledger, when the card was written.
        delta: δ.
    """

    path: Path
    content: Mapping[str, Any]
    releases: int
    head: str
    delta: float

    @property
    def promise(self) -> Mapping[str, Any]:
        """Its section of the guarantee."""
        found: Mapping[str, Any] = self.content["guarantee"]
        return found


def read_card(path: Path) -> Card | None:
    """The card beside a ledger, None where there is none.

    Raises:
        CardError: it is damaged.
    """
    card = path.parent / CARD
    if not card.is_file():
        return None
    try:
        content = json.loads(card.read_text("utf-8"))
        kept, delta = content["ledger"], float(content["guarantee"]["delta"])
        releases = int(kept["releases"] if "releases" in kept else kept["count"])  # a federated card counts
        if releases < 0 or not 0 < delta < 1:
            raise ValueError(f"{releases} releases at δ = {delta}")
        return Card(path=card, content=content, releases=releases, head=str(kept["head"]), delta=delta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CardError(
            f"the privacy card {card} is damaged ({type(error).__name__}: {error}): what the ledger held when it was written "
            "cannot be compared; move it away to look at the ledger alone"
        ) from None


def history(path: Path) -> Verified:
    """A ledger whose chain holds, and that begins with all that card and checkpoint beside it remember.

    Raises:
        LedgerError: the chain does not hold.
        CardError: the card is damaged, or it or the checkpoint remembers another head.
        CheckpointError: the checkpoint is damaged.
    """
    found = verify(path)
    if card := read_card(path):
        _check_kept(path, found, card.releases, card.head, "privacy card")
    if kept := remembered_ledger(path.parent / "checkpoint"):
        _check_kept(path, found, *kept, "checkpoint")
    return found


def _check_kept(path: Path, found: Verified, releases: int, head: str, what: str) -> None:
    """Raise unless a ledger still begins with the history that something beside it remembers."""
    if releases >= len(found.heads) or found.heads[releases] != head:
        raise CardError(
            f"the ledger {path} has {len(found.releases)} releases, the {what} beside it was written after {releases} with "
            "another head: lines were removed or replaced"
        )


def check_copy(path: Path, found: Verified, head: str, releases: int) -> None:
    """Raise unless a ledger passed through a head that somebody else has kept.

    Raises:
        CardError: it did not.
    """
    if not 0 <= releases < len(found.heads) or found.heads[releases] != head.strip().lower():
        raise CardError(
            f"the ledger {path} does not contain the head {head[:12]}… after {releases} releases: it holds "
            f"{len(found.releases)}, and is not the one that this head was taken from"
        )


def check_promise(card: Card, found: Verified, cost: Callable[[Sequence[dict[str, Any]], float, str], float]) -> None:
    """Raise unless a card promises what its ledger shows.

    Args:
        card: of `read_card`, whose head the ledger has.
        found: the ledger.
        cost: releases, δ and accountant to ε.

    Raises:
        CardError: naming the first statement that differs.
    """
    promise, header = card.promise, found.header
    pairs = [("plan", card.content.get("plan_hash"), header["plan_hash"])]
    pairs.append(("number of releases", promise.get("releases"), card.releases))
    pairs.append(("certified", promise.get("certified"), header.get("certified")))
    for name in ("unit", "neighbouring_relation", "delta"):
        if name in header and name in promise:
            pairs.append((name.replace("_", " "), promise[name], header[name]))
    accounting = card.content.get("accounting")
    accountant = accounting.get("accountant") if isinstance(accounting, Mapping) else "pld"  # as a federated card
    if accountant not in ("pld", "rdp"):
        raise CardError(f"the privacy card {card.path} names an accountant that there is none of: it was changed")
    pairs.append(("ε", promise.get("epsilon"), plain(cost(found.releases[: card.releases], card.delta, accountant))))
    for name, stated, held in pairs:
        if not agrees(stated, held):
            raise CardError(
                f"the privacy card {card.path} states another {name} than its ledger ({_told(stated)} instead of {_told(held)}): "
                "it was changed, or belongs to another run"
            )


def plain(value: float) -> float | str:
    """A number as a card holds it."""
    return value if math.isfinite(value) else "inf"


def agrees(stated: Any, held: Any) -> bool:
    """Whether two plain values are equal; numbers that are not whole may differ in their last digits."""
    if isinstance(held, Mapping):
        return isinstance(stated, Mapping) and {*stated} == {*held} and all(agrees(stated[k], held[k]) for k in held)
    if isinstance(held, list):
        return isinstance(stated, list) and len(stated) == len(held) and all(map(agrees, stated, held))
    if isinstance(held, float) and isinstance(stated, (int, float)) and not isinstance(stated, bool):
        return abs(stated) <= sys.float_info.max and math.isclose(stated, held, rel_tol=_TINY, abs_tol=1e-12)
    return type(stated) is type(held) and bool(stated == held)


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


def check_weights(card: Card) -> str:
    """What is known of the weights that a card names.

    Returns:
        "those of the card", or why nothing could be compared.

    Raises:
        CardError: the file beside the card holds other weights.
    """
    named = card.content.get("weights")
    if not isinstance(named, Mapping) or not isinstance(named.get("sha256"), str):
        return "not compared: the card names no digest of them"
    name = Path(str(named.get("file", ""))).name or "model.safetensors"
    path = card.path.parent / name
    if not path.is_file():
        return f"not compared: {name} is not beside the card"
    if file_digest(path) != named["sha256"]:
        raise CardError(f"{path} does not hold the weights that the card beside it was written for: one of them was changed")
    return "those of the card (SHA-256)"


# --------------------------------------------------------------------------------------------------
# What a ledger says was spent, from its lines alone.


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
    import dp_accounting

    replaced = bool(releases) and releases[0]["event"].get("type") == dp_accounting.SampledWithoutReplacementDpEvent.__name__
    return ("replace_one", ("rdp",)) if replaced else ("add_or_remove_one", ("pld", "rdp"))


def _epsilon_of(path: Path, releases: Sequence[dict[str, Any]], delta: float, accountant: str) -> float:
    """ε of these releases together.

    Raises:
        CardError: the accountant cannot treat them.
    """
    import dp_accounting

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
