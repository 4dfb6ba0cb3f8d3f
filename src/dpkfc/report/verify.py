"""Verify a ledger against the files of its run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dpkfc.checkpoint import file_digest, read_ledger_state
from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.ledger import verify
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.report.card import LAYOUT
from dpkfc.report.card_files import CARD, REGISTRY, WEIGHTS, to_json, to_markdown
from dpkfc.report.officer import registry_record
from dpkfc.report.promise import check_promise
from dpkfc.report.spent import doubt_of, epsilon_of_releases, relation_of_releases
from dpkfc.report.text import ensure_mapping
from dpkfc.report.written_card import DAMAGE, Card, CardError, read_card
from dpkfc.weights_record import digest_file, find_record_path, read_weights_record

# Keys of the first line of a ledger, and their labels.
_STATED = {
    "unit": "privacy unit",
    "dataset_size": "number of units",
    "steps": "planned releases",
    "delta": "planned δ",
    "dpkfc": "version of dpkfc",
    "created": "begun",
}


def verify_history(path: Path) -> Verified:
    """Verify a ledger's chain, and that it contains the heads that card and checkpoint remember.

    Returns:
        The verified ledger.

    Raises:
        LedgerError: the chain does not hold.
        CardError: the card is damaged, or card or checkpoint remember another head.
        CheckpointError: the checkpoint is damaged.
    """
    ledger = verify(path)
    if card := read_card(path):
        _check_remembered(path, ledger, card.releases, card.head, "privacy card")
    if remembered := read_ledger_state(path.parent / "checkpoint"):
        _check_remembered(path, ledger, *remembered, "checkpoint")
    return ledger


def _check_remembered(
    path: Path,
    ledger: Verified,
    releases: int,
    head: str,
    what: str,
) -> None:
    """Check that a ledger still begins with the history that a file next to it remembers."""
    if not ledger.contains(releases, head):
        raise CardError(
            f"the ledger {path} has {len(ledger.releases)} releases, the {what} next to it was "
            f"written after {releases} with another head: lines were removed or replaced"
        )


def check_copy(path: Path, ledger: Verified, head: str, releases: int) -> None:
    """Check that a ledger contains a head that somebody has kept.

    Args:
        path: of the ledger, for messages.
        ledger: of `verify_history`.
        head: hexadecimal; spaces around it and capitals do not matter.
        releases: number of releases after which the head was noted.

    Raises:
        CardError: the ledger has another head after that release.
    """
    if not ledger.contains(releases, head.strip().lower()):
        raise CardError(
            f"the ledger {path} does not contain the head {head[:12]}… after {releases} of its "
            f"{len(ledger.releases)} releases: the head belongs to another ledger"
        )


def check_texts(card: Card) -> str:
    """Compare the Markdown and the record of the registry next to a card with the card.

    Returns:
        "say what the card says", or why nothing could be compared.

    Raises:
        CardError: a text next to the card says something else.
    """
    if card.content.get("layout") != LAYOUT:
        return "not compared: another version wrote them; dpkfc card writes them anew"
    markdown = card.path.with_suffix(".md")
    try:
        expected = {
            markdown: to_markdown(card.content),
            card.path.parent / REGISTRY: to_json(registry_record(card.content)),
        }
    except DAMAGE as error:
        raise CardError(
            f"the privacy card {card.path} is damaged ({type(error).__name__}: {error}); put back"
            " the file that the run wrote"
        ) from None
    for path, text in expected.items():
        if not path.is_file():
            return f"not compared: {path.name} is not next to the card"
        if path.read_text("utf-8") != text:
            raise CardError(
                f"{path} does not say what {CARD} says: it was changed; dpkfc card writes it anew"
            )
    return "say what the card says"


def _find_weights(file: Path, card: Card | None) -> Path:
    """Return the file of weights that a card names, next to another file."""
    named = {} if card is None else ensure_mapping(card.content.get("weights"))
    return file.parent / (Path(str(named.get("file", ""))).name or WEIGHTS)


def check_weights(card: Card) -> str:
    """Compare the weights next to a card with the digest that the card names.

    Returns:
        "equal to the card's (SHA-256)", or why nothing could be compared.

    Raises:
        CardError: the file next to the card holds other weights.
    """
    digest = ensure_mapping(card.content.get("weights")).get("sha256")
    if not isinstance(digest, str):
        return "not compared: the card names no digest of them"
    path = _find_weights(card.path, card)
    if not path.is_file():
        return f"not compared: {path.name} is not next to the card"
    if file_digest(path) != digest:
        raise CardError(
            f"{path} does not hold the weights that the card next to it was written for: one of "
            "them was changed"
        )
    return "equal to the card's (SHA-256)"


def check_recorded(path: Path, ledger: Verified, card: Card | None) -> str:
    """Compare the weights in a folder with those that a session recorded after its last release.

    Args:
        path: of the ledger.
        ledger: of `verify_history`.
        card: next to it, which may name the file of the weights.

    Returns:
        Which file holds them, or why nothing could be compared.

    Raises:
        CardError: the record is of another ledger, or the file holds other weights.
        CheckpointError: the record is damaged.
    """
    record = read_weights_record(path)
    if record is None:
        return "not compared: the ledger carries no digest of them"
    releases = record.releases
    if record.ledger != ledger.id or not ledger.contains(releases, record.head):
        raise CardError(
            f"{find_record_path(path)} is the record of another ledger than {path}: one of them"
            " was replaced"
        )
    if releases < len(ledger.releases):
        return f"not compared: their digest is of release {releases}, before the last one"
    weights = _find_weights(path, card)
    if weights.suffix != ".safetensors" or not weights.is_file():
        return "not compared: no safetensors file of them is next to the ledger"
    try:
        is_released = record.describes(digest_file(weights))
    except (OSError, SafetensorError) as error:
        raise CardError(f"{weights} is damaged ({error}): put back the delivered file") from error
    if not is_released:
        raise CardError(
            f"{weights} does not hold the weights of the last release in {path}: they were"
            " exchanged, or changed after training"
        )
    return f"equal to {weights.name} (SHA-256 of each tensor)"


def verify_ledger(
    path: Path,
    delta: float | None = None,
    *,
    copy: tuple[str, int] | None = None,
    pages: bool = True,
) -> dict[str, Any]:
    """Verify a ledger and account for its releases.

    A privacy card and a checkpoint next to the ledger must agree with it. A chain without its last
    lines is still valid, and only a file that remembers a later head can reveal that. The chain has
    no key; docs/accounting.md says what it proves.

    Args:
        path: the ledger.
        delta: δ of the reported ε; None takes the δ of the card next to the ledger, else the first
            line's, else 1e-5.
        copy: a head that somebody has kept, and the number of releases after which it was taken.
        pages: compare the Markdown and the record of the registry with the card too.

    Returns:
        Facts by name. What contradicts the guarantee comes first.

    Raises:
        LedgerError: the chain does not hold.
        CardError: card, checkpoint, copy or weights disagree with the ledger or with each other, or
            no accountant can treat what was released.
        CheckpointError: the checkpoint next to it is damaged.
    """
    ledger = verify_history(path)
    card = read_card(path)
    if copy is not None:
        check_copy(path, ledger, *copy)
    facts = _describe_chain(ledger)
    if card is not None:
        check_promise(card, ledger, functools.partial(epsilon_of_releases, path, ledger.groups))
        facts["privacy card"] = "states what the ledger shows"
        facts["weights"] = check_weights(card)
        if pages:
            facts["pages of the card"] = check_texts(card)
    facts["weights of the last release"] = check_recorded(path, ledger, card)
    if delta is None:
        delta = card.delta if card is not None else _stated_delta(ledger)
    return facts | _describe_cost(path, ledger, delta)


def _describe_chain(ledger: Verified) -> dict[str, Any]:
    """Return what a ledger says of itself, with a doubt about the guarantee first."""
    header = ledger.header
    doubt = doubt_of(ledger)
    facts: dict[str, Any] = {"guarantee": doubt} if doubt else {}
    facts["chain"] = "holds"
    facts["releases"] = len(ledger.releases)
    facts["head"] = ledger.heads[-1]
    facts["plan"] = header["plan_hash"]
    facts["certified"] = header.get("certified")
    facts["noise generator"] = header.get("rng")
    for key, name in _STATED.items():
        if header.get(key) is not None:
            facts[name] = str(header[key])
    if planned := ledger.planned_extra:
        facts[_STATED["steps"]] = str(header["steps"] + sum(planned.values()))
        kinds = (f"{count} for {purpose}" for purpose, count in planned.items())
        facts["of them beside the steps"] = ", ".join(kinds)
    return facts


def _describe_cost(path: Path, ledger: Verified, delta: float) -> dict[str, Any]:
    """Return the neighbouring relation of a ledger, and ε of its releases at δ."""
    releases = ledger.releases
    relation = relation_of_releases(releases)
    accountants = ("rdp",) if relation == "replace_one" else ("pld", "rdp")
    stated = ledger.header.get("neighbouring_relation", relation)
    facts: dict[str, Any] = {"neighbouring relation": stated}
    if not releases:
        facts["ε"] = 0.0
        return facts
    for row in describe_extra(releases, delta):
        facts[f"releases for {row['purpose']}, part of ε"] = (
            f"{row['releases']}, noise multiplier {row['noise_multiplier']:.6g}; alone"
            f" ε = {row['epsilon_alone']:.4g} at δ = {delta:g}"
        )
    label = "ε if it were certified," if doubt_of(ledger) else "ε"
    for accountant in accountants:
        name = f"{label} by {accountant.upper()} at δ = {delta:g}"
        facts[name] = epsilon_of_releases(path, ledger.groups, releases, delta, accountant)
    return facts


def _stated_delta(ledger: Verified) -> float:
    """Return δ of the first line, 1e-5 if it states no valid one."""
    stated = ledger.header.get("delta")
    return stated if isinstance(stated, float) and 0 < stated < 1 else 1e-5
