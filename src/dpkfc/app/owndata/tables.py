"""Tables of a user's files as columns of texts: who splits a file into records.

What a text means is for `cells` and the schema. A text depends on its own record and on what is
public: the schema, the header, and the types of stored columns.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.feather as pa_feather
import pyarrow.parquet as pa_parquet

from dpkfc.app.datasets.errors import DatasetError, damaged_error, unreadable_error
from dpkfc.app.datasets.unpacking import BoundedStream, check_unpacked_size
from dpkfc.app.owndata.cells import MISSING, number_text, read_number
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
from dpkfc.app.toml import shorten

PACKED = ".gz"
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

    texts: list[str | None]
    stored: str = "text"


@dataclass(frozen=True)
class Table:
    """Columns of a file.

    Attributes:
        columns: by name, those that were asked for.
        rows: number of records.
        figures: share of records without a form. PRIVATE.
    """

    columns: Mapping[str, Cells]
    rows: int
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """What names the columns of a file.

    Attributes:
        names: in their order. Unnamed columns have an empty one.
        kinds: of column, where the stored type of a name tells; else an empty text.
        delimiter: of a CSV file.
        labels: what a statistics package shows for codes, by column.
        encoding: of a CSV file.
    """

    names: Sequence[str]
    kinds: Mapping[str, str]
    delimiter: str = ","
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    encoding: str = "utf-8"

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
                have = shorten(filter(None, self.names), 2000)
                raise DatasetError(
                    f"{path}: has no column {name!r}; its header has {have}; check names and"
                    " delimiter of the schema"
                )


def suffix_of(path: Path) -> str:
    """Return the suffix of a name in lower case, without the suffix of a packed CSV file."""
    name = path.name.lower()
    if name.endswith(PACKED) and Path(name[: -len(PACKED)]).suffix in DELIMITED:
        name = name[: -len(PACKED)]
    return Path(name).suffix


def read_header(path: Path, schema: Schema | None = None) -> Header:
    """Return the columns of a file from its header, without a look at a row.

    Args:
        path: of the table, or a folder of Parquet parts.
        schema: states how a CSV file is written; None takes what is usual.

    Raises:
        DatasetError: the file is missing, empty or none of the known formats, or, without a schema,
            its first line does not look like names. No message repeats a cell of such a line.
    """
    check_table(path)
    if path.is_dir():
        return _header_of_parts(path, list_parts(path))
    if suffix_of(path) in DELIMITED:
        form = schema or Schema()
        text = _read_text(path, form, most=1 << 20)
        if schema is None and not is_unicode(text.partition("\n")[0]):
            # Each byte is a sign in Windows' encoding.
            form = Schema(encoding="cp1252")
            text = _read_text(path, form, most=1 << 20)
        lines = _split_header(path, text, form)
        if schema is None and not look_like_names(lines.names):
            raise DatasetError(_no_names(path))
        kinds = dict.fromkeys(lines.names, "")
        return Header(lines.names, kinds, lines.delimiter, encoding=form.encoding)
    if suffix_of(path) in STORED:
        return _stored_header(_stored_schema(path))
    described = describe(path)
    if schema is None and not look_like_names(described.names):
        raise DatasetError(_no_names(path))
    kinds = {name: kind.replace("text", "") for name, kind in described.stored.items()}
    return Header(described.names, kinds, labels=described.labels)


def _no_names(path: Path) -> str:
    return (
        f"{path}: its first line does not look like names of columns; if it is a record, write a"
        " schema with header = false and names = [...]"
    )


def check_table(path: Path) -> None:
    """Refuse a file that is missing, empty, or not a table by its name.

    Raises:
        DatasetError: naming the file and the fix.
    """
    if path.is_dir():
        if not list_parts(path):
            raise DatasetError(f"{path}: holds no .parquet file; give a file or a folder of parts")
        return
    check_file(path)
    if suffix_of(path) not in TABLE_SUFFIXES:
        raise DatasetError(f"{path}: is not a table by its name; known: {shorten(TABLE_SUFFIXES)}")


def check_file(path: Path) -> None:
    """Refuse a file that is missing, not a file, unreadable or empty.

    Raises:
        DatasetError: naming the file and the fix.
    """
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
        check_unpacked_size(path, path.stat().st_size)
    except OSError as error:
        raise unreadable_error(path, error) from None
    if is_empty:
        raise DatasetError(f"{path}: is empty; give a file with records")


def read_table(path: Path, names: Sequence[str], schema: Schema) -> Table:
    """Read these columns of a file.

    An unparsable row of a CSV file counts as all-missing: what rows hold must not decide whether a
    run begins, so even a fully unparsable file does not stop it.

    Raises:
        DatasetError: a column is missing, has a type that cannot be read, or the file is damaged.
            No message repeats a row.
    """
    check_table(path)
    if not path.is_dir() and suffix_of(path) in DELIMITED:
        return _read_delimited(path, names, schema)
    header = read_header(path, schema)
    if suffix_of(path) in SPREADSHEETS and not look_like_names(header.names):
        raise DatasetError(_no_names(path))
    header.check(path, names)
    if suffix_of(path) in (*SPREADSHEETS, *STATISTICS):
        return _read_of_package(path, names, schema)
    if not path.is_dir():
        return _stored_table(path, names, schema, {})
    parts = [
        _stored_table(part, names, schema, folders) for part, folders in list_parts(path).items()
    ]
    columns = {}
    for name in names:
        stored = {part.columns[name].stored for part in parts if part.rows}
        texts = [text for part in parts for text in part.columns[name].texts]
        # Integers of one part and texts of another are texts.
        columns[name] = Cells(texts, stored.pop() if len(stored) == 1 else "text")
    return Table(columns, sum(part.rows for part in parts))


# --------------------------------------------------------------------------------------------------
# CSV files. A line is a record, whatever it holds.


@dataclass(frozen=True)
class _Lines:
    names: list[str]
    delimiter: str
    lines: list[str]


# Most lines of a header, whose names people wrap.
_MOST_HEADING = 9


def _read_text(path: Path, schema: Schema, most: int = -1) -> str:
    """Return a file as text: no byte of a line decides how another line is decoded."""
    try:
        with path.open("rb") as file:
            if path.name.lower().endswith(PACKED):
                with gzip.open(file) as unpacked:
                    content = io.BufferedReader(
                        BoundedStream(cast(IO[bytes], unpacked), path)
                    ).read(most)
            else:
                content = file.read(most)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise damaged_error(path, "is not a whole gzip file") from None
    except OSError as error:
        raise unreadable_error(path, error) from None
    name = codecs.lookup(schema.encoding).name
    if name.startswith(("utf-16", "utf-32")):
        return content.decode(schema.encoding, "replace").removeprefix("\ufeff")
    if name == "utf-8" and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    if name == "utf-8":
        # What is not UTF-8 becomes lone surrogates.
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    lines = [line.decode(schema.encoding, "replace") for line in content.split(b"\n")]
    return "\n".join(lines)


def _split_header(path: Path, text: str, schema: Schema) -> _Lines:
    """Return names and delimiter from the header, and the lines behind it.

    The header tells how lines end, and no row.
    """
    if not schema.header:
        return _Lines(list(schema.names), _delimiter(path, "", schema), text.split("\n"))
    ends = re.search(r"\r*\n|\r", text)
    end = "\r" if ends and not ends[0].endswith("\n") else "\n"
    lines = text.split(end)
    # Spreadsheets name their delimiter so.
    stated = re.fullmatch(r"sep=(.)\r*", lines[0])
    lines = lines[1:] if stated else lines
    first = lines[0] if lines else ""
    if not is_unicode(first) or "\0" in first or "\ufffd" in first:
        raise DatasetError(
            f"{path}: its header is not {schema.encoding.upper()} text; save the file as UTF-8, or"
            " set encoding in the schema, such as 'cp1252' or 'utf-16'"
        )
    delimiter = schema.delimiter or (stated[1] if stated else _delimiter(path, first, schema))
    for count in range(1, _MOST_HEADING + 1):
        cells, state = split_line("\n".join(lines[:count]).rstrip("\r"), delimiter)
        wrapped = [cell for cell in cells if "\n" in cell]
        if any(delimiter in cell or len(cell) > 200 for cell in wrapped):
            state = "bad"
        if state != "open":
            break
    if state != "whole":
        raise DatasetError(f"{path}: its header has a quote that does not close; mend the header")
    names = [re.sub(r"\s*[\r\n]+\s*", " ", cell).strip() for cell in cells]
    if not any(names):
        raise DatasetError(f"{path}: has no header; its first line must name the columns")
    return _Lines(names, delimiter, lines[count:])


def _delimiter(path: Path, header: str, schema: Schema) -> str:
    if schema.delimiter:
        return schema.delimiter
    if suffix_of(path) == ".tsv":
        return "\t"
    outside = re.sub(r'"[^"]*"', "", header)
    return max((",", ";", "\t", "|"), key=outside.count)


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


def is_unicode(text: str) -> bool:
    """Return whether a text was UTF-8: bytes that were not are lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def split_line(line: str, delimiter: str) -> tuple[list[str], str]:
    """Return the cells of a line, and whether it is "whole", or "open" or "bad" by its quotes.

    A cell is quoted if a quote is its first sign but blanks; quotes in it are doubled. Elsewhere a
    quote is a sign like others.
    """
    if delimiter == " ":
        line = re.sub(r"[ \t]+", " ", line).strip(" ")
    if '"' not in line:
        return line.split(delimiter), "whole"
    if ' "' not in line and '\t"' not in line:
        # The common forms, at the speed of C.
        try:
            return next(csv.reader([line], delimiter=delimiter, strict=True)), "whole"
        except csv.Error:
            pass
    blanks = " \t".replace(delimiter, "")
    cells = []
    place = 0
    while True:
        start = place
        while start < len(line) and line[start] in blanks:
            start += 1
        if line.startswith('"', start):
            content = _QUOTED.match(line, start + 1)
            assert content is not None
            cells.append(content[0].replace('""', '"'))
            place = content.end() + 1
            if place > len(line):
                return cells, "open"
            while place < len(line) and line[place] in blanks:
                place += 1
            if place < len(line) and not line.startswith(delimiter, place):
                return cells, "bad"
        else:
            end = line.find(delimiter, place)
            end = len(line) if end < 0 else end
            cells.append(line[place:end])
            place = end
        if place == len(line):
            return cells, "whole"
        place += 1


# What stands in a quoted cell, up to the quote that closes it.
_QUOTED = re.compile(r'[^"]*(?:""[^"]*)*')


def _split_records(
    lines: Sequence[str], width: int, delimiter: str, joins: bool
) -> list[list[str] | None]:
    """Return the records of lines as cells, None for one without a form.

    A quoted cell that is open at the end of its line may be closed by a later one. Where that line
    is not a record by itself, and the lines together have as many cells as the header, they are one
    record, which has a form only if the schema lets cells hold line breaks (`joins`). So one text
    of many lines is one record, and an open quote takes no other record with it.
    """
    quoted = [number for number, line in enumerate(lines) if '"' in line]
    rows: dict[int, list[str] | None] = {}
    opening = []
    for number in quoted:
        cells, state = split_line(lines[number], delimiter)
        rows[number] = _fit(cells, state, width)
        # A quote at the start and nothing in it: it ends a cell, and does not begin one.
        ends = len(cells) == 1 and cells[0].strip(" ")[:1] in ("", delimiter)
        if state == "open" and not ends:
            opening.append((number, len(cells)))
    last: dict[int, int] = {}
    for first, begun in reversed(opening):
        count = begun
        for number in islice(quoted, bisect_right(quoted, first), None):
            # The rest of a line whose cell has been opened before.
            cells, state = split_line('"' + lines[number], delimiter)
            count += len(cells) - 1
            is_taken = not joins and (number in last or rows[number] is not None)
            if state == "open" and count <= width and not (is_taken and len(cells) > 1):
                continue
            if state == "whole" and count == width and not is_taken:
                joined = "\n".join(lines[first : number + 1])
                row = _fit(*split_line(joined, delimiter), width)
                if row is not None:
                    last[first] = number
                    rows[first] = row if joins else None
            break
    records = []
    end = -1
    for number, line in enumerate(lines):
        if number <= end or not line:
            continue
        if number in rows:
            records.append(rows[number])
            end = last.get(number, -1)
        else:
            records.append(_fit(split_line(line, delimiter)[0], "whole", width))
    return records


def _fit(cells: list[str], state: str, width: int) -> list[str] | None:
    # Programs end rows with empty cells that the header lacks.
    if state != "whole" or len(cells) < width or any(cells[width:]):
        return None
    return cells


def _read_delimited(path: Path, names: Sequence[str], schema: Schema) -> Table:
    """Read columns of a CSV file as texts, so that no type follows from the rows."""
    text = _read_text(path, schema)
    content = _split_header(path, text, schema)
    header = Header(content.names, {}, content.delimiter)
    missing = [name for name in names if name not in header.names]
    if missing and schema.header and not look_like_names(header.names):
        raise DatasetError(_no_names(path))
    header.check(path, names)
    lines = [line.rstrip("\r") for line in content.lines] if "\r" in text else content.lines
    rows = _split_records(lines, len(header.names), header.delimiter, schema.lines_in_cells)
    if not is_unicode(text):
        for number, row in enumerate(rows):
            if row is not None and not is_unicode("".join(row)):
                rows[number] = None
    columns = {}
    for name in names:
        cell = header.names.index(name)
        columns[name] = Cells([None if row is None else row[cell] for row in rows])
    unreadable = rows.count(None) / max(1, len(rows))
    return Table(columns, len(rows), {("unreadable", "rows"): unreadable})


# Digits that a float holds without loss.
_MOST_DIGITS = 16


def _read_of_package(path: Path, names: Sequence[str], schema: Schema) -> Table:
    """Read columns of a spreadsheet, or of a file of a statistics package."""
    described = describe(path)
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
    columns, rows, unreadable = read_columns(path, names, decimals, schema.encoding, schema.unit)
    return Table(
        {name: Cells(texts, described.stored[name]) for name, texts in columns.items()},
        rows,
        {("unreadable", "rows"): unreadable / rows} if unreadable else {},
    )


# --------------------------------------------------------------------------------------------------
# Parquet and Feather. The type of a column decides how its values are written, and no value.


def list_parts(folder: Path) -> dict[Path, dict[str, str | None]]:
    """Return the Parquet files below a folder, sorted, each with what its folders say (`day=3`).

    Files and folders whose names begin with a point or an underscore are left out.
    """
    parts = {}
    for path in sorted(folder.rglob("*.parquet")):
        inner = path.relative_to(folder).parts
        if any(name.startswith((".", "_")) for name in inner) or not path.is_file():
            continue
        values: dict[str, str | None] = {}
        for name in inner[:-1]:
            key, is_pair, value = name.partition("=")
            if is_pair:
                values[unquote(key)] = unquote(value) if value != _HIVE_NULL else None
        parts[path] = values
    return parts


_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def _header_of_parts(path: Path, parts: Mapping[Path, Mapping[str, str | None]]) -> Header:
    first, folders = next(iter(parts.items()))
    header = _stored_header(_stored_schema(first))
    names = [*header.names, *(name for name in folders if name not in header.names)]
    return Header(names, {**dict.fromkeys(names, ""), **header.kinds})


def _stored_header(stored: pa.Schema) -> Header:
    kinds = {"number": "number", "flag": "flag", "date": "date"}
    return Header(
        stored.names,
        {column.name: kinds.get(_stored_as(column.type), "") for column in stored},
    )


def _stored_schema(path: Path) -> pa.Schema:
    try:
        check_file(path)
        if suffix_of(path) == ".parquet":
            return pa_parquet.read_schema(path)
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).schema
    except OSError as error:
        raise unreadable_error(path, error) from None
    except pa.ArrowException:
        raise damaged_error(path, f"is not a {path.suffix[1:]} file") from None


def _stored_table(
    path: Path, names: Sequence[str], schema: Schema, folders: Mapping[str, str | None]
) -> Table:
    stored = _stored_schema(path)
    inside = [name for name in names if name in stored.names]
    Header([*stored.names, *folders.keys() - set(stored.names)], {}).check(path, names)
    try:
        if suffix_of(path) == ".parquet":
            with pa_parquet.ParquetFile(path) as file:
                table = file.read(columns=inside)
                count = file.metadata.num_rows
        else:
            table = pa_feather.read_table(path, columns=inside)
            count = table.num_rows
    except OSError as error:
        raise unreadable_error(path, error) from None
    except pa.ArrowException:
        raise damaged_error(path, f"is not a whole {path.suffix[1:]} file") from None
    columns = {}
    for name in names:
        if name in folders and name not in inside:
            columns[name] = Cells([folders[name]] * count)
            continue
        column = table.column(name)
        is_id = name == schema.unit
        if not _is_readable(column.type) or (is_id and pa.types.is_null(column.type)):
            raise DatasetError(
                f"{path}: column {name!r} has the type {column.type!s:.40}, which is not text or"
                f" number; store it as text{'' if is_id else ', or leave it out'}"
            )
        texts = stored_texts(column, _id_of_bytes if is_id else _text_of_bytes)
        stored_as = _stored_as(column.type)
        decimal = stated_decimal(schema, name)
        if stored_as == "number" and decimal != ".":
            texts = [text and text.replace(".", decimal) for text in texts]
        columns[name] = Cells(texts, stored_as)
    return Table(columns, count)


def stated_decimal(schema: Schema, name: str) -> str:
    """Return the sign before a fraction that a schema states for numbers of a column."""
    if name in schema.columns and schema.columns[name].reads_numbers:
        return schema.columns[name].form.decimal
    return schema.decimal if schema.target_bounds and name == schema.target else "."


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, a run or an extension."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def _stored_as(kind: pa.DataType) -> str:
    kind = _plain_type(kind)
    if pa.types.is_boolean(kind):
        return "flag"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "date"
    numbers = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_duration,
    )
    return "number" if any(is_number(kind) for is_number in numbers) else "text"


_IS_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_IS_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def _is_readable(kind: pa.DataType) -> bool:
    plain = _plain_type(kind)
    texts = (*_IS_TEXT, *_IS_BYTES, pa.types.is_null, pa.types.is_time)
    return _stored_as(plain) != "text" or any(is_kind(plain) for is_kind in texts)


def _text_of_bytes(value: bytes) -> str | None:
    """Return bytes as text, None where they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _id_of_bytes(value: bytes) -> str:
    """Return the one text of an id: bytes that are not a text are written as digits."""
    text = _text_of_bytes(value)
    return text if text is not None and text.isprintable() else value.hex()


def stored_texts(
    column: pa.ChunkedArray, decode: Callable[[bytes], str | None] = _text_of_bytes
) -> list[str | None]:
    """Return a column as texts, each from its own value and the type alone.

    Args:
        column: of a type that can be read.
        decode: returns bytes as text.
    """
    if isinstance(column.type, pa.UuidType):
        # As programs write them.
        return [value and str(value) for value in column.to_pylist()]
    if isinstance(column.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        return stored_texts(pa.chunked_array(chunks, column.type.storage_type), decode)
    if pa.types.is_run_end_encoded(column.type):
        chunks = [pa_compute.run_end_decode(chunk) for chunk in column.chunks]
        return stored_texts(pa.chunked_array(chunks, column.type.value_type), decode)
    if pa.types.is_dictionary(column.type):
        texts: list[str | None] = []
        for chunk in column.chunks:
            known = stored_texts(pa.chunked_array([chunk.dictionary]), decode)
            codes = chunk.indices.to_pylist()
            texts += [None if code is None else known[code] for code in codes]
        return texts
    if any(is_kind(column.type) for is_kind in (*_IS_TEXT, *_IS_BYTES)):
        is_bytes = any(is_kind(column.type) for is_kind in _IS_BYTES)
        values = (column if is_bytes else column.cast(pa.large_binary())).to_pylist()
        return [None if value is None else decode(value) for value in values]
    for is_kind, write in _WRITERS.items():
        if is_kind(column.type):
            return write(column)
    return column.cast(pa.string()).to_pylist()


def _write_floats(column: pa.ChunkedArray) -> list[str | None]:
    texts = column.cast(pa.string()).to_pylist()
    for row, text in enumerate(texts):
        if text == "nan":
            texts[row] = None
        elif text == "-0" or (text is not None and "e" in text):
            # Whole numbers from 1e10 on.
            texts[row] = number_text(float(text))
    return texts


def _write_decimals(column: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else _strip_zeros(f"{value:f}") for value in column.to_pylist()]


def _strip_zeros(text: str) -> str:
    """Return a number or a time without the zeros that end its fraction.

    How many there are follows from the finest value of the column where a program chose the type.
    """
    return text.rstrip("0").rstrip(".") if "." in text else text


def _write_moments(column: pa.ChunkedArray) -> list[str | None]:
    """Return ISO texts, with a Z where the type has a zone."""
    zone = ""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column, zone = column.cast(pa.timestamp(column.type.unit)), "Z"
    texts = column.cast(pa.string()).to_pylist()
    return [text and _strip_zeros(text) + zone for text in texts]


def _write_durations(column: pa.ChunkedArray) -> list[str | None]:
    """Return seconds."""
    second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    counts = column.cast(pa.int64()).to_pylist()
    return [None if count is None else number_text(count / second) for count in counts]


_WRITERS: dict[Callable[[pa.DataType], bool], Callable[[pa.ChunkedArray], list[str | None]]] = {
    pa.types.is_floating: _write_floats,
    pa.types.is_decimal: _write_decimals,
    pa.types.is_timestamp: _write_moments,
    pa.types.is_time: _write_moments,
    pa.types.is_duration: _write_durations,
}
