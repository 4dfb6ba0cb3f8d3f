"""Published cells beside ours: which run, the numbers of both, and a verdict by a stated rule."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.report.run_folder import placed
from dpkfc.report.winners import best_trials
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.clock import minutes_left
from dpkfc.studies.closing import reported
from dpkfc.studies.errors import StudyError
from dpkfc.studies.listed import Listed
from dpkfc.studies.pool import Place, Task, drive
from dpkfc.studies.progress import Console, StudyProgress
from dpkfc.studies.published import Cell, Published, Table, load
from dpkfc.studies.store import Store
from dpkfc.studies.timed import read_speed, timed
from dpkfc.studies.tune import expected_seconds
from dpkfc.studies.tuned import settings_text, spread

__all__ = ["RULE", "Outcome", "markdown", "outcomes", "reproduce", "verdict"]

LEAST = 0.3
RULE = (
    "The tolerance is two standard errors of the difference of the means, at least 0.3 points. better: our mean is above the "
    "published one by more than the tolerance; reproduced: within it; not reproduced: below by more. A missing published "
    "deviation is taken to be ours."
)
NOT_YET = "not yet run"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A published cell and ours.

    Attributes:
        cell: of the table.
        values: ours in percent, one a seed.
        verdict: "reproduced", "better", "not reproduced", "not run (why)", or of a ratio of times "no verdict (what was timed)".
        settings: chosen by tuning; empty where the recipe's own were taken.
        sigma: noise multiplier of our runs.
        epsilon: spent by our runs.
        accounting: of our runs.
    """

    cell: Cell
    values: Sequence[float] = ()
    verdict: str
    settings: Mapping[str, Plain]
    sigma: float | None = None
    epsilon: float | None = None
    accounting: str = ""

    @property
    def ours(self) -> str:
        """Mean ± sample standard deviation."""
        return spread(self.values)


def verdict(published: Published, seeds: int, values: Sequence[float]) -> str:
    """What our values say about a published one, by `RULE`.

    Args:
        published: in percent.
        seeds: runs behind it.
        values: ours in percent, at least one.
    """
    ours = statistics.stdev(values) if len(values) > 1 else 0.0
    theirs = ours if published.std is None else published.std
    tolerance = max(LEAST, 2 * math.sqrt(theirs**2 / max(1, seeds) + ours**2 / len(values)))
    above = statistics.mean(values) - published.mean
    return "better" if above > tolerance else "reproduced" if above >= -tolerance else "not reproduced"


_PROTOCOL = ("delta", "epochs", "steps", "expected_batch_size", "sampler")  # settings tuned under another do not fit


def _protocol(run: Run) -> dict[str, Any]:
    """What settings are tuned under; the rank of wide sides concerns K-FAC alone."""
    names = [*_PROTOCOL, "max_rank"] if run.default("preconditioner") == "kfac" else _PROTOCOL
    return {"recipe": run.recipe, **{name: run.default(name) for name in names}}


class Tuning:
    """Settings that tuning studies chose, and runs that they have already made.

    Args:
        stores: results of `dpkfc tune` or of the accuracy study.

    Raises:
        StudyError: two of them hold other figures of one run.
    """

    def __init__(self, stores: Iterable[Store] = ()) -> None:
        self.rows: list[dict[str, Any]] = []
        self._by_hash: dict[str, dict[str, Any]] = {}
        for store in stores:
            for row in store:
                known = self._by_hash.setdefault(row.get("hash", ""), row)
                if known["accuracy"] != row["accuracy"] and "hash" in row:
                    raise StudyError(f"{store.path} and another file of results differ in run {row['hash']}; give one of them")
                self.rows.append(row)

    @functools.cached_property
    def _trials(self) -> list[tuple[str, dict[str, Any], float, dict[str, Any]]]:
        """Full trials: arm, protocol, ε and row."""
        full = [row for row in self.rows if row["measured_on"] == "validation" and not row.get("tag", {}).get("pruned")]
        runs = [(row, Run.stored(row)) for row in full if "arm" in row.get("tag", {})]
        return [(row["tag"]["arm"], _protocol(run), run.default("epsilon"), row) for row, run in runs]

    def settings(self, cell: Cell) -> dict[str, Plain]:
        """Of the best full trial of the cell's arm under the cell's protocol, empty where it was not tuned so.

        Raises:
            StudyError: there are trials at several ε, and none at that of the cell.
        """
        wanted = cell.run({}, 0)
        protocol = _protocol(wanted)
        found: dict[float, list[dict[str, Any]]] = {}
        for arm, under, epsilon, row in self._trials:
            if arm in cell.tuned.split() and under == protocol:
                found.setdefault(epsilon, []).append(row)
        if not found:
            return {}
        epsilon = wanted.default("epsilon") if len(found) > 1 else next(iter(found))
        if epsilon not in found:
            at = ", ".join(f"{one:g}" for one in sorted(found))
            raise StudyError(f"{cell.row}, {cell.column}: tuned at ε = {at}, and not at {epsilon:g}; give one study's results")
        tests = [row for row in self.rows if row["measured_on"] == "test"]
        best = best_trials([*found[epsilon], *tests])
        return dict(max(best.values(), key=lambda row: row["accuracy"])["tag"]["params"])

    def row(self, run: Run) -> dict[str, Any] | None:
        """A run that was made there."""
        return self._by_hash.get(run.hash)


def reproduce(
    names: Sequence[str],
    folder: Path,
    *,
    results: Path | None = None,
    columns: Sequence[str] = (),
    data_dir: str = "",
    seeds: Sequence[int] = (0, 1, 2),
    tuned: Sequence[Path] = (),
    everything: bool = False,
    workers: int = 1,
    budget_minutes: float | None = None,
    console: Console | None = None,
    speed: Path | None = None,
) -> dict[str, list[Outcome]]:
    """Run the cells of tables that can be run here, and write `NAME.json` and `NAME.md` for each into a folder.

    Args:
        names: of tables.
        folder: for results, ledgers and reports; an earlier one is taken up again.
        results: file of the rows; None for `results.json` in the folder.
        columns: whose cells are run; all where none is given. Reports are of whole tables.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        seeds: of the runs, each with its own initial weights.
        tuned: results files of tuning studies.
        everything: also cells that need more than a few cores.
        workers: cells at once.
        budget_minutes: no cell is started that would not end in time, and those that run when it is up are stopped.
        console: where progress is drawn.
        speed: results of `benchmarks/speed.py`; None for those of the checkout, where there are some.

    Raises:
        StudyError: an unknown table or column, no seeds, a file that cannot be used, or a full disk.
        KeyboardInterrupt: interrupted; reports of what has finished are written before.
    """
    left = minutes_left(budget_minutes)
    if not seeds:
        raise StudyError("seeds = 0: every cell needs one run or more")
    tables = [load(name) for name in names]
    missing = next((path for path in tuned if not path.is_file()), None)
    if missing is not None:
        raise StudyError(f"{missing} is no results file of a tuning study; give the results.json of `dpkfc tune`")
    tuning, times = Tuning(Store(path) for path in tuned), read_speed(speed)
    cells = [cell for table in tables for cell in table.of(columns) if not cell.not_run and (everything or not cell.needs)]
    tasks = [
        Task(cell.run(tuning.settings(cell), seed), label=f"{cell.row}, {cell.column}") for seed in seeds for cell in cells
    ]
    with Store(results or folder / "results.json") as store:
        source = Listed(tasks, store, lambda run: tuning.row(run) is not None)
        if left() != 0:
            source.leave_out_what_has_no_data(data_dir)
        found: dict[str, list[Outcome]] = {}

        def report() -> None:
            for table in tables:
                found[table.name] = outcomes(table, store, tuning, seeds, source.failures, times=times)
                _write(folder, table, found[table.name])

        with reported(report), StudyProgress(source.total, done=source.done_before, console=console) as progress:
            drive(
                source, Place(folder, data_dir), workers=workers, budget_minutes=left(), expected=expected_seconds(store),
                watcher=progress,
            )  # fmt: skip
    return found


def outcomes(
    table: Table,
    store: Store,
    tuning: Tuning,
    seeds: Sequence[int],
    failures: Mapping[str, str] | None = None,
    *,
    times: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """Every cell of a table with what is known of it.

    Args:
        table: the published one.
        store: runs of this folder.
        tuning: settings that were chosen, and runs made there.
        seeds: of the runs.
        failures: by the hash of a run why it could not be made.
        times: from `read_speed`.
    """
    found = []
    for cell in table.cells:
        if cell.not_run:
            found.append(_without_a_run(cell, times or {}))
            continue
        chosen = tuning.settings(cell)
        runs = [cell.run(chosen, seed) for seed in seeds]
        rows = [row for run in runs if (row := store.get(run) or tuning.row(run)) is not None]
        failed = [reason for run in runs if (reason := (failures or {}).get(run.hash))]
        why = failed[0] if failed else f"needs {cell.needs}" if cell.needs else NOT_YET
        found.append(
            _outcome(table, cell, chosen, rows)
            if rows
            else Outcome(cell=cell, verdict=f"not run ({why})", settings=chosen)
        )
    return found


def _without_a_run(cell: Cell, times: Mapping[str, Any]) -> Outcome:
    """A ratio of times where one was measured, or else why nothing was."""
    ours = timed(cell.timed, times) if cell.timed else None
    if ours is None:
        return Outcome(cell=cell, verdict=f"not run ({cell.not_run})", settings={})
    return Outcome(cell=cell, values=[ours.ratio], verdict=f"no verdict (ours: {ours.where})", settings={})


def _outcome(table: Table, cell: Cell, chosen: Mapping[str, Plain], rows: Sequence[Mapping[str, Any]]) -> Outcome:
    values = [100 * row["accuracy"] for row in rows]
    first = rows[0]
    accounting = f"{first['accountant'].upper()}, {first['sampler']}, δ = {first['delta']:g}, {first['steps']:,} steps"
    return Outcome(
        cell=cell, values=values, verdict=verdict(cell.published, table.seeds, values), settings=chosen,
        sigma=first["noise_multiplier"], epsilon=max(row["epsilon"] for row in rows), accounting=accounting,
    )  # fmt: skip


def markdown(table: Table, found: Sequence[Outcome]) -> str:
    """A table for people: published, ours, σ and verdict of every cell."""
    unit = f" {table.unit}" if table.unit else ""
    head = ["method", "setting", f"published{unit}", f"ours{unit} (seeds)", "σ, ours", "verdict", "settings"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in found:
        ours = f"{one.ours} ({len(one.values)})" if one.values else "–"
        sigma = "–" if one.sigma is None else f"{one.sigma:.4f}"
        own = "the recipe's" if one.values and one.cell.recipe else ""
        chosen = f"tuned: {settings_text(one.settings)}" if one.settings else own
        chosen = f"`{one.cell.command}`" if one.cell.needs and one.cell.command and not one.values else chosen
        cells = [one.cell.row, one.cell.column, one.cell.published.text, ours, sigma, one.verdict, chosen]
        lines.append("| " + " | ".join(cells) + " |")
    accounting = sorted({one.accounting for one in found if one.accounting})
    notes = [f"Published: {table.accounting}." + (f" Note: {table.note}." if table.note else "")]
    notes += [f"Ours: {'; '.join(accounting)}."] if accounting else []
    if any(one.cell.needs and not one.cell.not_run for one in found):
        more = "also runs what needs more than a few cores, with its public images."
        notes.append(f"`dpkfc reproduce {table.name} --everything` {more}")
    return "\n".join([*lines, "", *notes, *filter(None, [_rule(found)])])


def _rule(found: Sequence[Outcome]) -> str:
    """The rule of the verdicts; empty where there is none to give."""
    return "" if found and all(one.verdict.startswith("no verdict") for one in found) else RULE


def _write(folder: Path, table: Table, found: Sequence[Outcome]) -> None:
    content = {
        "kind": "dpkfc table", "version": 1, "name": table.name, "title": table.title, "accounting": table.accounting,
        "note": table.note, "unit": table.unit, "rule": _rule(found),
        "cells": [
            {
                "row": one.cell.row, "column": one.cell.column, "published": one.cell.published.text, "values": list(one.values),
                "ours": one.ours, "sigma": one.sigma, "epsilon": one.epsilon, "accounting": one.accounting,
                "settings": dict(one.settings), "verdict": one.verdict, "recipe": one.cell.recipe, "method": one.cell.method,
                "command": one.cell.command,
            }
            for one in found
        ],
    }  # fmt: skip
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    placed(folder / f"{table.name}.json", lambda part: part.write_text(text, "utf-8"))
    page = f"# {table.title}\n\n{markdown(table, found)}\n"
    placed(folder / f"{table.name}.md", lambda part: part.write_text(page, "utf-8"))
