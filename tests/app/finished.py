"""A short run of the digits that has ended, and the command line; `conftest` makes fixtures of
it.
"""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.train import run
from dpkfc.cli import app
from tests.app.accounting import remembered

__all__ = ["SETTINGS", "call", "finished_run"]

SETTINGS = {
    "recipe": "digits",
    "method": "dp-sgd",
    "steps": 3,
    "expected_batch_size": 48,
    "accountant": "rdp",
}


def finished_run(folder: Path) -> Path:
    with remembered():
        return run(run_config({**SETTINGS, "out": str(folder)})).folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(x) for x in arguments])
