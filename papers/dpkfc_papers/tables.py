"""Published cells next to ours: which run, the numbers of both, and a verdict by a stated rule."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dpkfc.app.html.read import best_trials
from dpkfc.app.recipes.catalogue import RECIPES
from dpkfc.app.run_folder import placed
from dpkfc.app.settings import ConfigError, nearest, tomllib
from dpkfc.app.tuning.pool import Console, Listed, Place, StudyProgress, Task, drive, minutes_left
from dpkfc.app.tuning.runs import Plain, Run, Store, StudyError
from dpkfc.app.tuning.tune import expected_seconds, reported, settings_text, spread

# --------------------------------------------------------------------------------------------------
# Tables of the papers: the printed numbers, and the run that stands for each, or why there is none.

NOT_PRINTED = "–"  # of a point that a plot shows and no text gives
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Published:
    """A printed number: its mean and, if known, its standard deviation over seeds.

    The mean of a plot is not a number.
    """

    mean: float
    std: float | None
    text: str

    @classmethod
    def parse(cls, text: str) -> Published:
        """A number as it is printed, such as "91.7 ± 0.2", or `NOT_PRINTED`.

        Raises:
            StudyError: it is none.
        """
        if text == NOT_PRINTED:
            return cls(math.nan, None, text)
        found = _NUMBER.fullmatch(text)
        if found is None:
            raise StudyError(f"{text!r} is no printed number; write it as 91.7 or 91.7 ± 0.2")
        return cls(float(found[1]), None if found[2] is None else float(found[2]), text)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table.

    Attributes:
        row: label of the method.
        column: label of what varies.
        published: as printed.
        recipe: of the run; empty where there is none.
        method: of the run.
        settings: of the run, without what tuning adds.
        tuned: the arms, by name, of a tuning study whose settings are taken where they are known.
        needs: what the run needs beyond two cores; empty for nothing.
        not_run: why there is no run; empty where there is one.
        timed: a measured ratio of step times to compare it with, by its name in
            `benchmarks/results/speed.json`.
    """

    row: str
    column: str
    published: Published
    recipe: str = ""
    method: str = ""
    settings: Mapping[str, Plain]
    tuned: str = ""
    needs: str = ""
    not_run: str = ""
    timed: str = ""

    @property
    def here(self) -> bool:
        """Whether a few cores are enough to run it."""
        return not self.not_run and not self.needs

    @property
    def command(self) -> str:
        """Return the `dpkfc train` command of its run, empty where there is no run.

        FILE stands for images of another recipe.
        """
        if self.not_run:
            return ""
        given = {
            name: "FILE" if str(value).startswith("@") else value
            for name, value in self.settings.items()
        }
        flags = [
            f"--{name.replace('_', '-')} {value:g}"
            if isinstance(value, float)
            else f"--{name.replace('_', '-')} {value}"
            for name, value in given.items()
        ]
        return " ".join([f"dpkfc train --recipe {self.recipe} --method {self.method}", *flags])

    def run(self, tuned: Mapping[str, Plain], seed: int) -> Run:
        """The run of a seed, on the test set."""
        return Run.of(
            self.recipe, self.method, {**self.settings, **tuned}, seed=seed, evaluate_on="test"
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a paper.

    Attributes:
        name: as of `dpkfc reproduce NAME`.
        title: paper, number and subject.
        seeds: runs behind a printed number.
        accounting: accountant, sampler, δ and σ of the paper, where known.
        note: what else a reader must know.
        unit: of all its numbers; per cent, or else no accuracies.
        cells: row by row.
    """

    name: str
    title: str
    seeds: int
    accounting: str
    note: str
    unit: str = "%"
    cells: tuple[Cell, ...]

    @property
    def why_not(self) -> str:
        """The commonest reason why none of its cells can be run here; empty where one can."""
        reasons = Counter(cell.not_run or f"needs {cell.needs}" for cell in self.cells)
        return "" if any(cell.here for cell in self.cells) else reasons.most_common(1)[0][0]

    def select(self, columns: Sequence[str]) -> list[Cell]:
        """The cells of some columns, by their labels; all where none is given.

        Raises:
            StudyError: a column that the table does not have; those that it has are listed.
        """
        known = list(dict.fromkeys(cell.column for cell in self.cells))
        if unknown := [column for column in columns if column not in known]:
            raise StudyError(
                f"table {self.name} has no column {unknown[0]!r}; it has: {' | '.join(known)}"
            )
        return [cell for cell in self.cells if not columns or cell.column in columns]


def names() -> list[str]:
    """All tables."""
    folder = resources.files("dpkfc_papers").joinpath("printed")
    return sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )


def load(name: str) -> Table:
    """A table by its name.

    Raises:
        StudyError: there is none; the nearest one is named.
    """
    if name not in names():
        raise StudyError(
            f"unknown table {name!r}; {nearest(name, names())} (dpkfc reproduce --list shows all)"
        )
    text = resources.files("dpkfc_papers").joinpath("printed", f"{name}.toml").read_text("utf-8")
    content = tomllib.loads(text)
    columns = {column["key"]: column for column in content["column"]}
    cells = []
    for row in content["row"]:
        order = [key for key in columns if key in row["values"]]
        if len(order) < len(row["values"]):
            raise StudyError(
                f"table {name}: row {row['label']!r} has a value of a column that is not declared"
            )
        cells += [_cell(content, columns[key], row, key) for key in order]
    return Table(
        name=name,
        title=content["title"],
        seeds=content["seeds"],
        accounting=content["accounting"],
        note=content["note"],
        unit=content.get("unit", "%"),
        cells=tuple(cells),
    )


def _cell(
    table: Mapping[str, Any], column: Mapping[str, Any], row: Mapping[str, Any], key: str
) -> Cell:
    levels = (table, column, row)
    settings: dict[str, Plain] = {}
    for level in levels:
        settings |= level.get("settings", {})
    settings |= row.get("by_column", {}).get(key, {})
    recipe = next((level["recipe"] for level in reversed(levels) if "recipe" in level), "")
    reason = row.get("not_run", "")
    cell = Cell(
        row=row["label"],
        column=column["label"],
        published=Published.parse(row["values"][key]),
        recipe=recipe,
        method=row.get("method", ""),
        settings=settings,
        tuned=row.get("tuned", ""),
        needs=next((level["needs"] for level in reversed(levels) if "needs" in level), ""),
        not_run=reason if isinstance(reason, str) else reason.get(key, ""),
        timed=row.get("timed", ""),
    )
    if cell.published.text == NOT_PRINTED and not cell.not_run:
        raise StudyError(
            f"{cell.row}, {cell.column}: a point that is not printed needs a reason, for no"
            " verdict can be given"
        )
    return cell if cell.not_run else _checked(cell)


def _checked(cell: Cell) -> Cell:
    """The cell, with the reason where its run cannot be made in this version."""
    if not cell.recipe or cell.recipe not in RECIPES:
        return replace(
            cell,
            not_run=f"recipe missing: {cell.recipe}" if cell.recipe else "no run is mapped to it",
        )
    try:
        cell.run({}, 0).config()
    except ConfigError as error:
        return replace(cell, not_run=f"settings: {error}")
    return cell


# --------------------------------------------------------------------------------------------------
# Ratios of step times next to a printed one: what `benchmarks/speed.py` has measured, and on what
# machine.

# of a checkout; a package has none
SHIPPED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "speed.json"


@dataclass(frozen=True)
class Timed:
    """A ratio of the times of two kinds of step, with refreshes, and where it was measured."""

    ratio: float
    where: str


def read_speed(path: Path | None) -> Mapping[str, Any]:
    """Return results of `benchmarks/speed.py`, by default those of the checkout, if any.

    Raises:
        StudyError: the file is not there, or holds no such results.
    """
    if path is None and not SHIPPED.is_file():
        return {}
    path = path or SHIPPED
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StudyError(
            f"--speed {path} cannot be read ({error.strerror or error}); benchmarks/speed.py"
            " writes it"
        ) from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("models"), dict):
        raise StudyError(f"--speed {path} holds no results of benchmarks/speed.py")
    return content


def timed(what: str, results: Mapping[str, Any]) -> Timed | None:
    """A ratio by its name, "MODEL: CONTENDER / CONTENDER"; None where it was not measured."""
    model, _, ratio = what.partition(": ")
    entry = results.get("models", {}).get(model, {})
    found = entry.get("paired", {}).get(ratio)
    # with quartiles, or of an older file without
    value = found.get("ratio") if isinstance(found, Mapping) else found
    if value is None:
        return None
    own, every = (
        entry.get("contenders", {}).get(ratio.partition(" / ")[0], {}),
        entry.get("setting", {}).get("every"),
    )
    amortised = bool(every) and "refresh_ms" in own
    value *= 1 + own["refresh_ms"] / every / own["median_ms"] if amortised else 1.0
    machine = entry.get("hardware", {})
    refreshed = f", curvature every {every} steps" if amortised else ""
    told = (
        f"{entry['title']}, batches of {entry['batch_size']}{refreshed}, on"
        f" {machine.get('cpu', 'an unknown processor')}, "
    )
    return Timed(
        float(value),
        told + f"{machine.get('threads', '?')} threads, torch {machine.get('torch', '?')}",
    )


# --------------------------------------------------------------------------------------------------

LEAST = 0.3
RULE = (
    "The tolerance is two standard errors of the difference of the means, at least 0.3 points."
    " better: our mean is above the published one by more than the tolerance; reproduced: within"
    " it; not reproduced: below by more. A missing published deviation is taken to be ours."
)
NOT_YET = "not yet run"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A published cell and ours.

    Attributes:
        cell: of the table.
        values: ours in percent, one a seed.
        verdict: "reproduced", "better", "not reproduced", "not run (why)", or of a ratio of times
            "no verdict (what was timed)".
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
    return (
        "better" if above > tolerance else "reproduced" if above >= -tolerance else "not reproduced"
    )


# settings tuned under another do not fit
_PROTOCOL = (
    "delta",
    "epochs",
    "steps",
    "expected_batch_size",
    "sampler",
)


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
                    raise StudyError(
                        f"{store.path} and another file of results differ in run {row['hash']};"
                        " give one of them"
                    )
                self.rows.append(row)

    @functools.cached_property
    def _trials(self) -> list[tuple[str, dict[str, Any], float, dict[str, Any]]]:
        """Full trials: arm, protocol, ε and row."""
        full = [
            row
            for row in self.rows
            if row["measured_on"] == "validation" and not row.get("tag", {}).get("pruned")
        ]
        runs = [(row, Run.stored(row)) for row in full if "arm" in row.get("tag", {})]
        return [
            (row["tag"]["arm"], _protocol(run), run.default("epsilon"), row) for row, run in runs
        ]

    def settings(self, cell: Cell) -> dict[str, Plain]:
        """Return the settings of the best full trial of the cell's arm and protocol, or none.

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
            raise StudyError(
                f"{cell.row}, {cell.column}: tuned at ε = {at}, and not at {epsilon:g}; give one"
                " study's results"
            )
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
    """Run the cells of tables that can run here; write `NAME.json` and `NAME.md` for each.

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
        budget_minutes: no cell is started that would not end in time, and those that run when it is
            up are stopped.
        console: where progress is drawn.
        speed: results of `benchmarks/speed.py`; None for those of the checkout, where there are
            some.

    Raises:
        StudyError: an unknown table or column, no seeds, a file that cannot be used, or a full
            disk.
        KeyboardInterrupt: interrupted; reports of what has finished are written before.
    """
    left = minutes_left(budget_minutes)
    if not seeds:
        raise StudyError("seeds = 0: every cell needs one run or more")
    tables = [load(name) for name in names]
    missing = next((path for path in tuned if not path.is_file()), None)
    if missing is not None:
        raise StudyError(
            f"{missing} is no results file of a tuning study; give the results.json of `dpkfc tune`"
        )
    tuning, times = Tuning(Store(path) for path in tuned), read_speed(speed)
    cells = [
        cell
        for table in tables
        for cell in table.select(columns)
        if not cell.not_run and (everything or not cell.needs)
    ]
    tasks = [
        Task(cell.run(tuning.settings(cell), seed), label=f"{cell.row}, {cell.column}")
        for seed in seeds
        for cell in cells
    ]
    with Store(results or folder / "results.json") as store:
        source = Listed(tasks, store, lambda run: tuning.row(run) is not None)
        if left() != 0:
            source.leave_out_what_has_no_data(data_dir)
        found: dict[str, list[Outcome]] = {}

        def report() -> None:
            for table in tables:
                found[table.name] = outcomes(
                    table, store, tuning, seeds, source.failures, times=times
                )
                _write(folder, table, found[table.name])

        with (
            reported(report),
            StudyProgress(source.total, done=source.done_before, console=console) as progress,
        ):
            drive(
                source,
                Place(folder, data_dir),
                workers=workers,
                budget_minutes=left(),
                expected=expected_seconds(store),
                watcher=progress,
            )
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
            found.append(_explain_missing_run(cell, times or {}))
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


def _explain_missing_run(cell: Cell, times: Mapping[str, Any]) -> Outcome:
    """A ratio of times where one was measured, or else why nothing was."""
    ours = timed(cell.timed, times) if cell.timed else None
    if ours is None:
        return Outcome(cell=cell, verdict=f"not run ({cell.not_run})", settings={})
    return Outcome(
        cell=cell, values=[ours.ratio], verdict=f"no verdict (ours: {ours.where})", settings={}
    )


def _outcome(
    table: Table, cell: Cell, chosen: Mapping[str, Plain], rows: Sequence[Mapping[str, Any]]
) -> Outcome:
    values = [100 * row["accuracy"] for row in rows]
    first = rows[0]
    accounting = (
        f"{first['accountant'].upper()}, {first['sampler']}, δ = {first['delta']:g},"
        f" {first['steps']:,} steps"
    )
    return Outcome(
        cell=cell,
        values=values,
        verdict=verdict(cell.published, table.seeds, values),
        settings=chosen,
        sigma=first["noise_multiplier"],
        epsilon=max(row["epsilon"] for row in rows),
        accounting=accounting,
    )


def markdown(table: Table, found: Sequence[Outcome]) -> str:
    """A table for people: published, ours, σ and verdict of every cell."""
    unit = f" {table.unit}" if table.unit else ""
    head = [
        "method",
        "setting",
        f"published{unit}",
        f"ours{unit} (seeds)",
        "σ, ours",
        "verdict",
        "settings",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in found:
        ours = f"{one.ours} ({len(one.values)})" if one.values else "–"
        sigma = "–" if one.sigma is None else f"{one.sigma:.4f}"
        own = "the recipe's" if one.values and one.cell.recipe else ""
        chosen = f"tuned: {settings_text(one.settings)}" if one.settings else own
        chosen = (
            f"`{one.cell.command}`"
            if one.cell.needs and one.cell.command and not one.values
            else chosen
        )
        cells = [
            one.cell.row,
            one.cell.column,
            one.cell.published.text,
            ours,
            sigma,
            one.verdict,
            chosen,
        ]
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
        "kind": "dpkfc table",
        "version": 1,
        "name": table.name,
        "title": table.title,
        "accounting": table.accounting,
        "note": table.note,
        "unit": table.unit,
        "rule": _rule(found),
        "cells": [
            {
                "row": one.cell.row,
                "column": one.cell.column,
                "published": one.cell.published.text,
                "values": list(one.values),
                "ours": one.ours,
                "sigma": one.sigma,
                "epsilon": one.epsilon,
                "accounting": one.accounting,
                "settings": dict(one.settings),
                "verdict": one.verdict,
                "recipe": one.cell.recipe,
                "method": one.cell.method,
                "command": one.cell.command,
            }
            for one in found
        ],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    placed(folder / f"{table.name}.json", lambda part: part.write_text(text, "utf-8"))
    page = f"# {table.title}\n\n{markdown(table, found)}\n"
    placed(folder / f"{table.name}.md", lambda part: part.write_text(page, "utf-8"))


# --------------------------------------------------------------------------------------------------
# Smoke runs of tables: every recipe, method and setting of their cells for three steps, to see that
# all goes together.

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
        said: `RAN`, "not yet run", "no run: why" where the table has none, "no data: why", or
            "failed: why".
    """

    table: str
    row: str
    recipe: str
    said: str

    @property
    def failed(self) -> bool:
        """Whether something is amiss."""
        return self.said.startswith("failed")


def run_small(
    tables: Sequence[Table],
    folder: Path,
    *,
    columns: Sequence[str] = (),
    data_dir: str = "",
    workers: int = 1,
    budget_minutes: float | None = None,
    console: Console | None = None,
) -> list[Tried]:
    """Run cells of tables in small, also those that need many cores.

    Finished cells are not run again.

    Args:
        tables: whose cells are tried.
        folder: for results and ledgers, kept apart from others in `FOLDER` below it. No report is
            written.
        columns: whose cells are tried; all where none is given.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        workers: cells at once.
        budget_minutes: no cell is started that would not end in time, and those that run when it is
            up are stopped.
        console: where progress is drawn.

    Raises:
        StudyError: an unknown column, a folder that cannot be used, or a full disk.
    """
    small = {
        (table.name, cell.row, _small(cell)): cell
        for table in tables
        for cell in table.select(columns)
    }
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

        def describe(run: Run | None, cell: Cell) -> str:
            if run is None:
                return f"no run: {cell.not_run}"
            if why := wrong.get(run):
                return f"failed: {why}"
            if why := without.get(run.hash):
                return f"no data: {why}"
            why = source.failures.get(run.hash)
            return f"failed: {why}" if why else RAN if store.get(run) is not None else "not yet run"

        found = [
            Tried(name, row, cell.recipe, describe(run, cell))
            for (name, row, run), cell in small.items()
        ]
    return list(dict.fromkeys(found))


def _small(cell: Cell) -> Run | None:
    """The run of a cell in small, at an ε that all columns share; None where the cell has none."""
    if cell.not_run:
        return None
    common: dict[str, Plain] = {
        "smoke": True,
        **({"epsilon": 1.0} if "epsilon" in cell.settings else {}),
    }
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
