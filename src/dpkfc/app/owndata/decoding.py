"""Columns of texts as values, at the speed of pyarrow where a text is plain.

What a text means is for `Column.meaning`. Here is only what gives the same for whole columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pa_compute

from dpkfc.app.arrow import to_arrow, to_numpy
from dpkfc.app.owndata.cells import NumberForm

# A column: texts, None where a value is missing. A list may hold texts that are not Unicode.
Texts = Any  # pyarrow has no types: pa.Array | Sequence[str | None]

# Numbers that pyarrow and Python read alike, with a mark before the fraction.
_PLAIN = r"^[+-]?([0-9]+\{0}?[0-9]*|\{0}[0-9]+)([eE][+-]?[0-9]+)?$"


def distinct(texts: Texts) -> tuple[np.ndarray, list[str | None]]:
    """Return a number for each text `[N]`, and the text of each number."""
    if isinstance(texts, pa.Array):
        encoded = texts.dictionary_encode(null_encoding="encode")
        return to_numpy(encoded.indices), encoded.dictionary.to_pylist()
    known: list[str | None] = list(dict.fromkeys(texts))
    number_of = {text: number for number, text in enumerate(known)}
    return np.fromiter(map(number_of.__getitem__, texts), np.int64, len(texts)), known


def list_texts(texts: Texts) -> list[str | None]:
    """Return texts in Python, equal ones as one object."""
    codes, known = distinct(texts)
    return [known[code] for code in codes.tolist()]


def choose(texts: Texts, rows: np.ndarray) -> Texts:
    """Return the texts of some rows."""
    if isinstance(texts, pa.Array):
        return texts.take(to_arrow(rows))
    return [texts[row] for row in rows]


def plain_numbers(texts: Texts, form: NumberForm) -> np.ndarray:
    """Return numbers float64 `[N]`, NaN for each text that is not plainly one in this form."""
    is_simple = not (form.thousands or form.signs or form.measured_in)
    if not isinstance(texts, pa.Array) or not is_simple:
        return np.full(len(texts), np.nan)
    if form.decimal == ".":
        try:
            return _cast(texts)
        except pa.ArrowInvalid:
            pass
    is_plain = pa_compute.match_substring_regex(texts, _PLAIN.format(form.decimal))
    plain = pa_compute.if_else(is_plain, texts, None)
    if form.decimal != ".":
        plain = pa_compute.replace_substring(plain, form.decimal, ".")
    return _cast(plain)


def _cast(texts: pa.Array) -> np.ndarray:
    return to_numpy(texts.cast(pa.float64()))
