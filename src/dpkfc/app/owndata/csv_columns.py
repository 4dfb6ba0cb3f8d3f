"""Lines of a CSV file as columns: pyarrow splits them, after Python has rewritten the odd ones.

A line that pyarrow might split in another way than `csv_lines` is split there and written again, in
the one form that both read alike. Which lines these are follows from each line alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.csv as pa_csv

from dpkfc.app.owndata.cells import is_unicode
from dpkfc.app.owndata.csv_heading import Heading
from dpkfc.app.owndata.csv_lines import Row, fit_row, join_lines

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
        rows = self._read_odd_lines(lines, is_last)
        if rows is None:
            return None
        records = np.flatnonzero(lines.is_record)
        table, ragged = self._read(lines, rows)
        if ragged:
            for number in records[ragged].tolist():
                rows[number] = self._read_line(lines.text(number))
            table, _ = self._read(lines, rows)
        formless = [number for number, row in rows.items() if row is None]
        has_form = np.isin(records, formless, invert=True)
        columns = {}
        for name in self.names:
            place = self.heading.names.index(name)
            column = table.column(str(place)).combine_chunks()
            if not has_form.all():
                column = pa_compute.if_else(pa.array(has_form), column, None)
            columns[name] = column
        return columns, len(records), int((~has_form).sum())

    def _read_odd_lines(self, lines: _Lines, is_last: bool) -> dict[int, Row] | None:
        """Return the records that begin in odd lines by their first line; drop the other lines.

        Returns:
            None where more lines are needed.
        """
        odd = np.flatnonzero(lines.is_odd).tolist()
        quoted = lines.quoted
        suspects = sorted(set(odd).intersection(quoted)) if self.heading.quotes else []
        width, delimiter = len(self.heading.names), self.heading.delimiter
        split = self.heading.split_line
        joined = join_lines(lines.text, quoted, suspects, width, delimiter, self.joins, split)
        if joined.is_open and not is_last:
            return None
        rows = {}
        for number in odd:
            text = lines.text(number)
            lines.is_record[number] &= bool(text)
            if not lines.is_record[number]:
                continue
            row = joined.rows[number] if number in joined.rows else self._read_line(text)
            if row is not None and not is_unicode("".join(row)):
                row = None
            rows[number] = row
            # The other lines of a record that goes over several.
            last = joined.last.get(number, number)
            lines.is_record[number + 1 : last + 1] = False
        return rows

    def _read_line(self, text: str) -> Row:
        """Return the cells of one line as many as the header has, None where it has no form."""
        cells, state = self.heading.split_line(text)
        return fit_row(cells, state, len(self.heading.names))

    def _read(self, lines: _Lines, rows: Mapping[int, Row]) -> tuple[pa.Table, list[int]]:
        """Return the columns by their places, and the places of records with other cells."""
        width = len(self.heading.names)
        # Pyarrow takes one byte. Where the file's is longer, all lines are written again.
        delimiter = self.heading.delimiter if self.heading.has_plain_delimiter else ","
        empty = [""] * width
        written = {}
        for number, row in rows.items():
            written[number] = _write_line(empty if row is None else row, delimiter)
        content = lines.rewrite(written)
        ragged: list[int] = []

        def skip(row: pa_csv.InvalidRow) -> str:
            ragged.append(row.number - 1)
            return "skip"

        wanted = [self.heading.names.index(name) for name in self.names]
        included = [str(place) for place in dict.fromkeys(wanted)]
        if not content:
            return pa.table({place: pa.array([], pa.string()) for place in included}), ragged
        table = pa_csv.read_csv(
            pa.BufferReader(content),
            pa_csv.ReadOptions(
                use_threads=False,
                column_names=[str(place) for place in range(width)],
                block_size=len(content) + 1,
            ),
            pa_csv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=bool(rows),
                invalid_row_handler=skip,
            ),
            pa_csv.ConvertOptions(
                column_types=dict.fromkeys(included, pa.string()),
                include_columns=included,
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )
        return table, ragged


def _write_line(cells: Sequence[str], delimiter: str) -> bytes:
    """Return a line in which every cell is quoted."""
    quoted = []
    for cell in cells:
        doubled = cell.replace('"', '""')
        quoted.append(f'"{doubled}"')
    return delimiter.join(quoted).encode() + b"\n"


class _Lines:
    """Lines of a block, by their places in it."""

    def __init__(self, block: bytes, heading: Heading) -> None:
        self._block = block
        self._heading = heading
        self._bytes = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(self._bytes == ord(heading.end))
        if block[-1:] != heading.end.encode():
            ends = np.append(ends, len(block))
        self._ends = ends
        self._starts = np.append(0, ends[:-1] + 1)
        self._quotes = np.flatnonzero(self._bytes == ord('"'))
        self._lines_of_quotes = np.searchsorted(ends, self._quotes)

    @cached_property
    def is_record(self) -> np.ndarray:
        """Whether a record begins in each line `[lines]`: at first, whether it holds anything."""
        sizes = self._ends - self._starts
        is_filled: np.ndarray = sizes > 0
        if self._heading.end == "\n" and b"\r" in self._block:
            # A carriage return alone is the end of an empty line, too.
            begins_with_return = self._bytes[self._starts] == ord("\r")
            is_filled &= (sizes > 1) | ~begins_with_return
        return is_filled

    @property
    def quoted(self) -> list[int]:
        """Numbers of the lines with a quote."""
        numbers: list[int] = np.unique(self._lines_of_quotes).tolist()
        return numbers

    def text(self, number: int) -> str:
        """Return a line; bytes that are not UTF-8 are lone surrogates."""
        line = self._block[self._starts[number] : self._ends[number]]
        return line.decode("utf-8", "surrogateescape").rstrip("\r")

    def rewrite(self, written: Mapping[int, bytes]) -> bytes:
        """Return the records, each with a line feed at its end, some of them as written anew."""
        changed = ~self.is_record
        changed[list(written)] = True
        pieces = []
        start = 0
        for number in np.flatnonzero(changed).tolist():
            pieces.append(self._end_lines(self._block[start : self._starts[number]]))
            pieces.append(written.get(number, b""))
            start = int(self._ends[number]) + 1
        pieces.append(self._end_lines(self._block[start:]))
        return b"".join(pieces)

    def _end_lines(self, lines: bytes) -> bytes:
        """Return lines without carriage returns, each of which ends in a line feed."""
        line_feed = b"" if self._heading.end == "\n" else b"\n"
        return lines.replace(b"\r", line_feed)

    @cached_property
    def is_odd(self) -> np.ndarray:
        """Whether pyarrow might split each line in another way `[lines]`."""
        block = self._block
        is_odd = np.full(len(self._ends), not self._heading.has_plain_delimiter)

        def mark(places: np.ndarray | list[int]) -> None:
            is_odd[np.searchsorted(self._ends, places)] = True

        mark(self._find_strange_quotes() if self._heading.quotes else self._quotes)
        if self._heading.escapes:
            mark(np.flatnonzero(self._bytes == ord("\\")))
        if self._heading.end == "\r":
            mark(np.flatnonzero(self._bytes == ord("\n")))
        elif b"\r" in block:
            # A return inside a line ends a line for pyarrow.
            returns = np.flatnonzero(self._bytes == ord("\r"))
            is_last = returns + 1 == len(block)
            following = self._bytes_at(returns + 1)
            mark(returns[~is_last & (following != ord("\n"))])
        if not block.isascii():
            # Pyarrow drops it where it begins.
            mark([found.start() for found in re.finditer(codecs.BOM_UTF8, block)])
            try:
                block.decode()
            except UnicodeDecodeError:
                mark(np.flatnonzero(self._bytes > 127))
        return is_odd

    def _find_strange_quotes(self) -> np.ndarray:
        """Return the places of quotes in lines where some quote does not enclose a whole cell."""
        quotes = self._quotes
        _, first, counts = np.unique(self._lines_of_quotes, return_index=True, return_counts=True)
        # In a line with plain cells, quotes open and close a cell in turn.
        place_in_line = np.arange(len(quotes)) - np.repeat(first, counts)
        is_closing = place_in_line % 2 == 1
        place_outside = np.where(is_closing, quotes + 1, quotes - 1)
        cell_ends = [ord("\n"), ord("\r"), *self._heading.delimiter.encode()[:1]]
        is_at_end = np.isin(self._bytes_at(place_outside), cell_ends)
        is_uneven = np.repeat(counts % 2 == 1, counts)
        return quotes[is_uneven | ~is_at_end]

    def _bytes_at(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes at some places; a line feed stands before the block and behind it."""
        is_inside = (places >= 0) & (places < len(self._bytes))
        return np.where(is_inside, self._bytes[places * is_inside], ord("\n"))
