"""The figures of a page, drawn by matplotlib as SVG."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from dpkfc.app.html.answer import group_by_budget, interval
from dpkfc.app.html.groups import MethodStyle, Panel, RunGroup, collect
from dpkfc.app.html.texts import count_text, epsilon_text, score_text
from dpkfc.app.picture_data import evenly_spaced
from dpkfc.app.picture_style import apply_style, make_figure
from dpkfc.report.text import plain

MAX_LINES = 48
# Inches: text of 9 points can then be read on a screen of 390 pixels too.
_WIDTH = 4.6
_HEIGHT = 3.1
_MARKED = 40
_MOST_TICKS = 12
# End of an axis of accuracies: 100 % and room for half a symbol.
_FULL = 1.02

Points = Sequence[tuple[float, float]]
Styles = Mapping[str, MethodStyle]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
        title: above the figure.
        says: what is seen, for readers who do not see it; also below the figure.
        svg: the figure. Its groups of a method say so, so that the page can hide them.
    """

    title: str
    says: str
    svg: str


class _Canvas:
    """A figure, and the words that are shown where the pointer rests on a part of it."""

    def __init__(self, height: float = _HEIGHT) -> None:
        self.figure: Figure = make_figure(_WIDTH, height)
        self.axes: Axes = self.figure.subplots()
        self._words: dict[str, tuple[int, str]] = {}

    def mark(self, artists: Iterable[Any], style: MethodStyle, words: str) -> None:
        """Give parts of the figure to a method."""
        for artist in artists:
            name = f"mark{len(self._words)}"
            artist.set_gid(name)
            self._words[name] = (style.index, words)

    def finish(self, title: str, says: str) -> Plot:
        """Return the figure as text, without the names of its parts, as a page has several."""
        buffer = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": title + says}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r'<g id="([^"]*)">', self._open_group, text)
        return Plot(title=title, says=says, svg=text)

    def _open_group(self, match: re.Match[str]) -> str:
        if match[1] not in self._words:
            return "<g>"
        index, words = self._words[match[1]]
        return f'<g data-method="{index}"><title>{html.escape(words)}</title>'


def _describe(group: RunGroup, score: str) -> str:
    """Return what is shown where the pointer rests on a group."""
    deviation = "" if group.std is None else f" ± {score_text(group.std, score)}"
    lines = [
        group.first.method,
        f"{score_text(group.mean, score)}{deviation} ({count_text(len(group.runs), 'run')})",
        f"ε = {epsilon_text(group.epsilon)}",
        group.differs[:90],
        plain(group.first.warnings[0], 60) if group.first.warnings else "",
    ]
    return "\n".join(plain(line, 100) for line in lines if line)


def _look(style: MethodStyle, group: RunGroup, size: float = 6) -> dict[str, Any]:
    """Return the look of a group: open and dotted where it has no certified guarantee."""
    face = "white" if group.first.warnings else style.colour
    return {
        "color": style.colour,
        "marker": style.symbol,
        "markersize": size,
        "markerfacecolor": face,
        "linestyle": "dotted" if group.first.warnings else "solid",
    }


def _explain_open_symbols(groups: Sequence[RunGroup]) -> str:
    if any(group.first.warnings for group in groups):
        return " Open symbols and dotted lines: no certified guarantee."
    return ""


def _set_scores(axes: Axes, score: str, which: str = "y") -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_label_text(plain(score, 60))
    if which == "x":
        # Long numbers, such as 37.50%, stand side by side.
        axis.set_major_locator(MaxNLocator(5))
    if "accuracy" in score:
        axis.set_major_formatter(PercentFormatter(1.0))
        low, high = axis.get_view_interval()
        limits = {f"{which}min": max(low, -0.02), f"{which}max": min(high, _FULL)}
        axes.set(**{f"{which}lim": tuple(limits.values())})


@apply_style
def plot_accuracy(panel: Panel, styles: Styles) -> Plot:
    """Plot score against ε with 95 % intervals over seeds.

    Where there is only one ε, each method has a row.
    """
    budgets = sorted({group.budget for group in panel.groups if group.budget is not None})
    if len(budgets) < 2:
        return _plot_rows(panel, styles, budgets)
    canvas = _Canvas()
    axes = canvas.axes
    lines = collect(panel.groups, lambda group: (group.first.method, not group.first.warnings))
    for place, ((method, _), members) in enumerate(lines.items()):
        shift = 1 + 0.014 * (place - (len(lines) - 1) / 2)
        _plot_budgets(canvas, members, styles[method], panel.score, shift)
    axes.set_xscale("log")
    axes.set_xlabel("ε of the budget, logarithmic")
    if len(budgets) <= _MOST_TICKS:
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.xaxis.set_minor_formatter(NullFormatter())
    _set_scores(axes, panel.score)
    says = "Bars: 95 % intervals of the mean over seeds. Methods stand slightly side by side."
    return canvas.finish(panel.title, says + _explain_open_symbols(panel.groups))


def _plot_budgets(
    canvas: _Canvas, members: Sequence[RunGroup], style: MethodStyle, score: str, shift: float
) -> None:
    """Plot the scores of one method by ε, joined by a line where each ε has one of them.

    Args:
        canvas: of the figure.
        members: groups of the method, all of them with a certified guarantee or none.
        style: of the method.
        score: what the numbers are.
        shift: what each ε is multiplied by.
    """
    known = [(group.budget, group) for group in members if group.budget is not None]
    known.sort(key=lambda pair: (pair[0], pair[1].differs))
    if len({budget for budget, _ in known}) == len(known) and not members[0].first.warnings:
        x = [budget * shift for budget, _ in known]
        y = [group.sort_score for _, group in known]
        line = canvas.axes.plot(x, y, color=style.colour)
        canvas.mark(line, style, style.name)
    for budget, group in known:
        _plot_point(canvas, budget * shift, group.sort_score, group, style, score)


def _plot_point(
    canvas: _Canvas,
    x: float,
    y: float,
    group: RunGroup,
    style: MethodStyle,
    score: str,
    along: str = "y",
) -> None:
    """Plot a mean with its interval along an axis."""
    width = interval(group.scores)
    look = {**_look(style, group), "linestyle": "none", "capsize": 2.5, f"{along}err": width}
    drawn = canvas.axes.errorbar(x, y, **look)
    canvas.mark(drawn.get_children(), style, _describe(group, score))


def _plot_rows(panel: Panel, styles: Styles, budgets: Sequence[float]) -> Plot:
    members = collect(panel.groups, lambda group: group.first.method)

    def best_score(method: str) -> float:
        return max(group.sort_score for group in members[method])

    ordered = sorted(members, key=best_score)
    canvas = _Canvas(1.1 + 0.3 * max(3, len(ordered)))
    for place, method in enumerate(ordered):
        for group in members[method]:
            _plot_point(
                canvas, group.sort_score, place, group, styles[method], panel.score, along="x"
            )
    names = ["\n".join(textwrap.wrap(plain(name, 80), 20, max_lines=2)) for name in ordered]
    canvas.axes.set_yticks(range(len(ordered)), names)
    canvas.axes.set_ylim(-0.6, len(ordered) - 0.4)
    _set_scores(canvas.axes, panel.score, "x")
    budget = f", ε = {epsilon_text(budgets[0])}" if budgets else ""
    says = "The method with the best point is on top. Bars: 95 % intervals of the mean over seeds."
    says += _explain_open_symbols(panel.groups)
    if any(group.differs for group in panel.groups):
        says += " Several points of one method differ in their settings."
    return canvas.finish(panel.title + budget, says)


@apply_style
def plot_learning(panel: Panel, styles: Styles) -> list[Plot]:
    """Plot score against steps: a figure for each ε, a line for the mean of each group."""
    plots = []
    for budget, groups in group_by_budget(panel.groups):
        with_curve = [g for g in groups if any(len(run.curve) > 1 for run in g.runs)]
        if not with_curve:
            continue
        shown = evenly_spaced(with_curve, MAX_LINES)
        canvas = _Canvas()
        for group in shown:
            points = _mean_curve([run.curve for run in group.runs])
            _plot_line(canvas, group, styles, points, panel.score)
        _set_steps(canvas.axes)
        _set_scores(canvas.axes, panel.score)
        fewer = ""
        if len(shown) < len(with_curve):
            fewer = f" {len(shown)} of {len(with_curve)} lines are shown."
        says = f"By step; each line is the mean over seeds.{fewer}{_explain_open_symbols(groups)}"
        plots.append(canvas.finish(f"{panel.title}, ε = {epsilon_text(budget)}", says))
    return plots


@apply_style
def plot_spending(panel: Panel, styles: Styles) -> list[Plot]:
    """Plot ε against steps. Return no figure where no run records ε by step."""
    curves = []
    for group in panel.groups:
        spending = [run.spending for run in group.runs if len(run.spending) > 1]
        if spending:
            curves.append((group, spending[0]))
    if not curves:
        return []
    canvas = _Canvas()
    for group, points in evenly_spaced(curves, MAX_LINES):
        _plot_line(canvas, group, styles, points, "")
    _set_steps(canvas.axes)
    canvas.axes.set_ylabel("ε spent")
    canvas.axes.set_ylim(bottom=0)
    says = (
        "Lines of runs with the same sampling and noise lie on each other. "
        "Between evaluations an upper bound."
    )
    return [canvas.finish(f"{plain(panel.task, 60)}, ε spent by step", says)]


def _plot_line(
    canvas: _Canvas, group: RunGroup, styles: Styles, points: Points, score: str
) -> None:
    """Plot a line of scores, or of ε where `score` is empty."""
    style = styles[group.first.method]
    look = _look(style, group, 4.5)
    if not score or len(points) > _MARKED:
        look["marker"] = None
    x, y = zip(*points, strict=True)
    line = canvas.axes.plot(x, y, **look)
    canvas.mark(line, style, _describe(group, score or group.first.score))


def _set_steps(axes: Axes) -> None:
    """Set the axis of steps, which all lines share, so after the last line."""
    axes.set_xlabel("steps")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _mean_curve(curves: Sequence[Points]) -> Points:
    """Return the mean score at the steps that all curves share; one of them has points.

    Where the curves share no step, return all points of the first curve.
    """
    known = [dict(curve) for curve in curves if curve]
    shared_steps = sorted(set.intersection(*(set(curve) for curve in known)))
    if not shared_steps:
        return sorted(known[0].items())
    return [(step, sum(curve[step] for curve in known) / len(known)) for step in shared_steps]
