"""Define `dpkfc reproduce`: tables of the papers next to ours, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from dpkfc.terminal import Whole, make_table, open_console, resumable


def register(app: App) -> None:
    """Add the commands to the command line."""
    app.command(reproduce)
    text = "Train the encoder of `SyntheticEncoder` anew, on synthetic images alone.\n\n"
    text += "A JSON file beside the weights has losses and seconds. Two cores would take days: "
    text += "lower --steps and --batch-size to try it."
    app.command(
        "dpkfc_papers.encoder:write_encoder",
        name="pretrain-encoder",
        help=text,
        help_epilogue="dpkfc pretrain-encoder encoder.safetensors --device cuda",
    )


def reproduce(
    table: list[str] | None = None,
    /,
    *,
    every: Annotated[bool, Parameter(name="--list")] = False,
    column: list[str] | None = None,
    budget: float | None = None,
    workers: Whole | None = None,
    seeds: Whole = 3,
    tuned: list[Path] | None = None,
    everything: bool = False,
    smoke: bool = False,
    out: Path = Path("runs/reproduce"),
    results: Path | None = None,
    data_dir: str = "",
    quiet: bool = False,
) -> None:
    """Show the tables of the papers next to ours: published, ours, and a verdict by a rule.

    Figures of the papers are measured anew.

    A stopped call goes on with the same --out. Cells that cannot be run here say why. --budget 0
    runs nothing and shows what has been run.

    Args:
        table: Tables and figures, as --list names them.
        every: Name the tables, and how much of each can be run here.
        column: Of tables: this column alone; may be given several times.
        budget: Minutes; what would not end in time is not started, else stopped.
        workers: Cells at once, one core each; left out: every core.
        seeds: Of tables: runs of every cell, each with its own initial weights.
        tuned: Results of a tuning study, whose settings are taken.
        everything: Also cells that ask for more: see --list.
        smoke: Of figures and the federated study: in small, to see that it runs.
        out: Folder of results and reports; taken up again.
        results: File of the results; left out: below --out.
        data_dir: Folder with the data sets; left out: $DPKFC_DATA, then Hugging Face datasets.
        quiet: No progress bar.
    """
    from dpkfc.app.tuning.pool import end_of, worker_count
    from dpkfc.app.tuning.runs import StudyError
    from dpkfc_papers import federated_study as federated
    from dpkfc_papers.federated_command import run_study
    from dpkfc_papers.figures import reproduce_figures

    console = open_console()
    columns = column or []
    end = end_of(budget)
    if every:
        console.print(_published_tables())
        return
    tables, figures, with_federated = _kinds(table or [], columns, results=results)
    if tables and smoke:
        raise StudyError(f"--smoke is for figures and {federated.NAME}; leave out {tables[0]!r}")
    common: dict[str, Any] = {
        "data_dir": data_dir,
        "console": None if quiet else console,
        "workers": worker_count(workers),
    }
    with resumable(f"the same command goes on (reports so far: {out})"):
        if tables:
            _show_tables(
                tables,
                columns,
                out,
                console,
                results=results,
                seeds=range(seeds),
                tuned=tuned or (),
                everything=everything,
                end=end,
                **common,
            )
        if figures:
            made = reproduce_figures(figures, out, results=results, small=smoke, end=end, **common)
            _show_figures(made, console)
        if with_federated:
            report = run_study(
                federated.SMOKE if smoke else federated.STUDY,
                out,
                results=results,
                data_dir=data_dir,
                end=end,
                on_line=(lambda line: None) if quiet else console.print,
            )
            console.print(f"report: {report}", soft_wrap=True)


def _kinds(
    names: list[str], columns: list[str], *, results: Path | None
) -> tuple[list[str], list[str], bool]:
    """Return tables, figures, and whether the federated study is named.

    Mistakes are reported before anything runs.

    Raises:
        StudyError: no name or an unknown one, an unknown column, or an option that does not go with
            a name.
    """
    from dpkfc.app.toml import nearest
    from dpkfc.app.tuning.runs import StudyError
    from dpkfc_papers.federated_study import NAME
    from dpkfc_papers.figures import FIGURE_OF
    from dpkfc_papers.tables import load
    from dpkfc_papers.tables import names as list_tables

    all_tables = list_tables()
    known = [*all_tables, NAME, *FIGURE_OF]
    tables = [name for name in names if name in all_tables]
    figures = [name for name in names if name in FIGURE_OF]
    if not names:
        raise StudyError("which table? dpkfc reproduce --list names them")
    for name in names:
        if name not in known:
            raise StudyError(
                f"unknown table or figure {name!r}; {nearest(name, known)} (dpkfc reproduce --list"
                " shows all)"
            )
    for name in names:
        if columns and name not in tables:
            raise StudyError(f"--column is for tables; leave out {name!r}")
    if results and NAME in names and set(names) != {NAME}:
        raise StudyError(
            f"--results is one file, and {NAME} has one of its own; give it a call of its own"
        )
    if columns:
        # A name of both is a table where a column is asked for.
        figures = []
        for name in tables:
            load(name).select(columns)
    return tables, figures, NAME in names


def _show_tables(
    names: list[str], columns: list[str], out: Path, shown_on: Console, **more: Any
) -> None:
    """Run cells of tables and show what became of them."""
    from dpkfc_papers.tables import reproduce as run_tables

    found = run_tables(names, out, columns=columns, **more)
    for name, cells in found.items():
        selected = [one for one in cells if not columns or one.cell.column in columns]
        shown_on.print(_reproduced_table(name, selected))
        shown_on.print(f"report: {out / name}.md", soft_wrap=True)


def _show_figures(made: dict[str, Any], console: Console) -> None:
    for name, figure in made.items():
        missing = [f"not run, {what}" for what in figure.missing]
        for line in [*map(str, figure.files), *missing]:
            console.print(f"{name}: {line}", soft_wrap=True, highlight=False)


def _published_tables() -> Table:
    from dpkfc_papers import federated_study as federated
    from dpkfc_papers.figures import FIGURES
    from dpkfc_papers.tables import load, names

    shown = make_table("name", "what it is", "cells", "run here")
    for name in names():
        table = load(name)
        here = sum(cell.here for cell in table.cells)
        reason = "" if here else f": {table.why_not}"
        shown.add_row(name, table.title, str(len(table.cells)), f"{here}{reason}")
    for figure in FIGURES.values():
        cells = str(len(figure.runs(False)))
        shown.add_row(figure.name, figure.title, cells, cells)
    cells = str(federated.STUDY.max_runs)
    shown.add_row(federated.NAME, federated.TITLE, cells, cells)
    return shown


def _reproduced_table(name: str, cells: list[Any]) -> Table:
    from dpkfc_papers.tables import load

    unit = load(name).unit
    numbers = [f"{whose} {unit}".strip() for whose in ("published", "ours")]
    shown = make_table("method", "setting", *numbers, "verdict", title=name)
    for one in cells:
        shown.add_row(one.cell.row, one.cell.column, one.cell.published.text, one.ours, one.verdict)
    return shown
