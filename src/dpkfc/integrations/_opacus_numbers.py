"""Compare the numbers that an Opacus-shaped script uses from batch to batch.

The lengths of a batch, its size among them, follow its examples. So does a number made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from dpkfc.tracking.trace import Trace

_POWERS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)


class ScriptNumbers:
    """Hold the numbers that the first batch of a script has met, outside of the model."""

    def __init__(self) -> None:
        self._first: Any = None
        # Of the first batch that was proved, and of the first one that was not.
        self._traces: dict[bool, Trace] = {}
        # A number, a length, and the power of the length that the number has followed so far, with
        # the values that the length had.
        self._followed: dict[tuple[int, int, float], set[int]] = {}

    def check(
        self,
        factor: float,
        trace: Trace,
        lengths: Sequence[int],
        *,
        is_read: bool,
        is_proved: bool = True,
    ) -> None:
        """Compare a batch with the first one.

        Args:
            factor: of each entry of an example in the loss.
            trace: what the script did with the examples.
            lengths: of the tensors of the batch.
            is_read: whether the script may know values of the batch.
            is_proved: whether the model ran on all examples at once, and was followed.

        Raises:
            ValueError: a number follows a length or values of the batch, or the factor differs.
        """
        numbers = [x for x in trace if isinstance(x, float)]
        lengths = [max(1, x - less) for x in lengths for less in (0, 1)]
        if self._first is None:
            self._first = factor, numbers, lengths
            of_each = product(range(len(numbers)), range(len(lengths)), _POWERS)
            self._followed = {of: {lengths[of[1]]} for of in of_each}
        old_factor, old_numbers, old_lengths = self._first
        followed = {}
        for (i, k, power), values in self._followed.items():
            if i >= len(numbers) or k >= len(lengths):
                continue
            expected = old_numbers[i] * (lengths[k] / old_lengths[k]) ** power
            if not math.isclose(numbers[i], expected, rel_tol=1e-6):
                continue
            followed[i, k, power] = values | {lengths[k]}
            # A number of a schedule may grow as a length does by chance, but hardly twice.
            is_power = math.isclose(numbers[i], lengths[k] ** power, rel_tol=1e-6)
            if numbers[i] and len(followed[i, k, power]) > (1 if is_power else 2):
                raise ValueError(
                    "losses or inputs meet a number that follows a length of the batch, so each"
                    " example changes the others; use constants, and reduce losses by mean()"
                )
        self._followed = followed
        if trace != self._traces.setdefault(is_proved, trace) and is_read:
            raise ValueError(
                "the loss is computed in another way than before, and values of the batch were"
                " read; read them after loss.backward(), and batch tensors alone"
            )
        if not math.isclose(factor, old_factor, rel_tol=1e-6):
            raise ValueError(
                "the loss is multiplied or divided by another number than in earlier batches;"
                " average each example over its own positions, and use constants"
            )
