"""The checkpoint benchmark runs on a small model, writes where it is told, and its file becomes a
table.
"""

import json
from pathlib import Path

from tests import forked

ROOT = Path(__file__).resolve().parents[1]


def test_a_smoke_run_writes_both_optimizers_and_their_table(tmp_path):
    path = tmp_path / "checkpoint.json"

    def run_script(*arguments):
        done = forked.script(
            ROOT / "benchmarks" / "checkpoint.py", *arguments, "--output", path, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "nothing measured yet" in run_script("--table")
    shown = run_script("--smoke", "--threads", "1")
    results = json.loads(path.read_text("utf-8"))
    assert results["hardware"]["threads"] == 1 and results["date"]
    assert [row["momentum"] for row in results["rows"]] == [0.0, 0.9] and len(
        shown.splitlines()
    ) == 4
    assert run_script("--table") == shown
