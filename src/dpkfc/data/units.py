"""Privacy units larger than a record: all records of one patient or user count as one example.

The sampler draws units. Of a unit with more records than the limit, a uniform subset of the size of
the limit is drawn anew at every step. The choice uses the secret sampling stream and the data of no
other unit. A step therefore stays the plan's event with the unit in place of the example: a mixture
has the guarantee of its components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dpkfc.data.duplicates import check_once
from dpkfc.data.loading import Indices, fix_of_size

_MISSING_TEXTS = {"", "nan", "nat", "none", "<na>"}


@dataclass(frozen=True)
class Units:
    """The records of every unit.

    Attributes:
        records: record numbers, unit after unit `[number of records]`.
        starts: start of each unit in `records`, and their end `[units + 1]`.
        limit: most records of one unit that count in one step.
    """

    records: Indices
    starts: Indices
    limit: int

    @classmethod
    def from_ids(cls, ids: ArrayLike, limit: int) -> Units:
        """Return the units of a column of ids; a unit exists where it has a record.

        Args:
            ids: one id a record `[number of records]`: integers, texts, or anything that sorts.
            limit: most records of one unit in one step, >= 1.

        Raises:
            ValueError: ids that are not a vector, missing ids, ids of mixed kinds.
        """
        _, inverse = np.unique(check_ids(ids), return_inverse=True)
        counts = np.bincount(inverse)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(np.argsort(inverse, kind="stable").astype(np.int64), starts, limit)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def draw(self, units: Indices, generator: np.random.Generator) -> Indices:
        """Return the records of sampled units, at most `limit` of each.

        Args:
            units: unit numbers `[n]`.
            generator: from the sampling stream, after the units were sampled from it.

        Returns:
            Record numbers `[n, k]`, with k the most records of any of these units (1 for no units).
            Shorter rows end with -1.
        """
        chosen = [self._draw_records(int(unit), generator) for unit in units]
        width = max((records.size for records in chosen), default=1)
        table = np.full((len(chosen), width), -1, dtype=np.int64)
        for row, records in zip(table, chosen, strict=True):
            row[: records.size] = records
        return table

    def _draw_records(self, unit: int, generator: np.random.Generator) -> Indices:
        records = self.records[self.starts[unit] : self.starts[unit + 1]]
        if records.size <= self.limit:
            return records
        return np.sort(generator.choice(records, size=self.limit, replace=False))


def read_unit_ids(dataset: Any, units: Any) -> Any:
    """Return the column of ids: `units` itself, or the column of that name in a dataset.

    Raises:
        ValueError: the dataset has no such column.
    """
    if not isinstance(units, str):
        return units
    try:
        return list(dataset[units])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the dataset has no column {units!r} ({type(error).__name__}); give `units` as a"
            " vector with one id a record"
        ) from error


def check_ids(ids: Any) -> NDArray[Any]:
    """Return the ids of units as a vector, all present and of one kind.

    Raises:
        ValueError: ids that are not a vector, missing ids, ids of mixed kinds.
    """
    column = _make_array(ids)
    if column.ndim != 1 or not column.size:
        raise ValueError(
            f"units must be a vector with one id a record, got an array of shape {column.shape}"
        )
    if np.any(_find_missing(column)):
        # Which records, or how many, is private.
        raise ValueError(
            "some records have no unit, so no guarantee covers them: leave them out, or give each"
            " a unit of its own"
        )
    if column.dtype == object and len({type(x) for x in column.tolist()}) > 1:
        raise ValueError("the ids of units are of mixed types; make them all integers or all texts")
    return column


def _make_array(ids: Any) -> NDArray[Any]:
    """Return the ids as an array.

    The ids of a list keep their types: next to one text numpy would make texts of all, of NaN too.
    """
    if isinstance(ids, Tensor):
        return ids.detach().cpu().numpy()
    if isinstance(ids, np.ma.MaskedArray):
        # Masked ids become None.
        ids = ids.tolist()
    elif hasattr(ids, "__array__"):
        return np.asarray(ids)
    values = []
    for x in ids:
        is_scalar = isinstance(x, (Tensor, np.number, np.str_)) and x.ndim == 0
        values.append(x.item() if is_scalar else x)
    if any(map(np.ndim, values)):
        return np.asarray(values, dtype=object)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _find_missing(column: NDArray[Any]) -> list[bool] | NDArray[np.bool_]:
    """Return which ids are None, NaN, NaT, pandas' NA, or one of their texts."""
    if column.dtype.kind in "OUS":
        return [_is_missing(x) for x in column.tolist()]
    return column != column  # noqa: PLR0124


def _is_missing(x: Any) -> bool:
    if x is None:
        return True
    if isinstance(x, bytes):
        x = x.decode("utf-8", "replace")
    if isinstance(x, str):
        return x.strip().lower() in _MISSING_TEXTS
    try:
        # NaN and NaT differ from themselves.
        return bool(x != x)  # noqa: PLR0124
    except TypeError:
        # The truth of a comparison with pandas' NA is undefined.
        return True


def make_units(config: Any, dataset: Any, column: Any, records: int, expected: int) -> Units | None:
    """Return the units of a dataset, None where each record is one.

    Args:
        config: `unit` and `max_records_per_unit` of the plan.
        dataset: the dataset.
        column: ids, or the name of a column, or None.
        records: of the dataset.
        expected: units of the plan.

    Raises:
        ValueError: units and plan do not agree.
    """
    if config.max_records_per_unit is None:
        if column is not None:
            raise ValueError(
                "units were given, but the plan protects single examples; set"
                " PrivacyConfig(unit=..., "
                "max_records_per_unit=...) and dataset_size = number of units"
            )
        check_once(dataset)
        if records != expected:
            raise ValueError(
                f"the plan was calibrated for {expected} examples but the dataset has {records};"
                f" {fix_of_size(dataset)}"
            )
        return None
    if column is None:
        raise ValueError(
            f"the plan protects one {config.unit}, so the session needs units=, one id a record"
        )
    ids = read_unit_ids(dataset, column)
    if len(ids) != records:
        raise ValueError(
            f"units has {len(ids)} ids for the {records} records of the dataset; give one a record"
        )
    units = Units.from_ids(ids, config.max_records_per_unit)
    if len(units) != expected:
        raise ValueError(
            f"the plan was calibrated for {expected} {config.unit}s but the dataset has"
            f" {len(units)}; calibrate with dataset_size=the number of distinct ids"
        )
    return units
