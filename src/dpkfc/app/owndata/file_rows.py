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
        numbers: of the rows in the file `[N]`.
    """

    file: RowFile
    numbers: np.ndarray

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
        rows = rows if isinstance(rows, slice) else np.asarray(rows)
        return replace(self, numbers=self.numbers[rows])

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows: `[width]` for a number, else `[n, width]`."""
        if isinstance(rows, int):
            return self[[rows]][0]
        return torch.from_numpy(self.file.copy_rows(self.take(rows).numbers))

    def __iter__(self) -> Iterator[Tensor]:
        return (row for rows in self.split(_ROWS) for row in rows)

    def __reduce__(self) -> Any:
        """Become a tensor in another process, which cannot open the file."""
        return torch.Tensor.detach, (self[:],)


def all_rows(file: RowFile) -> FileRows:
    """Return all rows of a file."""
    return FileRows(file, np.arange(len(file)))
