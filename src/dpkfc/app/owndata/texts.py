"""Texts: JSONL files, one object a line, as hashed words or vectors of a public encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dpkfc.app.datasets.formats import DatasetError, unreadable_error
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata.records import UNKNOWN, Figures, Records
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.tables import check_file, unit_names
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.pretrained import SENTENCE_WIDTH, minilm_vectors

SUFFIXES = (".jsonl", ".ndjson")
Entry = dict[str, Any]


def text_width(schema: Schema) -> int:
    """Return the number of features of a text."""
    if schema.text.encoder == "sentences":
        return SENTENCE_WIDTH
    return schema.text.buckets


def encode_texts(path: Path, schema: Schema, *, with_target: bool = True) -> Records:
    """Read a file of texts and encode it. Empty lines are ignored.

    Args:
        path: of the file.
        schema: public; keys that it does not name are ignored.
        with_target: whether each line must have the target.

    Raises:
        DatasetError: the file cannot be read, a line is no object, or it lacks a key. No message
            repeats a line.
    """
    numbers, objects = _read_objects(path)
    wanted = [schema.text.key]
    if with_target:
        wanted.append(schema.target)
        if schema.unit:
            wanted.append(schema.unit)
    columns: dict[str, list[str | None]] = {key: [] for key in wanted}
    for number, entry in zip(numbers, objects, strict=True):
        for key, values in columns.items():
            values.append(_text(path, number, entry, key))
    found = columns[schema.text.key]
    texts = [text or "" for text in found]
    labels = [UNKNOWN] * len(texts)
    shares: Figures = {}
    if all(schema.target in entry for entry in objects):
        targets = [_plain(entry[schema.target]) for entry in objects]
        encoded, shares = target_of(schema).encode(targets)
        labels = encoded.tolist()
    if schema.text.encoder == "sentences":
        inputs = minilm_vectors(texts, schema.text.length)
    else:
        inputs = hashed_texts(texts, schema.text.buckets)
    pairs = zip(texts, labels, strict=True)
    empty = sum(not text.strip() for text in texts)
    units: list[str] = []
    if schema.unit in columns:
        units = unit_names(columns[schema.unit])
    return Records(
        inputs=inputs,
        labels=torch.tensor(labels),
        names=[str(number) for number in numbers],
        contents=[f"{text}{label}".encode() for text, label in pairs],
        units=units,
        figures={**shares, ("empty", "texts"): empty / len(texts)},
    )


def _read_objects(path: Path) -> tuple[list[int], list[Entry]]:
    """Return the numbers of the lines with an object, and the objects."""
    check_file(path)
    numbers, objects = [], []
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise unreadable_error(path, error) from None
    except ValueError:
        raise DatasetError(f"{path}: is not UTF-8 text; store it as UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise DatasetError(f"{path}: line {number} is no JSON object; mend or remove it")
        numbers.append(number)
        objects.append(entry)
    if not objects:
        raise DatasetError(f"{path}: holds empty lines alone; give a file with records")
    return numbers, objects


def _text(path: Path, number: int, entry: Entry, key: str) -> str | None:
    if key not in entry:
        raise DatasetError(f"{path}: line {number} has no key {key!r}; check --text and --target")
    return _plain(entry[key])


def _plain(value: Any) -> str | None:
    """Return a value as a text, as it stands in the file."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)
