"""Runs that differ only in their seed as one group with mean and deviation, and one look for each method on the whole page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpkfc.report.numbers import number, plain
from dpkfc.report.page_read import Shown
from dpkfc.report.page_text import delta_text, show

__all__ = ["Group", "Look", "Panel", "grouped", "looks", "panels"]

# Okabe and Ito's colours, which the colour-blind can tell apart; without their black and yellow, which a page of either
# brightness would swallow. Symbols go round in another rhythm, so that 56 methods look different.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "pentagon")
GLYPHS = ("●", "■", "◆", "▲", "✖", "▼", "★", "⬟")
_FIRST = ("dp-sgd", "dp-kfc", "dp-adam", "dp-kfc-a", "dp-sgd-normalised", "dp-kfc-g", "dp-kfc-random")


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a method looks in every plot.

    Attributes:
        index: its number on the page; what the browser calls it.
        name: as found.
        colour: of lines and symbols.
        symbol: in plots.
        glyph: the same symbol as text.
    """

    index: int
    name: str
    colour: str
    symbol: str
    glyph: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of equal settings, one a seed.

    Attributes:
        runs: one or more.
        mean: of their scores, None where none is known.
        std: sample deviation, None of a single run.
        epsilon: the largest that one of them spent, None where there is no guarantee.
        differs: settings in which groups of the same method differ, in words.
    """

    runs: Sequence[Shown]
    mean: float | None
    std: float | None
    epsilon: float | None
    differs: str = ""

    @property
    def first(self) -> Shown:
        """Whose common settings stand for all."""
        return self.runs[0]

    @property
    def budget(self) -> float | None:
        """ε that was asked for, or else spent."""
        return self.epsilon if self.first.target is None else self.first.target


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Groups that may be compared: same task, same examples, same score, same δ."""

    task: str
    measured_on: str
    score: str
    delta: float | None
    groups: Sequence[Group]

    @property
    def title(self) -> str:
        """In words."""
        delta = "" if self.delta is None else f", δ = {delta_text(self.delta)}"
        return f"{plain(self.task, 60)}, {plain(self.score, 60)} on the {plain(self.measured_on, 20)} set{delta}"


def looks(runs: Iterable[Shown]) -> dict[str, Look]:
    """Method to its look; DP-SGD and DP-KFC have the same in every report."""
    names = sorted({run.method for run in runs}, key=str.casefold)
    fixed = [name for name in _FIRST if name in names]
    ordered = [*_FIRST[:2], *[name for name in [*fixed, *names] if name not in _FIRST[:2]]]
    found = {}
    for index, name in enumerate(dict.fromkeys(ordered)):
        place = index % len(SYMBOLS)
        colour = COLOURS[index % len(COLOURS)]
        found[name] = Look(index=index, name=name, colour=colour, symbol=SYMBOLS[place], glyph=GLYPHS[place])
    return {name: look for name, look in found.items() if name in names}


def grouped(runs: Sequence[Shown]) -> list[Group]:
    """Groups in the order in which they first come. A run is in the same one whether its folder or a study tells of it."""
    found: dict[str, list[Shown]] = {}
    for run in runs:
        settings = {str(name): str(value) for name, value in run.settings.items()}
        common = (run.task, run.method, run.measured_on, run.score, run.target, run.delta, run.steps, run.against)
        key = [*common, list(run.marks), settings]
        found.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    differing = _differing(members[0] for members in found.values())
    return [_group(members, differing[members[0].task, members[0].method]) for members in found.values()]


def _group(members: Sequence[Shown], differing: Sequence[str]) -> Group:
    scores = [run.accuracy for run in members if run.accuracy is not None]
    spent = [run.epsilon for run in members]
    known = [epsilon for epsilon in spent if epsilon is not None]
    settings = members[0].settings
    return Group(
        runs=members,
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        epsilon=max(known) if known and len(known) == len(spent) else None,
        differs=", ".join(f"{plain(name, 40)} {show(settings[name])}" for name in differing if name in settings)[:400],
    )


def _differing(firsts: Iterable[Shown]) -> dict[tuple[str, str], list[str]]:
    """Of each task and method the settings that its groups do not share."""
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in firsts:
        seen.setdefault((run.task, run.method), []).append(run.settings)
    return {
        key: [
            name
            for name in sorted({name for one in settings for name in one})
            if len({str(one.get(name, "")) for one in settings}) > 1
        ]
        for key, settings in seen.items()
    }


def panels(groups: Sequence[Group]) -> list[Panel]:
    """What can be drawn on common axes; test sets before validation sets."""
    found: dict[tuple[str, str, str, float | None], list[Group]] = {}
    for group in groups:
        first = group.first
        if number(group.mean) is not None:
            found.setdefault((first.task, first.measured_on, first.score, first.delta), []).append(group)
    made = [
        Panel(task=task, measured_on=on, score=score, delta=delta, groups=members)
        for (task, on, score, delta), members in found.items()
    ]
    return sorted(made, key=lambda panel: (panel.measured_on != "test", panel.task.casefold(), panel.score))
