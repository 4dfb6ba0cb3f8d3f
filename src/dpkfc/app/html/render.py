"""One HTML page of runs and studies that holds all it needs: nothing is fetched when it is looked at."""

from __future__ import annotations

import base64
import hashlib
import os
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from dpkfc.app.html.read import (
    Chart,
    Contents,
    Departures,
    Group,
    Look,
    Panel,
    Sheet,
    Shown,
    grouped,
    looks,
    panels,
    read_all,
)
from dpkfc.app.html.text import delta_text, drawn, embedded, epsilon_text, escaped, percent, show
from dpkfc.app.plots import Figures, LayerSignal, LayerSpectra, SensitivityMap
from dpkfc.app.run_folder import RunFolderError, placed
from dpkfc.report.card import audit_rows, audit_summary, failed_checks
from dpkfc.report.numbers import plain

# --------------------------------------------------------------------------------------------------
# The privacy card of a run as HTML: its warnings first, and every figure that ε does not protect
# marked as such.

_CAPTIONS = {"divisor": "divisor (expected batch size)", "stddev": "standard deviation on the sum"}
_CAPTIONS |= {"max_grad_norm": "clipping bound C", "noise_multiplier": "noise multiplier σ"}
_CAPTIONS |= {"sensitivity": "sensitivity of the sum", "delta": "δ"}

# Keys that have a place of their own; whatever else a card says is shown as it stands.
_GUARANTEE = {"certified", "epsilon", "delta", "target_epsilon", "unit", "neighbouring_relation", "releases", "planned_steps"}
_GUARANTEE |= {"planned_releases", "epsilon_by", "epsilon_for_others", "neighbours_differ_in"}
_ELSEWHERE = {"event", "certified", "caveats", "epsilon", "target_epsilon", "epsilon_for_others", "against", "delta", "releases"}
_ELSEWHERE |= {"plan_hash"}
_PARTS = {"format", "title", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature", "assumed_public", "ledger"}
_PARTS |= {"hyper_parameters", "not_private", "results", "public_seeds", "plan_hash", "software", "audit", "weights"}


def not_protected(text: str = "not protected by ε") -> str:
    """The mark of a figure that is outside the guarantee."""
    return f'<span class="badge warn">{escaped(text)}</span>'


def card_html(card: Mapping[str, Any], *, level: int = 4) -> str:
    """The card; parts that an older version did not write are left out.

    Args:
        card: as read from JSON; nothing in it is trusted.
        level: of its headings.
    """
    parts = [_statement(card), _section("Guarantee", _guarantee(card), level)]
    parts.append(_section("Mechanism", _rows(card.get("mechanism"), _ELSEWHERE), level))
    parts.append(_curvature(card, level) if "curvature" in card else "")
    parts.append(_section("Taken as public", _public(card.get("assumed_public")), level, ("setting", "value", "why")))
    parts.append(_section("Hyper-parameters", _rows(card.get("hyper_parameters")), level))
    results = _rows(card.get("results"))
    parts.append(_section("Results", results, level, mark=not_protected()))
    parts.append(_audit(card.get("audit"), level))
    hidden = [(name, show(why)) for name, why in _mapping(card.get("not_private")).items()]
    parts.append(_section("Figures that ε does NOT protect", hidden, level, ("figure", "why"), mark=not_protected("not private")))
    rest = [("plan", show(card.get("plan_hash")))] + [(f"ledger, {k}", v) for k, v in _rows(card.get("ledger"))]
    rest += [(f"weights, {k}", v) for k, v in _rows(card.get("weights"))]
    rest += [(f"public seed, {k}", v) for k, v in _rows(card.get("public_seeds"))] + _rows(card.get("software"))
    rest = [*_rows(card, _PARTS), *rest]
    parts.append(_section("Provenance", rest, level))
    return "\n".join(part for part in parts if part)


def _public(found: Any) -> list[tuple[str, str, str]]:
    """Setting, value and reason; a card of federated training gives the reason alone."""
    rows = []
    for name, entry in _mapping(found).items():
        both = entry if isinstance(entry, Mapping) else {"why": entry}
        rows.append((show(name), show(both.get("value")), show(both.get("why"))))
    return rows


def _statement(card: Mapping[str, Any]) -> str:
    promise = _mapping(card.get("guarantee"))
    caveats = [show(text) for text in card.get("caveats") or () if text] if isinstance(card.get("caveats"), list) else []
    if failed := failed_checks(card.get("audit")):
        said = f"<strong>AUDIT FAILED: {escaped(', '.join(failed), 300)}</strong> Do not rely on what this card states."
        return f'<div class="alarm" role="note">{said}</div>'
    if card.get("stamp") or promise.get("certified") is not True or caveats:
        items = "".join(f"<li>{escaped(text)}</li>" for text in caveats)
        stamp = escaped(card.get("stamp") or "UNCERTIFIED", 80)
        said = f"<strong>{stamp}</strong> There is no certified guarantee for this model."
        return f'<div class="alarm" role="note">{said}<ul>{items}</ul></div>'
    spent = f"(ε = {epsilon_text(promise.get('epsilon'), 4)}, δ = {show(promise.get('delta'))})"
    unit, differ = escaped(show(promise.get("unit")), 60), escaped(show(promise.get("neighbours_differ_in")), 120)
    against = f" This holds against {escaped(promise['against'], 300)}." if promise.get("against") else ""
    return (
        f'<p class="promise">The released weights are <strong>{escaped(spent)}-differentially private</strong> for {unit}: '
        f"neighbouring data sets differ in {differ}.{against}</p>"
    )


def _guarantee(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    promise, accounting = _mapping(card.get("guarantee")), _mapping(card.get("accounting"))
    beside = _mapping(accounting.get("epsilon_by") or promise.get("epsilon_by"))
    by = [f"{name.upper()}: {epsilon_text(value, 4)}" for name, value in beside.items()]
    others = _mapping(promise.get("epsilon_for_others"))
    planned = promise.get("planned_steps", promise.get("planned_releases"))
    rows = [
        ("ε spent", epsilon_text(promise.get("epsilon"), 4)),
        ("ε of the budget", show(promise.get("target_epsilon"))),
        ("δ", show(promise.get("delta"))),
        ("privacy unit", show(promise.get("unit"))),
        ("neighbouring relation", show(promise.get("neighbouring_relation")).replace("_", " ")),
        *((f"ε for {show(who)}", epsilon_text(value, 4)) for who, value in others.items()),
        *_rows(promise, _GUARANTEE),
        ("releases", show(promise.get("releases")) + (f" of {show(planned)} planned" if planned else ", without a limit")),
        ("accountant", f"{show(accounting.get('accountant')).upper()} of {show(accounting.get('library'))}"),
        ("ε by each accountant", ", ".join(by) or "–"),
        ("certified", "yes" if promise.get("certified") is True else "NO"),
    ]
    return [row for row in rows if row[1].strip("– of") or row[0] == "certified"]


def _curvature(card: Mapping[str, Any], level: int) -> str:
    found = card.get("curvature")
    if not isinstance(found, Mapping):
        return _section("Curvature", [("preconditioner", "none")], level)
    private = found.get("uses_private_data")
    rows = _rows(found, {"refreshes", "uses_private_data", "layer_rules", "loss", "curvature_source"})
    refreshes = found.get("refreshes")
    count = len(refreshes) if isinstance(refreshes, list) else 0
    rows = [("uses private data", "yes: NOT PRIVATE" if private else "no"), *rows, ("refreshes", f"{count:,}")]
    return _section("Curvature", rows, level)


def _audit(audit: Any, level: int) -> str:
    """What `dpkfc audit` found, where it was asked."""
    section = _section("Audit", audit_rows(audit), level, ("check", "measured", "allowed", "verdict", "how"))
    return section.replace('<div class="scroll"', f'<p>{escaped(audit_summary(audit))}</p><div class="scroll"', 1)


def _rows(found: Any, leave_out: Iterable[str] = ()) -> list[tuple[str, str]]:
    hidden = {*leave_out}
    items = [(name, value) for name, value in _mapping(found).items() if name not in hidden and value not in (None, [], "")]
    return [(_CAPTIONS.get(name, str(name).replace("_", " ")), show(value)) for name, value in items]


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _section(title: str, rows: Sequence[Sequence[str]], level: int, header: Sequence[str] = (), mark: str = "") -> str:
    if not rows:
        return ""
    heading = f"<h{level}>{escaped(title)} {mark}</h{level}>"
    return f"<section>{heading}{definition_table(rows, header)}</section>"


def definition_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table whose first column names the rows; every text is escaped here."""
    head = "".join(f'<th scope="col">{escaped(text)}</th>' for text in header)
    lines = [
        f'<tr><th scope="row">{escaped(row[0])}</th>' + "".join(f"<td>{escaped(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    ]
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f'<div class="scroll" tabindex="0"><table class="plain">{top}<tbody>{"".join(lines)}</tbody></table></div>'


# --------------------------------------------------------------------------------------------------
# Figures of a page as plain data: traces and layouts that the plotting library in the page draws.

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
        return _plot_rows(panel, looks, budgets)
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


def _plot_rows(panel: Panel, looks: Mapping[str, Look], budgets: Sequence[float]) -> Plot:
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
        traces = [_plot_line(g, looks, _mean([run.curve for run in g.runs]), panel.score) for g in chosen]
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
    traces = [_plot_line(g, looks, points, "") for g, points in told]
    title = f"{plain(panel.task, 60)}, ε spent by step"
    says = "Lines of runs with the same sampling and noise lie on each other. Between evaluations an upper bound."
    layout = _layout(_axis("steps", rangemode="tozero"), _axis("ε spent", rangemode="tozero"))
    return Plot(title=title, says=says, traces=traces, layout=layout)


def _plot_line(group: Group, looks: Mapping[str, Look], points: Sequence[tuple[float, float]], score: str) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------
# The pieces of HTML that a page is put together from. Every text that was read from a file is
# escaped here.

_COVERS = (
    "ε is a promise about the released weights of one run by itself. It does not cover the choice of settings, the comparison of "
    "several runs on the same data, or any figure marked †."
)


def paragraph(text: str) -> str:
    """Text below a heading."""
    return f"<p>{escaped(text, 4000)}</p>"


def section(name: str, title: str, shown: Sequence[str], *, wide: bool = False, grid: bool = True) -> str:
    """A part of the page with its heading; nothing where there is nothing to show."""
    if not shown:
        return ""
    kind = f' class="grid{" wide" if wide else ""}"' if grid else ""
    heading = f'<h2 id="h-{name}">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="h-{name}">{heading}<div{kind}>{"".join(shown)}</div></section>'


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _glyph(look: Look) -> str:
    return f'<span class="glyph" aria-hidden="true" style="color:{look.colour}">{look.glyph}</span>'


def figure(name: str, plot: Plot) -> str:
    """The place of a figure, which the script in the page fills."""
    said = escaped(f"{plot.title}. {plot.says}", 800)
    owner = "" if plot.owner is None else f' data-method="{plot.owner}"'
    return (
        f"<figure{owner}><figcaption>{escaped(plot.title, 200)}</figcaption>"
        f'<div class="plot" id="{name}" role="img" aria-label="{said}" style="height:{plot.height}px"></div>'
        f'<p class="says">{escaped(plot.says, 600)}</p></figure>'
    )


def notice(contents: Contents) -> str:
    """What ε covers, which runs have no guarantee, and what is not shown: above everything else."""
    marked = [run for run in contents.runs if run.marks]
    shown = [f"<p>{escaped(_COVERS)}</p>"]
    if marked:
        items = dict.fromkeys((run.method, run.source, run.marks[0]) for run in marked)
        lines = "".join(f"<li>{escaped(m, 80)} ({escaped(s, 160)}): {escaped(why, 300)}</li>" for m, s, why in [*items][:40])
        count = f"{len(marked)} of {len(contents.runs)} runs have no certified guarantee"
        shown.append(f'<div class="alarm" role="note"><strong>{count}</strong><ul>{lines}</ul></div>')
    smoke = sum(run.smoke for run in contents.runs)
    if smoke:
        count = f"{smoke} of {len(contents.runs)} runs are smoke runs"
        shown.append(f'<p class="says">{count}: a few steps on a slice of the data. Their scores say nothing.</p>')
    if contents.broken:
        lines = "".join(f"<li><code>{escaped(path, 200)}</code>: {escaped(why, 400)}</li>" for path, why in contents.broken)
        shown.append(f'<div class="broken" role="note"><strong>Not shown</strong><ul>{lines}</ul></div>')
    shown += [f'<p class="says">{escaped(note)}</p>' for note in contents.notes]
    return "".join(shown)


def validation_warning() -> str:
    """Beside scores on a validation split."""
    why = "Scores on a validation set are computed from private examples that no ε protects: for the operator only."
    return f'<p class="says full">{not_protected("not private")} {escaped(why)}</p>'


def method_boxes(every: Sequence[Look]) -> str:
    """One box a method: it is the legend of all figures, and hides the method everywhere."""
    boxes = "".join(
        f'<label><input type="checkbox" checked data-toggle="{look.index}">{_glyph(look)} {escaped(look.name, 60)}</label>'
        for look in every
    )
    buttons = '<button type="button" id="all">all</button><button type="button" id="none">none</button>'
    if not boxes:
        return ""
    return f'<fieldset id="methods"><legend>Methods shown</legend><div class="boxes">{boxes}</div><div>{buttons}</div></fieldset>'


_COLUMNS = (
    ("method", "text"), ("task", "text"), ("ε spent", "number"), ("score †", "number"), ("± std †", "number"),
    ("measured on", "text"), ("runs", "number"), ("δ", "number"), ("σ", "number"), ("steps", "number"),
    ("seconds †", "number"), ("guarantee", "text"), ("settings that differ", "text"),
)  # fmt: skip


def run_table(groups: Sequence[Group], look: Mapping[str, Look]) -> str:
    """All groups of runs; its headings are buttons that sort."""
    if not groups:
        return ""
    head = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{kind}">'
        f'<button type="button">{name}<span aria-hidden="true"></span></button></th>'
        for name, kind in _COLUMNS
    )
    lines = "".join(_line(group, look[group.first.method]) for group in sorted(groups, key=_order))
    says = "† not protected by ε. Mean and sample standard deviation over runs that differ only in their public seed."
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="h-table"><table id="table"><caption class="hidden">'
        f"Runs; activate a heading to sort by it</caption><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
    return section("table", "Runs", [f'<p class="says">{says}</p>', table], grid=False)


def _order(group: Group) -> tuple[bool, str, float, float]:
    """Test sets first, then by task and ε, best score first."""
    first = group.first
    return first.measured_on != "test", first.task.casefold(), group.budget or 0.0, -(group.mean or 0.0)


def _line(group: Group, look: Look) -> str:
    first = group.first
    seconds = [run.seconds for run in group.runs if run.seconds is not None]
    mean = sum(seconds) / len(seconds) if seconds else None
    budget = "" if first.target is None else f' <small>of {first.target:g}</small>'
    validation = f"<br>{not_protected('not private')}" if first.measured_on != "test" else ""
    scores = [
        (group.epsilon, epsilon_text(group.epsilon) + budget),
        (group.mean, percent(group.mean, first.score) + validation),
        (group.std, percent(group.std, first.score)),
    ]
    others = [
        (len(group.runs), str(len(group.runs))),
        (first.delta, delta_text(first.delta)),
        (first.sigma, "–" if first.sigma is None else f"{first.sigma:.3f}"),
        (first.steps, f"{first.steps:,}" if first.steps else "–"),
        (mean, "–" if mean is None else f"{mean:,.1f}"),
    ]
    score = "" if first.score == "accuracy" else f" <small>{escaped(first.score, 60)}</small>"
    marks = f'<span class="badge alarmed">{escaped(first.marks[0], 90)}</span>' if first.marks else "certified"
    if not first.marks and not all(run.card for run in group.runs):
        marks = "certified, or stated without a card" if any(run.card for run in group.runs) else "stated, no card"
    if first.against:
        marks += f" <small>against {escaped(first.against, 200)}</small>"
    smoke = ' <span class="badge warn">smoke run</span>' if first.smoke else ""
    task = first.task.removesuffix(" (smoke run)") if first.smoke else first.task
    cells = [f"<td>{escaped(task, 60)}{smoke}{score}</td>", *(_number(value, text) for value, text in scores)]
    cells += [f"<td>{escaped(first.measured_on, 30)}</td>", *(_number(value, text) for value, text in others)]
    cells += [f"<td>{marks}</td>", f'<td class="small">{escaped(group.differs, 160)}</td>']
    name = escaped(first.method, 60)
    warned = '<br><span class="badge alarmed">no guarantee</span>' if first.marks else ""
    head = f'<th scope="row" data-text="{name}">{_glyph(look)} {name}{warned}</th>'
    return f'<tr data-method="{look.index}">{head}{"".join(cells)}</tr>'


def _number(value: float | None, text: str) -> str:
    return f'<td class="number" data-value="{"" if value is None else repr(float(value))}">{text}</td>'


def sheets(found: Sequence[Sheet]) -> str:
    """Tables that studies have made."""
    made = []
    for sheet in found:
        notes = "".join(paragraph(note) for note in sheet.notes)
        lines = copied("\n".join(sheet.commands), f"commands of {plain(sheet.title, 80)}") if sheet.commands else ""
        table = definition_table(sheet.rows, sheet.header)
        made.append(f"<article><h3>{escaped(sheet.title)}</h3>{notes}{table}{lines}</article>")
    return section("studies", "Studies", made, grid=False)


def draw_chart(one: Chart, figures: Sequence[str]) -> str:
    """A figure of the DP-KFC paper with what is said of it."""
    warned = validation_warning() if any(held.measured_on != "test" for held in one.maps) else ""
    notes = "".join(paragraph(note) for note in one.notes)
    return f'<article><h3>{escaped(one.title)}</h3>{notes}<div class="grid">{"".join(figures)}{warned}</div></article>'


def copied(text: str, what: str) -> str:
    """Text to be copied, with a button."""
    lines = "\n".join(escaped(line, 4000) for line in text.split("\n"))
    return (
        f'<div class="copied"><button type="button" class="copy" aria-label="copy {escaped(what, 120)}">copy</button>'
        f'<pre tabindex="0"><code>{lines}</code></pre></div>'
    )


def run_details(run: Shown, look: Look, plots: Sequence[str]) -> str:
    """One run folder: what is promised is seen before it is opened."""
    spent = f"ε = {epsilon_text(run.epsilon)}" + ("" if run.delta is None else f", δ = {delta_text(run.delta)}")
    seed = f"seed {run.seed}" if run.seed is not None else ""
    kind, said = ("alarmed", run.marks[0]) if run.marks else ("good", "certified")
    marks = f'<span class="badge {kind}">{escaped(said, 90)}</span>'
    marks += f" <span>against {escaped(run.against, 200)}</span>" if run.against else ""
    head = (
        f"<summary>{_glyph(look)} <strong>{escaped(run.method, 60)}</strong> on {escaped(run.task, 60)} "
        f'<span class="fixed">{spent}</span> <span class="fixed">{seed}</span> {marks} '
        f"<small>{escaped(run.source, 160)}</small></summary>"
    )
    caveats = "".join(f"<li>{escaped(mark)}</li>" for mark in run.marks)
    plain_sight = f'<ul class="caveats">{caveats}</ul>' if caveats else ""
    shown = list(plots) or [
        f"<figure><figcaption>{escaped(title)}</figcaption>"
        f'<img src="{uri}" alt="{escaped(title)} of {escaped(run.method, 60)}"></figure>'
        for title, uri in run.pictures.items()
    ]
    measured = f'<p class="says">{escaped(run.figures.measured, 400)}</p>' if run.figures and run.figures.measured else ""
    figures = f'<h3>Figures</h3>{measured}<div class="grid">{"".join(shown)}</div>' if shown else ""
    card = f'<div class="card">{card_html(run.card or {})}</div>'
    again = _reproduce(run)
    return (
        f'<article class="run" data-method="{look.index}">{plain_sight}<details>{head}'
        f"{again}<h3>Privacy card</h3>{card}{figures}</details></article>"
    )


def _reproduce(run: Shown) -> str:
    if not run.command:
        return ""
    says = "Save the settings as config.toml, then run the command. The noise is drawn afresh, so figures differ a little."
    return (
        f'<h3>Run it again</h3><p class="says">{says}</p>{copied(run.command, "command")}'
        f'<details class="inner"><summary>config.toml</summary>{copied(run.config, "config.toml")}</details>'
    )


def commands(groups: Sequence[Group], look: Mapping[str, Look]) -> str:
    """How runs of studies are trained again; run folders have theirs beside the card."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for group in groups:
        for run in group.runs:
            if run.command and run.card is None:
                found.setdefault((run.task, run.method), {})[run.command] = None
    made = []
    for (task, method), lines in found.items():
        one = look[method]
        head = f"{_glyph(one)} <strong>{escaped(method, 60)}</strong> on {escaped(task, 60)}"
        text = copied("\n".join(lines), f"commands of {plain(method, 60)}")
        made.append(
            f'<article class="run" data-method="{one.index}"><details><summary>{head} '
            f"<small>{counted(len(lines), 'command')}</small></summary>{text}</details></article>"
        )
    return section("commands", "Commands of the studies", made, grid=False)


# --------------------------------------------------------------------------------------------------

GENERATOR = "dpkfc report"
_MOST_FOLDERS = 60


@dataclass
class _Drawn:
    """Figures of a page by the id of their place."""

    plots: dict[str, Plot] = field(default_factory=dict)

    def place(self, plot: Plot) -> str:
        name = f"plot-{len(self.plots) + 1}"
        self.plots[name] = plot
        return figure(name, plot)


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
        departures: leaves out of a run's settings what its recipe and method say; by default nothing.

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
            raise RunFolderError(f"{out} is no earlier report, so it is left as it is; choose another --out")
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written ({error.strerror or error}); choose another --out") from None
    page = build(contents, library, title)
    placed(out, lambda part: part.write_text(page, "utf-8"))
    return contents


def _plotly() -> str:
    """The plotting library as one script.

    Raises:
        ImportError: with the command that installs it.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError('the report is drawn with plotly, which is not installed: pip install "dpkfc[report]"') from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def build(contents: Contents, library: str, title: str) -> str:
    """The page as HTML.

    Args:
        contents: from `read_all`.
        library: JavaScript of the plotting library.
        title: of the page.
    """
    groups, look = grouped(contents.runs), looks(contents.runs)
    drawn = _Drawn()
    body = {
        "notice": notice(contents),
        "methods": method_boxes(list(look.values())),
        "accuracy": _accuracy(groups, look, drawn),
        "learning": _learning(groups, look, drawn),
        "table": run_table(groups, look),
        "sheets": sheets(contents.sheets),
        "sensitivity": _charts(contents.charts, look, drawn),
        "runs": _folders(contents.runs, look, drawn),
        "commands": commands(groups, look),
    }
    counts = f"{counted(len(contents.runs), 'run')}, {counted(len(look), 'method')}"
    figures = {name: {"data": plot.traces, "layout": plot.layout, "height": plot.height} for name, plot in drawn.plots.items()}
    script = _asset("page.js")
    return string.Template(_asset("page.html")).substitute(
        body,
        title=escaped(title, 120),
        generator=f"{GENERATOR} {escaped(_version(), 20)}",
        counts=counts,
        style=_asset("page.css"),
        hashes=" ".join(f"'sha256-{_digest(text)}'" for text in (library, script)),
        library=library,
        script=script,
        data=embedded(figures),
    )


def _accuracy(groups: Sequence[Group], look: Mapping[str, Look], drawn: _Drawn) -> str:
    found = panels(groups)
    shown = [drawn.place(accuracy(panel, look)) for panel in found]
    if any(panel.measured_on != "test" for panel in found):
        shown.append(validation_warning())
    return section("accuracy", "Accuracy against ε", shown, wide=True)


def _learning(groups: Sequence[Group], look: Mapping[str, Look], drawn: _Drawn) -> str:
    shown = []
    for panel in panels(groups):
        shown += [drawn.place(plot) for plot in learning(panel, look)]
        spent = spending(panel, look)
        shown += [] if spent is None else [drawn.place(spent)]
    return section("learning", "Learning curves", shown)


def _charts(charts: Sequence[Chart], look: Mapping[str, Look], drawn: _Drawn) -> str:
    shown = [draw_chart(chart, [drawn.place(plot) for plot in sensitivity(chart.maps, look)]) for chart in charts]
    return section("sensitivity", "Accuracy over settings", shown, grid=False)


def _folders(runs: Sequence[Shown], look: Mapping[str, Look], drawn: _Drawn) -> str:
    """Card, curvature and commands of each run folder."""
    shown, held = [], [run for run in runs if run.card is not None]
    for run in held[:_MOST_FOLDERS]:
        plots = curvature(run.figures, look[run.method]) if run.figures else []
        shown.append(run_details(run, look[run.method], [drawn.place(plot) for plot in plots]))
    more = len(held) - _MOST_FOLDERS
    note = paragraph(f"{more} more run folders are in the table only.") if more > 0 else ""
    return section("runs", "Privacy cards and curvature of each run", [*shown, note] if shown else [], grid=False)


def _asset(name: str) -> str:
    return resources.files("dpkfc.app.html").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _version() -> str:
    try:
        return metadata.version("dpkfc")
    except metadata.PackageNotFoundError:
        return ""
