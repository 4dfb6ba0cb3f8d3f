"""Small runs give the numbers that they gave when `golden.json` was written."""

import dataclasses
import json

import pytest

from tests.distributed.cases import CASES
from tests.golden.record import PATH, RUNS, differences, record, run_session

STORED = json.loads(PATH.read_text("utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_as_it_was(name):
    assert differences(STORED, record([name])) == []


def test_every_stored_run_is_made():
    assert set(STORED) == set(RUNS)


@pytest.mark.parametrize("name", ["DP-SGD", "DP-KFC", "DP-KFC in float32", "NGD", "DiSK"])
def test_an_error_of_one_in_ten_thousand_is_noticed(name, monkeypatch):
    case, label = CASES[name], f"session, {name}"
    wrong = dataclasses.replace(case, settings={**case.settings, "max_grad_norm": 1.0001})
    monkeypatch.setitem(RUNS, label, lambda: run_session(wrong))
    found = differences(STORED, record([label]))
    assert any(line.startswith(f"{label}: weights") for line in found)


def test_a_run_repeats_to_the_bit_on_one_machine():
    assert record(["session, DP-KFC"]) == record(["session, DP-KFC"])
