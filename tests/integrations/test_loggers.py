"""Loggers write what ε covers, and the rest only where they are told to."""

import sys
import time
from types import SimpleNamespace

import pytest

from dpkfc import Callback
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.integrations import loggers
from dpkfc.integrations.loggers import (
    LOGGERS,
    Logger,
    MLflow,
    TensorBoard,
    WandB,
    describe_plan,
    make_logger,
)
from dpkfc.step_record import PRIVATE_FIGURES
from tests.app.finished import call
from tests.test_session import kfac, net, plan, session, train

PUBLIC = {"epsilon", "learning_rate", "noise_multiplier"}
PRIVATE = {f"not_private/{name}" for name in PRIVATE_FIGURES}


class Kept:
    """A writer that keeps what it is handed."""

    def __init__(self):
        self.rows = []
        self.parameters = {}
        self.private = self.is_closed = None

    def open(self, parameters, *, private):
        self.parameters, self.private = dict(parameters), private

    def write(self, figures, step):
        self.rows.append((step, dict(figures)))

    def close(self):
        self.is_closed = True


def train_logged(logger, **settings):
    with session(plan(1.0, test_mode_seed=None, **settings), net(), callbacks=[logger]) as s:
        train(s)
    return s


@pytest.mark.parametrize("private", [False, True])
def test_a_logger_writes_public_numbers_and_others_only_when_told(private):
    writer = Kept()
    s = train_logged(Logger(writer, private=private), preconditioner=kfac())
    assert writer.parameters == describe_plan(s.plan) and writer.private is private
    assert writer.is_closed and [step for step, _ in writer.rows] == [1, 2, 3, 4, 5, 6]
    expected = PUBLIC | (PRIVATE if private else set())
    for step, figures in writer.rows:
        scale = {"preconditioner_scale"} if step in (1, 3, 5) else set()
        assert set(figures) == expected | scale
    assert bool(s.unprotected_figures) is private


def test_public_parameters_name_no_realised_batch():
    parameters = describe_plan(plan(1.0))
    assert parameters["expected_batch_size"] == 8 and "batch_size" not in parameters
    assert parameters["preconditioner"] == "none"


@pytest.mark.parametrize("name", LOGGERS)
def test_a_package_that_is_absent_is_one_error_with_the_command(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"needs the package {name}.*pip install {name}"
    ) as caught:
        make_logger(name, tmp_path, "run")
    assert len(str(caught.value)) <= 160 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", LOGGERS)
def test_a_run_that_cannot_log_says_so_before_it_makes_anything(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    folder = tmp_path / "run"
    result = call("train", "--recipe", "digits", "--steps", 2, "--log", name, "--out", folder)
    assert result.exit_code != 0 and not folder.exists()
    assert f"pip install {name}" in " ".join(result.output.split())


def test_settings_of_logging_are_checked():
    with pytest.raises(ConfigError, match="log"):
        make_config(recipe="digits", log="tensorbord")
    with pytest.raises(ConfigError, match="log_private = true needs log"):
        make_config(recipe="digits", log_private=True)
    with pytest.raises(ValueError, match="choose one of tensorboard, mlflow, wandb"):
        make_logger("aim", ".", "run")


# -- the tools themselves --------------------------------------------------------------------------


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.parametrize("private", [False, True])
def test_tensorboard(private, tmp_path):
    pytest.importorskip("tensorboard")
    began = time.time()
    s = train_logged(Logger(TensorBoard(tmp_path / "log"), private=private))
    events = read_events(tmp_path / "log")
    assert set(events.Tags()["scalars"]) == PUBLIC | (PRIVATE if private else set())
    found = events.Scalars("epsilon")
    assert [event.step for event in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1].value == pytest.approx(s.epsilon, rel=1e-5)
    # The time of a step follows the size of its batch.
    assert len({event.wall_time for event in found}) == 1 and found[0].wall_time >= began
    if private:
        assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_a_folder_that_gets_private_numbers_is_closed_to_others(tmp_path, monkeypatch):
    folder = tmp_path / "log"
    folder.mkdir(0o755)
    loggers._make_folder(folder, private=False)
    assert folder.stat().st_mode & 0o777 == 0o755
    loggers._make_folder(folder, private=True)
    assert folder.stat().st_mode & 0o777 == 0o700

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(type(folder), "chmod", refuse)
    with pytest.raises(ValueError, match="belongs to another user"):
        loggers._make_folder(folder, private=True)


def test_mlflow_gets_the_begin_for_the_end(monkeypatch):
    times = []
    info = SimpleNamespace(run_id="run")

    class Client:
        def __init__(self, tracking_uri=None): ...
        def get_experiment_by_name(self, name): ...
        def log_param(self, *values): ...

        def create_experiment(self, name):
            return "0"

        def create_run(self, experiment, run_name=None):
            return SimpleNamespace(info=info)

        def log_metric(self, run, name, value, time, step):
            times.append(time)

        def set_terminated(self, run, status=None, end_time=None):
            times.append(end_time)

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    train_logged(Logger(MLflow()))
    assert len(set(times)) == 1 and times[0] > 0


def test_wandb_gets_one_time_and_settings_that_record_nothing_else(monkeypatch, tmp_path):
    rows, made, waiting = [], {}, []
    kept = SimpleNamespace(log=lambda row, step: rows.append((step, row)), finish=lambda: None)

    def init(**options):
        made.update(options)
        return kept

    fake = SimpleNamespace(Settings=lambda **settings: settings, init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    class Watch(Callback):
        def on_step(self, report):
            waiting.append(len(rows))

    logger = Logger(WandB(tmp_path, project="mine", mode="offline"))
    with session(plan(1.0, test_mode_seed=None), net(), callbacks=[logger, Watch()]) as s:
        train(s)
    # The tool notes when a row arrives.
    assert waiting == [0] * 6
    assert made["settings"] == {"console": "off", "x_disable_stats": True, "x_disable_meta": True}
    assert made["project"] == "mine" and made["config"]["delta"] == 1e-3
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert len({row["_timestamp"] for _, row in rows}) == 1
    assert set(rows[0][1]) == PUBLIC | {"_timestamp"}
    with pytest.raises(ValueError, match="takes no settings="):
        WandB(settings={"console": "wrap"})
    with pytest.raises(ValueError, match="takes no dir=.*give folder="):
        WandB(dir=tmp_path)
