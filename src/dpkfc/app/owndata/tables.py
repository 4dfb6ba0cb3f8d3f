"""Tables: CSV, Parquet and Feather files, read as texts and encoded by a public schema."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as pa_feather
import pyarrow.parquet as pa_parquet
import torch

from dpkfc.app.datasets.formats import DatasetError, damaged_error, unreadable_error
from dpkfc.app.owndata.records import UNKNOWN, Records
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.unpack_limit import check_unpacked_size

DELIMITED = (".csv", ".tsv")
SUFFIXES = (*DELIMITED, ".parquet", ".feather", ".arrow")


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
    if path.suffix.lower() not in SUFFIXES:
        raise DatasetError(f"{path}: is no table by its name; known: {', '.join(SUFFIXES)}")


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
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
    except (OSError, ValueError) as error:
        raise damaged_error(path, f"is not UTF-8 text ({type(error).__name__})") from None
    if not delimiter:
        delimiter = max((",", ";", "\t", "|"), key=line.count)
    names = next(csv.reader([line], delimiter=delimiter), [])
    if not any(name.strip() for name in names):
        raise DatasetError(f"{path}: has no header; its first line must name the columns")
    return names, delimiter


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


def read_table(path: Path, names: Sequence[str], delimiter: str = ",") -> pa.Table:
    """Read these columns of a file.

    Raises:
        DatasetError: a column is missing, or the file is damaged. No message repeats a row.
    """
    kinds, _ = read_header(path, delimiter)
    for name in names:
        if name not in kinds:
            raise DatasetError(
                f"{path}: has no column {name!r}; its header has {_shorten(list(kinds))}"
            )
    try:
        if path.suffix.lower() in DELIMITED:
            return _read_delimited(path, list(kinds), names, delimiter)
        if path.suffix.lower() == ".parquet":
            return pa_parquet.read_table(path, columns=list(names))
        return pa_feather.read_table(path, columns=list(names))
    except OSError as error:
        raise unreadable_error(path, error) from None
    except pa.ArrowException:
        raise damaged_error(path, f"is not a whole {path.suffix[1:]} file") from None


def _shorten(names: list[str]) -> str:
    listed = ", ".join(names)
    return listed if len(listed) <= 60 else f"{listed[:57]}..."


def _read_delimited(
    path: Path, header: list[str], names: Sequence[str], delimiter: str
) -> pa.Table:
    """Read columns of a CSV file as texts, so that no type follows from the rows."""
    wrong: list[Any] = []

    def note(row: Any) -> str:
        wrong.append(row.number)
        return "skip"

    table = pa_csv.read_csv(
        path,
        read_options=pa_csv.ReadOptions(use_threads=False, column_names=header, skip_rows=1),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            include_columns=list(names),
            strings_can_be_null=False,
        ),
    )
    if wrong:
        raise DatasetError(
            f"{path}: row {wrong[0]} has not the {len(header)} cells of the header"
            f" ({len(wrong)} such rows); mend or remove them"
        )
    return table


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
    table = read_table(path, names, schema.delimiter)
    if not table.num_rows:
        raise DatasetError(f"{path}: has a header and no rows; give a file with records")
    figures = {}
    parts = []
    for name, column in schema.features.items():
        encoded = column.encode(column_texts(path, table, name))
        parts.append(encoded.features)
        figures["missing", name] = encoded.missing
        if column.kind == "number":
            figures["outside of bounds", name] = encoded.odd
        elif column.categories:
            figures["of no known category", name] = encoded.odd
    inputs = np.concatenate(parts, axis=1)
    if schema.target in table.column_names:
        targets = column_texts(path, table, schema.target)
        labels = encode_labels(schema, targets)
    else:
        labels = np.full(table.num_rows, UNKNOWN, np.int64)
    units: list[str] = []
    if schema.unit in table.column_names:
        people = column_texts(path, table, schema.unit)
        units = unit_names(people)
    contents = []
    public = _blank_private_columns(inputs, schema)
    for row, label in zip(public, labels.tolist(), strict=True):
        contents.append(row.tobytes() + b"%d" % label)
    for name in schema.private_columns:
        # A split must not change when bounds are found.
        for row_number, text in enumerate(column_texts(path, table, name)):
            contents[row_number] += b"|" + (text or "").encode()
    return Records(
        inputs=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        names=[str(row) for row in range(1, len(labels) + 1)],
        contents=contents,
        units=units,
        figures=figures,
    )


def _blank_private_columns(inputs: np.ndarray, schema: Schema) -> np.ndarray:
    """Return the features with zeros where bounds are not stated by the user."""
    places = list(schema.private_columns.values())
    if not places:
        return inputs
    public = inputs.copy()
    public[:, places] = 0.0
    return public


def column_texts(path: Path, table: pa.Table, name: str) -> list[str | None]:
    """Return a column as texts, None where a value is null.

    Raises:
        DatasetError: its type has no form as text.
    """
    column = table.column(name)
    try:
        texts = column.cast(pa.string())
    except pa.ArrowException:
        raise DatasetError(
            f"{path}: column {name!r} has the type {column.type}, which is no text or number; set"
            " kind = 'ignore', or store it as text"
        ) from None
    values: list[str | None] = texts.to_pylist()
    return values


def encode_labels(schema: Schema, values: Sequence[str | None]) -> np.ndarray:
    """Return class numbers `[N]`, `UNKNOWN` for a value that is none of the public classes."""
    number_of = {name: number for number, name in enumerate(schema.classes)}
    numbers = []
    for value in values:
        text = "" if value is None else value.strip()
        numbers.append(number_of.get(text, UNKNOWN))
    return np.array(numbers, np.int64)


def unit_names(values: Sequence[str | None]) -> list[str]:
    """Return the unit of each record; a record without one is a unit of its own."""
    names = []
    for row, value in enumerate(values):
        text = "" if value is None else value.strip()
        names.append(f"unit {text}" if text else f"row {row}")
    return names
