"""Tables of a user's files as columns of texts: who splits a file into records.

What a text means is for `cells` and the schema. A text depends on its own record and on what is
public: the schema, the header, and the types of stored columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.compute as pa_compute

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata import stored
from dpkfc.app.owndata.csv_blocks import read_blocks
from dpkfc.app.owndata.csv_columns import Splitter
from dpkfc.app.owndata.csv_heading import read_heading
from dpkfc.app.owndata.decoding import Texts, list_texts
from dpkfc.app.owndata.headers import Header, look_like_names, no_names_error
from dpkfc.app.owndata.json_lines import id_of, parse_line, read_lines, text_of, value_at
from dpkfc.app.owndata.packages import (
    DATE_FORMATS,
    SPREADSHEETS,
    STATISTICS,
    describe,
    package_of,
    read_columns,
)
from dpkfc.app.owndata.records import Figures
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.table_files import (
    DELIMITED,
    TEXT_SUFFIXES,
    check_table,
    open_file,
    suffix_of,
)


@dataclass(frozen=True)
class Cells:
    """A column as texts.

    Attributes:
        texts: None where a value is missing or has no form as text `[N]`.
        stored: "text", "number", "flag" or "date", as its type says; texts of a CSV file.
    """

    texts: Texts
    stored: str = "text"


@dataclass(frozen=True)
class Table:
    """Columns of a file, or of a part of one.

    Attributes:
        columns: by name, those that were asked for.
        rows: number of records.
        unreadable: how many of them have no form; None for a file without such records. PRIVATE.
    """

    columns: Mapping[str, Cells]
    rows: int
    unreadable: int | None = None

    @property
    def figures(self) -> Figures:
        """Share of records without a form. PRIVATE."""
        if self.unreadable is None:
            return {}
        return {("unreadable", "rows"): self.unreadable / max(1, self.rows)}

    def split(self, most: int) -> Iterator[Table]:
        """Yield the table in pieces of at most so many rows."""
        for start in range(0, self.rows, most):
            columns = {
                name: Cells(cells.texts[start : start + most], cells.stored)
                for name, cells in self.columns.items()
            }
            yield Table(columns, min(most, self.rows - start))


def read_table(path: Path, names: Sequence[str], schema: Schema) -> Table:
    """Return these columns of a file at once, as `read_parts` yields them."""
    parts = list(read_parts(path, names, schema))
    columns = {}
    for name in names:
        kinds = {part.columns[name].stored for part in parts if part.rows}
        texts = [text for part in parts for text in list_texts(part.columns[name].texts)]
        columns[name] = Cells(texts, kinds.pop() if len(kinds) == 1 else "text")
    counts = [part.unreadable for part in parts if part.unreadable is not None]
    rows = sum(part.rows for part in parts)
    return Table(columns, rows, sum(counts) if counts else None)


def read_parts(
    path: Path,
    names: Sequence[str],
    schema: Schema,
    optional: Collection[str] = (),
    file: IO[bytes] | None = None,
    only: Collection[Path] = (),
) -> Iterator[Table]:
    """Yield these columns of a file, a part at a time.

    An unparsable row of a CSV file counts as all-missing: what rows hold must not decide whether a
    run begins, so even a fully unparsable file does not stop it.

    Args:
        path: of a table, a folder of Parquet parts, or JSON lines.
        names: of columns.
        schema: public.
        optional: columns among them that the file may lack.
        file: the open file, where it is open already.
        only: the parts of a folder that are read; empty for all.

    Raises:
        DatasetError: a column is missing, has a type that cannot be read, or the file is damaged.
            No message repeats a row.
    """
    if suffix_of(path) not in TEXT_SUFFIXES:
        check_table(path)
    if path.is_dir():
        for part, folders in stored.list_parts(path).items():
            if only and part not in only:
                continue
            with open_file(part) as opened:
                yield from _stored_parts(part, opened, names, schema, optional, folders)
    elif suffix_of(path) in (*SPREADSHEETS, *STATISTICS):
        with open_file(path):
            yield _read_of_package(path, names, schema, optional)
    elif file is None:
        with open_file(path) as opened:
            yield from read_parts(path, names, schema, optional, opened)
    elif suffix_of(path) in TEXT_SUFFIXES:
        yield from _json_parts(file, names, schema)
    elif suffix_of(path) in DELIMITED:
        yield from _delimited_parts(path, file, names, schema, optional)
    else:
        yield from _stored_parts(path, file, names, schema, optional, {})


def _json_parts(file: IO[bytes], names: Sequence[str], schema: Schema) -> Iterator[Table]:
    """Yield values of JSON lines as texts. A key that a line lacks is a missing value."""
    for lines in read_lines(file, schema.encoding):
        entries = [parse_line(line) for _, line in lines]
        columns = {}
        for name in names:
            values = [value_at(entry, name) for entry in entries]
            sign = stated_decimal(schema, name)
            write = id_of if name == schema.unit else partial(text_of, decimal=sign)
            columns[name] = Cells([write(value) for value in values])
        yield Table(columns, len(entries), entries.count({}))


def _select_names(names: Sequence[str], header: Header, optional: Collection[str]) -> list[str]:
    return [name for name in names if name in header.names or name not in optional]


def _check_names(path: Path, header: Header, names: Sequence[str], schema: Schema) -> None:
    """Refuse names that a file lacks. Where its first line is a record, no cell is repeated."""
    is_missing = any(name not in header.names for name in names)
    if is_missing and schema.header and not look_like_names(header.names):
        raise no_names_error(path)
    header.check(path, names)


def _delimited_parts(
    path: Path, file: IO[bytes], names: Sequence[str], schema: Schema, optional: Collection[str]
) -> Iterator[Table]:
    """Yield columns of a CSV file as texts, so that no type follows from the rows."""
    blocks = read_blocks(path, file, schema.encoding)
    block = next(blocks, b"")
    heading = read_heading(path, block, schema)
    header = Header(heading.names, {}, heading.delimiter)
    names = _select_names(names, header, optional)
    _check_names(path, header, names, schema)
    for _ in range(heading.lines):
        _, _, block = block.partition(heading.end.encode())
    splitter = Splitter(heading, names, schema.lines_in_cells)
    for columns, rows, unreadable in splitter.parts(chain([block], blocks)):
        yield Table({name: Cells(texts) for name, texts in columns.items()}, rows, unreadable)


def _stored_parts(
    path: Path,
    file: IO[bytes],
    names: Sequence[str],
    schema: Schema,
    optional: Collection[str],
    folders: Mapping[str, str | None],
) -> Iterator[Table]:
    """Yield columns of Parquet or Feather, and of what the names of folders say."""
    columns = stored.read_schema(path, file)
    header = Header([*columns.names, *(folders.keys() - set(columns.names))], {})
    names = _select_names(names, header, optional)
    header.check(path, names)
    inside = [name for name in names if name in columns.names]
    kinds = {name: stored.name_kind(columns.field(name).type) for name in inside}
    signs = {name: stated_decimal(schema, name) for name in inside if kinds[name] == "number"}
    for texts, rows in stored.read_batches(path, file, inside, schema.unit):
        for name, sign in signs.items():
            if sign != ".":
                texts[name] = pa_compute.replace_substring(_array(texts[name]), ".", sign)
        cells = {}
        for name in names:
            if name in texts:
                cells[name] = Cells(texts[name], kinds[name])
            else:
                cells[name] = Cells(pa.array([folders[name]] * rows, pa.string()))
        yield Table(cells, rows)


def _array(texts: Texts) -> pa.Array:
    return texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())


# --------------------------------------------------------------------------------------------------
# Spreadsheets and statistics packages.

# Digits that a float holds without loss.
_MOST_DIGITS = 16


def _read_of_package(
    path: Path, names: Sequence[str], schema: Schema, optional: Collection[str]
) -> Table:
    """Read columns of a spreadsheet, or of a file of a statistics package."""
    described = describe(path, schema.sheet, schema.names)
    header = Header(described.names, {})
    names = _select_names(names, header, optional)
    _check_names(path, header, names, schema)
    for name in names:
        shown = described.formats.get(name, "")
        width = re.search(r"\d+", shown)
        is_number = described.stored[name] == "number"
        if name == schema.unit and is_number and width and int(width[0]) > _MOST_DIGITS:
            raise DatasetError(
                f"{path}: ids of {name!r} are numbers of up to {width[0]} digits, whose last ones"
                " are lost; store them as text"
            )
        column = schema.columns.get(name)
        if column and column.kind == "date" and is_number and not column.format:
            known = ", ".join(DATE_FORMATS[package_of(path)])
            raise DatasetError(
                f"{path}: {name!r} is a number of format {shown!r}, which is not a date; known:"
                f" {known}; set kind = 'number', or format = '%Y%m%d'"
            )
    decimals = {name: stated_decimal(schema, name) for name in names}
    columns, rows, unreadable = read_columns(path, names, decimals, schema)
    return Table(
        {name: Cells(texts, described.stored[name]) for name, texts in columns.items()},
        rows,
        unreadable or None,
    )


def stated_decimal(schema: Schema, name: str) -> str:
    """Return the sign before a fraction that a schema states for numbers of a column."""
    if name in schema.columns and schema.columns[name].reads_numbers:
        return schema.columns[name].number_form.decimal
    return schema.decimal if schema.target_bounds and name == schema.target else "."
