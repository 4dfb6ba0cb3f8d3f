"""Views of an example: what an `augment` makes of a batch, and the check that it changes every row on its own.

K views of one example are K consecutive rows whose gradients are averaged before the clip (`groups`), so that an example
still moves the sum by at most C. That holds only where no view depends on another example: mixing two of them (mixup,
CutMix, statistics of the batch) would let each move the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from dpkfc.gradients.random_state import all_states, put_back

__all__ = ["augmented", "check_augment"]

_TRIES = 8  # an augment that mixes half of its batches goes unseen once in 256
_LIKE = {"rtol": 1e-5, "atol": 1e-6}


def augmented(augment: Callable[[Any], Any] | None, batch: Any, rows: int) -> Any:
    """The batch as `augment` changes it, itself without one.

    Args:
        augment: maps a batch to one with as many rows.
        batch: on the model's device.
        rows: how many it has.

    Raises:
        ValueError: another number of rows came back.
    """
    if augment is None:
        return batch
    changed = augment(batch)
    for before, after in zip(_sizes(batch), _sizes(changed), strict=False):
        if before == rows and after != rows:
            raise ValueError(
                f"augment made {after} rows of {rows}; it must return one row for every row it is given. Several views of an "
                "example come from PrivacyConfig(augmentations=K), which calls augment on each of them"
            )
    return changed


def check_augment(augment: Callable[[Any], Any] | None, batch_of: Callable[..., Any], count: int) -> None:
    """Raise if a view of one example depends on the examples beside it, or in a batch before.

    The very first batch that the augment sees is NaN in every floating-point value, none of which may come out of the next
    one; nor may what comes out change with the batch before. Row 0 is augmented beside others and beside copies of itself,
    under one random state (torch, numpy, random), several times. Where the augment has a generator of its own, which cannot
    be put back, the other rows are made NaN instead, and row 0 may not show it.

    Args:
        augment: what a session was given, None for nothing.
        batch_of: numbers of rows to the batch of them.
        count: rows there are; fewer than two show nothing.

    Raises:
        ValueError: it mixes rows, remembers earlier ones, or changes their number.
    """
    if augment is None or count < 2:
        return
    beside, alone = tuple(range(count)), (0,) * count
    _refuse_memory(augment, batch_of, count)
    for _ in range(_TRIES):
        states = all_states()
        first = _row_of(augmented(augment, batch_of(*beside), count), count)
        later = all_states()
        put_back(states)
        again = _row_of(augmented(augment, batch_of(*beside), count), count)
        put_back(states)
        if _alike(first, again):
            mixed = not _alike(first, _row_of(augmented(augment, batch_of(*alone), count), count))
        else:
            mixed = _shows_nan(augment, batch_of(*beside), count)
        put_back(later)
        if mixed:
            raise ValueError(
                "augment mixes the rows of a batch: the view of an example changed when only the examples beside it did. One "
                "example would then move the gradients of others, and ε would not hold. Use an augment that changes each row on "
                "its own (no mixup, CutMix, permutation or statistics of the batch)"
            )


def _refuse_memory(augment: Callable[[Any], Any], batch_of: Callable[..., Any], count: int) -> None:
    states, clean = all_states(), tuple(range(count))

    def after(batch: Any) -> list[Tensor]:
        with suppress(Exception):  # NaN may be refused
            augment(batch)
        put_back(states)
        return _rows(augmented(augment, batch_of(*clean), count), count)

    poisoned, some = _poisoned(batch_of(*clean), count, 0)
    remembered = some and _any_nan(after(poisoned)) and not _any_nan(_rows(batch_of(*clean), count))
    one, again, other = (after(batch_of(*(row,) * count)) for row in (0, 0, 1))
    put_back(states)
    if remembered or (_alike(one, again) and not _alike(one, other)):
        raise ValueError(
            "augment remembers earlier batches: what it made of a batch changed when only the batch before it did. One example "
            "would then move the gradients of others, in other steps too, and ε would not hold. Use an augment without memory "
            "(statistics of past batches, a queue of examples), or give it statistics of public data"
        )


def _shows_nan(augment: Callable[[Any], Any], batch: Any, count: int) -> bool:
    made, some = _poisoned(batch, count, 1)
    if not some:
        raise ValueError(
            "augment draws its random numbers from a generator of its own and changes no floating-point values, so that it "
            "cannot be checked whether it mixes rows; let it draw from torch's global generator"
        )
    return _any_nan([x[:1] for x in _rows(augmented(augment, made, count), count)])


def _poisoned(batch: Any, count: int, spared: int) -> tuple[Any, bool]:
    """The batch with NaN in every floating-point value but those of the first rows, and whether there are any."""
    some = False

    def poison(x: Any) -> Any:
        nonlocal some
        if not _leads(x, count) or not x.is_floating_point():
            return x
        some = True
        return torch.cat([x[:spared], torch.full_like(x[spared:], float("nan"))])

    return tree_map(poison, batch), some


def _any_nan(values: list[Tensor]) -> bool:
    return any(bool(torch.isnan(x).any()) for x in values)


def _leads(x: Any, count: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == count


def _rows(batch: Any, count: int) -> list[Tensor]:
    return [x for x in tree_flatten(batch)[0] if _leads(x, count)]


def _row_of(batch: Any, count: int) -> list[Tensor]:
    return [x[0] for x in _rows(batch, count)]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), **_LIKE, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _sizes(batch: Any) -> list[int | None]:
    return [len(x) if isinstance(x, Tensor) and x.dim() else None for x in tree_flatten(batch)[0]]
