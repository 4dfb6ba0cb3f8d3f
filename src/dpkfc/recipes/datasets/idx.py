"""IDX files, the container of MNIST and Fashion-MNIST.

An IDX file is a big-endian header (two zero bytes, a type code, the number of axes, one 32-bit size per axis) and then
the elements in row-major order. Only unsigned bytes (type code 8) occur here.
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

from dpkfc.recipes.datasets.errors import damaged, unreadable
from dpkfc.unpack_limit import BoundedStream

__all__ = ["read_idx"]

_UNSIGNED_BYTE = 8


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped when its name ends in `.gz`.

    Args:
        path: the file.
        axes: number of axes it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 array of the sizes in the header.

    Raises:
        DatasetError: the file cannot be read, is no gzip file, ends too early, has another magic number, another number
            of axes, or a length that contradicts its header.
        UnpackedSizeError: the file unpacks to more than the limit of `unpack_limit`.
    """
    content = _content(path)
    if len(content) < 4:
        raise damaged(path, f"holds {len(content)} bytes, too few for an IDX header")
    zero, code, found = struct.unpack(">HBB", content[:4])
    if zero != 0 or code != _UNSIGNED_BYTE:
        raise damaged(path, f"begins with 0x{content[:4].hex()}, not with the magic number of an IDX file of bytes")
    if found != axes:
        raise damaged(path, f"has {found} axes where {axes} were expected")
    start = 4 + 4 * axes
    if len(content) < start:
        raise damaged(path, f"holds {len(content)} bytes, too few for an IDX header")
    shape = struct.unpack(f">{axes}I", content[4:start])
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise damaged(path, f"holds {len(content)} bytes where its header {shape} promises {expected}")
    if 0 in shape:
        raise damaged(path, f"holds nothing: its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with path.open("rb") as file:
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file))
            return io.BufferedReader(BoundedStream(stream, path)).read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"is not a whole gzip file ({error})") from None
    except OSError as error:
        raise unreadable(path, error) from None
