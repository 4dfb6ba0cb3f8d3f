"""Write a privacy card for readers: what ε means, and the texts that templates make of a card."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpkfc.privacy.attack_rates import attack_rates
from dpkfc.privacy.group_epsilon import group_epsilon
from dpkfc.report.text import is_visible, json_number, number, plain, round_up

if TYPE_CHECKING:
    import dp_accounting
    from jinja2 import Environment

# Sizes of the groups whose ε a card states.
GROUPS = (2, 5, 10)
_MOST_CHARACTERS = 200
# How a field of the registry begins that only the owner can fill in.
MISSING = "to be filled in: "


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What only the owner of a run knows; an empty text is shown as empty.

    Attributes:
        owner: who answers for the model.
        purpose: what it is for.
        data_subjects: whose data it was trained on.
        contact: whom to ask.
        region: whose law applies, or what region the data describe.

    Raises:
        ValueError: a value that is not a line of visible text, or longer than 200 characters.
    """

    owner: str = ""
    purpose: str = ""
    data_subjects: str = ""
    contact: str = ""
    region: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_line(name, value)


def check_line(name: str, value: Any) -> None:
    """Refuse a field of a card that is not one short line of visible text.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(value, str) or not all(map(is_visible, value)):
        raise ValueError(f"{name} of a card must be one line of text, got {value!r:.60}")
    if len(value) > _MOST_CHARACTERS:
        raise ValueError(
            f"{name} of a card has {len(value)} characters; shorten it to {_MOST_CHARACTERS}"
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
        groups[str(size)] = {"epsilon": json_number(value), "by": by}
    return {
        "right_at_even_odds": rates.right,
        "found_at_1_percent_false_alarms": rates.found,
        "rates_by": rates.by,
        "groups": groups,
    }


# -- texts -----------------------------------------------------------------------------------------


def render(template: str, card: Mapping[str, Any], **values: Any) -> str:
    """Return a card as the text of a template.

    Args:
        template: its name.
        card: of any host.
        values: what else the template needs.

    Raises:
        KeyError: the card lacks something that the template needs.
    """
    from jinja2 import UndefinedError

    try:
        text = (
            _templates()
            .get_template(template)
            .render(card=card, is_promised=is_promised(card), **values)
        )
    except UndefinedError as error:
        raise KeyError(error.message) from None
    # Parts that are left out leave empty lines behind.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def meaning_lines(card: Mapping[str, Any]) -> list[str]:
    """Return what ε means in plain sentences."""
    lines = render("meaning.md", card).replace("**", "").splitlines()
    return [line.removeprefix("- ") for line in lines]


def registry_record(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a card for the public registry: a draft that says what is missing.

    Args:
        card: of a session or of a federated run, with all sections of this version.

    Raises:
        KeyError: the card lacks something that the record needs.
    """
    record: dict[str, Any] = json.loads(
        render("registry.json", card, meaning=" ".join(meaning_lines(card)))
    )
    deployment = record["deployment"]
    flags = [
        _fill_in(deployment["basic"], "data_curators", "owner"),
        _fill_in(deployment["basic"], "intended_use", "purpose"),
        _fill_in(deployment["basic"], "data_product_region", "region"),
        _fill_in(deployment["administrative"], "registry_authors", "contact"),
    ]
    if missing := " ".join(filter(None, flags)):
        notes = deployment["administrative"]["notes"]
        deployment["administrative"]["notes"] = f"{MISSING}dpkfc card RUN {missing}; {notes}"
    for name, section in deployment.items():
        deployment[name] = {key: value for key, value in section.items() if value != ""}
    return record


def _fill_in(section: dict[str, Any], key: str, field: str) -> str:
    """Put a reminder where the owner of a run has said nothing, and return the flag to give."""
    if section[key] not in ("", [""]):
        return ""
    reminder = f"{MISSING}dpkfc card RUN --{field} TEXT"
    section[key] = [reminder] if isinstance(section[key], list) else reminder
    return f"--{field} TEXT"


def show_name(name: str) -> str:
    """Return the name of a setting in words."""
    return name.replace("_", " ")


def is_promised(card: Mapping[str, Any]) -> bool:
    """Return whether a card states a certified and finite ε."""
    certified = card["guarantee"].get("certified") is True
    return certified and number(card["guarantee"].get("epsilon")) is not None


def _date(value: Any) -> str:
    """Return a time stamp of the ledger as a reader writes it, to the minute."""
    text = str(value or "").replace("T", " ")
    return f"{text[:16]} UTC" if text.endswith("+00:00") else text


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _line(value: Any) -> str:
    """Return a text that nobody has checked as one short line."""
    return _cell(plain(value or "", _MOST_CHARACTERS))


def describe_noun(card: Mapping[str, Any]) -> str:
    """Return the unit in a word: "example", "patient", "client"."""
    differ = str(card["guarantee"]["neighbours_differ_in"]).removeprefix("one ")
    return differ.removesuffix(" added or removed").removesuffix(" replaced by another")


def _percent(share: float) -> str:
    """Return a bound as a percentage, rounded up."""
    return f"{round_up(100 * min(1.0, share), 1)} %"


def _epsilon(value: float | str | None) -> str:
    """Render ε with four decimals, rounded up: a printed ε is never below the true one."""
    return round_up(value, 4) if isinstance(value, (int, float)) else _show(value)


def _general(value: float) -> str:
    return f"{float(value):g}"


def _describe(value: Any) -> str:
    """Render a setting, the description of a step, or a list of descriptions."""
    if isinstance(value, list):
        return "; ".join(map(_describe, value))
    if not isinstance(value, Mapping):
        return _show(value)
    options = ", ".join(f"{key} {_show(item)}" for key, item in value.items() if key != "name")
    name = value.get("name", "")
    if name and options:
        return f"{name} ({options})"
    return name or options or "none"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(item) for item in value)
    return str(value)


def _reasons(public: Mapping[str, Any]) -> dict[str, str]:
    """Return what is taken as public, with the reason."""
    reasons = {}
    for name, entry in public.items():
        reasons[name] = entry["why"] if isinstance(entry, Mapping) else entry
    return reasons


def _join(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def _slug(title: Any) -> str:
    return re.sub(r"[^a-z0-9]+", "-", str(title).lower()).strip("-")


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("dpkfc.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "cell": _cell,
        "date": _date,
        "describe": _describe,
        "epsilon": _epsilon,
        "general": _general,
        "joined": _join,
        "label": show_name,
        "line": _line,
        "noun": describe_noun,
        "number": number,
        "percent": _percent,
        "reasons": _reasons,
        "rounded_up": round_up,
        "show": _show,
        "slug": _slug,
    }
    return found
