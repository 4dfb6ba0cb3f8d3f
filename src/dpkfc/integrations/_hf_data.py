"""The collate function of a Trainer, as a session needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AsDict"]


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
