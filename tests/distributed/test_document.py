"""docs/how-to-distributed.md shows the example, and the example runs under torchrun as the document says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.privacy.ledger import verify
from tests.documents import ROOT, commands, executed

DOCUMENT, EXAMPLE = ROOT / "docs" / "how-to-distributed.md", ROOT / "examples" / "distributed.py"


def test_the_document_shows_the_example():
    (block,) = executed(DOCUMENT, "python")
    assert block.text.strip() == EXAMPLE.read_text("utf-8").strip()
    assert block.text.count("\n") < 60


@pytest.mark.slow
def test_the_commands_of_the_document_run(tmp_path: Path):
    (_, script), (_, recipe) = commands(DOCUMENT)
    *words, example = shlex.split(script)
    done = _torchrun(tmp_path, *words, str(ROOT / example))
    epsilon, accuracy, steps = re.findall(r"\d+(?:\.\d+)?", done)
    assert float(epsilon) <= 3.0 and float(accuracy) > 0.5 and int(steps) == 60
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 60
    assert "run folder: runs/two" in _torchrun(tmp_path, *shlex.split(recipe))
    assert len(verify(tmp_path / "runs" / "two" / "ledger.jsonl").releases) == 20


def _torchrun(folder: Path, program: str, *words: str) -> str:
    assert program == "torchrun"
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "RUN_FOLDER": str(folder)}
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
