"""Forms of counts: what a test row adds to a vector, and which scores follow from noisy sums.

A form says what one row adds (`add`, with the largest L2 norm `norm`), and which scores follow from
sums `[B, n]` (`count`, `figures`, `guesses`, `confusion`). The vectors are private until noise is
added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpkfc.app.owndata.bounds import norm_of
from dpkfc.app.scores import Floats

BINS = 20
_BINS_OF_CONFIDENCE = 15
# Fractions are multiples of this, so that float64 adds them without rounding.
_PARTS = 2.0**20


@dataclass(frozen=True)
class TwoClasses:
    """Counts by class and bin of the probability of the second class; one row adds 1 to one."""

    threshold: float = 0.5
    norm: float = 1.0

    @property
    def _edges(self) -> Floats:
        return np.unique([*np.linspace(0, 1, BINS + 1), self.threshold])

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row with outputs `[K]` adds `[n]`; zeros for an unknown label."""
        edges = self._edges
        counts = np.zeros((2, len(edges) - 1))
        if label in (0, 1):
            # The probability of the second class; exp(710) would overflow.
            odds = math.exp(min(700.0, outputs[0] - outputs[1]))
            probability = 1 / (1 + odds)
            place = int(np.searchsorted(edges, probability, side="right")) - 1
            last = counts.shape[1] - 1
            counts[int(label), min(place, last)] = 1.0
        return counts.ravel()

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(totals.sum(1))

    def _split(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        """Return counts of both classes `[B, bins]`, and the middle of each bin."""
        edges = self._edges
        first, second = np.moveaxis(totals.reshape(len(totals), 2, -1), 1, 0)
        return first, second, (edges[1:] + edges[:-1]) / 2

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        first, second, middle = self._split(totals)
        all_rows = totals.sum(1)
        is_second = middle >= self.threshold
        right = first @ ~is_second + second @ is_second
        # Pairs of a row of each class: those in order, where two rows of one bin count as half.
        below = first.cumsum(1) - first / 2
        in_order = (second * below).sum(1)
        pairs = first.sum(1) * second.sum(1)
        losses = first @ -np.log(1 - middle) + second @ -np.log(middle)
        gaps = second - middle * (first + second)
        return {
            "accuracy": right / all_rows,
            "AUROC": in_order / pairs,
            f"log loss ({BINS} bins)": losses / all_rows,
            f"calibration error ({BINS} bins)": np.abs(gaps).sum(1) / all_rows,
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        first, second, _ = self._split(totals)
        return {
            **_class_guesses(np.stack([first.sum(1), second.sum(1)], axis=1)),
            "AUROC": np.full(len(totals), 0.5),
        }

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        first, second, middle = self._split(totals[None])
        is_second = middle >= self.threshold
        rows = [[counts[0] @ ~is_second, counts[0] @ is_second] for counts in (first, second)]
        return np.array(rows)


@dataclass(frozen=True)
class SeveralClasses:
    """Counts by class and answer, by probability of the own class, and by confidence.

    One row adds 1 to a count of each part.
    """

    classes: int
    norm: float = norm_of(3)

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row adds."""
        confusion = np.zeros((self.classes, self.classes))
        own = np.zeros(BINS)
        confidence = np.zeros((2, _BINS_OF_CONFIDENCE))
        if label in range(self.classes):
            probabilities = np.exp(outputs - np.logaddexp.reduce(outputs))
            answer = int(outputs.argmax())
            confusion[int(label), answer] = 1.0
            own[_bin_of(probabilities[int(label)], BINS)] = 1.0
            place = _bin_of(probabilities[answer], _BINS_OF_CONFIDENCE)
            confidence[int(answer == label), place] = 1.0
        return np.concatenate([confusion.ravel(), own, confidence.ravel()])

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(self._parts(totals)[0].sum((1, 2)))

    def _parts(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        size = self.classes**2
        confusion = totals[:, :size].reshape(-1, self.classes, self.classes)
        confidence = totals[:, size + BINS :].reshape(-1, 2, _BINS_OF_CONFIDENCE)
        return confusion, totals[:, size : size + BINS], confidence

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        confusion, own, confidence = self._parts(totals)
        middle = (np.arange(BINS) + 0.5) / BINS
        wrong, right = confidence[:, 0], confidence[:, 1]
        of_bin = (np.arange(_BINS_OF_CONFIDENCE) + 0.5) / _BINS_OF_CONFIDENCE
        gaps = right - of_bin * (wrong + right)
        return {
            "accuracy": np.trace(confusion, axis1=1, axis2=2) / confusion.sum((1, 2)),
            f"log loss ({BINS} bins)": own @ -np.log(middle) / own.sum(1),
            f"calibration error ({BINS} bins)": np.abs(gaps).sum(1) / confidence.sum((1, 2)),
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        return _class_guesses(self._parts(totals)[0].sum(2))

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        return self._parts(totals[None])[0][0]


def _bin_of(probability: float, bins: int) -> int:
    """Return the bin of a probability; 1 belongs to the last one."""
    return min(int(probability * bins), bins - 1)


def _class_guesses(counts: Floats) -> dict[str, Floats]:
    """Return the scores of the best constant guess from rows of each class `[B, K]`."""
    counts = counts.clip(min=0.0)
    shares = counts / counts.sum(1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return {"accuracy": shares.max(1), f"log loss ({BINS} bins)": -(shares * logs).sum(1)}


@dataclass(frozen=True)
class Numbers:
    """The number of rows, and sums of errors and targets with their squares, each in [0, 1].

    Outputs and targets are between −1 and 1.

    Attributes:
        unit: half the range of the target.
    """

    unit: float
    norm: float = norm_of(5)

    def add(self, outputs: Floats, label: float) -> Floats:
        """Return what a row adds."""
        if math.isnan(label):
            return np.zeros(5)
        target = _to_unit(label)
        error = abs(_to_unit(float(outputs[0])) - target)
        values = np.array([1.0, error, error**2, target, target**2])
        return np.asarray(np.floor(values * _PARTS) / _PARTS)

    def count(self, totals: Floats) -> Floats:
        """Return the number of rows."""
        return np.asarray(totals[:, 0])

    def figures(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of sums by name."""
        count, absolute, squared, target, squares = totals.T
        spread = squares - target**2 / count
        return {
            "R²": 1 - squared / spread,
            "mean absolute error": 2 * self.unit * absolute / count,
            "root mean squared error": 2 * self.unit * np.sqrt(squared / count),
        }

    def guesses(self, totals: Floats) -> dict[str, Floats]:
        """Return the scores of the best constant guess by name."""
        count, _, _, target, squares = totals.T
        spread = np.sqrt(squares / count - (target / count) ** 2)
        return {
            "R²": np.zeros(len(totals)),
            "root mean squared error": 2 * self.unit * spread,
        }

    def confusion(self, totals: Floats) -> Floats:
        """Return rows by true class and answer."""
        return np.zeros((0, 0))


def _to_unit(number: float) -> float:
    """Return a number of [−1, 1] in [0, 1]; numbers outside are clipped."""
    return (min(1.0, max(-1.0, number)) + 1) / 2


CountForm = TwoClasses | SeveralClasses | Numbers
