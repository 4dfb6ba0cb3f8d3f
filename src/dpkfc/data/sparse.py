"""Rows of which few numbers are not zero, such as bags of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from dpkfc.data.stored_rows import StoredRows


@dataclass(frozen=True, eq=False)
class SparseRows(StoredRows):
    """Rows that are stored as a sparse matrix, and become dense where they are read.

    They stand in the place of a tensor `[N, width]` in the data set of a session.

    Attributes:
        matrix: the rows, a `csr_array` of float32.
    """

    matrix: Any

    # What a tensor of these rows would say.
    dtype = torch.float32
    device = torch.device("cpu")
    ndim = 2

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size(self.matrix.shape)

    def take(self, rows: Any) -> SparseRows:
        """Return some rows, sparse."""
        rows = rows if isinstance(rows, slice) else np.asarray(rows)
        return SparseRows(self.matrix[rows])

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows, dense: `[width]` for a number, else `[n, width]`."""
        if isinstance(rows, int):
            return self[[rows]][0]
        return torch.from_numpy(self.take(rows).matrix.toarray())


def join_rows(parts: Sequence[Any]) -> Any:
    """Return the rows of tensors, or of sparse rows of one width, behind one another."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return SparseRows(scipy.sparse.vstack([part.matrix for part in parts], format="csr"))
