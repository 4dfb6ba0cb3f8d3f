"""Rows of which few numbers are not zero, such as bags of words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows that are stored as places and values, and become dense where they are read.

    They stand in the place of a tensor `[N, width]` in the data set of a session.

    Attributes:
        starts: where the entries of each row begin `[N]`.
        counts: number of entries of each row `[N]`.
        places: column of each entry, int32 `[entries]`; no row has one twice.
        values: float32 `[entries]`.
        width: number of columns.
    """

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    places: NDArray[np.int32]
    values: NDArray[np.float32]
    width: int

    # What a tensor of these rows would say.
    dtype = torch.float32
    device = torch.device("cpu")
    ndim = 2
    is_nested = False

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size((len(self), self.width))

    def take(self, rows: Any) -> SparseRows:
        """Return some rows, sparse; their entries stay where they are."""
        rows = rows if isinstance(rows, slice) else np.asarray(rows)
        return replace(self, starts=self.starts[rows], counts=self.counts[rows])

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows, dense: `[width]` for a number, else `[n, width]`."""
        if isinstance(rows, int):
            return self[[rows]][0]
        chosen = self.take(rows)
        ends = np.cumsum(chosen.counts)
        entries = np.arange(ends[-1] if len(ends) else 0)
        entries += np.repeat(chosen.starts - ends + chosen.counts, chosen.counts)
        firsts = np.repeat(np.arange(len(chosen)) * self.width, chosen.counts)
        dense = np.zeros(len(chosen) * self.width, np.float32)
        dense[firsts + self.places[entries]] = self.values[entries]
        return torch.from_numpy(dense.reshape(len(chosen), self.width))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield dense rows `[size, width]`, in order."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


def join_rows(parts: Sequence[Any]) -> Any:
    """Return the rows of tensors, or of sparse rows of one width, behind one another."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    starts = []
    size = 0
    for part in parts:
        starts.append(part.starts + size)
        size += len(part.places)
    return replace(
        parts[0],
        starts=np.concatenate(starts),
        counts=np.concatenate([part.counts for part in parts]),
        places=np.concatenate([part.places for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )
