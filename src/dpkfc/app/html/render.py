"""One HTML page of runs and studies that holds all it needs. The page fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from scipy import stats

from dpkfc.app.html import (
    Contents,
    Departures,
    MethodStyle,
    Panel,
    RunGroup,
    assign_styles,
    collect,
    comparable_panels,
    count_text,
    delta_text,
    ensure_list,
    epsilon_text,
    group_runs,
    plot_text,
    read_all,
    score_text,
    show,
)
from dpkfc.app.plots import Figures, LayerSignal, LayerSpectra, SensitivityMap, evenly_spaced
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.privacy.ledger import version
from dpkfc.report.card import audit_rows, audit_summary, failed_checks
from dpkfc.report.text import ensure_mapping, plain

# --------------------------------------------------------------------------------------------------
# The answer of a page: which method is best at each ε, what it costs, and who may be as good.

# Two methods differ significantly where an interval of their difference leaves out zero.
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method at one ε.

    Attributes:
        group: its runs; of several settings those with the best mean.
        settings: number of settings that were tried at this ε.
        half_width: of the 95 % interval of the mean score, None of a single run.
        verdict: how it compares with the best mean.
        is_tied: whether it has the best mean or does not differ significantly from it.
    """

    group: RunGroup
    settings: int
    half_width: float | None
    verdict: str
    is_tied: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The methods of one task at one ε, the best mean first.

    Attributes:
        title: task, score and ε.
        sentence: which method, and at what cost.
        standings: one for each method.
        score: what the numbers are.
        measured_on: the examples that the score was measured on.
    """

    title: str
    sentence: str
    standings: Sequence[Standing]
    score: str
    measured_on: str


def answer_panels(panels: Sequence[Panel]) -> list[Answer]:
    """Return an answer for each panel and ε; smoke runs have none."""
    answers = []
    for panel in panels:
        groups = [group for group in panel.groups if not group.first.smoke]
        for budget, members in _group_by_budget(groups):
            answers.append(_answer(panel, budget, members))
    # Comparisons come before methods that nothing is compared with.
    return sorted(answers, key=lambda answer: len(answer.standings) == 1)


def _group_by_budget(groups: Sequence[RunGroup]) -> list[tuple[float | None, list[RunGroup]]]:
    """Return groups by ε, those without one at the end."""
    members = collect(groups, lambda group: group.budget)
    return sorted(members.items(), key=lambda item: (item[0] is None, item[0] or 0.0))


def _answer(panel: Panel, budget: float | None, groups: Sequence[RunGroup]) -> Answer:
    by_method = collect(groups, lambda group: group.first.method)

    def rank(group: RunGroup) -> tuple[bool, float]:
        return bool(group.first.warnings), -group.sort_score

    chosen = sorted((min(members, key=rank) for members in by_method.values()), key=rank)
    best = chosen[0]
    standings = []
    for group in chosen:
        is_tied, verdict = _compare(best, group, len(chosen) - 1, panel.score)
        standings.append(
            Standing(
                group=group,
                settings=len(by_method[group.first.method]),
                half_width=interval(scores_of(group)),
                verdict=verdict,
                is_tied=is_tied,
            )
        )
    return Answer(
        title=f"{panel.title}, ε = {epsilon_text(budget, 2)}",
        sentence=_sentence(standings, panel.score),
        standings=standings,
        score=panel.score,
        measured_on=panel.measured_on,
    )


def scores_of(group: RunGroup) -> list[float]:
    """Return the scores of a group's runs."""
    return [run.accuracy for run in group.runs if run.accuracy is not None]


def interval(scores: Sequence[float]) -> float | None:
    """Return the half width of Student's interval of a mean, None of fewer than two scores."""
    if len(scores) < 2:
        return None
    quantile = stats.t.ppf((1 + LEVEL) / 2, len(scores) - 1)
    return float(quantile * stats.tstd(scores) / math.sqrt(len(scores)))


def difference(
    first: Sequence[float], second: Sequence[float], level: float
) -> tuple[float, float] | None:
    """Return Welch's interval of the mean of `first` less that of `second`.

    Returns:
        Lower and upper end, or None: fewer than two scores in one, or no deviation in both.
    """
    if min(len(first), len(second)) < 2:
        return None
    if len(set(first)) == len(set(second)) == 1:
        # There is no deviation to judge by.
        return None
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(level)
    return float(low), float(high)


def _compare(best: RunGroup, group: RunGroup, comparisons: int, score: str) -> tuple[bool, str]:
    """Return whether a method may be as good as the best, and the words for it."""
    if group.first.warnings:
        return False, "no certified guarantee, so it is not compared"
    if group is best:
        return True, "best mean" if comparisons else "the only method here"
    # Each of the comparisons with the best takes its share of the error (Bonferroni).
    level = 1 - (1 - LEVEL) / comparisons
    ends = difference(scores_of(best), scores_of(group), level)
    if ends is None:
        return True, "not significantly different from the best: too few runs"
    if ends[0] <= 0:
        return True, "not significantly different from the best"
    return False, f"behind the best by {_difference_text(*ends, score)}"


def _difference_text(low: float, high: float, score: str) -> str:
    """Return a range of differences: percentage points of an accuracy, numbers of other scores."""
    if "accuracy" in score:
        return f"{100 * low:.1f} to {100 * high:.1f} points"
    return f"{low:.2f} to {high:.2f}"


def _sentence(standings: Sequence[Standing], score: str) -> str:
    best = standings[0]
    if best.group.first.warnings:
        return "No run here has a certified guarantee, so none is recommended."
    name, runs = best.group.first.method, count_text(len(best.group.runs), "run")
    value = score_text(best.group.mean, score)
    if best.half_width is not None:
        value += f" ± {score_text(best.half_width, score)}"
    cost = ""
    if best.group.seconds is not None:
        cost = f", {best.group.seconds:,.0f} s of training"
    tied = [standing.group.first.method for standing in standings[1:] if standing.is_tied]
    text = f"{name} has the best mean: {value} ({runs}{cost})."
    if len(standings) == 1:
        return f"{name} alone was run: {value} ({runs}{cost})."
    if not tied:
        return text + " Every other method is significantly behind."
    if len(tied) > 3:
        return text + f" {len(tied)} others do not differ significantly."
    return text + f" Not significantly different: {', '.join(tied)}."


# --------------------------------------------------------------------------------------------------
# The privacy card of a run as plain values for its template.

_CAPTIONS = {
    "divisor": "divisor (expected batch size)",
    "stddev": "standard deviation on the sum",
    "max_grad_norm": "clipping bound C",
    "noise_multiplier": "noise multiplier σ",
    "sensitivity": "sensitivity of the sum",
    "delta": "δ",
}
# Keys that have a place of their own. Whatever else a card says is shown as it stands.
_IN_GUARANTEE = {
    "certified",
    "epsilon",
    "delta",
    "target_epsilon",
    "unit",
    "neighbouring_relation",
    "releases",
    "planned_steps",
    "planned_releases",
    "epsilon_by",
    "epsilon_for_others",
    "neighbours_differ_in",
}
_NOT_IN_MECHANISM = {
    "event",
    "certified",
    "caveats",
    "epsilon",
    "target_epsilon",
    "epsilon_for_others",
    "against",
    "delta",
    "releases",
    "plan_hash",
}
_NOT_IN_CURVATURE = {"refreshes", "uses_private_data", "layer_rules", "loss", "curvature_source"}
_PARTS_OF_CARD = {
    "format",
    "title",
    "stamp",
    "caveats",
    "guarantee",
    "mechanism",
    "accounting",
    "curvature",
    "assumed_public",
    "ledger",
    "hyper_parameters",
    "not_private",
    "results",
    "public_seeds",
    "plan_hash",
    "software",
    "audit",
    "weights",
}

TextRows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CardSection:
    """A table of a card: its mark says that ε does not protect the figures in it."""

    title: str
    rows: TextRows
    header: Sequence[str] = ()
    mark: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CardView:
    """A privacy card as its template shows it.

    Attributes:
        failed: checks of an audit that failed.
        stamp: why there is no certified guarantee; empty where there is one.
        caveats: reasons below the stamp.
        spent: ε and δ.
        unit: of privacy.
        neighbours: how neighbouring data sets differ.
        against: whom the guarantee holds against, if not everyone.
        sections: tables that are not empty.
    """

    failed: Sequence[str]
    stamp: str
    caveats: Sequence[str]
    spent: str
    unit: str
    neighbours: str
    against: Any
    sections: Sequence[CardSection]


def view_card(card: Mapping[str, Any]) -> CardView:
    """Return what a page shows of a card, without the parts that an older version did not write.

    Args:
        card: as read from JSON; nothing in it is trusted.
    """
    guarantee = ensure_mapping(card.get("guarantee"))
    caveats = [show(text) for text in ensure_list(card.get("caveats")) if text]
    stamp = ""
    if card.get("stamp") or guarantee.get("certified") is not True or caveats:
        stamp = plain(card.get("stamp") or "UNCERTIFIED", 80)
    epsilon = epsilon_text(guarantee.get("epsilon"), 4)
    return CardView(
        failed=failed_checks(card.get("audit")),
        stamp=stamp,
        caveats=caveats,
        spent=f"(ε = {epsilon}, δ = {show(guarantee.get('delta'))})",
        unit=show(guarantee.get("unit")),
        neighbours=show(guarantee.get("neighbours_differ_in")),
        against=guarantee.get("against"),
        sections=[section for section in _card_sections(card) if section.rows],
    )


def _card_sections(card: Mapping[str, Any]) -> list[CardSection]:
    audit = card.get("audit")
    not_private = ensure_mapping(card.get("not_private"))
    sections = [
        CardSection("Guarantee", _guarantee_rows(card)),
        CardSection("Mechanism", _rows(card.get("mechanism"), _NOT_IN_MECHANISM)),
    ]
    if "curvature" in card:
        sections.append(CardSection("Curvature", _curvature_rows(card["curvature"])))
    sections += [
        CardSection(
            "Taken as public",
            _public_rows(card.get("assumed_public")),
            header=("setting", "value", "why"),
        ),
        CardSection("Hyper-parameters", _rows(card.get("hyper_parameters"))),
        CardSection("Results", _rows(card.get("results")), mark="not protected by ε"),
        CardSection(
            "Audit",
            audit_rows(audit),
            header=("check", "measured", "allowed", "verdict", "how"),
            note=audit_summary(audit),
        ),
        CardSection(
            "Figures that ε does NOT protect",
            [(name, show(reason)) for name, reason in not_private.items()],
            header=("figure", "why"),
            mark="not private",
        ),
        CardSection("Provenance", _provenance_rows(card)),
    ]
    return sections


def _guarantee_rows(card: Mapping[str, Any]) -> TextRows:
    guarantee = ensure_mapping(card.get("guarantee"))
    accounting = ensure_mapping(card.get("accounting"))
    by_accountant = []
    epsilons = ensure_mapping(accounting.get("epsilon_by") or guarantee.get("epsilon_by"))
    for name, value in epsilons.items():
        by_accountant.append(f"{name.upper()}: {epsilon_text(value, 4)}")
    planned = guarantee.get("planned_steps", guarantee.get("planned_releases"))
    limit = f" of {show(planned)} planned" if planned else ", without a limit"
    accountant = show(accounting.get("accountant")).upper()
    relation = show(guarantee.get("neighbouring_relation")).replace("_", " ")
    rows = [
        ("ε spent", epsilon_text(guarantee.get("epsilon"), 4)),
        ("ε of the budget", show(guarantee.get("target_epsilon"))),
        ("δ", show(guarantee.get("delta"))),
        ("privacy unit", show(guarantee.get("unit"))),
        ("neighbouring relation", relation),
    ]
    for party, value in ensure_mapping(guarantee.get("epsilon_for_others")).items():
        rows.append((f"ε for {show(party)}", epsilon_text(value, 4)))
    rows += [
        *_rows(guarantee, _IN_GUARANTEE),
        ("releases", show(guarantee.get("releases")) + limit),
        ("accountant", f"{accountant} of {show(accounting.get('library'))}"),
        ("ε by each accountant", ", ".join(by_accountant) or "–"),
    ]
    known = [row for row in rows if row[1].strip("– of")]
    return [*known, ("certified", "yes" if guarantee.get("certified") is True else "NO")]


def _curvature_rows(curvature: Any) -> TextRows:
    if not isinstance(curvature, Mapping):
        return [("preconditioner", "none")]
    is_private = curvature.get("uses_private_data")
    count = len(ensure_list(curvature.get("refreshes")))
    return [
        ("uses private data", "yes: NOT PRIVATE" if is_private else "no"),
        *_rows(curvature, _NOT_IN_CURVATURE),
        ("refreshes", f"{count:,}"),
    ]


def _public_rows(settings: Any) -> TextRows:
    """Return setting, value and reason. A card of federated training gives the reason alone."""
    rows = []
    for name, entry in ensure_mapping(settings).items():
        content = entry if isinstance(entry, Mapping) else {"why": entry}
        rows.append((show(name), show(content.get("value")), show(content.get("why"))))
    return rows


def _provenance_rows(card: Mapping[str, Any]) -> TextRows:
    rows = [*_rows(card, _PARTS_OF_CARD), ("plan", show(card.get("plan_hash")))]
    captions = {"ledger": "ledger", "weights": "weights", "public_seeds": "public seed"}
    for part, caption in captions.items():
        rows += [(f"{caption}, {name}", text) for name, text in _rows(card.get(part))]
    return rows + _rows(card.get("software"))


def _rows(content: Any, left_out: Iterable[str] = ()) -> list[tuple[str, str]]:
    hidden = set(left_out)
    rows = []
    for name, value in ensure_mapping(content).items():
        if name not in hidden and value not in (None, [], ""):
            rows.append((_CAPTIONS.get(name, str(name).replace("_", " ")), show(value)))
    return rows


# --------------------------------------------------------------------------------------------------
# Figures of a page as plain data: traces and layouts that the plotting library in the page draws.

MAX_LINES = 48
MAX_LAYERS = 16
MAX_MAPS = 12
MAX_POINTS = 400
A_COLOUR = "#0072B2"
G_COLOUR = "#D55E00"
QUIET = "#8a8f98"
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
        traces: of the plotting library; `meta` is the number of the method that hides a trace.
        layout: of the plotting library, without colours, which follow the page.
        height: in pixels.
        owner: number of the one method that the figure is hidden with, None for several methods.
    """

    title: str
    says: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int = 360
    owner: int | None = None


def _axis(title: str, **options: Any) -> dict[str, Any]:
    caption = {"text": plot_text(title), "standoff": 10}
    return {"title": caption, "automargin": True, "zeroline": False, **options}


def _layout(x: Mapping[str, Any], y: Mapping[str, Any], **margins: int) -> dict[str, Any]:
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 56, "r": 18, "t": 12, "b": 48, **margins},
        "showlegend": False,
        "hovermode": "closest",
    }


def _trace(
    name: str, x: Sequence[Any], y: Sequence[Any], texts: Any, **more: Any
) -> dict[str, Any]:
    """Return points or lines, with the texts that are shown where the pointer rests on them."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "hovertext": texts,
        "hoverinfo": "text",
        **more,
    }


def _line(name: str, points: Points, texts: Any, line: Any, **more: Any) -> dict[str, Any]:
    """Return a line through points in the order given."""
    x, y = np.reshape(points, (-1, 2)).T.tolist()
    return _trace(name, x, y, texts, mode="lines", line=line, **more)


def _score_axis(score: str) -> dict[str, Any]:
    if "accuracy" not in score:
        return _axis(score, tickformat="")
    limits = {"clipmin": 0.0, "clipmax": _FULL}
    return _axis(score, tickformat=".2~%", hoverformat=".2%", autorangeoptions=limits)


def _category_axis() -> dict[str, Any]:
    return _axis("", type="category", ticksuffix="  ")


def _group_text(group: RunGroup, score: str) -> str:
    """Return what is shown where the pointer rests on a group."""
    deviation = "" if group.std is None else f" ± {score_text(group.std, score)}"
    lines = [
        group.first.method,
        f"{score_text(group.mean, score)}{deviation} ({count_text(len(group.runs), 'run')})",
        f"ε = {epsilon_text(group.epsilon)}",
    ]
    if group.differs:
        lines.append(group.differs[:90])
    if group.first.warnings:
        lines.append(plain(group.first.warnings[0], 60))
    return "<br>".join(plot_text(line, 100) for line in lines)


def _marker(style: MethodStyle, size: int, groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return a symbol for each group, open where the group has no certified guarantee."""
    symbols = []
    for group in groups:
        symbols.append(f"{style.symbol}-open" if group.first.warnings else style.symbol)
    return {"color": style.colour, "symbol": symbols, "size": size}


def _open_symbols(groups: Sequence[RunGroup]) -> str:
    if any(group.first.warnings for group in groups):
        return " Open symbols and dotted lines: no certified guarantee."
    return ""


def _error_bars(groups: Sequence[RunGroup]) -> dict[str, Any]:
    widths = [interval(scores_of(group)) for group in groups]
    return {"type": "data", "array": widths, "thickness": 1.4, "width": 4}


def _wrap_name(name: str) -> str:
    """Return a name on two lines at most, so that a narrow screen has room for the figure."""
    lines = textwrap.wrap(plain(name, 80), 17, max_lines=2, placeholder="…")
    return "<br>".join(plot_text(line) for line in lines)


def plot_accuracy(panel: Panel, styles: Styles) -> Plot:
    """Plot score against ε with deviations over seeds.

    Where there is only one ε, each method has a row.
    """
    budgets = sorted({budget for budget, _ in _pair_with_budgets(panel.groups)})
    if len(budgets) < 2:
        return _plot_rows(panel, styles, budgets)
    lines = collect(panel.groups, lambda group: (group.first.method, not group.first.warnings))
    traces = []
    for place, ((method, _), members) in enumerate(lines.items()):
        shift = 1 + 0.014 * (place - (len(lines) - 1) / 2)
        traces.append(_plot_budgets(members, styles[method], panel.score, shift))
    x = _axis("ε of the budget, logarithmic", type="log")
    if len(budgets) <= 12:
        x |= {"tickvals": budgets, "ticktext": [f"{budget:g}" for budget in budgets]}
    says = "Bars: 95 % intervals of the mean over seeds. Methods stand slightly side by side."
    return Plot(
        title=panel.title,
        says=says + _open_symbols(panel.groups),
        traces=traces,
        layout=_layout(x, _score_axis(panel.score)),
        height=420,
    )


def _pair_with_budgets(groups: Sequence[RunGroup]) -> list[tuple[float, RunGroup]]:
    """Return the groups that have an ε, with it and by it."""
    known = [(group.budget, group) for group in groups if group.budget is not None]
    return sorted(known, key=lambda pair: (pair[0], pair[1].differs))


def _plot_budgets(
    members: Sequence[RunGroup], style: MethodStyle, score: str, shift: float
) -> dict[str, Any]:
    """Return the scores of one method by ε, joined by a line where each ε has one of them.

    Args:
        members: groups of the method, all of them with a certified guarantee or none.
        style: of the method.
        score: what the numbers are.
        shift: what each ε is multiplied by.
    """
    known = _pair_with_budgets(members)
    groups = [group for _, group in known]
    has_one_point_each = len({budget for budget, _ in known}) == len(known)
    is_certified = not members[0].first.warnings
    return _trace(
        plot_text(style.name),
        [budget * shift for budget, _ in known],
        [group.mean for group in groups],
        [_group_text(group, score) for group in groups],
        mode="lines+markers" if is_certified and has_one_point_each else "markers",
        meta=style.index,
        error_y=_error_bars(groups),
        line={"color": style.colour, "width": 2},
        marker=_marker(style, 9, groups),
    )


def _plot_rows(panel: Panel, styles: Styles, budgets: Sequence[float]) -> Plot:
    members = collect(panel.groups, lambda group: group.first.method)

    def best_score(method: str) -> float:
        return max(group.sort_score for group in members[method])

    traces = []
    for method in sorted(members, key=best_score):
        groups = members[method]
        style = styles[method]
        traces.append(
            _trace(
                plot_text(method),
                [group.mean for group in groups],
                [_wrap_name(method)] * len(groups),
                [_group_text(group, panel.score) for group in groups],
                meta=style.index,
                error_x=_error_bars(groups),
                marker={**_marker(style, 10, groups), "opacity": 0.85},
            )
        )
    budget = f", ε = {epsilon_text(budgets[0])}" if budgets else ""
    says = "The method with the best point is on top. Bars: 95 % intervals of the mean over seeds."
    says += _open_symbols(panel.groups)
    if any(group.differs for group in panel.groups):
        says += " Several points of one method differ in their settings."
    return Plot(
        title=panel.title + budget,
        says=says,
        traces=traces,
        layout=_layout(_score_axis(panel.score), _category_axis(), l=20),
        height=110 + 34 * max(3, len(traces)),
    )


def plot_learning(panel: Panel, styles: Styles) -> list[Plot]:
    """Plot score against steps: a figure for each ε, a line for the mean of each group."""
    plots = []
    for budget, groups in _group_by_budget(panel.groups):
        with_curve = [g for g in groups if any(len(run.curve) > 1 for run in g.runs)]
        if not with_curve:
            continue
        shown = evenly_spaced(with_curve, MAX_LINES)
        traces = []
        for group in shown:
            points = _mean_curve([run.curve for run in group.runs])
            traces.append(_plot_line(group, styles, points, panel.score))
        fewer = ""
        if len(shown) < len(with_curve):
            fewer = f" {len(shown)} of {len(with_curve)} lines are shown."
        plots.append(
            Plot(
                title=f"{panel.title}, ε = {epsilon_text(budget)}",
                says=f"By step; each line is the mean over seeds.{fewer}{_open_symbols(groups)}",
                traces=traces,
                layout=_layout(_axis("steps", rangemode="tozero"), _score_axis(panel.score)),
            )
        )
    return plots


def plot_spending(panel: Panel, styles: Styles) -> list[Plot]:
    """Plot ε against steps. Return no figure where no run records ε by step."""
    curves = []
    for group in panel.groups:
        spending = [run.spending for run in group.runs if len(run.spending) > 1]
        if spending:
            curves.append((group, spending[0]))
    if not curves:
        return []
    shown = evenly_spaced(curves, MAX_LINES)
    plot = Plot(
        title=f"{plain(panel.task, 60)}, ε spent by step",
        says=(
            "Lines of runs with the same sampling and noise lie on each other. "
            "Between evaluations an upper bound."
        ),
        traces=[_plot_line(group, styles, points, "") for group, points in shown],
        layout=_layout(_axis("steps", rangemode="tozero"), _axis("ε spent", rangemode="tozero")),
    )
    return [plot]


def _plot_line(group: RunGroup, styles: Styles, points: Points, score: str) -> dict[str, Any]:
    """Return a line of scores, or of ε where `score` is empty."""
    style = styles[group.first.method]
    description = _group_text(group, score or group.first.score)
    texts = []
    for step, y in points:
        value = score_text(y, score) if score else f"ε = {epsilon_text(y)}"
        texts.append(f"step {step:g}: {value}<br>{description}")
    dash = "dot" if group.first.warnings else "solid"
    line = {"color": style.colour, "width": 2, "dash": dash}
    trace = _line(plot_text(group.first.method), points, texts, line, meta=style.index)
    if score and len(points) <= 40:
        trace |= {"mode": "lines+markers", "marker": _marker(style, 6, [group] * len(points))}
    return trace


def _mean_curve(curves: Sequence[Points]) -> Points:
    """Return the mean score at the steps that all curves share; one of them has points.

    Where the curves share no step, return all points of the first curve.
    """
    known = [dict(curve) for curve in curves if curve]
    shared_steps = sorted(set.intersection(*(set(curve) for curve in known)))
    if not shared_steps:
        return sorted(known[0].items())
    return [(step, sum(curve[step] for curve in known) / len(known)) for step in shared_steps]


def plot_curvature(figures: Figures, style: MethodStyle) -> list[Plot]:
    """Plot the signal-to-noise profile, spectra and sensitivity maps of one run."""
    plots = [_plot_signal(figures.signal_to_noise, style)] if figures.signal_to_noise else []
    plots += [_plot_spectrum(layer) for layer in evenly_spaced(figures.spectra, MAX_LAYERS)]
    return plots + plot_sensitivity(figures.sensitivity_maps, {style.name: style})


def plot_sensitivity(maps: Sequence[SensitivityMap], styles: Styles) -> list[Plot]:
    """Plot accuracy over two settings: a figure for each map, all maps on one scale."""
    values = [value for one in maps for row in one.values for value in row if value is not None]
    scale = {"zmin": min(values), "zmax": max(values)} if values else {}
    shown = evenly_spaced(maps, MAX_MAPS)
    return [_plot_map(one, styles.get(one.method), scale) for one in shown]


def _plot_signal(layers: Sequence[LayerSignal], style: MethodStyle) -> Plot:
    shown = [layer for layer in layers if layer.plain > 0 and layer.preconditioned > 0][::-1]
    names = [plot_text(layer.name, 40) for layer in shown]

    def trace(name: str, values: list[float], colour: str, symbol: str) -> dict[str, Any]:
        texts = []
        for layer, value in zip(names, values, strict=True):
            texts.append(f"{layer}<br>{name}: {value:.3g}")
        line = {"width": 2, "color": colour}
        marker = {"color": colour, "symbol": symbol, "size": 10, "line": line}
        return _trace(name, values, names, texts, marker=marker)

    without = [layer.plain for layer in shown]
    preconditioned = [layer.preconditioned for layer in shown]
    traces = [
        trace("without the preconditioner", without, QUIET, "circle-open"),
        trace("with the preconditioner", preconditioned, style.colour, style.symbol),
    ]
    x = _axis(
        "signal ÷ noise, logarithmic", type="log", nticks=5, tickangle=0, exponentformat="power"
    )
    return Plot(
        title="Signal-to-noise ratio of each layer",
        says=(
            "Norm of a batch of clipped gradients that agree ÷ norm of the noise. "
            "Open circles: without the preconditioner."
        ),
        traces=traces,
        layout=_layout(x, _category_axis(), l=20, t=40) | _legend(),
        height=150 + 30 * max(3, len(shown)),
    )


def _legend() -> dict[str, Any]:
    place = {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    return {"showlegend": True, "legend": place}


def _plot_spectrum(layer: LayerSpectra) -> Plot:
    traces: list[dict[str, Any]] = []
    for side, colour, dash in (("A", A_COLOUR, "solid"), ("G", G_COLOUR, "dash")):
        points = evenly_spaced(layer.points(side), MAX_POINTS)
        if not points:
            continue
        texts = [f"{side}: {y:.3g}" for _, y in points]
        trace = _line(side, points, texts, {"color": colour, "width": 2, "dash": dash})
        if len(points) <= 12:
            trace |= {"mode": "lines+markers", "marker": {"size": 5}}
        traces.append(trace)
        damping = layer.damping.get(side, 0.0)
        if damping > 0:
            traces.append(
                _trace(
                    f"damping of {side}",
                    [0, 1],
                    [damping, damping],
                    f"damping of {side}: {damping:.3g}",
                    mode="lines",
                    line={"color": colour, "width": 1.2, "dash": "dot"},
                    showlegend=False,
                )
            )
    ticks = {"tickvals": [0, 0.5, 1], "ticktext": ["0", "½", "1"]}
    x = _axis("rank of the eigenvalue ÷ size", range=[-0.03, 1.03], **ticks)
    y = _axis("eigenvalue", type="log", exponentformat="power", nticks=6)
    return Plot(
        title=f"Spectrum of {plain(layer.name, 60)}",
        says=(
            "Eigenvalues of A (inputs, solid) and G (output gradients, dashed), largest first; "
            "dotted: their damping."
        ),
        traces=traces,
        layout=_layout(x, y, t=36) | _legend(),
        height=320,
    )


def _plot_map(one: SensitivityMap, style: MethodStyle | None, scale: Mapping[str, float]) -> Plot:
    texts = []
    for y, row in zip(one.y_values, one.values, strict=True):
        y_text = f"{plot_text(one.y)} {y:g}"
        pairs = zip(one.x_values, row, strict=True)
        texts.append([f"{plot_text(one.x)} {x:g}, {y_text}: {score_text(v)}" for x, v in pairs])
    trace = {
        "type": "heatmap",
        "z": one.values,
        "x": [f"{value:g}" for value in one.x_values],
        "y": [f"{value:g}" for value in one.y_values],
        "xgap": 2,
        "ygap": 2,
        "colorscale": "Cividis",
        "colorbar": {"thickness": 12, "tickformat": ".0%", "outlinewidth": 0},
        "hoverongaps": False,
        "texttemplate": "%{z:.1%}",
        "hovertext": texts,
        "hoverinfo": "text",
        **scale,
    }
    x_axis = _axis(one.x, type="category", showgrid=False)
    y_axis = _axis(one.y, type="category", showgrid=False)
    warning = "" if one.measured_on == "test" else ", which is NOT PRIVATE"
    says = f"Accuracy on the {plain(one.measured_on, 20)} set{warning}; "
    says += f"one run a cell, the lighter the better. {plain(one.note, 300)}"
    return Plot(
        title=f"Sensitivity map: {plain(one.name, 60)}, {plain(one.method, 40)}",
        says=says.strip(),
        traces=[trace],
        layout=_layout(x_axis, y_axis),
        height=340,
        owner=None if style is None else style.index,
    )


# --------------------------------------------------------------------------------------------------
# The page: plain values go to the templates, which escape every text.

GENERATOR = "dpkfc report"
_MOST_ANSWERS = 24
_MOST_FOLDERS = 60
_MOST_WARNINGS = 40


def write_page(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str = "Report of private training runs",
    departures: Departures = lambda run: run["settings"],
) -> Contents:
    """Read runs and results and write the page.

    Args:
        paths: run folders, folders of them, and results files.
        out: the HTML file. An earlier report is replaced; any other file is left alone.
        title: of the page.
        departures: returns the settings that a run's recipe and method do not say; by default all.

    Returns:
        What was read; `broken` lists what is not shown, and why.

    Raises:
        ImportError: plotly is not installed.
        ValueError: nothing can be shown.
        RunFolderError: the file cannot be written, or is no earlier report.
    """
    out = Path(out)
    library = _plotly()
    contents = read_all(paths, departures)
    try:
        if out.is_dir():
            raise RunFolderError(f"{out} is a folder; give the name of an HTML file with --out")
        if out.exists() and GENERATOR.encode() not in out.open("rb").read(400):
            raise RunFolderError(
                f"{out} is no earlier report, so it is left as it is; choose another --out"
            )
    except OSError as error:
        reason = error.strerror or error
        raise RunFolderError(f"{out} cannot be written ({reason}); choose another --out") from None
    page = build(contents, library, title)
    write_text(out, page)
    return contents


def _plotly() -> str:
    """Return the plotting library as one script.

    Raises:
        ImportError: with the command that installs the library.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(
            'the report needs plotly, which is not installed: pip install ".[report]"'
        ) from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def build(contents: Contents, library: str, title: str) -> str:
    """Return the page as HTML.

    Args:
        contents: from `read_all`.
        library: JavaScript of the plotting library, without an end tag of a script.
        title: of the page.
    """
    groups = group_runs(contents.runs)
    styles = assign_styles(contents.runs)
    panels = comparable_panels(groups)
    # What the script in the page draws, by the id of its element.
    figures: dict[str, Any] = {}

    def place(plots: Iterable[Plot]) -> list[tuple[str, Plot]]:
        placed = []
        for plot in plots:
            name = f"plot-{len(figures) + 1}"
            figures[name] = {"data": plot.traces, "layout": plot.layout, "height": plot.height}
            placed.append((name, plot))
        return placed

    accuracy = place(plot_accuracy(panel, styles) for panel in panels)
    learning = []
    for panel in panels:
        learning += place(plot_learning(panel, styles) + plot_spending(panel, styles))
    charts = [(chart, place(plot_sensitivity(chart.maps, styles))) for chart in contents.charts]
    with_card = [run for run in contents.runs if run.card]
    folders = []
    for run in with_card[:_MOST_FOLDERS]:
        plots = plot_curvature(run.figures, styles[run.method])
        folders.append((run, view_card(run.card), place(plots)))
    uncertified = [run for run in contents.runs if run.warnings]
    warnings = dict.fromkeys((run.method, run.source, run.warnings[0]) for run in uncertified)
    environment = make_environment()
    script = _asset(environment, "page.js")
    return environment.get_template("page.html").render(
        title=title,
        generator=f"{GENERATOR} {version()}",
        contents=contents,
        styles=styles,
        uncertified=len(uncertified),
        warnings=list(warnings)[:_MOST_WARNINGS],
        smoke_runs=sum(run.smoke for run in contents.runs),
        answers=answer_panels(panels),
        most_answers=_MOST_ANSWERS,
        accuracy=accuracy,
        shows_validation=any(panel.measured_on != "test" for panel in panels),
        learning=learning,
        groups=sorted(groups, key=_table_order),
        charts=charts,
        folders=folders,
        folders_left_out=len(with_card) - len(folders),
        commands=_commands(groups),
        figures=figures,
        style=_asset(environment, "page.css"),
        library=library,
        script=script,
        digests=[_digest(text) for text in (library, script)],
    )


def make_environment() -> Environment:
    """Return the templates. Every text they print is escaped and has no control characters."""
    environment = Environment(
        loader=PackageLoader("dpkfc.app.html"),
        autoescape=True,
        finalize=_remove_control_characters,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cut": plain,
        "counted": count_text,
        "delta": delta_text,
        "epsilon": epsilon_text,
        "percent": score_text,
    }
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _remove_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value, len(value))
    return value


def _asset(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _table_order(group: RunGroup) -> tuple[bool, str, float, float]:
    """Return a key that sorts test sets first, then by task and ε, best score first."""
    run = group.first
    is_validation = run.measured_on != "test"
    return is_validation, run.task.casefold(), group.budget or 0.0, -group.sort_score


def _commands(groups: Sequence[RunGroup]) -> dict[tuple[str, str], dict[str, None]]:
    """Return the commands of studies by task and method, each once and in order."""
    commands: dict[tuple[str, str], dict[str, None]] = {}
    for group in groups:
        for run in group.runs:
            if run.command and not run.card:
                commands.setdefault((run.task, run.method), {})[run.command] = None
    return commands


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
