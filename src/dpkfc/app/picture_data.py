"""What the pictures of a run show, as numbers: a run writes them, and a report draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

# Eigenvalues of a float32 factor below this fraction of the largest are rounding errors.
_ROUNDING = 1e-6
# Points of a spectrum.
_MOST_POINTS = 256


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy of a run over its steps.

    Attributes:
        label: name of the run.
        steps: steps at which accuracy was measured.
        accuracy: fractions in [0, 1], one for each of `steps`.
        caption: a line below the title, for example "MNIST, ε = 1".
        measured_on: what accuracy was measured on.
        stamp: text across the picture of a run without a certified ε.
        score: name of the figures in `accuracy`.
    """

    label: str
    steps: Sequence[float]
    accuracy: Sequence[float]
    caption: str = ""
    measured_on: str = "test"
    stamp: str = ""
    score: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class LayerSignal:
    """Signal-to-noise ratio of one layer, without and with the preconditioner."""

    name: str
    plain: float
    preconditioned: float


@dataclass(frozen=True, kw_only=True)
class LayerSpectra:
    """Eigenvalues of the factors of one layer.

    Attributes:
        name: path of the layer.
        points: factor name ("A", "G") to its points, of `spectrum_points`.
        damping: factor name to what is added to every eigenvalue.
    """

    name: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    damping: Mapping[str, float] = field(default_factory=dict)


def spectrum_points(values: Sequence[float], size: int = 0) -> Sequence[tuple[float, float]]:
    """Return (rank ÷ size, eigenvalue) of a factor, largest first, without rounding errors.

    Args:
        values: the known eigenvalues in any order; small ones may be left out.
        size: of the factor, where it is not the number of values.
    """
    last = max(1, (size or len(values)) - 1)
    largest = sorted((float(value) for value in values if 0 < value < math.inf), reverse=True)
    points = [
        (rank / last, value)
        for rank, value in enumerate(largest)
        if value >= largest[0] * _ROUNDING
    ]
    return evenly_spaced(points, _MOST_POINTS)


@dataclass(frozen=True)
class ColumnEffect:
    """What one column adds to the output, in the words of its schema.

    Attributes:
        column: its name.
        is_curve: whether `values` are numbers in order, or dates.
        values: numbers, dates or names of categories.
        outputs: names of what is added to: one, or one a class.
        effects: `[values, outputs]`.
        deviation: of the noise in them `[values, outputs]`; NaN where unknown.
        missing: the effect of a missing value `[outputs]`.
    """

    column: str
    is_curve: bool
    values: Sequence[Any]
    outputs: Sequence[str]
    effects: np.ndarray
    deviation: np.ndarray
    missing: np.ndarray

    @property
    def range(self) -> float:
        """Return how far the effect reaches over its values."""
        return float(np.ptp(self.effects, axis=0).max())

    def to_json(self) -> dict[str, Any]:
        """Return plain values; an unknown deviation is None."""
        known = np.isfinite(self.deviation).all()
        values = [str(value) if isinstance(value, datetime) else value for value in self.values]
        return {
            "column": self.column,
            "is_curve": self.is_curve,
            "values": values,
            "outputs": list(self.outputs),
            "effects": self.effects.tolist(),
            "deviation of the noise": self.deviation.tolist() if known else None,
            "missing": self.missing.tolist(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ColumnEffect:
        """Return what `to_json` has written."""
        values, effects = content["values"], np.array(content["effects"], dtype=float)
        deviation = content["deviation of the noise"]
        known = np.full_like(effects, math.nan) if deviation is None else np.array(deviation)
        if content["is_curve"] and isinstance(values[0], str):
            values = [datetime.fromisoformat(value) for value in values]
        return cls(
            content["column"],
            content["is_curve"],
            values,
            content["outputs"],
            effects,
            known,
            np.array(content["missing"]),
        )


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of one run, beside the effects of columns.

    Attributes:
        label: name of the run.
        stamp: text across the pictures of a run without a certified ε.
        caption: what signal and spectra are measured on.
        batch_size: expected examples of a batch.
        signal: of each layer; none for a run without noise or without K-FAC.
        spectra: of each layer with both factors; none for a run without K-FAC.
    """

    label: str
    stamp: str
    caption: str
    batch_size: int
    signal: Sequence[LayerSignal] = ()
    spectra: Sequence[LayerSpectra] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunFigures:
        """Return what `to_json` has written."""
        signal = [LayerSignal(**layer) for layer in content["signal"]]
        spectra = [LayerSpectra(**layer) for layer in content["spectra"]]
        return cls(**{**content, "signal": signal, "spectra": spectra})


def evenly_spaced(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return items
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]
