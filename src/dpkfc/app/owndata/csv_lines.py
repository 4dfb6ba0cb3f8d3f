"""Lines of a CSV file as cells, sign by sign, and records of several lines.

A line is a record, whatever it holds.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

# Cells of a record, None for one without a form.
Row = list[str] | None
# What stands in a quoted cell, up to the quote that closes it.
_QUOTED = re.compile(r'[^"]*(?:""[^"]*)*')
# What PostgreSQL's COPY and MySQL's OUTFILE write behind a backslash.
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}


def split_line(
    line: str, delimiter: str, quotes: bool = True, escapes: bool = False
) -> tuple[list[str], str]:
    """Return the cells of a line, and whether it is "whole", or "open" or "bad" by its quotes.

    A cell is quoted if its first character that is not blank is a quote; quotes in it are doubled.
    Elsewhere a quote is an ordinary character.

    Args:
        line: without its end.
        delimiter: between cells.
        quotes: whether cells may be quoted at all.
        escapes: whether a backslash may stand before a quote, a delimiter or another sign.
    """
    if delimiter == " ":
        line = re.sub(r"[ \t]+", " ", line).strip(" ")
    if escapes and "\\" in line:
        return _split_escaped(line, delimiter, quotes)
    if not quotes or '"' not in line:
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


def _split_escaped(line: str, delimiter: str, quotes: bool) -> tuple[list[str], str]:
    """Do as `split_line` where a backslash may stand before a sign."""
    blank = "[ \t]*".replace(delimiter, "")
    end = re.escape(delimiter)
    plain = re.compile(rf"((?:[^\\{end}]|\\.)*)", re.DOTALL)
    quoted = re.compile(rf'{blank}"((?:[^\\"]|\\.|"")*)("{blank}|\\?$)', re.DOTALL)

    def resolve(found: re.Match[str]) -> str:
        sign = found[1]
        if not quotes:
            return _ESCAPED.get(sign, sign)
        return sign if sign in ("\\", '"', "\n", delimiter) else found[0]

    cells = []
    place = 0
    while True:
        opened = quoted.match(line, place) if quotes else None
        content = opened or plain.match(line, place)
        assert content is not None
        text = content[1]
        if opened:
            text = text.replace('""', '"')
        # NULL of databases.
        text = "" if text == "\\N" else re.sub(r"\\(.)", resolve, text, flags=re.DOTALL)
        cells.append(text)
        if opened and not opened[2].startswith('"'):
            return cells, "open"
        place = content.end()
        if place == len(line):
            return cells, "whole"
        if not line.startswith(delimiter, place):
            return cells, "bad"
        place += 1


def fit_row(cells: list[str], state: str, width: int) -> Row:
    """Return the cells of a line, None where they do not make a record."""
    return cells if state == "whole" and len(cells) == width else None


@dataclass(frozen=True)
class JoinedLines:
    """Records that begin in lines with quotes.

    Attributes:
        rows: by the number of their first line.
        last: the last line of each record of several lines, by its first.
        is_open: whether a quote is still open at the last line.
    """

    rows: dict[int, Row]
    last: dict[int, int]
    is_open: bool


def join_lines(
    text_of: Callable[[int], str],
    quoted: Sequence[int],
    suspects: Sequence[int],
    width: int,
    delimiter: str,
    joins: bool,
    split: Callable[[str], tuple[list[str], str]],
) -> JoinedLines:
    """Return the records that begin in lines that may be open.

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
        split: returns the cells of a line and its state, as `split_line`.
    """
    rows: dict[int, Row] = {}
    last: dict[int, int] = {}

    @cache
    def read_alone(number: int) -> Row:
        return fit_row(*split(text_of(number)), width)

    def find_end(first: int, count: int) -> int | None:
        """Return the last line of a record that `count` cells begin, None where it is missing.

        It is the first line where no later one closes the record.
        """
        for number in islice(quoted, bisect_right(quoted, first), None):
            # The rest of a line whose cell has been opened before.
            cells, state = split('"' + text_of(number))
            count += len(cells) - 1
            alone = rows[number] if number in rows else read_alone(number)
            is_taken = not joins and (number in last or alone is not None)
            if state == "open" and count <= width and not (is_taken and len(cells) > 1):
                continue
            is_end = state == "whole" and count == width and not is_taken
            return number if is_end else first
        return None

    opening = []
    for number in suspects:
        cells, state = split(text_of(number))
        rows[number] = fit_row(cells, state, width)
        # A quote at the start and nothing in it: it ends a cell, and does not begin one.
        ends = len(cells) == 1 and cells[0].strip(" ")[:1] in ("", delimiter)
        if state == "open" and not ends:
            opening.append((number, len(cells)))
    is_open = False
    for first, count in reversed(opening):
        end = find_end(first, count)
        if end is None:
            is_open = True
        elif end > first:
            text = "\n".join(map(text_of, range(first, end + 1)))
            row = fit_row(*split(text), width)
            if row is not None:
                last[first] = end
                rows[first] = row if joins else None
    return JoinedLines(rows, last, is_open)
