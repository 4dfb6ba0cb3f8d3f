"""The trials of several searches as cells, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from dpkfc.app.tuning.pool import Fits
from dpkfc.app.tuning.runs import Row, Run
from dpkfc.app.tuning.search import Search
from dpkfc.app.tuning.study_progress import Task

# Seed of tuning runs; tests have other seeds.
SEED = 100
# Trials of an arm before the next arm has its turn.
BLOCK = 5


@dataclass(eq=False)
class Trials:
    """Gives the trials of several searches as cells: five of each, then five more of each.

    Attributes:
        searches: one an arm.
        keep: is also given the row of every trial that ends.
        turn: keeps other processes of the study from choosing a trial meanwhile.
    """

    searches: Sequence[Search]
    keep: Callable[[Run, Row], None] | None = None
    turn: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended."""
        return all(search.is_over for search in self.searches)

    @property
    def failures(self) -> dict[str, str]:
        """Trials that could not be run, now or in an earlier call, and why."""
        failures = {}
        for search in self.searches:
            for key, why in search.failures().items():
                failures[f"{search.arm.label}, trial {key}"] = why
        return failures

    def rows(self) -> dict[str, Row]:
        """Return the rows of all trials that have ended, by the hash of their run."""
        rows: dict[str, Row] = {}
        for search in self.searches:
            rows |= search.rows()
        return rows

    def next(self, fits: Fits) -> Task | None:
        """Return the next trial of the search that has started the fewest blocks."""
        with self.turn():
            return self._choose(fits)

    def _choose(self, fits: Fits) -> Task | None:
        for search in self.searches:
            search.repeat_lost_trials()
        waiting = [search for search in self.searches if search.started < search.trials]
        if not waiting:
            return None
        search = min(waiting, key=lambda search: search.started // BLOCK)
        if not fits(search.run({}, seed=SEED, evaluate_on="validation")):
            return None
        number, run = search.ask()
        return Task(run, (search, number), search.halving(number), search.arm.name)

    def take_row(self, task: Task, row: Row, ended: bool) -> None:
        """Store a trial."""
        search, number = task.tag
        tag = {
            "search": search.name,
            "arm": search.arm.name,
            "params": search.params_of(number),
            "pruned": ended,
        }
        row = {**row, "tag": tag}
        search.tell(number, row, ended)
        if self.keep is not None:
            self.keep(task.run, row)

    def take_failure(self, task: Task, reason: str, *, lost: bool) -> None:
        """Count a trial that cannot be run, without a word on its arm; try a lost one again."""
        search, number = task.tag
        end = search.lose if lost else search.fail
        end(number, reason)
