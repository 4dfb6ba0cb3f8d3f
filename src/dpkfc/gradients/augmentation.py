"""Augmentation: K views of one example are K consecutive rows.

Their gradients are averaged before the clip, so that an example still moves the sum by at most C.
The tracker follows the rows through the augmentation as through the model. Whatever an augmentation
keeps of a batch is undone after each call, so that no batch changes a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpkfc.gradients.loss_state import own_variables

Augmentation = Callable[[Any], Any]
"""Maps a batch to one with as many rows, each changed at random on its own."""


def augment_batch(
    augment: Augmentation | None,
    model: nn.Module,
    batch: Any,
    rows: int,
) -> Any:
    """Return the batch as `augment` changes it, itself without one.

    Args:
        augment: maps a batch to one with as many rows.
        model: the model that is trained, whose attributes have values of their own elsewhere.
        batch: on the model's device.
        rows: how many it has.

    Raises:
        ValueError: another number of rows came back.
    """
    if augment is None:
        return batch
    with own_variables(augment, model, "augment"):
        changed = augment(batch)
    for before, after in zip(_sizes(batch), _sizes(changed), strict=False):
        if before == rows and after != rows:
            raise ValueError(
                f"augment made {after} rows of {rows}; return one row for every row. Several views "
                "of an example come from PrivacyConfig(augmentations=K)"
            )
    return changed


def _sizes(batch: Any) -> list[int | None]:
    sizes: list[int | None] = []
    for x in tree_leaves(batch):
        size = None
        if isinstance(x, Tensor) and x.dim():
            size = len(x)
        sizes.append(size)
    return sizes
