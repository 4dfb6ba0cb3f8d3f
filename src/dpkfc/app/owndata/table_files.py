"""Which files are tables, and how one is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata import stored
from dpkfc.app.owndata.csv_blocks import PACKED
from dpkfc.app.owndata.packages import SPREADSHEETS, STATISTICS
from dpkfc.app.toml import shorten

DELIMITED = (".csv", ".tsv", ".txt", ".data", ".tab", ".dat")
STORED = (".parquet", ".feather", ".arrow")
TABLE_SUFFIXES = (*DELIMITED, *STORED, *SPREADSHEETS, *STATISTICS)
TEXT_SUFFIXES = (".jsonl", ".ndjson")


def suffix_of(path: Path) -> str:
    """Return the suffix of a name in lower case, without the suffix of a packed CSV file."""
    name = path.name.lower()
    if name.endswith(PACKED) and Path(name[: -len(PACKED)]).suffix in DELIMITED:
        name = name[: -len(PACKED)]
    return Path(name).suffix


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
