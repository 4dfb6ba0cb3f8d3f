"""Fixtures of the tests of studies."""

import importlib

import pytest


@pytest.fixture
def study_module():
    """Return a function that imports a study by its name."""
    return lambda name: importlib.import_module(f"dpkfc_papers.studies.{name}")
