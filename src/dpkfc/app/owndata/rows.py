"""Encoded rows in a file of the run: a process holds its batches.

The file has no name, is readable by its owner alone, and vanishes with the process, however that
ends. Rows that a user keeps are written under a name.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.run_folder import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

# Bytes that are read or written at once.
_CHUNK = 1 << 21


def _read_at(file: IO[bytes], content: memoryview, place: int) -> int:
    """Fill the beginning of `content` with the bytes at a place, and return their number.

    Forked processes share the position of a file, so that is left alone; Windows has no forks.
    """
    if sys.platform == "win32":
        file.seek(place)
        found = file.read(len(content))
        content[: len(found)] = found
        return len(found)
    return os.preadv(file.fileno(), [content], place)


@contextmanager
def _room_for(folder: Path) -> Iterator[None]:
    """Raise one line where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DatasetError(
            f"{folder!s:.60}: its disk has no room for the encoded rows; free some, or set --out to"
            " a folder on another disk"
        ) from None


class RowFile:
    """Rows of float32 numbers that are appended, and then read, see `FileRows`.

    Args:
        width: numbers of a row.
        folder: where the file lies; None for the folder of temporary files.
    """

    def __init__(self, width: int, folder: Path | None = None) -> None:
        self.width = width
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: np.ndarray) -> None:
        """Write rows float32 `[n, width]` behind the others.

        Raises:
            DatasetError: the disk has no room for them.
        """
        self._write(rows, self._rows)
        self._rows += len(rows)

    def _write(self, rows: np.ndarray, place: int) -> None:
        content = np.asarray(rows, np.float32).tobytes()
        with _room_for(self._folder or Path(tempfile.gettempdir())):
            self._file.seek(place * self.width * 4)
            while content:
                content = content[self._file.write(content) :]

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the rows `[n, width]` in order, without a map of the file."""
        step = max(1, _CHUNK // (4 * self.width))
        for start in range(0, self._rows, step):
            yield self.copy_rows(np.arange(start, min(start + step, self._rows)))

    def select(self, parts: Sequence[np.ndarray], keep: Path | None = None) -> RowFile:
        """Return a file with the rows of each part behind one another.

        Args:
            parts: numbers of rows, ascending in each part; no row is in two.
            keep: also written there as `.npy`, readable by its owner alone.

        Raises:
            DatasetError: the disk has no room for them.
        """
        chosen = RowFile(self.width, self._folder)
        places = np.cumsum([0, *map(len, parts)]).tolist()
        first = 0
        for rows in self.chunks():
            last = first + len(rows)
            for number, part in enumerate(parts):
                low, high = np.searchsorted(part, (first, last))
                chosen._write(rows[part[low:high] - first], places[number] + low)
            first = last
        chosen._rows = places[-1]
        if keep is not None:
            chosen._copy(keep)
        return chosen

    def _copy(self, path: Path) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self.width)}

        def write(part: Path) -> None:
            with part.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for rows in self.chunks():
                    file.write(rows.data)

        write_atomically(path, write, private=True)

    def tensor(self) -> Tensor:
        """Return all rows float32 `[N, width]`, mapped: what is written to it stays in memory."""
        import torch

        rows = np.memmap(self._file, np.float32, "c", shape=(self._rows, self.width))
        return torch.from_numpy(rows)

    def copy_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return a copy of chosen rows `[n, width]`.

        Neighbours are read at once. A map of the file would hold the pages around each row too.
        """
        found = np.empty((len(rows), self.width), np.float32)
        (starts,) = np.nonzero(np.diff(rows, prepend=-2) != 1)
        for start, end in pairwise([*starts.tolist(), len(rows)]):
            place = int(rows[start]) * self.width * 4
            content = memoryview(found[start:end].data).cast("B")
            while content:
                count = _read_at(self._file, content, place)
                if not count:
                    raise EOFError("the file of encoded rows is shorter than it was")
                content, place = content[count:], place + count
        return found
