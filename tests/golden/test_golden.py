"""Small runs give the numbers that they gave when `golden.json` was written."""

from __future__ import annotations

import json

import pytest

from tests.golden.record import PATH, RUNS, differences, record


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_as_it_was(name: str) -> None:
    stored = json.loads(PATH.read_text("utf-8"))
    found = json.loads(json.dumps(record([name])))
    assert differences(stored, found) == []


def test_every_stored_run_is_made() -> None:
    assert set(json.loads(PATH.read_text("utf-8"))["runs"]) == set(RUNS)
