"""`dpkfc demo-federated`: a table, and one line for what is missing or misspelt."""

import sys
from pathlib import Path

import pytest

from tests.command_line import call

pytest.importorskip("sklearn")
try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "federated"


def run_demo(*words):
    return call("demo-federated", *words)


def test_it_trains_in_one_process_without_flower(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    done = run_demo("--engine", "here", "--rounds", "2", "--quiet", "--out", str(tmp_path / "demo"))
    assert done.exit_code == 0, done.output
    assert "federated DP-KFC" in done.stdout and str(tmp_path / "demo") in done.stdout.replace(
        "\n", ""
    )


def test_a_missing_flower_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    done = run_demo("--out", str(tmp_path / "demo"))
    assert done.exit_code == 2 and not (tmp_path / "demo").exists()
    assert (
        done.stderr.strip().startswith("dpkfc: Flower is not installed")
        and ".[federated]" in done.stderr
    )
    done = run_demo("--engine", "spark")
    assert done.stderr.strip() == "dpkfc: unknown engine 'spark'; choose one of here, flower"


def test_the_example_names_every_setting_of_the_app():
    from dpkfc.app.federated_demo import APP

    held = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    assert held["config"] == APP.settings()
    module, name = held["components"]["serverapp"].split(":")
    text = (EXAMPLE / f"{module}.py").read_text("utf-8")
    assert f"{name} = server_app(APP)" in text and "client = client_app(APP)" in text
