"""docs/how-to-distributed.md shows the example, and the example runs under torchrun as the document
says.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.privacy.ledger import verify
from tests.distributed.test_command import run_two
from tests.documents import ROOT, commands, executed

DOCUMENT, EXAMPLE = ROOT / "docs" / "how-to-distributed.md", ROOT / "examples" / "distributed.py"


def test_the_document_shows_the_example():
    (block,) = executed(DOCUMENT, "python")
    assert block.text.strip() == EXAMPLE.read_text("utf-8").strip()
    assert block.text.count("\n") < 60


@pytest.mark.slow
def test_the_commands_of_the_document_run(tmp_path):
    (_, script), (_, recipe) = commands(DOCUMENT)
    *words, example = shlex.split(script)
    done = _torchrun(tmp_path, *words, str(ROOT / example))
    epsilon, accuracy, steps = re.findall(r"\d+(?:\.\d+)?", done)
    assert float(epsilon) <= 3.0 and float(accuracy) > 0.5 and int(steps) == 60
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 60
    # Forked, since the command line of torchrun has just been called.
    prefix = "torchrun --nproc-per-node=2 -m dpkfc "
    assert recipe.startswith(prefix)
    words = shlex.split(recipe.removeprefix(prefix))
    first, second = run_two(tmp_path, words)
    assert (first["code"], second["code"]) == (0, 0), (first, second)
    assert "run folder: runs/two" in first["out"]
    assert len(verify(tmp_path / "runs" / "two" / "ledger.jsonl").releases) == 20


GOODBYE = """
import os
import torch
import torch.distributed as dist
from dpkfc import Session
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports much of torch
dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print([name for name in names if "gloo" in name])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
def test_a_destroyed_group_leaves_no_thread_behind():
    """One that ends after the interpreter aborts the process, and torchrun calls a finished run
    failed.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    call = [sys.executable, "-c", GOODBYE]
    done = subprocess.run(
        call, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def _torchrun(folder, program, *words):
    assert program == "torchrun"
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "RUN_FOLDER": str(folder),
    }
    done = subprocess.run(
        call, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
