"""Smoke runs of tables: every recipe, method and setting of their cells for three steps, to see that all goes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpkfc.recipes.config import ConfigError
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.listed import Listed
from dpkfc.studies.pool import Place, Task, drive
from dpkfc.studies.progress import Console, StudyProgress
from dpkfc.studies.published import Cell, Table
from dpkfc.studies.store import Store

__all__ = ["FOLDER", "RAN", "SAYS", "Tried", "tried"]

FOLDER = "smoke"
RAN = "ran"
SAYS = "A few steps on a slice of the data: whether it runs. No number is meant, and none is shown."


@dataclass(frozen=True)
class Tried:
    """What became of the smoke run of cells of one row that differ in ε alone.

    Attributes:
        table: by its name.
        row: label of the method.
        recipe: of the run; empty where there is none.
        said: `RAN`, "not yet run", "no run: why" where the table has none, "no data: why", or "failed: why".
    """

    table: str
    row: str
    recipe: str
    said: str

    @property
    def failed(self) -> bool:
        """Whether something is amiss."""
        return self.said.startswith("failed")


def tried(
    tables: Sequence[Table],
    folder: Path,
    *,
    columns: Sequence[str] = (),
    data_dir: str = "",
    workers: int = 1,
    budget_minutes: float | None = None,
    console: Console | None = None,
) -> list[Tried]:
    """Run cells of tables in small, those that need more than a few cores too; finished ones are not run again.

    Args:
        tables: whose cells are tried.
        folder: for results and ledgers, kept apart from others in `FOLDER` below it. No report is written.
        columns: whose cells are tried; all where none is given.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        workers: cells at once.
        budget_minutes: no cell is started that would not end in time, and those that run when it is up are stopped.
        console: where progress is drawn.

    Raises:
        StudyError: an unknown column, a folder that cannot be used, or a full disk.
    """
    small = {(table.name, cell.row, _small(cell)): cell for table in tables for cell in table.of(columns)}
    wrong = {run: why for _, _, run in small if run is not None and (why := _wrong(run))}
    tasks = [Task(run, label=row) for _, row, run in small if run is not None and run not in wrong]
    place = Place(folder / FOLDER, data_dir)
    with Store(place.folder / "results.json") as store:
        source = Listed(tasks, store)
        if budget_minutes != 0:
            source.leave_out_what_has_no_data(data_dir, parts=True)
        without = dict(source.failures)
        with _Watched(store, source.total, done=source.done_before, console=console) as progress:
            drive(source, place, workers=workers, budget_minutes=budget_minutes, watcher=progress)

        def said(run: Run | None, cell: Cell) -> str:
            if run is None:
                return f"no run: {cell.not_run}"
            if why := wrong.get(run):
                return f"failed: {why}"
            if why := without.get(run.hash):
                return f"no data: {why}"
            why = source.failures.get(run.hash)
            return f"failed: {why}" if why else RAN if store.get(run) is not None else "not yet run"

        found = [Tried(name, row, cell.recipe, said(run, cell)) for (name, row, run), cell in small.items()]
    return list(dict.fromkeys(found))


def _small(cell: Cell) -> Run | None:
    """The run of a cell in small, at an ε that all columns share; None where the cell has none."""
    if cell.not_run:
        return None
    common: dict[str, Plain] = {"smoke": True, **({"epsilon": 1.0} if "epsilon" in cell.settings else {})}
    return replace(cell, settings={**cell.settings, **common}).run({}, 0)


def _wrong(run: Run) -> str:
    """Why a run cannot be made; empty where it can."""
    try:
        run.config()
    except ConfigError as error:
        return str(error)
    return ""


class _Watched(StudyProgress):
    """Progress that shows no number of a run that says nothing."""

    def __init__(self, store: Store, total: int, *, done: int, console: Console | None) -> None:
        super().__init__(total, done=done, console=console)
        self._store = store

    def finished(self, task: Task, outcome: str) -> None:
        """A cell has ended."""
        super().finished(task, outcome if self._store.get(task.run) is None else RAN)
