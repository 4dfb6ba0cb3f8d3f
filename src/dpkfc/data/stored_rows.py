"""Rows that stand in the place of a tensor in a data set, and become one where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class StoredRows(Protocol):
    """Rows `[N, width]` that memory holds in another form, or does not hold.

    A data set of a session may have them in the place of a tensor. A class that derives from this
    one has the two methods below that are written here.
    """

    # What a tensor of these rows would say.
    dtype: torch.dtype
    device: torch.device
    ndim: int
    is_nested: bool = False

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""

    def take(self, rows: Any) -> StoredRows:
        """Return some rows as they are stored."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield the rows `[size, width]` as tensors, in order; no rows once, as a tensor does."""
        return (self[start : start + size] for start in range(0, max(1, len(self)), size))
