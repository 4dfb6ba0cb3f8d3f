"""Figures of the curvature as numbers: `figures.json` of a run folder, from which a page draws what PNG files only show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpkfc.report.numbers import number, plain
from dpkfc.report.plots import LayerSignal, LayerSpectra
from dpkfc.report.run_folder import placed

__all__ = ["FILE", "Figures", "SensitivityMap", "read_map"]

FILE = "figures.json"
KIND, VERSION = "dpkfc figures", 1
_POINTS, _PIXELS, _LAYERS = 256, 256, 200


@dataclass(frozen=True, kw_only=True)
class SensitivityMap:
    """How sensitive the accuracy of a method is to two of its settings.

    Attributes:
        name: what is shown, for example the task.
        method: whose runs.
        x: the setting that runs across.
        x_values: its values, from left to right.
        y: the setting that runs upwards.
        y_values: its values, the lowest line first.
        values: accuracies in [0, 1], a row for each value of `y`; None where a run is missing.
        measured_on: the set that judged them: "validation" or "test".
        note: what else is to be told of them, in words.
    """

    name: str
    method: str
    x: str
    x_values: Sequence[float]
    y: str
    y_values: Sequence[float]
    values: Sequence[Sequence[float | None]]
    measured_on: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `read_map` takes it back."""
        return {**asdict(self), "values": [list(row) for row in self.values]}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is drawn of a run beside its curves; spectra and ratios are measured on a probe, so public where the probe is.

    Attributes:
        measured: on what and when, in words.
        spectra: eigenvalues of the factors, layer by layer.
        signal_to_noise: of each layer.
        sensitivity_maps: accuracy over settings.
    """

    measured: str = ""
    spectra: Sequence[LayerSpectra] = ()
    signal_to_noise: Sequence[LayerSignal] = ()
    sensitivity_maps: Sequence[SensitivityMap] = ()

    def write(self, path: Path) -> Path:
        """The figures as JSON; of a long spectrum 256 values are kept, evenly spaced in rank. What is not finite is left out.

        Raises:
            RunFolderError: the disk cannot take it.
        """
        content = {
            "kind": KIND,
            "version": VERSION,
            "measured": self.measured,
            "spectra": [_thinned(layer) for layer in self.spectra],
            "signal_to_noise": [
                {"name": s.name, "plain": s.plain, "preconditioned": s.preconditioned}
                for s in self.signal_to_noise
                if math.isfinite(s.plain + s.preconditioned)
            ],
            "sensitivity_maps": [one.as_dict() for one in self.sensitivity_maps],
        }
        text = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        return placed(path, lambda part: part.write_text(text, "utf-8"))

    @classmethod
    def read(cls, content: Any) -> Figures:
        """Figures from what `write` wrote, already parsed.

        Raises:
            ValueError: not such a file, of another version, or damaged.
        """
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError(f"{FILE} holds no figures")
        if content.get("version") != VERSION:
            raise ValueError(f"{FILE} is of version {plain(content.get('version'), 20)}, this dpkfc reads {VERSION}")
        try:
            return cls(
                measured=str(content.get("measured", "")),
                spectra=[_spectra(row) for row in content.get("spectra", [])[:_LAYERS]],
                signal_to_noise=[_signal(row) for row in content.get("signal_to_noise", [])[:_LAYERS]],
                sensitivity_maps=[read_map(row) for row in content.get("sensitivity_maps", [])[:_LAYERS]],
            )
        except (TypeError, KeyError, AttributeError, IndexError):
            raise ValueError(f"{FILE} is damaged") from None


def _thinned(layer: LayerSpectra) -> dict[str, Any]:
    """Largest first; sizes are those of the factors, and `ranks` says which values were kept."""
    values, ranks, sizes = {}, {}, {}
    for side, found in layer.values.items():
        ordered = sorted((float(v) for v in found if math.isfinite(v)), reverse=True)
        if not ordered:
            continue
        count = min(len(ordered), _POINTS)
        chosen = sorted({round(i * (len(ordered) - 1) / max(1, count - 1)) for i in range(count)})
        values[side], ranks[side] = [ordered[i] for i in chosen], chosen
        sizes[side] = int(layer.sizes.get(side, len(ordered)))
    damping = {side: float(value) for side, value in layer.damping.items() if math.isfinite(value)}
    return {"name": layer.name, "values": values, "ranks": ranks, "sizes": sizes, "damping": damping}


def _numbers(found: Any) -> list[float]:
    values = [number(value) for value in found]
    if any(value is None for value in values):
        raise TypeError("not a number")
    return [value for value in values if value is not None]


def _spectra(row: Mapping[str, Any]) -> LayerSpectra:
    """A layer; values that were left out are bridged by those beside them, so that ranks stay what they were."""
    values: dict[str, list[float]] = {}
    for side in ("A", "G"):
        if side in row["values"]:
            found = _numbers(row["values"][side])
            ranks = row.get("ranks", {}).get(side)
            values[side] = found if ranks is None else _filled(found, [int(r) for r in _numbers(ranks)])
    damping = {side: value for side, value in row.get("damping", {}).items() if side in values and number(value) is not None}
    sizes = {side: int(number(size) or 0) for side, size in row.get("sizes", {}).items() if side in values}
    return LayerSpectra(name=str(row["name"]), values=values, damping=damping, sizes=sizes)


def _filled(found: list[float], ranks: list[int]) -> list[float]:
    if len(found) != len(ranks) or not ranks or ranks != sorted(ranks) or ranks[0] < 0 or ranks[-1] > 100_000:
        raise TypeError("ranks")
    values = list(found[:1])
    for value, before, rank in zip(found[1:], ranks, ranks[1:], strict=False):
        values += [value] * (rank - before)
    return values


def _signal(row: Mapping[str, Any]) -> LayerSignal:
    without, with_it = _numbers([row["plain"], row["preconditioned"]])
    return LayerSignal(name=str(row["name"]), plain=without, preconditioned=with_it)


def read_map(row: Mapping[str, Any]) -> SensitivityMap:
    """A map from what `as_dict` gave, already parsed.

    Raises:
        TypeError, KeyError, AttributeError: damaged.
    """
    x_values, y_values = _numbers(row["x_values"]), _numbers(row["y_values"])
    values = [[None if value is None else _numbers([value])[0] for value in line] for line in row["values"]]
    wide, high = len(x_values), len(y_values)
    if not (0 < wide <= _PIXELS and 0 < high <= _PIXELS) or [len(line) for line in values] != [wide] * high:
        raise TypeError("not a map")
    texts = {name: str(row[name]) for name in ("name", "method", "x", "y", "measured_on")}
    return SensitivityMap(x_values=x_values, y_values=y_values, values=values, note=str(row.get("note", "")), **texts)
