"""Scores of held-out examples beside the best constant guess, each with a 95 % interval.

Intervals take examples as independent: where people have several records, they are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Said in the place of a score.
NO_LABEL = "no {} row has a known label"
NO_NUMBER = "not a number"
BINS = 15
_LEVEL = 0.95
_DRAWS = 1000
# Sums over so many examples are drawn as Gaussian numbers: their law is close, and time counts.
_MANY = 20_000
_CHUNK = 50
# Classes of a confusion matrix that a card or a terminal shows.
MOST_SHOWN = 12
OF_CLASSES = (
    "95 % intervals: shares exact binomial, AUROC after Newcombe (2006), the others from"
    f" {_DRAWS:,} bootstrap draws of the examples"
)
OF_NUMBERS = f"95 % intervals from {_DRAWS:,} bootstrap draws of the examples"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score.

    Attributes:
        name: what it is.
        value: on the examples; None where there is nothing to measure it on.
        low, high: its 95 % interval, None without one.
        guess: of the best constant guess for the same examples.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    guess: float | None = None

    @property
    def interval(self) -> str:
        """The interval as a text."""
        return "–" if self.low is None else f"{digits(self.low)} to {digits(self.high)}"

    @property
    def text(self) -> str:
        """Value, interval and guess in one line."""
        if self.value is None:
            return "–"
        parts = [self.interval] if self.low is not None else []
        if self.guess is not None:
            parts.append(f"constant guess {digits(self.guess)}")
        return digits(self.value) + (f" ({'; '.join(parts)})" if parts else "")


def digits(value: float | None) -> str:
    """Return four places of a number below ten, five digits of a greater one."""
    if value is None:
        return "–"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    """How well a model knows one class.

    Attributes:
        label: of the class.
        examples: examples of the class.
        recall: share of them that get this label.
        precision: share of the examples with this answer that are of the class.
    """

    label: int
    examples: int
    recall: Score
    precision: Score


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a model on held-out examples.

    Attributes:
        examples: with a known target.
        unlabelled: examples without one, which are left out.
        scores: in the order in which they are shown; empty without examples.
        classes: one each; empty for numbers.
        confusion: examples by true class and answer; empty for numbers.
        intervals: how the intervals were computed.
    """

    examples: int
    unlabelled: int
    scores: tuple[Score, ...]
    classes: tuple[ClassScore, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    intervals: str = OF_CLASSES

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the content of a file, with the names of the classes."""
        content = asdict(self)
        for entry in content["classes"]:
            entry["name"] = name_of(entry["label"], names)
        return content

    def card_rows(self, measured_on: str, names: Sequence[str]) -> dict[str, Any]:
        """Return the rows of a privacy card."""
        rows: dict[str, Any] = {}
        for score in self.scores:
            rows[f"{score.name}, {measured_on}"] = score.text
        if self.confusion and len(self.confusion) <= MOST_SHOWN:
            lines = [
                f"{name_of(label, names)}: {', '.join(map(str, counts))}"
                for label, counts in enumerate(self.confusion)
            ]
            rows[f"answers by true class, {measured_on}"] = "; ".join(lines)
        if self.scores:
            rows[f"how scores on the {measured_on} set were computed"] = self.intervals
        return rows


def missing_score(scores: Scores | None, measured_on: str) -> str:
    """Return why a run has no score: there is no label, or a task's own score is not a number."""
    return NO_LABEL.format(measured_on) if scores and not scores.examples else NO_NUMBER


def name_of(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, its number where it is not named."""
    return names[label] if label < len(names) else str(label)


# --------------------------------------------------------------------------------------------------
# Classes.


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
        return Scores(examples=0, unlabelled=unlabelled, scores=())
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
        _bootstrap("log loss", losses[:, None], _mean, float(present @ np.log(1 / present))),
        _calibration(logs, labels),
    )
    return Scores(
        examples=len(labels),
        unlabelled=unlabelled,
        scores=scores,
        classes=_class_scores(confusion),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
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

    found = stats.binomtest(part, total).proportion_ci(_LEVEL)
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
    z = stats.norm.ppf(0.5 + _LEVEL / 2)

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
    drawn = np.random.default_rng(0).normal(size=(_DRAWS, BINS)) * spread
    calibrated = np.abs(drawn).sum(axis=1) / count
    name = f"calibration error ({BINS} bins)"
    found = _bootstrap(name, by_bin, lambda totals, n: np.abs(totals).sum(axis=1) / n)
    if found.value is None or found.low is None or found.high is None:
        return found
    low, high = (max(0.0, 2 * found.value - end) for end in (found.high, found.low))
    if found.value <= np.quantile(calibrated, _LEVEL):
        low = 0.0
    return Score(name=name, value=found.value, low=low, high=high)


# --------------------------------------------------------------------------------------------------
# Numbers.


def score_numbers(predicted: Any, targets: Any) -> Scores:
    """Score predicted numbers by the targets of their examples.

    Args:
        predicted: `[N]`.
        targets: `[N]`; an example without one (NaN) is left out.
    """
    predicted = np.asarray(predicted, np.float64)
    targets = np.asarray(targets, np.float64)
    is_known = ~np.isnan(targets)
    errors = (predicted - targets)[is_known]
    targets = targets[is_known]
    unlabelled = int((~is_known).sum())
    if not len(targets):
        return Scores(examples=0, unlabelled=unlabelled, scores=(), intervals=OF_NUMBERS)
    centred = targets - targets.mean()
    # Per example: squared error, target and its square.
    explained = np.stack([errors**2, centred, centred**2], axis=1)
    of_median = float(np.abs(targets - np.median(targets)).mean())
    scores = (
        _bootstrap("R²", explained, _explain_variance, 0.0),
        _bootstrap("mean absolute error", np.abs(errors)[:, None], _mean, of_median),
        _bootstrap(
            "root mean squared error",
            errors[:, None] ** 2,
            lambda totals, n: np.sqrt(_mean(totals, n)),
            float(targets.std()),
        ),
    )
    return Scores(examples=len(targets), unlabelled=unlabelled, scores=scores, intervals=OF_NUMBERS)


def _mean(totals: Floats, n: int) -> Floats:
    means: Floats = totals[:, 0] / n
    return means


def _explain_variance(totals: Floats, n: int) -> Floats:
    squared, of_targets, of_squares = totals.T
    spread = of_squares - of_targets**2 / n
    with np.errstate(all="ignore"):
        explained: Floats = np.where(spread > 0, 1 - squared / spread, np.nan)
    return explained


# --------------------------------------------------------------------------------------------------


def _bootstrap(
    name: str,
    columns: Floats,
    statistic: Callable[[Floats, int], Floats],
    guess: float | None = None,
) -> Score:
    """Return a statistic of sums over examples with its percentile interval.

    Args:
        name: of the score.
        columns: what each example adds to the sums `[N, c]`.
        statistic: maps sums `[B, c]` and N to values `[B]`.
        guess: of the best constant guess.
    """
    count = len(columns)
    (value,) = statistic(columns.sum(axis=0)[None], count).tolist()
    if not math.isfinite(value):
        return Score(name=name, value=None, guess=guess)
    # A public seed: the same examples have the same interval.
    generator = np.random.default_rng(0)
    draw = _draw_gaussian_sums if count >= _MANY else _draw_sums
    values = np.concatenate([statistic(sums, count) for sums in draw(columns, generator)])
    tail = (1 - _LEVEL) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail]).tolist()
    return Score(name=name, value=value, low=low, high=high, guess=guess)


def _draw_sums(columns: Floats, generator: np.random.Generator) -> Iterator[Floats]:
    """Yield sums `[B, c]` over as many examples as there are, drawn with replacement."""
    count = len(columns)
    offsets = count * np.arange(_CHUNK)[:, None]
    for _ in range(_DRAWS // _CHUNK):
        rows = generator.integers(count, size=(_CHUNK, count)) + offsets
        times = np.bincount(rows.ravel(), minlength=_CHUNK * count).reshape(_CHUNK, count)
        yield times.astype(np.float64) @ columns


def _draw_gaussian_sums(columns: Floats, generator: np.random.Generator) -> Iterator[Floats]:
    """Yield sums `[B, c]` with the mean and the covariance that drawn examples would give."""
    count, width = columns.shape
    centred = columns - columns.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred)
    numbers = generator.normal(size=(_DRAWS, width)) * np.sqrt(variances.clip(min=0.0))
    yield columns.sum(axis=0) + numbers @ directions.T
