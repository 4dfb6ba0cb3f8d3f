"""A short run of the digits that has ended, and the command line; `conftest` makes fixtures of
it.
"""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.train import run
from tests.app.accounting import remembered
from tests.command_line import call

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
