"""Records of a user's file as tensors, and their split into training, validation and test.

Each record is split by a public hash of its own content, or of its unit. So one more record changes
no side but its own, and neighbouring files have neighbouring training sets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples, ExampleSet

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


@dataclass(frozen=True, kw_only=True)
class Records:
    """Encoded records, in the order of the file.

    Attributes:
        inputs: `[N, ...]`.
        labels: class numbers `[N]`, `UNKNOWN` where a record has none; or numbers between −1 and 1,
            NaN where a record has none.
        names: what a person finds a record by: a row, a line or a file.
        contents: what decides the side of a record in a split.
        units: the person (or other unit) of each record; empty where each record is one.
        figures: shares of values that were clamped, missing or unknown. PRIVATE.
    """

    inputs: Tensor
    labels: Tensor
    names: Sequence[str]
    contents: Sequence[bytes]
    units: Sequence[str] = ()
    figures: Figures = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_known(self) -> Tensor:
        """Whether each record has a known target `[N]`."""
        if self.labels.is_floating_point():
            return ~self.labels.isnan()
        return self.labels != UNKNOWN

    def labelled(self) -> Records:
        """Return the records with a known target. Each record is judged alone."""
        (rows,) = self.is_known.nonzero(as_tuple=True)
        return self.select(rows.tolist())

    def select(self, rows: Sequence[int]) -> Records:
        """Return some of the records."""
        return Records(
            inputs=self.inputs[rows],
            labels=self.labels[rows],
            names=[self.names[row] for row in rows],
            contents=[self.contents[row] for row in rows],
            units=[self.units[row] for row in rows] if self.units else (),
            figures=self.figures,
        )


def split_records(records: Records, validation_size: int, seed: int, source: str) -> ExampleSet:
    """Split records into training, validation and test examples by public hashes.

    About a fifth become the test split. Of a unit all records fall on one side. A record without a
    known target stays, with loss 0, so that no private value decides the number of records.

    Args:
        records: of a file.
        validation_size: records (or units) of the validation split; 0 for none.
        seed: public.
        source: where the records were read from, for the privacy card.

    Raises:
        DatasetError: a side has no records.
    """
    keys = [unit.encode("utf-8", "surrogatepass") for unit in records.units]
    if not keys:
        keys = number_equal(records.contents)
    places = [_place(key, seed, b"test") for key in keys]
    is_test = np.array(places) < TEST_SHARE
    rest = [key for key, on_test in zip(keys, is_test, strict=True) if not on_test]
    order = {key: _place(key, seed, b"validation") for key in rest}
    first = sorted(order, key=order.__getitem__)
    chosen = set(first[:validation_size])
    is_validation = np.array([key in chosen for key in keys], bool)
    is_train = ~(is_test | is_validation)
    if not is_train.any() or not is_test.any():
        raise DatasetError(
            f"{source}: {len(keys)} records leave a side of the split empty; lower"
            " validation_size, or give more"
        )
    train_rows = np.flatnonzero(is_train)
    validation = None
    if validation_size:
        validation = _select(records, np.flatnonzero(is_validation))
    unknown = (~records.is_known).double().mean()
    figures = {**records.figures, ("without a known target", "records"): float(unknown)}
    if records.units:
        alone = sum(unit.startswith(ALONE) for unit in records.units)
        figures["without a unit", "records"] = alone / len(records)
    return ExampleSet(
        train=_select(records, train_rows),
        test=_select(records, np.flatnonzero(is_test)),
        validation=validation,
        source=source,
        units=_unit_numbers(records, train_rows),
        figures=figures,
    )


def number_equal(contents: Sequence[bytes]) -> list[bytes]:
    """Return the contents, equal ones with a count behind them."""
    seen: Counter[bytes] = Counter()
    keys = []
    for content in contents:
        keys.append(content + b"#%d" % seen[content])
        seen[content] += 1
    return keys


def _place(key: bytes, seed: int, purpose: bytes) -> float:
    """Return a number in [0, 1) that follows from a key, a public seed and a purpose."""
    salt = seed.to_bytes(8, "big")
    digest = hashlib.blake2b(key, digest_size=8, salt=salt, person=purpose)
    number = int.from_bytes(digest.digest(), "big")
    return number / 2**64


def _select(records: Records, rows: np.ndarray) -> Examples:
    import torch

    chosen = torch.from_numpy(rows)
    return records.inputs[chosen], records.labels[chosen]


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
