"""The collate function of a Trainer, as a session needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["AsDict", "rows_of"]


@dataclass(frozen=True)
class AsDict:
    """A collate function whose batches are plain dicts, which can be moved to a device part by part."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """The batch of these examples.

        Raises:
            ValueError: the collate function makes no mapping.
        """
        # copied: some collate functions change the examples they are given
        batch = self.collate([dict(x) if isinstance(x, Mapping) else x for x in examples])
        if not isinstance(batch, Mapping):
            raise ValueError(f"data_collator returned a {type(batch).__name__}; it must return a dict of tensors")
        return dict(batch)

    def draws(self, dataset: Any) -> bool:
        """Whether collating the same example twice gives two batches: it masks or augments at random."""
        tries = [self([dataset[0], dataset[1 % len(dataset)]]) for _ in range(8)]
        first, *others = ([x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)] for batch in tries)
        return any(not torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def rows_of(batch: dict[str, Any], *chosen: int) -> dict[str, Any]:
    """A few examples of a batch of two, as they were padded and drawn in it."""
    return tree_map(lambda x: x[list(chosen)] if isinstance(x, Tensor) and x.dim() and x.shape[0] == 2 else x, batch)
