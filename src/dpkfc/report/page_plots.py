"""Figures of a page as plain data: traces and layouts that the plotting library in the page draws."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpkfc.report.figures import Figures, SensitivityMap
from dpkfc.report.numbers import plain
from dpkfc.report.page_group import Group, Look, Panel
from dpkfc.report.page_text import drawn, epsilon_text, percent
from dpkfc.report.plots import LayerSignal, LayerSpectra

__all__ = ["Plot", "accuracy", "curvature", "learning", "sensitivity", "spending"]

MAX_LINES, MAX_LAYERS, MAX_MAPS, MAX_POINTS = 48, 16, 12, 400
A_COLOUR, G_COLOUR, QUIET = "#0072B2", "#D55E00", "#8a8f98"
_FULL = 1.02  # end of an axis of accuracies: 100 % and room for half a symbol
_ROUNDING = 1e-6  # eigenvalues of a float32 factor below this share of the largest are rounding, whatever they say


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
        title: above it.
        says: what is seen, for those who do not see it; also below the figure.
        traces: of the plotting library; `meta` is the number of the method that hides them.
        layout: of the plotting library, without colours, which follow the page.
        height: in pixels.
        owner: number of the method that the whole figure is of and is hidden with; None of several.
    """

    title: str
    says: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int = 360
    owner: int | None = None


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": drawn(title), "standoff": 10}, "automargin": True, "zeroline": False, **more}


def _layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    margin = {"l": 56, "r": 18, "t": 12, "b": 48}
    return {"xaxis": x, "yaxis": y, "margin": margin, "showlegend": False, "hovermode": "closest", **more}


def _score_axis(score: str) -> dict[str, Any]:
    if "accuracy" not in score:
        return _axis(score, tickformat="")
    return _axis(score, tickformat=".2~%", hoverformat=".2%", autorangeoptions={"clipmin": 0.0, "clipmax": _FULL})


def _said(group: Group, score: str) -> str:
    runs = f"{len(group.runs)} run" + ("s" if len(group.runs) > 1 else "")
    deviation = "" if group.std is None else f" ± {percent(group.std, score)}"
    lines = [f"{group.first.method}", f"{percent(group.mean, score)}{deviation} ({runs})", f"ε = {epsilon_text(group.epsilon)}"]
    lines += [group.differs[:90]] if group.differs else []
    return "<br>".join(drawn(line, 100) for line in [*lines, *[plain(mark, 60) for mark in group.first.marks[:1]]])


def _marker(look: Look, size: int, groups: Sequence[Group]) -> dict[str, Any]:
    """A symbol for each group, open where it has no certified guarantee."""
    symbols = [f"{look.symbol}-open" if group.first.marks else look.symbol for group in groups]
    return {"color": look.colour, "symbol": symbols, "size": size}


def _open_symbols(groups: Sequence[Group]) -> str:
    return " Open symbols and dotted lines: no certified guarantee." if any(group.first.marks for group in groups) else ""


def _wrapped(name: str) -> str:
    """A name on two lines at most, so that a narrow screen has room for the figure."""
    lines = textwrap.wrap(plain(name, 80), 17, max_lines=2, placeholder="…")
    return "<br>".join(drawn(line) for line in lines)


def accuracy(panel: Panel, looks: Mapping[str, Look]) -> Plot:
    """Score against ε with deviations over seeds; a row for each method where there is only one ε."""
    budgets = sorted({group.budget for group in panel.groups if group.budget is not None})
    if len(budgets) < 2:
        return _rows(panel, looks, budgets)
    members: dict[tuple[str, bool], list[Group]] = {}
    for group in panel.groups:
        members.setdefault((group.first.method, not group.first.marks), []).append(group)
    traces = []
    for place, ((method, certified), groups) in enumerate(members.items()):
        known = sorted((g for g in groups if g.budget is not None), key=lambda g: (g.budget or 0.0, g.differs))
        shift = 1 + 0.014 * (place - (len(members) - 1) / 2)
        alone = certified and len({g.budget for g in known}) == len(known)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if alone else "markers",
                "name": drawn(method),
                "meta": looks[method].index,
                "x": [(g.budget or 0.0) * shift for g in known],
                "y": [g.mean for g in known],
                "error_y": {"type": "data", "array": [g.std for g in known], "thickness": 1.4, "width": 4},
                "line": {"color": looks[method].colour, "width": 2},
                "marker": _marker(looks[method], 9, known),
                "hovertext": [_said(g, panel.score) for g in known],
                "hoverinfo": "text",
            }
        )
    ticks = {"tickvals": budgets, "ticktext": [f"{b:g}" for b in budgets]} if len(budgets) <= 12 else {}
    x = _axis("ε of the budget, logarithmic", type="log", **ticks)
    says = f"Bars: one standard deviation over seeds. Methods stand slightly side by side.{_open_symbols(panel.groups)}"
    return Plot(title=panel.title, says=says, traces=traces, layout=_layout(x, _score_axis(panel.score)), height=420)


def _rows(panel: Panel, looks: Mapping[str, Look], budgets: Sequence[float]) -> Plot:
    best = {method: max(g.mean or 0.0 for g in groups) for method, groups in _by_method(panel.groups).items()}
    traces = []
    for method, groups in sorted(_by_method(panel.groups).items(), key=lambda item: best[item[0]]):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": drawn(method),
                "meta": looks[method].index,
                "x": [g.mean for g in groups],
                "y": [_wrapped(method)] * len(groups),
                "error_x": {"type": "data", "array": [g.std for g in groups], "thickness": 1.4, "width": 4},
                "marker": {**_marker(looks[method], 10, groups), "opacity": 0.85},
                "hovertext": [_said(g, panel.score) for g in groups],
                "hoverinfo": "text",
            }
        )
    at = f", ε = {epsilon_text(budgets[0])}" if budgets else ""
    says = f"The method with the best point is on top. Bars: one standard deviation over seeds.{_open_symbols(panel.groups)}"
    says += " Several points of one method differ in their settings." if any(g.differs for g in panel.groups) else ""
    y = _axis("", type="category", ticksuffix="  ")
    layout = _layout(_score_axis(panel.score), y)
    layout["margin"] = {**layout["margin"], "l": 20}
    return Plot(title=f"{panel.title}{at}", says=says, traces=traces, layout=layout, height=110 + 34 * max(3, len(traces)))


def _by_method(groups: Sequence[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.first.method, []).append(group)
    return found


def _at_budgets(panel: Panel) -> list[tuple[float | None, list[Group]]]:
    budgets = sorted({group.budget for group in panel.groups}, key=lambda b: (b is None, b or 0.0))
    return [(budget, [g for g in panel.groups if g.budget == budget]) for budget in budgets]


def learning(panel: Panel, looks: Mapping[str, Look]) -> list[Plot]:
    """Score against steps, one figure for each ε and one line for each group: the mean of its runs."""
    made = []
    for budget, groups in _at_budgets(panel):
        able = [g for g in groups if any(len(run.curve) > 1 for run in g.runs)]
        if not able:
            continue
        chosen = _evenly(able, MAX_LINES)
        traces = [_line(g, looks, _mean([run.curve for run in g.runs]), panel.score) for g in chosen]
        title = f"{panel.title}, ε = {epsilon_text(budget)}"
        fewer = f" {len(chosen)} of {len(able)} lines are shown." if len(chosen) < len(able) else ""
        says = f"By step; each line is the mean over seeds.{fewer}{_open_symbols(groups)}"
        layout = _layout(_axis("steps", rangemode="tozero"), _score_axis(panel.score))
        made.append(Plot(title=title, says=says, traces=traces, layout=layout))
    return made


def spending(panel: Panel, looks: Mapping[str, Look]) -> Plot | None:
    """ε against steps, where runs tell it; None where none does."""
    able = [g for g in panel.groups if any(len(run.spending) > 1 for run in g.runs)]
    if not able:
        return None
    told = [(g, next(run.spending for run in g.runs if len(run.spending) > 1)) for g in _evenly(able, MAX_LINES)]
    traces = [_line(g, looks, points, "") for g, points in told]
    title = f"{plain(panel.task, 60)}, ε spent by step"
    says = "Lines of runs with the same sampling and noise lie on each other. Between evaluations an upper bound."
    layout = _layout(_axis("steps", rangemode="tozero"), _axis("ε spent", rangemode="tozero"))
    return Plot(title=title, says=says, traces=traces, layout=layout)


def _line(group: Group, looks: Mapping[str, Look], points: Sequence[tuple[float, float]], score: str) -> dict[str, Any]:
    look = looks[group.first.method]
    few = len(points) <= 40 and bool(score)
    said = _said(group, score or group.first.score)
    values = [percent(y, score) if score else f"ε = {epsilon_text(y)}" for _, y in points]
    return {
        "type": "scatter",
        **({"mode": "lines+markers", "marker": _marker(look, 6, [group] * len(points))} if few else {"mode": "lines"}),
        "name": drawn(group.first.method),
        "meta": look.index,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": look.colour, "width": 2, "dash": "dot" if group.first.marks else "solid"},
        "hovertext": [f"step {x:g}: {value}<br>{said}" for (x, _), value in zip(points, values, strict=True)],
        "hoverinfo": "text",
    }


def _mean(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Mean score at the steps that all curves share; all points of one curve where they share none."""
    known = [dict(curve) for curve in curves if curve]
    common = sorted(set.intersection(*(set(one) for one in known))) if known else []
    if not common:
        return sorted(known[0].items()) if known else []
    return [(step, sum(one[step] for one in known) / len(known)) for step in common]


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def curvature(figures: Figures, look: Look) -> list[Plot]:
    """Signal-to-noise profile, spectra and sensitivity maps of one run."""
    made = [_signal(figures.signal_to_noise, look)] if figures.signal_to_noise else []
    made += [_spectrum(layer) for layer in _evenly(figures.spectra, MAX_LAYERS)]
    return made + sensitivity(figures.sensitivity_maps, {look.name: look})


def sensitivity(maps: Sequence[SensitivityMap], looks: Mapping[str, Look]) -> list[Plot]:
    """Accuracy over two settings, a figure for each map; all on one scale, so that methods can be compared."""
    known = [value for one in maps for row in one.values for value in row if value is not None]
    scale = {"zmin": min(known), "zmax": max(known)} if known else {}
    return [_map(one, looks.get(one.method), scale) for one in _evenly(maps, MAX_MAPS)]


def _signal(layers: Sequence[LayerSignal], look: Look) -> Plot:
    shown = [s for s in layers if s.plain > 0 and s.preconditioned > 0][::-1]
    names = [drawn(s.name, 40) for s in shown]
    pairs = (("without the preconditioner", QUIET, "circle-open"), ("with the preconditioner", look.colour, look.symbol))
    traces: list[dict[str, Any]] = []
    for (name, colour, symbol), values in zip(pairs, ([s.plain for s in shown], [s.preconditioned for s in shown]), strict=True):
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": name, "x": values, "y": names,
                "marker": {"color": colour, "symbol": symbol, "size": 10, "line": {"width": 2, "color": colour}},
                "hovertext": [f"{layer}<br>{name}: {value:.3g}" for layer, value in zip(names, values, strict=True)],
                "hoverinfo": "text",
            }
        )  # fmt: skip
    x = _axis("signal ÷ noise, logarithmic", type="log", nticks=5, tickangle=0, exponentformat="power")
    layout = _layout(x, _axis("", type="category", ticksuffix="  "), **_legend())
    says = "Norm of a batch of clipped gradients that agree ÷ norm of the noise. Open circles: without the preconditioner."
    height = 150 + 30 * max(3, len(shown))
    layout["margin"] = {**layout["margin"], "l": 20, "t": 40}
    return Plot(title="Signal-to-noise ratio of each layer", says=says, traces=traces, layout=layout, height=height)


def _legend() -> dict[str, Any]:
    return {"showlegend": True, "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}}


def _spectrum(layer: LayerSpectra) -> Plot:
    traces: list[dict[str, Any]] = []
    for side, colour, dash in (("A", A_COLOUR, "solid"), ("G", G_COLOUR, "dash")):
        values = sorted((float(v) for v in layer.values.get(side, ()) if v > 0), reverse=True)
        kept = [v for v in values if v >= values[0] * _ROUNDING]
        if not kept:
            continue
        size = max(1, layer.sizes.get(side, len(layer.values[side])) - 1)
        points = _evenly([(rank / size, v) for rank, v in enumerate(kept)], MAX_POINTS)
        traces.append(
            {
                "type": "scatter", "name": side,
                **({"mode": "lines+markers", "marker": {"size": 5}} if len(points) <= 12 else {"mode": "lines"}),
                "x": [x for x, _ in points], "y": [y for _, y in points],
                "line": {"color": colour, "width": 2, "dash": dash},
                "hovertext": [f"{side}: {y:.3g}" for _, y in points], "hoverinfo": "text",
            }
        )  # fmt: skip
        if layer.damping.get(side, 0.0) > 0:
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "name": f"damping of {side}", "x": [0, 1],
                    "y": [layer.damping[side]] * 2, "line": {"color": colour, "width": 1.2, "dash": "dot"},
                    "showlegend": False, "hovertext": f"damping of {side}: {layer.damping[side]:.3g}", "hoverinfo": "text",
                }
            )  # fmt: skip
    x = _axis("rank of the eigenvalue ÷ size", range=[-0.03, 1.03], tickvals=[0, 0.5, 1], ticktext=["0", "½", "1"])
    layout = _layout(x, _axis("eigenvalue", type="log", exponentformat="power", nticks=6), **_legend())
    layout["margin"] = {**layout["margin"], "t": 36}
    title = f"Spectrum of {plain(layer.name, 60)}"
    says = "Eigenvalues of A (inputs, solid) and G (output gradients, dashed), largest first; dotted: their damping."
    return Plot(title=title, says=says, traces=traces, layout=layout, height=320)


def _map(one: SensitivityMap, look: Look | None, scale: Mapping[str, float]) -> Plot:
    trace = {
        "type": "heatmap", "z": [list(row) for row in one.values], "colorscale": "Cividis", "hoverongaps": False,
        "x": [f"{value:g}" for value in one.x_values], "y": [f"{value:g}" for value in one.y_values], "xgap": 2, "ygap": 2,
        "colorbar": {"thickness": 12, "tickformat": ".0%", "outlinewidth": 0}, "texttemplate": "%{z:.1%}",
        "hovertext": [
            [f"{drawn(one.x)} {x:g}, {drawn(one.y)} {y:g}: {percent(value)}" for x, value in zip(one.x_values, row, strict=True)]
            for y, row in zip(one.y_values, one.values, strict=True)
        ],
        "hoverinfo": "text",
        **scale,
    }  # fmt: skip
    layout = _layout(_axis(one.x, type="category", showgrid=False), _axis(one.y, type="category", showgrid=False))
    warned = "" if one.measured_on == "test" else ", which is NOT PRIVATE"
    says = f"Accuracy on the {plain(one.measured_on, 20)} set{warned}; one run a cell, the lighter the better."
    title = f"Sensitivity map: {plain(one.name, 60)}, {plain(one.method, 40)}"
    owner = None if look is None else look.index
    says = f"{says} {plain(one.note, 300)}".strip()
    return Plot(title=title, says=says, traces=[trace], layout=layout, height=340, owner=owner)
