"""The command `dpkfc report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpkfc.report.numbers import plain

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders of them, results files (*.json) of studies.")],
    *,
    out: Annotated[Path, typer.Option(help="The page; an earlier report is replaced.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Report of private training runs",
) -> None:
    """One HTML page of run folders and results files (RUNS): accuracy against ε, curves, curvature, privacy cards, commands.

    The page fetches nothing. What cannot be read is named, on the page too; the others are shown.
    """
    from dpkfc.report.page import write_page
    from dpkfc.report.page_parts import counted
    from dpkfc.studies.departures import departures

    contents = write_page(runs, out, title=title, departures=departures)
    console = Console(stderr=True)
    for path, why in contents.broken:
        console.print(f"dpkfc: not shown: {plain(path)}: {why}", markup=False, highlight=False, soft_wrap=True)
    shown = f"{counted(len(contents.runs), 'run')}, {counted(len(contents.sheets), 'table')}"
    shown += f", {counted(len(contents.charts), 'figure')}" if contents.charts else ""
    Console().print(f"report: {out} ({shown})", markup=False, highlight=False, soft_wrap=True)
