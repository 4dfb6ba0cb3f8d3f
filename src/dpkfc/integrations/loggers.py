"""Write the numbers of a session to TensorBoard, MLflow or Weights & Biases.

    Session(plan, model, optimizer, dataset, callbacks=[Logger(TensorBoard("runs/first"))])

A logger writes numbers that ε covers. With `private=True` it also writes numbers of private
batches, under names that begin with `not_private/`, and the privacy card names them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dpkfc.callbacks import Callback, StepReport
from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan
from dpkfc.curvature.base import PreconditionerState

# Tools record the time of every number. It follows the size of the private batch, as the seconds of
# a step do, so writers give all public numbers the time at which the run began.


# Public settings of a run, by name.
Parameters = Mapping[str, Any]
# Numbers of one step, by name.
Figures = Mapping[str, float]


class Writer(Protocol):
    """A tool that keeps numbers by name and step."""

    def open(self, parameters: Parameters, *, private: bool) -> None:
        """Begin a run with its public parameters; `private` hides it from other users."""
        ...

    def write(self, figures: Figures, step: int) -> None:
        """Write numbers of one step."""
        ...

    def close(self) -> None:
        """End the run."""
        ...


class Logger(Callback):
    """Hands the numbers of every step to a writer.

    Args:
        writer: `TensorBoard`, `MLflow`, `WandB` or your own.
        private: also write batch size, clipped and non-finite fraction, median norm and seconds,
            which ε does not cover.
    """

    def __init__(self, writer: Writer, *, private: bool = False) -> None:
        self.private = private
        self._writer = writer
        self._scale: float | None = None

    def on_start(self, session: Any) -> None:
        """Begin a run with the parameters of the plan."""
        parameters = describe_plan(session.plan)
        self._writer.open(parameters, private=self.private)

    def on_refresh(self, state: PreconditionerState) -> None:
        """Remember the scale of a preconditioner, which is written with its step."""
        self._scale = state.scale

    def on_step(self, report: StepReport) -> None:
        """Write the numbers of a step under the number of its release."""
        figures = {
            "epsilon": report.epsilon,
            "learning_rate": report.learning_rate,
            "noise_multiplier": report.noise_multiplier,
            **report.notes,
        }
        if self._scale is not None:
            figures["preconditioner_scale"] = self._scale
            self._scale = None
        for name, value in (report.private or {}).items():
            figures[f"not_private/{name}"] = value
        self._writer.write(figures, report.release)

    def on_end(self, session: Any) -> None:
        """End the run."""
        self._writer.close()


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the public parameters of a plan that are single values, by name."""
    preconditioner = plan.config.preconditioner
    name = "none" if preconditioner is None else type(preconditioner).__name__
    described = {**plan.describe(), "preconditioner": name}
    return {key: x for key, x in described.items() if not isinstance(x, (list, dict))}


class TensorBoard:
    """Writes event files of TensorBoard.

    Args:
        folder: of the event files, one a run; readable by its owner alone if the logger is private.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(self, folder: StrPath) -> None:
        _import("tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None
        self._began = 0.0

    def open(self, parameters: Parameters, *, private: bool) -> None:
        """Open an event file and write the parameters as a text."""
        # torch's module imports tensorboard.
        tensorboard = _import("torch.utils.tensorboard")
        _make_folder(self._folder, private)
        self._writer = tensorboard.SummaryWriter(self._folder)
        self._began = time.time()
        rows = ["|parameter|value|", "|---|---|"]
        for name, value in parameters.items():
            rows.append(f"|{name}|{value}|")
        self._writer.add_text("plan", "\n".join(rows), 0, walltime=self._began)

    def write(self, figures: Figures, step: int) -> None:
        """Write a scalar for each number."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=self._began)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MLflow:
    """Writes a run of MLflow; its server or file comes from MLflow's own settings.

    Args:
        experiment: created where it does not exist.
        tracking_uri: of server or file; None takes MLflow's own.
        name: of the run; None lets MLflow choose one.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(
        self, experiment: str = "dpkfc", tracking_uri: str | None = None, name: str | None = None
    ) -> None:
        _import("mlflow")
        self._experiment = experiment
        self._uri = tracking_uri
        self._name = name
        self._client: Any = None
        self._run = ""
        self._began = 0

    def open(self, parameters: Parameters, *, private: bool) -> None:
        """Create a run and write the parameters."""
        mlflow = _import("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            number = self._client.create_experiment(self._experiment)
        else:
            number = experiment.experiment_id
        run = self._client.create_run(number, run_name=self._name)
        self._run = run.info.run_id
        self._began = round(1000 * time.time())
        for name, value in parameters.items():
            self._client.log_param(self._run, name, value)

    def write(self, figures: Figures, step: int) -> None:
        """Write a metric for each number."""
        for name, value in figures.items():
            self._client.log_metric(self._run, name, float(value), self._began, step)

    def close(self) -> None:
        """End the run, without the time: how long it took follows private batches."""
        self._client.set_terminated(self._run, end_time=self._began)


class WandB:
    """Writes a run of Weights & Biases; account, project and mode come from its own settings.

    What the console shows and how much memory and processor a run takes follow private batches, so
    neither is recorded. The tool notes when a row arrives (`_runtime`), so rows wait for the end of
    the run unless the logger is private. How long the whole run took remains in the tool's files.

    Args:
        folder: of the files of the run, readable by its owner alone if the logger is private; None
            takes the present one.
        options: further arguments of `wandb.init`, such as `project` and `mode`; neither `settings`
            nor `dir`.

    Raises:
        ImportError: the package is not installed.
        ValueError: `settings` or `dir` among the options.
    """

    def __init__(self, folder: StrPath | None = None, **options: Any) -> None:
        _import("wandb")
        if "settings" in options:
            raise ValueError(
                "WandB takes no settings=, which could record the console; leave it out"
            )
        if "dir" in options:
            raise ValueError(
                "WandB takes no dir=, which a private logger could not protect; give folder="
            )
        self._folder = folder
        self._options = options
        self._run: Any = None
        self._began = 0.0
        self._is_live = False
        self._rows: list[tuple[dict[str, float], int]] = []

    def open(self, parameters: Parameters, *, private: bool) -> None:
        """Begin a run with the parameters as its configuration."""
        self._is_live = private
        wandb = _import("wandb")
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
        options = {"project": "dpkfc", **self._options}
        if self._folder is not None:
            options["dir"] = Path(self._folder)
            _make_folder(options["dir"], private)
        self._run = wandb.init(config=dict(parameters), settings=settings, **options)
        self._began = time.time()

    def write(self, figures: Figures, step: int) -> None:
        """Write the numbers as one row of the history."""
        row = {**figures, "_timestamp": self._began}
        self._rows.append((row, step))
        if self._is_live:
            self._hand_over()

    def close(self) -> None:
        """Hand over what waits, and end the run."""
        self._hand_over()
        self._run.finish()

    def _hand_over(self) -> None:
        for row, step in self._rows:
            self._run.log(row, step=step)
        self._rows = []


def _make_folder(folder: Path, private: bool) -> None:
    """Make a folder; close it to others if it gets private numbers.

    Raises:
        ValueError: it belongs to another user.
    """
    folder.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
    try:
        if private:
            folder.chmod(0o700)
    except PermissionError:
        raise ValueError(
            f"the log folder {folder.name} belongs to another user, who could read private numbers;"
            " name another folder"
        ) from None


_WRITERS: dict[str, Callable[[Path, str], Writer]] = {
    "tensorboard": lambda folder, title: TensorBoard(folder),
    "mlflow": lambda folder, title: MLflow(name=title),
    "wandb": lambda folder, title: WandB(folder, name=title),
}
LOGGERS = tuple(_WRITERS)


def make_logger(name: str, folder: StrPath, title: str, *, private: bool = False) -> Logger:
    """Return the logger of a run folder.

    Args:
        name: "tensorboard", "mlflow" or "wandb".
        folder: of the run. Files of TensorBoard and Weights & Biases lie in its folder `log`.
        title: name of the run.
        private: as in `Logger`.

    Raises:
        ValueError: another name.
        ImportError: the package is not installed.
    """
    if name not in LOGGERS:
        raise ValueError(f"there is no logger {name!r}; choose one of {', '.join(LOGGERS)}")
    writer = _WRITERS[name](Path(folder) / "log", title)
    return Logger(writer, private=private)


def check_logger(name: str) -> None:
    """Check that the package of a logger is installed; "" stands for no logger.

    Raises:
        ImportError: naming the command that installs it.
    """
    if name:
        _import(name)


def _import(name: str) -> Any:
    """Return a module of an optional package.

    Raises:
        ImportError: it is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.rpartition(".")[2]
        raise ImportError(
            f"logging to {package} needs the package {package} ({str(error)[:60]}); pip install"
            f" {package}, or '.[log]'"
        ) from error
