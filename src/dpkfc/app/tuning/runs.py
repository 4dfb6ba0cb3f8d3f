"""A private training run of a study: a value with a stable hash, and what training it comes to."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch

from dpkfc.app.metrics import Metrics
from dpkfc.app.recipes.catalogue import read_data, run_config
from dpkfc.app.recipes.objective import finite
from dpkfc.app.run_config import SETTINGS, RunConfig
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.toml import ConfigError
from dpkfc.privacy.ledger_lines import version


class StudyError(ValueError):
    """A study that cannot be read, written or run as it was asked for."""


# A finished run as plain values.
Row = dict[str, Any]
Plain = str | int | float | bool
# Format of a row.
FORMAT = 1
# Raised when runs of equal settings come to other results than before.
MECHANISM = 1
_MACHINE = {
    "out",
    "data_dir",
    "threads",
    "device",
    "capture_graphs",
    "compile",
    "num_workers",
    "max_physical_batch_size",
    "chosen_by",
}
_OF_RUN = {"recipe", "method", "seed", "eval_on"}
# Values of K-FAC that a hash leaves out, whatever the defaults are.
_UNSTATED: dict[str, Any] = {"max_rank": 64, "sides": "both"}
# Parts of the package that decide no figure of a run.
_NOT_IN_RESULTS = {"audit", "federated", "integrations", "report", "cli.py", "html", "tuning"}


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
        settings: sorted pairs laid over the recipe's TOML; `Run.make` takes a mapping.
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
    def make(
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
                f"{name} is not a setting of a cell: it is an attribute of `Run`, or chosen by"
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

        No property of the machine is among them.

        A recipe's file and a method's preset are resolved, so a change of either is another run; a
        setting that is added to the library later with a default that changes nothing leaves the
        hash as it is, and so does a default that changes for those who do not use it.
        """
        config = self.config()
        left_out = _MACHINE | _OF_RUN
        if config.preconditioner.preconditioner != "kfac":
            left_out = left_out.union(_UNSTATED)
        changed = {}
        for name, value in config.values.items():
            if name not in left_out and value != _UNSTATED.get(name, SETTINGS[name].default):
                changed[name] = value
        return {
            "format": FORMAT,
            "mechanism": MECHANISM,
            **self.describe(),
            "settings": changed,
        }

    def default(self, name: str) -> Any:
        """Return a setting as recipe and method give it; public data may still be missing."""
        return self._defaults.values[name]

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
        """Return the run for a file of results; `Run.make` takes it back."""
        content = {**dataclasses.asdict(self), "settings": dict(self.settings)}
        if not self.measure:
            del content["measure"]
        return content

    def find_measure(self) -> Callable[..., Row]:
        """Return what runs the cell: `run_cell`, or what `measure` names.

        Raises:
            StudyError: the function does not exist.
        """
        if not self.measure:
            return run_cell
        try:
            return cast("Callable[..., Row]", resolve_name(self.measure))
        except (ImportError, AttributeError, ValueError) as error:
            raise StudyError(f"measure = {self.measure!r} names no function ({error})") from None


# Maps the number of an evaluation (from 1) and its accuracy to whether the run goes on.
Judge = Callable[[int, float], bool]


@dataclass(frozen=True)
class Place:
    """Where runs find data and leave their ledgers.

    Attributes:
        folder: run folders are made in `runs` below it.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        localise: returns settings of a run that only this place knows, such as the path of a file;
            a function of a module, as worker processes call it.
    """

    folder: Path
    data_dir: str = ""
    localise: Callable[[Run, Place], Mapping[str, Plain]] | None = None


def run_cell(run: Run, place: Place, judge: Judge | None = None) -> Row:
    """Train one run with one numerical thread and secure noise.

    Args:
        run: the run.
        place: a folder named by the hash is made in it; what the run spent stays there in its
            ledger.
        judge: sees every evaluation, for the operator only, and may end the run.

    Returns:
        A row of plain values: the run, accuracy in [0, 1] and mean loss on the set that
        `evaluate_on` names, its course, ε, δ, σ, accounting, steps, mean clipped fraction (NOT
        PRIVATE), seconds and the machine.

    Raises:
        Ended: ended by `judge` or by a signal.
        ConfigError: settings that do not go together.
        DatasetError: missing or damaged data.
        RunFolderError: the disk cannot take it.
    """
    from dpkfc.app.prepare import prepare
    from dpkfc.app.train import measure

    started = time.perf_counter()
    machine: dict[str, Plain] = {"threads": 1, "data_dir": place.data_dir}
    if place.localise is not None:
        machine.update(place.localise(run, place))
    config = run.config(**machine)
    prepared = prepare(config, read_once(config))
    folder = RunFolder.fresh(place.folder / "runs", run.hash)
    evaluations = 0
    stopped = False

    def watch(row: Any) -> bool:
        nonlocal evaluations, stopped
        evaluations += 1
        stopped = judge is not None and not judge(evaluations, finite(row.accuracy) or 0.0)
        return not stopped

    try:
        result = measure(prepared, folder, watch)
        row = _row(run, prepared, result, folder, time.perf_counter() - started)
    finally:
        # A full disk gets its space back.
        _clear(folder)
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


def read_once(config: RunConfig) -> Any:
    """Return the data of a run, read again if the run before had other data.

    Runs only read them.
    """
    key = tuple(config.values[name] for name in _OF_DATA)
    if key not in _LAST:
        # The data before are dropped first, so that both are never in memory.
        _LAST.clear()
        _LAST[key] = read_data(config)
    return _LAST[key]


def _row(run: Run, prepared: Any, result: Any, folder: RunFolder, wall: float) -> Row:
    plan = prepared.plan
    metrics = Metrics.read(folder.metrics)
    clipped = [row.clipped_fraction for row in metrics.rows if row.clipped_fraction is not None]
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": finite(result.accuracy) or 0.0,
        "measured_on": result.measured_on,
        "score": result.score,
        "loss": result.loss,
        "curve": [
            [row.step, round(finite(row.accuracy) or 0.0, 5)] for row in metrics.select_evaluated()
        ],
        "epsilon": result.epsilon,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "bands": plan.bands,
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


def _clear(folder: RunFolder) -> None:
    """Keep settings and ledger of a run; remove the files that only a continuation needs."""
    checkpoint = folder.checkpoint
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.rmtree(checkpoint.with_name(checkpoint.name + ".old"), ignore_errors=True)
    folder.metrics.unlink(missing_ok=True)


@functools.cache
def code() -> dict[str, str]:
    """Return the version of the package and a digest of the sources that decide results.

    Rows outlive changes of a method, and nothing else in them would tell. The digest is twelve
    digits of a SHA-256.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if not _NOT_IN_RESULTS.intersection(place.parts[:2]):
            digest.update(place.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {"dpkfc": version("dpkfc"), "sources": digest.hexdigest()[:12]}
