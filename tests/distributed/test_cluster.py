"""The programs of examples/cluster run on two processes: Ray Train, and torchrun's command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.privacy.ledger import verify
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
TABLE = """target = "ill"
classes = ["0", "1"]
[columns.age]
kind = "number"
bounds = [0, 100]
"""


@pytest.mark.slow
@pytest.mark.skipif(len(sys.executable.split()) > 1, reason="Ray needs a path without a space")
def test_ray_trains_each_worker_on_its_part(tmp_path):
    pytest.importorskip("ray")
    words = [str(EXAMPLES / "ray_train.py"), "--steps", "3", "--out", str(tmp_path / "run")]
    _run([sys.executable, *words], RAY_USAGE_STATS_ENABLED="0")
    assert _count_steps(tmp_path / "run") == 3


@pytest.mark.slow
def test_the_command_of_several_hosts_trains_on_one(tmp_path):
    rows = [f"{age},{int(age > 50)}" for age in range(20, 80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ill", *rows]), "utf-8")
    (tmp_path / "t.toml").write_text(TABLE, "utf-8")
    places = {"DATA": "t.csv", "SCHEMA": "t.toml", "OUT": "run"}
    places = {name: str(tmp_path / place) for name, place in places.items()}
    words = ["--steps", "2", "--batch-size", "20", "--quiet"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    first = f"localhost:{free_port()}"
    _run(["sh", str(EXAMPLES / "hosts.sh"), *words], PATH=path, FIRST=first, **places)
    assert _count_steps(tmp_path / "run") == 2


def _run(words, **variables):
    done = subprocess.run(
        words, env={**os.environ, **variables}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _count_steps(folder):
    releases = verify(folder / "ledger.jsonl").releases
    return sum(not release.get("purpose") for release in releases)
