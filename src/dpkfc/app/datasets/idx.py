"""IDX files, the container of MNIST and Fashion-MNIST.

An IDX file is a big-endian header (two zero bytes, a type code, the number of axes, one 32-bit
size per axis) and then the elements in row-major order. Only unsigned bytes (type code 8) occur
here.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from dpkfc.app.datasets.errors import damaged_error, unreadable_error
from dpkfc.app.datasets.unpacking import BoundedStream

_MAGIC_OF_BYTES = b"\0\0\x08"


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped when its name ends in `.gz`.

    Args:
        path: the file.
        axes: number of axes it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 array of the sizes in the header.

    Raises:
        DatasetError: the file cannot be read, is not a gzip file, ends too early, has another magic
            number, another number of axes, or a length that contradicts its header.
        UnpackedSizeError: the file unpacks to more than the limit of `check_unpacked_size`.
    """
    content = _read_bytes(path)
    start = 4 + 4 * axes
    header = content[:start].ljust(start, b"\0")
    shape = struct.unpack(f">{axes}I", header[4:])
    expected = start + math.prod(shape)
    too_short = f"holds {len(content)} bytes, too few for an IDX header"
    if len(content) < 4:
        raise damaged_error(path, too_short)
    if header[:3] != _MAGIC_OF_BYTES:
        raise damaged_error(
            path,
            f"begins with 0x{content[:4].hex()}, not with the magic number of an IDX file of bytes",
        )
    if header[3] != axes:
        raise damaged_error(path, f"has {header[3]} axes where {axes} were expected")
    if len(content) < start:
        raise damaged_error(path, too_short)
    if len(content) != expected:
        raise damaged_error(
            path, f"holds {len(content)} bytes where its header {shape} promises {expected}"
        )
    if 0 in shape:
        raise damaged_error(path, f"holds nothing: its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with path.open("rb") as file:
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file))
            return io.BufferedReader(BoundedStream(stream, path)).read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged_error(path, f"is not a whole gzip file ({error})") from None
    except OSError as error:
        raise unreadable_error(path, error) from None
