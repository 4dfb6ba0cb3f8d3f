"""The first public rows that a loss accepts, and refusals of losses that depend on the batch."""

from __future__ import annotations

import inspect
import traceback
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpkfc._errors import last_own_line
from dpkfc.gradients.state import ends_run
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.rows import PublicRows
from dpkfc.public_rows.template import Attempts
from dpkfc.verification.public_passes import PublicPasses


def accept_rows(passes: PublicPasses, attempts: Attempts) -> tuple[PublicRows | None, str]:
    """Return the first public rows that the loss accepts, or why there are none.

    What the loss raises on records that a user has given is raised.
    """
    reason = "no public rows were given"
    for make_rows in attempts:
        rows = None
        passes.known.clear()
        try:
            rows = make_rows(max(4, passes.max_rows))
            # A number in any row may lie outside a table, so all rows are tried.
            for size in (2, min(passes.max_rows, len(rows))):
                _check_accepts(passes, rows, size)
        except Exception as error:
            are_given = rows is not None and rows.are_given
            if are_given or is_permanent(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        else:
            _check_batch_of_one(passes, rows)
            return rows, ""
    return None, reason


def _check_accepts(passes: PublicPasses, rows: PublicRows, size: int) -> None:
    """Check that the loss accepts a batch, unless it refuses one of its rows alone."""
    try:
        passes.losses_of_rows(rows, range(size))
        return
    except Exception as error:
        if is_permanent(error):
            raise
        batch_error = error
    # What the collate function raises is raised as it is.
    rows.batch(range(size))
    for i in range(size):
        try:
            passes.losses_of_rows(rows, [i])
        except Exception:
            raise batch_error from None
    raise ValueError(
        f"loss_fn takes each of {size} rows alone and fails on their batch"
        f" ({_first_line(batch_error)}): it depends on the batch"
        " (docs/errors.md#gradient-mismatch)"
    ) from batch_error


def _check_batch_of_one(passes: PublicPasses, rows: PublicRows) -> None:
    try:
        passes.losses_of_rows(rows, [0])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # A sum over the examples may be what one example alone is too few for.
        failure, _, _ = passes.trace(rows.batch(range(2)), 2)
        if failure is not None:
            raise ValueError(
                f"loss_fn fails on one example, and two are not proved: {failure.operation},"
                f" {failure.reason.split(' (')[0][:40]} (docs/errors.md#mixes-examples)"
            ) from error
        with _Squeezes() as squeezes, suppress(Exception):
            passes.losses(rows.batch([0]), 1)
        if squeezes.place:
            raise ValueError(
                f"squeeze() in {squeezes.place:.60} drops the batch axis of one example; write"
                " squeeze(-1), or name the dimension"
            ) from error
        raise ValueError(
            f"loss_fn fails on a batch of one example ({_first_line(error)}); write"
            " squeeze(-1) for squeeze(), and keep the batch axis"
        ) from error


class _Squeezes(TorchFunctionMode):
    """Finds the last line of a user that drops the first axis of a tensor by `squeeze()`.

    Attributes:
        place: the line and its file, "" without one.
    """

    place = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        if is_whole_squeeze(func, args, kwargs or {}):
            calls = reversed([*traceback.walk_stack(inspect.currentframe())])
            self.place = last_own_line(calls) or self.place
        return func(*args, **(kwargs or {}))


def is_whole_squeeze(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call drops the first axis of a tensor, of length one, naming none."""
    is_whole = func in _SQUEEZES and len(args) == 1 and not kwargs
    return is_whole and args[0].shape[:1] == (1,)


_SQUEEZES = {torch.squeeze, Tensor.squeeze, Tensor.squeeze_}


def is_permanent(error: Exception) -> bool:
    """Return whether an error would recur on any rows: memory, state, or the shape of losses."""
    begins = ("loss_fn must return", "loss_fn returned", "loss_fn takes each")
    is_of_losses = isinstance(error, ValueError) and str(error).startswith(begins)
    return is_of_losses or ends_run(error)


def _first_line(error: Exception) -> str:
    """Return the beginning of the message of an error, or its type."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:60]
