"""Texts: JSONL files, one object a line, as hashed words or vectors of a public encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dpkfc.app.datasets.formats import DatasetError, unreadable_error
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata.records import Records
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.tables import check_file, is_unicode, unit_names
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.pretrained import SENTENCE_WIDTH, minilm_vectors
from dpkfc.app.recipes.text import weighted_words

SUFFIXES = (".jsonl", ".ndjson")
Entry = dict[str, Any]


def text_width(schema: Schema) -> int:
    """Return the number of features of a text."""
    if schema.text.encoder == "sentences":
        return SENTENCE_WIDTH
    return schema.text.buckets


def encode_texts(path: Path, schema: Schema, *, with_target: bool = True) -> Records:
    """Read a file of texts and encode it. Empty lines are ignored.

    A key that a line lacks is a missing value, and a line that is no object lacks all of them: what
    one person's line holds must not decide whether a run begins.

    Args:
        path: of the file.
        schema: public; keys that it does not name are ignored.
        with_target: whether the target must be there.

    Raises:
        DatasetError: the file cannot be read, no line is an object, or none has a key. No message
            repeats a line.
    """
    numbers, objects = _read_objects(path)
    wanted = [schema.text.key]
    if with_target:
        wanted.append(schema.target)
        if schema.unit:
            wanted.append(schema.unit)
    for key in wanted:
        if not any(key in entry for entry in objects):
            raise DatasetError(f"{path}: no line has a key {key!r}; check --text and --target")
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
    contents = []
    for text, label in zip(texts, labels, strict=True):
        contents.append(f"{label}\0{text}".encode("utf-8", "surrogatepass"))
    empty = sum(not text.strip() for text in texts)
    units: list[str] = []
    if schema.unit:
        people = [_plain(entry.get(schema.unit)) for entry in objects]
        units = unit_names(people, contents)
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
    if not any(objects):
        raise DatasetError(f"{path}: no line is a JSON object; give one object a line")
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
