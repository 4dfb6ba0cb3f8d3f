"""Training end to end on tiny budgets: the run folder, interruption, resuming, refusals before any
training.
"""

import json
import os
import shutil
import signal
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from dpkfc.app import picture_style, results, train, training_loop
from dpkfc.app.demo import COMPARED, demo
from dpkfc.app.doctor import load_target
from dpkfc.app.html.contents import read_all
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.recipes.objective import evaluate
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import resume, run
from dpkfc.app.training_loop import stop_on_signals
from dpkfc.privacy.ledger import verify
from dpkfc.report.verify import verify_ledger
from tests.app.finished import read_card

QUICK = {
    "recipe": "digits",
    "steps": 4,
    "expected_batch_size": 24,
    "accountant": "rdp",
    "epsilon": 0.5,
    "probe_size": 16,
    "every": 2,
    "evaluate_every": 2,
}

# Fixtures of this folder leave them out.
SAVE, MEASURE_FIGURES = picture_style.save, results._measure_figures


def _config(out, **changed):
    return run_config({**QUICK, "out": str(out), **changed})


@contextmanager
def draw_figures():
    """Draw figures, and measure them in full."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dpkfc.app.picture_style.save", SAVE)
        patched.setattr("dpkfc.app.results._measure_figures", MEASURE_FIGURES)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with draw_figures():
        return run(_config(folder)), folder


def test_a_run_leaves_its_folder(finished):
    result, folder = finished
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "model.safetensors",
        "config.toml",
        "metrics.parquet",
        "ledger.jsonl",
        "privacy_card.json",
        "privacy_card.md",
        "figures.json",
    } <= names
    assert not [name for name in names if name.endswith(".part")]
    assert not result.interrupted and result.steps == 4 and 0 < result.epsilon <= 0.5


def test_the_first_page_draws_the_pictures_of_a_run(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    titles = ["Signal-to-noise ratio of each layer", "Spectra of the curvature factors"]
    assert list(read_all([folder]).runs[0].pictures) == titles
    drawn = {path: path.stat().st_mtime_ns for path in (folder / "plots").iterdir()}
    assert len(drawn) == 2 and read_all([folder]).runs[0].pictures.keys() == set(titles)
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn
    content = json.loads((folder / "figures.json").read_text("utf-8"))
    for damaged in ({}, {**content, "signal": [{"label": 1}]}, {**content, "batch_size": "many"}):
        (folder / "figures.json").write_text(json.dumps(damaged), "utf-8")
        (folder / "plots" / "spectra.png").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"figures\.json is damaged"):
            read_all([folder])


def test_the_released_weights_give_the_stated_accuracy(finished):
    result, folder = finished
    model = find_recipe("digits").model(0)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    data = find_recipe("digits").data(make_config(recipe="digits"))
    assert evaluate(model, data.test).accuracy == pytest.approx(result.accuracy)


def test_the_spent_epsilon_never_falls_and_is_exact_where_accuracy_is_measured(tmp_path):
    run(_config(tmp_path / "run", steps=16, evaluate_every=5))
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    epsilons = [row["epsilon"] for row in rows]
    plan = prepare(_config(tmp_path / "run", steps=16)).plan
    assert [row["step"] for row in rows] == list(range(17)) and epsilons == sorted(epsilons)
    assert all(row["epsilon"] >= plan.epsilon(row["step"]) for row in rows)
    assert all(
        row["epsilon"] == plan.epsilon(row["step"]) for row in rows if row["accuracy"] is not None
    )


def _stop_after(monkeypatch, step, act):
    original = training_loop._row

    def row(record, epsilon):
        if record.release == step:
            act()
        return original(record, epsilon)

    monkeypatch.setattr(training_loop, "_row", row)


def _raise():
    raise KeyboardInterrupt


@pytest.mark.quick("signal")
@pytest.mark.parametrize(
    "act",
    [lambda: os.kill(os.getpid(), signal.SIGTERM), _raise],
    ids=["signal", "raised"],
)
def test_an_interrupted_run_is_continued(tmp_path, monkeypatch, act):
    with monkeypatch.context() as patched:
        _stop_after(patched, 3, act)
        first = run(_config(tmp_path / "run"))
    assert first.interrupted and first.steps == 3
    assert not (tmp_path / "run" / "privacy_card.json").exists()
    second = resume(tmp_path / "run")
    assert not second.interrupted and second.steps == 4
    card = read_card(tmp_path / "run")
    assert card["guarantee"]["releases"] == 4
    assert len(verify(tmp_path / "run" / "ledger.jsonl").releases) == 4
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and {0, 1, 2, 4} <= set(steps)
    with pytest.raises(ConfigError, match="is complete"):
        resume(tmp_path / "run")


def test_a_run_is_resumed_while_another_process_ends_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        _stop_after(patched, 1, _raise)
        run(_config(tmp_path / "run"))
    prepare_on_all = train._prepare_on_all

    def prepare_late(*args, **options):
        monkeypatch.setattr(train, "_prepare_on_all", prepare_on_all)
        with monkeypatch.context() as patched:
            _stop_after(patched, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert resume(tmp_path / "run").steps == 3
        return prepare_on_all(*args, **options)

    monkeypatch.setattr(train, "_prepare_on_all", prepare_late)
    assert resume(tmp_path / "run").steps == 4
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [row["step"] for row in rows if row["step"] > 1] == [2, 3, 4]


@pytest.mark.parametrize(
    "name, value, fits",
    [("lr", "0.5", False), ("epsilon", "8.0", False), ("threads", "1", True)],
)
def test_a_run_goes_on_with_the_settings_it_was_begun_with(
    name, value, fits, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        _stop_after(patched, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        run(_config(tmp_path / "run", lr=1e-6))
    path = tmp_path / "run" / "config.toml"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(f"{name} = {value}" if line.startswith(f"{name} =") else line for line in lines)
    )
    if fits:
        assert not resume(tmp_path / "run").interrupted
        return
    spent = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=f"{name} is .*, and the run was started with"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == spent


def test_a_folder_below_runs_is_made_when_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(_config(""))
    assert result.folder.parent.name == "runs" and result.folder.name.startswith("digits-dp-kfc-")


def test_test_mode_is_stamped(tmp_path):
    result = run(_config(tmp_path / "run", test_mode=True, method="dp-sgd"))
    assert result.stamp == "NOT PRIVATE: test mode"
    card = read_card(tmp_path / "run")
    assert card["stamp"] == result.stamp and not card["guarantee"]["certified"]
    assert "NOT PRIVATE" in (tmp_path / "run" / "privacy_card.md").read_text("utf-8")
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as model:
        assert (
            model.metadata()["stamp"] == result.stamp and model.metadata()["certified"] == "False"
        )


def test_validation_figures_are_marked_private(tmp_path):
    result = run(
        _config(tmp_path / "run", validation_size=100, eval_on="validation", method="dp-sgd")
    )
    assert result.measured_on == "validation"
    schema = pq.read_schema(tmp_path / "run" / "metrics.parquet")
    assert schema.field("accuracy").metadata[b"private"] == b"true"
    card = read_card(tmp_path / "run")
    assert "ε does not protect" in card["not_private"]["metrics.parquet: accuracy"]
    assert card["assumed_public"]["number of examples N"]["value"] == 1337
    assert card["public_seeds"]["validation split"] == 0


def test_signals_get_their_handlers_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_the_demo_compares_two_methods(tmp_path):
    settings = {key: value for key, value in QUICK.items() if key != "recipe"}
    with draw_figures():
        done = demo(settings, out=str(tmp_path / "demo"))
    assert set(done.results) == {"dp-sgd", "dp-kfc"} == set(COMPARED)
    assert (tmp_path / "demo" / "comparison.png").stat().st_size > 10_000
    assert (tmp_path / "demo" / "dp-kfc" / "privacy_card.md").is_file()
    assert not any(result.interrupted for result in done.results.values())
    sigmas = {
        json.loads((tmp_path / "demo" / m / "privacy_card.json").read_text())["mechanism"][
            "noise_multiplier"
        ]
        for m in done.results
    }
    assert len(sigmas) == 1


def test_targets_of_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def net():\n    return nn.Linear(4, 3)\n"
        "def tokens():\n    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20,"
        " 3)), torch.ones(2, 5).long()\n"
        "def text():\n    return 'no'\n"
        "def broken():\n    return {}['key']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_target("digits")[1] == (1, 8, 8)
    assert load_target("mine:net", "4")[1:] == ((4,), None, "mine:net")
    assert load_target("mine:tokens")[1] == (5,)
    for target, shape, what in (
        ("digts", "", "did you mean 'digits'"),
        ("mine:net", "", "--input-shape"),
        ("mine:net", "0", "--input-shape"),
        ("mine:nett", "4", "did you mean 'net'"),
        ("mine:text", "", "returned str"),
        ("mine:broken", "", "mine:broken raised KeyError .line"),
        ("no_such_module_here:f", "", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_target(target, shape)


def test_a_ledger_without_a_release_has_spent_nothing(finished, tmp_path):
    _, folder = finished
    header = (folder / "ledger.jsonl").read_text("utf-8").splitlines(keepends=True)[0]
    (tmp_path / "ledger.jsonl").write_text(header, "utf-8")
    assert verify_ledger(tmp_path / "ledger.jsonl", 1e-5)["ε"] == 0.0
