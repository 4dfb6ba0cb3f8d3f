"""Records of a user's file as tensors, and their split into training, validation and test.

Each record is split by a public hash of its own content, or of its unit. So one more record changes
no side but its own, and neighbouring files have neighbouring training sets.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples, ExampleSet, choose_rows
from dpkfc.app.owndata.rows import RowFile

if TYPE_CHECKING:
    from torch import Tensor


TEST_SHARE = 0.2
# Shares by what is counted and the column: ("missing", "age") to 0.02.
Figures = Mapping[tuple[str, str], float]
# The label of a record whose class is missing or not among the public ones. A number that is
# missing is NaN.
UNKNOWN = -1
# How the name of the unit of a record without one begins.
ALONE = "record "
# Records that are looked at together where memory counts.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Records:
    """Encoded records, in the order of the file.

    Attributes:
        inputs: `[N, ...]`; or rows in another form, see `dpkfc.data.stored_rows`.
        labels: class numbers `[N]`, `UNKNOWN` where a record has none; or numbers between −1 and 1,
            NaN where a record has none.
        names: what a person finds a record by: a row, a line or a file.
        contents: what decides the side of a record in a split.
        units: the person (or other unit) of each record; empty where each record is one.
        figures: shares of values that were clamped, missing or unknown. PRIVATE.
        file: that holds the inputs, None where memory holds them.
        digest: SHA-256 of the file that they were read from; empty where it is not known. PRIVATE.
        share: as of `ExampleSet`.
    """

    inputs: Tensor
    labels: Tensor
    names: Sequence[object]
    contents: Sequence[bytes]
    units: Sequence[str] = ()
    figures: Figures = field(default_factory=dict)
    file: RowFile | None = None
    digest: str = ""
    share: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_known(self) -> Tensor:
        """Whether each record has a known target `[N]`."""
        if self.labels.is_floating_point():
            return ~self.labels.isnan()
        return self.labels != UNKNOWN

    def select_labelled(self) -> Records:
        """Return the records with a known target. Each record is judged alone."""
        (rows,) = self.is_known.nonzero(as_tuple=True)
        return self.select(rows.tolist())

    def select(self, rows: Sequence[int]) -> Records:
        """Return some of the records."""
        return Records(
            inputs=choose_rows(self.inputs, rows),
            labels=self.labels[rows],
            names=[self.names[row] for row in rows],
            contents=[self.contents[row] for row in rows],
            units=[self.units[row] for row in rows] if self.units else (),
            figures=self.figures,
        )


def split_records(
    records: Records, validation_size: int, seed: int, source: str, keep: Path | None = None
) -> ExampleSet:
    """Split records into training, validation and test examples by public hashes.

    About a fifth become the test split. Of a unit all records fall on one side. A record without a
    known target stays, with loss 0, so that no private value decides the number of records.

    Args:
        records: of a file.
        validation_size: records (or units) of the validation split; 0 for none.
        seed: public.
        source: where the records were read from, for the privacy card.
        keep: where the encoded rows stay after the process, in the order of the splits.

    Raises:
        DatasetError: a side has no records.
    """
    numbers: Any = slice(None)
    encoded = records.contents
    if records.units:
        keys = list(dict.fromkeys(records.units))
        number_of = {unit: number for number, unit in enumerate(keys)}
        numbers = np.array([number_of[unit] for unit in records.units])
        encoded = [unit.encode("utf-8", "surrogatepass") for unit in keys]
    place = _places if records.units else _places_of_equal
    is_test = place(encoded, seed, b"test") < TEST_SHARE
    is_validation = np.zeros(len(is_test), bool)
    if validation_size:
        (rest,) = np.nonzero(~is_test)
        order = np.argsort(place(encoded, seed, b"validation")[rest], kind="stable")
        is_validation[rest[order[:validation_size]]] = True
    is_train = ~(is_test | is_validation)
    if not is_train.any() or not (is_test.any() or records.share):
        raise DatasetError(
            f"{source}: a side of the split is empty (records: {len(records)}); lower"
            " validation_size, or give more records"
        )
    sides = [np.flatnonzero(side[numbers]) for side in (is_train, is_test, is_validation)]
    train, test, validation = _select(records, sides, keep)
    unknown = 1 - records.is_known.count_nonzero() / len(records)
    figures = {**records.figures, ("without a known target", "records"): float(unknown)}
    if records.units:
        alone = sum(unit.startswith(ALONE) for unit in records.units)
        figures["without a unit", "records"] = alone / len(records)
    return ExampleSet(
        train=train,
        test=test,
        validation=validation if validation_size else None,
        source=source,
        units=_unit_numbers(records, sides[0]),
        figures=figures,
        digest=records.digest,
        share=records.share,
    )


def number_equal(contents: Sequence[bytes]) -> list[bytes]:
    """Return the contents, equal ones with a count behind them."""
    seen: Counter[bytes] = Counter()
    keys = []
    for content in contents:
        keys.append(content + b"#%d" % seen[content])
        seen[content] += 1
    return keys


def _places(keys: Sequence[bytes], seed: int, purpose: bytes, end: bytes = b"") -> np.ndarray:
    """Return numbers in [0, 1) `[N]` that follow from keys, a public seed and a purpose."""
    salt = seed.to_bytes(8, "big")
    empty = hashlib.blake2b(digest_size=8, salt=salt, person=purpose)

    def place(key: bytes) -> float:
        digest = empty.copy()
        digest.update(key + end)
        return int.from_bytes(digest.digest(), "big") / 2.0**64

    return np.fromiter(map(place, keys), np.float64, len(keys))


def _places_of_equal(contents: Sequence[bytes], seed: int, purpose: bytes) -> np.ndarray:
    """Return places as of `_places`, where the second of two equal contents is another key."""
    places = _places(contents, seed, purpose, b"#0")
    ordered = np.sort(places)
    repeated = np.append(ordered[1:][ordered[1:] == ordered[:-1]], math.inf)
    del ordered
    alike: list[int] = []
    for start in range(0, len(places), _CHUNK):
        some = places[start : start + _CHUNK]
        (found,) = np.nonzero(repeated[np.searchsorted(repeated, some)] == some)
        alike += (start + found).tolist()
    keys = number_equal([contents[row] for row in alike])
    places[alike] = _places(keys, seed, purpose)
    return places


def _select(records: Records, sides: Sequence[np.ndarray], keep: Path | None) -> list[Examples]:
    """Return the examples of each side."""
    import torch

    from dpkfc.app.owndata.file_rows import FileRows

    rows = [torch.from_numpy(side) for side in sides]
    if records.file is None:
        inputs = [choose_rows(records.inputs, chosen) for chosen in rows]
    else:
        file = records.file.select(sides, keep)
        ends = accumulate(map(len, sides), initial=0)
        inputs = [FileRows(file, range(*part)) for part in pairwise(ends)]
    return [(part, records.labels[chosen]) for part, chosen in zip(inputs, rows, strict=True)]


def _unit_numbers(records: Records, rows: np.ndarray) -> Tensor | None:
    """Return a number for the unit of each of these rows, None where each record is a unit."""
    import torch

    if not records.units:
        return None
    units = [records.units[row] for row in rows]
    # An array of texts would drop null characters at their ends.
    distinct = sorted(set(units))
    number_of = {unit: number for number, unit in enumerate(distinct)}
    return torch.tensor([number_of[unit] for unit in units])
