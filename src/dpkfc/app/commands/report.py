"""Define `dpkfc report`: one HTML page of run folders and tuning studies."""

from __future__ import annotations

from pathlib import Path

from dpkfc.terminal import print_error, print_line


def report(
    runs: list[Path],
    /,
    *,
    out: Path = Path("report.html"),
    title: str = "Report of private training runs",
) -> None:
    """Write one HTML page of run folders and tuning studies (RUNS).

    Args:
        runs: Run folders, folders of them, and tune.json files of `dpkfc tune`.
        out: The page; an earlier report is replaced.
        title: Heading of the page.
    """
    from dpkfc.app.html.page import write_page
    from dpkfc.app.html.texts import count_text
    from dpkfc.report.text import plain

    contents = write_page(runs, out, title=title)
    for path, why in contents.broken:
        print_error(f"not shown: {plain(path)}: {why}")
    runs_read = count_text(len(contents.runs), "run")
    studies_read = count_text(len(contents.studies), "tuning report")
    print_line(f"report: {out} ({runs_read}, {studies_read})")
