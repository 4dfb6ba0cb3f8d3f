"""One cell of a study: a run as a value with a stable hash, and its execution through the loop of `dpkfc train`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from dpkfc.recipes.catalogue import run_config
from dpkfc.recipes.config import ConfigError, RunConfig
from dpkfc.studies.code import code
from dpkfc.studies.errors import StudyError
from dpkfc.studies.public import resolved

__all__ = ["Ended", "Run", "hardware", "run_cell"]

FORMAT = 1  # of a row
MECHANISM = 1  # raised when runs of equal settings come to other results than before

_MACHINE = {"out", "data_dir", "threads", "device", "num_workers", "max_physical_batch_size", "pad_to_multiple", "chosen_by"}
_OF_RUN = {"recipe", "method", "seed", "eval_on"}
# Former defaults of K-FAC, which rows are silent about that were made under them; of `sides` methods are never silent.
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
        settings: sorted pairs laid over the recipe's TOML; make them from a mapping with `Run.of`. A `public_data` of the form
            `@RECIPE:N` stands for N training images of another recipe.
        seed: public seed of initial weights and probes; noise is never seeded.
        evaluate_on: "validation" or "test".
        measure: what else than its accuracy is measured, as "module:function" with the arguments and the row of `run_cell`;
            empty for a plain run. Figures are cells in this way: same pool, same store, another hash.

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
            raise StudyError(f"{wrong[0]} is no setting of a cell: it is an attribute of `Run`, or chosen by the study")
        return cls(recipe, method, tuple(sorted((settings or {}).items())), seed, evaluate_on, measure)

    @classmethod
    def stored(cls, row: Mapping[str, Any]) -> Run:
        """The run of a stored row.

        A default may have changed since: what the row is silent about is then as its hash says, the former one or today's.

        Args:
            row: with `run`, as of `describe`, and, where the row has one, `hash`.

        Raises:
            ConfigError: settings that this version does not know.
        """
        held = row["run"]
        of_run = {name: held[name] for name in ("seed", "evaluate_on", "measure") if name in held}
        run = cls.of(held["recipe"], held["method"], held["settings"], **of_run)
        former = cls.of(held["recipe"], held["method"], {**_FORMER, **held["settings"]}, **of_run)
        return former if "hash" in row and row["hash"] != run.hash and row["hash"] == former.hash else run

    def config(self, **machine: Plain) -> RunConfig:
        """The settings of the run, all of them."""
        of_run = {"recipe": self.recipe, "method": self.method, "seed": self.seed, "eval_on": self.evaluate_on}
        return run_config({**dict(self.settings), **of_run, **machine})

    def identity(self) -> dict[str, Any]:
        """What decides the result: settings that differ from the library's defaults, resolved; nothing of the machine.

        A recipe's file and a method's preset are resolved, so a change of either is another run; a setting that is added to
        the library later with a default that changes nothing leaves the hash as it is, and so does a default that changes
        for those who do not use it.
        """
        config = self.config()
        defaults = {f.name: f.default for f in dataclasses.fields(RunConfig) if f.name not in _MACHINE | _OF_RUN}
        if config.preconditioner == "kfac":
            defaults |= _UNTOLD
        else:
            defaults = {name: default for name, default in defaults.items() if name not in _UNTOLD}
        changed = {name: value for name, default in defaults.items() if (value := getattr(config, name)) != default}
        return {
            "format": FORMAT,
            "mechanism": MECHANISM,
            "recipe": self.recipe,
            "method": self.method,
            "seed": self.seed,
            "evaluate_on": self.evaluate_on,
            "settings": changed,
            **({"measure": self.measure} if self.measure else {}),
        }

    def default(self, name: str) -> Any:
        """What a recipe and a method come to where they are silent about each other: public data may still be missing."""
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
            **({"measure": self.measure} if self.measure else {}),
        }

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


Report = Callable[[int, float], bool]  # (number of the evaluation from 1, accuracy) to whether the run goes on


def run_cell(
    run: Run, folder: Path, *, data_dir: str = "", public: Path | None = None, report: Report | None = None
) -> dict[str, Any]:
    """Train one cell with one numerical thread and secure noise.

    Args:
        run: the cell.
        folder: the run folder is made below it, named by the hash; what the run spent stays there in its ledger.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        public: folder for the files of public examples that cells of a study share.
        report: sees every evaluation, for the operator only, and may end the run.

    Returns:
        A row of plain values: the run, accuracy in [0, 1] and mean loss on the set that `evaluate_on` names, its course, ε, δ, σ,
        accounting, steps, mean clipped fraction (NOT PRIVATE), seconds and the machine.

    Raises:
        Ended: ended by `report` or by a signal.
        ConfigError: settings that do not go together.
        DatasetError: missing or damaged data.
        RunFolderError: the disk cannot take it.
    """
    from dpkfc.recipes.train import measure, prepare
    from dpkfc.report.run_folder import RunFolder

    started = time.perf_counter()
    public_data = resolved(dict(run.settings).get("public_data", ""), public or folder / "public", data_dir)
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


_LAST: list[tuple[tuple[Plain, ...], Any]] = []  # what this process has read last: cells of a study share their data
_NOT_OF_DATA = ("method", "seed", "eval_on", "evaluate_every")  # settings of the section "run" that data do not depend on


def _read(config: RunConfig) -> Any:
    """The data of a run, from the disk where those of the run before were others. Runs only read them."""
    from dpkfc.recipes.catalogue import find_recipe

    settings = [f for f in dataclasses.fields(config) if f.metadata["section"] == "run" and f.name not in _NOT_OF_DATA]
    key = tuple(getattr(config, setting.name) for setting in settings)
    if not _LAST or _LAST[0][0] != key:
        _LAST[:] = []
        _LAST[:] = [(key, find_recipe(config.recipe).starting_from(config.pretrained).data(config))]
    return _LAST[0][1]


def _row(run: Run, prepared: Any, result: Any, place: Any, wall: float) -> dict[str, Any]:
    from dpkfc.report.metrics import Metrics

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
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {"cpu": name, "threads_a_run": 1, "torch": torch.__version__, "python": platform.python_version()}


def _clear(place: Any) -> None:
    """Leave settings and ledger of a run; what it could be continued from is not needed any more."""
    import shutil

    for path in (place.checkpoint, place.checkpoint.with_name(place.checkpoint.name + ".old")):
        shutil.rmtree(path, ignore_errors=True)
    place.metrics.unlink(missing_ok=True)
