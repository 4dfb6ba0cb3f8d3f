"""A limit on the bytes that a file from outside may hold once it is unpacked.

A packed file of 2 MiB can unpack to gigabytes. Readers compare the size with the limit before they
take the memory.
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import IO, Any

VARIABLE = "DPKFC_MAX_UNPACKED_GIB"
_DEFAULT = 2.0
_GIB = 1 << 30


class UnpackedSizeError(ValueError):
    """A file that is larger than the limit once it is unpacked."""


def check_unpacked_size(path: Path, size: int) -> None:
    """Raise if a file unpacks to more than the limit.

    The environment variable DPKFC_MAX_UNPACKED_GIB sets the limit.

    Args:
        path: the file.
        size: bytes that the file unpacks to, as its headers say or as counted so far.

    Raises:
        UnpackedSizeError: the size is above the limit (2 GiB by default), or the variable is not a
            positive number.
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT))
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise UnpackedSizeError(
            f"{VARIABLE}={text!r:.40} is not a positive number of GiB; set it to 4, for example"
        )
    if size > limit * _GIB:
        raise UnpackedSizeError(
            f"{path.name:.50} unpacks to {size / _GIB:.2f} GiB or more, above {limit:g} GiB; set"
            f" {VARIABLE} higher to read it"
        )


class BoundedStream(io.RawIOBase):
    """Read an unpacked stream and raise once it has given more bytes than the limit.

    Args:
        stream: gives the unpacked bytes; the caller closes it.
        path: the packed file, for the message.
    """

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._count = stream, path, 0

    def readable(self) -> bool:
        """Return True: this is what `io.BufferedReader` asks for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes, 0 at the end.

        Raises:
            UnpackedSizeError: the stream has given more than the limit.
        """
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._count += len(data)
        check_unpacked_size(self._path, self._count)
        return len(data)
