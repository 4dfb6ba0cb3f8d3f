"""Write the first page of a privacy card, for a data protection officer, and a short glossary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpkfc.privacy.tradeoff import attack_rates, group_epsilon
from dpkfc.report.numbers import is_visible, number, plain, rounded_up

if TYPE_CHECKING:
    import dp_accounting

# Sizes of the groups whose ε a card states.
GROUPS = (2, 5, 10)
_MOST_CHARACTERS = 200
_LARGE = 100.0
_EMPTY = "(not stated)"
_FIELDS = {
    "owner": "Owner",
    "contact": "Contact",
    "purpose": "Purpose",
    "data_subjects": "Data subjects",
}
_GLOSSARY = {
    "ε (epsilon)": "how far one unit can change the probability of any result; smaller is safer",
    "δ (delta)": "the probability up to which ε may fail; it has to be far below 1 / N",
    "unit": "what is protected as a whole: a record, or all records of one person",
    "neighbours": "two data sets that differ in one unit",
    "certified": "sampling, clipping and noise were those that ε was computed for",
    "accountant": "the method that adds up the cost of all releases: PLD is tight, RDP checks it",
    "release": "one noisy sum that training has used; the ledger has one line for each",
    "ledger": "a chain of lines in which every change shows, except lines cut off at the end",
    "clipping": "the bound C on what one unit adds to a sum",
    "false alarm": "somebody who was not in the data and is taken for a member",
}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What only the owner of a run knows; an empty text is shown as empty.

    Attributes:
        owner: who answers for the model.
        purpose: what it is for.
        data_subjects: whose data it was trained on.
        contact: whom to ask.

    Raises:
        ValueError: a value that is no line of visible text, or longer than 200 characters.
    """

    owner: str = ""
    purpose: str = ""
    data_subjects: str = ""
    contact: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, str) or not all(map(is_visible, value)):
                raise ValueError(f"{name} of a card must be one line of text, got {value!r:.60}")
            if len(value) > _MOST_CHARACTERS:
                raise ValueError(
                    f"{name} of a card has {len(value)} characters; shorten it to"
                    f" {_MOST_CHARACTERS}"
                )


def explain_guarantee(
    event: dp_accounting.DpEvent | None,
    count: int,
    epsilon: float,
    delta: float,
    relation: str,
    *,
    independent: bool = True,
) -> dict[str, Any]:
    """Return what ε means: attack rates, and ε for several units, as plain values.

    Args:
        event: of one release; None where the releases differ.
        count: releases.
        epsilon: ε of all of them.
        delta: δ.
        relation: "add_or_remove_one" or "replace_one".
        independent: units are sampled independently of each other.
    """
    rates = attack_rates(event, count, epsilon, delta, relation)
    groups: dict[str, dict[str, float | str]] = {}
    for size in GROUPS if event is not None else ():
        value, by = group_epsilon(event, count, delta, size, relation, independent=independent)
        groups[str(size)] = {"epsilon": value if math.isfinite(value) else "inf", "by": by}
    return {
        "right_at_even_odds": rates.right,
        "found_at_1_percent_false_alarms": rates.found,
        "rates_by": rates.by,
        "groups": groups,
    }


# -- the page --------------------------------------------------------------------------------------


def first_page(card: Mapping[str, Any], statement: str, failed: Sequence[str]) -> str:
    """Return the first page in Markdown, 40 lines at most.

    Args:
        card: of any host; an older one may lack sections.
        statement: the promise in a sentence, or why there is none.
        failed: names of the checks of an audit that failed.
    """
    parts = [f"# Privacy card: {card['title']}", statement, _particulars(card)]
    if not failed:
        parts.append("\n".join(["## What is protected, and what is not", "", *_scope(card)]))
        parts.append("\n".join(["## What ε means", "", *_meaning_lines(card)]))
    parts.append("\n".join(["## How it was checked", "", *_check_lines(card, failed)]))
    parts.append("Signed (name, date): ______________________________")
    return "\n\n".join(parts)


def meaning_text(card: Mapping[str, Any]) -> str:
    """Return what ε means in plain sentences."""
    return " ".join(line.removeprefix("- ") for line in _meaning_lines(card)).replace("**", "")


def glossary_rows() -> list[tuple[str, str]]:
    """Return the terms of a card with their meaning."""
    return list(_GLOSSARY.items())


def _particulars(card: Mapping[str, Any]) -> str:
    declared, dates = card.get("declared") or {}, card.get("dates") or {}
    rows = [(label, declared.get(name)) for name, label in _FIELDS.items()]
    rows.append(("Training began", _date(dates.get("begun"))))
    rows.append(("Training had ended", _date(dates.get("ended"))))
    lines = ["| | |", "| --- | --- |"]
    lines += [f"| {label} | {_cell(value) or _EMPTY} |" for label, value in rows]
    return "\n".join(lines)


def _date(value: Any) -> str:
    """Return a time stamp of the ledger as a reader writes it, to the minute."""
    text = str(value or "").replace("T", " ")
    return f"{text[:16]} UTC" if text.endswith("+00:00") else text


def _cell(value: Any) -> str:
    return plain(value or "", _MOST_CHARACTERS).replace("|", "\\|")


def _noun(card: Mapping[str, Any]) -> str:
    """Return the unit in a word: "example", "patient", "client"."""
    differ = str(card["guarantee"]["neighbours_differ_in"]).removeprefix("one ")
    return differ.removesuffix(" added or removed").removesuffix(" replaced by another")


def _scope(card: Mapping[str, Any]) -> list[str]:
    noun, count = _noun(card), len(card["not_private"])
    settings = card.get("hyper_parameters") or card
    covered = f"- **Protected:** each {noun}, against everyone who sees the released weights."
    if noun in ("example", "record"):
        covered += " A person with several of them is protected less, as said below."
    if not _is_promised(card):
        covered = "- **Protected:** nothing, since there is no certified guarantee."
    return [
        covered,
        "- **Not protected:** what holds for the whole group, with or without one person; the"
        " training data themselves, where they are stored.",
        f"- **Taken as public:** {_list_names(card['assumed_public'])}, and the weights that"
        " training began with.",
        f"- **Outside ε:** figures computed from data without noise, {count} of them named in"
        " annex 1.",
        f"- **Choice of settings:** {_cell(settings.get('chosen_by')) or _EMPTY}.",
    ]


def _list_names(names: Mapping[str, Any]) -> str:
    shown = [_cell(name) for name in list(names)[:3]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more (annex 1)" if more else "")


def _is_promised(card: Mapping[str, Any]) -> bool:
    certified = card["guarantee"].get("certified") is True
    return certified and number(card["guarantee"].get("epsilon")) is not None


def _meaning_lines(card: Mapping[str, Any]) -> list[str]:
    meaning = card.get("meaning")
    if not _is_promised(card) or not meaning:
        return [
            "- Nothing can be said: the card states no certified ε, or an older version made it."
        ]
    noun = _noun(card)
    right, found = meaning["right_at_even_odds"], meaning["found_at_1_percent_false_alarms"]
    return [
        f"- An attacker who starts at even odds whether one {noun} was in the data is right at"
        f" most **{_percent(right)}** of the time. Guessing gives 50 %.",
        f"- At 1 % false alarms at most **{_percent(found)}** of members are found. Guessing"
        " gives 1 %.",
        f"- Both hold for every attack, whatever the attacker knows. They follow from"
        f" {_cell(meaning['rates_by'])}.",
        "- δ is the probability up to which ε may fail: 1 in"
        f" {1 / card['guarantee']['delta']:,.0f}.",
        f"- {_group_text(noun, meaning['groups'])}",
        f"- {_total_text(card.get('total'))}",
    ]


def _percent(share: float) -> str:
    """Return a bound as a percentage, rounded up."""
    return f"{rounded_up(100 * min(1.0, share), 1)} %"


def _group_text(noun: str, groups: Mapping[str, Any]) -> str:
    if not groups:
        return "ε for several records of one person is not known."
    values, ways = [], {entry["by"] for entry in groups.values()}
    for size, entry in groups.items():
        epsilon = number(entry["epsilon"])
        known = epsilon is not None and epsilon <= _LARGE
        text = f"at most {rounded_up(epsilon or 0.0, 2)}" if known else "too large to mean anything"
        values.append(f"{text} for {size}")
    who = (
        f"One person with several {noun}s" if noun in ("example", "record") else f"Several {noun}s"
    )
    way = "from the mechanism itself" if ways == {"exact"} else "by the general bound for groups"
    return f"**{who}:** ε is {', '.join(values)} ({way}, same δ)."


def _total_text(total: Mapping[str, Any] | None) -> str:
    if not total:
        return (
            "**Total over several runs:** not stated. Every further release from the same data"
            " adds to ε."
        )
    names = _cell(", ".join(map(str, total["runs"])))
    spent = f"ε = {rounded_up(float(total['epsilon']), 4)}, δ = {float(total['delta']):g}"
    return f"**Total over several runs:** {spent} for {names}."


def _check_lines(card: Mapping[str, Any], failed: Sequence[str]) -> list[str]:
    promise, accounts = card["guarantee"], card.get("accounting") or {}
    epsilon_by = accounts.get("epsilon_by") or promise.get("epsilon_by") or {}
    used = str(accounts.get("accountant", "pld"))
    others = [name for name, value in epsilon_by.items() if value is not None and name != used]
    checked = f" and checked by {' and '.join(others).upper()}" if others else ""
    certified = "yes" if promise.get("certified") is True else "NO"
    mechanism, settings = card["mechanism"], card.get("hyper_parameters") or {}
    lines = [f"- **Certified:** {certified}. ε was computed by {used.upper()}{checked}."]
    if noise := mechanism.get("noise_generator"):
        lines.append(f"- **Noise:** {_cell(noise)}.")
    if gradients := settings.get("gradients"):
        lines.append(
            f"- **Influence of each {_noun(card)}:** bounded before noise was added;"
            f" {_cell(gradients)}."
        )
    lines.append(f"- **Audit:** {_audit_text(card.get('audit'), failed)}")
    weights = card.get("weights") or {}
    if weights.get("sha256"):
        lines.append(f"- **Weights:** {_cell(weights.get('file'))}, SHA-256 {weights['sha256']}.")
    return lines


def _audit_text(audit: Mapping[str, Any] | None, failed: Sequence[str]) -> str:
    if not audit:
        return "none was made."
    if failed:
        return f"FAILED: {', '.join(failed)}."
    return "no check failed (annex 3). That does not prove the guarantee."
