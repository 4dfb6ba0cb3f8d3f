"""Tables of a user's files as columns of texts: who splits a file into records.

What a text means is for `cells` and the schema. A text depends on its own record and on what is
public: the schema, the header, and the types of stored columns.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.compute as pa_compute

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata import stored
from dpkfc.app.owndata.cells import MISSING, read_number
from dpkfc.app.owndata.csv_blocks import PACKED, read_blocks
from dpkfc.app.owndata.csv_columns import Splitter
from dpkfc.app.owndata.csv_heading import read_heading
from dpkfc.app.owndata.csv_lines import is_unicode
from dpkfc.app.owndata.decoding import Texts
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
from dpkfc.app.toml import nearest, shorten

DELIMITED = (".csv", ".tsv", ".txt", ".data")
STORED = (".parquet", ".feather", ".arrow")
TABLE_SUFFIXES = (*DELIMITED, *STORED, *SPREADSHEETS, *STATISTICS)
TEXT_SUFFIXES = (".jsonl", ".ndjson")


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


@dataclass(frozen=True)
class Header:
    """What names the columns of a file.

    Attributes:
        names: in their order. Unnamed columns have an empty one.
        kinds: of column, where the stored type of a name tells; else an empty text.
        delimiter: of a CSV file.
        labels: what a statistics package shows for codes, by column.
        encoding: of a CSV file.
        is_proposed: whether the names are proposed, since the first line is a record.
    """

    names: Sequence[str]
    kinds: Mapping[str, str]
    delimiter: str = ","
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    encoding: str = "utf-8"
    is_proposed: bool = False

    @property
    def usable(self) -> dict[str, str]:
        """The kinds of the columns that a schema can name."""
        count = Counter(self.names)
        return {name: kind for name, kind in self.kinds.items() if name and count[name] == 1}

    @property
    def unusable(self) -> list[str]:
        """What a schema cannot name, in words."""
        twice = [name for name, count in Counter(self.names).items() if name and count > 1]
        unnamed = ["a column without a name"] if "" in self.names else []
        return [f"{name!r}, which stands twice" for name in twice] + unnamed

    def check(self, path: Path, wanted: Iterable[str]) -> None:
        """Refuse names that the file lacks or has twice.

        Raises:
            DatasetError: naming the file, the name and all columns.
        """
        for name in wanted:
            count = list(self.names).count(name)
            if name and count > 1:
                raise DatasetError(f"{path}: two columns are named {name!r}; rename one")
            if not name or not count:
                known = [*filter(None, self.names)]
                close = nearest(name, known)
                hint = f" ({close})" if close.startswith("did you mean") else ""
                raise DatasetError(
                    f"{path}: has no column {name!r}{hint}; its header has {shorten(known, 2000)};"
                    " check names and delimiter of the schema"
                )


def suffix_of(path: Path) -> str:
    """Return the suffix of a name in lower case, without the suffix of a packed CSV file."""
    name = path.name.lower()
    if name.endswith(PACKED) and Path(name[: -len(PACKED)]).suffix in DELIMITED:
        name = name[: -len(PACKED)]
    return Path(name).suffix


def read_header(
    path: Path,
    schema: Schema | None = None,
    target: str = "",
    sheet: str = "",
    delimiter: str = "",
) -> Header:
    """Return the columns of a file from its header, without a look at a row.

    Args:
        path: of the table, or a folder of Parquet parts.
        schema: states how a CSV file is written; None takes what is usual.
        target: column that is learned, such as c3 of a file whose first line is a record.
        sheet: of a spreadsheet, where no schema names one.
        delimiter: of a CSV file, where no schema names one.

    Raises:
        DatasetError: the file is missing, empty or none of the known formats, or, without a schema,
            its first line does not look like names. No message repeats a cell of such a line.
    """
    check_table(path)
    if path.is_dir():
        part, folders = next(iter(stored.list_parts(path).items()))
        header = read_header(part)
        names = [*header.names, *(name for name in folders if name not in header.names)]
        return Header(names, {**dict.fromkeys(names, ""), **header.kinds})
    if suffix_of(path) in STORED:
        with open_file(path) as file:
            return _stored_header(stored.read_schema(path, file))
    labels: Mapping[str, Mapping[str, str]] = {}
    form = schema or Schema(sheet=sheet, delimiter=delimiter)
    if suffix_of(path) in DELIMITED:
        with open_file(path) as file:
            first = next(read_blocks(path, file, form.encoding), b"")
            if schema is None and not is_unicode(_first_line(first)):
                # Each byte is a sign in Windows' encoding.
                form = Schema(encoding="cp1252", delimiter=delimiter)
                file.seek(0)
                first = next(read_blocks(path, file, form.encoding), b"")
        heading = read_heading(path, first, form)
        names, delimiter = heading.names, heading.delimiter
        kinds = dict.fromkeys(names, "")
    else:
        described = describe(path, form.sheet)
        names, delimiter, labels = [*described.names], ",", described.labels
        kinds = {name: kind.replace("text", "") for name, kind in described.stored.items()}
    if schema is None and not look_like_names(names):
        if suffix_of(path) not in DELIMITED:
            raise DatasetError(_no_names(path))
        proposed = [f"c{number}" for number in range(1, len(names) + 1)]
        if target not in proposed:
            raise DatasetError(
                f"{path}: its first line does not look like names of columns; if it is a record,"
                f" --target {proposed[-1]} makes a schema with header = false and c1, c2, …"
            )
        return Header(
            proposed, dict.fromkeys(proposed, ""), delimiter, {}, form.encoding, is_proposed=True
        )
    if schema is None and len(names) == 1 and suffix_of(path) in DELIMITED:
        signs = Counter(re.findall(r"[^\w\s\"'.-]| ", names[0])).most_common(1)
        sign = signs[0][0] if signs else ";"
        raise DatasetError(
            f"{path}: its header has one column, {names[0]!r:.40}; if it has more, name what stands"
            f" between them: dpkfc schema … --delimiter {sign!r}"
        )
    return Header(names, kinds, delimiter, labels, form.encoding)


def _first_line(block: bytes) -> str:
    return block.partition(b"\n")[0].decode("utf-8", "surrogateescape")


def _stored_header(columns: pa.Schema) -> Header:
    kinds = {column.name: stored.stored_as(column.type).replace("text", "") for column in columns}
    return Header(columns.names, kinds)


def _no_names(path: Path) -> str:
    return (
        f"{path}: its first line does not look like names of columns; if it is a record, write a"
        " schema with header = false and names = [...]"
    )


def check_table(path: Path) -> None:
    """Refuse a file that is missing, or not a table by its name.

    Raises:
        DatasetError: naming the file and the fix.
    """
    if path.is_dir():
        if not stored.list_parts(path):
            raise DatasetError(f"{path}: holds no .parquet file; give a file or a folder of parts")
    elif path.exists() and suffix_of(path) not in TABLE_SUFFIXES:
        raise DatasetError(f"{path}: is not a table by its name; known: {shorten(TABLE_SUFFIXES)}")


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, and refuse one that changes before it is closed.

    Raises:
        DatasetError: the file is missing, not a file, unreadable or empty, or has changed.
    """
    try:
        file = path.open("rb")
        before = os.fstat(file.fileno())
        is_empty = not file.read(1)
        file.seek(0)
    except OSError as error:
        raise unreadable_error(path, error) from None
    with file:
        check_unpacked_size(path, before.st_size)
        if is_empty:
            raise DatasetError(f"{path}: is empty; give a file with records")
        yield file
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise DatasetError(
                f"{path}: has changed while it was read; begin again when nothing writes to it"
            )


def read_table(path: Path, names: Sequence[str], schema: Schema) -> Table:
    """Return these columns of a file at once, as `read_parts` yields them."""
    parts = list(read_parts(path, names, schema))
    columns = {}
    for name in names:
        kinds = {part.columns[name].stored for part in parts if part.rows}
        texts = [text for part in parts for text in _listed(part.columns[name].texts)]
        columns[name] = Cells(texts, kinds.pop() if len(kinds) == 1 else "text")
    counts = [part.unreadable for part in parts if part.unreadable is not None]
    rows = sum(part.rows for part in parts)
    return Table(columns, rows, sum(counts) if counts else None)


def _listed(texts: Texts) -> Sequence[str | None]:
    return texts.to_pylist() if isinstance(texts, pa.Array) else texts


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
    for lines in read_lines(file):
        entries = [parse_line(line) for _, line in lines]
        columns = {}
        for name in names:
            values = [value_at(entry, name) for entry in entries]
            sign = stated_decimal(schema, name)
            write = id_of if name == schema.unit else partial(text_of, decimal=sign)
            columns[name] = Cells([write(value) for value in values])
        yield Table(columns, len(entries), entries.count({}))


def _wanted(names: Sequence[str], header: Header, optional: Collection[str]) -> list[str]:
    return [name for name in names if name in header.names or name not in optional]


def _delimited_parts(
    path: Path, file: IO[bytes], names: Sequence[str], schema: Schema, optional: Collection[str]
) -> Iterator[Table]:
    """Yield columns of a CSV file as texts, so that no type follows from the rows."""
    blocks = read_blocks(path, file, schema.encoding)
    block = next(blocks, b"")
    heading = read_heading(path, block, schema)
    header = Header(heading.names, {}, heading.delimiter)
    names = _wanted(names, header, optional)
    missing = [name for name in names if name not in header.names]
    if missing and schema.header and not look_like_names(header.names):
        raise DatasetError(_no_names(path))
    header.check(path, names)
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
    names = _wanted(names, header, optional)
    header.check(path, names)
    inside = [name for name in names if name in columns.names]
    kinds = {name: stored.stored_as(columns.field(name).type) for name in inside}
    signs = {name: stated_decimal(schema, name) for name in inside if kinds[name] == "number"}
    for texts, rows in stored.read_batches(path, file, inside, schema.unit):
        for name, sign in signs.items():
            if sign != ".":
                texts[name] = pa_compute.replace_substring(_array(texts[name]), ".", sign)
        yield Table(
            {
                name: Cells(texts[name], kinds[name])
                if name in texts
                else Cells(pa.array([folders[name]] * rows, pa.string()))
                for name in names
            },
            rows,
        )


def _array(texts: Texts) -> pa.Array:
    return texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())


# --------------------------------------------------------------------------------------------------
# Whether a first line names columns.

# Values that a record has and a header has not.
_VALUES = frozenset((*map(str.lower, MISSING), "yes", "no", "true", "false", "male", "female"))
_VALUES -= {""}


# Dates, files, addresses and UUIDs.
_VALUE = re.compile(
    r"^\d+[-/.:]\w+[-/.:]\d+|\.(png|jpe?g|tiff?|bmp|dcm)$|@|^[0-9a-f]{8}-[0-9a-f]{4}-"
)


def look_like_names(cells: Sequence[str]) -> bool:
    """Return whether cells may be names of columns: not numbers, dates or values, and different."""
    named = [cell.strip().lower() for cell in cells if cell.strip()]
    for cell in named:
        plain = cell.replace(",", ".").strip("$€£%<>=~ ")
        is_number = read_number(plain) is not None
        has_letter = re.search(r"[^\W\d_]", cell) is not None
        if is_number or not has_letter or cell in _VALUES or _VALUE.search(cell):
            return False
    return len(set(named)) * 2 >= len(named)


# --------------------------------------------------------------------------------------------------
# Spreadsheets and statistics packages.

# Digits that a float holds without loss.
_MOST_DIGITS = 16


def _read_of_package(
    path: Path, names: Sequence[str], schema: Schema, optional: Collection[str]
) -> Table:
    """Read columns of a spreadsheet, or of a file of a statistics package."""
    described = describe(path, schema.sheet)
    header = Header(described.names, {})
    if suffix_of(path) in SPREADSHEETS and not look_like_names(header.names):
        raise DatasetError(_no_names(path))
    names = _wanted(names, header, optional)
    header.check(path, names)
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
        if column and column.kind == "date" and is_number:
            known = ", ".join(DATE_FORMATS[package_of(path)])
            raise DatasetError(
                f"{path}: {name!r} is a number of format {shown!r}, which is not a date; known:"
                f" {known}; set kind = 'number'"
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
        return schema.columns[name].form.decimal
    return schema.decimal if schema.target_bounds and name == schema.target else "."
