"""JSON lines: one object a line, whose values are texts as they are written."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.cells import is_unicode, number_text

Entry = dict[str, Any]
# Lines that are read at once.
_LINES = 1 << 12
# Names of encodings whose files are UTF-8, with or without a mark.
_UTF8 = ("ascii", "utf-8", "utf-8-sig")


def read_lines(file: IO[bytes], encoding: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines that are not empty, with their numbers.

    Raises:
        DatasetError: the schema states another encoding than UTF-8, or the file begins with the
            mark of UTF-16, which is not a part of any record.
    """
    lines = []
    for number, content in enumerate(file, start=1):
        if number == 1:
            has_mark = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            name = "utf-16" if has_mark else codecs.lookup(encoding).name
            if name not in _UTF8:
                raise DatasetError(
                    f"{file.name}: JSON lines are read as UTF-8, not as {name}; save it as UTF-8"
                )
        # Bytes that are not UTF-8 become lone surrogates; valid UTF-8 has no lone surrogate.
        encoding = "utf-8-sig" if number == 1 else "utf-8"
        line = content.decode(encoding, "surrogateescape")
        if line.strip():
            lines.append((number, line))
        if len(lines) == _LINES:
            yield lines
            lines = []
    if lines:
        yield lines


def parse_line(line: str) -> Entry:
    """Return the object of a line, an empty one for a line without a form."""
    try:
        entry = json.loads(line, parse_float=_Fraction, parse_constant=_parse_constant)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) and is_unicode(line) else {}


class _Fraction(str):
    """A number of JSON with a fraction or an exponent, as it is written."""


def _parse_constant(text: str) -> _Fraction | None:
    """Return NaN as a missing value, and infinity as a number."""
    return None if text == "NaN" else _Fraction(text)


def value_at(entry: Entry, key: str) -> Any:
    """Return the value of a key, or of nested keys with points between them; None without one."""
    if key in entry or "." not in key:
        return entry.get(key)
    value: Any = entry
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def text_of(value: Any, decimal: str = ".") -> str | None:
    """Return a value as a text, as it stands in the file; None for a value without one."""
    if isinstance(value, _Fraction):
        return value.replace(".", decimal)
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def id_of(value: Any) -> str | None:
    """Return the text of an id, one for each number or object however it is written."""
    return number_text(float(value)) if isinstance(value, _Fraction) else text_of(value)
