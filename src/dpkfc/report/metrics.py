"""The figures of a run, one row a step, in a Parquet file whose columns say whether ε protects them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpkfc.report.run_folder import placed
from dpkfc.unpack_limit import UnpackedSizeError, check_unpacked_size

__all__ = ["Metrics", "Row", "never_falling", "not_private"]

_OUTSIDE = "a function of released weights and of examples that ε does not cover"
_HELD_OUT = "computed on the validation split: private examples that ε does not protect"
_RAW = "computed from private examples before noise"
_NOTES = {
    "batch_size": _RAW,
    "clipped_fraction": _RAW,
    "nonfinite_fraction": _RAW,
    "median_norm": _RAW,
    "seconds": "depends on the size of the private batch",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step.

    Attributes:
        step: steps done, from 1; row 0 is the untrained model.
        epsilon: ε spent after the step, never below the truth.
        accuracy: share of right answers, where it was measured.
        loss: mean loss, where it was measured.
        seconds: wall time of the step. NOT PRIVATE.
        batch_size: realised logical batch. NOT PRIVATE.
        clipped_fraction: share of examples that were clipped. NOT PRIVATE.
        nonfinite_fraction: fraction of examples whose gradient is not finite. NOT PRIVATE.
        median_norm: median norm in the coordinates of the noise. NOT PRIVATE.
        floor_fraction: share of entries at the floor of DP-AdamBC; computed from releases.
    """

    step: int
    epsilon: float
    accuracy: float | None = None
    loss: float | None = None
    seconds: float | None = None
    batch_size: int | None = None
    clipped_fraction: float | None = None
    nonfinite_fraction: float | None = None
    median_norm: float | None = None
    floor_fraction: float | None = None


_BYTES_OF_ROW = 1024  # of a row as Python objects
_TYPES = {"step": pa.int64(), "batch_size": pa.int64()}


def not_private(measured_on: str) -> dict[str, str]:
    """Columns of the metrics that ε does not protect, with the reason."""
    judged = _HELD_OUT if measured_on == "validation" else _OUTSIDE
    return {**_NOTES, "accuracy": judged, "loss": judged}


@dataclass
class Metrics:
    """Rows that grow while a run goes on.

    Attributes:
        measured_on: what accuracy and loss are computed on, test or validation.
        rows: one a step.
        refreshes: step, digest and scale of every preconditioner.
        settings: what the run was begun with, by which one that goes on is held against; empty where nobody said.
    """

    measured_on: str = "test"
    rows: list[Row] = field(default_factory=list)
    refreshes: list[dict[str, Any]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Append a row, or replace the last one of the same step; a figure that is not finite becomes "not known"."""
        known = {k: v for k, v in _items(row) if k == "epsilon" or not isinstance(v, float) or math.isfinite(v)}
        if self.rows and self.rows[-1].step == row.step:
            self.rows.pop()
        self.rows.append(Row(**known))

    def evaluated(self) -> list[Row]:
        """Rows at which accuracy was measured."""
        return [row for row in self.rows if row.accuracy is not None]

    def without_private(self) -> Metrics:
        """The same run without what private examples told before noise was added: batch sizes, clipped shares, norms."""
        hidden: dict[str, Any] = dict.fromkeys(_NOTES)
        return Metrics(self.measured_on, [replace(row, **hidden) for row in self.rows], list(self.refreshes), self.settings)

    def write(self, path: Path) -> None:
        """Write the Parquet file for its owner alone; the schema marks each column `private` or not and says why.

        Raises:
            RunFolderError: the disk cannot take it; the file that was there before still is.
        """
        table = pa.Table.from_pylist([asdict(row) for row in self.rows], schema=self._schema())
        placed(path, lambda part: pq.write_table(table, part, write_page_checksum=True), private=True)

    def _schema(self) -> pa.Schema:
        notes = not_private(self.measured_on)
        columns = []
        for f in fields(Row):
            private = f.name in _NOTES or (f.name in notes and self.measured_on == "validation")
            metadata = {"private": str(private).lower(), "note": notes.get(f.name, "")}
            columns.append(pa.field(f.name, _type(f.name), metadata=metadata))
        stored = {"refreshes": json.dumps(self.refreshes), "settings": json.dumps(dict(self.settings))}
        return pa.schema(columns, metadata={"measured_on": self.measured_on, **stored})

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """What `write` wrote, ε as `never_falling` has it: older versions wrote grid values beside exact ones.

        Raises:
            ValueError: the file is damaged.
            UnpackedSizeError: its rows take more than the limit of `unpack_limit`.
        """
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                schema = file.schema_arrow
                _check_columns(schema)
                check_unpacked_size(path, file.metadata.num_rows * _BYTES_OF_ROW)
                rows = file.read().to_pylist()
            stored = schema.metadata or {}
            measured_on, refreshes = stored[b"measured_on"].decode(), json.loads(stored[b"refreshes"])
            settings = json.loads(stored.get(b"settings", b"{}"))  # an older version wrote none
            missing = any(row["step"] is None or row["epsilon"] is None for row in rows)
            if missing or not _are_refreshes(refreshes) or not isinstance(settings, dict):
                raise ValueError("figures are missing")
        except UnpackedSizeError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path}: is no readable Parquet file of metrics ({reason}); delete it to go on") from None
        return cls(measured_on, never_falling([Row(**row) for row in rows]), refreshes, settings)


def never_falling(rows: Sequence[Row]) -> list[Row]:
    """Rows with the least ε that a row at the same step or a later one holds.

    What bounds the ε of more steps bounds that of fewer, so an upper bound stays one, and none is larger than the next.

    Args:
        rows: by step; ε of each is at least the truth.
    """
    found: list[Row] = []
    least = math.inf
    for row in reversed(rows):
        least = min(least, row.epsilon)
        found.append(row if row.epsilon == least else replace(row, epsilon=least))
    return found[::-1]


def _type(column: str) -> pa.DataType:
    return _TYPES.get(column, pa.float64())


def _check_columns(schema: pa.Schema) -> None:
    """Raise unless these are columns of `Row`; an older version may have written fewer.

    Raises:
        ValueError: naming the column.
    """
    names = [column.name for column in schema]
    known = {f.name for f in fields(Row)}
    wrong = [column.name for column in schema if column.name not in known or column.type != _type(column.name)]
    wrong += [name for name in ("step", "epsilon") if names.count(name) != 1]
    if wrong or len(set(names)) < len(names):
        raise ValueError(f"the column {wrong[0] if wrong else names[0]!r} is not one of a run")


def _are_refreshes(found: Any) -> bool:
    """Whether these are rows of step, digest and scale."""
    return isinstance(found, list) and all(isinstance(row, dict) and {"step", "digest", "scale"} <= set(row) for row in found)


def _items(row: Row) -> Iterable[tuple[str, Any]]:
    return ((f.name, getattr(row, f.name)) for f in fields(row))
