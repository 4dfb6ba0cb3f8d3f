"""Define `dpkfc report`: one HTML page of run folders and results files."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.html import count_text
from dpkfc.app.html.render import write_page
from dpkfc.app.tuning.runs import departures
from dpkfc.report.text import plain
from dpkfc.terminal import print_error, print_line


def report(
    runs: list[Path],
    /,
    *,
    out: Path = Path("report.html"),
    title: str = "Report of private training runs",
) -> None:
    """Write one HTML page of run folders and results files (RUNS).

    Args:
        runs: Run folders, folders of them, results files (*.json) of studies.
        out: The page; an earlier report is replaced.
        title: Heading of the page.
    """
    contents = write_page(runs, out, title=title, departures=departures)
    for path, why in contents.broken:
        print_error(f"not shown: {plain(path)}: {why}")
    shown = [count_text(len(contents.runs), "run"), count_text(len(contents.tables), "table")]
    if contents.charts:
        shown.append(count_text(len(contents.charts), "figure"))
    print_line(f"report: {out} ({', '.join(shown)})")
