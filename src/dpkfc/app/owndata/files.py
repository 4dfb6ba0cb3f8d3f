"""Files of a user, read and encoded by a public schema: tables and texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata.cells import canonical, number_text
from dpkfc.app.owndata.records import ALONE, UNKNOWN, Records, number_equal
from dpkfc.app.owndata.schema import Column, Schema
from dpkfc.app.owndata.tables import Table, check_file, is_unicode, read_header, read_table
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.pretrained import SENTENCE_WIDTH, minilm_vectors
from dpkfc.app.recipes.text import weighted_words


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
    known = () if with_target else read_header(path, schema).names
    for wanted in (schema.target, schema.unit):
        if wanted and (with_target or wanted in known):
            names.append(wanted)
    table = read_table(path, names, schema)
    if not table.rows:
        raise DatasetError(f"{path}: has a header and no rows; give a file with records")
    shares = {}
    parts = []
    for name, column in schema.features.items():
        cells = table.columns[name]
        _check_stored(path, name, column, cells.stored)
        encoded = column.encode(cells.texts)
        parts.append(encoded.features)
        shares["missing", name] = encoded.missing
        if column.limits:
            shares["outside of bounds", name] = encoded.unexpected
        elif column.categories:
            shares["of no known category", name] = encoded.unexpected
    inputs = np.concatenate(parts, axis=1)
    labels = np.full(table.rows, UNKNOWN, np.int64)
    if schema.target in table.columns:
        labels, of_target = target_of(schema).encode(table.columns[schema.target].texts)
        shares |= of_target
    contents = _contents_of_rows(table, schema, inputs, labels.tolist())
    units: list[str] = []
    if schema.unit in table.columns:
        units = unit_names(table.columns[schema.unit].texts, contents, schema)
    return Records(
        inputs=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        names=[str(row) for row in range(1, len(labels) + 1)],
        contents=contents,
        units=units,
        figures={**shares, **table.figures},
    )


# Kinds that a stored column of another kind cannot be, and what it can be.
_MISFITS = {
    ("number", "date"): "date",
    ("number", "flag"): "flag",
    ("pair", "number"): "number",
    ("pair", "date"): "date",
    ("flag", "date"): "date",
    ("date", "flag"): "flag",
}


def _check_stored(path: Path, name: str, column: Column, stored: str) -> None:
    """Refuse a column whose stored type has no value of its kind."""
    fit = _MISFITS.get((column.kind, stored))
    if fit:
        raise DatasetError(
            f"{path}: column {name!r} is stored as a {stored}, and its kind is {column.kind!r}; set"
            f" kind = {fit!r}"
        )


def _contents_of_rows(
    table: Table, schema: Schema, inputs: np.ndarray, labels: Sequence[float]
) -> list[bytes]:
    """Return what decides the side of each row in a split, which found bounds do not change."""
    private = schema.private_columns
    public = inputs.copy()
    public[:, list(private.values())] = 0.0
    contents = [
        row.tobytes() + str(label).encode() for row, label in zip(public, labels, strict=True)
    ]
    for name in private:
        for number, text in enumerate(table.columns[name].texts):
            contents[number] += b"|" + _encode(text or "")
    return contents


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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

Entry = dict[str, Any]


def text_width(schema: Schema) -> int:
    """Return the number of features of a text."""
    if schema.text.encoder == "sentences":
        return SENTENCE_WIDTH
    return schema.text.buckets


def encode_texts(path: Path, schema: Schema) -> Records:
    """Read a file of texts and encode it. Empty lines are ignored.

    A key that a line lacks is a missing value, and a line that is not an object lacks all keys:
    what lines hold must not decide whether a run begins, even where no line has the key.

    Args:
        path: of the file.
        schema: public; keys that it does not name are ignored.

    Raises:
        DatasetError: the file cannot be read, or has no lines. No message repeats a line.
    """
    numbers, objects = _read_objects(path)
    texts = [_plain(_value_at(entry, schema.text.key)) or "" for entry in objects]
    decimal = schema.decimal if schema.target_bounds else "."
    targets = [_plain(_value_at(entry, schema.target), decimal) for entry in objects]
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
        people = [_id_text(_value_at(entry, schema.unit)) for entry in objects]
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
    # Bytes that are not UTF-8 become lone surrogates; valid UTF-8 has no lone surrogate.
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
        entry = json.loads(line, parse_float=_Fraction, parse_constant=_parse_constant)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) and is_unicode(line) else {}


class _Fraction(str):
    """A number of JSON with a fraction or an exponent, as it is written."""


def _parse_constant(text: str) -> _Fraction | None:
    """Return NaN as a missing value, and infinity as a number."""
    return None if text == "NaN" else _Fraction(text)


def _value_at(entry: Entry, key: str) -> Any:
    """Return the value of a key, or of nested keys with points between them; None without one."""
    if key in entry or "." not in key:
        return entry.get(key)
    value: Any = entry
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _plain(value: Any, decimal: str = ".") -> str | None:
    """Return a value as a text, as it stands in the file; None for a value without one."""
    if isinstance(value, _Fraction):
        return value.replace(".", decimal)
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _id_text(value: Any) -> str | None:
    """Return the text of an id, one for each number or object however it is written."""
    return number_text(float(value)) if isinstance(value, _Fraction) else _plain(value)
