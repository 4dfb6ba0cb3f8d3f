"""Define `dpkfc card`: show page one of a card, fill in its fields, write it anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.report.card import LAYOUT
from dpkfc.report.card_files import CARD, LEDGER, to_markdown, write_card_files
from dpkfc.report.officer import Declared
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import Card, CardError, require_card
from dpkfc.terminal import print_line


def card(
    run: Path,
    /,
    *,
    owner: str | None = None,
    purpose: str | None = None,
    data_subjects: str | None = None,
    contact: str | None = None,
    region: str | None = None,
) -> None:
    """Show page one of a privacy card, after ledger, card and weights were compared.

    Args:
        run: A folder with ledger and card, of any host.
        owner: Who answers for the model.
        purpose: What the model is for.
        data_subjects: Whose data it has seen.
        contact: Whom to ask.
        region: Whose law applies; for the registry.
    """
    given = {
        "owner": owner,
        "purpose": purpose,
        "data_subjects": data_subjects,
        "contact": contact,
        "region": region,
    }
    text = fill_card(run, {name: value for name, value in given.items() if value is not None})
    print_line(text.partition("\n# Annex\n")[0])


def fill_card(run: Path, given: Mapping[str, str]) -> str:
    """Return the text of a card, with fields filled in; files that change are written anew.

    Args:
        run: folder with ledger and card.
        given: fields of `Declared`.

    Raises:
        CardError: the card is missing, or disagrees with ledger or weights.
        ValueError: a value that a card cannot show.
    """
    card = require_card(run)
    verify_ledger(run / LEDGER, pages=False)
    try:
        content = _fill_content(card, given)
        text = to_markdown(content)
        stored = json.loads(json.dumps(content))
        page = (run / CARD).with_suffix(".md")
        is_current = page.is_file() and page.read_text("utf-8") == text
        if stored != card.content or not is_current:
            write_card_files(run, content)
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CardError(f"{run / CARD} is damaged ({reason:.60}); restore it") from None
    return text


def _fill_content(card: Card, given: Mapping[str, str]) -> dict[str, Any]:
    """Return a card with fields filled in."""
    content: dict[str, Any] = dict(card.content)
    known = content["declared"]
    declared = Declared(**{**known, **given})
    return content | {"layout": LAYOUT, "declared": vars(declared)}
