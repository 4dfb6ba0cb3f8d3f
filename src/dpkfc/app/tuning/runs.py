"""Runs of a study: cells as values with a stable hash, their stored rows, and their workers.

A cell is executed by the loop of `dpkfc train`. Cells run side by side, in one process and one
numerical thread per core; a source says which cell comes next.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import torch
from filelock import BaseFileLock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpkfc.allocator import keep_freed_memory
from dpkfc.app.datasets import DatasetError
from dpkfc.app.datasets.sources import CIFAR100, load_pixels
from dpkfc.app.datasets.text import AG_NEWS, hashed_texts, load_texts
from dpkfc.app.pretrained import encode_tokens, minilm_tokens
from dpkfc.app.recipes.catalogue import find_recipe, read_data, run_config
from dpkfc.app.recipes.images import CIFAR10_NORMALISATION
from dpkfc.app.recipes.text import HEAD_LENGTH, SIZE
from dpkfc.app.run_folder import Metrics, RunFolder, RunFolderError, placed, write_text
from dpkfc.app.settings import ConfigError, RunConfig
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.ledger import LedgerError, version
from dpkfc.privacy.locks import take_lock
from dpkfc.report import ensure_mapping

# --------------------------------------------------------------------------------------------------
# Which code a result came from: rows outlive changes of a method, and nothing else in them would
# tell.

# Parts that decide no figure of a run.
_LEFT_OUT = {
    "audit",
    "federated",
    "integrations",
    "report",
    "cli.py",
    "html",
    "tuning",
}


@functools.cache
def code() -> dict[str, str]:
    """Return the version of the package and a digest of the sources that decide results.

    The digest is twelve digits of a SHA-256.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if not _LEFT_OUT.intersection(place.parts[:2]):
            digest.update(place.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {"dpkfc": version(), "sources": digest.hexdigest()[:12]}


# --------------------------------------------------------------------------------------------------
# The one error of studies: a line that names the file or the setting and what to do.


class StudyError(ValueError):
    """A study that cannot be read, written or run as it was asked for."""


# --------------------------------------------------------------------------------------------------
# Results of a study by the hash of the run: one JSON file, replaced as a whole, so that finished
# work is never lost.

KIND, VERSION = "dpkfc study", 1
# A stored run.
Row = dict[str, Any]
_FLOAT = (float, int)
# What a row must hold, by its measure; rows of another measure may hold anything.
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "": {
        "accuracy": _FLOAT,
        "epsilon": _FLOAT,
        "steps": int,
        "noise_multiplier": _FLOAT,
    },
    "dpkfc_papers.measurements:measure_course": {
        "hash": str,
        "checkpoints": list,
        "sizes": dict,
        "epsilon": _FLOAT,
        "steps": int,
    },
    "dpkfc_papers.measurements:measure_mean_field": {
        "hash": str,
        "networks": list,
        "contraction": list,
        "seeds": int,
        "examples": int,
    },
}
_OF_CHECKPOINTS = {"step", "layers", "signal", "density"}
_LOG = logging.getLogger(__name__)


class Cell(Protocol):
    """What a row belongs to: a `Run`, or another run with a hash."""

    @property
    def hash(self) -> str: ...  # noqa: D102


class Store:
    """The rows of one study.

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
        self._lock = _lock(self.path)
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
            f"{path} is no results file of a study; choose another --out, or move it away"
        )
    if content.get("version") != VERSION:
        raise StudyError(
            f"results file {path} is of version {content.get('version')!r}, this dpkfc reads"
            f" {VERSION}; use the version that wrote it, or choose another --out"
        )
    rows = {key: row for key, row in content["rows"].items() if _is_row(row)}
    lost = len(content["rows"]) - len(rows)
    if lost:
        _LOG.warning("results file %s: %d entries are incomplete and will be run again", path, lost)
    return rows


def _is_row(row: Any) -> bool:
    run = ensure_mapping(row).get("run")
    if not isinstance(run, dict):
        return False
    needed = _NEEDED.get(str(run.get("measure") or ""), {})
    for name, kind in needed.items():
        if not isinstance(row.get(name), kind) or row[name] in ([], {}):
            return False
    return "checkpoints" not in needed or all(map(_is_checkpoint, row["checkpoints"]))


def _is_checkpoint(checkpoint: Any) -> bool:
    is_whole = isinstance(checkpoint, dict) and checkpoint.keys() >= _OF_CHECKPOINTS
    return is_whole and isinstance(checkpoint["layers"], dict)


def _lock(path: Path) -> BaseFileLock:
    """Lock the rows of a study until the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return take_lock(path)
    except BlockingIOError:
        raise StudyError(
            f"another process works on {path}; wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written or locked ({error.strerror or error}); make room, or choose"
            " another --out"
        ) from None


# --------------------------------------------------------------------------------------------------
# Public examples of a study: those of another recipe or set, named by a text that is the same on
# every machine.

_NAMED = re.compile(r"@(?P<recipe>[\w-]+):(?P<count>\d+)")
_SEED = 0


def resolved(name: Any, folder: Path, data_dir: str = "") -> str:
    """Return the file of public examples behind a name; make it if it is missing or not whole.

    Args:
        name: `@RECIPE:N`, N training examples of that recipe, chosen by a public seed;
            `@cifar100:N`, in CIFAR-10's constants; `@ag-news-words:N`, AG News in the hashed words
            of `imdb-logistic`; `@ag-news-sentences:N`, AG News as vectors, for
            `stackoverflow-head`. Any other text is returned as it is.
        folder: where the file is kept, for all cells of a study.
        data_dir: folder of the data sets.

    Raises:
        StudyError: fewer examples than asked for.
        ConfigError: an unknown recipe.
        DatasetError: its data set is missing.
    """
    found = _NAMED.fullmatch(str(name))
    if found is None:
        return str(name)
    recipe = found["recipe"]
    count = int(found["count"])
    path = folder / f"{recipe}-{count}.safetensors"
    if not _is_whole(path, count):
        if path.exists():
            _LOG.warning("public examples %s: the file is damaged and is made again", path)
        _write(path, recipe, count, data_dir)
    return str(path)


def _is_whole(path: Path, count: int) -> bool:
    """Return whether a file holds so many examples, by its header and its length."""
    try:
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in ("inputs", "labels")]
            return all(shape[:1] == [count] for shape in shapes)
    except (OSError, SafetensorError):
        return False


def _write(path: Path, recipe: str, count: int, data_dir: str) -> None:
    inputs, labels = _examples(recipe, data_dir)
    if not 0 < count <= len(labels):
        raise StudyError(
            f"public_data = '@{recipe}:{count}': the set has {len(labels)} training examples;"
            " choose 1 to that"
        )
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randperm(len(labels), generator=generator)[:count]
    chosen = inputs[rows]
    if recipe == "ag-news-sentences":
        # The encoder is slow, so it sees the chosen texts alone.
        chosen = encode_tokens(chosen)
    content = {"inputs": chosen.contiguous(), "labels": labels[rows].contiguous()}
    placed(path, lambda part: save_file(content, part))


def _examples(name: str, data_dir: str) -> tuple[Any, Any]:
    """Return training inputs and labels of a recipe, or of a set in the form of one."""
    home = data_dir or None
    if name == "cifar100":
        return load_pixels(CIFAR100, home).tensors(CIFAR10_NORMALISATION).train
    if name == "ag-news-words":
        return load_texts(AG_NEWS, home).tensors(lambda lines: hashed_texts(lines, SIZE)).train
    if name == "ag-news-sentences":
        texts = load_texts(AG_NEWS, home)
        return texts.tensors(lambda lines: minilm_tokens(lines, HEAD_LENGTH)).train
    return find_recipe(name).data(run_config({"recipe": name, "data_dir": data_dir})).train


# --------------------------------------------------------------------------------------------------

# Format of a row.
FORMAT = 1
# Raised when runs of equal settings come to other results than before.
MECHANISM = 1
_MACHINE = {
    "out",
    "data_dir",
    "threads",
    "device",
    "num_workers",
    "max_physical_batch_size",
    "pad_to_multiple",
    "chosen_by",
}
_OF_RUN = {"recipe", "method", "seed", "eval_on"}
# Values of K-FAC that a hash leaves out, whatever the defaults are.
_UNSTATED: dict[str, Any] = {"max_rank": 64, "sides": "both"}
Plain = str | int | float | bool


class Ended(Exception):
    """A run that was ended before its last step, with what it came to until then.

    Args:
        row: the figures so far, as of `run_cell`.
        is_deliberate: True where the one who watched wanted it, False for a signal.
    """

    def __init__(self, row: Row, is_deliberate: bool) -> None:
        super().__init__("ended early")
        self.row = row
        self.is_deliberate = is_deliberate


@dataclass(frozen=True)
class Run:
    """One private training run of a study.

    Attributes:
        recipe: as of `dpkfc train --recipe`.
        method: as of `dpkfc train --method`.
        settings: sorted pairs laid over the recipe's TOML; make them from a mapping with `Run.of`.
            A `public_data` of the form `@RECIPE:N` stands for N training images of another recipe.
        seed: public seed of initial weights and probes; noise is never seeded.
        evaluate_on: "validation" or "test".
        measure: what else than its accuracy is measured, as "module:function" with the arguments
            and the row of `run_cell`; empty for a plain run. Figures are cells in this way: same
            pool, same store, another hash.

    Raises:
        ConfigError: an unknown recipe, method or setting, or settings that do not go together.
    """

    recipe: str
    method: str
    settings: tuple[tuple[str, Plain], ...] = ()
    seed: int = 0
    evaluate_on: str = "test"
    measure: str = ""

    @classmethod
    def of(
        cls,
        recipe: str,
        method: str,
        settings: Mapping[str, Plain] | None = None,
        *,
        seed: int = 0,
        evaluate_on: str = "test",
        measure: str = "",
    ) -> Run:
        """Make a run from a mapping of settings."""
        settings = settings or {}
        for name in sorted((_OF_RUN | {"out", "test_mode"}).intersection(settings)):
            raise StudyError(
                f"{name} is no setting of a cell: it is an attribute of `Run`, or chosen by"
                " the study"
            )
        pairs = tuple(sorted(settings.items()))
        return cls(recipe, method, pairs, seed, evaluate_on, measure)

    def config(self, **machine: Plain) -> RunConfig:
        """Return all settings of the run."""
        of_run = {
            "recipe": self.recipe,
            "method": self.method,
            "seed": self.seed,
            "eval_on": self.evaluate_on,
        }
        return run_config({**dict(self.settings), **of_run, **machine})

    def identity(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults of the library and decide the result.

        Nothing of the machine is among them.

        A recipe's file and a method's preset are resolved, so a change of either is another run; a
        setting that is added to the library later with a default that changes nothing leaves the
        hash as it is, and so does a default that changes for those who do not use it.
        """
        config = self.config()
        left_out = _MACHINE | _OF_RUN
        if config.preconditioner != "kfac":
            left_out = left_out.union(_UNSTATED)
        changed = {}
        for setting in dataclasses.fields(RunConfig):
            name = setting.name
            value = getattr(config, name)
            if name not in left_out and value != _UNSTATED.get(name, setting.default):
                changed[name] = value
        return {
            "format": FORMAT,
            "mechanism": MECHANISM,
            **self.describe(),
            "settings": changed,
        }

    def default(self, name: str) -> Any:
        """Return a setting as recipe and method give it; public data may still be missing."""
        return getattr(self._defaults, name)

    @functools.cached_property
    def _defaults(self) -> RunConfig:
        try:
            return self.config()
        except ConfigError:
            return self.config(source="pink", output_source="", pretrain_epochs=0)

    @functools.cached_property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of the SHA-256 of `identity`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Return the run for a file of results; `Run.of` takes it back."""
        content = {**dataclasses.asdict(self), "settings": dict(self.settings)}
        if not self.measure:
            del content["measure"]
        return content

    def measuring(self) -> Callable[..., Row]:
        """Return what runs the cell: `run_cell`, or what `measure` names.

        Raises:
            StudyError: there is no such function.
        """
        if not self.measure:
            return run_cell
        try:
            return cast("Callable[..., Row]", resolve_name(self.measure))
        except (ImportError, AttributeError, ValueError) as error:
            raise StudyError(f"measure = {self.measure!r} names no function ({error})") from None


# Maps the number of an evaluation (from 1) and its accuracy to whether the run goes on.
Report = Callable[[int, float], bool]


def run_cell(
    run: Run,
    folder: Path,
    *,
    data_dir: str = "",
    public: Path | None = None,
    report: Report | None = None,
) -> Row:
    """Train one cell with one numerical thread and secure noise.

    Args:
        run: the cell.
        folder: the run folder is made below it, named by the hash; what the run spent stays there
            in its ledger.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        public: folder for the files of public examples that cells of a study share.
        report: sees every evaluation, for the operator only, and may end the run.

    Returns:
        A row of plain values: the run, accuracy in [0, 1] and mean loss on the set that
        `evaluate_on` names, its course, ε, δ, σ, accounting, steps, mean clipped fraction (NOT
        PRIVATE), seconds and the machine.

    Raises:
        Ended: ended by `report` or by a signal.
        ConfigError: settings that do not go together.
        DatasetError: missing or damaged data.
        RunFolderError: the disk cannot take it.
    """
    from dpkfc.app.train import measure, prepare

    started = time.perf_counter()
    machine: dict[str, Plain] = {"threads": 1, "data_dir": data_dir}
    public_data = dict(run.settings).get("public_data")
    if public_data:
        machine["public_data"] = resolved(public_data, public or folder / "public", data_dir)
    config = run.config(**machine)
    prepared = prepare(config, _read(config))
    place = RunFolder.fresh(folder, run.hash)
    seen: list[tuple[int, float]] = []
    stopped = False

    def watch(row: Any) -> bool:
        nonlocal stopped
        seen.append((row.step, row.accuracy))
        stopped = report is not None and not report(len(seen), row.accuracy)
        return not stopped

    try:
        result = measure(prepared, place, watch)
        row = _row(run, prepared, result, place, time.perf_counter() - started)
    finally:
        # A full disk gets its space back.
        _clear(place)
    if result.interrupted:
        raise Ended(row, is_deliberate=stopped)
    return row


# What this process has read last: cells of a study share their data.
_LAST: dict[tuple[Plain, ...], Any] = {}
# Settings that the data of a run depend on.
_OF_DATA = (
    "recipe",
    "data",
    "target",
    "schema",
    "text",
    "label_file",
    "task",
    "data_dir",
    "smoke",
    "pretrained",
    "vocabulary",
    "validation_size",
    "split_seed",
)


def _read(config: RunConfig) -> Any:
    """Return the data of a run, read again if the run before had other data.

    Runs only read them.
    """
    key = tuple(getattr(config, name) for name in _OF_DATA)
    if key not in _LAST:
        # The data before are dropped first, so that both are never in memory.
        _LAST.clear()
        _LAST[key] = read_data(config)
    return _LAST[key]


def _row(run: Run, prepared: Any, result: Any, place: Any, wall: float) -> Row:
    plan = prepared.plan
    metrics = Metrics.read(place.metrics)
    clipped = [row.clipped_fraction for row in metrics.rows if row.clipped_fraction is not None]
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": result.accuracy,
        "measured_on": result.measured_on,
        "score": result.score,
        "loss": result.loss,
        "curve": [[row.step, round(row.accuracy or 0.0, 5)] for row in metrics.evaluated()],
        "epsilon": result.epsilon,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "accountant": plan.accountant,
        "sampler": plan.sampler.describe()["name"],
        "neighbouring_relation": plan.neighbouring_relation,
        "caveats": list(plan.caveats),
        "steps": result.steps,
        "dataset_size": plan.dataset_size,
        "expected_batch_size": plan.expected_batch_size,
        "clipped_fraction": round(sum(clipped) / len(clipped), 4) if clipped else None,
        "seconds": round(result.seconds, 1),
        "wall_seconds": round(wall, 1),
        "hardware": hardware(),
        "code": code(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def hardware() -> dict[str, Any]:
    """Return the processor and the versions that a timing belongs to."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8")
        if model := re.search(r"^model name\s*: (.*)$", text, re.MULTILINE):
            name = model[1].strip()
    return {
        "cpu": name,
        "threads_a_run": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _clear(place: Any) -> None:
    """Keep settings and ledger of a run; remove the files that only a continuation needs."""
    checkpoint = place.checkpoint
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.rmtree(checkpoint.with_name(checkpoint.name + ".old"), ignore_errors=True)
    place.metrics.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# The settings of a run that its recipe and method do not give: how a report tells equal runs from
# others.

_FIELDS = {setting.name for setting in dataclasses.fields(RunConfig)}


def departures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of the recipe and the method.

    Where those are not known, return all that were given.

    Args:
        run: `recipe`, `method` and `settings`: all of them, as a run folder keeps them, or those
            laid over the defaults. With `hash`, the one it was stored under (`Run.hash`; with
            `seed` and `evaluate_on`), defaults are filled in only where they are still those that
            the run was made with.
    """
    given = {str(name): value for name, value in run["settings"].items()}
    try:
        if "hash" in run:
            content = {**run, "settings": given}
            parts = [field.name for field in dataclasses.fields(Run) if field.name in content]
            if Run.of(**{name: content[name] for name in parts}).hash != run["hash"]:
                return given
        chosen = {name: value for name, value in given.items() if name in _FIELDS}
        names = {"recipe": run["recipe"], "method": run["method"]}
        full = dataclasses.asdict(run_config({**chosen, **names}))
        usual = _usual(run["recipe"], run["method"], full["smoke"], bool(full["public_data"]))
    except (ConfigError, StudyError, TypeError):
        return given
    unknown = {name: value for name, value in given.items() if name not in _FIELDS}
    return {name: value for name, value in full.items() if value != usual[name]} | unknown


@functools.cache
def _usual(recipe: str, method: str, smoke: bool, public: bool) -> dict[str, Any]:
    """Return the settings of a recipe and a method, with a file of public data that no one has."""
    settings = {
        "recipe": recipe,
        "method": method,
        "smoke": smoke,
        "public_data": "@" if public else "",
    }
    return dataclasses.asdict(run_config(settings))


# --------------------------------------------------------------------------------------------------
# What one worker of a study does: cells, one after the other, and what became of each as plain
# values.

# Errors that no setting of a cell brings about.
_MACHINE_ERRORS = (
    OSError,
    MemoryError,
    CheckpointError,
    LedgerError,
    RunFolderError,
)
# Errors of a disk that takes nothing more.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def work(pipe: Connection, folder: Path, data_dir: str) -> None:
    """Run what comes through a pipe, until it closes.

    While a cell trains, a signal ends it between two steps.

    The answer ("judged", number, accuracy) waits for whether the cell goes on. A cell ends with
    ("done", row, ended), ("failed", reason), ("lost", reason), ("full", reason) or
    ("interrupted",). The machine brings about "lost" and "full".

    Args:
        pipe: to the study.
        folder: run folders are made in `runs` below it, and public examples kept in `public`.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("dpkfc").setLevel(logging.ERROR)
    # The warnings of a plan stand in the row.
    warnings.simplefilter("ignore")
    # The pipe closes when the study has ended.
    with suppress(EOFError, OSError):
        while True:
            run, watched = pipe.recv()
            pipe.send(_outcome(run, watched, pipe, folder, data_dir))


def _outcome(
    run: Run, watched: bool, pipe: Connection, folder: Path, data_dir: str
) -> tuple[Any, ...]:
    def report(number: int, accuracy: float) -> bool:
        pipe.send(("judged", number, accuracy))
        return bool(pipe.recv())

    try:
        row = run.measuring()(
            run,
            folder / "runs",
            data_dir=data_dir,
            public=folder / "public",
            report=report if watched else None,
        )
        return "done", row, False
    except Ended as ended:
        return ("done", ended.row, True) if ended.is_deliberate else ("interrupted",)
    except (EOFError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, (ValueError, CheckpointError, LedgerError)):
            text = f"{type(error).__name__}: {text}"
        if not isinstance(error, _MACHINE_ERRORS):
            return "failed", text
        return "full" if _is_full(error) else "lost", text


def _is_full(error: BaseException | None) -> bool:
    """Return whether a full disk is behind an error, whatever was made of it on the way."""
    while error is not None:
        is_named = any(os.strerror(number) in str(error) for number in _DISK_ERRORS)
        if is_named or getattr(error, "errno", None) in _DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


# --------------------------------------------------------------------------------------------------
# The time that a study is given.


class TimeIsUp(KeyboardInterrupt):
    """The time is up. It derives from Ctrl-C, so that nothing takes it for an error."""


@dataclass
class Clock:
    """The time of a study, which begins when this value is made.

    Attributes:
        minutes: the time; None is no bound.
        expected: seconds of a cell, None where not known.

    Raises:
        StudyError: minutes below zero, or no number of them.
    """

    minutes: float | None
    expected: Callable[[Any], float | None] = lambda run: None
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise StudyError(
                f"--budget {self.minutes:g}: give minutes, 0 (nothing is run) or more; leave it"
                " out for no bound"
            )

    def seconds_left(self) -> float | None:
        """Return the seconds that are left, 0 when the time is up; None is no bound."""
        if self.minutes is None:
            return None
        return max(0.0, 60 * self.minutes - (time.monotonic() - self.started))

    def minutes_left(self) -> float | None:
        """Return the minutes that are left, as `seconds_left`."""
        seconds = self.seconds_left()
        return None if seconds is None else seconds / 60

    def fits(self, run: Any) -> bool:
        """Return whether a cell would end in time, as far as is known."""
        left = self.seconds_left()
        return left is None or (left > 0 and (self.expected(run) or 0.0) <= left)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop what this process does inside when the time is up.

        Outside the main thread, and on Windows, it goes on.

        Raises:
            TimeIsUp: the time was up.
        """
        left = self.seconds_left()
        is_main = threading.current_thread() is threading.main_thread()
        if not left or not is_main or not hasattr(signal, "SIGALRM"):
            yield
            return

        def stop(*_: object) -> None:
            raise TimeIsUp

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


# --------------------------------------------------------------------------------------------------

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Seconds that a worker has to end.
_PATIENCE = 10.0
_TIME_IS_UP = "stopped when the time given was up; it begins anew"


@dataclass(frozen=True)
class Place:
    """Where cells find data and leave their ledgers.

    Attributes:
        folder: run folders are made in `runs` below it.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
    """

    folder: Path
    data_dir: str = ""


@dataclass(frozen=True)
class Task:
    """A cell that is to be run.

    Attributes:
        run: the cell.
        tag: anything by which its source knows it again.
        watched: whether the source wants to see its evaluations.
        label: what a person is shown; empty for the method.
    """

    run: Run
    tag: Any = None
    watched: bool = False
    label: str = ""


# Whether a cell ends within the time left, as far as is known.
Fits = Callable[[Run], bool]


class Source(Protocol):
    """What a study wants to be run, one cell after the other."""

    def next(self, fits: Fits) -> Task | None:
        """Return a cell that can start now and fits into the time left, or None."""

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Return whether a cell goes on after its evaluation; by default nothing ends it."""
        return True

    def done(self, task: Task, row: Row, ended: bool) -> None:
        """Take the row of a cell that has finished; `ended` where `report` ended it."""

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Record a cell that could not be run.

        `lost` says that the machine failed or the time was up, which says nothing of the cell.
        """


def worker_count(count: int | None) -> int:
    """Return how many cells run at once: every core, or as many as asked for.

    Raises:
        StudyError: less than one, or more than there are cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        # The cores that this process may use.
        cores = len(os.sched_getaffinity(0))
    if count is None:
        return cores
    if not 1 <= count <= cores:
        raise StudyError(
            f"workers = {count}: every cell takes one core and there are {cores}; choose 1 to"
            f" {cores}"
        )
    return count


@dataclass
class _Worker:
    """A process and the cell that it runs."""

    process: Any
    pipe: Connection
    task: Task | None = None


def drive(
    source: Source,
    place: Place,
    *,
    workers: int = 1,
    budget_minutes: float | None = None,
    expected: Callable[[Run], float | None] = lambda run: None,
    watcher: StudyProgress | None = None,
) -> None:
    """Run what a source asks for until it asks for nothing more.

    Args:
        source: is called in this process alone.
        place: data and ledgers.
        workers: cells at once, each with one thread.
        budget_minutes: no cell is started whose expected time does not fit, and started cells are
            stopped when it is up, as by Ctrl-C; None is no bound.
        expected: seconds of a cell, None where not known.
        watcher: is shown what happens.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the workers have ended, and what had finished is with
            the source.
        StudyError: a worker process cannot be started, or the disk is full.
    """
    clock = Clock(budget_minutes, expected)
    crew = _Crew(source, place, watcher or StudyProgress(None))
    with _sigterm_interrupts():
        try:
            while True:
                crew.hand_out(clock.fits, workers)
                busy = crew.busy
                if not busy:
                    return
                ready = wait([worker.pipe for worker in busy], clock.seconds_left())
                if clock.seconds_left() == 0:
                    return crew.stop()
                for worker in busy:
                    if worker.pipe in ready:
                        crew.listen(worker)
        finally:
            crew.dismiss()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """End a study at SIGTERM as at Ctrl-C.

    Otherwise SIGTERM would leave the workers behind, each busy with its cell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Crew:
    """The workers of a study, its source, and the progress that a person sees."""

    source: Source
    place: Place
    watcher: StudyProgress
    workers: list[_Worker] = field(default_factory=list)

    @property
    def busy(self) -> list[_Worker]:
        """Workers that have a cell."""
        return [worker for worker in self.workers if worker.task is not None]

    def hand_out(self, fits: Fits, workers: int) -> None:
        """Give cells to so many workers, as long as the source has one that fits."""
        while len(self.busy) < workers:
            task = self.source.next(fits)
            if task is None:
                return
            worker = next((worker for worker in self.workers if worker.task is None), None)
            if worker is None:
                worker = _hire(self.place)
                self.workers.append(worker)
            worker.task = task
            # `listen` notices a dead worker.
            with suppress(OSError):
                worker.pipe.send((task.run, task.watched))
            self.watcher.started(task)

    def stop(self) -> None:
        """End cells because the time is up; one that ends by itself meanwhile is kept."""
        until = time.monotonic() + _PATIENCE
        for worker in self.busy:
            if worker.process.is_alive():
                worker.process.terminate()
        while left := self.busy:
            ready = wait([worker.pipe for worker in left], max(0.0, until - time.monotonic()))
            for worker in left:
                if worker.pipe in ready:
                    self.listen(worker, time_is_up=True)
                elif not ready:
                    worker.process.kill()
                    self._leave(worker)

    def _leave(self, worker: _Worker) -> None:
        """Give back the cell of a worker that is stopped in time."""
        task, worker.task = worker.task, None
        assert task is not None
        self.source.failed(task, _TIME_IS_UP, lost=True)
        self.watcher.out_of_time(task)

    def listen(self, worker: _Worker, *, time_is_up: bool = False) -> None:
        """Take one message of a worker.

        Raises:
            KeyboardInterrupt: a signal has ended its cell, and not because the time was up.
            StudyError: the disk is full.
        """
        task = worker.task
        assert task is not None
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):
            kind, content = "lost", ["its process ended (killed, or out of memory)"]
            worker.pipe.close()
            self.workers.remove(worker)
        if kind == "judged":
            goes_on = self.source.report(task, *content)
            with suppress(OSError):
                worker.pipe.send(goes_on)
            self.watcher.evaluated(task, *content)
            return
        if kind == "full":
            raise StudyError(
                f"{content[0]}; what had finished before is kept, and the same command goes on from"
                " there"
            )
        if time_is_up and kind in ("interrupted", "lost"):
            self._leave(worker)
            return
        if kind == "interrupted":
            raise KeyboardInterrupt
        if kind == "done":
            row, ended = content
            self.source.done(task, row, ended)
            outcome = f"{100 * row['accuracy']:.2f} %" if "accuracy" in row else "measured"
            if ended:
                outcome += " (ended early)"
            self.watcher.finished(task, outcome)
        else:
            (reason,) = content
            self.source.failed(task, reason, lost=kind == "lost")
            show = self.watcher.lost if kind == "lost" else self.watcher.finished
            show(task, reason)
        worker.task = None

    def dismiss(self) -> None:
        """End all workers."""
        for worker in self.workers:
            if worker.task is not None and worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(_PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give processes that start inside one numerical thread each."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name in _THREADS:
            del os.environ[name]
        os.environ.update(before)


def _hire(place: Place) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, place.folder, place.data_dir), daemon=True)
    try:
        with _one_thread():
            process.start()
    except OSError as error:
        raise StudyError(
            f"a worker process cannot be started ({error.strerror or error}); give fewer --workers"
        ) from None
    theirs.close()
    return _Worker(process, ours)


# --------------------------------------------------------------------------------------------------
# What a person sees while cells run side by side.


class StudyProgress:
    """A bar of finished cells, and a line for each that ends. Use it in a `with`.

    A warning, which comes without a bar too, names the cells that were stopped when the time was
    up.

    Args:
        total: cells there will be, those that are done included; None where not known.
        done: cells that were done before.
        console: where to draw; nothing is drawn when it is None.
    """

    def __init__(self, total: int | None, *, done: int = 0, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=console or Console(quiet=True),
            disable=console is None,
        )
        self._bar = self._progress.add_task("cells", total=total, completed=done, now="")
        self._now: dict[str, str] = {}
        self._stopped: list[str] = []

    def started(self, task: Task) -> None:
        """Show that a cell has started."""
        self._show(task, "…")

    def evaluated(self, task: Task, number: int, accuracy: float) -> None:
        """Show an evaluation of a cell, which is for the operator only."""
        self._show(task, f"{100 * accuracy:.1f} %")

    def finished(self, task: Task, outcome: str) -> None:
        """Show that a cell has ended."""
        self._end(task, outcome, advance=1)

    def lost(self, task: Task, reason: str) -> None:
        """Show that a cell was lost to the machine; its place is still open."""
        self._end(task, f"lost to the machine: {reason}", advance=0)

    def out_of_time(self, task: Task) -> None:
        """Show that a cell was stopped because the time was up."""
        self._end(task, "stopped, the time is up", advance=0)
        self._stopped.append(_describe(task))

    def _end(self, task: Task, outcome: str, *, advance: int) -> None:
        self._now.pop(task.run.hash, None)
        self._progress.console.print(f"{_describe(task)}: {outcome}", highlight=False)
        self._progress.update(self._bar, advance=advance, now=self._line())

    def _show(self, task: Task, text: str) -> None:
        self._now[task.run.hash] = f"{task.label or task.run.method} {text}"
        self._progress.update(self._bar, now=self._line())

    def _line(self) -> str:
        return " · ".join(self._now.values())

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._stopped:
            _LOG.warning(
                "the time given was up: stopped %s; what had finished is kept, and the same command"
                " goes on, which begins the stopped ones anew",
                "; ".join(self._stopped),
            )


def _describe(task: Task) -> str:
    run = task.run
    return f"{run.recipe} {task.label or run.method}, seed {run.seed}, {run.evaluate_on}"


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
        self, tasks: Iterable[Task], store: Store, known: Fits = lambda run: False
    ) -> None:
        self._store = store
        wanted = {task.run.hash: task for task in tasks}
        not_stored = [task for task in wanted.values() if store.get(task.run) is None]
        self._left = [task for task in not_stored if not known(task.run)]
        self.total = len(wanted)
        self.done_before = len(wanted) - len(self._left)
        self.failures: dict[str, str] = {}

    def leave_out_what_has_no_data(self, data_dir: str, *, parts: bool = False) -> None:
        """Read every data set once, and leave out the cells without data.

        Args:
            data_dir: folder of the data sets.
            parts: whether files that hold a part of a set are enough.
        """
        reasons = {}
        for recipe in {task.run.recipe for task in self._left}:
            config = run_config({"recipe": recipe, "data_dir": data_dir})
            try:
                part = find_recipe(recipe).data(config).part
            except DatasetError as error:
                reasons[recipe] = str(error)
                continue
            if part and not parts:
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

    def done(self, task: Task, row: Row, ended: bool) -> None:
        """Store a run."""
        self._store.put(task.run, row)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Store the reason; the next call tries the cell again."""
        self.failures[task.run.hash] = reason
