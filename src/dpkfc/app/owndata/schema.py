"""The public schema of a user's data: kinds, bounds, categories and classes, as TOML.

A person writes it from what is known without the data. Encoding reads one value at a time, so
nothing about other rows is in the features of a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpkfc.app.owndata.cells import (
    MISSING,
    PLAIN,
    THOUSANDS,
    NumberForm,
    canonical,
    category_name,
    is_known_encoding,
    read_flag,
    read_moment,
    read_number,
    read_pair,
)
from dpkfc.app.owndata.scales import SCALES, to_share
from dpkfc.app.toml import ConfigError, nearest, read_toml

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.
    from torch import Tensor

    from dpkfc.app.owndata.decoding import Texts

KINDS = ("number", "pair", "date", "category", "flag", "text", "ignore", "unit")
# Columns of a text without `buckets`.
TEXT_BUCKETS = 1024
_HASH_KEY = b"dpkfc categories 1"

# --------------------------------------------------------------------------------------------------
# Names that look as if they identify a person, or like free text.

_IDENTIFIERS = frozenset(
    "id ids uid uuid guid ssn mrn nhs name firstname lastname surname forename fullname username"
    " email passport iban identifier".split()
)
# These name a person alone or with the other words, as in `home_phone` and `street address`. A
# `phone_service` does not.
_CONTACTS = frozenset(
    "mail phone telephone mobile fax address street account license licence".split()
)
_BESIDE_CONTACTS = frozenset(
    "e number numbers no nr num home work private patient customer client person contact".split()
)
_FREE_TEXT = frozenset(
    "note notes comment comments remark remarks text description summary message".split()
)


def words_of_name(name: str) -> set[str]:
    """Return the words of a column's name in lower case: `PatientID` has patient and id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = re.findall(r"[a-z]+", spaced.lower())
    return set(words)


def is_identifier(name: str) -> bool:
    """Return whether a column is named like something that identifies a person."""
    words = words_of_name(name)
    is_contact = bool(words & _CONTACTS) and words <= _CONTACTS | _BESIDE_CONTACTS
    return is_contact or bool(words & _IDENTIFIERS)


def is_free_text(name: str) -> bool:
    """Return whether a column is named like free text."""
    return bool(words_of_name(name) & _FREE_TEXT)


# --------------------------------------------------------------------------------------------------
# Bounds of numbers that a schema leaves out, found by one release of noisy counts over public bins.
#
# The bins of a column are powers of two of the magnitude, with a sign, and zero. They are the same
# for every file. A record counts once in each column, or not at all where it holds no finite
# number.

# Magnitudes from 2⁻²⁰ to 2⁴¹; smaller ones count as zero, larger ones as the largest.
_LEAST_POWER, _GREATEST_POWER = -20, 40
_ZERO_BIN = _GREATEST_POWER - _LEAST_POWER + 1
BINS = 2 * _ZERO_BIN + 1
# The bin of an infinite number, which is not counted.
NO_BIN = -1
DEFAULT_BOUNDS = (-1.0, 1.0)
# Most chance that the noise of any empty bin exceeds the threshold, and widens bounds.
_FALSE_ALARM = 1e-3
# Weights are multiples of this, so that float64 adds them without rounding.
_WEIGHT = 2**20


def bin_numbers(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each number, `NO_BIN` for an infinite one or for none.

    Each number is looked at by itself.
    """
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0.0)
    _, exponents = np.frexp(finite)
    smallest = _LEAST_POWER - 1
    magnitudes = np.clip(exponents - 1, smallest, _GREATEST_POWER) - smallest
    magnitudes = np.where(finite == 0.0, 0, magnitudes)
    signs = np.sign(finite).astype(np.int64)
    bins = _ZERO_BIN + signs * magnitudes
    return np.where(is_finite, bins, NO_BIN)


def count_bins(
    inputs: Tensor, places: Sequence[int], units: Tensor | None = None
) -> NDArray[np.float64]:
    """Return the counts of all bins of some columns. PRIVATE.

    Args:
        inputs: encoded records `[N, width]`: a bin at each place, and an indicator of a missing
            value behind it.
        places: of the columns.
        units: the unit of each record `[N]`. A unit counts once in each column, in parts where it
            has several records.

    Returns:
        Counts `[len(places) · BINS]`. One record or unit more changes them by at most
        `norm_of(len(places))`, in the L2 norm.
    """
    weights = np.full(len(inputs), 1.0)
    if units is not None:
        _, numbers, sizes = np.unique(units.numpy(), return_inverse=True, return_counts=True)
        weights = (_WEIGHT // sizes[numbers]) / _WEIGHT
    counts = []
    for place in places:
        bins = inputs[:, place].numpy().astype(np.int64)
        is_present = inputs[:, place + 1].numpy() == 0
        is_counted = (bins != NO_BIN) & is_present
        counted = bins[is_counted]
        counts.append(np.bincount(counted, weights[is_counted], BINS))
    return np.concatenate(counts)


def norm_of(columns: int) -> float:
    """Return the most that one record or unit changes the counts of so many columns."""
    return math.nextafter(math.sqrt(columns), math.inf)


def choose_bounds(
    noisy: NDArray[np.float64], stddev: float
) -> list[tuple[tuple[float, float], str]]:
    """Return bounds for each column, and "private", or "default" where no bin rises above noise.

    Args:
        noisy: released counts `[columns · BINS]`.
        stddev: of their noise.
    """
    deviations = math.sqrt(2 * math.log(len(noisy) / _FALSE_ALARM))
    threshold = stddev * deviations
    found = []
    for column in noisy.reshape(-1, BINS):
        filled = np.flatnonzero(column > threshold)
        if not len(filled):
            found.append((DEFAULT_BOUNDS, "default"))
            continue
        least, _ = _edges_of_bin(filled[0])
        _, greatest = _edges_of_bin(filled[-1])
        if least == greatest:
            # Only zeros: any interval around them maps them to its middle.
            least, greatest = DEFAULT_BOUNDS
        found.append(((least, greatest), "private"))
    return found


def _edges_of_bin(number: int) -> tuple[float, float]:
    """Return the least and the greatest number of a bin."""
    magnitude = abs(int(number) - _ZERO_BIN) + _LEAST_POWER - 1
    if magnitude < _LEAST_POWER:
        return 0.0, 0.0
    low = math.ldexp(1.0, magnitude)
    if number > _ZERO_BIN:
        return low, 2 * low
    return -2 * low, -low


# --------------------------------------------------------------------------------------------------


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
            raise ConfigError(
                f"{start} needs bounds = {_BOUNDED[self.kind]}, known without the data; got"
                f" {list(self.bounds)}"
            )
        if self.kind == "category" and not self.categories and self.buckets < 1:
            text = ", or kind = 'text'" if is_free_text(name) else ""
            raise ConfigError(f"{start} needs categories = [...] or buckets = NUMBER{text}")
        for number, category in enumerate(self.categories):
            names = [self._name(other) for other in self.categories[:number]]
            if self._name(category) in names:
                raise ConfigError(f"{start}: category {category!r} stands twice; leave one out")
        if self.kind == "text" and not _is_power_of_two(self.buckets or TEXT_BUCKETS):
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
        if len(ends) != wanted or not all(_are_bounds(pair) for pair in pairs):
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

        This alone decides what a cell means, whoever has read it: the numbers of a number, a pair,
        a date (seconds since 1970) or a flag (1 or −1), and the name of a category or a text.
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
    "date": "[earliest, latest] in the format of the column",
    "pair": "[least, greatest, least, greatest] of its two numbers",
}


def _is_power_of_two(number: int) -> bool:
    return number > 1 and not number & (number - 1)


def _are_bounds(bounds: tuple[float, ...]) -> bool:
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


# --------------------------------------------------------------------------------------------------


# A side of an image with features: scattering has 5 numbers a pixel and colour.
MOST_PIXELS = 64


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """What is public about images.

    Attributes:
        size: pixels of each side, to which every image is scaled.
        channels: 3 for colours, 1 for grey.
        broken: "skip" lets a file that cannot be read count as an image without a class; "error"
            names it and ends, which one person's file then decides.
        features: "synthetic" learns a linear head on features that need no data; "network" learns
            a small convolutional network. "" takes the features up to 64 pixels.
        white: the value of white in grey images of more than 8 bits: 4095 where a detector fills 12
            of 16 bits. Greater values are clamped.
        background: "white" or "black": what shows through transparent pixels.
        leave_out: names of folders that are not read.
        file: column of a label file that names files; empty for its first one.
    """

    size: int = 32
    channels: int = 3
    broken: str = "skip"
    features: str = ""
    white: int = 65535
    background: str = "white"
    leave_out: tuple[str, ...] = ()
    file: str = ""

    @property
    def mode(self) -> str:
        """The mode of Pillow that has so many channels."""
        return "RGB" if self.channels == 3 else "L"

    @property
    def has_features(self) -> bool:
        """Whether images are mapped to features."""
        return self.features == "synthetic" or (not self.features and self.size <= MOST_PIXELS)


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """What is public about texts.

    Attributes:
        key: of the text in a line.
        encoder: "words" hashes words; "weighted-words" weights them by how rare they are in
            English; "sentences" is a frozen public sentence encoder.
        buckets: columns of hashed words, a power of two.
        length: tokens that the sentence encoder reads.
    """

    key: str = "text"
    encoder: str = "words"
    buckets: int = 4096
    length: int = 64


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All that is public about a user's data.

    Attributes:
        target: column (or key) that is learned.
        classes: its values, in the order of the model's outputs; empty for a number.
        target_bounds: least and greatest value of a number; empty for classes.
        target_scale: "log" where errors of a number count as factors rather than differences.
        unit: column of the person whose records ε protects together; empty for single records.
        max_records: most records of one unit that count in a step.
        missing: texts that mean a missing value.
        delimiter: of a CSV file; empty takes the one that the header shows. A blank stands for any
            number of blanks.
        encoding: of a CSV file.
        header: whether the first line of a CSV file names the columns.
        names: of the columns, in their order, where no line names them.
        sheet: of a spreadsheet; empty takes the first.
        lines_in_cells: whether a quoted cell of a CSV file may hold line breaks. Quotes then decide
            which lines are one record.
        decimal: the sign before the fraction of a number that is stored as text: "." or ",".
        thousands: the sign between its groups of three digits: ".", ",", " " or "'".
        columns: of a table.
        images: of a folder of images.
        text: of a file of texts.
    """

    target: str = ""
    classes: tuple[str, ...] = ()
    target_bounds: tuple[float, ...] = ()
    target_scale: str = ""
    unit: str = ""
    max_records: int = 4
    missing: tuple[str, ...] = MISSING
    delimiter: str = ""
    encoding: str = "utf-8"
    header: bool = True
    names: tuple[str, ...] = ()
    sheet: str = ""
    lines_in_cells: bool = False
    decimal: str = "."
    thousands: str = ""
    columns: Mapping[str, Column] = field(default_factory=dict)
    images: ImageForm = ImageForm()
    text: TextForm = TextForm()

    @property
    def features(self) -> dict[str, Column]:
        """Return the columns that become features."""
        return {name: column for name, column in self.columns.items() if column.width}

    @property
    def private_columns(self) -> dict[str, int]:
        """Return the place of the first feature of each column whose bounds a release decides."""
        places = {}
        place = 0
        for name, column in self.columns.items():
            if column.is_private:
                places[name] = place
            place += column.width
        return places

    @property
    def is_open(self) -> bool:
        """Whether bounds are still to be found."""
        return any(column.is_open for column in self.columns.values())

    @property
    def width(self) -> int:
        """Number of features of a table."""
        return sum(column.width for column in self.columns.values())


def read_schema(path: Path, target: str = "", *, may_be_open: bool = False) -> Schema:
    """Read a schema from a TOML file.

    Args:
        path: the file.
        target: column that is learned, where a flag names it.
        may_be_open: whether numbers may lack bounds.

    Raises:
        ConfigError: naming the file, the key or column, and the fix.
    """
    where = str(path)
    content = read_toml(path)
    columns = content.pop("columns", {})
    images = content.pop("images", {})
    text = content.pop("text", {})
    if not isinstance(columns, Mapping):
        raise ConfigError(f"{where}: columns must be tables, such as [columns.age]")
    values = _values(Schema, content, where)
    schema = Schema(
        **values,
        columns={
            name: Column(**_values(Column, inner, f"{where} [columns.{name}]"))
            for name, inner in columns.items()
        },
        images=ImageForm(**_values(ImageForm, images, f"{where} [images]")),
        text=TextForm(**_values(TextForm, text, f"{where} [text]")),
    )
    if target and schema.target and target != schema.target:
        raise ConfigError(
            f"{where}: target is {schema.target!r}, and --target says {target!r}; leave one out"
        )
    schema = dataclasses.replace(schema, target=target or schema.target)
    return check_schema(schema, where, may_be_open=may_be_open)


def check_schema(schema: Schema, where: str, *, may_be_open: bool = False) -> Schema:
    """Return a schema whose columns have what their kinds need.

    Raises:
        ConfigError: naming the file, the key or column, and the fix.
    """
    columns = {}
    units = [schema.unit] if schema.unit else []
    for name, stated in schema.columns.items():
        if name == schema.target:
            raise ConfigError(f"{where}: {name!r} is the target; remove [columns.{name}]")
        column = dataclasses.replace(
            stated,
            missing=stated.missing or schema.missing,
            decimal=stated.decimal or schema.decimal,
            thousands=stated.thousands or schema.thousands,
        )
        column.check(name, where, may_be_open=may_be_open)
        columns[name] = column
        if column.kind == "unit":
            units.append(name)
    _check_schema(schema, units, where)
    _check_forms(schema.images, schema.text, where)
    unit = units[0] if units else ""
    return dataclasses.replace(schema, columns=columns, unit=unit)


def _check_schema(schema: Schema, units: list[str], where: str) -> None:
    if len(set(units)) > 1:
        raise ConfigError(f"{where}: {' and '.join(map(repr, units[:2]))} are both units; keep one")
    if schema.target in units:
        raise ConfigError(
            f"{where}: {schema.target!r} is unit and target; name another column as unit"
        )
    different = len(set(map(canonical, schema.classes)))
    if schema.classes and different < max(2, len(schema.classes)):
        raise ConfigError(
            f"{where}: classes must be two or more different values, got {list(schema.classes)}"
        )
    if schema.classes and schema.target_bounds:
        raise ConfigError(
            f"{where}: classes and target_bounds exclude each other; a number has target_bounds"
        )
    if schema.target_bounds and not _are_bounds(schema.target_bounds):
        raise ConfigError(
            f"{where}: target_bounds must be [least, greatest], known without the data; got"
            f" {list(schema.target_bounds)}"
        )
    if schema.target_scale and (schema.target_scale not in SCALES or not schema.target_bounds):
        raise ConfigError(
            f"{where}: target_scale must be 'log' beside target_bounds, or left out; got"
            f" {schema.target_scale!r:.20}"
        )
    if schema.decimal not in (".", ",") or schema.decimal == schema.thousands:
        raise ConfigError(
            f"{where}: decimal must be '.' or ',' and not thousands, got {schema.decimal!r:.20}"
        )
    if schema.thousands not in THOUSANDS:
        raise ConfigError(
            f"{where}: thousands must be '.', ',', ' ' or \"'\", got {schema.thousands!r:.20}"
        )
    if len(schema.delimiter) > 1 or schema.delimiter in ('"', "\r", "\n"):
        raise ConfigError(
            f"{where}: delimiter must be one character, such as ';', got {schema.delimiter!r:.20}"
        )
    if not is_known_encoding(schema.encoding):
        raise ConfigError(
            f"{where}: encoding {schema.encoding!r:.20} is not known; choose utf-8, cp1252,"
            " latin-1, utf-16 or another of Python's"
        )
    if schema.header == bool(schema.names):
        raise ConfigError(
            f"{where}: header = false and names = [...] of all columns belong together"
        )
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: names has two equal names; name each column once")
    if schema.max_records < 1:
        raise ConfigError(f"{where}: max_records must be at least 1, got {schema.max_records}")


def _check_forms(images: ImageForm, text: TextForm, where: str) -> None:
    if images.channels not in (1, 3) or not 8 <= images.size <= 512:
        raise ConfigError(
            f"{where} [images]: channels must be 1 or 3 and size 8 to 512, got {images.channels}"
            f" and {images.size}"
        )
    if images.features not in ("", "synthetic", "network") or (
        images.features == "synthetic" and images.size > MOST_PIXELS
    ):
        raise ConfigError(
            f"{where} [images]: features must be synthetic (size to {MOST_PIXELS}) or network, got"
            f" {images.features!r}"
        )
    if images.broken not in ("error", "skip"):
        raise ConfigError(f"{where} [images]: broken must be error or skip, got {images.broken!r}")
    if images.white < 1:
        raise ConfigError(
            f"{where} [images]: white must be the value of white, such as 4095, got {images.white}"
        )
    if images.background not in ("white", "black"):
        raise ConfigError(
            f"{where} [images]: background must be white or black, got {images.background!r}"
        )
    if text.encoder not in ("words", "weighted-words", "sentences"):
        raise ConfigError(
            f"{where} [text]: encoder must be words, weighted-words or sentences, got "
            f"{text.encoder!r}"
        )
    if not _is_power_of_two(text.buckets):
        raise ConfigError(f"{where} [text]: buckets must be a power of two, got {text.buckets}")
    if not 4 <= text.length <= 512:
        raise ConfigError(f"{where} [text]: length must be 4 to 512, got {text.length}")


def _values(owner: type, content: Any, where: str) -> dict[str, Any]:
    """Return the values of a TOML table in the types of a dataclass."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a table of keys, got {content!r:.40}")
    kinds = {entry.name: str(entry.type) for entry in dataclasses.fields(owner)}
    values = {}
    for key, value in content.items():
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, kinds)}")
        values[key] = _plain_value(kinds[key], value, f"{where}: {key}")
    return values


_PLAIN = {
    "str": str,
    "int": int,
    "bool": bool,
}
_WORDS = {
    "str": "text in quotes",
    "int": "a whole number",
    "bool": "true or false",
    "tuple[str, ...]": "a list",
    "tuple[float, ...]": "a list of numbers",
    "tuple[float | str, ...]": "a list of numbers, or of dates; of a pair [least, greatest, least,"
    " greatest]",
}


def _plain_value(kind: str, value: Any, where: str) -> Any:
    if type(value) is _PLAIN.get(kind):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list):
        return tuple(map(_plain_text, value))
    if kind == "tuple[float, ...]" and isinstance(value, list):
        if all(isinstance(inner, int | float) for inner in value):
            return tuple(map(float, value))
    if kind == "tuple[float | str, ...]" and isinstance(value, list):
        kinds = int | float | str | date
        if all(isinstance(inner, kinds) for inner in value):
            return tuple(x if isinstance(x, str) else _plain_bound(x) for x in value)
    raise ConfigError(f"{where} must be {_WORDS.get(kind, 'a table')}, got {value!r:.40}")


def _plain_bound(value: float | date) -> float | str:
    return value.isoformat() if isinstance(value, date) else float(value)


def _plain_text(value: Any) -> str:
    """Return a text as it stands in a table: 1 is "1", true is "true"."""
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


# --------------------------------------------------------------------------------------------------
# Writing: the schema that a run used, and an empty one for a person to fill in.


def schema_toml(schema: Schema, title: str) -> str:
    """Return a schema as TOML, without keys that have their defaults, for a run folder.

    Args:
        schema: of the run.
        title: one line about the file, without anything of its rows.
    """
    import tomli_w

    table = _plain_table(schema)
    columns = {}
    for name, column in schema.columns.items():
        columns[name] = _plain_table(column)
        for key in ("missing", "decimal", "thousands"):
            if getattr(column, key) == getattr(schema, key):
                columns[name].pop(key, None)
    table["columns"] = columns
    return f"# {title}\n{tomli_w.dumps(table)}"


def _plain_table(value: Any) -> dict[str, Any]:
    """Return the values that are not the defaults of a dataclass."""
    table: dict[str, Any] = {}
    for entry in dataclasses.fields(value):
        inner = getattr(value, entry.name)
        if inner == entry.default:
            continue
        if dataclasses.is_dataclass(inner):
            table[entry.name] = _plain_table(inner)
        else:
            table[entry.name] = list(inner) if isinstance(inner, tuple) else inner
    return table


_KINDS_LINE = f"# {' | '.join(KINDS)}"
_HINTS = {
    "": f"""\
kind = ""          {_KINDS_LINE}
# bounds = []      # of a number: least and greatest
# categories = []  # of a category; or buckets = 32""",
    "number": """\
kind = "number"    # as its type says; a code is a category
bounds = []        # least and greatest""",
    "date": """\
kind = "date"      # as its type says
bounds = []        # earliest and latest, such as 1990-01-01""",
    "flag": """\
kind = "flag"      # true or false""",
    "ignore": """\
kind = "ignore"    # named like an identifier; "unit" where it names the person""",
    "text": """\
kind = "text"      # its words are hashed""",
}


def template(
    columns: Mapping[str, str],
    target: str,
    delimiter: str = ",",
    sections: str = "",
    unusable: Sequence[str] = (),
    labels: Mapping[str, Mapping[str, str]] | None = None,
    encoding: str = "utf-8",
    is_proposed: bool = False,
    sheet: str = "",
) -> str:
    """Return a schema to fill in, made from names and types alone.

    Args:
        columns: the kind of each column where its type tells, else an empty text.
        target: column that is learned.
        delimiter: of a CSV file.
        sections: further TOML, for images and texts.
        unusable: what is left out of the columns, such as a name that stands twice.
        labels: what a statistics package shows for codes, by column.
        encoding: of a CSV file.
        is_proposed: whether no line of the file names the columns.
        sheet: of a spreadsheet; empty for the first.
    """
    import tomli_w

    first = {"target": target, "classes": []}
    lines = [
        "# What is public about the data. Fill it in from what you know without looking at rows.",
        *tomli_w.dumps(first).splitlines(),
        "# classes: all values of the target, such as ['no', 'yes']. Of a number give instead:",
        "# target_bounds = []  # least and greatest",
        f"missing = {json.dumps(MISSING)}",
    ]
    if encoding != "utf-8":
        lines.append(f'encoding = "{encoding}"  # since the header is not UTF-8')
    if sheet:
        lines.append(tomli_w.dumps({"sheet": sheet}).strip())
    if is_proposed:
        lines.append("# The first line does not look like names. Give better ones in their places:")
        lines.append(f"header = false\nnames = {json.dumps(list(columns))}")
    if delimiter != ",":
        lines.append(tomli_w.dumps({"delimiter": delimiter}).strip())
        lines.append('decimal = "."      # or ",", where numbers are written 3,5')
    people = [name for name in columns if is_identifier(name) and name != target]
    if people:
        names = ", ".join(map(repr, people))
        lines.append(f"# Left out, since named like a person's: {names}")
        lines.append("# To keep one, set its kind and identifier = false.")
    if unusable:
        lines.append(f"# Left out, since a schema cannot name it: {', '.join(unusable)}")
    for name, kind in columns.items():
        if name == target:
            continue
        hint = kind
        if is_identifier(name):
            hint = "ignore"
        elif is_free_text(name):
            hint = "text"
        head, *_ = tomli_w.dumps({"columns": {name: {"kind": ""}}}).splitlines()
        shown = (labels or {}).get(name)
        if shown and hint == "number":
            names = ", ".join(f"{code} = {label}" for code, label in shown.items())
            codes = json.dumps(list(shown), ensure_ascii=False)
            text = f'kind = "category"  # {" ".join(names.split())}\ncategories = {codes}'
            lines += ["", head, f"{text}\nnumeric = true"]
            continue
        lines += ["", head, _HINTS[hint]]
    return "\n".join([*lines, sections]).rstrip() + "\n"


# --------------------------------------------------------------------------------------------------


def public_facts(schema: Schema, *, has_release: bool = False) -> dict[str, tuple[str, str]]:
    """Return what a privacy card says of the columns of a schema.

    Args:
        schema: of the run.
        has_release: whether the run itself has found bounds.
    """
    where = "this run's ledger" if has_release else "an earlier run's ledger, whose ε adds up"
    facts = {}
    if schema.columns:
        kinds = [column.kind for column in schema.columns.values()]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
        facts["schema"] = (
            f"columns: {counted}",
            "kinds, categories and all bounds without a row here are stated by the user",
        )
    for origin, reason in _ORIGINS.items():
        bounds = []
        for name, column in schema.columns.items():
            if column.origin == origin:
                bounds.append(f"{name} {column.bounds[0]:g} to {column.bounds[1]:g}")
        if bounds:
            facts[f"bounds, {origin}"] = (", ".join(bounds), f"{reason} {where}")
    return facts


_ORIGINS = {
    "private": "from noisy counts over public bins, the release for bounds in",
    "default": "public; no count rose above the noise of the release for bounds in",
}
