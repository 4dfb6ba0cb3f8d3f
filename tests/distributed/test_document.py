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
def test_the_command_of_the_document_runs(tmp_path: Path):
    ((_, command),) = commands(DOCUMENT)
    program, *words = shlex.split(command)
    assert program == "torchrun"
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[:-1], str(ROOT / words[-1])]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "RUN_FOLDER": str(tmp_path)}
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    epsilon, accuracy, steps = re.findall(r"\d+(?:\.\d+)?", done.stdout)
    assert float(epsilon) <= 3.0 and float(accuracy) > 0.5 and int(steps) == 60
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 60
