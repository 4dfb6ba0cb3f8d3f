"""Published cells next to ours: which run, the numbers of both, and a verdict by a stated rule."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from dpkfc.app.recipes.catalogue import RECIPES
from dpkfc.app.run_folder import write_text
from dpkfc.app.toml import ConfigError, nearest, tomllib
from dpkfc.app.tuning.pool import drive
from dpkfc.app.tuning.runs import Place, Plain, Row, Run, StudyError
from dpkfc.app.tuning.study_progress import StudyProgress, Task
from dpkfc.app.tuning.tune import expected_seconds, report_at_end
from dpkfc.app.tuning.tuned import plain_text, settings_text
from dpkfc_papers.public_examples import study_place
from dpkfc_papers.store import Listed, Store, best_trials
from dpkfc_papers.studies import harness

# --------------------------------------------------------------------------------------------------
# Tables of the papers: the printed numbers, and the run that stands for each, or why there is none.

Settings = Mapping[str, Plain]
# What a TOML or JSON file holds.
Content = Mapping[str, Any]
NOT_PRINTED = "–"  # of a point that a plot shows and no text gives
# The printed numbers, one file a table.
_PRINTED = resources.files("dpkfc_papers").joinpath("printed")
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
        """Read a number as it is printed, such as "91.7 ± 0.2", or `NOT_PRINTED`.

        Raises:
            StudyError: the text is not such a number.
        """
        if text == NOT_PRINTED:
            return cls(math.nan, None, text)
        match = _NUMBER.fullmatch(text)
        if match is None:
            raise StudyError(f"{text!r} is not a printed number; write it as 91.7 or 91.7 ± 0.2")
        mean, std = match.groups()
        return cls(float(mean), None if std is None else float(std), text)


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
    settings: Settings
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
        words = [f"dpkfc train --recipe {self.recipe} --method {self.method}"]
        for name, value in self.settings.items():
            text = plain_text(value)
            if text.startswith("@"):
                text = "FILE"
            words.append(f"--{name.replace('_', '-')} {text}")
        return " ".join(words)

    def run(self, tuned: Settings, seed: int) -> Run:
        """Return the run of a seed, on the test set."""
        settings = {**self.settings, **tuned}
        return Run.make(self.recipe, self.method, settings, seed=seed, evaluate_on="test")


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
        """Return the commonest reason why no cell can be run here; empty where one can."""
        if any(cell.here for cell in self.cells):
            return ""
        reasons = Counter(cell.not_run or f"needs {cell.needs}" for cell in self.cells)
        ((reason, _),) = reasons.most_common(1)
        return reason

    def select(self, columns: Sequence[str]) -> list[Cell]:
        """Return the cells of some columns, by their labels; all where no label is given.

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
    """Return the names of all tables."""
    files = [Path(path.name) for path in _PRINTED.iterdir()]
    return sorted(file.stem for file in files if file.suffix == ".toml")


def load(name: str) -> Table:
    """Return a table by its name.

    Raises:
        StudyError: no table has the name; the nearest one is named.
    """
    if name not in names():
        raise StudyError(
            f"unknown table {name!r}; {nearest(name, names())} (dpkfc reproduce --list shows all)"
        )
    text = _PRINTED.joinpath(f"{name}.toml").read_text("utf-8")
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


def _cell(table: Content, column: Content, row: Content, key: str) -> Cell:
    settings: dict[str, Plain] = {}
    recipe = needs = ""
    for level in (table, column, row):
        settings |= level.get("settings", {})
        recipe = level.get("recipe", recipe)
        needs = level.get("needs", needs)
    settings |= row.get("by_column", {}).get(key, {})
    reason = row.get("not_run", "")
    cell = Cell(
        row=row["label"],
        column=column["label"],
        published=Published.parse(row["values"][key]),
        recipe=recipe,
        method=row.get("method", ""),
        settings=settings,
        tuned=row.get("tuned", ""),
        needs=needs,
        not_run=reason if isinstance(reason, str) else reason.get(key, ""),
        timed=row.get("timed", ""),
    )
    if cell.published.text == NOT_PRINTED and not cell.not_run:
        raise StudyError(
            f"{cell.row}, {cell.column}: a point that is not printed needs a reason, for no"
            " verdict can be given"
        )
    return cell if cell.not_run else _check(cell)


def _check(cell: Cell) -> Cell:
    """Return the cell, with the reason where its run cannot be made in this version."""
    if not cell.recipe:
        return replace(cell, not_run="no run is mapped to it")
    if cell.recipe not in RECIPES:
        return replace(cell, not_run=f"recipe missing: {cell.recipe}")
    try:
        cell.run({}, 0).config()
    except ConfigError as error:
        return replace(cell, not_run=f"settings: {error}")
    return cell


# --------------------------------------------------------------------------------------------------
# Ratios of step times next to a printed one: what `benchmarks/speed.py` has measured, and on what
# machine.

# Of a checkout; a package has no such file.
SHIPPED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "speed.json"


@dataclass(frozen=True)
class Timed:
    """A ratio of the times of two kinds of step, with refreshes, and where it was measured."""

    ratio: float
    where: str


def read_speed() -> Content:
    """Return what `benchmarks/speed.py` has measured; empty in a package."""
    return json.loads(SHIPPED.read_text("utf-8")) if SHIPPED.is_file() else {}


def find_timing(what: str, results: Content) -> Timed | None:
    """Return a ratio by its name, "MODEL: CONTENDER / CONTENDER"; None without a measurement."""
    model, _, ratio = what.partition(": ")
    entry = results.get("models", {}).get(model, {})
    pair = entry.get("paired", {}).get(ratio)
    if pair is None:
        return None
    value = pair["ratio"]
    contender = ratio.partition(" / ")[0]
    own = entry.get("refreshes", {}).get("contenders", {}).get(contender)
    every = entry.get("setting", {}).get("every")
    refreshed = ""
    if own is not None:
        value /= 1 - own["share"]
        refreshed = f", curvature every {every} steps"
    machine = entry.get("hardware", {})
    where = (
        f"{entry['title']}, batches of {entry['batch_size']}{refreshed}, on"
        f" {machine.get('cpu', 'an unknown processor')}, {machine.get('threads', '?')} threads,"
        f" torch {machine.get('torch', '?')}"
    )
    return Timed(float(value), where)


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
    settings: Settings
    sigma: float | None = None
    epsilon: float | None = None
    accounting: str = ""

    @property
    def ours(self) -> str:
        """Return mean ± sample standard deviation, which is what papers print."""
        if not self.values:
            return "–"
        mean = f"{statistics.mean(self.values):.2f}"
        if len(self.values) == 1:
            return mean
        return f"{mean} ± {statistics.stdev(self.values):.2f}"


def verdict(published: Published, seeds: int, values: Sequence[float]) -> str:
    """Return what our values say about a published one, by `RULE`.

    Args:
        published: in percent.
        seeds: runs behind it.
        values: ours in percent, at least one.
    """
    ours = statistics.stdev(values) if len(values) > 1 else 0.0
    theirs = ours if published.std is None else published.std
    variance = theirs**2 / max(1, seeds) + ours**2 / len(values)
    tolerance = max(LEAST, 2 * math.sqrt(variance))
    above = statistics.mean(values) - published.mean
    if above > tolerance:
        return "better"
    return "reproduced" if above >= -tolerance else "not reproduced"


# Settings that were tuned under another protocol do not fit.
_PROTOCOL = ["delta", "epochs", "steps", "expected_batch_size", "sampler"]


def _protocol(run: Run) -> Row:
    """Return what settings are tuned under; the rank of wide sides concerns K-FAC alone."""
    names = list(_PROTOCOL)
    if run.default("preconditioner") == "kfac":
        names.append("max_rank")
    return {"recipe": run.recipe, **{name: run.default(name) for name in names}}


class Tuning:
    """Settings that tuning studies chose, and runs that they have already made.

    Args:
        stores: results of `dpkfc tune` or of the accuracy study.

    Raises:
        StudyError: two of them hold other figures of one run.
    """

    def __init__(self, stores: Iterable[Store] = ()) -> None:
        self.rows: list[Row] = []
        self._by_hash: dict[str, Row] = {}
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
    def _trials(self) -> list[tuple[str, Row, float, Row]]:
        """Return arm, protocol, ε and row of each full trial."""
        trials = []
        for row in self.rows:
            tag = row.get("tag", {})
            if row["measured_on"] == "validation" and not tag.get("pruned") and "arm" in tag:
                run = Run.make(**row["run"])
                trials.append((tag["arm"], _protocol(run), run.default("epsilon"), row))
        return trials

    def settings(self, cell: Cell) -> dict[str, Plain]:
        """Return the settings of the best full trial of the cell's arm and protocol, or none.

        Raises:
            StudyError: there are trials at several ε, and none at the cell's ε.
        """
        wanted = cell.run({}, 0)
        protocol = _protocol(wanted)
        trials: dict[float, list[Row]] = {}
        for arm, under, epsilon, row in self._trials:
            if arm in cell.tuned.split() and under == protocol:
                trials.setdefault(epsilon, []).append(row)
        if not trials:
            return {}
        epsilon = wanted.default("epsilon") if len(trials) > 1 else next(iter(trials))
        if epsilon not in trials:
            tuned_at = ", ".join(f"{one:g}" for one in sorted(trials))
            raise StudyError(
                f"{cell.row}, {cell.column}: tuned at ε = {tuned_at}, and not at {epsilon:g}; give"
                " one study's results"
            )
        tests = [row for row in self.rows if row["measured_on"] == "test"]
        arms = best_trials([*trials[epsilon], *tests])
        best = max(arms.values(), key=lambda row: row["accuracy"])
        return dict(best["tag"]["params"])

    def row(self, run: Run) -> Row | None:
        """Return the row of a run that a study has made, None where there is none."""
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
    end: float = math.inf,
    console: Console | None = None,
) -> dict[str, list[Outcome]]:
    """Run the cells of tables that can run here; write `NAME.json` and `NAME.md` for each.

    Args:
        names: of tables.
        folder: for results, ledgers and reports; an earlier one is taken up again.
        results: file of the rows; None for `results.json` in the folder.
        columns: whose cells are run; all where no column is given. Reports are of whole tables.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        seeds: of the runs, each with its own initial weights.
        tuned: results files of tuning studies.
        everything: also cells that need more than a few cores.
        workers: cells at once.
        end: when no time is left, of `end_of`.
        console: where progress is drawn.

    Raises:
        StudyError: an unknown table or column, no seeds, a file that cannot be used, or a full
            disk.
        KeyboardInterrupt: interrupted; reports of what has finished are written before.
    """
    if not seeds:
        raise StudyError("seeds = 0: every cell needs one run or more")
    tables = [load(name) for name in names]
    missing = next((path for path in tuned if not path.is_file()), None)
    if missing is not None:
        raise StudyError(
            f"{missing} is not the results file of a tuning study;"
            " give the results.json of `dpkfc tune`"
        )
    tuning = Tuning(Store(path) for path in tuned)
    times = read_speed()
    cells = [cell for table in tables for cell in table.select(columns)]
    tasks = _list_tasks(cells, tuning, seeds, everything)
    with Store(results or folder / "results.json") as store:
        source = Listed(tasks, store, lambda run: tuning.row(run) is not None)
        if time.monotonic() < end:
            source.drop_unavailable(data_dir)
        found: dict[str, list[Outcome]] = {}

        def report() -> None:
            for table in tables:
                found[table.name] = outcomes(
                    table, store, tuning, seeds, source.failures, times=times
                )
                _write(folder, table, found[table.name])

        run_cells(
            source,
            study_place(folder, data_dir),
            store,
            report,
            workers=workers,
            end=end,
            console=console,
        )
    return found


def run_cells(
    source: Listed,
    place: Place,
    store: Store,
    report: Callable[[], None],
    *,
    console: Console | None = None,
    **limits: Any,
) -> None:
    """Run the cells of a source and draw progress; report what has finished, also at an error.

    Args:
        source: of the cells.
        place: of the runs.
        store: takes every run.
        report: writes what is known.
        console: where progress is drawn.
        limits: `workers` and `end` of `drive`.
    """
    progress = StudyProgress(source.total, done=source.done_before, console=console)
    with report_at_end(report), progress:
        drive(source, place, expected=expected_seconds(lambda: store), progress=progress, **limits)


def _list_tasks(
    cells: Sequence[Cell], tuning: Tuning, seeds: Sequence[int], everything: bool
) -> list[Task]:
    """Return the runs of all cells that can run here, or of all that can run, seed by seed."""
    tasks = []
    for seed in seeds:
        for cell in cells:
            if cell.here or (everything and not cell.not_run):
                run = cell.run(tuning.settings(cell), seed)
                tasks.append(Task(run, label=f"{cell.row}, {cell.column}"))
    return tasks


def outcomes(
    table: Table,
    store: Store,
    tuning: Tuning,
    seeds: Sequence[int],
    failures: Mapping[str, str] | None = None,
    *,
    times: Content | None = None,
) -> list[Outcome]:
    """Return every cell of a table with what is known of it.

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
        rows: list[Row] = []
        reasons = []
        for seed in seeds:
            run = cell.run(chosen, seed)
            row = store.get(run) or tuning.row(run)
            if row is not None:
                rows.append(row)
            if failures and run.hash in failures:
                reasons.append(failures[run.hash])
        if rows:
            found.append(_outcome(table, cell, chosen, rows))
            continue
        reasons.append(f"needs {cell.needs}" if cell.needs else NOT_YET)
        found.append(Outcome(cell=cell, verdict=f"not run ({reasons[0]})", settings=chosen))
    return found


def _explain_missing_run(cell: Cell, times: Content) -> Outcome:
    """Return a ratio of times where one was measured, or else why none was."""
    ours = find_timing(cell.timed, times) if cell.timed else None
    if ours is None:
        return Outcome(cell=cell, verdict=f"not run ({cell.not_run})", settings={})
    return Outcome(
        cell=cell, values=[ours.ratio], verdict=f"no verdict (ours: {ours.where})", settings={}
    )


def _outcome(table: Table, cell: Cell, chosen: Settings, rows: Sequence[Content]) -> Outcome:
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
    """Return a table for people: published, ours, σ and verdict of every cell."""
    unit = f" {table.unit}" if table.unit else ""
    head = ["method", "setting", f"published{unit}", f"ours{unit} (seeds)", "σ, ours"]
    rows = [_markdown_row(one) for one in found]
    note = f" Note: {table.note}." if table.note else ""
    lines = [harness.markdown([*head, "verdict", "settings"], rows)]
    lines += ["", f"Published: {table.accounting}.{note}"]
    accounting = sorted({one.accounting for one in found if one.accounting})
    if accounting:
        lines.append(f"Ours: {'; '.join(accounting)}.")
    if any(one.cell.needs and not one.cell.not_run for one in found):
        lines.append(
            f"`dpkfc reproduce {table.name} --everything` also runs what needs more than a few"
            " cores, with its public images."
        )
    rule = _rule(found)
    if rule:
        lines.append(rule)
    return "\n".join(lines)


def _markdown_row(one: Outcome) -> list[str]:
    """Return the cells of a line."""
    cell = one.cell
    ours = f"{one.ours} ({len(one.values)})" if one.values else "–"
    sigma = "–" if one.sigma is None else f"{one.sigma:.4f}"
    settings = ""
    if cell.needs and cell.command and not one.values:
        settings = f"`{cell.command}`"
    elif one.settings:
        settings = f"tuned: {settings_text(one.settings)}"
    elif one.values and cell.recipe:
        settings = (
            "the recipe's, at a rate of our grid" if "lr" in cell.settings else "the recipe's"
        )
    return [cell.row, cell.column, cell.published.text, ours, sigma, one.verdict, settings]


def _rule(found: Sequence[Outcome]) -> str:
    """Return the rule of the verdicts; empty where no verdict is given."""
    has_verdict = any(not one.verdict.startswith("no verdict") for one in found)
    return RULE if has_verdict or not found else ""


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
    write_text(folder / f"{table.name}.json", text)
    page = f"# {table.title}\n\n{markdown(table, found)}\n"
    write_text(folder / f"{table.name}.md", page)
