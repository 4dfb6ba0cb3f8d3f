"""Tables of spreadsheets and statistics packages: Excel, SPSS, Stata, SAS.

Their common readers change data silently: durations wrap at 24 hours, one label turns a
column of numbers into categories, integers become floats. Here codes stay codes, numbers stay
numbers, and dates are converted from a list of formats alone.
"""

from __future__ import annotations

import codecs
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata.cells import number_text
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.toml import shorten

SPREADSHEETS = (".xlsx", ".xlsm")
STATISTICS = (".sav", ".zsav", ".por", ".dta", ".sas7bdat", ".xpt")


@dataclass(frozen=True)
class Described:
    """What a file says of its columns, and no row.

    Attributes:
        names: of the columns, in their order.
        stored: "text", "number" or "date", by name.
        formats: how the package shows a number, by name.
        labels: codes of a column with the names that the package shows, by column.
    """

    names: Sequence[str]
    stored: Mapping[str, str]
    formats: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_Writer = Callable[[float], str | None]
# Columns as texts by name, the number of records, and the number of malformed records.
Columns = tuple[dict[str, list[str | None]], int, int]


def describe(path: Path, sheet: str = "", stated: Sequence[str] = ()) -> Described:
    """Return what a file says of its columns.

    Args:
        path: of the file.
        sheet: of a spreadsheet; empty for the first.
        stated: names of its columns, where no row has them.

    Raises:
        DatasetError: a damaged file, a sheet that it lacks, or a package that is not installed.
    """
    if path.suffix.lower() in SPREADSHEETS:
        with _Sheet(path, sheet, stated) as opened:
            names = opened.names
        return Described(names, dict.fromkeys(names, "text"))
    described = _read_statistics(path, metadataonly=True)[1]
    stored = {}
    formats = {}
    for name in described.column_names:
        formats[name] = described.original_variable_types.get(name) or ""
        stored[name] = "number"
        if described.readstat_variable_types[name] == "string":
            stored[name] = "text"
        elif _date_writer(path, formats[name]):
            stored[name] = "date"
    labels: dict[str, dict[str, str]] = {}
    for name, labels_of_codes in described.variable_value_labels.items():
        labels[name] = {}
        for code, label in labels_of_codes.items():
            text = number_text(code) if isinstance(code, float) else str(code)
            labels[name][text] = label
    return Described(described.column_names, stored, formats, labels)


def read_columns(
    path: Path, names: Sequence[str], decimals: Mapping[str, str], schema: Schema
) -> Columns:
    """Return these columns as texts. A cell without a value is None.

    Args:
        path: of the file.
        names: of columns that it has.
        decimals: the sign before a fraction that a schema states, by name.
        schema: names the sheet of a spreadsheet, the encoding of texts in a file that does not say
            it, and the column of ids, whose bytes always have a text.

    Raises:
        DatasetError: as `describe`.
    """
    if path.suffix.lower() in SPREADSHEETS:
        with _Sheet(path, schema.sheet, schema.names) as sheet:
            try:
                return sheet.read(names, decimals)
            except _DAMAGES as error:
                raise damaged_error(path, f"cannot be read ({type(error).__name__})") from None
    described = _read_statistics(path, metadataonly=True)[1]
    values = _read_raw(path, names, described.column_names)
    known = _python_encoding(described.file_encoding) or schema.encoding
    columns = {}
    for name in names:
        write = _date_writer(path, described.original_variable_types.get(name) or "")
        sign = decimals.get(name, ".")
        texts = [_write_value(value, sign, write) for value in values[name]]
        if described.readstat_variable_types[name] == "string" and _may_be_raw(path):
            errors = "surrogateescape" if name == schema.unit else "strict"
            texts = [text and _decode(text, known, errors) for text in texts]
        columns[name] = texts
    return columns, len(next(iter(columns.values()))), 0


# The parser ends at the first byte that is not of an encoding. So texts are read as bytes, each of
# which is a sign of this one, and decoded one by one.
_BYTES = "ISO-8859-1"


def _may_be_raw(path: Path) -> bool:
    return path.suffix.lower() != ".por"


def _read_raw(path: Path, names: Sequence[str], all_names: Sequence[str]) -> Mapping[str, Any]:
    if not _may_be_raw(path):
        return _read_statistics(path, usecols=list(names))[0]
    raw = _read_statistics(path, metadataonly=True, encoding=_BYTES)[1].column_names
    raw_names = {name: raw[list(all_names).index(name)] for name in names}
    values = _read_statistics(path, usecols=list(raw_names.values()), encoding=_BYTES)[0]
    return {name: values[other] for name, other in raw_names.items()}


def _python_encoding(name: str | None) -> str:
    """Return an encoding by its name in Python, empty for one that it does not know."""
    try:
        return codecs.lookup(name).name if name else ""
    except LookupError:
        return ""


def _decode(text: str, encoding: str, errors: str) -> str | None:
    try:
        return text.encode(_BYTES).decode(encoding, errors)
    except UnicodeError:
        return None


def _write_value(
    value: Any, decimal: str, write: Callable[[float], str | None] | None
) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if math.isnan(value):
        return None
    return write(value) if write else number_text(float(value)).replace(".", decimal)


# --------------------------------------------------------------------------------------------------
# Statistics packages, by pyreadstat: seconds stay numbers, and codes are not replaced by labels.

_READERS = {
    ".sav": "read_sav",
    ".zsav": "read_sav",
    ".por": "read_por",
    ".dta": "read_dta",
    ".sas7bdat": "read_sas7bdat",
    ".xpt": "read_xport",
}
_SPSS = datetime(1582, 10, 14)
_1960 = datetime(1960, 1, 1)
# The beginning, the unit in seconds and the formats of dates, and of dates with times.
_DATES: dict[str, list[tuple[datetime, float, frozenset[str]]]] = {
    "spss": [
        (_SPSS, 1, frozenset("DATE ADATE EDATE JDATE SDATE DATETIME YMDHMS".split())),
    ],
    "stata": [
        (_1960, 86400, frozenset(("%TD", "%D"))),
        (_1960, 0.001, frozenset(("%TC",))),
    ],
    "sas": [
        (
            _1960,
            86400,
            frozenset("DATE DDMMYY MMDDYY YYMMDD DDMMYYD MMDDYYD YYMMDDD DDMMYYP E8601DA".split()),
        ),
        (_1960, 1, frozenset("DATETIME E8601DT".split())),
    ],
}
DATE_FORMATS = {
    package: sorted(name for *_, formats in entries for name in formats)
    for package, entries in _DATES.items()
}


def package_of(path: Path) -> str:
    """Return the package that writes such a file."""
    suffix = path.suffix.lower()
    if suffix in (".sav", ".zsav", ".por"):
        return "spss"
    return "stata" if suffix == ".dta" else "sas"


def _date_writer(path: Path, shown: str) -> _Writer | None:
    """Return what writes a number of this format as an ISO date, None for other formats."""
    name = shown.upper().rstrip("0123456789.")
    for begin, unit, formats in _DATES[package_of(path)]:
        # What stands behind %td says how Stata shows the date.
        if name in formats or any(
            f[0] == "%" and len(f) == 3 and name.startswith(f) for f in formats
        ):
            return lambda value: _write_date(begin, value * unit)
    return None


def _write_date(begin: datetime, seconds: float) -> str | None:
    try:
        return _write_moment(begin + timedelta(seconds=seconds))
    except OverflowError:
        return None


def _write_moment(moment: datetime) -> str:
    whole_day = moment.time() == time()
    return moment.date().isoformat() if whole_day else moment.isoformat(sep=" ")


def _read_statistics(path: Path, **chosen: Any) -> tuple[Any, Any]:
    pyreadstat = _import("pyreadstat")
    reader = getattr(pyreadstat, _READERS[path.suffix.lower()])
    try:
        return reader(str(path), disable_datetime_conversion=True, output_format="dict", **chosen)
    # Whatever the parser says about a damaged file.
    except Exception as error:
        raise damaged_error(path, f"cannot be read ({type(error).__name__})") from None


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise DatasetError(f"such tables are read by {name}: pip install '.[files]'") from None


# --------------------------------------------------------------------------------------------------
# Spreadsheets, by openpyxl: the values of a sheet. How a cell is shown does not count.


# What the parser raises on a damaged workbook.
_DAMAGES = (zipfile.BadZipFile, KeyError, ValueError, IndexError, SyntaxError)


class _Sheet:
    """A sheet of a workbook, whose first row names the columns; the first one without a name.

    Args:
        path: of the workbook.
        name: of the sheet.
        stated: names of the columns, where the first row is a record.
    """

    def __init__(self, path: Path, name: str, stated: Sequence[str]) -> None:
        openpyxl = _import("openpyxl")
        try:
            with zipfile.ZipFile(path) as archive:
                check_unpacked_size(path, sum(item.file_size for item in archive.infolist()))
            self._book = openpyxl.load_workbook(path, read_only=True, data_only=True)
            sheets = {sheet.title: sheet for sheet in self._book.worksheets}
            if name and name not in sheets:
                raise DatasetError(
                    f"{path}: has no sheet {name!r:.40}; it has {shorten(sheets, 80)}"
                )
            # A hidden sheet is not what a person sees first.
            every = sorted(sheets.values(), key=lambda sheet: sheet.sheet_state != "visible")
            sheet = sheets[name] if name else every[0]
            sheet.reset_dimensions()
            self._rows: Iterator[Sequence[Any]] = sheet.iter_rows(values_only=True)
            first = stated or next(self._rows, ())
        except DatasetError:
            raise
        except _DAMAGES as error:
            raise damaged_error(path, f"cannot be read ({type(error).__name__})") from None
        cells = [re.sub(r"\s*[\r\n]+\s*", " ", _write_cell(cell, ".") or "") for cell in first]
        self.names = [cell.strip() for cell in cells]

    def __enter__(self) -> _Sheet:
        return self

    def __exit__(self, *error: object) -> None:
        self._book.close()

    def read(self, names: Sequence[str], decimals: Mapping[str, str]) -> Columns:
        """Return columns as texts."""
        places = {name: self.names.index(name) for name in names}
        columns: dict[str, list[str | None]] = {name: [] for name in names}
        count = unreadable = 0
        # A warning would tell of one cell.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in self._rows:
                if all(cell is None for cell in row):
                    continue
                count += 1
                has_form = all(cell is None for cell in row[len(self.names) :])
                unreadable += not has_form
                for name, place in places.items():
                    is_there = has_form and place < len(row)
                    cell = row[place] if is_there else None
                    columns[name].append(_write_cell(cell, decimals.get(name, ".")))
        return columns, count, unreadable


_BEGIN_OF_DATES = datetime(1900, 3, 1)


def _write_cell(value: Any, decimal: str) -> str | None:
    """Return a cell as text. Dates are ISO 8601, durations seconds."""
    if value is None or isinstance(value, str):
        # Errors of formulas.
        return None if value and re.fullmatch(r"#(?:[A-Z0-9/]+[!?]|N/A)", value) else value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return number_text(value).replace(".", decimal)
    if isinstance(value, datetime):
        # Days 59 and 60 are one date to Excel, which knows a 29 February 1900.
        return _write_moment(value) if value >= _BEGIN_OF_DATES else None
    if isinstance(value, timedelta):
        return number_text(value.total_seconds()).replace(".", decimal)
    return value.isoformat() if isinstance(value, date | time) else None
