"""Files of a user, read and encoded by a public schema: tables and texts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import sparse_texts
from dpkfc.app.owndata.cells import id_name, read_number, spell_words
from dpkfc.app.owndata.decoding import list_texts
from dpkfc.app.owndata.json_lines import id_of, parse_line, read_lines, text_of, value_at
from dpkfc.app.owndata.records import ALONE, UNKNOWN, Records, number_equal
from dpkfc.app.owndata.rows import RowFile
from dpkfc.app.owndata.schema import Schema, TextForm
from dpkfc.app.owndata.stored import list_parts
from dpkfc.app.owndata.table_files import open_file
from dpkfc.app.owndata.tables import Table, read_parts
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.pretrained import (
    layer_features,
    layer_width,
    sentence_encoder,
    unread_shares,
)
from dpkfc.app.recipes.text import weighted_words
from dpkfc.checkpoint import hash_file
from dpkfc.data.sparse import SparseRows, join_rows

# Numbers of features that are encoded at once.
_MOST_NUMBERS = 1 << 23


def encode_table(
    path: Path,
    schema: Schema,
    *,
    with_target: bool = True,
    folder: Path | None = None,
    share: Share | None = None,
) -> Records:
    """Read a table and encode it. A file is opened once.

    Args:
        path: of the table.
        schema: public; columns that it does not name are ignored.
        with_target: whether the target must be there; else a file without it has no labels.
        folder: where the encoded rows lie in a file without a name.
        share: which part is read: of a folder whole files, of a file blocks of rows.

    Raises:
        DatasetError: the file cannot be read, lacks a column of the schema, or has no rows, or the
            disk has no room.
    """
    if path.is_dir():
        read, files = _choose_files(path, share)
        blocks = None if files else share
        return _encode_parts(path, read, schema, with_target, folder, blocks, files)
    with open_file(path) as file:
        digest = hash_file(file)
        read = partial(read_parts, file=file)
        records = _encode_parts(path, read, schema, with_target, folder, share)
    return replace(records, digest=digest)


class Share(NamedTuple):
    """Which part of the records a process holds."""

    rank: int
    world: int


def _choose_files(
    path: Path, share: Share | None
) -> tuple[Callable[..., Iterator[Table]], Sequence[str]]:
    """Return how a folder is read, and the files of a share; none where files are too few."""
    files = list(list_parts(path))
    if share is None or len(files) < share.world:
        return read_parts, ()
    own = files[share.rank :: share.world]
    names = [file.relative_to(path).as_posix() for file in own]
    return partial(read_parts, only=own), names


def _encode_parts(
    path: Path,
    read: Callable[..., Iterator[Table]],
    schema: Schema,
    with_target: bool,
    folder: Path | None,
    share: Share | None = None,
    files: Sequence[str] = (),
) -> Records:
    targets = [name for name in (schema.target, schema.unit) if name]
    names = [*schema.features, *targets]
    step = most = max(1, _MOST_NUMBERS // schema.width)
    target = target_of(schema)
    rows = RowFile(schema.width, folder)
    counts: Counter[tuple[str, str]] = Counter()
    labels = []
    people: list[str | None] = []
    private: dict[str, list[str | None]] = {name: [] for name in schema.private_columns}
    kinds: dict[str, set[str]] = {name: set() for name in schema.features}
    unreadable = None
    block = -1
    for table in read(path, names, schema, () if with_target else targets):
        if table.unreadable is not None:
            unreadable = (unreadable or 0) + table.unreadable
        if share is not None:
            step = min(most, table.rows // share.world or 1)
        for part in table.split(step):
            block += 1
            if share is not None and block % share.world != share.rank:
                continue
            for name, seen in kinds.items():
                seen.add(part.columns[name].stored)
            rows.append(_encode_columns(part, schema, counts))
            if schema.target in part.columns:
                encoded, of_target = target.encode(part.columns[schema.target].texts)
                counts.update(of_target)
                labels.append(encoded)
            if schema.unit in part.columns:
                people += list_texts(part.columns[schema.unit].texts)
            for name in private:
                private[name] += list_texts(part.columns[name].texts)
    total = len(rows)
    if not total and share is not None:
        raise DatasetError(f"{path}: has no row for process {share.rank}; start fewer processes")
    if not total and files:
        raise DatasetError(
            f"{path}: no row for this process, whose part begins with {files[0]!r:.60};"
            " remove empty files, or start fewer processes"
        )
    if not total:
        raise DatasetError(f"{path}: has a header and no rows; give a file with records")
    for name, seen in kinds.items():
        # Integers of one part and texts of another are texts.
        stored = seen.pop() if len(seen) == 1 else "text"
        column = schema.columns[name]
        if stored in column.kind_value.misfits:
            raise DatasetError(
                f"{path}: column {name!r} is stored as a {stored}, and its kind is"
                f" {column.kind!r}; set kind = {stored!r}"
            )
    numbers = np.concatenate(labels) if labels else np.full(total, UNKNOWN, np.int64)
    contents = RowContents(rows, numbers, schema, private)
    figures = {what: count / total for what, count in counts.items()}
    if unreadable is not None:
        figures["unreadable", "rows"] = unreadable / total
    return Records(
        inputs=rows.tensor(),
        labels=torch.from_numpy(numbers),
        names=range(1, total + 1),
        contents=contents,
        units=unit_names(people, contents, schema) if people else (),
        figures=figures,
        file=rows,
        share=[f"{path.name}, part {share.rank} of {share.world}"] if share else files,
    )


def _encode_columns(part: Table, schema: Schema, counts: Counter[tuple[str, str]]) -> np.ndarray:
    """Return features float32 `[N, width]`, and count missing and unexpected values."""
    features = np.empty((part.rows, schema.width), np.float32)
    place = 0
    for name, column in schema.features.items():
        encoded = column.encode(part.columns[name].texts)
        features[:, place : place + column.width] = encoded.features
        place += column.width
        counts["missing", name] += int((encoded.is_missing & ~encoded.is_unread).sum())
        counts["not of the column's kind", name] += int(encoded.is_unread.sum())
        if column.limits:
            counts["outside of bounds", name] += int(encoded.is_unexpected.sum())
        elif column.categories:
            counts["of no known category", name] += int(encoded.is_unexpected.sum())
    return features


class RowContents(Sequence[bytes]):
    """What decides the side of each row in a split, which found bounds do not change.

    Args:
        rows: encoded.
        labels: of the rows `[N]`.
        schema: public.
        private: texts of the columns whose bounds a release decides, by name.
    """

    def __init__(
        self,
        rows: RowFile,
        labels: np.ndarray,
        schema: Schema,
        private: Mapping[str, Sequence[str | None]],
    ) -> None:
        self._rows = rows
        self._labels = labels
        self._places = list(schema.private_columns.values())
        self._private = list(private.values())

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: Any) -> Any:
        return next(self._contents(row, self._rows.copy_rows(np.array([row]))))

    def __iter__(self) -> Iterator[bytes]:
        row = 0
        for chunk in self._rows.chunks():
            yield from self._contents(row, chunk)
            row += len(chunk)

    def _contents(self, start: int, rows: np.ndarray) -> Iterator[bytes]:
        rows[:, self._places] = 0.0
        end = start + len(rows)
        # A list of bytes, one a row.
        public = rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0].tolist()
        ends = map(str.encode, map(str, self._labels[start:end].tolist()))
        contents = map(bytes.__add__, public, ends)
        for texts in self._private:
            parts = [b"|" + _encode(text or "") for text in texts[start:end]]
            contents = map(bytes.__add__, contents, parts)
        return contents


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def unit_names(
    values: Sequence[str | None], contents: Sequence[bytes], schema: Schema
) -> list[str]:
    """Return the unit of each record; a record without one is a unit of its own.

    Its name follows from its content, so that no other record moves it to another side of a split.
    A number is an id, unless the column itself states it as missing.
    """
    missing = schema.columns.get(schema.unit, schema).missing
    if missing == schema.missing:
        # 999 stands for an unknown age, and for a patient.
        missing = tuple(text for text in missing if read_number(text) is None)
    unknown = {id_name(text) for text in ("", *missing)}
    name_of = {}
    for value in set(values):
        person = id_name(value or "")
        name_of[value] = "" if person in unknown else f"unit {person}"
    names = [name_of[value] for value in values]
    alone = [row for row, name in enumerate(names) if not name]
    for row, content in zip(alone, number_equal([contents[row] for row in alone]), strict=True):
        names[row] = f"{ALONE}{hashlib.blake2b(content, digest_size=16).hexdigest()}"
    return names


# --------------------------------------------------------------------------------------------------
# Texts: JSONL files, one object a line, as hashed words or vectors of a public encoder.


def text_width(schema: Schema) -> int:
    """Return the number of features of a text."""
    form = schema.text.settled
    if form.encoder == "sentences":
        return layer_width(sentence_encoder(form.length, form.folder))
    return form.buckets


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
    decimal = schema.decimal if schema.target_bounds else "."
    target = target_of(schema)
    form = schema.text.settled
    numbers: list[int] = []
    contents: list[bytes] = []
    people: list[str | None] = []
    labels, inputs = [], []
    counts: Counter[tuple[str, str]] = Counter({("empty", "texts"): 0, ("unreadable", "lines"): 0})
    with open_file(path) as file:
        digest = hash_file(file)
        for lines in read_lines(file, schema.encoding):
            objects = [parse_line(line) for _, line in lines]
            texts = [text_of(value_at(entry, schema.text.key)) or "" for entry in objects]
            targets = [text_of(value_at(entry, schema.target), decimal) for entry in objects]
            encoded, of_target = target.encode(targets)
            inputs.append(_encode_texts(texts, form))
            labels.append(encoded)
            numbers += [number for number, _ in lines]
            for label, text in zip(encoded.tolist(), texts, strict=True):
                contents.append(_encode(f"{label}\0{text}"))
            if schema.unit:
                people += [id_of(value_at(entry, schema.unit)) for entry in objects]
            counts.update(of_target)
            if form.encoder == "sentences":
                counts.update(unread_shares(sentence_encoder(form.length, form.folder), texts))
            counts["empty", "texts"] += sum(not text.strip() for text in texts)
            counts["unreadable", "lines"] += objects.count({})
    if not numbers:
        raise DatasetError(f"{path}: holds empty lines alone; give a file with records")
    return Records(
        inputs=join_rows(inputs),
        labels=torch.from_numpy(np.concatenate(labels)),
        names=numbers,
        contents=contents,
        units=unit_names(people, contents, schema) if schema.unit else (),
        figures={what: count / len(numbers) for what, count in counts.items()},
        digest=digest,
    )


def _encode_texts(texts: Sequence[str], form: TextForm) -> SparseRows | torch.Tensor:
    if form.encoder == "sentences":
        return layer_features(sentence_encoder(form.length, form.folder))(texts)
    hashed = sparse_texts if form.encoder == "words" else weighted_words
    return hashed([*map(spell_words, texts)], form.buckets)
