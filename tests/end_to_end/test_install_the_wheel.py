"""Lead a user's files to a model, a card and predictions with the installed wheel.

The commands run outside of the checkout, so that they find templates, settings and modules in the
wheel or nowhere. The first is started as a user starts it, the others are forks of one process.
tests/app has the same paths in more depth, inside of one process.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from dpkfc.privacy.ledger import verify
from tests.app.own_files import (
    QUICK,
    TEXT_SCHEMA,
    patients,
    write_images,
    write_patients,
    write_rows,
    write_texts,
)
from tests.documents import ROOT
from tests.wheels import install_wheel, run_outside, user_environment

pytestmark = [
    pytest.mark.slow,
    # To look for the module pip keeps setuptools, and with it inductor, from being imported later.
    pytest.mark.skipif(
        not {"pip", "setuptools"} <= {found.name for found in distributions()},
        reason="needs pip and setuptools",
    ),
]

# Imports of the wheel and scales of features take seconds. They are made once, and each command
# runs in a fork. Scales come from few images, and ε is a coarser upper bound.
COMMANDS = """\
import json, os, signal, sys
import dpkfc
import dp_accounting, matplotlib.pyplot, pyarrow.compute, pyarrow.parquet, torch._dynamo
import dpkfc.app.results, dpkfc.app.train
from dpkfc.app.recipes.images import image_features
from dpkfc.cli import main
from dpkfc import features
from dpkfc.privacy import dp_accountants

print(dpkfc.__file__, flush=True)
dp_accountants._INTERVAL = 1e-3
measure = features.standardise
features.standardise = lambda maps, probe, size, seed: measure(maps, probe, size=50, seed=seed)
features.build_features(image_features((3, 8, 8)))
for line in sys.stdin:
    words, streams = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        for stream, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv = ["dpkfc", *words]
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
TASK = """\
import torch
from dpkfc.app.owndata.tasks import Task

def make():
    x = torch.zeros(20, 3)
    return Task(model=lambda: torch.nn.Linear(3, 2), train=(x, x.missing), test=(x, x))
"""


@dataclass(frozen=True)
class Installed:
    """The wheel in a fresh environment, and a folder with a user's files."""

    scripts: Path
    folder: Path
    commands: subprocess.Popen[str]

    def call(self, *words):
        """Run `dpkfc` of the wheel in the user's folder."""
        streams = [self.folder / name for name in ("stdout", "stderr")]
        assert self.commands.stdin is not None and self.commands.stdout is not None
        self.commands.stdin.write(json.dumps([words, list(map(str, streams))]) + "\n")
        self.commands.stdin.flush()
        code = int(self.commands.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(x.read_text("utf-8") for x in streams))

    def succeed(self, *words):
        """Run `dpkfc`, which must succeed, and return what it printed."""
        done = self.call(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(self, *words, out):
        """Train, and return the run folder, which must hold a model and a card."""
        self.succeed("train", *words, *FLAGS, "--out", out)
        return self.check(out)

    def check(self, out):
        """Return the run folder, which must hold a model and a card."""
        run = self.folder / out
        assert (run / "model.safetensors").is_file() and (run / "privacy_card.md").is_file()
        releases = verify(run / "ledger.jsonl").releases
        assert sum("purpose" not in release for release in releases) == QUICK["steps"]
        return run

    def predict(self, run, data):
        """Predict, and return the rows of the file of predictions."""
        self.succeed("predict", run, "--data", data, "--out", f"{run}.csv")
        with (self.folder / f"{run}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def refuse(self, *words):
        """Run `dpkfc`, which must fail, and return the one line that says why."""
        done = self.call(*words)
        assert done.returncode == 2, done.stdout + done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and len(lines[0]) <= 160, done.stderr
        return lines[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the wheel beside all libraries, and start the process whose forks run commands."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    scripts, modules = install_wheel(
        source,
        place,
        lambda name: not name.startswith(("dpkfc", "__editable__", "_virtualenv")),
    )
    folder = place / "user"
    folder.mkdir()
    # As for a program, the folder of the script is where modules are looked for, not the user's.
    script = scripts / "commands.py"
    script.write_text(COMMANDS, "utf-8")
    with subprocess.Popen(
        [scripts / "python", script],
        cwd=folder,
        env=user_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as commands:
        assert commands.stdin is not None and commands.stdout is not None
        assert Path(commands.stdout.readline().strip()).is_relative_to(modules)
        yield Installed(scripts, folder, commands)
        commands.stdin.close()


def test_a_csv_file_with_missing_values_leads_to_predictions(installed):
    write_patients(installed.folder)
    words = ("train", "--data", "patients.csv", "--schema", "patients.toml", "--out", "csv")
    run_outside(installed.scripts / "dpkfc", *words, *FLAGS, cwd=installed.folder)
    run = installed.check("csv")
    assert 'kind = "flag"' in (run / "schema.toml").read_text("utf-8")
    assert len(installed.predict("csv", "patients.csv")) == 200
    write_rows(installed.folder / "narrow.csv", [row[1:2] for row in patients()[:5]], ["age"])
    words = ("predict", "csv", "--data", "narrow.csv", "--out", "none.csv")
    assert "narrow.csv: has no column 'sex'" in installed.refuse(*words)
    assert not (installed.folder / "none.csv").exists()
    installed.succeed("report", "csv", "--out", "page.html")
    assert "patients.csv" in (installed.folder / "page.html").read_text("utf-8")


def test_a_folder_of_images_leads_to_predictions(installed):
    folder = write_images(installed.folder / "pets")
    broken = folder / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:40])
    schema = installed.folder / "pets.toml"
    schema.write_text('[images]\nsize = 8\nbroken = "error"\n', "utf-8")
    words = ("train", "--data", "pets", "--schema", "pets.toml", *FLAGS, "--out", "images")
    assert "pets/cat/0.png: is not a whole PNG" in installed.refuse(*words)
    assert not (installed.folder / "images").exists()
    schema.write_text("[images]\nsize = 8\n", "utf-8")
    installed.train("--data", "pets", "--schema", "pets.toml", out="images")
    names = [row["record"] for row in installed.predict("images", "pets")]
    assert len(names) == 59 and "cat/0.png" not in names


def test_a_file_of_texts_with_an_empty_line_leads_to_predictions(installed):
    write_texts(installed.folder / "notes.jsonl")
    (installed.folder / "notes.toml").write_text(TEXT_SCHEMA, "utf-8")
    installed.train("--data", "notes.jsonl", "--schema", "notes.toml", out="texts")
    assert [row["record"] for row in installed.predict("texts", "notes.jsonl")][2:4] == ["3", "5"]


def test_a_mistake_in_a_task_is_one_line_and_spends_nothing(installed):
    (installed.folder / "my_task.py").write_text(TASK, "utf-8")
    line = installed.refuse("train", "--task", "my_task:make", *FLAGS, "--out", "mistake")
    assert "my_task:make raised AttributeError (line 6 of my_task.py)" in line
    assert not (installed.folder / "mistake").exists()
