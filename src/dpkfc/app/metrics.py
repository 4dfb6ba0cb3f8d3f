"""The figures of a run: a row a step, in a Parquet file that says what ε does not protect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpkfc._errors import one_line
from dpkfc.app.arrow import to_arrow
from dpkfc.app.datasets.unpacking import UnpackedSizeError, check_unpacked_size
from dpkfc.app.run_folder import write_atomically

# The file that a finished run writes last.
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
        accuracy: share of right answers, where it was measured; NaN if no label was known.
        loss: mean loss, where it was measured.
        seconds: wall time of the step. NOT PRIVATE.
        batch_size: realised logical batch. NOT PRIVATE.
        clipped_fraction: share of examples that were clipped. NOT PRIVATE.
        nonfinite_fraction: fraction of examples whose gradient is not finite. NOT PRIVATE.
        median_norm: median norm in the coordinates of the noise. NOT PRIVATE.
        floor_fraction: share of entries at the floor of DP-AdamBC; computed from releases.
        public_loss: mean loss on `public_validation`, where it was measured.
        noisy_loss: released mean on the validation split, where it decides an early end.
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
    public_loss: float | None = None
    noisy_loss: float | None = None

    @property
    def decisive_loss(self) -> float | None:
        """The public figure that may end the run early, where there is one."""
        return self.public_loss if self.noisy_loss is None else self.noisy_loss


# Bytes of a row as Python objects.
_BYTES_OF_ROW = 1024
_TYPES = {"step": pa.int64(), "batch_size": pa.int64()}


def list_unprotected(measured_on: str) -> dict[str, str]:
    """Return the columns of the metrics that ε does not protect, with the reason."""
    reason = _HELD_OUT if measured_on == "validation" else _OUTSIDE
    return {**_NOTES, "accuracy": reason, "loss": reason}


@dataclass
class Metrics:
    """Rows that grow while a run goes on.

    Attributes:
        measured_on: what accuracy and loss are computed on, test or validation.
        rows: one a step.
        refreshes: step, digest and scale of every preconditioner.
        settings: what the run was started with, to compare when it continues; may be empty.
        data: digest of the run's own data, to compare when they were moved; may be empty. PRIVATE.
    """

    measured_on: str = "test"
    rows: list[Row] = field(default_factory=list)
    refreshes: list[dict[str, Any]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""

    def add(self, row: Row) -> None:
        """Append a row, or replace the last row of the same step.

        A figure that is not finite becomes None, but for an accuracy without known labels.
        """
        known = {}
        for name, value in vars(row).items():
            is_kept = name in ("epsilon", "accuracy")
            if is_kept or not isinstance(value, float) or math.isfinite(value):
                known[name] = value
        if self.rows and self.rows[-1].step == row.step:
            self.rows.pop()
        self.rows.append(Row(**known))

    def select_evaluated(self) -> list[Row]:
        """Return the rows at which accuracy was measured."""
        return [row for row in self.rows if row.accuracy is not None]

    def drop_private(self) -> Metrics:
        """Return the metrics without figures of private examples before noise.

        Those are batch sizes, clipped fractions, norms, times, and the digest of the data.
        """
        hidden: dict[str, Any] = dict.fromkeys(_NOTES)
        rows = [replace(row, **hidden) for row in self.rows]
        return Metrics(self.measured_on, rows, list(self.refreshes), self.settings)

    def write(self, path: Path) -> None:
        """Write the Parquet file for its owner alone.

        The schema marks each column `private` or not and says why.

        Raises:
            RunFolderError: the disk cannot take the file; an earlier file remains.
        """
        schema = self._schema()
        columns = []
        for kind in schema:
            values = [getattr(row, kind.name) for row in self.rows]
            missing = np.array([value is None for value in values], bool)
            known = [0 if value is None else value for value in values]
            columns.append(to_arrow(np.array(known, kind.type.to_pandas_dtype()), missing))
        table = pa.Table.from_arrays(columns, schema=schema)

        def write(part: Path) -> None:
            pq.write_table(table, part, write_page_checksum=True)

        write_atomically(path, write, private=True)

    def _schema(self) -> pa.Schema:
        notes = list_unprotected(self.measured_on)
        columns = []
        for column in fields(Row):
            name = column.name
            private = name in _NOTES or (name in notes and self.measured_on == "validation")
            metadata = {"private": str(private).lower(), "note": notes.get(name, "")}
            columns.append(pa.field(name, _column_type(name), metadata=metadata))
        metadata = {
            "measured_on": self.measured_on,
            "refreshes": json.dumps(self.refreshes),
            "settings": json.dumps(dict(self.settings)),
            "data": self.data,
        }
        return pa.schema(columns, metadata=metadata)

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """Read what `write` wrote.

        Raises:
            ValueError: the file is damaged.
            UnpackedSizeError: its rows take more than the limit of `check_unpacked_size`.
        """
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                schema = file.schema_arrow
                _check_columns(schema)
                check_unpacked_size(path, file.metadata.num_rows * _BYTES_OF_ROW)
                rows = file.read().to_pylist()
            stored = schema.metadata or {}
            measured_on = stored[b"measured_on"].decode()
            refreshes = json.loads(stored[b"refreshes"])
            settings = json.loads(stored[b"settings"])
            data = stored.get(b"data", b"").decode()
            missing = any(None in (row["step"], row["epsilon"]) for row in rows)
            if missing or not _are_refreshes(refreshes) or not isinstance(settings, dict):
                raise ValueError("figures are missing")
        except UnpackedSizeError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path}: is not a readable Parquet file of metrics ({one_line(error)}); delete it"
                " to go on"
            ) from None
        return cls(measured_on, [Row(**row) for row in rows], refreshes, settings, data)


def _column_type(column: str) -> pa.DataType:
    return _TYPES.get(column, pa.float64())


def _check_columns(schema: pa.Schema) -> None:
    """Refuse columns that differ from `Row`'s.

    Raises:
        ValueError: naming the column.
    """
    known = {column.name: _column_type(column.name) for column in fields(Row)}
    wrong = [column.name for column in schema if column.type != known.get(column.name)]
    wrong += [name for name in ("step", "epsilon", *schema.names) if schema.names.count(name) != 1]
    if wrong:
        raise ValueError(f"the column {wrong[0]!r} is not one of a run")


def _are_refreshes(rows: Any) -> bool:
    """Return whether these are rows of step, digest and scale."""
    if not isinstance(rows, list):
        return False
    return all(isinstance(row, dict) and {"step", "digest", "scale"} <= set(row) for row in rows)
