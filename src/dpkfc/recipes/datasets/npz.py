"""Arrays of plain numbers from `.npz` files, which are zip archives of `.npy` files.

An array is looked at before it is read: its header must describe numbers and promise just the bytes that the archive holds.
Whatever else numpy can store, Python objects first of all, is refused by its header.
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

from dpkfc.recipes.datasets.errors import damaged, unreadable
from dpkfc.unpack_limit import UnpackedSizeError, check_unpacked_size

__all__ = ["read_npz"]

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '([|<>=]?(?:b1|[iu][1248]|f[248]))', 'fortran_order': (False|True), "
    r"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \}\s*"
)
# What zipfile raises for archives that are damaged, encrypted, or packed in a way that it does not know.
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError, struct.error, OverflowError)


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of these names that a file holds.

    Raises:
        DatasetError: the file cannot be read, is no whole zip archive, or one of these arrays is not made of numbers.
        UnpackedSizeError: these arrays are larger than the limit of `unpack_limit`.
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
        raise damaged(path, f"is not a whole npz file ({' '.join(str(error).split()) or type(error).__name__})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """One array; a ValueError says what is wrong with it."""
    with archive.open(member) as file:
        descr, fortran, shape = _header(file, member)
        dtype = np.dtype(descr)
        size = math.prod(shape) * dtype.itemsize
        if archive.getinfo(member).file_size - file.tell() != size:
            raise ValueError(f"{member} is shorter or longer than its header says")
        content = file.read()
    if len(content) != size:
        raise ValueError(f"{member} is cut short")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _header(file: IO[bytes], member: str) -> tuple[str, bool, tuple[int, ...]]:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{member} is no npy file of version 1")
    (length,) = struct.unpack("<H", file.read(2))
    found = _HEADER.fullmatch(file.read(length).decode("latin-1"))
    if found is None:
        raise ValueError(f"{member} does not hold plain numbers")
    descr, fortran, shape = found.groups()
    return descr, fortran == "True", tuple(int(size) for size in shape.replace(",", " ").split())
