"""Files of a user, read and encoded by a public schema: tables and texts."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.feather as pa_feather
import pyarrow.parquet as pa_parquet
import torch

from dpkfc.app.datasets import (
    DatasetError,
    check_unpacked_size,
    damaged_error,
    unreadable_error,
)
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata import ALONE, UNKNOWN, Figures, Records, number_equal
from dpkfc.app.owndata.schema import Schema, canonical, target_of
from dpkfc.app.pretrained import SENTENCE_WIDTH, minilm_vectors
from dpkfc.app.recipes.text import weighted_words
from dpkfc.app.settings import shorten

DELIMITED = (".csv", ".tsv")
TABLE_SUFFIXES = (*DELIMITED, ".parquet", ".feather", ".arrow")


def read_header(path: Path, delimiter: str = "") -> tuple[dict[str, str], str]:
    """Return the columns of a file from its header, without a look at a row.

    Args:
        path: of the table.
        delimiter: of a CSV file; empty takes the one that the header shows.

    Returns:
        The kind of each column where its stored type tells, else an empty text; and the delimiter.

    Raises:
        DatasetError: the file is missing, empty or none of the known formats, or two columns have
            one name.
    """
    check_table(path)
    if path.suffix.lower() in DELIMITED:
        names, delimiter = _read_first_line(path, delimiter)
        kinds = dict.fromkeys(names, "")
    else:
        stored = _stored_schema(path)
        names = stored.names
        kinds = {column.name: _kind_of_type(column.type) for column in stored}
    for name, count in Counter(names).items():
        if count > 1:
            raise DatasetError(f"{path}: two columns are named {name!r}; rename one")
    return kinds, delimiter or ","


def check_table(path: Path) -> None:
    """Refuse a file that is missing, empty, or no table by its name.

    Raises:
        DatasetError: naming the file and the fix.
    """
    check_file(path)
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DatasetError(f"{path}: is no table by its name; known: {', '.join(TABLE_SUFFIXES)}")


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


def _read_first_line(path: Path, delimiter: str) -> tuple[list[str], str]:
    # Bytes of later lines that are no UTF-8 are a matter of their rows.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        line = file.readline()
    if not is_unicode(line):
        raise DatasetError(f"{path}: its header is not UTF-8 text; save the file as UTF-8")
    if not delimiter:
        delimiter = max((",", ";", "\t", "|"), key=line.count)
    names = next(csv.reader([line], delimiter=delimiter), [])
    if not any(name.strip() for name in names):
        raise DatasetError(f"{path}: has no header; its first line must name the columns")
    return names, delimiter


def is_unicode(text: str) -> bool:
    """Return whether a text has a form in UTF-8: bytes that were none are lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored_schema(path: Path) -> pa.Schema:
    try:
        if path.suffix.lower() == ".parquet":
            return pa_parquet.read_schema(path)
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).schema
    except OSError as error:
        raise unreadable_error(path, error) from None
    except pa.ArrowException:
        raise damaged_error(path, f"is not a {path.suffix[1:]} file") from None


def _kind_of_type(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "flag"
    for is_number in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal):
        if is_number(kind):
            return "number"
    return ""


def read_table(path: Path, names: Sequence[str], delimiter: str = ",") -> tuple[pa.Table, Figures]:
    """Read these columns of a file.

    A row of a CSV file that has no form counts as a row without values: what rows hold must not
    decide whether a run begins, even where none has a form.

    Returns:
        The table, and the share of such rows, which is PRIVATE.

    Raises:
        DatasetError: a column is missing, or the file is damaged. No message repeats a row.
    """
    kinds, _ = read_header(path, delimiter)
    for name in names:
        if name not in kinds:
            raise DatasetError(
                f"{path}: has no column {name!r}; its header has {shorten(kinds, 60)}; check names"
                " and delimiter of the schema"
            )
    try:
        if path.suffix.lower() in DELIMITED:
            return _read_delimited(path, list(kinds), names, delimiter)
        if path.suffix.lower() == ".parquet":
            return pa_parquet.read_table(path, columns=list(names)), {}
        return pa_feather.read_table(path, columns=list(names)), {}
    except OSError as error:
        raise unreadable_error(path, error) from None
    except pa.ArrowException:
        raise damaged_error(path, f"is not a whole {path.suffix[1:]} file") from None


def _read_delimited(
    path: Path, header: list[str], names: Sequence[str], delimiter: str
) -> tuple[pa.Table, Figures]:
    """Read columns of a CSV file as texts, so that no type follows from the rows."""
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    # The header tells how lines end, and no row.
    end = re.search(r"\r(?!\n)|\n", text)
    lines = text.split(end[0])[1:] if end else []
    rows: list[list[str] | None] = []
    place = 0
    while place < len(lines):
        if lines[place].strip("\r"):
            row, used = _read_row(lines, place, len(header), delimiter)
            rows.append(row)
            place += used
        else:
            place += 1
    columns = {}
    for name in names:
        cell = header.index(name)
        values = [None if row is None else row[cell] for row in rows]
        columns[name] = pa.array(values, pa.string())
    unreadable = rows.count(None) / max(1, len(rows))
    return pa.table(columns), {("unreadable", "rows"): unreadable}


def _read_row(
    lines: Sequence[str], place: int, cells: int, delimiter: str
) -> tuple[list[str] | None, int]:
    """Return the row that begins at a line, and how many lines it takes.

    A row without a form is None and takes one line. So an open quote takes no other row with it.
    """
    left = (lines[number] + "\n" for number in range(place, len(lines)))
    reader = csv.reader(left, delimiter=delimiter, strict=True)
    try:
        row = next(reader)
    except csv.Error:
        return None, 1
    # Programs end rows with empty cells that the header lacks.
    further = any(row[cells:])
    if len(row) < cells or further or not is_unicode("".join(row)):
        return None, 1
    return row, reader.line_num


def encode_table(path: Path, schema: Schema, *, with_target: bool = True) -> Records:
    """Read a table and encode it.

    Args:
        path: of the table.
        schema: public; columns that it does not name are ignored.
        with_target: whether the target must be there; else a file without it has no labels.

    Raises:
        DatasetError: the file cannot be read, lacks a column of the schema, or has no rows.
    """
    names = list(schema.features)
    kinds, _ = read_header(path, schema.delimiter)
    for wanted in (schema.target, schema.unit):
        if wanted and (with_target or wanted in kinds):
            names.append(wanted)
    table, figures = read_table(path, names, schema.delimiter)
    if not table.num_rows:
        raise DatasetError(f"{path}: has a header and no rows; give a file with records")
    shares = {}
    parts = []
    for name, column in schema.features.items():
        decimal = schema.decimal if column.kind == "number" else "."
        encoded = column.encode(column_texts(path, table, name, decimal))
        parts.append(encoded.features)
        shares["missing", name] = encoded.missing
        if column.kind == "number":
            shares["outside of bounds", name] = encoded.odd
        elif column.categories:
            shares["of no known category", name] = encoded.odd
    inputs = np.concatenate(parts, axis=1)
    labels = np.full(table.num_rows, UNKNOWN, np.int64)
    if schema.target in table.column_names:
        decimal = schema.decimal if schema.target_bounds else "."
        targets = column_texts(path, table, schema.target, decimal)
        labels, of_target = target_of(schema).encode(targets)
        shares |= of_target
    contents = _contents_of_rows(path, table, schema, inputs, labels.tolist())
    units: list[str] = []
    if schema.unit in table.column_names:
        people = column_texts(path, table, schema.unit)
        units = unit_names(people, contents, schema)
    return Records(
        inputs=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        names=[str(row) for row in range(1, len(labels) + 1)],
        contents=contents,
        units=units,
        figures={**shares, **figures},
    )


def _contents_of_rows(
    path: Path, table: pa.Table, schema: Schema, inputs: np.ndarray, labels: list[float]
) -> list[bytes]:
    """Return what decides the side of each row in a split, which found bounds do not change."""
    private = schema.private_columns
    public = inputs.copy()
    public[:, list(private.values())] = 0.0
    contents = [
        row.tobytes() + str(label).encode() for row, label in zip(public, labels, strict=True)
    ]
    for name in private:
        for number, text in enumerate(column_texts(path, table, name)):
            contents[number] += b"|" + _encode(text or "")
    return contents


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def column_texts(path: Path, table: pa.Table, name: str, decimal: str = ".") -> list[str | None]:
    """Return a column as texts, None where a value is null or has no form as text.

    Args:
        path: of the table, for errors.
        table: its columns.
        name: of the column.
        decimal: the sign before a fraction in texts; the result has a point.

    Raises:
        DatasetError: its type has no form as text.
    """
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # The type decides, and no value.
    empty = column.slice(0, 0)
    try:
        empty.cast(pa.string())
    except pa.ArrowException:
        raise DatasetError(
            f"{path}: column {name!r} has the type {column.type}, which is no text or number; set"
            " kind = 'ignore', or store it as text"
        ) from None
    try:
        values: list[str | None] = column.cast(pa.string()).to_pylist()
    except (pa.ArrowException, ValueError):
        values = [_text_at(column, row) for row in range(len(column))]
    if decimal == ".":
        return values
    return [text and text.replace(decimal, ".") for text in values]


def _text_at(column: pa.ChunkedArray, row: int) -> str | None:
    value = column.slice(row, 1)
    try:
        (text,) = value.cast(pa.string()).to_pylist()
    except (pa.ArrowException, ValueError):
        return None
    return cast("str | None", text)


def unit_names(
    values: Sequence[str | None], contents: Sequence[bytes], schema: Schema
) -> list[str]:
    """Return the unit of each record; a record without one is a unit of its own.

    Its name follows from its content, so that no other record moves it to another side of a split.
    """
    missing = schema.columns.get(schema.unit, schema).missing
    unknown = {canonical(text) for text in ("", *missing)}
    people = [canonical(value or "") for value in values]
    pairs = zip(people, contents, strict=True)
    alone = iter(number_equal([content for person, content in pairs if person in unknown]))
    names = []
    for person in people:
        name = f"unit {person}"
        if person in unknown:
            digest = hashlib.blake2b(next(alone), digest_size=16)
            name = f"{ALONE}{digest.hexdigest()}"
        names.append(name)
    return names


# --------------------------------------------------------------------------------------------------
# Texts: JSONL files, one object a line, as hashed words or vectors of a public encoder.

TEXT_SUFFIXES = (".jsonl", ".ndjson")
Entry = dict[str, Any]


def text_width(schema: Schema) -> int:
    """Return the number of features of a text."""
    if schema.text.encoder == "sentences":
        return SENTENCE_WIDTH
    return schema.text.buckets


def encode_texts(path: Path, schema: Schema) -> Records:
    """Read a file of texts and encode it. Empty lines are ignored.

    A key that a line lacks is a missing value, and a line that is no object lacks all of them: what
    lines hold must not decide whether a run begins, even where no line has the key.

    Args:
        path: of the file.
        schema: public; keys that it does not name are ignored.

    Raises:
        DatasetError: the file cannot be read, or has no lines. No message repeats a line.
    """
    numbers, objects = _read_objects(path)
    texts = [_plain(entry.get(schema.text.key)) or "" for entry in objects]
    targets = [_plain(entry.get(schema.target)) for entry in objects]
    encoded, shares = target_of(schema).encode(targets)
    labels = encoded.tolist()
    if schema.text.encoder == "sentences":
        # A tokenizer takes no lone surrogates.
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        inputs = minilm_vectors(whole, schema.text.length)
    elif schema.text.encoder == "weighted-words":
        inputs = weighted_words(texts, schema.text.buckets)
    else:
        inputs = hashed_texts(texts, schema.text.buckets)
    contents = [_encode(f"{label}\0{text}") for text, label in zip(texts, labels, strict=True)]
    empty = sum(not text.strip() for text in texts)
    units: list[str] = []
    if schema.unit:
        people = [_plain(entry.get(schema.unit)) for entry in objects]
        units = unit_names(people, contents, schema)
    unreadable = objects.count({})
    return Records(
        inputs=inputs,
        labels=torch.tensor(labels),
        names=[str(number) for number in numbers],
        contents=contents,
        units=units,
        figures={
            **shares,
            ("empty", "texts"): empty / len(texts),
            ("unreadable", "lines"): unreadable / len(texts),
        },
    )


def _read_objects(path: Path) -> tuple[list[int], list[Entry]]:
    """Return the numbers of the lines that are not empty, and their objects.

    A line without a form gives an empty object.
    """
    check_file(path)
    numbers: list[int] = []
    objects: list[Entry] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable_error(path, error) from None
    # Bytes that are no UTF-8 become lone surrogates, of which a line that is UTF-8 has none.
    lines = content.decode("utf-8-sig", "surrogateescape").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        numbers.append(number)
        objects.append(_parse(line))
    if not objects:
        raise DatasetError(f"{path}: holds empty lines alone; give a file with records")
    return numbers, objects


def _parse(line: str) -> Entry:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) and is_unicode(line) else {}


def _plain(value: Any) -> str | None:
    """Return a value as a text, as it stands in the file."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
