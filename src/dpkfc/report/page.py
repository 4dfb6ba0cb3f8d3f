"""One HTML page of runs and studies that holds all it needs: nothing is fetched when it is looked at."""

from __future__ import annotations

import base64
import hashlib
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path

from dpkfc.report import page_parts as parts
from dpkfc.report.page_group import Group, Look, grouped, looks, panels
from dpkfc.report.page_plots import Plot, accuracy, curvature, learning, sensitivity, spending
from dpkfc.report.page_read import Chart, Contents, Departures, Shown, read_all
from dpkfc.report.page_text import embedded, escaped
from dpkfc.report.run_folder import RunFolderError, placed

__all__ = ["build", "write_page"]

GENERATOR = "dpkfc report"
_MOST_FOLDERS = 60


@dataclass
class _Drawn:
    """Figures of a page by the id of their place."""

    plots: dict[str, Plot] = field(default_factory=dict)

    def place(self, plot: Plot) -> str:
        name = f"plot-{len(self.plots) + 1}"
        self.plots[name] = plot
        return parts.figure(name, plot)


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
        "notice": parts.notice(contents),
        "methods": parts.method_boxes(list(look.values())),
        "accuracy": _accuracy(groups, look, drawn),
        "learning": _learning(groups, look, drawn),
        "table": parts.run_table(groups, look),
        "sheets": parts.sheets(contents.sheets),
        "sensitivity": _charts(contents.charts, look, drawn),
        "runs": _folders(contents.runs, look, drawn),
        "commands": parts.commands(groups, look),
    }
    counts = f"{parts.counted(len(contents.runs), 'run')}, {parts.counted(len(look), 'method')}"
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
        shown.append(parts.validation_warning())
    return parts.section("accuracy", "Accuracy against ε", shown, wide=True)


def _learning(groups: Sequence[Group], look: Mapping[str, Look], drawn: _Drawn) -> str:
    shown = []
    for panel in panels(groups):
        shown += [drawn.place(plot) for plot in learning(panel, look)]
        spent = spending(panel, look)
        shown += [] if spent is None else [drawn.place(spent)]
    return parts.section("learning", "Learning curves", shown)


def _charts(charts: Sequence[Chart], look: Mapping[str, Look], drawn: _Drawn) -> str:
    shown = [parts.chart(chart, [drawn.place(plot) for plot in sensitivity(chart.maps, look)]) for chart in charts]
    return parts.section("sensitivity", "Accuracy over settings", shown, grid=False)


def _folders(runs: Sequence[Shown], look: Mapping[str, Look], drawn: _Drawn) -> str:
    """Card, curvature and commands of each run folder."""
    shown, held = [], [run for run in runs if run.card is not None]
    for run in held[:_MOST_FOLDERS]:
        plots = curvature(run.figures, look[run.method]) if run.figures else []
        shown.append(parts.run_details(run, look[run.method], [drawn.place(plot) for plot in plots]))
    more = len(held) - _MOST_FOLDERS
    note = parts.paragraph(f"{more} more run folders are in the table only.") if more > 0 else ""
    return parts.section("runs", "Privacy cards and curvature of each run", [*shown, note] if shown else [], grid=False)


def _asset(name: str) -> str:
    return resources.files("dpkfc.report").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _version() -> str:
    try:
        return metadata.version("dpkfc")
    except metadata.PackageNotFoundError:
        return ""
