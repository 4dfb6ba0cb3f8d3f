"""Scores of held-out examples beside the best constant guess, each with a 95 % interval.

Intervals take examples as independent: where people have several records, they are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Said in the place of a score.
NO_LABEL = "no {} row has a known label"
NO_NUMBER = "not a number"
HIDDEN = "too few {} rows for the noise, or a lost release"
OF_NOISY_SCORES = (
    "95 % intervals from 1,000 draws of the known noise and of the rows; all is public"
)
LEVEL = 0.95
# Classes of a confusion matrix that a card or a terminal shows.
MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score.

    Attributes:
        name: what it is.
        value: on the examples; None where there is nothing to measure it on, or noise hides it.
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
    # A sum with 0.0 has no negative zero.
    return f"{round(value, 4) + 0.0:.4f}" if abs(value) < 10 else f"{value:.5g}"


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
    intervals: str = ""

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
    """Return why a run has no score: labels are missing, noise hides it, or it is not a number."""
    if scores and scores.intervals == OF_NOISY_SCORES:
        return HIDDEN.format(measured_on)
    return NO_LABEL.format(measured_on) if scores and not scores.examples else NO_NUMBER


def name_of(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, its number where it is not named."""
    return names[label] if label < len(names) else str(label)
