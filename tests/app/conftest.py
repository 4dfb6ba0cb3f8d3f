"""The folder of a run that has ended, for tests that spoil a copy of it."""

import shutil
from pathlib import Path

import pytest

from tests.app.accounting import remember_accounting
from tests.app.finished import finished_run


@pytest.fixture(autouse=True, scope="module")
def _figures(blank_figures):
    """Figures are blank, but where a module says otherwise."""


@pytest.fixture(autouse=True, scope="module")
def _few_images():
    """Scales of features come from 50 synthetic images: tests/features takes more. Accounting is
    asked the same question once.
    """
    from dpkfc.features import joined as maps

    measure = maps.standardise

    def measure_few(features, probe, *, size, seed):
        return measure(features, probe, size=min(size, 50), seed=seed)

    with remember_accounting(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(maps, "standardise", measure_few)
        # Whatever the processor is quick at.
        patched.setattr("dpkfc.app.recipes.recipe.multiplies_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def folder(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "run"))
