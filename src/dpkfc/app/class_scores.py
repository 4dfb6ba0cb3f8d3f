"""Scores of logits: accuracy, AUROC, log loss and calibration, and of each class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpkfc.app.bootstrap import DRAWS, bootstrap, mean_of_sums, order_examples, slices
from dpkfc.app.scores import LEVEL, ClassScore, Floats, Score, Scores

BINS = 15
_INTERVALS = (
    "95 % intervals: shares exact binomial, AUROC after Newcombe (2006), the others from"
    f" {DRAWS:,} bootstrap draws of the examples"
)


def choose_classes(outputs: Any, threshold: float = 0.5) -> Any:
    """Return the answers `[N]` for logits `[N, K]`, an array or a tensor as they are.

    Args:
        outputs: logits.
        threshold: probability of the second of two classes from which it is the answer.
    """
    if outputs.shape[1] == 2 and threshold != 0.5:
        is_second = outputs[:, 1] - outputs[:, 0] >= math.log(threshold / (1 - threshold))
        return is_second * 1
    return outputs.argmax(1)


def score_classes(outputs: Any, labels: Any, threshold: float = 0.5) -> Scores:
    """Score logits by the labels of their examples.

    Args:
        outputs: logits `[N, K]`.
        labels: class numbers `[N]`; an example with another number is left out.
        threshold: probability of the second of two classes from which it is the answer.
    """
    logits = np.asarray(outputs)
    labels = np.asarray(labels)
    count = logits.shape[1]
    is_known = (labels >= 0) & (labels < count)
    unlabelled = int((~is_known).sum())
    if unlabelled:
        logits, labels = logits[is_known], labels[is_known]
    labels = labels.astype(np.int64, copy=False)
    if not len(labels):
        return Scores(examples=0, unlabelled=unlabelled, scores=(), intervals=_INTERVALS)
    logits, labels = order_examples(logits, labels)
    confusion = np.zeros((count, count), np.int64)
    for rows in slices(len(labels)):
        answers = choose_classes(logits[rows].astype(np.float64), threshold)
        np.add.at(confusion, (labels[rows], answers), 1)

    def compute_losses(rows: slice) -> Floats:
        return -np.take_along_axis(_log_shares(logits[rows]), labels[rows, None], axis=1)

    # A guess that knows the shares of the classes alone: the largest share, and their entropy.
    shares = confusion.sum(1) / len(labels)
    present = shares[shares > 0]
    entropy = float(present @ np.log(1 / present))
    right = int(confusion.trace())
    return Scores(
        examples=len(labels),
        unlabelled=unlabelled,
        scores=(
            share_score("accuracy", right, len(labels), guess=float(shares.max())),
            _auroc(logits, labels),
            bootstrap("log loss", len(labels), compute_losses, mean_of_sums, entropy),
            _calibration(logits, labels),
        ),
        classes=_class_scores(confusion),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        intervals=_INTERVALS,
    )


def _log_sum(logits: Any) -> Floats:
    return np.logaddexp.reduce(logits.astype(np.float64), axis=1)


def _log_shares(logits: Any) -> Any:
    """Return the logarithms of the probabilities of all classes `[N, K]`."""
    return logits - _log_sum(logits)[:, None]


def _class_scores(confusion: NDArray[np.int64]) -> tuple[ClassScore, ...]:
    scores = []
    for label in range(len(confusion)):
        right = int(confusion[label, label])
        examples = int(confusion[label].sum())
        answered = int(confusion[:, label].sum())
        score = ClassScore(
            label=label,
            examples=examples,
            recall=share_score("recall", right, examples),
            precision=share_score("precision", right, answered),
        )
        scores.append(score)
    return tuple(scores)


def share_score(name: str, part: int, total: int, guess: float | None = None) -> Score:
    """Return a share with its exact binomial interval (Clopper and Pearson, 1934)."""
    if not total:
        return Score(name=name, value=None, guess=guess)
    from scipy import stats

    found = stats.binomtest(part, total).proportion_ci(LEVEL)
    low, high = float(found.low), float(found.high)
    return Score(name=name, value=part / total, low=low, high=high, guess=guess)


def _auroc(logits: Any, labels: Any) -> Score:
    """Return the area under the ROC curve: of each class against the rest, and their mean."""
    count = logits.shape[1]
    # Of two classes the areas are equal.
    measured = [1] if count == 2 else range(count)
    areas = []
    for label in measured:
        is_class = labels == label
        if not is_class.any() or is_class.all():
            continue
        # log p / (1 - p), by which the examples are ranked.
        odds = np.empty(len(labels))
        for rows in slices(len(labels)):
            others = np.delete(logits[rows], label, axis=1)
            odds[rows] = logits[rows, label] - _log_sum(others)
        areas.append(_area(odds, is_class))
    name = "AUROC" if count == 2 else "AUROC, mean of each class against the rest"
    if not areas:
        return Score(name=name, value=None, guess=0.5)
    value, low, high = np.mean(areas, axis=0).tolist()
    return Score(name=name, value=value, low=low, high=high, guess=0.5)


def _area(scores: Floats, is_positive: Any) -> tuple[float, float, float]:
    """Return an area under the ROC curve with its interval.

    The area is the Mann–Whitney statistic of m positive and n negative scores. The ends of its
    interval solve (A − Â)² = z² V(A) for A, with the variance of Hanley and McNeil:

        V(A) = A (1 − A) (1 + ((m + n) / 2 − 1) ((1 − A) / (2 − A) + A / (1 + A))) / (m n)

    It has an interval where no pair is in the wrong order.

    Source: R. G. Newcombe, Statistics in Medicine 25 (2006) 559, method 5.
    """
    from scipy import stats
    from scipy.optimize import brentq

    positive = np.sort(scores[is_positive])
    negative = np.sort(scores[~is_positive])
    m = len(positive)
    n = len(negative)
    pairs = m * n
    # Of pairs of equal scores half are in the wrong order.
    below = np.searchsorted(positive, negative, "left").sum()
    not_above = np.searchsorted(positive, negative, "right").sum()
    area = (2 * pairs - below - not_above) / (2 * pairs)
    z = stats.norm.ppf(0.5 + LEVEL / 2)

    def excess(value: float) -> float:
        spread = (1 - value) / (2 - value) + value / (1 + value)
        dependence = 1 + ((m + n) / 2 - 1) * spread
        variance = value * (1 - value) * dependence / pairs
        return float((value - area) ** 2 - z**2 * variance)

    tiny = 1e-9
    low = 0.0 if area < 2 * tiny else brentq(excess, 0.0, area - tiny)
    high = 1.0 if area > 1 - 2 * tiny else brentq(excess, area + tiny, 1.0)
    return float(area), float(low), float(high)


def _calibration(logits: Any, labels: Any) -> Score:
    """Return the expected calibration error: |confidence − accuracy| of bins, by their size.

    Source: C. Guo et al., ICML 2017. A draw of the examples adds to the error what the sample has
    added, so the interval is reflected at the estimate. It begins at 0 where one in twenty
    calibrated models would show as great an error.
    """
    count = len(labels)

    def answer(rows: slice) -> tuple[Any, Floats, Any]:
        """Return answers, their confidences, and the bins of these."""
        log_shares = _log_shares(logits[rows])
        confidence = np.exp(log_shares.max(axis=1))
        bins = (confidence * BINS).astype(np.int64).clip(max=BINS - 1)
        return log_shares.argmax(axis=1), confidence, bins

    def excess_by_bin(rows: slice) -> Floats:
        answers, confidence, bins = answer(rows)
        columns = np.zeros((len(bins), BINS))
        columns[np.arange(len(bins)), bins] = (answers == labels[rows]) - confidence
        return columns

    def mean_error(totals: Floats, examples: Any) -> Floats:
        return np.asarray(np.abs(totals).sum(axis=1) / examples)

    name = f"calibration error ({BINS} bins)"
    found = bootstrap(name, count, excess_by_bin, mean_error)
    if found.value is None or found.low is None or found.high is None:
        return found
    low = max(0.0, 2 * found.value - found.high)
    high = max(0.0, 2 * found.value - found.low)
    # Errors of models that are calibrated: the answers of a bin vary as coins of its confidence.
    variances = np.zeros(BINS)
    for rows in slices(count):
        _, confidence, bins = answer(rows)
        variances += np.bincount(bins, confidence * (1 - confidence), BINS)
    drawn = np.random.default_rng(0).normal(size=(DRAWS, BINS)) * np.sqrt(variances)
    if found.value <= np.quantile(mean_error(drawn, count), LEVEL):
        low = 0.0
    return Score(name=name, value=found.value, low=low, high=high)
