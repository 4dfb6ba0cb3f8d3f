"""The speed benchmark runs, at a size that takes seconds; what it measures is not tested."""

import json
from pathlib import Path

import pytest

from tests import forked

pytest.importorskip("opacus")

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = [
    "plain",
    "by_hand",
    "dp_sgd",
    "dp_sgd_graph",
    "dp_kfc_inputs",
    "dp_kfc",
    "opacus_hooks",
    "opacus_ghost",
    "materialised",
]


def speed(*arguments, check=True):
    done = forked.script(ROOT / "benchmarks" / "speed.py", *arguments, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_a_smoke_run_times_every_contender_and_writes_a_table(tmp_path):
    path = tmp_path / "speed.json"
    arguments = ("--only", "smoke-cnn", "--threads", 1, "--no-memory", "--output", path)
    printed = speed("--smoke", *arguments, "--contenders", *CONTENDERS).stdout
    results = json.loads(path.read_text("utf-8"))
    assert results["hardware"]["threads"] == 1 and results["hardware"]["torch"]
    entry = results["models"]["smoke-cnn"]
    assert list(entry["contenders"]) == CONTENDERS
    for name, timing in entry["contenders"].items():
        assert timing["steps"] == 2 and timing["median_ms"] > 0, name
    kfc = entry["refreshes"]["contenders"]["dp_kfc"]
    assert kfc["refresh_ms"] > 0 < kfc["first_ms"]
    assert kfc["share_range"][0] <= kfc["share"] <= kfc["share_range"][1]
    ratio = entry["paired"]["dp_kfc / plain"]
    assert (
        0 < ratio["quartiles"][0] <= ratio["ratio"] <= ratio["quartiles"][1]
        and ratio["rounds"] == 2
    )
    assert "Conv2d" in entry["contenders"]["opacus_ghost"]["note"]
    assert speed("--table", "--output", path).stdout == printed


@pytest.mark.slow
def test_memory_is_taken_above_what_the_process_held_before_its_first_step():
    for contender in ("dp_sgd", "dp_kfc"):
        printed = speed(
            "--smoke", "--memory-of", contender, "--only", "smoke-encoder-32", "--threads", 1
        ).stdout
        found = json.loads(printed)
        assert found["start_mib"] > 100  # torch itself
        assert ("refresh_mib" in found) == (contender == "dp_kfc")
        peaks = [
            found[name] for name in ("first_step_mib", "extra_mib", "refresh_mib") if name in found
        ]
        assert all(0 <= peak < 1000 for peak in peaks)


def scale(*arguments):
    """Tables of time and of memory: axis to column to cell."""
    done = forked.script(
        ROOT / "benchmarks" / "scale.py", "--smoke", "--threads", 1, *arguments, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tables = []
    for block in (block for block in done.stdout.strip().split("\n\n") if block.startswith("|")):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        tables.append({row[0]: dict(zip(head, row, strict=True)) for row in rows})
    return tables


@pytest.mark.bench
def test_the_models_for_a_card_step_at_a_size_for_a_cpu(tmp_path):
    path = tmp_path / "speed.json"
    chosen = (
        "--only",
        "smoke-vit",
        "smoke-views",
        "--contenders",
        "plain",
        "dp_sgd",
        "dp_kfc_inputs",
        "opacus_hooks",
    )
    speed("--smoke", *chosen, "--rounds", 1, "--threads", 1, "--no-memory", "--output", path)
    vit, views = json.loads(path.read_text("utf-8"))["models"].values()
    for entry in (vit, views):
        assert all(
            entry["contenders"][name]["median_ms"] > 0
            for name in ("plain", "dp_sgd", "dp_kfc_inputs")
        )
    assert "views" in views["contenders"]["opacus_hooks"]["not_available"]


@pytest.mark.bench
def test_the_growth_of_a_step_is_measured_along_every_axis():
    times, memory = scale("--no-memory")
    assert list(times) == list(memory) == ["width", "depth", "batch", "positions", "rank"]
    assert all(row["from … to"] != "–" for row in times.values())
    assert all(row["from … to"] == "–" for row in memory.values())
    refresh = next(name for name in times["rank"] if name.startswith("one refresh"))
    assert [row[refresh].split("; ")[1] for row in times.values()] == [
        "2.0)",
        "1.0)",
        "0.0)",
        "1.0)",
        "0.0)",
    ]


def test_an_unknown_model_is_named():
    done = speed("--only", "resnet", check=False)
    assert done.returncode == 2 and "resnet" in done.stderr and "mnist-cnn" in done.stderr


def test_a_card_that_is_not_there_is_named():
    done = speed("--smoke", "--device", "cuda", check=False)
    assert done.returncode == 2 and "no card" in done.stderr and "--device" in done.stderr
    done = speed("--smoke", "--device", "cuda", "--kept", check=False)
    assert done.returncode == 2 and "--kept" in done.stderr
