"""Sets of pairs, a prompt and a reference text: E2E and DART."""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dpkfc.recipes.datasets.errors import DatasetError, damaged, unreadable
from dpkfc.recipes.datasets.sources import Source, local_files
from dpkfc.recipes.datasets.texts import opened
from dpkfc.unpack_limit import check_unpacked_size

__all__ = ["DART", "E2E", "Pair", "PairSet", "load_pairs"]

Pair = tuple[str, str]


@dataclass(frozen=True)
class PairSet:
    """Prompts and references of a training and a test split.

    Attributes:
        train: (prompt, reference); a prompt with several references stands in as many pairs.
        test: the same for the test split.
        validation: the same for the set's own validation split; empty where it has none.
        source: where they were read from, for the privacy card.
    """

    train: list[Pair]
    test: list[Pair]
    validation: list[Pair]
    source: str


def load_pairs(source: Source, data_dir: str | Path | None = None) -> PairSet:
    """Read a set of pairs from a folder, given by hand or by DPKFC_DATA.

    Raises:
        DatasetError: no folder has the set, files are missing or damaged. The message says how to get them.
    """
    paths = local_files(source, data_dir)
    if not paths:
        raise DatasetError(f"{source.name} is not on this machine: {source.how_to_get}")
    train, test, *own = source.read(paths)
    return PairSet(train, test, own[0] if own else [], source=f"files in {paths[0].parent.name}/")


def _read_e2e(path: Path) -> tuple[list[Pair], ...]:
    """Training, test and development split of the original archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked_size(path, sum(entry.file_size for entry in archive.infolist()))
            return tuple(_csv_pairs(archive, path, name) for name in ("trainset", "testset_w_refs", "devset"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, f"is not the archive of E2E ({' '.join(str(error).split())})") from None


def _csv_pairs(archive: zipfile.ZipFile, path: Path, name: str) -> list[Pair]:
    with archive.open(f"e2e-dataset/{name}.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")))
    return _whole(path, [(row["mr"], row["ref"]) for row in rows])


def _triples(triples: list[list[str]]) -> str:
    return " ; ".join(" | ".join(triple) for triple in triples)


def _read_dart_json(path: Path) -> list[Pair]:
    with opened(path) as file:
        entries: Any = json.load(file)
        pairs = [(_triples(entry["tripleset"]), note["text"]) for entry in entries for note in entry["annotations"]]
    return _whole(path, pairs)


def _read_dart_xml(path: Path) -> list[Pair]:
    with opened(path) as file:
        try:
            entries = ElementTree.parse(file).findall(".//entry")
        except ElementTree.ParseError as error:
            raise damaged(path, f"is not XML ({error})") from None
    pairs = []
    for entry in entries:
        prompt = " ; ".join(triple.text or "" for triple in entry.iter("mtriple"))
        pairs += [(prompt, reference.text) for reference in entry.iter("lex") if reference.text]
    return _whole(path, pairs)


def _whole(path: Path, pairs: list[Any]) -> list[Pair]:
    if not pairs or any(not (isinstance(a, str) and isinstance(b, str)) for a, b in pairs):
        raise damaged(path, "holds a row without prompt or reference" if pairs else "holds no pairs")
    return pairs


E2E = Source(name="E2E NLG", folder="e2e", files=("e2e-dataset.zip",), read=lambda paths: _read_e2e(paths[0]))
# The training split is not always at hand: the development split is trained on, which the card says.
DART = Source(
    name="DART (development split)",
    folder="dart",
    files=("dart-v1.1.1-full-dev.json.gz", "dart-v1.1.1-full-test.xml.gz"),
    read=lambda paths: (_read_dart_json(paths[0]), _read_dart_xml(paths[1])),
)
