"""Successive halving: after 1, 3, 9 … evaluations the best third of all trials that came so far goes on.

A trial is judged against those that were there before it, so whether it goes on depends on when it ran. One that was stopped and
stands in the best third when all have run is therefore run once more, to its end (Li et al. 2020, "A System for Massively
Parallel Hyperparameter Tuning", where it would only have waited). Attempts that were killed judge nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["is_rung", "stands"]

_FIRST, _SHARE = 1, 3  # the first evaluation at which a trial is judged; of so many trials that stand there one goes on


def is_rung(number: int) -> bool:
    """Whether a trial is judged at this evaluation, counted from 1."""
    rung = _FIRST
    while rung < number:
        rung *= _SHARE
    return rung == number


def stands(value: float, others: Iterable[float]) -> bool:
    """Whether a trial is in the best third of those at its rung, itself included; of one or two the best is."""
    at = sorted([value, *others], reverse=True)
    return value >= at[max(1, len(at) // _SHARE) - 1]
