"""What is public about a column: how its texts are read, and how a value becomes features.

Encoding reads one value at a time, so nothing about other rows is in the features of a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.app.owndata.bounds import bin_numbers
from dpkfc.app.owndata.cells import (
    MISSING,
    PLAIN,
    THOUSANDS,
    NumberForm,
    canonical,
    category_name,
    is_date_format,
    read_flag,
    read_moment,
    read_number,
    read_pair,
)
from dpkfc.app.owndata.names import is_free_text, is_identifier
from dpkfc.app.owndata.scales import SCALES, to_share
from dpkfc.app.toml import ConfigError

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.

    from dpkfc.app.owndata.decoding import Texts

KINDS = ("number", "pair", "date", "category", "flag", "text", "ignore", "unit")
# Columns of a text without `buckets`.
TEXT_BUCKETS = 1024
_HASH_KEY = b"dpkfc categories 1"


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is public about one column of a table.

    Attributes:
        kind: one of `KINDS`.
        bounds: least and greatest number or date; for a pair four bounds, of both numbers.
        categories: known texts; all others share one bucket.
        buckets: hash texts to so many buckets instead.
        missing: texts that mean a missing value; empty as the schema says.
        identifier: False where a person has looked at the name and found no identifier.
        numeric: whether categories are numbers, so that 1 and 1.0 are one.
        decimal, thousands: as of a schema; empty as the schema says.
        signs: whether a comparison sign before a number is dropped.
        measured_in: what may stand behind a number, such as "mg".
        format: of a date, as of `strptime`; empty for ISO 8601, which is read in any case.
        origin: of the bounds: "private" where a run has found them, "default" where it saw too few
            numbers, empty where a person has stated them.
        scale: "log" for a number whose factors count rather than its differences, such as income;
            with zero within the bounds it is linear below a thousandth of the larger one.
    """

    kind: str = ""
    bounds: tuple[float | str, ...] = ()
    categories: tuple[str, ...] = ()
    buckets: int = 0
    missing: tuple[str, ...] = ()
    identifier: bool = True
    numeric: bool = False
    decimal: str = ""
    thousands: str = ""
    signs: bool = False
    measured_in: str = ""
    format: str = ""
    origin: str = ""
    scale: str = ""

    def check(self, name: str, where: str, *, may_be_open: bool = False) -> None:
        """Refuse a column that cannot be encoded, or that should not be.

        Args:
            name: of the column.
            where: the file.
            may_be_open: whether numbers may lack bounds, which are then found privately.

        Raises:
            ConfigError: naming the column and the fix.
        """
        start = f"{where}: column {name!r}"
        if self.kind not in KINDS:
            raise ConfigError(f"{start} has kind {self.kind!r}; choose {' | '.join(KINDS)}")
        if self.identifier and is_identifier(name) and self.kind not in ("ignore", "unit"):
            raise ConfigError(
                f"{start} looks like an identifier: set kind = 'ignore' or 'unit', or"
                " identifier = false if it names no person"
            )
        if self.origin not in ("", "private", "default") or (self.origin and not self.bounds):
            raise ConfigError(f"{start} has origin {self.origin!r}; a run sets it, leave it out")
        self._check_form(start)
        if self.kind in _BOUNDED and not (may_be_open and self.is_open) and not self.limits:
            form = f" or {self.format!r:.20}" if self.format else ""
            raise ConfigError(
                f"{start} needs bounds = {_BOUNDED[self.kind]}{form}, known without the data; got"
                f" {list(self.bounds)!s:.50}"
            )
        if self.kind == "category" and not self.categories and self.buckets < 1:
            text = ", or kind = 'text'" if is_free_text(name) else ""
            raise ConfigError(f"{start} needs categories = [...] or buckets = NUMBER{text}")
        for number, category in enumerate(self.categories):
            names = [self._name(other) for other in self.categories[:number]]
            if self._name(category) in names:
                raise ConfigError(f"{start}: category {category!r} stands twice; leave one out")
        if self.kind == "text" and not is_power_of_two(self.buckets or TEXT_BUCKETS):
            raise ConfigError(
                f"{start}: buckets of a text must be a power of two, got {self.buckets}"
            )

    def _check_form(self, start: str) -> None:
        """Refuse signs that contradict each other, and keys of other kinds."""
        form = self.form
        if form.decimal not in (".", ",") or form.decimal == form.thousands:
            raise ConfigError(
                f"{start}: decimal must be '.' or ',' and not thousands, got {form.decimal!r:.20}"
            )
        if form.thousands not in THOUSANDS:
            raise ConfigError(
                f"{start}: thousands must be '.', ',', ' ' or \"'\", got {form.thousands!r:.20}"
            )
        if self.scale not in SCALES:
            raise ConfigError(f"{start}: scale must be 'log' or left out, got {self.scale!r:.20}")
        if self.format and not is_date_format(self.format):
            raise ConfigError(
                f"{start}: format {self.format!r:.30} is not one of dates; write it as for"
                " strptime, such as '%d.%m.%Y' for 31.12.1999"
            )
        kinds_of_key = {
            "numeric": ("category",),
            "signs": ("number", "pair"),
            "measured_in": ("number", "pair"),
            "format": ("date",),
            "scale": ("number",),
        }
        for key, kinds in kinds_of_key.items():
            if getattr(self, key) and self.kind not in kinds:
                raise ConfigError(
                    f"{start}: {key} is for kind = {kinds[0]!r}, got kind = {self.kind!r}"
                )

    @cached_property
    def form(self) -> NumberForm:
        """How numbers are written."""
        form = NumberForm(self.decimal or ".", self.thousands, self.signs, self.measured_in)
        return PLAIN if form == PLAIN else form

    @property
    def reads_numbers(self) -> bool:
        """Whether texts are read as numbers."""
        return self.kind in ("number", "pair") or self.numeric

    @property
    def limits(self) -> list[tuple[float, float]]:
        """Least and greatest value of each number, none where the bounds are not right."""
        ends: list[float] = []
        for bound in self.bounds:
            value: float | None = None
            if isinstance(bound, str) and self.kind == "date":
                value = read_moment(bound, self.format)
                value = read_moment(bound) if value is None else value
            elif not isinstance(bound, str) and self.kind != "date":
                value = bound
            if value is None:
                return []
            ends.append(value)
        pairs = list(zip(ends[::2], ends[1::2], strict=False))
        wanted = {"number": 2, "date": 2, "pair": 4}.get(self.kind)
        if len(ends) != wanted or not all(are_bounds(pair) for pair in pairs):
            return []
        return pairs

    @property
    def is_open(self) -> bool:
        """Whether a number has no bounds yet."""
        return self.kind == "number" and not self.bounds

    @property
    def is_private(self) -> bool:
        """Whether a release decides the bounds, or has decided them."""
        return self.is_open or bool(self.origin)

    @property
    def width(self) -> int:
        """Number of features, the indicator of a missing value included."""
        values = {
            "number": 1,
            "pair": 2,
            "date": 1,
            "flag": 1,
            "category": self.buckets or len(self.categories) + 1,
            "text": self.buckets or TEXT_BUCKETS,
        }
        return values[self.kind] + 1 if self.kind in values else 0

    def meaning(self, text: str | None) -> Meaning | None:
        """Return what a text means in this column, None for a missing value.

        Every reader of files takes the meaning of a cell from here: the numbers of a number, a
        pair, a date (seconds since 1970) or a flag (1 or −1), and the name of a category or a text.
        """
        if text is None:
            return None
        if self.kind == "number":
            value = read_number(text, self.form)
            return None if value is None or value in self._missing_numbers else (value,)
        if self._name(text) in self._missing:
            return None
        if self.kind == "pair":
            return read_pair(text, self.form)
        if self.kind == "date":
            moment = read_moment(text, self.format)
            if moment is None and self.format:
                # As stored dates are written.
                moment = read_moment(text)
            return None if moment is None else (moment,)
        if self.kind == "flag":
            flag = read_flag(text)
            return None if flag is None else (flag,)
        return self._name(text) if self.kind == "category" else text

    def _name(self, text: str) -> str:
        """Return what categories and missing values are compared by."""
        if self.kind == "category":
            return category_name(text, self.form if self.numeric else None)
        return text.strip() if self.kind == "text" else canonical(text)

    @cached_property
    def _missing(self) -> frozenset[str]:
        return frozenset(map(self._name, self.missing or MISSING))

    @cached_property
    def _missing_numbers(self) -> frozenset[float | None]:
        """Numbers that mean a missing value, such as 999."""
        return frozenset(read_number(text, self.form) for text in self.missing)

    def encode(self, texts: Texts) -> Encoded:
        """Encode the values of a column, each by itself.

        Args:
            texts: None for a missing one `[N]`.

        Returns:
            Features float32 `[N, width]`; the last one is 1 for a missing value, whose others are
            zero.
        """
        from dpkfc.app.owndata.decoding import choose, distinct, plain_numbers

        if self.kind == "number":
            numbers = plain_numbers(texts, self.form)
            numbers[np.isin(numbers, [x for x in self._missing_numbers if x is not None])] = np.nan
            # Python looks at all others.
            (rest,) = np.nonzero(np.isnan(numbers))
            codes, known = distinct(choose(texts, rest))
            read = [np.nan if (found := self.meaning(x)) is None else found[0] for x in known]
            numbers[rest] = np.array(read, np.float64)[codes]
            return self._encode_meanings(np.isnan(numbers), numbers[~np.isnan(numbers)])
        codes, known = distinct(texts)
        meanings = [self.meaning(text) for text in known]
        is_missing = np.array([meaning is None for meaning in meanings], bool)
        present = [meaning for meaning in meanings if meaning is not None]
        encoded = self._encode_meanings(is_missing, present)
        return Encoded(
            features=encoded.features[codes],
            is_missing=is_missing[codes],
            is_unexpected=encoded.is_unexpected[codes],
        )

    def _encode_meanings(self, is_missing: np.ndarray, present: Any) -> Encoded:
        """Return the features of missing values `[N]` and of the others."""
        rows = np.zeros((len(is_missing), self.width), np.float32)
        rows[is_missing, -1] = 1.0
        unexpected = np.zeros(len(is_missing), bool)
        rows[~is_missing, :-1], unexpected[~is_missing] = _ENCODERS[self.kind](self, present)
        return Encoded(rows, is_missing, unexpected)


# What a text means: numbers, or a name.
Meaning = tuple[float, ...] | str
_BOUNDED = {
    "number": "[least, greatest]",
    "date": "[earliest, latest] as 1999-12-31",
    "pair": "[least, greatest, least, greatest] of its two numbers",
}


def is_power_of_two(number: int) -> bool:
    """Return whether a number is a power of two above 1."""
    return number > 1 and not number & (number - 1)


def are_bounds(bounds: tuple[float, ...]) -> bool:
    """Return whether two numbers are bounds with a finite distance."""
    if len(bounds) != 2:
        return False
    least, greatest = bounds
    return least < greatest and greatest - least < math.inf


@dataclass(frozen=True)
class Encoded:
    """The features of a column.

    Attributes:
        features: float32 `[N, width]`.
        is_missing: whether each value is missing `[N]`. PRIVATE.
        is_unexpected: whether each is a number outside of the bounds, or of no known category
            `[N]`. PRIVATE.
    """

    features: np.ndarray
    is_missing: np.ndarray
    is_unexpected: np.ndarray


_Rows = tuple[np.ndarray, np.ndarray]


def _encode_numbers(column: Column, values: Any) -> _Rows:
    """Map the bounds to −1 and 1, and clamp what lies outside; without bounds return bins."""
    numbers = np.array(values, np.float64).reshape(len(values), column.width - 1)
    if column.is_open:
        return bin_numbers(numbers).astype(np.float32), np.zeros(len(values), bool)
    least, greatest = np.array(column.limits).T
    clamped = np.clip(numbers, least, greatest)
    places = zip(clamped.T, least, greatest, strict=True)
    shares = [to_share(numbers, low, high, column.scale) for numbers, low, high in places]
    scaled = np.stack(shares, axis=1) * 2 - 1
    return scaled, (clamped != numbers).any(axis=1)


def _encode_categories(column: Column, values: list[Any]) -> _Rows:
    """Return one-hot rows; the last place belongs to unknown categories, which buckets lack."""
    rows = np.zeros((len(values), column.width - 1), np.float32)
    unexpected = np.zeros(len(values), bool)
    names = [column.meaning(category) for category in column.categories]
    place_of = {name: place for place, name in enumerate(names)}
    for number, name in enumerate(values):
        if column.buckets:
            place = _bucket(name, column.buckets)
        else:
            place = place_of.get(name, len(column.categories))
            unexpected[number] = name not in place_of
        rows[number, place] = 1.0
    return rows, unexpected


def _bucket(text: str, buckets: int) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=_HASH_KEY)
    return int.from_bytes(digest.digest(), "big") % buckets


def _encode_flags(column: Column, values: list[Any]) -> _Rows:
    rows = np.array(values, np.float32).reshape(len(values), 1)
    return rows, np.zeros(len(values), bool)


def _encode_texts(column: Column, values: list[Any]) -> _Rows:
    rows = np.zeros((0, column.width - 1), np.float32)
    if values:
        from dpkfc.app.datasets.text import hashed_texts

        rows = hashed_texts(values, column.width - 1).numpy()
    return rows, np.zeros(len(values), bool)


_ENCODERS: dict[str, Callable[[Column, list[Any]], _Rows]] = {
    "number": _encode_numbers,
    "pair": _encode_numbers,
    "date": _encode_numbers,
    "category": _encode_categories,
    "flag": _encode_flags,
    "text": _encode_texts,
}
