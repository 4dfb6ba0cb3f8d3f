"""Arrays of plain numbers from `.npz` files, which are zip archives of `.npy` files.

An array must hold exactly the bytes that its header promises. Anything else that numpy can store,
such as Python objects, is refused.
"""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dpkfc._errors import one_line
from dpkfc.app.datasets.errors import damaged_error, unreadable_error
from dpkfc.app.datasets.unpacking import UnpackedSizeError, check_unpacked_size

# Errors of zipfile for archives that are damaged, encrypted, or packed in an unknown way.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    RuntimeError,
    struct.error,
    OverflowError,
)


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names that a file holds.

    Raises:
        DatasetError: the file cannot be read, is not a whole zip archive, or one of these arrays
            does not hold numbers.
        UnpackedSizeError: these arrays are larger than the limit of `check_unpacked_size`.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            present = [name for name in names if f"{name}.npy" in sizes]
            check_unpacked_size(path, sum(sizes[f"{name}.npy"] for name in present))
            return {name: _array(archive, f"{name}.npy") for name in present}
    except UnpackedSizeError:
        raise
    except _BROKEN as error:
        raise damaged_error(path, f"is not a whole npz file ({one_line(error)})") from None
    except OSError as error:
        raise unreadable_error(path, error) from None


def _array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """Return one array, or raise a ValueError that says what is wrong with it."""
    try:
        with archive.open(member) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
            has_more = bool(file.read(1))
    # A stranger's bytes can raise any exception in the parser.
    except Exception as error:
        raise ValueError(f"{member} does not hold plain numbers: {error}") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{member} does not hold plain numbers: it holds {array.dtype}")
    if has_more:
        raise ValueError(f"{member} is longer than its header says")
    return array
