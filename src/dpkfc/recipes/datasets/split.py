"""A validation split cut from the training set by a public seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.examples import Examples, ExampleSet

__all__ = ["split", "with_validation"]


def split(train: Examples, size: int | float, seed: int = 0) -> tuple[Examples, Examples]:
    """Cut a validation set from training examples.

    The cut depends on the number of examples and the seed alone, so it is the same for every run, method and machine.

    Args:
        train: inputs `[N, ...]` and labels `[N]`.
        size: number of validation examples, or a fraction of N when it is a float in (0, 1).
        seed: public seed of the permutation.

    Returns:
        The remaining training examples and the validation examples.

    Raises:
        DatasetError: the cut would leave one of the two sets empty.
    """
    inputs, labels = train
    total = len(labels)
    count = round(size * total) if isinstance(size, float) else size
    if not 0 < count < total:
        raise DatasetError(f"validation_size = {size} leaves nothing to train or validate on: choose 1 to {total - 1}")
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(total))
    held_out, kept = order[:count].sort().values, order[count:].sort().values
    return (inputs[kept], labels[kept]), (inputs[held_out], labels[held_out])


def with_validation(data: ExampleSet, size: int, seed: int = 0) -> ExampleSet:
    """The data with `size` examples moved from training to validation; unchanged for size 0."""
    if size == 0:
        return data
    train, validation = split(data.train, size, seed)
    return replace(data, train=train, validation=validation)
