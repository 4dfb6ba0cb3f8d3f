"""The gradients of the tape, compared with plain autograd once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.full_precision import full_precision
from dpkfc.gradients.layer_matrices import split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.rows import PublicRows
from dpkfc.rng_state import restarter
from dpkfc.tensors import Tensors
from dpkfc.tracking.states import Unknown
from dpkfc.verification.differences import all_gradients, difference_of, total_norm_of
from dpkfc.verification.public_passes import PublicPasses

Traced = tuple[Tape, Tensor]
"""A proved pass that no backward pass has read yet: its tape and its losses `[n]`."""


def check_tape(
    passes: PublicPasses,
    rows: PublicRows,
    size: int,
    *,
    alone: bool,
    traced: Traced | None = None,
) -> Unknown | None:
    """Compare the tape with plain autograd once.

    This is a guard against faults of this library, and against hooks that mix examples in the
    backward pass, where no operation is followed.

    Args:
        passes: of the model.
        rows: public rows.
        size: of the batch on the tape.
        alone: let plain autograd differentiate one row at a time.
        traced: the pass on the tape, where passes draw no random numbers.

    Returns:
        The first module that computes something else when it runs again, as one that fills a
        cache does, or None.
    """
    restart = restarter()
    weights = weights_of_rows(size, passes.device)
    if traced is None:
        restart()
        failure, tape, losses = passes.trace(rows.batch(range(size)), size)
        if failure is not None:
            return failure
    else:
        tape, losses = traced
    calls = tape.backward(losses)
    step = 1 if alone else size
    total = torch.zeros((), dtype=torch.float64, device=passes.device)
    for first in range(0, size, step):
        part = range(first, first + step)
        restart()
        if alone:
            losses = passes.losses_of_rows(rows, part)
        else:
            # Losses of several rows may be known, and then without their graph.
            losses = passes.losses(rows.batch(part), size)
        weighted = losses * weights[list(part)].to(losses)
        total = total + weighted.sum()
    expected = all_gradients(passes.model, total)
    total_norm = total_norm_of(expected)
    if not math.isfinite(total_norm):
        return None
    # Under autocast a layer in bfloat16 rounds the gradients of others too.
    dtype = max(passes.dtypes() | tape.output_dtypes, key=lambda x: torch.finfo(x).eps)
    for layer in passes.layers:
        try:
            check_sums(layer, calls.pop(layer.name, []), weights, expected, total_norm, dtype)
        except Exception as error:
            if layer.rule != "fallback" or is_out_of_memory(error):
                raise
            where = f"layer '{layer.display_name}'"
            return Unknown(where, "run again for an example, it computes something else")
    return None


def weights_of_rows(size: int, device: torch.device) -> Tensor:
    """Return different weights `[size]` of rows, float64, between 0.5 and 1.5."""
    steps = torch.arange(1, size + 1, dtype=torch.float64, device=device)
    return 0.5 + torch.frac(0.618 * steps)


def check_sums(
    layer: Layer,
    calls: Sequence[Any],
    weights: Tensor,
    expected: Tensors,
    total_norm: float,
    dtype: torch.dtype,
) -> None:
    """Check the weighted sums of the examples' gradients of a layer, against autograd's."""
    sums: Tensors = {}
    if calls:
        with full_precision():
            block = blocks_of(layer, calls, len(weights))
            sums = split_sum(layer, block.weighted_sum(weights))
    for name in layer.parameters.values():
        one = sums.get(name)
        if one is None:
            one = torch.zeros_like(expected[name])
        difference = difference_of(expected[name], one, total_norm, dtype)
        if difference:
            raise ValueError(
                f"the per-example gradients of '{name}' do not add up to the gradient of "
                f"autograd (relative difference {difference:.2g}; see"
                " docs/errors.md#gradient-mismatch)"
            )
