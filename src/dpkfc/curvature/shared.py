"""What several layers have in common, formed once.

Layers that read the same tensor (queries, keys and values) have the same input factor. Equal rows are noticed as they
arrive, so that their product and its eigenpairs are formed once. Nothing is approximated by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.linalg import Eigen

__all__ = ["Shared"]

_REMEMBERED = 1 << 24  # entries of a tensor that may be kept a little longer to see whether the next layer reads it too


class Shared:
    """What consecutive layers have in common, formed once.

    It remembers the last two tensors of rows, their products and the last eigendecompositions. Equality is by content,
    so what is shared is what would have been computed.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._products: list[tuple[Tensor, float, Tensor]] = []
        self._eigen: list[tuple[Tensor, Any, Eigen]] = []

    def rows(self, rows: Tensor) -> Tensor:
        """These rows, as the tensor that was seen before where that is equal."""
        for held in self._rows:
            if held.shape == rows.shape and held.dtype == rows.dtype and torch.equal(held, rows):
                return held
        if rows.numel() <= _REMEMBERED:
            self._rows = [rows, *self._rows[:1]]
        return rows

    def product(self, rows: Tensor, scale: float, make: Callable[[], Tensor]) -> Tensor:
        """What was made of these rows (the same tensor) in this scale, or what `make` makes."""
        for held, of, product in self._products:
            if held is rows and of == scale:
                return product
        made = make()
        if any(rows is held for held in self._rows):
            self._products = [(rows, scale, made), *self._products[:1]]
        return made

    def eigen(self, matrix: Tensor, key: Any, make: Callable[[], Eigen]) -> Eigen:
        """The decomposition of an equal matrix under an equal key, or what `make` makes."""
        for held, of, eigen in self._eigen:
            if of == key and held.shape == matrix.shape and held.dtype == matrix.dtype and torch.equal(held, matrix):
                return eigen
        made = make()
        self._eigen = [(matrix, key, made), *self._eigen[:1]]
        return made

    def forget(self) -> None:
        """Drop the rows and products of a micro-batch."""
        self._rows, self._products = [], []
