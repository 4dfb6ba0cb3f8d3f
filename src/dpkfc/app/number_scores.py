"""Scores of predicted numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpkfc.app.bootstrap import DRAWS, bootstrap, mean_of_sums, order_examples
from dpkfc.app.scores import Floats, Scores

_INTERVALS = f"95 % intervals from {DRAWS:,} bootstrap draws of the examples"


def score_numbers(predicted: Any, targets: Any) -> Scores:
    """Score predicted numbers by the targets of their examples.

    Args:
        predicted: `[N]`.
        targets: `[N]`; an example without one (NaN) is left out.
    """
    predicted = np.asarray(predicted, np.float64)
    targets = np.asarray(targets, np.float64)
    is_known = ~np.isnan(targets)
    unlabelled = int((~is_known).sum())
    if not is_known.any():
        return Scores(examples=0, unlabelled=unlabelled, scores=(), intervals=_INTERVALS)
    predicted, targets = order_examples(predicted[is_known], targets[is_known])
    errors = predicted - targets
    centred = targets - targets.mean()
    count = len(targets)

    def explained(rows: slice) -> Floats:
        """Return squared error, target and its square, of each example."""
        some = centred[rows]
        return np.stack([errors[rows] ** 2, some, some**2], axis=1)

    def absolute(rows: slice) -> Floats:
        return np.abs(errors[rows, None])

    def squared(rows: slice) -> Floats:
        return errors[rows, None] ** 2

    of_median = float(np.abs(targets - np.median(targets)).mean())
    scores = (
        bootstrap("R²", count, explained, _explain_variance, 0.0),
        bootstrap("mean absolute error", count, absolute, mean_of_sums, of_median),
        bootstrap(
            "root mean squared error",
            count,
            squared,
            lambda totals, n: np.sqrt(mean_of_sums(totals, n)),
            float(targets.std()),
        ),
    )
    return Scores(examples=len(targets), unlabelled=unlabelled, scores=scores, intervals=_INTERVALS)


def _explain_variance(totals: Floats, n: int) -> Floats:
    squared, of_targets, of_squares = totals.T
    spread = of_squares - of_targets**2 / n
    with np.errstate(all="ignore"):
        explained: Floats = np.where(spread > 0, 1 - squared / spread, np.nan)
    return explained
