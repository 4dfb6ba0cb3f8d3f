"""Define the command `dpkfc reproduce`: tables of the papers next to ours, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpkfc.app.command_options import Budget, DataDir, Quiet, Workers
from dpkfc.app.tuning.runs import StudyError
from dpkfc.terminal import open_console, resumable


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(reproduce)


def reproduce(
    table: Annotated[
        list[str] | None, typer.Argument(help="Tables and figures, as --list names them.")
    ] = None,
    *,
    every: Annotated[
        bool, typer.Option("--list", help="Name the tables, and how much of each can be run here.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Of tables: this column alone; may be given several times."),
    ] = None,
    budget: Budget = None,
    workers: Workers = None,
    seeds: Annotated[
        int, typer.Option(help="Of tables: runs of every cell, each with its own initial weights.")
    ] = 3,
    tuned: Annotated[
        list[Path] | None, typer.Option(help="Results of a tuning study, whose settings are taken.")
    ] = None,
    speed: Annotated[
        Path | None, typer.Option(help="Results of benchmarks/speed.py, for `throughput`.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also cells that ask for more: see --list.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="In small, to see that it runs; of tables no number.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of results and reports; taken up again.")
    ] = Path("runs/reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="File of the results; left out: below --out.")
    ] = None,
    data_dir: DataDir = "",
    quiet: Quiet = False,
) -> None:
    """Show the tables of the papers next to ours: published, ours, and a verdict by a rule.

    Figures of the papers are measured anew.

    A stopped call goes on with the same --out. Cells that cannot be run here say why. --budget 0
    runs nothing and shows what has been run.
    """
    from dpkfc.app.tuning.pool import minutes_left, worker_count
    from dpkfc_papers import federated_study as federated
    from dpkfc_papers.figures import reproduce_figures

    console, columns, left = open_console(), column or [], minutes_left(budget)
    if every:
        console.print(_published_tables())
        return
    tables, figures, with_federated = _kinds(table or [], columns, results=results)
    common: dict[str, Any] = {
        "data_dir": data_dir,
        "console": None if quiet else console,
        "workers": worker_count(workers),
    }
    kept, failed = common | {"results": results}, False
    with resumable(console, f"the same command goes on (reports so far: {out})"):
        if tables and smoke:
            failed = _show_smoke(
                tables, out, console, columns=columns, budget_minutes=left(), **common
            )
        elif tables:
            settings = {
                "seeds": range(seeds),
                "tuned": tuned or (),
                "everything": everything,
                "speed": speed,
            }
            _show_tables(tables, columns, out, console, budget_minutes=left(), **settings, **kept)
        if figures:
            _show_figures(
                reproduce_figures(figures, out, small=smoke, budget_minutes=left(), **kept), console
            )
        if with_federated:
            report = federated.run_study(
                federated.SMOKE if smoke else federated.STUDY,
                out,
                results=results,
                data_dir=data_dir,
                budget_minutes=left(),
                on_line=(lambda line: None) if quiet else console.print,
            )
            console.print(f"report: {report}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _kinds(
    names: list[str], columns: list[str], *, results: Path | None
) -> tuple[list[str], list[str], bool]:
    """Return tables, figures, and whether the federated study is named.

    Mistakes are reported before anything runs.

    Raises:
        StudyError: no name or an unknown one, an unknown column, or an option that does not go with
            a name.
    """
    from dpkfc.app.settings import nearest
    from dpkfc_papers.federated_study import NAME
    from dpkfc_papers.figures import FIGURES, find
    from dpkfc_papers.tables import load
    from dpkfc_papers.tables import names as of_tables

    if not names:
        raise StudyError("which table? dpkfc reproduce --list names them")
    known = [
        *of_tables(),
        *(name for figure in FIGURES.values() for name in (figure.name, *figure.also)),
        NAME,
    ]
    if unknown := [name for name in names if name not in known]:
        told = nearest(unknown[0], known)
        raise StudyError(
            f"unknown table or figure {unknown[0]!r}; {told} (dpkfc reproduce --list shows all)"
        )
    figures = [
        name for name in names if find(name) is not None and not (columns and name in of_tables())
    ]
    tables = [name for name in names if name in of_tables()]
    for name in tables:
        load(name).select(columns)
    if columns and len(tables) < len(names):
        raise StudyError(
            "--column is for tables; leave out"
            f" {next(name for name in names if name not in tables)!r}"
        )
    if results and NAME in names and set(names) != {NAME}:
        raise StudyError(
            f"--results is one file, and {NAME} has one of its own; give it a call of its own"
        )
    return tables, figures, NAME in names


def _show_smoke(names: list[str], out: Path, shown_on: Console, **more: Any) -> bool:
    """Run cells of tables for a few steps, show the outcomes, return whether one failed."""
    from dpkfc_papers.tables import SAYS, load, run_small

    found = run_small([load(name) for name in names], out, **more)
    shown = Table(title=f"smoke runs. {SAYS}", header_style="bold", title_justify="left")
    for column in ("table", "method", "recipe", "smoke run"):
        shown.add_column(column)
    for one in found:
        shown.add_row(one.table, one.row, one.recipe, one.said)
    shown_on.print(shown)
    return any(one.failed for one in found)


def _show_tables(
    names: list[str], columns: list[str], out: Path, shown_on: Console, **more: Any
) -> None:
    """Run cells of tables and show what became of them."""
    from dpkfc_papers.tables import reproduce as run_tables

    found = run_tables(names, out, columns=columns, **more)
    for name, cells in found.items():
        shown_on.print(
            _reproduced_table(
                name, [one for one in cells if not columns or one.cell.column in columns]
            )
        )
        shown_on.print(f"report: {out / name}.md", soft_wrap=True)


def _show_figures(made: dict[str, Any], console: Console) -> None:
    for name, figure in made.items():
        for line in [*map(str, figure.files), *(f"not run, {what}" for what in figure.missing)]:
            console.print(f"{name}: {line}", soft_wrap=True, highlight=False)


def _published_tables() -> Table:
    from dpkfc_papers import federated_study as federated
    from dpkfc_papers.figures import FIGURES
    from dpkfc_papers.tables import load, names

    shown = Table(header_style="bold")
    for column in ("name", "what it is", "cells", "run here"):
        shown.add_column(column)
    for name in names():
        table = load(name)
        here = sum(cell.here for cell in table.cells)
        shown.add_row(
            name, table.title, str(len(table.cells)), str(here) if here else f"0: {table.why_not}"
        )
    for figure in FIGURES.values():
        cells = str(len(figure.runs(False)))
        shown.add_row(figure.name, figure.title, cells, cells)
    cells = str(federated.STUDY.max_runs)
    shown.add_row(federated.NAME, federated.TITLE, cells, cells)
    return shown


def _reproduced_table(name: str, cells: list[Any]) -> Table:
    from dpkfc_papers.tables import load

    unit = load(name).unit
    shown = Table(title=name, header_style="bold", title_justify="left")
    for column in (
        "method",
        "setting",
        f"published {unit}".strip(),
        f"ours {unit}".strip(),
        "verdict",
    ):
        shown.add_column(column)
    for one in cells:
        shown.add_row(one.cell.row, one.cell.column, one.cell.published.text, one.ours, one.verdict)
    return shown
