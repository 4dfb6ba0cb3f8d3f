"""CSV files: pyarrow splits plain lines into columns, and Python looks at all others.

A line is a record, whatever it holds. Which of the two ways splits a line follows from that line,
and both give the same cells.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.csv as pa_csv

from dpkfc.app.arrow import to_arrow
from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.unpacking import BoundedStream
from dpkfc.app.owndata.schema import Schema

PACKED = ".gz"
# Bytes of a file that are split at once.
BLOCK = 1 << 23
# Most bytes and lines of a header, whose names people wrap.
_MOST_HEADER = 1 << 20
_MOST_HEADING = 9


@dataclass(frozen=True)
class Heading:
    """What the first lines of a CSV file say.

    Attributes:
        names: of the columns. Unnamed ones have an empty name.
        delimiter: between cells.
        end: of a line: a line feed, or a carriage return; no row decides it.
        lines: number of lines before the first record.
    """

    names: list[str]
    delimiter: str
    end: str = "\n"
    lines: int = 0


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
        name = codecs.lookup(encoding).name
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


def read_heading(path: Path, block: bytes, schema: Schema) -> Heading:
    """Return names and delimiter from the first block of a file.

    Raises:
        DatasetError: no header, or one that cannot be read. No cell of it is repeated.
    """
    if not schema.header:
        return Heading(list(schema.names), _delimiter(path, "", schema))
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
    delimiter = schema.delimiter or (stated[1] if stated else _delimiter(path, first, schema))
    for count in range(1, _MOST_HEADING + 1):
        cells, state = split_line("\n".join(lines[:count]).rstrip("\r"), delimiter)
        wrapped = [cell for cell in cells if "\n" in cell]
        if any(delimiter in cell or len(cell) > 200 for cell in wrapped):
            state = "bad"
        if state != "open":
            break
    if state != "whole":
        raise DatasetError(f"{path}: its header has a quote that does not close; mend the header")
    names = [re.sub(r"\s*[\r\n]+\s*", " ", cell).strip() for cell in cells]
    if not any(names):
        raise DatasetError(f"{path}: has no header; its first line must name the columns")
    return Heading(names, delimiter, end, count + bool(stated))


def _delimiter(path: Path, header: str, schema: Schema) -> str:
    if schema.delimiter:
        return schema.delimiter
    if path.name.lower().removesuffix(PACKED).endswith(".tsv"):
        return "\t"
    outside = re.sub(r'"[^"]*"', "", header)
    return max((",", ";", "\t", "|"), key=outside.count)


def is_unicode(text: str) -> bool:
    """Return whether a text was UTF-8: bytes that were not are lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# One line, sign by sign.


def split_line(line: str, delimiter: str) -> tuple[list[str], str]:
    """Return the cells of a line, and whether it is "whole", or "open" or "bad" by its quotes.

    A cell is quoted if its first character that is not blank is a quote; quotes in it are doubled.
    Elsewhere a quote is an ordinary character.
    """
    if delimiter == " ":
        line = re.sub(r"[ \t]+", " ", line).strip(" ")
    if '"' not in line:
        return line.split(delimiter), "whole"
    if ' "' not in line and '\t"' not in line:
        # The common forms, at the speed of C.
        try:
            return next(csv.reader([line], delimiter=delimiter, strict=True)), "whole"
        except csv.Error:
            pass
    blanks = " \t".replace(delimiter, "")
    cells = []
    place = 0
    while True:
        start = place
        while start < len(line) and line[start] in blanks:
            start += 1
        if line.startswith('"', start):
            content = _QUOTED.match(line, start + 1)
            assert content is not None
            cells.append(content[0].replace('""', '"'))
            place = content.end() + 1
            if place > len(line):
                return cells, "open"
            while place < len(line) and line[place] in blanks:
                place += 1
            if place < len(line) and not line.startswith(delimiter, place):
                return cells, "bad"
        else:
            end = line.find(delimiter, place)
            end = len(line) if end < 0 else end
            cells.append(line[place:end])
            place = end
        if place == len(line):
            return cells, "whole"
        place += 1


# What stands in a quoted cell, up to the quote that closes it.
_QUOTED = re.compile(r'[^"]*(?:""[^"]*)*')

# Cells of a record, None for one without a form.
Row = list[str] | None


def _fit(cells: list[str], state: str, width: int) -> Row:
    # Programs end rows with empty cells that the header lacks.
    if state != "whole" or len(cells) < width or any(cells[width:]):
        return None
    return cells


def join_lines(
    text_of: Callable[[int], str],
    quoted: Sequence[int],
    suspects: Sequence[int],
    width: int,
    delimiter: str,
    joins: bool,
) -> tuple[dict[int, Row], dict[int, int], bool]:
    """Return the records that begin in lines with quotes.

    A quoted cell that is open at the end of its line may be closed by a later one. Where that line
    is not a record by itself, and the lines together have as many cells as the header, they are one
    record, which has a form only if the schema lets cells hold line breaks (`joins`). So one text
    of many lines is one record, and an open quote takes no other record with it.

    Args:
        text_of: returns the text of a line.
        quoted: numbers of the lines with a quote, ascending.
        suspects: lines among them that may be open.
        width: cells of a record.
        delimiter: between cells.
        joins: whether quotes decide which lines are one record.

    Returns:
        Cells by the number of the first line, for the suspects; the last line of records of
        several lines by their first; and whether a quote is still open at the last line.
    """

    @cache
    def split(number: int) -> tuple[list[str], str]:
        return split_line(text_of(number), delimiter)

    rows: dict[int, Row] = {}
    opening = []
    for number in suspects:
        cells, state = split(number)
        rows[number] = _fit(cells, state, width)
        # A quote at the start and nothing in it: it ends a cell, and does not begin one.
        ends = len(cells) == 1 and cells[0].strip(" ")[:1] in ("", delimiter)
        if state == "open" and not ends:
            opening.append((number, len(cells)))
    last: dict[int, int] = {}
    is_open = False
    for first, begun in reversed(opening):
        count = begun
        for number in islice(quoted, bisect_right(quoted, first), None):
            # The rest of a line whose cell has been opened before.
            cells, state = split_line('"' + text_of(number), delimiter)
            count += len(cells) - 1
            alone = rows[number] if number in rows else _fit(*split(number), width)
            is_taken = not joins and (number in last or alone is not None)
            if state == "open" and count <= width and not (is_taken and len(cells) > 1):
                continue
            if state == "whole" and count == width and not is_taken:
                joined = "\n".join(map(text_of, range(first, number + 1)))
                row = _fit(*split_line(joined, delimiter), width)
                if row is not None:
                    last[first] = number
                    rows[first] = row if joins else None
            break
        else:
            is_open = True
    return rows, last, is_open


# --------------------------------------------------------------------------------------------------
# A block of lines.

Columns = dict[str, pa.Array]


@dataclass(frozen=True)
class Splitter:
    """Splits blocks of lines into columns.

    Attributes:
        heading: of the file.
        names: of the columns that are wanted.
        joins: whether quotes decide which lines are one record.
    """

    heading: Heading
    names: Sequence[str]
    joins: bool

    def parts(self, blocks: Iterator[bytes]) -> Iterator[tuple[Columns, int, int]]:
        """Yield columns, the number of records, and how many of them have no form.

        Args:
            blocks: of the file, behind the header.
        """
        end = self.heading.end.encode()
        rest = b""
        count = 1
        is_over = False
        while not is_over:
            more = list(islice(blocks, count))
            is_over = len(more) < count
            rest = b"".join([rest, *more])
            cut = len(rest) if is_over else rest.rfind(end) + 1
            part = self.split(rest[:cut], is_over) if cut else None
            if part is None:
                # A longer line, or a quote that is still open.
                count *= 2
                continue
            count = 1
            rest = rest[cut:]
            yield part

    def split(self, block: bytes, is_last: bool = True) -> tuple[Columns, int, int] | None:
        """Return what `parts` yields for these lines, None where a quote is open at their end."""
        lines = _Lines(block, self.heading)
        odd = lines.find_odd()
        quoted = lines.quoted.tolist()
        suspects = [number for number in quoted if odd[number]]
        width, delimiter = len(self.heading.names), self.heading.delimiter
        found, last, is_open = join_lines(
            lines.text, quoted, suspects, width, delimiter, self.joins
        )
        if is_open and not is_last:
            return None
        rows: dict[int, Row] = {}
        is_record = lines.is_filled
        end = -1
        for number in np.flatnonzero(odd).tolist():
            if number <= end:
                continue
            text = lines.text(number)
            is_record[number] = bool(text)
            if not text:
                continue
            row = found.get(number)
            if number not in found:
                row = _fit(split_line(text, delimiter)[0], "whole", width)
            if row is not None and not is_unicode("".join(row)):
                row = None
            rows[number] = row
            if number in last:
                end = last[number]
                is_record[number + 1 : end + 1] = False
        is_plain = is_record & ~odd
        columns, broken, emptied = self._split_plain(lines, is_plain)
        for number in np.flatnonzero(is_plain)[broken].tolist():
            rows[number] = _fit(split_line(lines.text(number), delimiter)[0], "whole", width)
        count = int(is_record.sum())
        if not rows and not emptied.any():
            return columns, count, 0
        return self._merge(columns, rows, np.flatnonzero(is_record), emptied)

    def _merge(
        self, columns: Columns, rows: dict[int, Row], records: np.ndarray, emptied: np.ndarray
    ) -> tuple[Columns, int, int]:
        """Return plain and other records in the order of the file."""
        numbers = np.array(sorted(rows), np.int64)
        is_other = np.isin(records, numbers)
        places = np.empty(len(records), np.int64)
        places[~is_other] = np.where(emptied, -1, np.arange(len(emptied)))
        cells = [row for number in numbers.tolist() if (row := rows[number]) is not None]
        has_cells = np.array([rows[number] is not None for number in numbers.tolist()], bool)
        places[is_other] = np.where(has_cells, len(emptied) + np.cumsum(has_cells) - 1, -1)
        order = to_arrow(places, places < 0)
        merged = {}
        for name, column in columns.items():
            place = self.heading.names.index(name)
            others = pa.array([row[place] for row in cells], pa.string())
            merged[name] = pa.concat_arrays([column, others]).take(order)
        return merged, len(records), int((places < 0).sum())

    def _split_plain(
        self, lines: _Lines, is_plain: np.ndarray
    ) -> tuple[Columns, list[int], np.ndarray]:
        """Return columns of plain lines.

        Returns:
            Columns, the numbers of the plain lines with more or fewer cells than the first, and
            which of the others have values behind the last column.
        """
        names = self.heading.names
        broken: list[int] = []
        if not is_plain.any():
            empty = pa.array([], pa.string())
            return dict.fromkeys(self.names, empty), broken, np.zeros(0, bool)
        first = lines.text(int(is_plain.argmax()))
        # Most rows end with as many empty cells as the first.
        cells = max(len(names), len(split_line(first, self.heading.delimiter)[0]))
        wanted = {name: str(names.index(name)) for name in self.names}
        further = [str(place) for place in range(len(names), cells)]

        def skip(row: pa_csv.InvalidRow) -> str:
            broken.append(row.number - 1)
            return "skip"

        content = lines.select(is_plain)
        included = list(dict.fromkeys([*wanted.values(), *further]))
        table = pa_csv.read_csv(
            pa.BufferReader(content),
            pa_csv.ReadOptions(
                use_threads=False,
                column_names=[str(place) for place in range(cells)],
                block_size=len(content) + 1,
            ),
            pa_csv.ParseOptions(delimiter=self.heading.delimiter, invalid_row_handler=skip),
            pa_csv.ConvertOptions(
                column_types=dict.fromkeys(included, pa.string()),
                include_columns=included,
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )
        emptied = np.zeros(len(table), bool)
        for place in further:
            emptied |= pa_compute.not_equal(table.column(place), "").to_numpy()
        columns = {name: table.column(place).combine_chunks() for name, place in wanted.items()}
        return columns, broken, emptied


class _Lines:
    """Lines of a block, by their places in it."""

    def __init__(self, block: bytes, heading: Heading) -> None:
        self._block = block
        self._delimiter = heading.delimiter
        self._end = heading.end
        self._bytes = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(self._bytes == ord(self._end))
        if block[-1:] != self._end.encode():
            ends = np.append(ends, len(block))
        self._ends = ends
        self._starts = np.append(0, ends[:-1] + 1)
        # Numbers of the lines with a quote.
        self.quoted = np.zeros(0, np.int64)

    @property
    def is_filled(self) -> np.ndarray:
        """Whether each line holds more than its end."""
        sizes = self._ends - self._starts
        is_filled: np.ndarray = sizes > 0
        if self._end == "\n" and b"\r" in self._block:
            is_filled &= (sizes > 1) | (self._bytes[self._starts] != ord("\r"))
        return is_filled

    def text(self, number: int) -> str:
        """Return a line; bytes that are not UTF-8 are lone surrogates."""
        line = self._block[self._starts[number] : self._ends[number]]
        return line.decode("utf-8", "surrogateescape").rstrip("\r")

    def select(self, chosen: np.ndarray) -> bytes:
        """Return some lines, each with a line feed at its end."""
        block = self._block
        if not chosen.all():
            pieces = []
            start = 0
            for number in np.flatnonzero(~chosen).tolist():
                pieces.append(block[start : self._starts[number]])
                start = int(self._ends[number]) + 1
            block = b"".join([*pieces, block[start:]])
        return block.replace(b"\r", b"" if self._end == "\n" else b"\n")

    def find_odd(self) -> np.ndarray:
        """Return whether pyarrow might split each line in another way `[lines]`."""
        block, ends = self._block, self._ends
        odd = np.zeros(len(ends), bool)

        def mark(places: np.ndarray | list[int]) -> None:
            odd[np.searchsorted(ends, places)] = True

        if b'"' in block:
            mark(self._strange_quotes())
        if not (self._delimiter.isascii() and (self._delimiter > " " or self._delimiter == "\t")):
            odd[:] = True
        if self._end == "\r":
            mark(np.flatnonzero(self._bytes == ord("\n")))
        elif b"\r" in block:
            breaks = np.flatnonzero(self._bytes == ord("\r"))
            following = self._bytes[np.minimum(breaks + 1, len(block) - 1)]
            mark(breaks[(following != ord("\n")) & (breaks + 1 < len(block))])
        if not block.isascii():
            # Pyarrow drops it where it begins.
            mark([found.start() for found in re.finditer(codecs.BOM_UTF8, block)])
            try:
                block.decode()
            except UnicodeDecodeError:
                mark(np.flatnonzero(self._bytes > 127))
        return odd

    def _strange_quotes(self) -> np.ndarray:
        """Return the places of quotes in lines where some quote does not enclose a whole cell."""
        quotes = np.flatnonzero(self._bytes == ord('"'))
        lines = np.searchsorted(self._ends, quotes)
        self.quoted, first, counts = np.unique(lines, return_index=True, return_counts=True)
        is_closing = (np.arange(len(quotes)) - np.repeat(first, counts)) % 2 == 1
        # Ends of lines stand around the block.
        around = np.concatenate([[ord("\n")], self._bytes, [ord("\n")]])
        beside = np.where(is_closing, around[quotes + 2], around[quotes])
        is_whole = np.isin(beside, [ord(self._delimiter[0]) % 256, ord("\n"), ord("\r")])
        is_strange = np.repeat(counts % 2 == 1, counts) | ~is_whole
        return quotes[is_strange]
