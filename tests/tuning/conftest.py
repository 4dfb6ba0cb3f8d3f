"""Fixtures of the tests of studies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A benchmark by its name, imported as its own command imports it and forgotten after the
    test.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    taken: list[str] = []

    def load(name: str) -> ModuleType:
        taken.append(name)
        return importlib.import_module(name)

    yield load
    for name in taken:
        sys.modules.pop(name, None)
