"""The command `dpkfc card`: show the first page of a card, fill in its fields, write it anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dpkfc.report.card import CARD, LAYOUT, LEDGER, to_markdown, write_card_files
from dpkfc.report.officer import Declared
from dpkfc.report.verify import Card, CardError, explain_ledger, read_card, verify_ledger
from dpkfc.terminal import open_console


def card(
    run: Annotated[Path, typer.Argument(help="A folder with ledger and card, of any host.")],
    *,
    owner: Annotated[str | None, typer.Option(help="Who answers for the model.")] = None,
    purpose: Annotated[str | None, typer.Option(help="What the model is for.")] = None,
    data_subjects: Annotated[str | None, typer.Option(help="Whose data it has seen.")] = None,
    contact: Annotated[str | None, typer.Option(help="Whom to ask.")] = None,
) -> None:
    """Show page one of a privacy card, after ledger, card and weights were compared.

    A flag fills in a field, and the files of the card are written anew.

    Example: dpkfc card runs/first --owner "Ward 3" --purpose "Predict readmission"
    """
    given = {
        "owner": owner,
        "purpose": purpose,
        "data_subjects": data_subjects,
        "contact": contact,
    }
    stated = {name: x for name, x in given.items() if x is not None}
    text = fill_card(run, stated)
    page = text.partition("\n# Annex\n")[0]
    open_console().print(page, markup=False, highlight=False, soft_wrap=True)


def fill_card(run: Path, given: Mapping[str, str]) -> str:
    """Return the text of a card, with fields filled in; files that change are written anew.

    Args:
        run: folder with ledger and card.
        given: fields of `Declared`.

    Raises:
        CardError: there is no card, or it disagrees with ledger or weights.
        ValueError: a value that a card cannot show.
    """
    found = read_card(run / LEDGER)
    if found is None:
        raise CardError(f"{run} holds no {CARD}; call write_card(folder), or end the run first")
    verify_ledger(run / LEDGER, pages=False)
    try:
        content = _fill_content(found, given)
        text = to_markdown(content)
        stored = json.loads(json.dumps(content))
        if stored != found.content or not _pages_hold(run, text):
            write_card_files(run, content)
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CardError(f"{run / CARD} is damaged ({reason:.60}); restore it") from None
    return text


def _fill_content(found: Card, given: Mapping[str, str]) -> dict[str, Any]:
    """Return a card with fields filled in, and the sections of this version."""
    content: dict[str, Any] = dict(found.content)
    known = content.get("declared") or {}
    declared = Declared(**{**known, **given})
    if content.get("layout") != LAYOUT:
        content |= explain_ledger(found)
    return content | {"layout": LAYOUT, "declared": vars(declared)}


def _pages_hold(run: Path, text: str) -> bool:
    path = (run / CARD).with_suffix(".md")
    return path.is_file() and path.read_text("utf-8") == text
