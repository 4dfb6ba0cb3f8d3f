"""Sets of pairs, a prompt and a reference text: E2E and DART."""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dpkfc._errors import one_line
from dpkfc.app.datasets.errors import damaged_error, unreadable_error
from dpkfc.app.datasets.pixels import Splits
from dpkfc.app.datasets.sources import Source, read_splits
from dpkfc.app.datasets.text import open_text
from dpkfc.app.datasets.unpacking import check_unpacked_size

Pair = tuple[str, str]


def load_pairs(source: Source, data_dir: str | Path | None = None) -> Splits:
    """Read a set of pairs from a folder, given by hand or by DPKFC_DATA.

    A split is a list of (prompt, reference); a prompt with several references makes as many pairs.

    Raises:
        DatasetError: no folder has the set, files are missing or damaged. The message says how to
            get them.
    """
    (train, test, *validation), where = read_splits(source, data_dir, list)
    return Splits(train, test, where, *validation)


def _read_e2e(path: Path) -> tuple[list[Pair], ...]:
    """Read training, test and development split of the original archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            check_unpacked_size(path, size)
            names = ("trainset", "testset_w_refs", "devset")
            return tuple(_read_csv_pairs(archive, path, name) for name in names)
    except OSError as error:
        raise unreadable_error(path, error) from None
    except _BROKEN_ARCHIVE as error:
        raise damaged_error(path, f"is not the archive of E2E ({one_line(error)})") from None


_BROKEN_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    RuntimeError,
    UnicodeDecodeError,
    csv.Error,
)


def _read_csv_pairs(archive: zipfile.ZipFile, path: Path, name: str) -> list[Pair]:
    with archive.open(f"e2e-dataset/{name}.csv") as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        pairs = [(row["mr"], row["ref"]) for row in csv.DictReader(text)]
    return _check_pairs(path, pairs)


def _read_dart_json(path: Path) -> list[Pair]:
    with open_text(path) as file:
        entries: Any = json.load(file)
        pairs = []
        for entry in entries:
            triples = map(" | ".join, entry["tripleset"])
            prompt = " ; ".join(triples)
            pairs += [(prompt, note["text"]) for note in entry["annotations"]]
    return _check_pairs(path, pairs)


def _read_dart_xml(path: Path) -> list[Pair]:
    with open_text(path) as file:
        try:
            entries = ElementTree.parse(file).findall(".//entry")
        except ElementTree.ParseError as error:
            raise damaged_error(path, f"is not XML ({error})") from None
    pairs = []
    for entry in entries:
        triples = [triple.text or "" for triple in entry.iter("mtriple")]
        prompt = " ; ".join(triples)
        pairs += [(prompt, reference.text) for reference in entry.iter("lex") if reference.text]
    return _check_pairs(path, pairs)


def _check_pairs(path: Path, pairs: list[Any]) -> list[Pair]:
    if not pairs:
        raise damaged_error(path, "holds no pairs")
    for prompt, reference in pairs:
        if not (isinstance(prompt, str) and isinstance(reference, str)):
            raise damaged_error(path, "holds a row without prompt or reference")
    return pairs


E2E = Source(
    name="E2E NLG",
    folder="e2e",
    files=("e2e-dataset.zip",),
    read=lambda paths: _read_e2e(paths[0]),
)
# Training is on the development split, which the card says: the training split is not always there.
DART = Source(
    name="DART (development split)",
    folder="dart",
    files=("dart-v1.1.1-full-dev.json.gz", "dart-v1.1.1-full-test.xml.gz"),
    read=lambda paths: (_read_dart_json(paths[0]), _read_dart_xml(paths[1])),
)
