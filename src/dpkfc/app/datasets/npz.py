"""Arrays of plain numbers from `.npz` files, which are zip archives of `.npy` files.

An array is checked before it is read: its header must describe numbers and promise exactly the
bytes that the archive holds. Anything else that numpy can store, such as Python objects, is
refused.
"""

from __future__ import annotations

import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from dpkfc._errors import one_line
from dpkfc.app.datasets.errors import damaged_error, unreadable_error
from dpkfc.app.datasets.unpacking import UnpackedSizeError, check_unpacked_size

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '([|<>=]?(?:b1|[iu][1248]|f[248]))', 'fortran_order': (False|True), "
    r"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \}\s*"
)
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
    with archive.open(member) as file:
        descr, is_fortran, shape = _read_header(file, member)
        dtype = np.dtype(descr)
        size = math.prod(shape) * dtype.itemsize
        if archive.getinfo(member).file_size - file.tell() != size:
            raise ValueError(f"{member} is shorter or longer than its header says")
        content = file.read()
    if len(content) != size:
        raise ValueError(f"{member} is cut short")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(file: IO[bytes], member: str) -> tuple[str, bool, tuple[int, ...]]:
    """Return the type of the numbers, whether they lie in Fortran's order, and the shape."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{member} is not an npy file of version 1")
    (length,) = struct.unpack("<H", file.read(2))
    header = _HEADER.fullmatch(file.read(length).decode("latin-1"))
    if header is None:
        raise ValueError(f"{member} does not hold plain numbers")
    descr, fortran, shape = header.groups()
    sizes = tuple(int(size) for size in shape.replace(",", " ").split())
    return descr, fortran == "True", sizes
