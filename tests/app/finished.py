"""A short run of the digits that has ended, and the command line; `conftest` makes fixtures of
it.
"""

import json
import re

from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.train import run
from tests.app.accounting import remember_accounting
from tests.command_line import call

__all__ = ["SETTINGS", "call", "call_flat", "finished_run", "flags", "read_card", "refuse"]

SETTINGS = {
    "recipe": "digits",
    "method": "dp-sgd",
    "steps": 3,
    "expected_batch_size": 48,
    "accountant": "rdp",
}


def finished_run(folder):
    with remember_accounting():
        return run(run_config({**SETTINGS, "out": str(folder)})).folder


def read_card(folder):
    return json.loads((folder / "privacy_card.json").read_text("utf-8"))


def flags(settings):
    """Return settings as words of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def call_flat(*words):
    """Return the exit code of a command, and all that it has printed on one line."""
    done = call(*words)
    return done.exit_code, re.sub(r"\s+", " ", done.output)


def refuse(*words):
    """Return the one line with which a command refuses."""
    done = call(*words)
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1, done.output
    return done.stderr
