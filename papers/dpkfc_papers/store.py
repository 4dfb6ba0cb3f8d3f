"""Rows of the runs of a study, in one JSON file by the hash of the run."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from filelock import BaseFileLock

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.app.tuning.members import take_study_lock
from dpkfc.app.tuning.pool import Fits, Source
from dpkfc.app.tuning.runs import Row, Run, StudyError
from dpkfc.app.tuning.study_progress import Task
from dpkfc.report.text import ensure_mapping

KIND, VERSION = "dpkfc study", 1
# Figures that are printed when a run ends.
_SHOWN = ("accuracy", "perplexity", "failed")


class Cell(Protocol):
    """What a row belongs to: a `Run`, or another run with a hash."""

    @property
    def hash(self) -> str: ...  # noqa: D102

    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result."""
        ...


@dataclass(frozen=True)
class StudyRun:
    """A run of a study of its own, whose plain values decide its result and hash."""

    # Values that all runs of a kind share.
    common: ClassVar[Mapping[str, Any]] = {}

    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result."""
        return {**asdict(self), **self.common}

    @property
    def hash(self) -> str:
        """Return sixteen hexadecimal digits of a SHA-256."""
        return hash_values(self.describe())


def hash_values(values: Mapping[str, Any]) -> str:
    """Return sixteen hexadecimal digits of a SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """The rows of one study. The file is replaced as a whole, so finished work is never lost.

    Only one process writes to it: `with` takes a lock next to the file. Reading needs none.

    Args:
        path: the JSON file; made when the first row comes.

    Raises:
        StudyError: the file is damaged, of another version, or cannot be read. It is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = _read_rows(path)
        self._lock: BaseFileLock | None = None

    def __enter__(self) -> Store:
        self._lock = take_study_lock(self.path)
        self._rows = _read_rows(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of training runs."""
        return iter([row for row in self._rows.values() if not row["run"].get("measure")])

    def figures(self) -> list[Row]:
        """Return the rows of runs with a measure of their own."""
        return [row for row in self._rows.values() if row["run"].get("measure")]

    def get(self, run: Cell) -> Row | None:
        """Return the row of a finished run."""
        return self._rows.get(run.hash)

    def put(self, run: Cell, row: Mapping[str, Any]) -> None:
        """Store a row, which is on the disk when this returns.

        Raises:
            StudyError: the disk cannot take the row; all earlier rows are still there.
        """
        self._rows[run.hash] = dict(row)
        content = {"kind": KIND, "version": VERSION, "rows": self._rows}
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        try:
            write_text(self.path, text + "\n", private=True)
        except RunFolderError as error:
            raise StudyError(
                f"{error}; the results before it are kept, and the same command goes on from them"
            ) from None


def make_missing(
    path: Path,
    stages: Callable[[Store], Iterable[Iterable[Any]]],
    execute: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Make the runs that a store lacks; each row is on the disk before the next run starts.

    Args:
        path: of the store.
        stages: returns runs, or None for a run that is not known yet; a stage may need the rows of
            those before it.
        execute: makes the row of a run.
    """
    with Store(path) as store:
        for runs in stages(store):
            left = [run for run in runs if run is not None and store.get(run) is None]
            for number, run in enumerate(left, start=1):
                row = execute(run)
                store.put(run, row)
                found = {name: row[name] for name in _SHOWN if name in row}
                print(f"{number}/{len(left)} {run.describe()}: {found}", flush=True)


def _read_rows(path: Path) -> dict[str, Row]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StudyError(
            f"results file {path} cannot be read ({error.strerror or error}); change its rights"
        ) from None
    except (ValueError, RecursionError) as error:
        raise StudyError(
            f"results file {path} is damaged ({error}); put an earlier copy back, or move it away"
        ) from None
    content = ensure_mapping(content)
    if content.get("kind") != KIND or not isinstance(content.get("rows"), dict):
        raise StudyError(
            f"{path} is not a results file of a study; choose another --out, or move it away"
        )
    if content.get("version") != VERSION:
        raise StudyError(
            f"results file {path} is of version {content.get('version')!r}, this dpkfc reads"
            f" {VERSION}; use the version that wrote it, or choose another --out"
        )
    return dict(content["rows"])


# --------------------------------------------------------------------------------------------------
# Cells in a fixed order as a source, of which tables and figures are made.


class Listed(Source):
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

    def __init__(
        self,
        tasks: Iterable[Task],
        store: Store,
        known: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        self._store = store
        wanted = {task.run.hash: task for task in tasks}
        not_stored = [task for task in wanted.values() if store.get(task.run) is None]
        self._left = [task for task in not_stored if not known(task.run)]
        self.total = len(wanted)
        self.done_before = len(wanted) - len(self._left)
        self.failures: dict[str, str] = {}

    def drop_unavailable(self, data_dir: str) -> None:
        """Read every data set once, and leave out the cells without data.

        Args:
            data_dir: folder of the data sets.
        """
        reasons = {}
        for recipe in {task.run.recipe for task in self._left}:
            config = run_config({"recipe": recipe, "data_dir": data_dir})
            try:
                part = find_recipe(recipe).data(config).part
            except DatasetError as error:
                reasons[recipe] = str(error)
                continue
            if part:
                reasons[recipe] = f"the files hold {part}, and the published number is of all"
        for task in list(self._left):
            if task.run.recipe in reasons:
                self.failures[task.run.hash] = reasons[task.run.recipe]
                self._left.remove(task)

    def next(self, fits: Fits) -> Task | None:
        """Return the first cell that fits."""
        for task in self._left:
            if fits(task.run):
                self._left.remove(task)
                return task
        return None

    def take_row(self, task: Task, row: Row, ended: bool) -> None:
        """Store a run, with what tags it."""
        self._store.put(task.run, {**row, **({"tag": task.tag} if task.tag else {})})

    def take_failure(self, task: Task, reason: str, *, lost: bool) -> None:
        """Store the reason; the next call tries the cell again."""
        self.failures[task.run.hash] = reason


# --------------------------------------------------------------------------------------------------
# The best trial of a method, and the tests of that trial's settings alone. A search that goes on
# may come to another best trial. Tests of the earlier one stay in the results and are not shown.

# Recipe and name of the method in the study.
Key = tuple[str, str]
# A row that nobody changes.
Entry = Mapping[str, Any]


def best_trials(rows: Iterable[Entry]) -> dict[Key, Entry]:
    """Return the full trial with the highest validation accuracy, by recipe and method.

    Among equals, return the trial with most tests.
    """
    tested = []
    trials: dict[Key, list[Entry]] = defaultdict(list)
    for row in rows:
        tag = row.get("tag", {})
        if _is_test(row):
            tested.append((_key(row), tag.get("tuned")))
        is_trial = row["measured_on"] == "validation" and "params" in tag
        if is_trial and not tag.get("pruned"):
            trials[_key(row)].append(row)

    def rank(row: Entry) -> tuple[float, int]:
        return row["accuracy"], tested.count((_key(row), row["tag"]["params"]))

    return {key: max(members, key=rank) for key, members in trials.items()}


def winners_tests(rows: Iterable[Entry]) -> list[Entry]:
    """Return runs on the test set with the settings of their method's best trial.

    Tests of a method without trials are returned as they are.
    """
    rows = list(rows)
    won = {key: trial["tag"]["params"] for key, trial in best_trials(rows).items()}
    tests = []
    for row in filter(_is_test, rows):
        settings = won.get(_key(row))
        if settings is None or row["tag"].get("tuned", settings) == settings:
            tests.append(row)
    return tests


def _is_test(row: Entry) -> bool:
    return bool(row["measured_on"] == "test" and "arm" in row.get("tag", {}))


def _key(row: Entry) -> Key:
    return row["run"]["recipe"], row["tag"].get("arm", "")
