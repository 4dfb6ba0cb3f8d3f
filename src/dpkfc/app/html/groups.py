"""Runs that differ only in their seed as one group, and one style for each method on the page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dpkfc.app.html.contents import RunSummary
from dpkfc.app.html.texts import delta_text, show
from dpkfc.app.picture_style import PALETTE
from dpkfc.report.text import number, plain

Item = TypeVar("Item")
# Colours and symbols have different periods, so that 56 methods look different. Symbols are named
# by the plotting library.
SYMBOLS = ("o", "s", "D", "^", "X", "v", "*", "p")
GLYPHS = ("●", "■", "◆", "▲", "✖", "▼", "★", "⬟")
# Both have the same style in every report.
_ALWAYS = ("dp-sgd", "dp-kfc")
_FIRST = ("dp-adam", "dp-kfc-a", "dp-sgd-normalised", "dp-kfc-g", "dp-kfc-random")


@dataclass(frozen=True, kw_only=True)
class MethodStyle:
    """How a method looks in every plot.

    Attributes:
        index: its number on the page, by which the script hides it.
        name: as read.
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
class RunGroup:
    """Runs of equal settings, one a seed.

    Attributes:
        runs: one or more.
        differs: settings in which groups of the same method differ, in words.
    """

    runs: Sequence[RunSummary]
    differs: str = ""

    @property
    def first(self) -> RunSummary:
        """The run whose settings stand for all."""
        return self.runs[0]

    @property
    def scores(self) -> list[float]:
        """The scores that are known."""
        return [run.accuracy for run in self.runs if run.accuracy is not None]

    @property
    def mean(self) -> float | None:
        """The mean of the scores, None where no score is known."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        """The sample deviation of the scores, None for a single run."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def epsilon(self) -> float | None:
        """The largest ε that a run spent, None without a guarantee."""
        spent = [run.epsilon for run in self.runs if run.epsilon is not None]
        return max(spent) if len(spent) == len(self.runs) else None

    @property
    def sort_score(self) -> float:
        """The mean to sort by: 0 where no score is known."""
        return self.mean or 0.0

    @property
    def budget(self) -> float | None:
        """The ε that was asked for, or else spent."""
        return self.epsilon if self.first.target is None else self.first.target

    @property
    def seconds(self) -> float | None:
        """Mean seconds of training."""
        known = [run.seconds for run in self.runs if run.seconds is not None]
        return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class Panel:
    """Groups that may be compared: same task, same examples, same score, same δ."""

    groups: Sequence[RunGroup]
    task: str
    measured_on: str
    score: str
    delta: float | None

    @property
    def title(self) -> str:
        """The panel in words."""
        delta = "" if self.delta is None else f", δ = {delta_text(self.delta)}"
        measured_on = plain(self.measured_on, 20)
        return f"{plain(self.task, 60)}, {plain(self.score, 60)} on the {measured_on} set{delta}"


def assign_styles(runs: Iterable[RunSummary]) -> dict[str, MethodStyle]:
    """Return the style of each method; DP-SGD and DP-KFC have the same in every report."""
    names = sorted({run.method for run in runs}, key=str.casefold)
    known = [name for name in _FIRST if name in names]
    ordered = dict.fromkeys([*_ALWAYS, *known, *names])
    styles = {}
    for index, name in enumerate(ordered):
        if name not in names:
            continue
        place = index % len(SYMBOLS)
        styles[name] = MethodStyle(
            index=index,
            name=name,
            colour=PALETTE[index % len(PALETTE)],
            symbol=SYMBOLS[place],
            glyph=GLYPHS[place],
        )
    return styles


def group_runs(runs: Sequence[RunSummary]) -> list[RunGroup]:
    """Return groups in the order of their first run."""
    members = collect(runs, _group_key)
    differing = _list_differences(group[0] for group in members.values())
    return [_make_group(group, differing[_method_of(group[0])]) for group in members.values()]


def collect(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return items by their key, in order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _group_key(run: RunSummary) -> str:
    """Return all but the seed that decides a run, as one text."""
    settings = {str(name): str(value) for name, value in run.settings.items()}
    key = [
        run.task,
        run.method,
        run.measured_on,
        run.score,
        run.target,
        run.delta,
        run.steps,
        run.against,
        list(run.warnings),
        settings,
    ]
    return json.dumps(key, sort_keys=True)


def _make_group(runs: Sequence[RunSummary], differing: Sequence[str]) -> RunGroup:
    settings = runs[0].settings
    known = [name for name in differing if name in settings]
    texts = [f"{plain(name, 40)} {show(settings[name])}" for name in known]
    return RunGroup(runs=runs, differs=", ".join(texts)[:400])


def _method_of(run: RunSummary) -> tuple[str, str]:
    return run.task, run.method


def _list_differences(runs: Iterable[RunSummary]) -> dict[tuple[str, str], list[str]]:
    """Return, by task and method, the settings in which runs differ."""
    differing = {}
    for method, members in collect(runs, _method_of).items():
        settings = [run.settings for run in members]
        names = []
        for name in sorted(set().union(*settings)):
            if len({str(one.get(name, "")) for one in settings}) > 1:
                names.append(name)
        differing[method] = names
    return differing


def comparable_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return groups that can be drawn on common axes; test sets before validation sets."""

    def axes(group: RunGroup) -> tuple[str, str, str, float | None]:
        run = group.first
        return run.task, run.measured_on, run.score, run.delta

    members = collect([group for group in groups if number(group.mean) is not None], axes)
    panels = [Panel(of_panel, *shared) for shared, of_panel in members.items()]

    def order(panel: Panel) -> tuple[bool, str, str]:
        return panel.measured_on != "test", panel.task.casefold(), panel.score

    return sorted(panels, key=order)
