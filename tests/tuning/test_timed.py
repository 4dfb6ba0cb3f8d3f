"""A ratio of times stands beside the printed one with its machine, and no verdict is given across
machines.
"""

import json

import pytest

from dpkfc_papers.store import Store
from dpkfc_papers.tables import (
    RULE,
    SHIPPED,
    Tuning,
    find_timing,
    load,
    markdown,
    outcomes,
    read_speed,
    reproduce,
)

ENTRY = {
    "title": "MNIST CNN",
    "batch_size": 256,
    "hardware": {"cpu": "a processor", "threads": 2, "torch": "2.13"},
    "setting": {"every": 50},
    "paired": {"dp_kfc / dp_sgd": {"ratio": 1.0, "quartiles": [0.9, 1.1]}},
    "refreshes": {"contenders": {"dp_kfc": {"share": 0.2}}},
}


def test_what_was_measured_stands_beside_the_paper(tmp_path, monkeypatch):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"models": {"mnist-cnn": ENTRY}}))
    monkeypatch.setattr("dpkfc_papers.tables.SHIPPED", path)
    (one,) = reproduce(["throughput"], tmp_path)["throughput"]
    assert one.values == [1.25]
    assert one.verdict.startswith(
        "no verdict (ours: MNIST CNN, batches of 256, curvature every 50 steps, on a processor"
    )
    text = (tmp_path / "throughput.md").read_text("utf-8")
    assert (
        "| 2.2 | 1.25 (1) |" in text
        and "a processor, 2 threads, torch 2.13" in text
        and RULE not in text
    )
    assert json.loads((tmp_path / "throughput.json").read_text("utf-8"))["rule"] == ""


@pytest.mark.parametrize(
    "refreshes, ratio", [({"contenders": {"dp_kfc": {"share": 0.2}}}, 1.25), ({}, 1.0)]
)
def test_a_share_of_refreshes_is_added(refreshes, ratio):
    entry = {**ENTRY, "refreshes": refreshes}
    found = find_timing("mnist-cnn: dp_kfc / dp_sgd", {"models": {"mnist-cnn": entry}})
    assert found.ratio == pytest.approx(ratio)
    assert ("curvature every" in found.where) is bool(refreshes)


def test_what_was_not_measured_is_not_run(tmp_path):
    for times in ({}, {"models": {"mnist-cnn": {**ENTRY, "paired": {}}}}):
        (one,) = outcomes(
            load("throughput"), Store(tmp_path / "none.json"), Tuning(), (0,), times=times
        )
        assert one.verdict.startswith("not run (taken on another machine") and not one.values
    assert RULE in markdown(load("throughput"), [one])


def test_the_ratio_that_is_shipped_is_told():
    found = find_timing("mnist-cnn: dp_kfc / dp_sgd", read_speed())
    assert (
        SHIPPED.is_file()
        and found is not None
        and 0.5 < found.ratio < 5
        and "MNIST CNN" in found.where
    )
