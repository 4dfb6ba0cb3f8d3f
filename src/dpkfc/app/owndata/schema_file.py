"""Write a schema as TOML: the one that a run used, and an empty one for a person to fill in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dpkfc.app.owndata.cells import MISSING
from dpkfc.app.owndata.kinds import KINDS
from dpkfc.app.owndata.names import is_free_text, is_identifier
from dpkfc.app.owndata.schema import Schema


def schema_toml(schema: Schema, title: str) -> str:
    """Return a schema as TOML, without keys that have their defaults, for a run folder.

    Args:
        schema: of the run.
        title: one line about the file, without anything of its rows.
    """
    import tomli_w

    table = _plain_table(schema)
    columns = {}
    for name, column in schema.columns.items():
        columns[name] = _plain_table(column)
        for key in ("missing", "decimal", "thousands"):
            if getattr(column, key) == getattr(schema, key):
                columns[name].pop(key, None)
    table["columns"] = columns
    return f"# {title}\n{tomli_w.dumps(table)}"


def _plain_table(value: Any) -> dict[str, Any]:
    """Return the values that are not the defaults of a dataclass."""
    table: dict[str, Any] = {}
    for entry in dataclasses.fields(value):
        inner = getattr(value, entry.name)
        if inner == entry.default:
            continue
        if dataclasses.is_dataclass(inner):
            table[entry.name] = _plain_table(inner)
        else:
            table[entry.name] = list(inner) if isinstance(inner, tuple) else inner
    return table


# Of a column whose kind neither name nor type tell.
_OPEN_HINT = f"""\
kind = ""          # {" | ".join(KINDS)}
# bounds = []      # of a number: least and greatest; of a date, with format = "%d.%m.%Y"
# categories = []  # of a category; or buckets = 32"""


def template(
    columns: Mapping[str, str],
    target: str,
    delimiter: str = ",",
    sections: str = "",
    unusable: Sequence[str] = (),
    labels: Mapping[str, Mapping[str, str]] | None = None,
    encoding: str = "utf-8",
    is_proposed: bool = False,
    sheet: str = "",
) -> str:
    """Return a schema to fill in, made from names and types alone.

    Args:
        columns: the kind of each column where its type tells, else an empty text.
        target: column that is learned.
        delimiter: of a CSV file.
        sections: further TOML, for images and texts.
        unusable: what is left out of the columns, such as a name that stands twice.
        labels: what a statistics package shows for codes, by column.
        encoding: of a CSV file.
        is_proposed: whether no line of the file names the columns.
        sheet: of a spreadsheet; empty for the first.
    """
    import tomli_w

    first = {"target": target, "classes": []}
    lines = [
        "# What is public about the data. Fill it in from what you know without looking at rows.",
        *tomli_w.dumps(first).splitlines(),
        "# classes: all values of the target, such as ['no', 'yes']. Of a number give instead:",
        "# target_bounds = []  # least and greatest",
        f"missing = {json.dumps(MISSING)}",
    ]
    if encoding != "utf-8":
        lines.append(f'encoding = "{encoding}"  # since the header is not UTF-8')
    if sheet:
        lines.append(tomli_w.dumps({"sheet": sheet}).strip())
    if is_proposed:
        lines.append("# The first line does not look like names. Give better ones in their places:")
        lines.append(f"header = false\nnames = {json.dumps(list(columns))}")
    if delimiter != ",":
        lines.append(f"delimiter = {json.dumps(delimiter)}")  # a terminal may show a tab as blanks
        lines.append('decimal = "."      # or ",", where numbers are written 3,5')
        lines.append('# thousands = "."  # beside decimal = ",", where 1.234 is above a thousand')
    people = [name for name in columns if is_identifier(name) and name != target]
    if people:
        names = ", ".join(map(repr, people))
        lines.append(f"# Left out, since named like a person's: {names}")
        lines.append("# To keep one, set its kind and identifier = false.")
    if unusable:
        lines.append(f"# Left out, since a schema cannot name it: {', '.join(unusable)}")
    for name, kind in columns.items():
        if name == target:
            continue
        hint = kind
        if is_identifier(name):
            hint = "ignore"
        elif is_free_text(name):
            hint = "text"
        head, *_ = tomli_w.dumps({"columns": {name: {"kind": ""}}}).splitlines()
        shown = (labels or {}).get(name)
        if shown and hint == "number":
            names = ", ".join(f"{code} = {label}" for code, label in shown.items())
            codes = json.dumps(list(shown), ensure_ascii=False)
            text = f'kind = "category"  # {" ".join(names.split())}\ncategories = {codes}'
            lines += ["", head, f"{text}\nnumeric = true"]
            continue
        lines += ["", head, KINDS[hint].hint if hint else _OPEN_HINT]
    return "\n".join([*lines, sections]).rstrip() + "\n"
