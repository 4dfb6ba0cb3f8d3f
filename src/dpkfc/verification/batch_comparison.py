"""Whether the other rows of a batch change the loss or the gradient of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.distributed.context import flatten
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.rows import PublicRows, warn_of_padding
from dpkfc.tracking.states import Unknown
from dpkfc.verification.constant_numbers import ConstantNumbers
from dpkfc.verification.differences import (
    all_gradients,
    gradients_differ,
    have_equal_gradients,
    total_norm_of,
)
from dpkfc.verification.public_passes import PublicPasses
from dpkfc.verification.row_functions import scale_rows, size_apart

_FEW = 4  # rows that are compared with batches of one
_SCALES = (1.0, 30.0, -30.0, 0.0)  # of the rows next to others


def check_sizes(passes: PublicPasses, rows: PublicRows, failure: Unknown | None) -> None:
    """Check that the loss of a row is the same in batches of several sizes, and alone.

    Each row also lies in several places of a batch.
    """
    count = min(passes.max_rows, len(rows))

    def values(*batches: Sequence[int]) -> Tensor:
        parts = [passes.losses_of_rows(rows, batch).detach() for batch in batches]
        return torch.cat(parts)

    whole = values(range(count))
    # The losses of the first half, and of the first few rows, are known from other passes. More
    # rows are taken from the end: all of the second half then lie in another place too.
    half = math.ceil(count / 2)
    comparisons = [(whole[:half], values(range(half)), half)]
    size = half | 1
    while size > 1:
        first = 0 if size <= _FEW else count - size
        part = range(first, first + size)
        comparisons.append((whole[first : first + size], values(part), size))
        size //= 4
    single_rows = sorted({*range(min(_FEW, count)), count - 1})
    comparisons.append((whole[single_rows], values(*([i] for i in single_rows)), 1))
    for losses, others, size in comparisons:
        if passes.differ(losses, others):
            sizes = f"in a batch of {count} differs from that in a batch of {size}"
            raise ValueError(_mixing_message(failure, f"the loss of a row {sizes}"))


def check_sizes_afresh(passes: PublicPasses, rows: PublicRows, failure: Unknown | None) -> None:
    """Compare sizes for a model that counts, say, its examples, but draws no random numbers.

    What such a model keeps makes two passes of this check differ; passes of a step are equal.
    """
    afresh = replace(passes, is_afresh=True, known={})
    few = min(4, len(rows))
    first, second = (afresh.losses(rows.batch(range(few)), few) for _ in range(2))
    if not passes.differ(first, second):
        check_sizes(afresh, rows, failure)


def check_rows_alone(passes: PublicPasses, rows: PublicRows, size: int, failure: Unknown) -> None:
    """Check, where a pass is not proved, that rows give alone what they give in a batch.

    Compared are losses and the gradients of all rows, and of every second row beside rows that are
    multiplied by a number: a large value may decide that a model mixes.

    Args:
        passes: of the model, which are repeatable and draw no random numbers.
        rows: public rows.
        size: of the batch.
        failure: why the pass is not proved.
    """
    size = size_apart(rows.records, size)
    every = range(size)

    def run_pass(indices: Sequence[int], kept: Any, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        count = len(indices)
        batch = scale_rows(rows.batch(indices), every[1::2], count, scale)
        losses = passes.losses(batch, count)[kept]
        gradients = all_gradients(passes.model, losses.sum())
        return losses.detach(), flatten(gradients, torch.float64)

    alone = []
    sums: list[Any] = [0.0, 0.0]
    for i in every:
        losses, gradient = run_pass([i], every[:1])
        alone.append(losses)
        sums[i % 2] += gradient
    comparisons = [(every, 1.0, sum(sums))]
    comparisons += [(every[::2], scale, sums[0]) for scale in _SCALES]
    for kept, scale, expected in comparisons:
        try:
            losses, gradient = run_pass(every, kept, scale)
        except Exception as error:
            if scale == 1.0 or is_out_of_memory(error):
                raise
            # The loss takes no rows of this scale, as where a target is a probability.
            continue
        differ = passes.differ(losses, torch.cat([alone[i] for i in kept]))
        if differ or gradients_differ(gradient, expected, passes.dtypes()):
            raise ValueError(_mixing_message(failure))


def check_padding(passes: PublicPasses, rows: PublicRows) -> None:
    """Check that the loss of a short record does not depend on the padding of its batch."""
    is_last = []

    def agree(batch: Any, alone: Any) -> bool:
        losses = passes.losses(batch, 2)
        others = passes.losses(alone, 1)
        if passes.differ(losses[:1], others):
            is_last.append(not passes.differ(losses[1:], others))
            return False
        if have_equal_gradients(passes.model, losses[:1].sum(), others.sum()):
            return True
        # A preference between two equal texts has a gradient that is zero but for rounding, in
        # the batch as alone.
        few = min(len(rows), 8)
        usual = _gradient_norm(passes, passes.losses(rows.batch(range(few)), few))
        padded = _gradient_norm(passes, passes.losses(batch, 2)[:1])
        short = _gradient_norm(passes, passes.losses(alone, 1))
        return max(padded, short) <= 1e-5 * usual

    with ConstantNumbers():
        is_different = rows.depends_on_padding(agree)
    if is_different is None:
        warn_of_padding(stacklevel=7)
    elif any(is_last):
        raise ValueError(
            "collate_fn sorts the records of a batch by their lengths; leave record i in row i"
            " (pack_padded_sequence takes enforce_sorted=False)"
        )
    elif is_different:
        raise ValueError(
            "an example padded to the length of a longer one has another loss than alone;"
            " mask the padding (docs/errors.md#gradient-mismatch)"
        )


def _gradient_norm(passes: PublicPasses, losses: Tensor) -> float:
    return total_norm_of(all_gradients(passes.model, losses.sum()))


def _mixing_message(failure: Unknown | None, what: str = "") -> str:
    """Return the message for a model that mixes examples."""
    if failure is None:
        return (
            f"{what}: model, loss_fn or augment depends on the batch"
            " (docs/errors.md#mixes-examples)"
        )
    begin = f"{failure.operation} mixes examples: "
    end = " (docs/errors.md#mixes-examples)"
    room = 160 - len(begin) - len(end)
    reason = failure.reason
    if len(reason) > room:
        reason = reason.partition(" (shapes")[0]
    return begin + reason[:room] + end
