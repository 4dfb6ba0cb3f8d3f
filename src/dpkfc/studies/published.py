"""Tables of the papers: the printed numbers, and the run that stands for each, or why there is none."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from dpkfc.recipes.catalogue import RECIPES
from dpkfc.recipes.config import ConfigError, nearest, tomllib
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.errors import StudyError

__all__ = ["NOT_PRINTED", "Cell", "Published", "Table", "load", "names"]

NOT_PRINTED = "–"  # of a point that a plot shows and no text gives
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Published:
    """A printed number: mean and, where there is one, standard deviation over seeds. Of a plot the mean is not a number."""

    mean: float
    std: float | None
    text: str

    @classmethod
    def of(cls, text: str) -> Published:
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
        timed: a ratio of step times that stands beside it, by the name it has in `studies.timed`.
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
        """`dpkfc train` for its run, with FILE where a study takes images of another recipe; empty where there is no run."""
        if self.not_run:
            return ""
        given = {name: "FILE" if str(value).startswith("@") else value for name, value in self.settings.items()}
        flags = [f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float) else f"--{name.replace('_', '-')} {value}"
                 for name, value in given.items()]  # fmt: skip
        return " ".join([f"dpkfc train --recipe {self.recipe} --method {self.method}", *flags])

    def run(self, tuned: Mapping[str, Plain], seed: int) -> Run:
        """The run of a seed, on the test set."""
        return Run.of(self.recipe, self.method, {**self.settings, **tuned}, seed=seed, evaluate_on="test")


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

    def of(self, columns: Sequence[str]) -> list[Cell]:
        """The cells of some columns, by their labels; all where none is given.

        Raises:
            StudyError: a column that the table does not have; those that it has are listed.
        """
        known = list(dict.fromkeys(cell.column for cell in self.cells))
        if unknown := [column for column in columns if column not in known]:
            raise StudyError(f"table {self.name} has no column {unknown[0]!r}; it has: {' | '.join(known)}")
        return [cell for cell in self.cells if not columns or cell.column in columns]


def names() -> list[str]:
    """All tables."""
    folder = resources.files("dpkfc.studies").joinpath("tables")
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Table:
    """A table by its name.

    Raises:
        StudyError: there is none; the nearest one is named.
    """
    if name not in names():
        raise StudyError(f"unknown table {name!r}; {nearest(name, names())} (dpkfc reproduce --list shows all)")
    text = resources.files("dpkfc.studies").joinpath("tables", f"{name}.toml").read_text("utf-8")
    content = tomllib.loads(text)
    columns = {column["key"]: column for column in content["column"]}
    cells = []
    for row in content["row"]:
        order = [key for key in columns if key in row["values"]]
        if len(order) < len(row["values"]):
            raise StudyError(f"table {name}: row {row['label']!r} has a value of a column that is not declared")
        cells += [_cell(content, columns[key], row, key) for key in order]
    return Table(
        name=name, title=content["title"], seeds=content["seeds"], accounting=content["accounting"], note=content["note"],
        unit=content.get("unit", "%"), cells=tuple(cells),
    )  # fmt: skip


def _cell(table: Mapping[str, Any], column: Mapping[str, Any], row: Mapping[str, Any], key: str) -> Cell:
    levels = (table, column, row)
    settings: dict[str, Plain] = {}
    for level in levels:
        settings |= level.get("settings", {})
    settings |= row.get("by_column", {}).get(key, {})
    recipe = next((level["recipe"] for level in reversed(levels) if "recipe" in level), "")
    reason = row.get("not_run", "")
    cell = Cell(
        row=row["label"], column=column["label"], published=Published.of(row["values"][key]), recipe=recipe,
        method=row.get("method", ""), settings=settings, tuned=row.get("tuned", ""),
        needs=next((level["needs"] for level in reversed(levels) if "needs" in level), ""),
        not_run=reason if isinstance(reason, str) else reason.get(key, ""), timed=row.get("timed", ""),
    )  # fmt: skip
    if cell.published.text == NOT_PRINTED and not cell.not_run:
        raise StudyError(f"{cell.row}, {cell.column}: a point that is not printed needs a reason, for no verdict can be given")
    return cell if cell.not_run else _checked(cell)


def _checked(cell: Cell) -> Cell:
    """The cell, with the reason where its run cannot be made in this version."""
    if not cell.recipe or cell.recipe not in RECIPES:
        return replace(cell, not_run=f"recipe missing: {cell.recipe}" if cell.recipe else "no run is mapped to it")
    try:
        cell.run({}, 0).config()
    except ConfigError as error:
        return replace(cell, not_run=f"settings: {error}")
    return cell
