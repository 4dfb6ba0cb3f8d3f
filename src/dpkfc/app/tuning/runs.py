"""Define one cell of a study: a run as a value with a stable hash.

It is executed by the loop of `dpkfc train`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.run_folder import RunFolderError, placed
from dpkfc.app.settings import ConfigError, RunConfig
from dpkfc.privacy.ledger import version

# --------------------------------------------------------------------------------------------------
# Which code a result came from: rows outlive changes of a method, and nothing else in them would
# tell.

# what decides no figure of a run
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
    root, digest = Path(__file__).parents[2], hashlib.sha256()
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
_FLOAT = (float, int)
_NEEDED: Mapping[str, Any] = {
    "run": dict,
    "accuracy": _FLOAT,
    "epsilon": _FLOAT,
    "steps": int,
    "noise_multiplier": _FLOAT,
}
_OF_FIGURES: Mapping[
    str, Mapping[str, Any]
] = {  # by measure; rows of another one may hold anything
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
    """What a row belongs to: `studies.cell.Run`, or another run with a hash."""

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
        self._lock: TextIO | None = None

    def __enter__(self) -> Store:
        self._lock = _locked(self.path.with_name(self.path.name + ".lock"))
        self._rows = _read_rows(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows of training runs."""
        return iter([row for row in self._rows.values() if not row["run"].get("measure")])

    def figures(self) -> list[dict[str, Any]]:
        """Rows of runs with a measure of their own."""
        return [row for row in self._rows.values() if row["run"].get("measure")]

    def get(self, run: Cell) -> dict[str, Any] | None:
        """The row of a finished run."""
        return self._rows.get(run.hash)

    def put(self, run: Cell, row: Mapping[str, Any]) -> None:
        """Keep a row; on the disk when this returns.

        Raises:
            StudyError: the disk cannot take it; all earlier rows are still there.
        """
        self._rows[run.hash] = dict(row)
        content = {"kind": KIND, "version": VERSION, "rows": self._rows}
        text = (
            json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
            + "\n"
        )
        try:
            placed(self.path, lambda part: part.write_text(text, "utf-8"), private=True)
        except RunFolderError as error:
            raise StudyError(
                f"{error}; the results before it are kept, and the same command goes on from them"
            ) from None


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
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
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or not isinstance(content.get("rows"), dict)
    ):
        raise StudyError(
            f"{path} is no results file of a study; choose another --out, or move it away"
        )
    if content.get("version") != VERSION:
        raise StudyError(
            f"results file {path} is of version {content.get('version')!r}, this dpkfc reads"
            f" {VERSION}; use the version that wrote it, or choose another --out"
        )
    rows = {key: row for key, row in content["rows"].items() if _is_row(row)}
    if len(rows) < len(content["rows"]):
        lost = len(content["rows"]) - len(rows)
        _LOG.warning("results file %s: %d entries are incomplete and will be run again", path, lost)
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("run"), dict):
        return False
    measure = row["run"].get("measure")  # a figure has rows of its own
    needed = _OF_FIGURES.get(str(measure), {}) if measure else _NEEDED
    if not all(
        isinstance(row.get(name), kind) and row[name] not in ([], {})
        for name, kind in needed.items()
    ):
        return False
    return not (measure and "checkpoints" in needed) or all(
        _is_checkpoint(one) for one in row["checkpoints"]
    )


def _is_checkpoint(one: Any) -> bool:
    return (
        isinstance(one, dict) and one.keys() >= _OF_CHECKPOINTS and isinstance(one["layers"], dict)
    )


def _locked(path: Path) -> TextIO | None:
    """Lock a file until the process ends, however it ends; None where locks do not exist."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written ({error.strerror or error}); make room, or choose another"
            " --out"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StudyError(
            f"another process works on {path.with_suffix('')}; wait for it, or choose another --out"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


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
    found = _NAMED.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return str(name)
    recipe, count = found["recipe"], int(found["count"])
    path = folder / f"{recipe}-{count}.safetensors"
    if not _is_whole(path, count):
        if path.exists():
            _LOG.warning("public examples %s: the file is damaged and is made again", path)
        _write(path, recipe, count, data_dir)
    return str(path)


def _is_whole(path: Path, count: int) -> bool:
    """Whether a file holds so many examples, by its header and its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as held:
            return all(
                held.get_slice(name).get_shape()[:1] == [count] for name in ("inputs", "labels")
            )
    except (OSError, SafetensorError):
        return False


def _write(path: Path, recipe: str, count: int, data_dir: str) -> None:
    import torch
    from safetensors.torch import save_file

    inputs, labels = _examples(recipe, data_dir)
    if not 0 < count <= len(labels):
        raise StudyError(
            f"public_data = '@{recipe}:{count}': the set has {len(labels)} training examples;"
            " choose 1 to that"
        )
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))[:count]
    chosen = inputs[rows]
    if recipe == "ag-news-sentences":
        from dpkfc.app.pretrained import encode_tokens

        # The encoder is slow, so it sees the chosen texts alone.
        chosen = encode_tokens(chosen)
    content = {
        "inputs": chosen.clone().contiguous(),
        "labels": labels[rows].clone().contiguous(),
    }
    placed(path, lambda part: save_file(content, part))


def _examples(name: str, data_dir: str) -> tuple[Any, Any]:
    """Training inputs and labels of a recipe, or of a set in the form of one."""
    if name == "cifar100":
        from dpkfc.app.datasets.sources import CIFAR100, load_pixels
        from dpkfc.app.recipes.images import CIFAR10_NORMALISATION

        return load_pixels(CIFAR100, data_dir or None).tensors(CIFAR10_NORMALISATION).train
    if name == "ag-news-words":
        from dpkfc.app.datasets.text import AG_NEWS, hashed_texts, load_texts
        from dpkfc.app.recipes.text import SIZE

        return (
            load_texts(AG_NEWS, data_dir or None)
            .tensors(lambda lines: hashed_texts(lines, SIZE))
            .train
        )
    if name == "ag-news-sentences":
        from dpkfc.app.datasets.text import AG_NEWS, load_texts
        from dpkfc.app.pretrained import minilm_tokens
        from dpkfc.app.recipes.text import HEAD_LENGTH

        return (
            load_texts(AG_NEWS, data_dir or None)
            .tensors(lambda lines: minilm_tokens(lines, HEAD_LENGTH))
            .train
        )
    from dpkfc.app.recipes.catalogue import find_recipe

    given = {"data_dir": data_dir} if data_dir else {}
    return find_recipe(name).data(run_config({"recipe": name, **given})).train


# --------------------------------------------------------------------------------------------------

FORMAT = 1  # of a row
MECHANISM = 1  # raised when runs of equal settings come to other results than before
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
# Former defaults of K-FAC, which rows are silent about that were made under them; of `sides`
# methods are never silent.
_FORMER: dict[str, Any] = {"max_rank": 64}
_UNTOLD: dict[str, Any] = {**_FORMER, "sides": "both"}
Plain = str | int | float | bool


class Ended(Exception):
    """A run that was ended before its last step, with what it came to until then.

    Args:
        row: the figures so far, as of `run_cell`.
        asked: True where the one who watched wanted it, False for a signal.
    """

    def __init__(self, row: dict[str, Any], asked: bool) -> None:
        super().__init__("ended early")
        self.row, self.asked = row, asked


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
        """A run from a mapping of settings."""
        wrong = sorted((_OF_RUN | {"out", "test_mode"}) & set(settings or {}))
        if wrong:
            raise StudyError(
                f"{wrong[0]} is no setting of a cell: it is an attribute of `Run`, or chosen by"
                " the study"
            )
        return cls(
            recipe, method, tuple(sorted((settings or {}).items())), seed, evaluate_on, measure
        )

    @classmethod
    def stored(cls, row: Mapping[str, Any]) -> Run:
        """The run of a stored row.

        A default may have changed since: what the row is silent about is then as its hash says, the
        former one or today's.

        Args:
            row: with `run`, as of `describe`, and, where the row has one, `hash`.

        Raises:
            ConfigError: settings that this version does not know.
        """
        held = row["run"]
        of_run = {name: held[name] for name in ("seed", "evaluate_on", "measure") if name in held}
        run = cls.of(held["recipe"], held["method"], held["settings"], **of_run)
        former = cls.of(held["recipe"], held["method"], {**_FORMER, **held["settings"]}, **of_run)
        return (
            former
            if "hash" in row and row["hash"] != run.hash and row["hash"] == former.hash
            else run
        )

    def config(self, **machine: Plain) -> RunConfig:
        """The settings of the run, all of them."""
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
        defaults = {
            f.name: f.default
            for f in dataclasses.fields(RunConfig)
            if f.name not in _MACHINE | _OF_RUN
        }
        if config.preconditioner == "kfac":
            defaults |= _UNTOLD
        else:
            defaults = {name: default for name, default in defaults.items() if name not in _UNTOLD}
        changed = {
            name: value
            for name, default in defaults.items()
            if (value := getattr(config, name)) != default
        }
        return {
            "format": FORMAT,
            "mechanism": MECHANISM,
            "recipe": self.recipe,
            "method": self.method,
            "seed": self.seed,
            "evaluate_on": self.evaluate_on,
            "settings": changed,
            **self._measure,
        }

    def default(self, name: str) -> Any:
        """Return the settings that a recipe and a method give; public data may still be missing."""
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
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """The run for a file of results; `Run.of` takes it back."""
        return {
            "recipe": self.recipe,
            "method": self.method,
            "settings": dict(self.settings),
            "seed": self.seed,
            "evaluate_on": self.evaluate_on,
            **self._measure,
        }

    @property
    def _measure(self) -> dict[str, str]:
        return {"measure": self.measure} if self.measure else {}

    def measuring(self) -> Callable[..., dict[str, Any]]:
        """What runs the cell: `run_cell`, or what `measure` names.

        Raises:
            StudyError: there is no such function.
        """
        if not self.measure:
            return run_cell
        module, _, name = self.measure.partition(":")
        try:
            found: Callable[..., dict[str, Any]] = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise StudyError(f"measure = {self.measure!r} names no function ({error})") from None
        return found


# (number of the evaluation from 1, accuracy) to whether the run goes on
Report = Callable[[int, float], bool]


def run_cell(
    run: Run,
    folder: Path,
    *,
    data_dir: str = "",
    public: Path | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
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
    from dpkfc.app.run_folder import RunFolder
    from dpkfc.app.train import measure, prepare

    started = time.perf_counter()
    public_data = resolved(
        dict(run.settings).get("public_data", ""), public or folder / "public", data_dir
    )
    files: dict[str, Plain] = {"public_data": public_data} if public_data else {}
    config = run.config(threads=1, data_dir=data_dir, **files)
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
    except BaseException:
        _clear(place)  # a full disk gets its space back
        raise
    row = _row(run, prepared, result, place, time.perf_counter() - started)
    _clear(place)
    if result.interrupted:
        raise Ended(row, asked=stopped)
    return row


_LAST: list[
    tuple[tuple[Plain, ...], Any]
] = []  # what this process has read last: cells of a study share their data
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
    from dpkfc.app.recipes.catalogue import recipe_of

    key = tuple(getattr(config, name) for name in _OF_DATA)
    if not _LAST or _LAST[0][0] != key:
        _LAST[:] = []
        _LAST[:] = [(key, recipe_of(config).starting_from(config.pretrained).data(config))]
    return _LAST[0][1]


def _row(run: Run, prepared: Any, result: Any, place: Any, wall: float) -> dict[str, Any]:
    from dpkfc.app.run_folder import Metrics

    plan, metrics = prepared.plan, Metrics.read(place.metrics)
    clipped = [row.clipped_fraction for row in metrics.rows if row.clipped_fraction is not None]
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": result.accuracy,
        "measured_on": result.measured_on,
        "score": getattr(result, "score", "accuracy"),
        "loss": getattr(result, "loss", None),
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
    """The processor and the versions that a timing belongs to."""
    import torch

    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": name,
        "threads_a_run": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _clear(place: Any) -> None:
    """Keep settings and ledger of a run; remove the files that only a continuation needs."""
    for path in (place.checkpoint, place.checkpoint.with_name(place.checkpoint.name + ".old")):
        shutil.rmtree(path, ignore_errors=True)
    place.metrics.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Of a run's settings those that its recipe and method do not say by themselves: how a report tells
# equal runs from others.

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
            held = Run.stored({"run": {**run, "settings": given}, "hash": run["hash"]})
            if held.hash != run["hash"]:
                return given
            given = dict(held.settings)
        chosen = {name: value for name, value in given.items() if name in _FIELDS}
        said = {"recipe": run["recipe"], "method": run["method"]}
        full = dataclasses.asdict(run_config({**chosen, **said}))
        usual = _usual(run["recipe"], run["method"], full["smoke"], bool(full["public_data"]))
    except (ConfigError, StudyError, TypeError):
        return given
    unknown = {name: value for name, value in given.items() if name not in _FIELDS}
    return {name: value for name, value in full.items() if value != usual[name]} | unknown


@functools.cache
def _usual(recipe: str, method: str, smoke: bool, public: bool) -> dict[str, Any]:
    """What a recipe and a method come to; in the place of public data a name that no file has."""
    said = {
        "recipe": recipe,
        "method": method,
        "smoke": smoke,
        **({"public_data": "@"} if public else {}),
    }
    return dataclasses.asdict(run_config(said))
