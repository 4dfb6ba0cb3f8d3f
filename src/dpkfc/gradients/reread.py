"""What has been made of rows that the next layer reads too: queries, keys and values of one attention read the same tensor.

Nothing is approximated by it: what is found again is what would have been made again, from the same memory. No rows are kept in
memory for it; what was made of them is, until two other tensors have come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Reread"]

_KEPT = 1 << 21  # entries of a tensor that is kept
_TENSORS = 2  # rows, and the same rows whitened


class Reread:
    """What was made of the last two tensors of a micro-batch that were asked about."""

    def __init__(self) -> None:
        self._made: list[tuple[StorageWeakRef, Any, dict[Hashable, Tensor]]] = []

    def of(self, rows: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of these rows; where the same memory was asked about under the same key, what it made then.

        Args:
            rows: any tensor that nobody changes while the layers of one micro-batch are gone through.
            key: what is made.
            make: a function of the rows and of the key alone; nobody changes what it returns.
        """
        place = rows.data_ptr(), rows.shape, rows.stride(), rows.dtype, rows.device
        known = next((made for of, at, made in self._made if at == place and not of.expired()), None)
        if known is not None and key in known:
            return known[key]
        made = make()
        if made.numel() > _KEPT:
            return made
        if known is None:
            known = {}
            self._made = [(StorageWeakRef(rows.untyped_storage()), place, known), *self._made[: _TENSORS - 1]]
        known[key] = made
        return made
