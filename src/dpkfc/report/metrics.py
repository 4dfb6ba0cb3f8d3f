"""The figures of a run, one row a step, in a Parquet file whose columns say whether ε protects them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["Metrics", "Row", "not_private"]

_OUTSIDE = "a function of released weights and of examples that ε does not cover"
_HELD_OUT = "computed on the validation split: private examples that ε does not protect"
_RAW = "computed from private examples before noise"
_NOTES = {
    "batch_size": _RAW,
    "clipped_fraction": _RAW,
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
    median_norm: float | None = None
    floor_fraction: float | None = None


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
    """

    measured_on: str = "test"
    rows: list[Row] = field(default_factory=list)
    refreshes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Append a row; a figure that is not finite becomes "not known"."""
        known = {k: v for k, v in _items(row) if k == "epsilon" or not isinstance(v, float) or math.isfinite(v)}
        self.rows.append(Row(**known))

    def evaluated(self) -> list[Row]:
        """Rows at which accuracy was measured."""
        return [row for row in self.rows if row.accuracy is not None]

    def write(self, path: Path) -> None:
        """Write the Parquet file; the schema marks each column `private` or not and says why."""
        table = pa.Table.from_pylist([asdict(row) for row in self.rows], schema=self._schema())
        part = path.with_name(path.name + ".part")
        pq.write_table(table, part)
        os.replace(part, path)

    def _schema(self) -> pa.Schema:
        notes = not_private(self.measured_on)
        columns = []
        for f in fields(Row):
            private = f.name in _NOTES or (f.name in notes and self.measured_on == "validation")
            metadata = {"private": str(private).lower(), "note": notes.get(f.name, "")}
            columns.append(pa.field(f.name, _TYPES.get(f.name, pa.float64()), metadata=metadata))
        return pa.schema(columns, metadata={"measured_on": self.measured_on, "refreshes": json.dumps(self.refreshes)})

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """What `write` wrote.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: is no readable Parquet file ({error}); delete it to go on") from None
        stored = table.schema.metadata or {}
        rows = [Row(**row) for row in table.to_pylist()]
        return cls(stored.get(b"measured_on", b"test").decode(), rows, json.loads(stored.get(b"refreshes", b"[]")))


def _items(row: Row) -> Iterable[tuple[str, Any]]:
    return ((f.name, getattr(row, f.name)) for f in fields(row))
