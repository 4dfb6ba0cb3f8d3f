"""Rounds in which every contender takes one turn, in an order that is shuffled anew each round.

A drift of the machine then meets all contenders alike.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from common import compare_pairs

T = TypeVar("T")


def take_rounds(
    live: Mapping[str, Any], rounds: int, take: Callable[[Any], T], warmup: int = 0
) -> dict[str, dict[int, T]]:
    """Return what every contender took, by its name and the round.

    Args:
        live: contenders, whose models are built; all are closed at the end.
        rounds: of the measurement.
        take: lets a contender take a step, and returns what it took. A step that refreshed is not
            a plain step, and is left out.
        warmup: rounds before, which do not count.
    """
    found: dict[str, dict[int, T]] = {name: {} for name in live}
    order = random.Random(0)
    gc.collect()
    gc.freeze()
    for number in range(warmup + rounds):
        for name in order.sample(list(live), len(live)):
            contender = live[name]
            built = contender.built_at()
            taken = take(contender)
            if number >= warmup and contender.built_at() == built:
                found[name][number] = taken
        gc.collect()
    for contender in live.values():
        contender.close()
    gc.unfreeze()
    return found


def compare_steps(
    live: Mapping[str, Any], rounds: int, warmup: int, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return median milliseconds of processor time of each contender, and ratios of pairs."""
    from contenders import time_call

    taken = take_rounds(live, rounds, lambda own: time_call(own.step)[1], warmup)
    seconds = {name: list(found.values()) for name, found in taken.items()}
    milliseconds = {name: round(1e3 * statistics.median(x), 2) for name, x in seconds.items()}
    ratios = {
        name: compare_pairs(seconds[top], seconds[bottom]) for name, (top, bottom) in pairs.items()
    }
    return {"ms": milliseconds, "ratios": ratios}
