"""Public rows, on which the checks before the first private row run.

Rows are the records that a user gives, or numbers of a fixed seed in the types and shapes of a
template.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from dpkfc.data.loading import Collate, never_pads
from dpkfc.gradients.layers import tensors_of
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.record_drawing import SEED, Axis, RecordDrawer, axes_of

# What the longer of two records has more: short texts may be padded to a multiple of 64 or 512.
_EXTRA_LENGTHS = (3, 35, 67, 131, 515)
# Several short records: an id in one may be the padding's.
_SHORT_RECORDS = 8
_MAX_SUBSETS = 8  # axes of one length that are made longer one by one


@dataclass(frozen=True)
class PublicRows:
    """Public records, with a function that makes batches of them.

    Attributes:
        records: the records.
        collate: list of records to a batch.
        example: what they are like.
        integers: as of `draw_public_rows`.
        are_given: whether a user has given them as `public_records`.
    """

    records: Sequence[Any]
    collate: Collate
    example: Any = None
    integers: str = "tokens"
    are_given: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a batch of some records."""
        return self.collate([self.records[i] for i in indices])

    def depends_on_padding(self, agree: Callable[[Any, Any], bool]) -> bool | None:
        """Return whether a longer record in the batch changes what a record gives.

        Any axis may have another length in each record, alone or with other axes of its length.

        Args:
            agree: whether the first rows of two batches give the same. What it raises says that
                the batches cannot be compared.

        Returns:
            None where batches are padded and cannot be compared.
        """
        if never_pads(self.collate):
            return False
        groups: dict[int, list[Axis]] = {}
        for axis, length in axes_of(self.example):
            groups.setdefault(length, []).append(axis)
        answers: set[bool | None] = set()
        for length, group in groups.items():
            for axes in _subsets(group):
                own = {_ask(agree, *pair) for pair in self._padded_pairs(axes, length)}
                answers |= own
                if own - {None}:
                    break
        if False in answers:
            return True
        return None if answers == {None} else False

    def _padded_pairs(self, axes: Sequence[Axis], length: int) -> Iterator[tuple[Any, Any]]:
        """Yield batches of a short and a longer record with the short record alone.

        The records differ along some axes, and the batch is padded to the longer one.
        """
        draw = RecordDrawer(np.random.default_rng(SEED), self.integers)
        extras: Sequence[int] = _EXTRA_LENGTHS
        values = {axis[:-1] for axis in axes}
        if len(values) < len(axes):
            # A volume that is longer in all directions would fill the memory.
            extras = extras[:1]
        for extra in extras:
            longer = dict.fromkeys(axes, length + extra)
            longest = draw.value_like(self.example, longer)
            is_padded = False
            for i in range(_SHORT_RECORDS):
                shorter = dict.fromkeys(axes, max(1, length // (2 + i)))
                short = draw.value_like(self.example, shorter)
                # Records of several lengths need not fit into a batch.
                with suppress(Exception):
                    batch = self.collate([short, longest])
                    is_padded = _shapes(batch) != _shapes(self.collate([short, short]))
                    if is_padded:
                        yield batch, self.collate([short])
            if is_padded:
                return


def _ask(agree: Callable[[Any, Any], bool], batch: Any, alone: Any) -> bool | None:
    """Return an answer, None where the batches cannot be compared."""
    try:
        return agree(batch, alone)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def warn_of_padding(stacklevel: int) -> None:
    """Warn that batches are padded, and that no records could show whether padding mixes them."""
    warnings.warn(
        "batches are padded, and the model takes no public records of other lengths; whether"
        " padding mixes examples is not checked",
        stacklevel=stacklevel + 1,
    )


def draw_public_rows(record: Any, count: int, collate: Collate, integers: str) -> PublicRows:
    """Draw records with the types and shapes of a prototype.

    Args:
        record: the prototype. Its types and shapes are read, its values are not.
        count: records to draw.
        collate: list of records to a batch.
        integers: the integers to draw. "tokens" means 0 to 3 inside of sequences and 0 or 1
            elsewhere, "bits" means 0 or 1, which nearly all labels and tokens may be, and "ones"
            means 1. No sequence begins with 0, as a mask that hides a whole record does.

    Returns:
        The records. Floating-point numbers are standard normal. With "ones" all lie in [0, 1], as
        probabilities do; with "bits" those do that are alone.

    Raises:
        TypeError: a record with a value of a type that cannot be drawn, by name.
    """
    draw = RecordDrawer(np.random.default_rng(SEED), integers)
    records = [draw.value_like(record) for _ in range(count)]
    return PublicRows(records, collate, record, integers)


def _subsets(axes: list[Axis]) -> Iterator[Sequence[Axis]]:
    """Yield axes of one length: all of them, all but one, and one. They may be so by chance."""
    yield axes
    if 1 < len(axes) <= _MAX_SUBSETS:
        yield from reversed([*combinations(axes, len(axes) - 1)])
        yield from combinations(axes, 1)


def unwrap_containers(batch: Any) -> Any:
    """Return a batch with dicts and lists in place of other mappings and sequences.

    torch does not find tensors inside of those.
    """
    if isinstance(batch, Mapping):
        return {key: unwrap_containers(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [unwrap_containers(value) for value in batch]
    return batch


def _shapes(batch: Any) -> list[torch.Size]:
    return [x.shape for x in tensors_of(unwrap_containers(batch)) if not x.is_nested]
