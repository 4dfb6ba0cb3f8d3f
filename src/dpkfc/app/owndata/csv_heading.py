"""What the first lines of a CSV file say: names of columns, delimiter and end of a line."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.cells import is_unicode
from dpkfc.app.owndata.csv_blocks import PACKED
from dpkfc.app.owndata.csv_lines import split_line
from dpkfc.app.owndata.schema import Schema

# Most bytes and lines of a header, whose names people wrap.
_MOST_HEADER = 1 << 20
_MOST_HEADING = 9
# How files of zip and gzip begin, also read as Windows' signs.
_PACKED = (b"PK\3\4", b"\x1f\x8b", "\x1f\u2039".encode())


@dataclass(frozen=True)
class Heading:
    """What the first lines of a CSV file say.

    Attributes:
        names: of the columns. Unnamed ones have an empty name.
        delimiter: between cells.
        end: of a line: a line feed, or a carriage return; no row decides it.
        lines: number of lines before the first record.
        quotes: whether cells may be quoted.
        escapes: whether a backslash changes the sign behind it.
    """

    names: list[str]
    delimiter: str
    end: str = "\n"
    lines: int = 0
    quotes: bool = True
    escapes: bool = False

    def split_line(self, line: str) -> tuple[list[str], str]:
        """Return the cells of a line, and its state."""
        return split_line(line, self.delimiter, self.quotes, self.escapes)

    @property
    def has_plain_delimiter(self) -> bool:
        """Whether pyarrow can split lines at the delimiter."""
        return self.delimiter.isascii() and (self.delimiter > " " or self.delimiter == "\t")


def read_heading(path: Path, block: bytes, schema: Schema) -> Heading:
    """Return names and delimiter from the first block of a file.

    Raises:
        DatasetError: no header, or one that cannot be read. No cell of it is repeated.
    """
    if not schema.header:
        delimiter = _delimiter(path, "", schema)
        return Heading(list(schema.names), delimiter, "\n", 0, schema.quotes, schema.escapes)
    if block.startswith(_PACKED):
        raise DatasetError(f"{path}: is a packed file or a workbook; unpack it, or rename it")
    text = block[:_MOST_HEADER].decode("utf-8", "surrogateescape")
    ends = re.search(r"\r*\n|\r", text)
    end = "\r" if ends and not ends[0].endswith("\n") else "\n"
    lines = text.split(end, _MOST_HEADING + 1)
    # Spreadsheets name their delimiter so.
    stated = re.fullmatch(r"sep=(.)\r*", lines[0])
    lines = lines[1:] if stated else lines
    first = lines[0] if lines else ""
    if not is_unicode(first) or "\0" in first or "\ufffd" in first:
        raise DatasetError(
            f"{path}: its header is not {schema.encoding.upper()} text; save the file as UTF-8, or"
            " set encoding in the schema, such as 'cp1252' or 'utf-16'"
        )
    if _is_utf8_read_as_signs(first, schema.encoding):
        raise DatasetError(
            f"{path}: its header is UTF-8 and not {schema.encoding}; set encoding = 'utf-8', or"
            " save the file anew"
        )
    delimiter = schema.delimiter or (stated[1] if stated else _delimiter(path, first, schema))
    for count in range(1, _MOST_HEADING + 1):
        cells, state = split_line(
            "\n".join(lines[:count]).rstrip("\r"), delimiter, schema.quotes, schema.escapes
        )
        wrapped = [cell for cell in cells if "\n" in cell]
        if any(delimiter in cell or len(cell) > 200 for cell in wrapped):
            state = "bad"
        if state != "open":
            break
    if state != "whole":
        raise DatasetError(
            f"{path}: its header has a quote that does not close, or another delimiter than"
            f" {delimiter!r}; mend it, or state the delimiter"
        )
    names = [re.sub(r"\s*[\r\n]+\s*", " ", cell).strip() for cell in cells]
    if not any(names):
        raise DatasetError(f"{path}: has no header; its first line must name the columns")
    names = [""] * schema.row_names + names + [""] * schema.row_ends
    count += bool(stated)
    return Heading(names, delimiter, end, count, schema.quotes, schema.escapes)


def _is_utf8_read_as_signs(text: str, encoding: str) -> bool:
    """Return whether a text was UTF-8, and each of its bytes became a sign, as in Ã¤."""
    if text.isascii() or not codecs.lookup(encoding).name.startswith(("cp125", "iso8859")):
        return False
    with suppress(UnicodeError):
        text.encode(encoding).decode("utf-8")
        return True
    return False


def _delimiter(path: Path, header: str, schema: Schema) -> str:
    if schema.delimiter:
        return schema.delimiter
    if path.name.lower().removesuffix(PACKED).endswith((".tsv", ".tab")):
        return "\t"
    outside = re.sub(r'"[^"]*"', "", header)
    return max((",", ";", "\t", "|"), key=outside.count)
