"""The folder of a run that has ended, for tests that spoil a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.app.accounting import remembered
from tests.app.finished import finished_run


@pytest.fixture(autouse=True, scope="module")
def _figures(blank_figures):
    """Figures are blank, but where a module says otherwise."""


@pytest.fixture(autouse=True, scope="module")
def _few_images():
    """Scales of features come from 50 synthetic images: tests/features takes more."""
    from dpkfc.features import joined as maps

    measure = maps.standardise

    def measure_few(features, probe, *, size, seed):
        return measure(features, probe, size=min(size, 50), seed=seed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(maps, "standardise", measure_few)
        # Whatever the processor is quick at.
        patched.setattr("dpkfc.app.recipes.recipe.multiplies_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def folder(done, tmp_path):
    with remembered():
        yield Path(shutil.copytree(done, tmp_path / "run"))
