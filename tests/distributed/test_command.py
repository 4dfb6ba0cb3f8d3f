"""`dpkfc train` under torchrun: one run on several processes, with one folder, one ledger and one budget."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dpkfc.cli import app
from dpkfc.privacy.ledger import verify
from dpkfc.recipes import train
from tests.distributed.group import run

SETTINGS = [
    *("--recipe", "digits", "--epsilon", "3", "--accountant", "rdp", "--steps", "4", "--expected-batch-size", "24"),
    *("--probe-size", "8", "--every", "2", "--evaluate-every", "2", "--test-mode"),
]


def _port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _command(rank: int, folder: Path, port: int, world: int, arguments: list[str], interrupted: int) -> dict[str, Any]:
    """One process as torchrun starts it."""
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(TORCHELASTIC_RUN_ID="one", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    if rank == interrupted:
        row = train._row

        def interrupting(record: Any, plan: Any) -> Any:
            if record.release == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return row(record, plan)

        train._row = interrupting
    result = CliRunner().invoke(app, arguments)
    return {"code": result.exit_code, "out": result.output, "err": result.stderr}


def _run(folder: Path, *arguments: str, interrupted: int = -1) -> list[dict[str, Any]]:
    return run(_command, 2, _port(), 2, ["train", *arguments], interrupted, folder=folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert CliRunner().invoke(app, ["train", *SETTINGS, "--out", str(folder)]).exit_code == 0
    return load_file(folder / "model.safetensors")


def _same(folder: Path, alone: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == alone.keys()
    for name in alone:
        torch.testing.assert_close(found[name], alone[name], rtol=1e-3, atol=1e-5)
    assert [release["step"] for release in verify(folder / "ledger.jsonl").releases] == [0, 1, 2, 3]


def test_two_processes_make_the_run_of_one(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    first, second = _run(tmp_path, *SETTINGS, "--out", "run")
    assert (first["code"], second["code"]) == (0, 0), (first, second)
    assert "run folder: run" in first["out"] and "accuracy" in first["out"]
    assert "run folder" not in second["out"] and "accuracy" not in second["out"]
    _same(tmp_path / "run", alone)
    assert {"privacy_card.md", "metrics.parquet", "plots"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_a_signal_to_one_process_stops_all_and_a_restart_goes_on(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    found = _run(tmp_path, *SETTINGS, "--out", "run", interrupted=1)
    assert [one["code"] for one in found] == [130, 130], found
    assert "stopped after step 3; continue with: dpkfc train --resume run" in found[0]["err"]
    assert len(verify(tmp_path / "run" / "ledger.jsonl").releases) == 3
    alone_again = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run")])
    assert alone_again.exit_code == 2 and "written by 2 processes" in alone_again.stderr
    assert "--any-world-size" in alone_again.stderr
    for one in _run(tmp_path, *SETTINGS, "--out", "run", "--lr", "0.5"):
        assert one["code"] == 2 and "run folder run holds a run of other settings" in one["err"]
    found = _run(tmp_path, *SETTINGS, "--out", "run")
    assert [one["code"] for one in found] == [0, 0], found
    _same(tmp_path / "run", alone)


def test_a_restart_must_find_its_run(tmp_path: Path) -> None:
    for one in _run(tmp_path, *SETTINGS):
        assert one["code"] == 2 and "name the run folder with --out" in one["err"]
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_first_process_is_that_of_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    for one in _run(tmp_path, *SETTINGS, "--out", "run"):
        assert one["code"] == 2 and "run is not empty" in one["err"]


def test_other_commands_run_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2 and "`dpkfc demo` runs on one: start it without torchrun" in result.stderr
