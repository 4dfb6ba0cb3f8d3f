"""Results that consecutive layers share: queries, keys and values have the same input factor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
_REMEMBERED = 1 << 24  # most entries of cached rows
_OF_MICRO_BATCH = ("rows", "product")


class FactorCache:
    """The last two rows, products and eigendecompositions.

    Contents are compared, so a cached result is the one that would have been computed.
    """

    def __init__(self) -> None:
        self._recent: dict[str, list[tuple[Tensor, Any, Any]]] = defaultdict(list)

    def recall(self, kind: str, tensor: Tensor, key: Any, make: Callable[[], R]) -> R:
        """Return the result for an equal tensor under an equal key, by `make` if it is new.

        Args:
            kind: "rows", "product" or "eigen"; each has results of its own.
            tensor: what the result is computed from.
            key: other settings of the computation.
            make: computes it.
        """
        if kind in _OF_MICRO_BATCH and tensor.numel() > _REMEMBERED:
            return make()
        recent = self._recent[kind]
        for known, known_key, result in recent:
            if known_key == key and _are_equal(known, tensor):
                return result
        made = make()
        self._recent[kind] = [(tensor, key, made), *recent[:1]]
        return made

    def forget(self) -> None:
        """Drop the rows and products of a micro-batch."""
        for kind in _OF_MICRO_BATCH:
            self._recent.pop(kind, None)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return x is y or torch.equal(x, y)
