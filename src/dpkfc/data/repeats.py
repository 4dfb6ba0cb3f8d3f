"""Records that stand in a data set more than once: where single examples are protected, each would count as several."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

__all__ = ["check_once"]

_Rows = dict[int, list[NDArray[np.int64]]]


def check_once(dataset: Any) -> None:
    """Raise where torch's own views of data sets (`Subset`, `ConcatDataset`, one inside another) show a record twice.

    An example that stands there k times is drawn k times and moves a sum by k C. Equal records of other kinds of data sets are
    not found.

    Args:
        dataset: any; read is none of it.

    Raises:
        ValueError: naming how many there are, and what to do.
    """
    if not isinstance(dataset, (Subset, ConcatDataset)):
        return
    found: _Rows = {}
    _collect(dataset, np.arange(len(dataset), dtype=np.int64), found)
    repeated = sum(rows.size - np.unique(rows).size for rows in map(np.concatenate, found.values()))
    if repeated:
        raise ValueError(
            f"{repeated} records stand in the dataset more than once (indices of a Subset that repeat, parts of a ConcatDataset "
            "that overlap): an example would count several times, and ε is that of one. Leave the repeats out, weight the losses "
            "instead, or protect the original record: PrivacyConfig(unit='record', max_records_per_unit=...) with units=, the "
            "number of the original record for each one here"
        )


def _collect(dataset: Any, rows: NDArray[np.int64], found: _Rows) -> None:
    """Add the rows of the data sets that lie underneath."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64).reshape(-1)
        size = len(cast("Sized", dataset.dataset))
        _collect(dataset.dataset, np.where(indices < 0, indices + size, indices)[rows], found)
    elif isinstance(dataset, ConcatDataset):
        starts = np.concatenate([[0], dataset.cumulative_sizes])
        for part, start, end in zip(dataset.datasets, starts, starts[1:], strict=False):
            _collect(part, rows[(rows >= start) & (rows < end)] - start, found)
    else:
        found.setdefault(id(dataset), []).append(rows)
