"""Scores of logits: accuracy, AUROC, log loss and calibration, and of each class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpkfc.app.bootstrap import DRAWS, bootstrap, mean_of_sums
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
    logits = np.asarray(outputs, np.float64)
    labels = np.asarray(labels)
    count = logits.shape[1]
    is_known = (labels >= 0) & (labels < count)
    logits, labels = logits[is_known], labels[is_known].astype(np.int64)
    unlabelled = int((~is_known).sum())
    if not len(labels):
        return Scores(examples=0, unlabelled=unlabelled, scores=(), intervals=_INTERVALS)
    answers = choose_classes(logits, threshold)
    logs = logits - _log_sum(logits)[:, None]
    losses = -logs[np.arange(len(labels)), labels]
    confusion = np.bincount(labels * count + answers, minlength=count * count)
    confusion = confusion.reshape(count, count)
    shares = confusion.sum(1) / len(labels)
    present = shares[shares > 0]
    scores = (
        share_score("accuracy", int(confusion.trace()), len(labels), float(shares.max())),
        _auroc(logits, labels),
        bootstrap("log loss", losses[:, None], mean_of_sums, float(present @ np.log(1 / present))),
        _calibration(logs, labels),
    )
    return Scores(
        examples=len(labels),
        unlabelled=unlabelled,
        scores=scores,
        classes=_class_scores(confusion),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        intervals=_INTERVALS,
    )


def _log_sum(logits: Floats) -> Floats:
    return np.logaddexp.reduce(logits, axis=1)


def _class_scores(confusion: NDArray[np.int64]) -> tuple[ClassScore, ...]:
    scores = []
    for label, (of_class, answered) in enumerate(
        zip(confusion.sum(1), confusion.sum(0), strict=True)
    ):
        right = int(confusion[label, label])
        score = ClassScore(
            label=label,
            examples=int(of_class),
            recall=share_score("recall", right, int(of_class)),
            precision=share_score("precision", right, int(answered)),
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


def _auroc(logits: Floats, labels: NDArray[np.int64]) -> Score:
    """Return the area under the ROC curve: of each class against the rest, and their mean."""
    count = logits.shape[1]
    areas = []
    for label in range(1, 2) if count == 2 else range(count):
        is_class = labels == label
        others = np.delete(logits, label, axis=1)
        odds = logits[:, label] - _log_sum(others)
        if is_class.any() and not is_class.all():
            areas.append(_area(odds[is_class], odds[~is_class]))
    name = "AUROC" if count == 2 else "AUROC, mean of each class against the rest"
    if not areas:
        return Score(name=name, value=None, guess=0.5)
    value, low, high = np.mean(areas, axis=0).tolist()
    return Score(name=name, value=value, low=low, high=high, guess=0.5)


def _area(positive: Floats, negative: Floats) -> tuple[float, float, float]:
    """Return an area under the ROC curve with its interval.

    Source: R. G. Newcombe, Statistics in Medicine 25 (2006) 559, method 5: the variance of Hanley
    and McNeil, solved for the area. It has an interval where no pair is in the wrong order.
    """
    from scipy import stats
    from scipy.optimize import brentq

    m, n = len(positive), len(negative)
    ranks = stats.rankdata(np.concatenate([positive, negative]))
    area = (ranks[:m].sum() - m * (m + 1) / 2) / (m * n)
    z = stats.norm.ppf(0.5 + LEVEL / 2)

    def excess(value: float) -> float:
        spread = (1 - value) / (2 - value) + value / (1 + value)
        variance = value * (1 - value) * (1 + ((m + n) / 2 - 1) * spread) / (m * n)
        return float((value - area) ** 2 - z**2 * variance)

    tiny = 1e-9
    low = 0.0 if area < 2 * tiny else brentq(excess, 0.0, area - tiny)
    high = 1.0 if area > 1 - 2 * tiny else brentq(excess, area + tiny, 1.0)
    return float(area), float(low), float(high)


def _calibration(logs: Floats, labels: NDArray[np.int64]) -> Score:
    """Return the expected calibration error: |confidence − accuracy| of bins, by their size.

    Source: C. Guo et al., ICML 2017. A draw of the examples adds to the error what the sample has
    added, so the interval is reflected at the estimate. It begins at 0 where one in twenty
    calibrated models would show as great an error.
    """
    count = len(labels)
    confidence = np.exp(logs.max(axis=1))
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    by_bin = np.zeros((count, BINS))
    by_bin[np.arange(count), bins] = (logs.argmax(axis=1) == labels) - confidence
    spread = np.sqrt(np.bincount(bins, confidence * (1 - confidence), BINS))
    drawn = np.random.default_rng(0).normal(size=(DRAWS, BINS)) * spread
    calibrated = np.abs(drawn).sum(axis=1) / count
    name = f"calibration error ({BINS} bins)"
    found = bootstrap(name, by_bin, lambda totals, n: np.abs(totals).sum(axis=1) / n)
    if found.value is None or found.low is None or found.high is None:
        return found
    low, high = (max(0.0, 2 * found.value - end) for end in (found.high, found.low))
    if found.value <= np.quantile(calibrated, LEVEL):
        low = 0.0
    return Score(name=name, value=found.value, low=low, high=high)
