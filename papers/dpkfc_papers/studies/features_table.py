"""Rows of `dpkfc_papers.studies.features` and their tables: they need no torch.

Rows lie in `results/features.json`, controls in `results/features_controls.json`, and heads on
sentence vectors in `results/sentences.json`. An arm is
"features, scales, method, more". What this file does not know is shown by its own name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import (
    RESULTS,
    compare_means,
    interval,
    markdown,
    read_json,
    read_toml,
)

MEASURED, CONTROLS, SENTENCES = "features.json", "features_controls.json", "sentences.json"
CONTENT = read_toml(Path(__file__).with_name("features.toml"))
TITLES, MAPS, NETWORKS = CONTENT["titles"], CONTENT["features"], CONTENT["networks"]
SCALES, METHODS = CONTENT["scales"], CONTENT["methods"]
WITHOUT = "without privacy"


@dataclass(frozen=True)
class Arm:
    """What a row measures: features, where their scales come from, and how the head trains."""

    maps: str
    scales: str
    method: str
    more: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read the name of an arm."""
        maps, *rest = text.split(", ")
        scales = rest.pop(0) if rest and rest[0] in SCALES else ""
        method = rest.pop(0) if rest else ""
        return cls(maps, scales, method, tuple(rest))

    @property
    def is_network(self) -> bool:
        """Whether it trains a network on pixels."""
        return not self.is_head and not self.is_tuned

    @property
    def is_tuned(self) -> bool:
        """Whether the last blocks of the encoder train with the head."""
        return self.maps.startswith("tuned")

    @property
    def is_head(self) -> bool:
        """Whether it trains a linear head alone."""
        return bool(set(self.maps.split("+")) & set(MAPS))

    @property
    def features(self) -> str:
        """Return the features in words."""
        titles = MAPS | NETWORKS
        return " + ".join(titles.get(part, part) for part in self.maps.split("+"))

    @property
    def method_name(self) -> str:
        """Return the method in words."""
        return ", ".join(METHODS.get(part, part) for part in (self.method, *self.more) if part)

    @property
    def label(self) -> str:
        """Return the arm in words, without what is usual."""
        usual = {"", "synthetic", "dp-sgd", WITHOUT}
        scales = "" if self.scales in usual else f"scales: {SCALES[self.scales]}"
        names = {"dp-kfc": "whitened", "mirrored": "mirrored"}
        method = [names.get(part, part) for part in (self.method, *self.more) if part not in usual]
        return ", ".join(part for part in (self.features, scales, *method) if part)


@dataclass(frozen=True)
class Row:
    """One arm on one data set at one ε.

    Attributes:
        data: its name.
        arm: what was measured.
        epsilon: infinite without privacy.
        test: accuracies on the test set in percent, one a seed.
        validation: the best accuracy of the search in percent.
        setting: what won the search.
        seconds: of a run, and where.
        epochs: what the search tried.
        others: rows of the same cell from other searches.
    """

    data: str
    arm: Arm
    epsilon: float
    test: tuple[float, ...]
    validation: float
    setting: str
    seconds: str
    epochs: frozenset[int] = frozenset()
    others: tuple[Row, ...] = ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Row:
        """Read a row of a results file."""
        device = found.get("device", "")
        hardware = "two cores" if device == "cpu" else device.replace("NVIDIA ", "")
        seconds = found.get("seconds a run")
        tried = [100 * one[-1] for one in found.get("validation", [])]
        rate, epochs = found.get("rate"), found.get("epochs")
        return cls(
            found["data"],
            Arm.parse(found["arm"]),
            float(found["epsilon"]),
            tuple(100 * value for value in found["test"]),
            max(tried, default=math.nan),
            "–" if rate is None else f"{rate:g} × {epochs}",
            "–" if seconds is None else f"{seconds:.0f} ({hardware})",
            frozenset(one[1] for one in found.get("validation", [])),
        )

    @property
    def title(self) -> str:
        """Return the name of the data set."""
        return TITLES.get(self.data, self.data)


def read_rows(*files: str, folder: Path = RESULTS) -> list[Row]:
    """Return the rows of results files by data set and ε; of two for one cell the first."""
    rows: dict[tuple[str, Arm, float], Row] = {}
    for file in files or (MEASURED, CONTROLS):
        for found in read_json(folder / file).get("rows", []):
            row = Row.read(found)
            key = (row.data, row.arm, row.epsilon)
            first = rows.get(key)
            rows[key] = row if first is None else replace(first, others=(*first.others, row))
    order = list(TITLES)

    def place(row: Row) -> tuple[int, str, float, float]:
        known = order.index(row.data) if row.data in order else len(order)
        return known, row.data, row.epsilon, -sum(row.test) / len(row.test)

    return sorted(rows.values(), key=place)


def table(file: str) -> str:
    """Return all rows of a file, "" without any."""
    rows = read_rows(file)
    if not rows:
        return ""
    head = ["data", "ε", "features", "scales from", "method", "test % (95 % interval)"]
    head += ["seeds", "validation %", "rate × epochs", "seconds a run"]
    lines = []
    for row in rows:
        lines.append(
            [
                row.title,
                "∞" if math.isinf(row.epsilon) else f"{row.epsilon:g}",
                row.arm.features,
                SCALES.get(row.arm.scales, "–"),
                row.arm.method_name,
                interval(row.test),
                str(len(row.test)),
                "–" if math.isnan(row.validation) else f"{row.validation:.2f}",
                row.setting,
                row.seconds,
            ]
        )
    return markdown(head, lines)


def sentence_table() -> str:
    """Return heads on sentence vectors, and how they stand to DP-SGD; "" without rows."""
    rows = read_rows(SENTENCES)
    plain = {(row.data, row.epsilon): row.test for row in rows if row.arm.method == "dp-sgd"}
    words = []
    for row in rows:
        baseline = plain.get((row.data, row.epsilon))
        if baseline is None or row.arm.method == "dp-sgd":
            continue
        gain, error = compare_means(row.test, baseline)
        verdict = "level" if abs(gain) <= error else "ahead" if gain > 0 else "behind"
        place = f"{row.title}, ε = {row.epsilon:g}, {row.arm.method_name}"
        words.append(f"- {place}: {verdict} ({gain:+.2f} ± {error:.2f}).")
    found = table(SENTENCES)
    return "\n".join([found, "", "Against DP-SGD:", "", *words]) if found else ""


def matrix(epsilon: float = 1.0) -> str:
    """Return an arm a line and a data set a column, with 95 % intervals; "" without rows."""
    rows = [row for row in read_rows() if row.epsilon in (epsilon, math.inf)]
    names = list(dict.fromkeys(row.data for row in rows))
    cells: dict[tuple[str, str, str], dict[str, Sequence[float]]] = defaultdict(dict)
    for row in rows:
        key = row.arm.features, SCALES.get(row.arm.scales, "–"), row.arm.method_name
        cells[key][row.data] = row.test
    lines = []
    for key, of in sorted(cells.items(), key=lambda cell: cell[0]):
        shown = [interval(of[name]) if name in of else "–" for name in names]
        lines.append([*key, *shown])
    head = ["features", "scales from", "method", *(TITLES.get(name, name) for name in names)]
    return markdown(head, lines) if lines else ""
