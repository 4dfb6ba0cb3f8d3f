"""Rows of a file in the place of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.app.owndata.rows import RowFile
from dpkfc.data.stored_rows import StoredRows

# Rows that are read at once where each is looked at alone.
_ROWS = 1 << 12


@dataclass(frozen=True, eq=False)
class FileRows(StoredRows):
    """Rows that stay in a file until a batch reads them, as `dpkfc.data.stored_rows` says.

    Attributes:
        file: that holds them.
        numbers: of the rows in the file `[N]`; a range takes no memory.
    """

    file: RowFile
    numbers: np.ndarray | range

    # What a tensor of these rows would say.
    dtype = torch.float32
    device = torch.device("cpu")
    ndim = 2

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size((len(self), self.file.width))

    def take(self, rows: Any) -> FileRows:
        """Return some rows, which stay in the file."""
        numbers = self.numbers
        if isinstance(rows, slice):
            return replace(self, numbers=numbers[rows])
        places = np.asarray(rows)
        if not isinstance(numbers, range):
            return replace(self, numbers=numbers[places])
        # A range is not written out.
        if places.dtype == bool:
            (places,) = places.nonzero()
        if places.size and not -len(numbers) <= places.min() <= places.max() < len(numbers):
            raise IndexError(f"rows are numbered below {len(numbers)}")
        places = places.astype(np.int64) % max(1, len(numbers))
        return replace(self, numbers=numbers.start + numbers.step * places)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows: `[width]` for a number, else `[n, width]`."""
        if isinstance(rows, int):
            return self[[rows]][0]
        numbers = np.asarray(self.take(rows).numbers, np.int64)
        return torch.from_numpy(self.file.copy_rows(numbers))

    def __iter__(self) -> Iterator[Tensor]:
        return (row for rows in self.split(_ROWS) for row in rows)

    def __reduce__(self) -> Any:
        """Become a tensor in another process, which cannot open the file."""
        return torch.Tensor.detach, (self[:],)
