"""Check on public rows, before any private row, that each example has its own gradient.

The proof for a private pass is in `tracking`; `gradients.clipped_sum` asks for it.

What the tracker proves needs no test. This check is of what the tracker cannot see: code that
depends on the size of the batch, collate functions, backward passes in Python. What the tracker
cannot prove is compared example by example. Either examples really mix, which is refused by name,
or only their layout is unknown, and then examples are differentiated one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.augmentation import Augmentation
from dpkfc.gradients.autograd_graph import used_parameters
from dpkfc.gradients.eager_mode import run_eagerly
from dpkfc.gradients.layers import Layer, device_of_layers
from dpkfc.gradients.loss_function import LossFn
from dpkfc.gradients.model_checks import check_finite
from dpkfc.gradients.state_check import check_memory, checked_state
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.rows import PublicRows
from dpkfc.public_rows.template import Attempts
from dpkfc.rng_state import all_states, has_drawn, preserve_generators, seed_generators
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import forget_batches
from dpkfc.verification.accepted_rows import accept_rows
from dpkfc.verification.batch_comparison import (
    check_padding,
    check_rows_alone,
    check_sizes,
    check_sizes_afresh,
)
from dpkfc.verification.constant_numbers import ConstantNumbers
from dpkfc.verification.kept_results import refuse_kept_results
from dpkfc.verification.public_passes import PublicPasses
from dpkfc.verification.row_functions import check_row_functions
from dpkfc.verification.tape_comparison import Traced, check_tape

_MAX_ROWS = 256  # of a compared batch


@dataclass(frozen=True)
class Verdict:
    """The result of the check on public rows.

    Attributes:
        operation: why examples are differentiated one at a time; None where whole micro-batches are
            proved.
        unchecked: why nothing could be compared, or "".
        is_accepted: whether the loss has accepted public rows.
        rows: the public rows, None where the loss has accepted none.
    """

    operation: Unknown | None = None
    unchecked: str = ""
    is_accepted: bool = True
    rows: PublicRows | None = None

    def warn(self, stacklevel: int) -> None:
        """Warn where nothing could be compared.

        Args:
            stacklevel: as of `warnings.warn`, from the caller.
        """
        if self.unchecked:
            reason = shorten(self.unchecked.splitlines()[0], 90, placeholder=" ...")
            warnings.warn(
                f"public rows could not be used: {reason}; whether examples mix is not checked",
                stacklevel=stacklevel + 1,
            )


def check_on_public_rows(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: LossFn,
    attempts: Attempts,
    *,
    expected: int,
    bound: int | None = None,
    augment: Augmentation | None = None,
) -> Verdict:
    """Check on public rows that every example has its own gradient, and choose how to compute it.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        loss_fn: maps model and batch to losses `[n]`.
        attempts: each maps a number of records to public rows. The first rows that the loss accepts
            are used.
        expected: rows of a logical batch, on average.
        bound: most rows of a micro-batch, None for no bound.
        augment: maps a batch to one with as many rows.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix (with the name of the operation, where it is known), the loss fails
            on a batch of one example, or the forward pass keeps something of its examples.
        Exception: what the loss raises on records that a user has given.
        RuntimeError: not even two examples fit into memory.
    """
    check_finite(layers)
    twice = 2 * expected
    most = max(_MAX_ROWS, expected)
    max_rows = max(4, min(twice, bound or twice, most))
    device = device_of_layers(layers)
    with (
        refuse_kept_results(model),
        run_eagerly(),
        forget_batches(),
        torch.enable_grad(),
        preserve_generators(),
        checked_state(model) as state,
    ):
        while True:
            seed_generators(1)
            passes = PublicPasses(model, layers, loss_fn, augment, device, max_rows, state)
            try:
                return _judge(passes, attempts, expected)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if max_rows == 2:
                    raise RuntimeError(
                        "the check on public rows needs two examples in memory, and they do not"
                        " fit; nothing was released. Use a smaller model, or verify=False"
                    ) from error
            max_rows = max(2, max_rows // 2)


def _judge(passes: PublicPasses, attempts: Attempts, expected: int) -> Verdict:
    """Return the verdict, unchecked where the loss accepts no public rows."""
    rows, reason = accept_rows(passes, attempts)
    if rows is None:
        return Verdict(unchecked=reason, is_accepted=False)
    size = max(2, min(passes.max_rows // 2, expected))
    few = min(4, size)
    failure, traced = _trace_with_seeds(passes, rows, size, few)
    check_row_functions(passes, rows, min(32, size))
    check_padding(passes, rows)
    make_batch = partial(passes.augment_rows, rows, range(few))
    known = passes.known.get(tuple(range(few)))
    if passes.is_repeatable(make_batch, restarted=True, known=known):
        return Verdict(_compare(passes, rows, size, failure, make_batch, traced), rows=rows)
    check_sizes_afresh(passes, rows, failure)
    _check_memory(passes, rows)
    batch = make_batch()
    if failure is not None and not passes.is_repeatable(lambda: batch, restarted=True):
        raise ValueError(
            "model or loss_fn remembers earlier batches, or has a random generator of its"
            " own; use torch's, numpy's and random's (docs/errors.md#state)"
        )
    # A proof needs no comparison. Without a proof every example has a pass of its own.
    return Verdict(
        failure,
        "two passes over the same rows with the same seeds differ",
        rows=rows,
    )


def _compare(
    passes: PublicPasses,
    rows: PublicRows,
    size: int,
    failure: Unknown | None,
    make_batch: Callable[[], Any],
    traced: Traced | None,
) -> Unknown | None:
    """Compare passes over the same rows, beside other rows and in batches of other sizes.

    Args:
        passes: of the model, which are repeatable from the same state of the generators.
        rows: public rows.
        size: of a batch.
        failure: why the pass is not proved, or None.
        make_batch: makes a batch of a few rows.
        traced: the pass over these, where passes draw no random numbers.

    Returns:
        Why the gradients of a pass do not belong to its examples, or None.
    """
    with ConstantNumbers():
        # numpy and random draw different numbers for a batch of another size.
        before = all_states()
        is_repeatable = traced is not None or passes.is_repeatable(make_batch, restarted=False)
        are_constant = is_repeatable and not has_drawn(before, of_torch=False)
        if are_constant:
            check_sizes(passes, rows, failure)
        if failure is None:
            # Nothing is known any more where a pass since then has changed the model.
            traced = traced if passes.known else None
            failure = check_tape(passes, rows, min(4, size), alone=are_constant, traced=traced)
        if failure is not None and are_constant:
            check_rows_alone(passes, rows, size, failure)
    _check_memory(passes, rows)
    return failure


def _trace_with_seeds(
    passes: PublicPasses, rows: PublicRows, size: int, few: int
) -> tuple[Unknown | None, Traced | None]:
    """Return the first reason why a pass is not proved, under several random states.

    Where passes draw no random numbers one state stands for all, and the pass over a few rows is
    returned too.
    """
    failure = None
    traced = None
    for seed, length in enumerate((size, few, few, few)):
        seed_generators(seed + 1)
        seed_failure, tape, losses = passes.trace_rows(rows, length)
        failure = failure or seed_failure
        if seed_failure is None and seed == 0:
            _warn_of_unused(passes, losses)
        if seed == 1 and {tuple(range(size)), tuple(range(few))} <= passes.known.keys():
            traced = tape, losses
            break
    seed_generators(1)
    return failure, traced


def _warn_of_unused(passes: PublicPasses, losses: Tensor) -> None:
    """Warn where the loss never uses a trainable parameter, which noise alone would train."""
    used = used_parameters(passes.model, losses)
    unused = [name for name in trainable_tensors(passes.model) if name not in used]
    if unused:
        warnings.warn(
            f"parameter '{unused[0]}' is trainable but loss_fn never uses it ({len(unused)}"
            " such): it receives noise alone; freeze it with requires_grad_(False)",
            stacklevel=7,
        )


def _check_memory(passes: PublicPasses, rows: PublicRows) -> None:
    """Check that the forward pass keeps no value of its examples for later ones."""
    few = range(len(rows))[:4]
    pairs = [(0, 1), *((i, i) for i in few)]
    batches = [rows.batch(pair) for pair in pairs]
    losses = partial(passes.losses, size=2)
    check_memory(passes.model, passes.state, losses, batches)
