"""Views of an example: what an `augment` makes of a batch.

K views of one example are K consecutive rows whose gradients are averaged before the clip (`groups`), so that an example still
moves the sum by at most C. The tracker follows the rows through the augmentation as through the model. What an augmentation
keeps of a batch is undone after each call, so that no batch changes a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.loss_state import forgotten

__all__ = ["augmented"]


def augmented(augment: Callable[[Any], Any] | None, model: nn.Module, batch: Any, rows: int) -> Any:
    """Return the batch as `augment` changes it, itself without one.

    Args:
        augment: maps a batch to one with as many rows.
        model: the model that is trained, whose state is restored elsewhere.
        batch: on the model's device.
        rows: how many it has.

    Raises:
        ValueError: another number of rows came back.
    """
    if augment is None:
        return batch
    with forgotten(augment, model, "augment"):
        changed = augment(batch)
    for before, after in zip(_sizes(batch), _sizes(changed), strict=False):
        if before == rows and after != rows:
            raise ValueError(
                f"augment made {after} rows of {rows}; it must return one row for every row it is given. Several views of an "
                "example come from PrivacyConfig(augmentations=K), which calls augment on each of them"
            )
    return changed


def _sizes(batch: Any) -> list[int | None]:
    return [len(x) if isinstance(x, Tensor) and x.dim() else None for x in tree_flatten(batch)[0]]
