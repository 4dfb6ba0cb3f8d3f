"""Results that neighbouring layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SHARED_ENTRIES = 1 << 21  # of a result that is stored
_TENSORS = 2  # rows, and the same rows whitened


class InputCache:
    """Results for the last two tensors of a micro-batch, which the next layer may read too.

    Queries, keys and values of one attention read the same tensor. A stored result is exactly what
    would be computed again from the same memory. The cache keeps no rows alive.
    """

    def __init__(self) -> None:
        self._results: list[tuple[StorageWeakRef, Any, dict[Hashable, Tensor]]] = []

    def get_or_compute(self, rows: Tensor, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result for these rows under a key, stored or computed.

        Args:
            rows: a tensor that does not change while the layers of one micro-batch are processed.
            key: what is computed.
            compute: a function of the rows and the key alone. Its result must not be changed.
        """
        place = (rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device)
        results: dict[Hashable, Tensor] = {}
        for storage, known_place, known in self._results:
            if known_place == place and not storage.expired():
                results = known
                break
        if key in results:
            return results[key]
        result = compute()
        if result.numel() > _SHARED_ENTRIES:
            return result
        if not results:
            storage = StorageWeakRef(rows.untyped_storage())
            self._results = [(storage, place, results), *self._results[: _TENSORS - 1]]
        results[key] = result
        return result
