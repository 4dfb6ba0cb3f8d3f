"""Names of the columns of a table, from its header alone: no row is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata import stored
from dpkfc.app.owndata.cells import MISSING, is_unicode, read_number
from dpkfc.app.owndata.csv_blocks import read_blocks
from dpkfc.app.owndata.csv_heading import read_heading
from dpkfc.app.owndata.packages import describe
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.table_files import DELIMITED, STORED, check_table, open_file, suffix_of
from dpkfc.app.toml import nearest


@dataclass(frozen=True)
class Header:
    """What names the columns of a file.

    Attributes:
        names: in their order. Unnamed columns have an empty one.
        kinds: of column, where the stored type of a name tells; else an empty text. Types that
            cannot be read, as of lists, are left out.
        delimiter: of a CSV file.
        labels: what a statistics package shows for codes, by column.
        encoding: of a CSV file.
        is_proposed: whether the names are proposed, since the first line is a record.
    """

    names: Sequence[str]
    kinds: Mapping[str, str]
    delimiter: str = ","
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    encoding: str = "utf-8"
    is_proposed: bool = False

    @property
    def usable(self) -> dict[str, str]:
        """The kinds of the columns that a schema can name."""
        count = Counter(self.names)
        return {name: kind for name, kind in self.kinds.items() if name and count[name] == 1}

    @property
    def unusable(self) -> list[str]:
        """What a schema cannot name, in words."""
        twice = [name for name, count in Counter(self.names).items() if name and count > 1]
        unnamed = ["a column without a name"] if "" in self.names else []
        nested = [f"{name!r} for its type" for name in self.names if name not in self.kinds]
        return [f"{name!r}, which stands twice" for name in twice] + unnamed + nested

    def check(self, path: Path, wanted: Iterable[str]) -> None:
        """Refuse names that the file lacks or has twice.

        Raises:
            DatasetError: naming the file, the name, and the nearest column or the columns.
        """
        for name in wanted:
            count = list(self.names).count(name)
            if name and count > 1:
                raise DatasetError(f"{path}: two columns are named {name!r}; rename one")
            if not name or not count:
                known = nearest(name, filter(None, self.names))
                if len(self.names) == 1 or not known.endswith("?"):
                    known += "; check the first line and the delimiter"
                raise DatasetError(f"{path}: has no column {name!r:.40}; {known}")


def read_header(
    path: Path,
    schema: Schema | None = None,
    target: str = "",
    sheet: str = "",
    delimiter: str = "",
) -> Header:
    """Return the columns of a file from its header; no row is read.

    Args:
        path: of the table, or a folder of Parquet parts.
        schema: states how a CSV file is written; None takes what is usual.
        target: column that is learned, such as c3 of a file whose first line is a record.
        sheet: of a spreadsheet, where no schema names one.
        delimiter: of a CSV file, where no schema names one.

    Raises:
        DatasetError: the file is missing, empty or none of the known formats, or, without a schema,
            its first line does not look like names. No message repeats a cell of such a line.
    """
    check_table(path)
    if path.is_dir():
        part, folders = next(iter(stored.list_parts(path).items()))
        header = read_header(part)
        names = [*header.names, *(name for name in folders if name not in header.names)]
        return Header(names, {**dict.fromkeys(folders, ""), **header.kinds})
    if suffix_of(path) in STORED:
        with open_file(path) as file:
            return _stored_header(stored.read_schema(path, file))
    labels: Mapping[str, Mapping[str, str]] = {}
    form = schema or Schema(sheet=sheet, delimiter=delimiter)
    if suffix_of(path) in DELIMITED:
        with open_file(path) as file:
            first = next(read_blocks(path, file, form.encoding), b"")
            if schema is None and not is_unicode(_first_line(first)):
                # Each byte is a sign in Windows' encoding.
                form = Schema(encoding="cp1252", delimiter=delimiter)
                file.seek(0)
                first = next(read_blocks(path, file, form.encoding), b"")
        heading = read_heading(path, first, form)
        names, delimiter = heading.names, heading.delimiter
        kinds = dict.fromkeys(names, "")
    else:
        described = describe(path, form.sheet, form.names)
        names, delimiter, labels = [*described.names], ",", described.labels
        kinds = {name: kind.replace("text", "") for name, kind in described.stored.items()}
    if schema is None and not look_like_names(names):
        if suffix_of(path) not in DELIMITED:
            raise no_names_error(path)
        proposed = [f"c{number}" for number in range(1, len(names) + 1)]
        if target not in proposed:
            raise DatasetError(
                f"{path}: its first line does not look like names of columns; write a schema by"
                f" hand, or of a record --target {proposed[-1]} makes one with header = false"
            )
        return Header(
            proposed, dict.fromkeys(proposed, ""), delimiter, {}, form.encoding, is_proposed=True
        )
    if schema is None and len(names) == 1 and suffix_of(path) in DELIMITED:
        signs = Counter(re.findall(r"[^\w\s\"'.-]| ", names[0])).most_common(1)
        sign = signs[0][0] if signs else ";"
        dollar = "" if sign.isprintable() else "$"
        raise DatasetError(
            f"{path}: its header has one column; remove lines above it, or name what divides"
            f" columns: dpkfc schema … --delimiter {dollar}{sign!r}"
        )
    return Header(names, kinds, delimiter, labels, form.encoding)


def _first_line(block: bytes) -> str:
    return block.partition(b"\n")[0].decode("utf-8", "surrogateescape")


def _stored_header(columns: pa.Schema) -> Header:
    kinds = {
        column.name: stored.name_kind(column.type).replace("text", "")
        for column in columns
        if stored.is_readable(column.type)
    }
    return Header(columns.names, kinds)


def no_names_error(path: Path) -> DatasetError:
    """Return the error for a file whose first line is a record."""
    return DatasetError(
        f"{path}: its first line does not look like names of columns; if it is a record, write a"
        " schema with header = false and names = [...]"
    )


# Values that a record has and a header has not.
_VALUES = frozenset((*map(str.lower, MISSING), "yes", "no", "true", "false", "male", "female"))
_VALUES -= {""}


# Dates, files, addresses and UUIDs.
_VALUE = re.compile(
    r"^\d+[-/.:]\w+[-/.:]\d+|\.(png|jpe?g|tiff?|bmp|dcm)$|@|^[0-9a-f]{8}-[0-9a-f]{4}-"
)


# Field, visit and array of UK Biobank.
_FIELD = re.compile(r"\d+-\d+\.\d+", re.ASCII)


def look_like_names(cells: Sequence[str]) -> bool:
    """Return whether cells may be names of columns: not numbers, dates or values, and different."""
    named = [cell.strip().lower() for cell in cells if cell.strip()]
    for cell in named:
        if _FIELD.fullmatch(cell):
            continue
        plain = cell.replace(",", ".").strip("$€£%<>=~ ")
        is_number = read_number(plain) is not None
        has_letter = re.search(r"[^\W\d_]", cell) is not None
        if is_number or not has_letter or cell in _VALUES or _VALUE.search(cell):
            return False
    return len(set(named)) * 2 >= len(named)
