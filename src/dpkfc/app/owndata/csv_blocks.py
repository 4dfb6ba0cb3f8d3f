"""Bytes of a CSV file as UTF-8, a block at a time."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.unpacking import BoundedStream

PACKED = ".gz"
# Bytes of a file that are split at once.
BLOCK = 1 << 21


def read_blocks(path: Path, file: IO[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a file as UTF-8: no byte of a line decides how another line is decoded.

    Bytes that are not of the encoding become signs that say so; in UTF-8 they stay.
    """
    stored = file.fileno()
    size = os.fstat(stored).st_size

    def read() -> bytes:
        # A file that grows may have no end; it is refused when it is closed.
        return file.read(BLOCK) if os.fstat(stored).st_size == size else b""

    try:
        if path.name.lower().endswith(PACKED):
            unpacked = cast(IO[bytes], gzip.open(file))
            file = io.BufferedReader(BoundedStream(unpacked, path))
        content = read()
        # With a mark at its beginning or without one.
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        if name == "utf-8" and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            name = encoding = "utf-16"
        if name == "utf-8":
            content = content.removeprefix(codecs.BOM_UTF8)
            while content:
                yield content
                content = read()
        elif name.startswith(("utf-16", "utf-32")):
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            is_first = True
            while content:
                following = read()
                text = decoder.decode(content, not following)
                text = text.removeprefix("\ufeff") if is_first else text
                yield text.encode("utf-8", "surrogatepass")
                is_first = False
                content = following
        else:
            marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            if content.startswith(marks):
                raise DatasetError(
                    f"{path}: begins with the mark of Unicode, so it is not {encoding}; leave out"
                    " encoding in the schema"
                )
            while content:
                content += file.readline()
                yield _decode_lines(content, encoding).encode("utf-8", "surrogatepass")
                content = read()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise damaged_error(path, "is not a whole gzip file") from None


def _decode_lines(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return "\n".join(line.decode(encoding, "replace") for line in content.split(b"\n"))
