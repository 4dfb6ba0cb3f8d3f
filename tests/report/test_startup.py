"""Help and small commands start without torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpkfc import PrivacyConfig, Session

RUN = """
import contextlib, io, json, sys
import dpkfc
from dpkfc.cli import app

with_torch = {}
for words in [[], *json.loads(sys.argv[1])]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app(words or ["--help"], standalone_mode=False)
    with_torch[" ".join(words)] = "torch" in sys.modules
print(json.dumps(with_torch))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ledger, card, weights and their digests."""
    folder = tmp_path_factory.mktemp("run")
    model = nn.Linear(4, 2)
    data = torch.randn(32, 4), torch.randint(2, (32,))
    plan = PrivacyConfig(expected_batch_size=8, steps=2).calibrate(3.0, 1e-5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(plan, model, optimizer, data, ledger_path=folder / "ledger.jsonl")
    with session:
        for batch in session.batches():
            session.step(batch, _losses)
    session.write_card(folder, title="t", chosen_by="tests", not_private={})
    return folder


def _losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_help_and_small_commands_do_not_import_torch(run: Path, tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,smoker,died\n", "utf-8")
    commands = [
        ["--version"],
        ["calibrate", "-e", "1", "-n", "60000", "-b", "256", "--steps", "3"],
        ["epsilon", "-s", "1.1", "-n", "60000", "-b", "256", "--steps", "3"],
        ["ledger", "verify", str(run)],
        ["total", str(run)],
        ["card", str(run), "--owner", "Ward 3"],
        ["budget", str(tmp_path / "b.toml"), "--epsilon", "3", "--delta", "1e-5"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert not any(json.loads(done.stdout).values()), done.stdout
