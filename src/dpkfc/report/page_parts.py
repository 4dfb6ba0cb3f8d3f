"""The pieces of HTML that a page is put together from. Every text that was read from a file is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpkfc.report.numbers import plain
from dpkfc.report.page_card import card_html, definition_table, not_protected
from dpkfc.report.page_group import Group, Look
from dpkfc.report.page_plots import Plot
from dpkfc.report.page_read import Chart, Contents, Sheet, Shown
from dpkfc.report.page_text import delta_text, epsilon_text, escaped, percent

__all__ = [
    "chart", "commands", "counted", "figure", "method_boxes", "notice", "paragraph", "run_details", "run_table", "section",
    "sheets", "validation_warning",
]  # fmt: skip

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


def chart(one: Chart, figures: Sequence[str]) -> str:
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
