"""What the text of a cell means: pure functions from a text to a value, one a kind of column.

They look at one text and at what a schema states, and at nothing else. Every reader of files shares
them, so that a value means the same however it was stored.
"""

from __future__ import annotations

import codecs
import math
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timezone
from uuid import UUID

from dpkfc.app.toml import ConfigError

# What schemas take for a missing value where they say nothing.
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?", "\\N")
TRUE = ("true", "t", "yes", "y", "1")
FALSE = ("false", "f", "no", "n", "0")

# What people write between groups of three digits, by the sign that a schema states.
_GROUP_MARKS = {
    "": "",
    ".": ".",
    ",": ",",
    " ": " \u00a0\u2009\u202f",
    "'": "'\u2019",
}
THOUSANDS = tuple(_GROUP_MARKS)
_COMPARISON = re.compile(r"(?:[<>]=?|[≤≥~≈])\s*")
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    r"\s?(Z|UTC|[+-]\d\d:?\d\d|(?(2)[+-]\d\d))?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1)
_UUID = re.compile("[0-9a-f]{32}")
# Bookkeepers write −12 as (12), and SAP as 12-.
_NEGATIVE = re.compile(r"\((.+)\)|(.+)[-−]")
_ALL_DIGITS = re.compile("(?:%[dmyYHMSj])+")
_WHOLE = re.compile(r"(-?\d+)\.0+", re.ASCII)
_DECIMAL = re.compile(r"([+-]?)0*(\d*?)(?:\.(\d*?)0*)?", re.ASCII)


@dataclass(frozen=True)
class NumberForm:
    """How people have written numbers.

    Attributes:
        decimal: the sign before the fraction.
        thousands: the sign between groups of three digits, one of `THOUSANDS`.
        signs: whether a comparison sign before a number is dropped: `<0.5` is 0.5.
        measured_in: what may stand behind a number or before it, such as "mg" or "$".
    """

    decimal: str = "."
    thousands: str = ""
    signs: bool = False
    measured_in: str = ""

    def check(self, where: str) -> None:
        """Refuse signs that contradict each other.

        Raises:
            ConfigError: naming where they stand, and the fix.
        """
        if self.decimal not in (".", ",") or self.decimal == self.thousands:
            raise ConfigError(
                f"{where}: decimal must be '.' or ',' and not thousands, got {self.decimal!r:.20}"
            )
        if self.thousands not in THOUSANDS:
            raise ConfigError(
                f"{where}: thousands must be '.', ',', ' ' or \"'\", got {self.thousands!r:.20}"
            )


PLAIN = NumberForm()


def read_number(text: str, form: NumberForm = PLAIN) -> float | None:
    """Return a number, None where a text is not one. Infinity is a number, which is clamped.

    Digits are 0 to 9 alone, and `1_000` is not a number.
    """
    text = text.strip()
    text = _write_plainly(text, form)
    if text.startswith("−"):
        text = "-" + text[1:]
    try:
        value = float(text)
    except ValueError:
        return None
    # Python also takes digits of other scripts, and an underscore between digits.
    if math.isnan(value) or not text.isascii() or "_" in text:
        return None
    return value


def _write_plainly(text: str, form: NumberForm) -> str:
    """Rewrite a number in Python's notation; a text that is not a number stays one."""
    if form.signs:
        sign = _COMPARISON.match(text)
        text = text[sign.end() :] if sign else text
    if form.measured_in:
        # Greek and Latin have a µ each.
        text, unit = (part.replace("\u00b5", "\u03bc") for part in (text, form.measured_in))
        text = text.removesuffix(unit).rstrip()
        start = text[:1] if text.startswith(("+", "-", "−", "(")) else ""
        end = text[-1:] if text.endswith(("-", "−", ")")) else ""
        inner = text[len(start) : len(text) - len(end)].strip()
        text = start + inner.removeprefix(unit).removesuffix(unit).strip() + end
    negative = _NEGATIVE.fullmatch(text)
    if negative:
        text = "-" + (negative[1] or negative[2]).strip()
    if form.thousands:
        marks = _GROUP_MARKS[form.thousands]
        whole, sign_of_fraction, fraction = text.partition(form.decimal)
        if any(mark in whole for mark in marks):
            if not re.fullmatch(rf"[+\-−]?[0-9]{{1,3}}(?:[{re.escape(marks)}][0-9]{{3}})+", whole):
                return ""
            whole = re.sub(f"[{re.escape(marks)}]", "", whole)
        text = whole + sign_of_fraction + fraction
    if form.decimal != ".":
        text = "" if "." in text else text.replace(form.decimal, ".")
    return text


def read_pair(text: str, form: NumberForm = PLAIN) -> tuple[float, float] | None:
    """Return two numbers with a slash between them, such as a blood pressure of 120/80."""
    first, _, second = text.partition("/")
    values = read_number(first, form), read_number(second, form)
    if values[0] is None or values[1] is None:
        return None
    return values[0], values[1]


def read_moment(
    text: str, date_format: str = "", bounds: tuple[float, float] | None = None
) -> float | None:
    """Return a date or time as seconds since 1970, None where a text is not one.

    Args:
        text: of the cell.
        date_format: as of `datetime.strptime`, such as "%d.%m.%Y"; empty for ISO 8601. A time
            without a zone counts as UTC.
        bounds: that tell the century of a year of two digits.
    """
    text = text.strip()
    if not date_format:
        parts = _ISO.fullmatch(text)
        if parts is None:
            return None
        day, minutes, seconds, fraction, zone = parts.groups()
        text = f"{day} {minutes or '00:00'}:{seconds or '00'}.{(fraction or '0')[:6]}"
        date_format = "%Y-%m-%d %H:%M:%S.%f"
        if zone:
            # Databases write +01 for +01:00.
            zone = "Z" if zone == "UTC" else zone + "00" * (len(zone) == 3)
            text, date_format = f"{text}{zone}", f"{date_format}%z"
    if _ALL_DIGITS.fullmatch(date_format):
        # Numbers have no leading zero, and `strptime` would take a digit of the next part for it.
        width = len(_EPOCH.strftime(date_format))
        text = text if date_format.startswith("%Y") else text.zfill(width)
        if len(text) != width:
            return None
    # Digits of other scripts.
    if any(c.isdigit() and not c.isascii() for c in text):
        return None
    try:
        moment = datetime.strptime(text, date_format)
        if moment.tzinfo is not None:
            moment = moment.astimezone(timezone.utc).replace(tzinfo=None)
        if bounds and "%y" in date_format and _seconds(moment) > bounds[1]:
            earlier = moment.replace(year=moment.year - 100)
            moment = earlier if _seconds(earlier) >= bounds[0] else moment
    except (ValueError, OverflowError):
        return None
    return _seconds(moment)


def _seconds(moment: datetime) -> float:
    return (moment - _EPOCH).total_seconds()


def is_date_format(date_format: str) -> bool:
    """Return whether different moments can be written in a format and read again as such."""
    moments = datetime(1999, 12, 31, 23, 59), datetime(2001, 2, 3, 4, 5)
    written = [moment.strftime(date_format) for moment in moments]
    read = [read_moment(text, date_format) for text in written]
    return None not in read and read[0] != read[1]


def read_flag(text: str) -> float | None:
    """Return 1 for a text that says yes, −1 for no, None for any other."""
    word = canonical(text).lower()
    if word in TRUE:
        return 1.0
    return -1.0 if word in FALSE else None


def _plain_text(text: str) -> str:
    """Return a text without blanks around it; blanks of other widths are blanks.

    Signs without a width vanish, and accents are one sign with their letters.
    """
    if not text.isascii():
        shown = [_SHOWN.get(unicodedata.category(sign), sign) for sign in text]
        text = unicodedata.normalize("NFC", "".join(shown))
    return text.strip()


# What stands for blanks and for signs without a width, by their categories.
_SHOWN = {"Zs": " ", "Cf": ""}


def canonical(text: str) -> str:
    """Return a class, an id or a flag in one form where programs write two.

    Whole numbers are often stored as 1.0 where a value is missing, and true as True or TRUE.
    """
    text = _plain_text(text)
    if text.lower() in ("true", "false"):
        return text.lower()
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def id_name(text: str) -> str:
    """Return what ids are compared by: the canonical text, in letters of one width.

    A UUID stands as it is usually written.
    """
    text = canonical(unicodedata.normalize("NFKC", text))
    digits = text.strip("{}").replace("-", "").lower()
    return str(UUID(digits)) if _UUID.fullmatch(digits) else text


def fold_text(text: str) -> str:
    """Return a text without differences of case and Unicode form."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", folded)


def spell_words(text: str) -> str:
    """Return a text whose words of any script are spelled in plain letters and digits."""
    if text.isascii():
        return text
    return "".join(map(_spell, unicodedata.normalize("NFC", text).lower()))


def _spell(sign: str) -> str:
    if sign.isascii():
        return sign
    if unicodedata.category(sign)[0] not in "LMN":
        return "'" if sign == "’" else " "
    # Chinese and Japanese have no blanks between words.
    blank = " " * (unicodedata.east_asian_width(sign) == "W")
    return f"{blank}u{ord(sign)}{blank}"


def category_name(text: str, form: NumberForm | None = None) -> str:
    """Return what categories are compared by: a plain text, as `canonical` makes it of classes.

    Args:
        text: of the cell.
        form: of categories that are numbers: 250, 250.0 and 2.5e2 are then one. ICD codes are not.
    """
    text = _plain_text(text)
    value = None if form is None else read_number(text, form)
    if form is None or value is None:
        return text
    parts = _DECIMAL.fullmatch(_write_plainly(text, form))
    if parts is None or not math.isfinite(value):
        return number_text(value)
    sign, whole, fraction = parts.groups()
    digits = whole or "0"
    if fraction:
        digits += f".{fraction}"
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def is_known_encoding(name: str) -> bool:
    """Return whether a file in this encoding can be split into lines whatever a line holds.

    Encodings with states are not: a sign in one line would change the lines behind it.
    """
    try:
        if codecs.lookup(name).name.startswith(("utf-16", "utf-32")):
            return True
        # Some of Python's encodings read a backslash and letters as a line feed.
        plain = rb"\n\u000a", bytes(range(128))
        return all(text.decode(name) == text.decode("ascii") for text in plain)
    except (LookupError, ValueError, TypeError):
        return False


def number_text(value: float) -> str:
    """Return a stored number as text. A whole one has neither a point nor an exponent."""
    if math.isfinite(value) and value == int(value):
        return str(int(value))
    return repr(value)


def is_unicode(text: str) -> bool:
    """Return whether a text was UTF-8: bytes that were not are lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
