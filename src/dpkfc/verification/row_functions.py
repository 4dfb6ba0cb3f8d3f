"""Whether a collate function or an augmentation keeps every record to its own row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpkfc.gradients.layers import tensors_of
from dpkfc.public_rows.rows import PublicRows
from dpkfc.rng_state import restarter
from dpkfc.verification.differences import are_rows_equal
from dpkfc.verification.own_generators import MESSAGE
from dpkfc.verification.public_passes import PublicPasses


def check_row_functions(passes: PublicPasses, rows: PublicRows, size: int) -> None:
    """Check that collate function and augmentation change each row on its own.

    Raises:
        ValueError: one mixes rows, or two batches of the same records differ.
    """
    size = size_apart(rows.records[:1], size)
    if not _check_rows(passes, "collate_fn", rows.batch, size):
        raise ValueError(MESSAGE)
    if passes.augment is not None:
        if not _check_rows(passes, "augment", partial(passes.augment_rows, rows), size):
            _check_augment_with_nan(passes, rows, size)


def _check_rows(
    passes: PublicPasses, name: str, make: Callable[[Sequence[int]], Any], size: int
) -> bool:
    """Check that a collate function, or an augmentation, keeps every record to its own row.

    Args:
        passes: of the model.
        name: of the function, for the message.
        make: maps indices of records to their batch.
        size: records of a batch.

    Returns:
        Whether two batches of the same records agree, so that batches can be compared.
    """
    restart = restarter()
    every = list(range(size))

    def make_tensors(indices: Sequence[int]) -> list[Tensor]:
        restart()
        return [x.to_dense() for x in row_tensors(make(indices), size)]

    whole = make_tensors(every)
    if not are_rows_equal(whole, make_tensors(every), every):
        return False
    for _, kept, replaced in split_rows(size):
        if not are_rows_equal(whole, make_tensors(replaced), kept):
            raise ValueError(_mixing_rows_message(name))
    return True


def _check_augment_with_nan(passes: PublicPasses, rows: PublicRows, size: int) -> None:
    """Check a random augmentation: NaN in a row may not reach another row."""
    batch = scale_rows(rows.batch(range(size)), range(1, size), size, math.nan)
    augmented_batch: Any = ()
    # An augmentation may refuse NaN.
    with suppress(Exception):
        augmented_batch = passes.augment_batch(batch, size)
    for x in row_tensors(augmented_batch, size):
        if bool(x[:1].isnan().any()):
            raise ValueError(_mixing_rows_message("augment"))


def row_tensors(batch: Any, size: int) -> list[Tensor]:
    """Return the tensors of a batch with one row for each example."""
    return [x for x in tensors_of(batch) if not x.is_nested and x.shape[:1] == (size,)]


def _mixing_rows_message(name: str) -> str:
    """Return the message for a collate function or an augmentation that mixes rows."""
    return (
        f"{name} mixes the rows of a batch: a row changed when only the rows next to it did."
        " Change each row on its own (docs/errors.md#mixes-examples)"
    )


def size_apart(records: Sequence[Any], size: int) -> int:
    """Return a size that is the length of no tensor of a record: at most `size`, at least 2.

    A tensor of one record would look like one with a row for each.
    """
    lengths = {x.shape[:1] for x in tensors_of(records)}
    while size > 2 and (size,) in lengths:
        size -= 1
    return size


def split_rows(size: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield splits of rows into kept and replaced ones, two for each bit of the row numbers.

    Row i is replaced by row i + size. The numbers of any two rows differ in a bit.

    Args:
        size: number of rows, at least 2.

    Yields:
        The bit, the kept rows, and the indices of the batch with the other rows replaced.
    """
    for bit in range(math.ceil(math.log2(size))):
        for side in (0, 1):
            kept = []
            replaced = list(range(size))
            for i in range(size):
                if (i >> bit) & 1 == side:
                    replaced[i] += size
                else:
                    kept.append(i)
            yield bit, kept, replaced


def scale_rows(batch: Any, rows: Sequence[int], size: int, scale: float) -> Any:
    """Return a batch with the floating-point numbers of some rows multiplied by a factor."""
    if scale == 1.0 or not rows:
        return batch

    def scale_tensor(x: Tensor) -> Tensor:
        is_strided = x.is_floating_point() and x.layout == torch.strided
        if not is_strided or x.shape[:1] != (size,):
            return x
        x = x.clone()
        x[list(rows)] *= scale
        return x

    return tree_map_only(Tensor, scale_tensor, batch)
