"""Read the card next to a ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.report.card import FORMAT
from dpkfc.report.card_files import CARD, LEDGER

# What parsing a damaged card raises. OverflowError comes from int(), RecursionError from json.
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class CardError(ValueError):
    """A ledger and what lies next to it disagree, are damaged, or cannot be accounted for."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The statements of a privacy card that can be compared.

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
        """Return the section `guarantee`."""
        promise: Mapping[str, Any] = self.content["guarantee"]
        return promise


def read_card(ledger: Path) -> Card | None:
    """Return the card next to a ledger, None if it is missing.

    Raises:
        CardError: the card is damaged, or a newer version wrote it.
    """
    path = ledger.parent / CARD
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        stated, delta = content["ledger"], float(content["guarantee"]["delta"])
        # A federated card calls the number of releases "count".
        releases = int(stated["releases"] if "releases" in stated else stated["count"])
        if releases < 0 or not 0 < delta < 1:
            raise ValueError(f"{releases} releases at δ = {delta}")
        version = int(content.get("format", FORMAT))
        head = str(stated["head"])
        card = Card(path=path, content=content, releases=releases, head=head, delta=delta)
    except DAMAGE as error:
        raise CardError(
            f"the privacy card {path} is damaged ({type(error).__name__}) and cannot be compared:"
            " move it away to verify the ledger alone"
        ) from None
    if version > FORMAT:
        raise CardError(f"a newer dpkfc wrote {path}; read it with the version that it names")
    return card


def require_card(run: Path) -> Card:
    """Return the card of a run folder.

    Raises:
        CardError: the folder or its card is missing, or `read_card` refuses the card.
    """
    if not run.is_dir():
        problem = "is not a folder" if run.exists() else "does not exist"
        raise CardError(f"{run} {problem}; give the folder of a run")
    card = read_card(run / LEDGER)
    if card is None:
        raise CardError(f"{run} holds no {CARD}; finish the run, or call write_card(folder)")
    return card
