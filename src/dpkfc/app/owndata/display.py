"""What a terminal shows of own data: the public schema, and private shares for the owner."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.image_files import ABSENT, BROKEN, CLAMPED, COPIED, DEEP_COLOURS, REPEATED
from dpkfc.app.owndata.image_labels import BETTER_COLUMN
from dpkfc.app.owndata.records import Figures
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.targets import LIKE_A_CLASS, ONE_CLASS
from dpkfc.app.toml import shorten

# Name, kind, bounds and an example of a column.
ColumnRow = tuple[str, str, str, str]

# --------------------------------------------------------------------------------------------------
# The schema, before ε is spent. Nothing here depends on a record.


def describe_columns(schema: Schema, form: str) -> tuple[ColumnRow, ...]:
    """Return a row for the target, and one for each input. Examples are of the schema.

    Args:
        schema: public.
        form: of the data: "own-table", "own-images" or "own-text".
    """
    target = f"{schema.target or 'the folder'} (target)"
    rows = [(target, "class", shorten(schema.classes, 60), _first(schema.classes))]
    if schema.target_bounds:
        rows = [(target, "number", _interval(schema.target_bounds), _middle(schema.target_bounds))]
    if form == "own-images":
        image = schema.images
        size = f"{image.size} × {image.size} × {image.channels}"
        rows.append(("image", "image", f"{size}, white {image.white} of 16 bits", "a PNG file"))
    elif form == "own-text":
        text = schema.text
        size = f"{text.length} tokens" if text.encoder == "sentences" else f"{text.buckets} buckets"
        rows.append((text.key, "text", f"{text.encoder}, {size}", "pain at night"))
    else:
        rows += [(name, *_describe(column)) for name, column in schema.columns.items()]
    if schema.unit and schema.unit not in schema.columns:
        rows.append((schema.unit, "unit", "", ""))
    return tuple(rows)


def _describe(column: Column) -> tuple[str, str, str]:
    """Return kind, bounds and an example of a column."""
    if column.is_open:
        return column.kind, "found by a private release", ""
    if column.bounds and column.kind_value.wanted_bounds:
        example = _middle(column.bounds)
        if column.reads_numbers:
            example = example.replace(".", column.decimal or ".")
        if column.measured_in:
            example = f"{example} {column.measured_in}"
        return column.kind, _interval(column.bounds), example
    if column.categories:
        return column.kind, shorten(column.categories, 60), _first(column.categories)
    sizes = f"{column.buckets} buckets" if column.buckets else ""
    return column.kind, sizes, column.kind_value.example


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


def _interval(bounds: Sequence[float | str]) -> str:
    """Return pairs of bounds as a text."""
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return "; ".join(f"{_plain(least)} to {_plain(greatest)}" for least, greatest in pairs)


def _middle(bounds: Sequence[float | str]) -> str:
    """Return a value inside of each pair of bounds."""
    values = []
    for least, greatest in zip(bounds[::2], bounds[1::2], strict=True):
        if isinstance(least, str) or isinstance(greatest, str):
            values.append(str(least))
        else:
            values.append(_plain(round(least + (greatest - least) / 2, 3)))
    return "/".join(values)


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


# Columns that a table shows.
_MOST_ROWS = 30


def schema_table(rows: Sequence[ColumnRow]) -> Table:
    """Return a table of the schema, one line a column; of many columns the first ones."""
    table = _one_line_table("column", "kind", "bounds", "example of the schema")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*map(Text, row))
    if len(rows) > _MOST_ROWS:
        table.add_row(f"{len(rows) - _MOST_ROWS:,} more columns")
    return table


def _one_line_table(name: str, *columns: str) -> Table:
    """Return a table whose long names are cut, so that each row is one line."""
    table = Table(header_style="bold")
    table.add_column(name, no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis", min_width=10)
    return table


# --------------------------------------------------------------------------------------------------
# Shares of a file, for its owner alone. ε does not protect them, so each block is marked.

MARK = "PRIVATE, for you alone"
# What is counted for columns, as the headings of a table.
_OF_COLUMNS = {
    "outside of bounds": "clamped",
    "missing": "missing",
    "not of the column's kind": "unread",
    "of no known category": "unknown",
}
_WITHOUT_TARGET = "without a known target"
# Shares of records or of a column from which the owner is warned.
_MANY_RECORDS = 0.1
_MANY_VALUES = {"clamped": 0.5, "missing": 0.99, "unread": 0.1, "unknown": 0.99}
_AMOUNTS = {0.1: "many values are", 0.5: "most values are", 0.99: "nearly every value is"}
# Columns that a warning names.
_MOST_NAMES = 5


def print_shares(console: Console, figures: Figures) -> None:
    """Print the shares of a file that were clamped, missing or unknown, marked PRIVATE.

    Args:
        console: of the owner.
        figures: shares by what is counted and the column.
    """
    columns: dict[str, dict[str, float]] = {}
    lines = []
    for (what, name), share in figures.items():
        if what in _OF_COLUMNS:
            columns.setdefault(name, {})[what] = share
        else:
            is_none = what == _WITHOUT_TARGET and not share
            has_files = what == _WITHOUT_TARGET and (BROKEN, "files") in figures
            counted = f"{what} or a readable file" if has_files else what
            shown = f"none of the {name}" if is_none else f"{name} {share:.1%}"
            lines.append(f"{counted}: {shown}")
    if not figures:
        return
    console.print(Text(f"{MARK}; ε does not protect these shares of the file", style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if columns:
        table = _one_line_table("column", *_OF_COLUMNS.values())
        greatest = sorted(columns, key=lambda name: -max(columns[name].values()))[:_MOST_ROWS]
        for name in [name for name in columns if name in greatest]:
            shares = columns[name]
            cells = [f"{shares[what]:.1%}" if what in shares else "–" for what in _OF_COLUMNS]
            table.add_row(Text(name), *cells)
        if len(columns) > _MOST_ROWS:
            table.add_row(f"{len(columns) - _MOST_ROWS:,} more, no share above these")
        console.print(table)
    warnings = _warnings(figures)
    if warnings:
        console.print()
        for warning in warnings:
            console.print(Text(f"{MARK}: {warning}", style="bold"), soft_wrap=True)


def _warnings(figures: Figures) -> list[str]:
    """Return what the owner has to look at before ε is spent."""
    found = []
    unknown = figures.get((_WITHOUT_TARGET, "records"), 0.0)
    if unknown >= _MANY_RECORDS:
        found.append(
            f"{unknown:.1%} of the records have no known target. They count as records and"
            " contribute nothing to the model; compare target and classes with the file."
        )
    for (what, name), share in figures.items():
        advice = _ADVICE.get(what)
        if advice and share >= _MANY_RECORDS:
            found.append(f"{what}: {name} {share:.1%}; {advice}")
    for what, heading in _OF_COLUMNS.items():
        least = _MANY_VALUES[heading]
        names = [
            f"{name} ({share:.1%})"
            for (kind, name), share in figures.items()
            if kind == what and share >= least
        ]
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            listed = ", ".join(names[:_MOST_NAMES])
            found.append(f"{_AMOUNTS[least]} {heading} in {listed}{more}: {_LOOK[what]}")
    return found


_LOOK = {
    "outside of bounds": "compare bounds with the unit of the column",
    "missing": "compare missing with the file",
    "not of the column's kind": "compare kind, format, decimal, thousands, signs, measured_in and"
    " missing with the file",
    "of no known category": "compare categories with the file",
}
_ADVICE = {
    "unreadable": "compare delimiter and encoding with the file; set lines_in_cells where a quoted"
    " cell has line breaks, row_names where R wrote names of rows, row_ends where rows"
    " end with a delimiter more, quotes and escapes where backslashes stand before signs; a"
    " line of JSON lines is an object",
    "empty": "compare key under [text] with the file",
    "without a unit": "each of them counts as a person of its own; compare the unit with the file",
    LIKE_A_CLASS: "write classes as the file has them",
    ONE_CLASS: "a model of them knows no other class; compare classes with the file",
    BETTER_COLUMN: "set file under [images] to this column",
    ABSENT: "compare --data and file under [images] with the names in the label file, in upper and"
    " lower case",
    BROKEN: "open one of them in a viewer, or convert them",
    DEEP_COLOURS: "convert them to 8 bits a channel, or to grey",
    CLAMPED: "compare white under [images] with the device",
    COPIED: "a copy is a second example of one person; remove copies, or name a unit",
    REPEATED: "an image counts once for each row; name a unit, or keep one row an image",
}
