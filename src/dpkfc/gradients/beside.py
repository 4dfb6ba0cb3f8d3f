"""The loss of an example is a function of that example: checks of it that run forward passes alone.

Whatever mixes examples in a forward pass, in the loss or in the collate function shows in the losses, of many rows and at
little cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.apart import Compared, apart
from dpkfc.gradients.broken import check_broken_rows
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.random_state import drawn_since_now, restarter
from dpkfc.gradients.tape import check_losses
from dpkfc.gradients.verify import as_long_as, evaluation_mode

__all__ = ["check_draws", "check_halves", "check_losses_of_rows", "check_rows"]

Batches: TypeAlias = Callable[..., Any]
LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]

_ALONE = 16  # rows that are passed alone: what depends on a whole batch shows in many of its rows
_DRAWS = 16  # random states of a check: mixup of every second batch is seen in a third of them
_WAYS_OUT = (
    "One example would then move the gradients of others, and ε would not hold. Compute what an example needs from that example "
    "alone, or from public numbers, and leave the rows in the order given"
)


def check_losses_of_rows(
    model: nn.Module,
    device: torch.device,
    loss_fn: LossFn,
    batch_of: Batches,
    counts: Sequence[int],
    *,
    divided: bool = False,
    collated_at_random: bool = False,
) -> None:
    """All checks of losses alone: of rows beside others and alone, beside copies, and beside broken ones.

    Args:
        model: in the mode it is trained in.
        device: of the model.
        loss_fn: maps model and batch to per-example losses.
        batch_of: numbers of rows to the batch of them.
        counts: rows, two or more; the next number where so many do not fit into memory.
        divided: the model lies on several processes, which have to make the same passes: running out of memory is an error, and
            no row is broken, as an error in the middle of a pass would part them.
        collated_at_random: a row is another one where it is collated again.

    Raises:
        ValueError: a loss depends on other rows.
    """
    for count in dict.fromkeys(counts):
        try:
            check_rows(model, device, loss_fn, batch_of, count)
            if not collated_at_random:
                check_halves(model, device, loss_fn, batch_of, count)
            if not divided:
                check_broken_rows(model, device, loss_fn, batch_of(*range(count)), alone=batch_of(0), count=count)
        except Exception as error:
            if divided or not is_out_of_memory(error):
                raise
        else:
            return


def check_rows(model: nn.Module, device: torch.device, loss_fn: LossFn, batch_of: Batches, count: int) -> None:
    """In evaluation mode, the losses of a whole batch are those of its rows alone; up to 16 of them are passed alone.

    It finds what takes more than a few rows (the hardest half of a batch, an expert that is full), what one rare record switches
    for all, rows that a collate function has sorted, and losses that are finite beside others only. Where random numbers are
    drawn, an example alone would get others, and nothing is compared.

    Args:
        model: its modes are put back.
        device: of the model.
        loss_fn: maps model and batch to per-example losses.
        batch_of: numbers of rows to the batch of them.
        count: rows there are.

    Raises:
        ValueError: the loss of an example is another one where it stands alone, or is finite in one of the two places only.
    """
    step = -(-count // _ALONE)
    rows = list(range((count - 1) % step, count, step))  # the last among them: it comes after all others

    def compared(some: nn.Module, made: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        drawn = drawn_since_now(device)
        with evaluation_mode(some):
            whole = loss_fn(some, made(batch_of(*range(count)))).detach()
            check_losses(whole, count)
            alone = [whole[rows]] if drawn() else [loss_fn(some, made(batch_of(i))).detach() for i in rows]
        return whole[rows], torch.cat(alone)

    if apart(compared, model):
        raise ValueError(
            f"the loss of an example in a batch of {count} differs from that of the example alone, or one of them is not finite. "
            "Either model, loss_fn or collate function mixes examples (a statistic or threshold of the batch, a limit on "
            "how many rows count, one bad row for which all are left out), or it sorts the rows, or a loss depends on the place "
            f"in the batch. {_WAYS_OUT}"
        )


def check_halves(model: nn.Module, device: torch.device, loss_fn: LossFn, batch_of: Batches, count: int) -> None:
    """In the model's own mode, the losses of half of the rows stay as they are where the others become copies of one of them.

    Both passes begin at one random state, so dropout draws the same numbers; where the two batches have other shapes it would
    not, and nothing is compared.

    Args:
        model: in the mode it is trained in.
        device: of the model.
        loss_fn: maps model and batch to per-example losses.
        batch_of: numbers of rows to the batch of them, without random numbers.
        count: rows there are, two or more.

    Raises:
        ValueError: a loss changed.
    """
    for first in (0, 1):
        kept = list(range(first, count, 2))
        whole, half = batch_of(*range(count)), batch_of(*(i if i % 2 == first else first for i in range(count)))
        if _shapes(whole) == _shapes(half) and apart(_restarted(loss_fn, device, whole, half, kept), model):
            raise ValueError(
                f"the losses of {len(kept)} examples changed when only those beside them did, under the same random numbers. "
                f"Either model, loss_fn or collate function mixes examples, or it sorts the rows. {_WAYS_OUT}"
            )


def check_draws(model: nn.Module, device: torch.device, loss_fn: LossFn, batch_of: Batches, count: int) -> None:
    """In the model's own mode, the loss of an example may not depend on the examples beside it, whatever numbers are drawn.

    What mixes examples at random (mixup with a permutation) leaves an example alone at times: in every second batch of two.
    So several random states are tried, each with more than two rows, collated anew, and each with another of them in the first
    place: whoever draws row by row has drawn nothing for others before.

    Args:
        model: in the mode it is trained in.
        device: of the model.
        loss_fn: maps model and batch to per-example losses, with random numbers.
        batch_of: numbers of rows to the batch of them, with random numbers too.
        count: rows there are, two or more.

    Raises:
        ValueError: the loss of an example beside others is another than beside copies of itself.
    """
    for i in range(_DRAWS):
        row, restart = i % count, restarter(device)
        others = [x for x in range(count) if x != row]
        rows = [row, *others, *others[: 3 - count]]
        beside = batch_of(*rows)
        collated = restarter(device)
        restart()
        copies = as_long_as(beside, batch_of(*[row] * len(rows)), len(rows), 0)
        collated()
        if apart(_restarted(loss_fn, device, beside, copies, [0]), model):
            raise ValueError(
                "the loss of an example changed when only the examples beside it did, under the same random numbers. Either "
                "model, loss_fn or collate function mixes examples at random (mixup, CutMix, a permutation of the batch): one "
                "example would then move the gradients of others, and ε would not hold. Leave it out, or mix with public examples"
            )


def _restarted(loss_fn: LossFn, device: torch.device, one: Any, other: Any, kept: Sequence[int]) -> Compared:
    """The losses of some rows of two batches, both under the random state that is found."""

    def compared(some: nn.Module, made: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        restart = restarter(device)
        before = loss_fn(some, made(one))[kept].detach()
        restart()
        return before, loss_fn(some, made(other))[kept].detach()

    return compared


def _shapes(batch: Any) -> list[torch.Size]:
    return [x.shape for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
