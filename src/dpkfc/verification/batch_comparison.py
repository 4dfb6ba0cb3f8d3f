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
from dpkfc.rng_state import restarter
from dpkfc.tracking.states import Unknown
from dpkfc.verification.constant_numbers import ConstantNumbers
from dpkfc.verification.differences import (
    all_gradients,
    gradients_differ,
    have_equal_gradients,
    total_norm_of,
)
from dpkfc.verification.public_passes import PublicPasses
from dpkfc.verification.row_functions import scale_rows, size_apart, split_rows

_SINGLE_ROWS = 8  # compared with batches of one, where a pass is not proved
_FEW = 4  # rows whose gradients are compared too
_SCALES = (1.0, 30.0, -30.0, 0.0)  # of changed rows


def check_sizes(passes: PublicPasses, rows: PublicRows, failure: Unknown | None) -> None:
    """Check that the loss of a row is the same in batches of several sizes, and alone.

    Each row also lies in several places of a batch. Beside a proof a few rows alone are enough.
    """
    count = min(passes.max_rows, len(rows))

    def values(*batches: Sequence[int]) -> Tensor:
        parts = [passes.losses_of_rows(rows, batch).detach() for batch in batches]
        return torch.cat(parts)

    whole = values(range(count))
    half = math.ceil(count / 2)
    halves = values(range(half), range(half, count))
    comparisons = [(whole, halves, half)]
    size = (half // 2) | 1
    while size > 1:
        # The losses of the first few rows are known from other passes. More rows are taken from the
        # end, so that they lie in another place than in the whole.
        first = 0 if size <= _FEW else count - size
        part = range(first, first + size)
        comparisons.append((whole[first : first + size], values(part), size))
        size //= 2
    single_rows = {*range(min(_FEW, count)), count - 1}
    if failure is not None:
        single_rows.update(range(0, count, math.ceil(count / _SINGLE_ROWS)))
    single_values = values(*([i] for i in sorted(single_rows)))
    comparisons.append((whole[sorted(single_rows)], single_values, 1))
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


def check_neighbours(
    passes: PublicPasses, rows: PublicRows, size: int, failure: Unknown, *, is_drawn: bool
) -> None:
    """Check that no row changes the loss or the gradient of another.

    Any two rows are once on different sides of a split: one of them is then changed, the other
    not.

    Args:
        passes: of the model.
        rows: public rows.
        size: of a batch.
        failure: why the pass is not proved.
        is_drawn: a pass draws numbers of numpy or random. Where it reads the examples, as
            SpecAugment reads the lengths of recordings, they may decide which numbers the rows
            after them get.
    """
    size = size_apart(rows.records, size)
    restart = restarter()

    def run_pass(indices: list[int], kept: list[int], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        restart()
        changed = [i for i in range(size) if i not in kept]
        batch = scale_rows(rows.batch(indices), changed, size, scale)
        losses = passes.losses(batch, size)[kept]
        gradients = all_gradients(passes.model, losses.sum())
        return losses.detach(), flatten(gradients, torch.float64)

    every = list(range(size))
    part_gradients = []
    why = ""
    for bit, kept, replaced in split_rows(size):
        losses, gradient = run_pass(every, kept)
        part_gradients.append(gradient)
        for scale in _SCALES if bit == 0 else _SCALES[:1]:
            try:
                other_losses, other_gradient = run_pass(replaced, kept, scale)
            except Exception as error:
                if scale == 1.0 or is_out_of_memory(error):
                    raise
                # The loss takes no rows of this scale, as where a target is a probability.
                continue
            differ = passes.differ(losses, other_losses)
            if differ or gradients_differ(gradient, other_gradient):
                why = "rows changed when only the rows next to them did"
        if len(part_gradients) == 2:
            total = part_gradients[0] + part_gradients[1]
            _, gradient = run_pass(every, every)
            if gradients_differ(total, gradient):
                why = "the gradients of parts of a batch do not add up to the batch's gradient"
            part_gradients = []
    if why and not (is_drawn and failure.is_read):
        raise ValueError(_mixing_message(failure, why))


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
        few = min(len(rows), _SINGLE_ROWS)
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


def _mixing_message(failure: Unknown | None, what: str) -> str:
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
