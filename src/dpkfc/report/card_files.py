"""Write a card as JSON, as Markdown and for the public registry, beside weights and ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.checkpoint import CheckpointError, file_digest, place_file
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError, encode_line
from dpkfc.report.audit_section import audit_rows, audit_summary, failed_checks
from dpkfc.report.card import OPTIONAL_STEPS
from dpkfc.report.officer import registry_record, render

if TYPE_CHECKING:
    from torch import Tensor


WEIGHTS = "model.safetensors"
LEDGER = "ledger.jsonl"
CARD = "privacy_card.json"
REGISTRY = "card.json"


def write_weights_and_card(
    folder: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    ledger: Ledger,
    card: dict[str, Any],
) -> dict[str, Any]:
    """Write the weights of a run, a copy of its ledger, and the card of both.

    Session, engine, server, estimator and `dpkfc train` write their folders by this function. If
    the run keeps its ledger in the folder, no copy is made.

    Args:
        folder: made if it is missing. It may hold an earlier state of the same run.
        state: of `released_state` of the session, engine or server.
        ledger: of the run.
        card: of the same run, without weights.

    Returns:
        The card as it was written, with the digest of the weights.

    Raises:
        CheckpointError: the folder holds another run, or cannot be written.
    """
    from safetensors.torch import save_file

    place = Path(folder)
    promise = card["guarantee"]
    # Values of a safetensors header are texts.
    header = {
        "epsilon": str(promise["epsilon"]),
        "delta": str(promise["delta"]),
        "plan_hash": card["plan_hash"],
        "certified": str(promise["certified"]),
        "stamp": card.get("stamp") or "",
    }
    path = place / LEDGER
    is_in_place = ledger.path is not None and ledger.path.resolve() == path.resolve()
    if not is_in_place:
        _check_same_run(path, ledger)
    place_file(place / WEIGHTS, lambda part: save_file(dict(state), part, metadata=header))
    if not is_in_place:
        place_file(path, lambda part: part.write_bytes(ledger_bytes(ledger)))
    weights = {"file": WEIGHTS, "sha256": file_digest(place / WEIGHTS)}
    written = {**card, "ledger": {**card["ledger"], "file": LEDGER}, "weights": weights}
    write_card_files(place, written)
    return written


def write_card_files(folder: Path, card: Mapping[str, Any]) -> None:
    """Write a card as JSON, as Markdown, and in the form of the public registry.

    Raises:
        CheckpointError: the disk cannot take a file; an earlier file of that name remains.
    """
    text = to_markdown(card)
    place_file(folder / CARD, lambda part: part.write_text(to_json(card), "utf-8"))
    markdown = (folder / CARD).with_suffix(".md")
    place_file(markdown, lambda part: part.write_text(text, "utf-8"))
    record = to_json(registry_record(card))
    place_file(folder / REGISTRY, lambda part: part.write_text(record, "utf-8"))


def to_json(content: Mapping[str, Any]) -> str:
    """Return a card or a record as the text of its file."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def ledger_bytes(ledger: Ledger) -> bytes:
    """Return the content of a ledger's file, also for a ledger that is in memory alone."""
    lines = []
    for line in (ledger.header, *ledger.releases):
        content = {name: value for name, value in line.items() if name != "hash"}
        lines.append(encode_line(content)[0])
    return b"".join(lines)


def _check_same_run(path: Path, ledger: Ledger) -> None:
    """Refuse to replace the ledger of another run.

    Raises:
        CheckpointError: the file is not an earlier state of this ledger.
    """
    if not path.exists():
        return
    try:
        found = verify(path)
        is_same = ledger.contains(len(found.releases), found.heads[-1])
    except LedgerError:
        is_same = False
    if not is_same:
        raise CheckpointError(
            f"{path} belongs to another run; give a folder of its own for this card"
        )


def to_markdown(card: Mapping[str, Any]) -> str:
    """Render a card for readers, by `templates/card.md`.

    Args:
        card: of `build_card`, `session_card` or `build_federated_card`, or read from its JSON file.

    Returns:
        The text of the page.

    Raises:
        KeyError: a section or an entry is missing.
    """
    audit = card.get("audit")
    return render(
        "card.md",
        card,
        failed=failed_checks(audit),
        audit_rows=audit_rows(audit),
        audit_summary=audit_summary(audit),
        optional_steps=OPTIONAL_STEPS,
    )
