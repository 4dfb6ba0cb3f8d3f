"""Rows of a data set and further ones behind them, without a copy of the data set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkfc.data.stored_rows import StoredRows


class AppendedRows(StoredRows):
    """Rows that stand in the place of a tensor `[N + m, ...]` in the data set of a session.

    Args:
        first: `[N, ...]`, N >= 1; they stay where they are.
        further: `[m, ...]`.
    """

    def __init__(self, first: Tensor | StoredRows, further: Tensor) -> None:
        self._first = first
        self._further = further
        self.dtype, self.device, self.ndim = first.dtype, first.device, first.ndim

    def __len__(self) -> int:
        return len(self._first) + len(self._further)

    @property
    def shape(self) -> torch.Size:
        """Rows and their shape."""
        return torch.Size((len(self), *self._first.shape[1:]))

    def take(self, rows: Any) -> Tensor:
        """Return some rows as a tensor."""
        return self[rows]

    def __getitem__(self, rows: Any) -> Tensor:
        """Return a row for a number, else `[n, ...]`."""
        if isinstance(rows, int):
            return self[[rows]][0]
        if isinstance(rows, slice):
            rows = torch.arange(len(self))[rows]
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        size = len(self._first)
        is_further = rows >= size
        # A copy, whose first row stands in for each further one.
        taken = self._first[rows.masked_fill(is_further, 0)]
        taken[is_further] = self._further[rows[is_further] - size]
        return taken
