"""A reader of CSV files that looks at each line by itself: the reference of the fast one."""

import codecs

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.cells import is_unicode
from dpkfc.app.owndata.csv_heading import read_heading
from dpkfc.app.owndata.csv_lines import fit_row, split_line


def read_carefully(path, names, schema):
    """Return columns of a whole file as texts."""
    text = _decode(path.read_bytes(), schema.encoding)
    heading = read_heading(path, text.encode("utf-8", "surrogateescape"), schema)
    if any(heading.names.count(name) != 1 for name in names):
        raise DatasetError("names")
    lines = text.split(heading.end)[heading.lines :]
    lines = [line.rstrip("\r") for line in lines]
    width = len(heading.names)
    records = split_records(lines, width, heading.delimiter, schema.lines_in_cells)
    rows = [row if row is not None and is_unicode("".join(row)) else None for row in records]
    places = {name: heading.names.index(name) for name in names}
    return {
        name: [None if row is None else row[place] for row in rows]
        for name, place in places.items()
    }


def _decode(content, encoding):
    name = codecs.lookup(encoding).name
    if name == "utf-8" and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    if name.startswith("utf-16"):
        return content.decode(encoding, "replace").removeprefix("\ufeff")
    if name == "utf-8":
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    return "\n".join(line.decode(encoding, "replace") for line in content.split(b"\n"))


def split_records(lines, width, delimiter, joins):
    """Return the cells of each record, None for one without a form."""
    split = [split_line(line, delimiter) for line in lines]
    rows = [fit_row(*cells, width) for cells in split]
    last = {}
    for first in reversed(range(len(lines))):
        cells, state = split[first]
        # A quote at the start and nothing in it ends a cell.
        ends = len(cells) == 1 and cells[0].strip(" ")[:1] in ("", delimiter)
        if state != "open" or ends:
            continue
        count = len(cells)
        for number in range(first + 1, len(lines)):
            if '"' not in lines[number]:
                continue
            cells, state = split_line('"' + lines[number], delimiter)
            count += len(cells) - 1
            is_taken = not joins and (number in last or rows[number] is not None)
            if state == "open" and count <= width and not (is_taken and len(cells) > 1):
                continue
            if state == "whole" and count == width and not is_taken:
                joined = "\n".join(lines[first : number + 1])
                row = fit_row(*split_line(joined, delimiter), width)
                if row is not None:
                    last[first] = number
                    rows[first] = row if joins else None
            break
    records = []
    end = -1
    for number, line in enumerate(lines):
        if number > end and line:
            records.append(rows[number])
            end = last.get(number, -1)
    return records
