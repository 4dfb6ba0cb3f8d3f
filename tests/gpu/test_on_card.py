"""Steps on a card: the sums of the CPU, nothing left on the wrong device, and a host that waits a
constant number of times.

The card is pretended (`card.cpp`), as most machines have none: it shows where tensors lie and where
the host waits, not speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.pretended import build_library, compiler

ROOT = Path(__file__).parents[2]
ALWAYS = 3  # weights finite; sum finite; shares for the record
MICRO_BATCHES = 2  # one question each
MORE = {
    "bias corrected": 1,  # a share for the record
    "second moments": 2 * 4,  # two products for each of four parameters
    "instance norm": MICRO_BATCHES
    * 2,  # weight and bias are repeated for every example and compared
    "frozen batch norm": MICRO_BATCHES,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if compiler() is None or sys.platform != "linux" or torch.version.cuda is not None:
        pytest.skip(
            "pretends a device with a C++ compiler, on Linux, in a build of torch without one"
        )
    try:
        build_library()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the pretended device does not compile here: {error.stderr[-300:]}")
    path = tmp_path_factory.mktemp("card") / "told.json"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    program = (
        "from tests.gpu.pretended import pretend; pretend(); from tests.gpu.on_card import main; "
    )
    command = [sys.executable, "-W", "ignore", "-c", f"{program}main({str(path)!r})"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.xdist_group("card")
def test_a_session_on_a_card(results: dict[str, Any]) -> None:
    bounds = results.pop("bounds")
    # above the norm, and by √d at most
    assert all(1 - 1e-12 <= ratio <= 10**0.5 for ratio in bounds), bounds
    assert bounds[0] < 1 + 1e-5
    cancelling = results.pop("cancelling")
    assert cancelling["difference"] < 1e-4
    # what rounding leaves open is asked again
    assert cancelling["waits"][2] > ALWAYS + MICRO_BATCHES
    for name, found in results.items():
        assert found["difference"] < 1e-5, (name, found)
        assert found["finite"], name
        more = MORE.get(name.removesuffix(", whitened"), 0)
        assert found["waits"][2] == ALWAYS + MICRO_BATCHES + more, (name, found)
