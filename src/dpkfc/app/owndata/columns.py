"""What is public about a column of a table, and the features of its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.app.owndata.cells import (
    MISSING,
    PLAIN,
    NumberForm,
    is_date_format,
    read_moment,
)
from dpkfc.app.owndata.kinds import KINDS, TEXT_BUCKETS, Kind, Meaning
from dpkfc.app.owndata.names import is_free_text, is_identifier
from dpkfc.app.owndata.scales import SCALES
from dpkfc.app.toml import ConfigError

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.
    from dpkfc.app.owndata.decoding import Texts

# Each bucket is a feature of every row.
MOST_BUCKETS = 2**20


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is public about one column of a table.

    Attributes:
        kind: one of `KINDS`.
        bounds: least and greatest number or date; for a pair four bounds, of both numbers.
        categories: known texts; all others share one bucket.
        buckets: hash texts to so many buckets instead.
        missing: texts that mean a missing value, unless `categories` has them; empty as the
            schema says.
        identifier: False where a person has looked at the name and found no identifier.
        numeric: whether categories are numbers, so that 1 and 1.0 are one.
        decimal, thousands: as of a schema; empty as the schema says.
        signs: whether a comparison sign before a number is dropped.
        measured_in: what may stand behind a number or before it, such as "mg" or "$".
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
        wanted_bounds = self.kind_value.wanted_bounds
        if wanted_bounds and not (may_be_open and self.is_open) and not self.limits:
            form = self.format or "%d.%m.%Y"
            in_format = f" or by format = {form!r:.20}" if self.kind == "date" else ""
            raise ConfigError(
                f"{start} needs bounds = {wanted_bounds}{in_format}, known without the data; got"
                f" {list(self.bounds)!s:.50}"
            )
        if self.kind == "category" and not self.categories and self.buckets < 1:
            text = ", or kind = 'text'" if is_free_text(name) else ""
            raise ConfigError(f"{start} needs categories = [...] or buckets = NUMBER{text}")
        for number, category in enumerate(self.categories):
            names = [self._name(other) for other in self.categories[:number]]
            if self._name(category) in names:
                raise ConfigError(f"{start}: category {category!r} stands twice; leave one out")
        if not 0 <= self.buckets <= MOST_BUCKETS:
            raise ConfigError(
                f"{start}: buckets must be 1 to {MOST_BUCKETS:,}, got {self.buckets}; give fewer"
            )
        if self.kind == "text" and not is_power_of_two(self.buckets or TEXT_BUCKETS):
            raise ConfigError(
                f"{start}: buckets of a text must be a power of two, got {self.buckets}"
            )

    def _check_form(self, start: str) -> None:
        """Refuse signs that contradict each other, and keys of other kinds."""
        self.number_form.check(start)
        if self.scale not in SCALES:
            raise ConfigError(f"{start}: scale must be 'log' or left out, got {self.scale!r:.20}")
        if self.format and not is_date_format(self.format):
            raise ConfigError(
                f"{start}: format {self.format!r:.30} is not one of dates; write it as for"
                " strptime, such as '%d.%m.%Y' for 31.12.1999"
            )
        for other, kind in KINDS.items():
            for key in kind.keys:
                if getattr(self, key) and key not in self.kind_value.keys:
                    raise ConfigError(
                        f"{start}: {key} is for kind = {other!r}, got kind = {self.kind!r}"
                    )

    @property
    def kind_value(self) -> Kind:
        """What such columns have in common; of a kind that does not exist, nothing."""
        return KINDS.get(self.kind, KINDS["ignore"])

    @cached_property
    def number_form(self) -> NumberForm:
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
        is_whole = len(ends) == 2 * self.kind_value.numbers
        if not is_whole or not all(are_bounds(pair) for pair in pairs):
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
        values = self.kind_value.width(self)
        return values + 1 if values else 0

    def meaning(self, text: str | None) -> Meaning | None:
        """Return what a text means in this column, None for a missing value.

        Every reader of files takes the meaning of a cell from here: the numbers of a number, a
        pair, a date (seconds since 1970) or a flag (1 or −1), and the name of a category or a text.
        """
        if text is None:
            return None
        # Of numbers and dates the value says whether it is missing.
        if not self.kind_value.numbers and self._name(text) in self._missing:
            return None
        meaning = self.kind_value.read(self, text)
        return None if meaning in self._missing_values else meaning

    def _name(self, text: str) -> str:
        return self.kind_value.name(self, text)

    @cached_property
    def _missing(self) -> frozenset[str]:
        # "None" may be a category: of side effects, of risk.
        names = frozenset(map(self._name, self.missing or MISSING))
        return names.difference(map(self._name, self.categories))

    @cached_property
    def _missing_values(self) -> frozenset[Meaning | None]:
        """Numbers and dates that mean a missing value, such as 999."""
        texts = self.missing if self.kind_value.numbers else ()
        return frozenset(self.kind_value.read(self, text) for text in texts)

    def encode(self, texts: Texts) -> EncodedColumn:
        """Encode the values of a column, each by itself.

        Args:
            texts: None for a missing one `[N]`.

        Returns:
            Features float32 `[N, width]`; the last one is 1 for a missing value, whose others are
            zero.
        """
        from dpkfc.app.owndata.decoding import choose, distinct, plain_numbers

        if self.kind == "number":
            numbers = plain_numbers(texts, self.number_form)
            missing = [value[0] for value in self._missing_values if value]
            numbers[np.isin(numbers, missing)] = np.nan
            # Python looks at all others.
            (rest,) = np.nonzero(np.isnan(numbers))
            codes, known = distinct(choose(texts, rest))
            values = np.full(len(known), np.nan)
            for place, text in enumerate(known):
                meaning = self.meaning(text)
                if meaning is not None:
                    values[place] = meaning[0]
            numbers[rest] = values[codes]
            encoded = self._encode_meanings(np.isnan(numbers), numbers[~np.isnan(numbers)])
            encoded.is_unread[rest] = self._are_unread(known, np.isnan(values))[codes]
            return encoded
        codes, known = distinct(texts)
        meanings = [self.meaning(text) for text in known]
        is_missing = np.array([meaning is None for meaning in meanings], bool)
        present = [meaning for meaning in meanings if meaning is not None]
        encoded = self._encode_meanings(is_missing, present)
        return EncodedColumn(
            features=encoded.features[codes],
            is_missing=is_missing[codes],
            is_unread=self._are_unread(known, is_missing)[codes],
            is_unexpected=encoded.is_unexpected[codes],
        )

    def _are_unread(self, texts: Sequence[str | None], is_missing: np.ndarray) -> np.ndarray:
        """Return which of the texts without a meaning `[N]` say something all the same."""
        return np.array(
            [
                is_absent
                and text is not None
                and text.strip() != ""
                and self._name(text) not in self._missing
                and self.kind_value.read(self, text) is None
                for text, is_absent in zip(texts, is_missing.tolist(), strict=True)
            ],
            bool,
        )

    def _encode_meanings(self, is_missing: np.ndarray, present: Any) -> EncodedColumn:
        """Return the features of missing values `[N]` and of the others."""
        encode = self.kind_value.encode
        assert encode is not None
        rows = np.zeros((len(is_missing), self.width), np.float32)
        rows[is_missing, -1] = 1.0
        unexpected = np.zeros(len(is_missing), bool)
        rows[~is_missing, :-1], unexpected[~is_missing] = encode(self, present)
        return EncodedColumn(rows, is_missing, np.zeros_like(is_missing), unexpected)


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
class EncodedColumn:
    """The features of a column.

    Attributes:
        features: float32 `[N, width]`.
        is_missing: whether each value is missing `[N]`. PRIVATE.
        is_unread: whether it is missing since its text is not of the column's kind `[N]`. PRIVATE.
        is_unexpected: whether each is a number outside of the bounds, or of no known category
            `[N]`. PRIVATE.
    """

    features: np.ndarray
    is_missing: np.ndarray
    is_unread: np.ndarray
    is_unexpected: np.ndarray
