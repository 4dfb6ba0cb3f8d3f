"""Cells in a fixed order as a source of the pool: what tables and figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dpkfc.recipes.catalogue import find_recipe, run_config
from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.studies.cell import Run
from dpkfc.studies.pool import Task
from dpkfc.studies.store import Store

__all__ = ["Listed"]


class Listed:
    """Cells one after the other, each run once and none that is known.

    Args:
        tasks: in order; equal runs are one.
        store: takes every run, and knows those that it holds.
        known: whether a run was made elsewhere.

    Attributes:
        total: different cells.
        done_before: of these, known from the start.
        failures: why a run could not be made, by its hash.
    """

    def __init__(self, tasks: Iterable[Task], store: Store, known: Callable[[Run], bool] = lambda run: False) -> None:
        self._store = store
        wanted = {task.run.hash: task for task in tasks}
        self._left = [task for task in wanted.values() if store.get(task.run) is None and not known(task.run)]
        self.total, self.done_before = len(wanted), len(wanted) - len(self._left)
        self.failures: dict[str, str] = {}

    @property
    def recipes(self) -> list[str]:
        """Of the cells that are left."""
        return list(dict.fromkeys(task.run.recipe for task in self._left))

    def leave_out(self, recipe: str, reason: str) -> None:
        """Do not run the cells of a recipe."""
        self.failures |= {task.run.hash: reason for task in self._left if task.run.recipe == recipe}
        self._left = [task for task in self._left if task.run.recipe != recipe]

    def leave_out_what_has_no_data(self, data_dir: str, *, parts: bool = False) -> None:
        """Read every data set once: one that is missing is said in its cells, and the others are run.

        Args:
            data_dir: folder of the data sets.
            parts: whether files that hold a part of a set will do; otherwise that is said in its cells too.
        """
        for recipe in self.recipes:
            try:
                part = find_recipe(recipe).data(run_config({"recipe": recipe, "data_dir": data_dir})).part
            except DatasetError as error:
                self.leave_out(recipe, str(error))
                continue
            if part and not parts:
                self.leave_out(recipe, f"the files hold {part}, and the published number is of all")

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """The first cell that fits."""
        found = next((task for task in self._left if fits(task.run)), None)
        if found is not None:
            self._left.remove(found)
        return found

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Nothing that is seen on the way ends a run."""
        return True

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """Keep a run."""
        self._store.put(task.run, row)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Say so; the next call tries it again, whosever doing it was."""
        self.failures[task.run.hash] = reason
