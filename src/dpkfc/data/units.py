"""Privacy units larger than a record: all records of one patient or user count as one example of the mechanism.

The sampler draws units. Of a unit with more records than the limit, as many as the limit are taken, uniformly and anew at
every step: the choice uses the secret sampling stream and no other unit's data, so a step stays the plan's event with the
unit in the place of the example (the guarantee of a mixture is that of its components).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dpkfc.data.checks import check_once

__all__ = ["Units", "unit_ids", "units_of"]

_NO_TEXT = {"", "nan", "nat", "none", "<na>"}


@dataclass(frozen=True)
class Units:
    """The records of every unit.

    Attributes:
        records: record numbers, unit after unit `[number of records]`.
        starts: where each unit begins in `records`, and their end `[units + 1]`.
        limit: most records of one unit that count in one step.
    """

    records: NDArray[np.int64]
    starts: NDArray[np.int64]
    limit: int

    @classmethod
    def of(cls, ids: ArrayLike, limit: int) -> Units:
        """The units that a column of ids describes; a unit exists where it has a record.

        Args:
            ids: one id a record `[number of records]`: integers, texts, or anything that sorts.
            limit: most records of one unit in one step, >= 1.

        Raises:
            ValueError: ids that are not a vector, missing ids, ids of mixed kinds.
        """
        column = _column(ids)
        _, inverse = np.unique(column, return_inverse=True)
        counts = np.bincount(inverse)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(np.argsort(inverse, kind="stable").astype(np.int64), starts, limit)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def draw(self, units: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """The records of sampled units, at most `limit` of each.

        Args:
            units: unit numbers `[n]`.
            generator: from the sampling stream, after the units were drawn from it.

        Returns:
            Record numbers `[n, k]`, k the most records of any of these units (1 for none); -1 fills shorter rows.
        """
        chosen = [self._of_unit(int(unit), generator) for unit in units]
        table = np.full((len(chosen), max((c.size for c in chosen), default=1)), -1, dtype=np.int64)
        for row, records in zip(table, chosen, strict=True):
            row[: records.size] = records
        return table

    def _of_unit(self, unit: int, generator: np.random.Generator) -> NDArray[np.int64]:
        own = self.records[self.starts[unit] : self.starts[unit + 1]]
        return own if own.size <= self.limit else np.sort(generator.choice(own, size=self.limit, replace=False))


def unit_ids(dataset: Any, units: Any) -> Any:
    """The column of ids: `units` itself, or the column of that name of a dataset that has columns.

    Raises:
        ValueError: the dataset has no such column.
    """
    if not isinstance(units, str):
        return units
    try:
        return list(dataset[units])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the dataset has no column {units!r} ({type(error).__name__}); give `units` as a vector with one id a record"
        ) from error


def _column(ids: Any) -> NDArray[Any]:
    column = _as_given(ids)
    if column.ndim != 1 or not column.size:
        raise ValueError(f"units must be a vector with one id a record, got an array of shape {column.shape}")
    missing = np.flatnonzero(_missing(column))
    if missing.size:
        raise ValueError(
            f"record {missing[0]} has no unit ({missing.size} records in all); a record without an owner belongs to nobody's "
            "guarantee: leave it out, or give it a unit of its own"
        )
    if column.dtype == object and len({type(x) for x in column.tolist()}) > 1:
        raise ValueError("the ids of units are of mixed types; make them all integers or all texts")
    return column


def _as_given(ids: Any) -> NDArray[Any]:
    """The ids as an array. Those of a list stay what they are: numpy would make texts of all beside a text, NaN too."""
    if isinstance(ids, Tensor):
        return ids.detach().cpu().numpy()
    if hasattr(ids, "__array__") and not isinstance(ids, np.ma.MaskedArray):
        return np.asarray(ids)
    ids = ids.tolist() if isinstance(ids, np.ma.MaskedArray) else ids  # None where it is masked
    held = [x.item() if isinstance(x, (Tensor, np.number, np.str_)) and x.ndim == 0 else x for x in ids]
    if any(np.ndim(x) for x in held):
        return np.asarray(held, dtype=object)
    column = np.empty(len(held), dtype=object)
    column[:] = held
    return column


def _missing(column: NDArray[Any]) -> Sequence[bool] | NDArray[np.bool_]:
    """None, NaN, NaT and pandas' NA, and the texts that become of them."""
    if column.dtype == object or column.dtype.kind in "US":
        return [x is None or _is_no_value(x) for x in column.tolist()]
    return column != column  # noqa: PLR0124


def _is_no_value(x: Any) -> bool:
    """Whether this compares unequal to itself, (NA) does not say how it compares, or is a text that says nothing."""
    if isinstance(x, (str, bytes)):
        return (x.decode("utf-8", "replace") if isinstance(x, bytes) else x).strip().lower() in _NO_TEXT
    try:
        return bool(x != x)  # noqa: PLR0124
    except TypeError:
        return True


def units_of(config: Any, dataset: Any, column: Any, records: int, expected: int) -> Units | None:
    """The units of a dataset, None where each record is one.

    Args:
        config: `unit` and `max_records_per_unit` of the plan.
        dataset: the dataset.
        column: ids, or the name of a column, or None.
        records: of the dataset.
        expected: units that the plan was calibrated for.

    Raises:
        ValueError: units and plan do not agree.
    """
    if (column is None) != (config.max_records_per_unit is None):
        raise ValueError(
            f"the plan protects one {config.unit}, so the session needs units=, one id a record"
            if column is None
            else "units were given, but the plan protects single examples; say which unit in "
            "PrivacyConfig(unit=..., max_records_per_unit=...) and calibrate with dataset_size = number of units"
        )
    units = None
    if config.max_records_per_unit is None:
        check_once(dataset)
    else:
        ids = unit_ids(dataset, column)
        if len(ids) != records:
            raise ValueError(f"units has {len(ids)} ids for the {records} records of the dataset; give one a record")
        units = Units.of(ids, config.max_records_per_unit)
    found, what = (records, "example") if units is None else (len(units), config.unit)
    if found != expected:
        raise ValueError(
            f"the plan was calibrated for {expected} {what}s but the dataset has {found}; calibrate with "
            f"dataset_size={'len(dataset)' if units is None else 'the number of distinct ids'}"
        )
    return units
