"""Examples that a run trains on and is evaluated on, and their validation split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dpkfc.app.datasets.errors import DatasetError

if TYPE_CHECKING:
    from torch import Tensor


Examples: TypeAlias = "tuple[Tensor, Tensor]"
# Pixels and labels as files hold them.
Split = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ExampleSet:
    """Examples that a run trains on and is evaluated on.

    Attributes:
        train: inputs `[N, ...]` and labels `[N]`, the private examples.
        test: the same for the test split.
        validation: examples cut from the training set by a public seed, or the set's own validation
            split, or None.
        source: where they were read from.
        part: how much of the data set they are, where files hold a part of it. No published number
            can then be compared.
        units: a number for the person (or other unit) of each training example `[N]`, or None
            where ε protects single examples.
        figures: shares of values that a schema clamped, or did not know. PRIVATE.
        digest: SHA-256 of the file that they were read from; empty where it is not known. PRIVATE.
        share: public names of the part of the training examples that this process alone holds;
            empty where it holds all.
        total: training examples of all processes; 0 where this one holds all, or has not been told.
        tested: test examples of all processes; 0 in the same cases.
    """

    train: Examples
    test: Examples
    validation: Examples | None = None
    source: str = ""
    part: str = ""
    units: Tensor | None = None
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)
    digest: str = ""
    share: Sequence[str] = ()
    total: int = 0
    tested: int = 0

    def map_splits(self, change: Callable[[str, Examples], Examples], **others: Any) -> ExampleSet:
        """Return the set with a change of every split, and of other attributes.

        Args:
            change: maps the name of a split ("training", "test" or "validation") and its examples.
            others: the other attributes.
        """
        validation = self.validation
        if validation is not None:
            validation = change("validation", validation)
        return replace(
            self,
            train=change("training", self.train),
            test=change("test", self.test),
            validation=validation,
            **others,
        )

    @property
    def size(self) -> int:
        """Number N of training examples, or of their units, on all processes."""
        if self.total:
            return self.total
        return len(self.train[1]) if self.units is None else len(self.units.unique())


def choose_rows(inputs: Any, rows: Any) -> Any:
    """Return some rows of a tensor, or of rows in another form, which stay in it."""
    from torch import Tensor

    return inputs[rows] if isinstance(inputs, Tensor) else inputs.take(rows)


# --------------------------------------------------------------------------------------------------
# A validation split cut from the training set by a public seed.


def split(train: Examples, size: int | float, seed: int = 0) -> tuple[Examples, Examples]:
    """Cut a validation set from training examples.

    The cut depends on the number of examples and the seed alone, so it is the same for every run,
    method and machine.

    Args:
        train: inputs `[N, ...]` and labels `[N]`.
        size: number of validation examples, or a fraction of N when it is a float in (0, 1).
        seed: public seed of the permutation.

    Returns:
        The remaining training examples and the validation examples.

    Raises:
        DatasetError: the cut would leave one of the two sets empty.
    """
    import torch

    inputs, labels = train
    total = len(labels)
    count = round(size * total) if isinstance(size, float) else size
    if not 0 < count < total:
        raise DatasetError(
            f"validation_size = {size} leaves nothing to train or validate on: choose 1 to"
            f" {total - 1}"
        )
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(total))
    held_out = order[:count].sort().values
    kept = order[count:].sort().values
    return (inputs[kept], labels[kept]), (inputs[held_out], labels[held_out])


def split_off_validation(data: ExampleSet, size: int, seed: int = 0) -> ExampleSet:
    """Return the data with `size` examples moved from training to validation."""
    if size == 0:
        return data
    train, validation = split(data.train, size, seed)
    return replace(data, train=train, validation=validation)
