"""The kinds of columns, one value each: what a text means, and which features it becomes.

Every function looks at one value and at what is public of its column, so nothing about other rows
is in the features of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.app.owndata.bounds import bin_numbers
from dpkfc.app.owndata.cells import (
    canonical,
    category_name,
    read_flag,
    read_moment,
    read_number,
    read_pair,
    spell_words,
)
from dpkfc.app.owndata.scales import to_share

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.
    from torch import Generator, Tensor

# A `Column` of `columns`, which imports this file.
Column = Any
# What a text means: numbers, or a name.
Meaning = tuple[float, ...] | str
# Features, and whether each value is outside of the bounds or of no known category.
Features = tuple[np.ndarray, np.ndarray]
# Columns of a text without `buckets`.
TEXT_BUCKETS = 1024
_HASH_KEY = b"dpkfc categories 1"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of column.

    Attributes:
        width: features of a value; 0 where the model has no input for it.
        name: what texts are compared by, with categories and with texts for a missing value.
        read: what a text means, None for a text without a meaning.
        encode: maps meanings to features `[N, width]` and whether each was unexpected.
        draw: public features `[N, width]`, from numbers in [0, 1) `[N]` and a generator.
        numbers: bounded numbers in a value.
        wanted_bounds: which bounds a person has to state, in words.
        keys: of a column that are for such kinds alone.
        misfits: stored types that have no value of this kind.
        example: of a text, for the owner.
        hint: lines of an empty schema, where name or type tell the kind.
    """

    width: Callable[[Column], int] = lambda column: 0
    name: Callable[[Column, str], str] = lambda column, text: canonical(text)
    read: Callable[[Column, str], Meaning | None] = lambda column, text: text
    encode: Callable[[Column, list[Any]], Features] | None = None
    draw: Callable[[Column, Tensor, Generator], Tensor] | None = None
    numbers: int = 0
    wanted_bounds: str = ""
    keys: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    example: str = ""
    hint: str = ""


# --------------------------------------------------------------------------------------------------
# Numbers, pairs of numbers, and dates as seconds since 1970.


def _read_number(column: Column, text: str) -> Meaning | None:
    value = read_number(text, column.number_form)
    return None if value is None else (value,)


def _read_date(column: Column, text: str) -> Meaning | None:
    bounds = column.limits[0] if "%y" in column.format else None
    moment = read_moment(text, column.format, bounds)
    if moment is None and column.format:
        # As stored dates are written.
        moment = read_moment(text)
    return None if moment is None else (moment,)


def _encode_numbers(column: Column, values: list[Any]) -> Features:
    """Map the bounds to −1 and 1, and clamp what lies outside; without bounds return bins."""
    numbers = np.array(values, np.float64).reshape(len(values), column.kind_value.numbers)
    if column.is_open:
        return bin_numbers(numbers).astype(np.float32), np.zeros(len(values), bool)
    least, greatest = np.array(column.limits).T
    clamped = np.clip(numbers, least, greatest)
    scaled = np.empty_like(clamped)
    for place, (low, high) in enumerate(column.limits):
        scaled[:, place] = to_share(clamped[:, place], low, high, column.scale) * 2 - 1
    return scaled, (clamped != numbers).any(axis=1)


def _draw_numbers(column: Column, uniform: Tensor, generator: Generator) -> Tensor:
    import torch

    drawn = [uniform]
    while len(drawn) < column.kind_value.numbers:
        drawn.append(torch.rand(len(uniform), generator=generator))
    return 2 * torch.stack(drawn, dim=1) - 1


# --------------------------------------------------------------------------------------------------
# Categories.


def _name_category(column: Column, text: str) -> str:
    return category_name(text, column.number_form if column.numeric else None)


def _encode_categories(column: Column, values: list[Any]) -> Features:
    """Return one-hot rows; the last place belongs to unknown categories, which buckets lack."""
    rows = np.zeros((len(values), _count_categories(column)), np.float32)
    unexpected = np.zeros(len(values), bool)
    names = [column.meaning(category) for category in column.categories]
    place_of = {name: place for place, name in enumerate(names)}
    for number, name in enumerate(values):
        if column.buckets:
            content = name.encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(content, digest_size=8, key=_HASH_KEY).digest()
            place = int.from_bytes(digest, "big") % column.buckets
        else:
            place = place_of.get(name, len(column.categories))
            unexpected[number] = name not in place_of
        rows[number, place] = 1.0
    return rows, unexpected


def _count_categories(column: Column) -> int:
    return column.buckets or len(column.categories) + 1


def _draw_categories(column: Column, uniform: Tensor, generator: Generator) -> Tensor:
    from torch.nn.functional import one_hot

    count = _count_categories(column)
    return one_hot((uniform * count).long(), count).float()


# --------------------------------------------------------------------------------------------------
# Flags and texts.


def _read_flag(column: Column, text: str) -> Meaning | None:
    flag = read_flag(text)
    return None if flag is None else (flag,)


def _encode_flags(column: Column, values: list[Any]) -> Features:
    return np.array(values, np.float32).reshape(len(values), 1), np.zeros(len(values), bool)


def _draw_flags(column: Column, uniform: Tensor, generator: Generator) -> Tensor:
    import torch

    return torch.where(uniform < 0.5, 1.0, -1.0)[:, None]


def _count_buckets(column: Column) -> int:
    return column.buckets or TEXT_BUCKETS


def _encode_texts(column: Column, values: list[Any]) -> Features:
    width = _count_buckets(column)
    rows = np.zeros((0, width), np.float32)
    if values:
        from dpkfc.app.datasets.text import hashed_texts

        rows = hashed_texts([*map(spell_words, values)], width).numpy()
    return rows, np.zeros(len(values), bool)


def _draw_texts(column: Column, uniform: Tensor, generator: Generator) -> Tensor:
    import torch
    from torch.nn.functional import normalize

    shape = len(uniform), _count_buckets(column)
    signs = torch.randint(-1, 2, shape, generator=generator)
    return normalize(signs.float(), dim=1)


# --------------------------------------------------------------------------------------------------

KINDS = {
    "number": Kind(
        width=lambda column: 1,
        read=_read_number,
        encode=_encode_numbers,
        draw=_draw_numbers,
        numbers=1,
        wanted_bounds="[least, greatest]",
        keys=("bounds", "signs", "measured_in", "scale"),
        misfits=("date", "flag"),
        hint="""\
kind = "number"    # as its type says; a code is a category
bounds = []        # least and greatest""",
    ),
    "pair": Kind(
        width=lambda column: 2,
        read=lambda column, text: read_pair(text, column.number_form),
        encode=_encode_numbers,
        draw=_draw_numbers,
        numbers=2,
        wanted_bounds="[least, greatest, least, greatest] of its two numbers",
        keys=("bounds", "signs", "measured_in"),
        misfits=("number", "date"),
    ),
    "date": Kind(
        width=lambda column: 1,
        read=_read_date,
        encode=_encode_numbers,
        draw=_draw_numbers,
        numbers=1,
        wanted_bounds="[earliest, latest] as 1999-12-31",
        keys=("bounds", "format"),
        misfits=("flag",),
        hint="""\
kind = "date"      # as its type says
bounds = []        # earliest and latest, such as 1990-01-01""",
    ),
    "category": Kind(
        width=_count_categories,
        name=_name_category,
        read=_name_category,
        encode=_encode_categories,
        draw=_draw_categories,
        keys=("categories", "buckets", "numeric"),
        example="any text",
    ),
    "flag": Kind(
        width=lambda column: 1,
        read=_read_flag,
        encode=_encode_flags,
        draw=_draw_flags,
        misfits=("date",),
        example="yes",
        hint="""\
kind = "flag"      # true or false""",
    ),
    "text": Kind(
        width=_count_buckets,
        name=lambda column, text: text.strip(),
        encode=_encode_texts,
        draw=_draw_texts,
        keys=("buckets",),
        example="pain at night",
        hint="""\
kind = "text"      # its words are hashed""",
    ),
    "ignore": Kind(
        hint="""\
kind = "ignore"    # named like an identifier; "unit" where it names the person""",
    ),
    "unit": Kind(),
}
