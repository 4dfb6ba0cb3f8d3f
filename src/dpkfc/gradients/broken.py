"""Rows that no data set should hold: the losses of the other rows may not change when one is NaN or very large.

A record may be anything, and ε is promised for all of them. What an ordinary row does to the others can be too little to be seen
beside rounding, and what only a broken one does (a whole batch left out for it) is not seen at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpkfc.gradients.apart import COPIED, Compared, apart
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.random_state import drawn_since_now, restarter

__all__ = ["check_broken_rows"]

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]

_HUGE = 1e4  # times a number; within the range of float16


def check_broken_rows(
    model: nn.Module, device: torch.device, loss_fn: LossFn, batch: Any, *, alone: Any, count: int
) -> None:
    """In the model's own mode, no loss of another row changes when every number of the first and the last row is NaN, or huge.

    Whole numbers (token ids, labels) stay, and so do zeros, which may be padding. All passes begin at one random state. Nothing
    is compared where model or loss refuse such numbers, or draw another amount of random numbers for them. A model on another
    device is copied to main memory if it is not too large: there a number without meaning, as an index say, is an error that can
    be passed over, and on an accelerator the end of the process.

    Args:
        model: in the mode it is trained in.
        device: of the model.
        loss_fn: maps model and batch to per-example losses.
        batch: of `count` rows.
        alone: a batch of one of them, which tells what has one entry a row.
        count: rows N, two or more.

    Raises:
        ValueError: a loss changed.
    """
    ends = [0, count - 1] if count > 2 else [1]
    others = [i for i in range(count) if i not in ends]
    held = _numbers(batch, alone, count)
    place = _in_main_memory(model, device) if held else None
    if place is None:
        return
    for what, factor in (("NaN", float("nan")), ("very large", _HUGE)):
        batches = [tree_map(_to_main_memory, x) for x in (batch, _changed(batch, held, ends, factor))]
        try:
            changed = apart(_as_many_drawn(loss_fn, batches[0], batches[1], others), place)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # fewer rows are tried
            continue  # such numbers are refused; the text of the error may hold private values
        if changed:
            raise ValueError(
                f"the losses of other examples changed when the numbers of {'two' if len(ends) > 1 else 'one'} became {what}. "
                "Either the model or loss_fn mixes examples (a mean, norm or standard deviation over the batch, a term that "
                "pulls examples together, a batch that is left out for a row that is not finite). One example would then move "
                "the gradients of others, and ε would not hold. Compute what an example needs from that example alone, or from "
                "public numbers; a loss that is not finite is left out by the clip, by itself"
            )


def _numbers(batch: Any, alone: Any, count: int) -> list[int]:
    """Which leaves of the batch have one entry of floating-point numbers a row."""
    many, single = ([(i, x) for i, x in enumerate(tree_flatten(b)[0]) if isinstance(x, Tensor)] for b in (batch, alone))
    if len(many) != len(single):
        return []
    return [i for (i, x), (_, one) in zip(many, single, strict=True) if _leads(x, count) and _leads(one, 1)]


def _leads(x: Tensor, rows: int) -> bool:
    dense = x.layout == torch.strided and not x.is_nested
    return dense and x.is_floating_point() and x.dim() > 0 and x.shape[0] == rows


def _changed(batch: Any, held: Sequence[int], rows: Sequence[int], factor: float) -> Any:
    leaves, spec = tree_flatten(batch)
    for i in held:
        x = leaves[i] = leaves[i].clone()
        x[rows] = torch.where(x[rows] == 0, x[rows], x[rows] * factor)
    return tree_unflatten(leaves, spec)


def _in_main_memory(model: nn.Module, device: torch.device) -> nn.Module | None:
    if device.type == "cpu":
        return model
    if sum(p.numel() for p in model.parameters()) > COPIED:
        return None
    try:
        return copy.deepcopy(model).cpu()
    except Exception:  # noqa: BLE001 - it cannot be copied
        return None


def _to_main_memory(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


def _as_many_drawn(loss_fn: LossFn, one: Any, other: Any, kept: Sequence[int]) -> Compared:
    """The losses of some rows of two batches, under one random state; those of the first alone where more or less is drawn."""
    device = torch.device("cpu")

    def compared(some: nn.Module, made: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        restart = restarter(device)
        before = loss_fn(some, made(one))[kept].detach()
        drawn_otherwise = drawn_since_now(device)
        restart()
        after = loss_fn(some, made(other))[kept].detach()
        return before, before if drawn_otherwise() else after

    return compared
