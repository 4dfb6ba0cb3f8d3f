"""What a step costs is measured on the probe, once a shape, and the advice follows from the
measured numbers.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from dpkfc import KFAC
from dpkfc.app.doctor import _advice, layers_table, steps_table
from dpkfc.curvature import PublicData
from dpkfc.linalg.blocks import ConvBlock
from dpkfc.linalg.metric import Dense, Identity, Kronecker
from dpkfc.report import doctor as costs
from dpkfc.report.doctor import (
    Costs,
    LayerCost,
    Timings,
    default_cache,
    measure_costs,
    norm_seconds,
)


class Sequences(nn.Module):
    """Two maps over 6 positions, wide enough for the method to be a choice, and a head with one
    position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(40, 48), nn.Linear(48, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(x))).mean(1))


def kfac() -> KFAC:
    torch.manual_seed(0)
    probe = PublicData(torch.randn(16, 6, 40), provenance="random numbers")
    return KFAC(probe=probe, probe_size=16, max_rank=8, sides="both")


def test_layers_with_a_choice_are_measured_and_the_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = Sequences()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = measure_costs(model, kfac(), rows=4, cache=tmp_path / "sub" / "costs.json")
    assert [layer.name for layer in found.layers] == ["first", "second"]
    first = found.layers[0]
    assert (first.positions, first.d_in, first.d_out, first.by_rule) == (6, 41, 48, "gram")
    assert set(first.seconds) == {"gram", "materialised"} and all(
        x > 0 for x in first.seconds.values()
    )
    assert [(side.side, side.kind) for side in first.sides] == [
        ("A", "lowrank8"),
        ("G", "lowrank8"),
    ]
    assert (
        min(found.plain, found.dp_sgd, found.preconditioned, found.chosen, found.refresh) > 0
        and found.every >= 1
    )
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_a_refresh_is_timed_over_the_examples_of_a_later_one() -> None:
    sizes: list[int] = []

    class Noted(PublicData):
        def sample(self, n: int, generator: torch.Generator):
            sizes.append(n)
            return super().sample(n, generator)

    probe = Noted(torch.randn(64, 6, 40), provenance="random numbers")
    measure_costs(
        Sequences(),
        KFAC(probe=probe, probe_size=64, later_probe_size=24, decay=0.5, max_rank=8),
        rows=4,
    )
    assert set(sizes) == {4, 24, 16}  # the batch, a later refresh, the smaller one that is advised


def test_a_machine_measures_a_shape_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    measure_costs(Sequences(), kfac(), rows=4, cache=path)
    (times,) = json.loads(path.read_text()).values()
    known = {key: 7.0 for key in times}
    path.write_text(
        json.dumps({"another machine": {"x": 1.0}, next(iter(json.loads(path.read_text()))): known})
    )
    found = measure_costs(Sequences(), kfac(), rows=4, cache=path)
    assert set(found.layers[0].seconds.values()) == {7.0}
    assert json.loads(path.read_text())["another machine"] == {"x": 1.0}


def test_what_is_held_can_be_measured_anew(tmp_path: Path) -> None:
    """Those that are asked for, once; the others stay as they were."""
    path = tmp_path / "costs.json"
    measure_costs(Sequences(), kfac(), rows=4, cache=path)
    held = json.loads(path.read_text())
    ((machine, times),) = held.items()
    path.write_text(json.dumps({machine: {**dict.fromkeys(times, 7.0), "another shape": 9.0}}))
    timings = Timings.load(path, again=True)
    found = measure_costs(Sequences(), kfac(), rows=4, cache=timings)
    assert all(x < 7 for layer in found.layers for x in layer.seconds.values())
    (after,) = json.loads(path.read_text()).values()
    assert after.keys() == {*times, "another shape"} and after.pop("another shape") == 9.0
    assert all(0 < x < 7 for x in after.values())
    again = measure_costs(Sequences(), kfac(), rows=4, cache=timings)
    assert again.layers[0].seconds == found.layers[0].seconds  # measured once, whoever asks next
    assert timings.stale == {"another shape"}


def test_other_instructions_are_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cores take other times where torch may use wider vectors."""
    for kind in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        timings = Timings.load(tmp_path / "costs.json")
        assert timings.seconds == {}
        timings.measure("x", lambda: None)
        timings.save()
    names = list(json.loads((tmp_path / "costs.json").read_text()))
    assert len(names) == 2 and "AVX2" in names[0] and "AVX512" in names[1]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 3}', '{"a": {"b": "c"}}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    timings = Timings.load(path)
    assert timings.seconds == {} and timings.measure("x", lambda: None) > 0
    timings.save()
    assert Timings.load(path).seconds.keys() == {"x"}


def test_a_file_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timings = Timings.load(tmp_path / "file" / "costs.json")
    timings.measure("x", lambda: None)
    timings.save()


def test_the_file_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPKFC_CACHE", str(tmp_path))
    assert default_cache() == tmp_path / "costs.json"
    monkeypatch.delenv("DPKFC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert default_cache() == tmp_path / "c" / "dpkfc" / "costs.json"


def layer(gram: float, materialised: float) -> LayerCost:
    seconds = {"gram": gram, "materialised": materialised}
    return LayerCost(name="a", positions=9, d_in=40, d_out=40, by_rule="gram", seconds=seconds)


def test_the_advice_follows_the_numbers() -> None:
    made = dict(
        rows=8,
        threads=1,
        plain=0.010,
        dp_sgd=0.012,
        preconditioned=0.013,
        chosen=0.010,
        refresh=0.095,
    )
    made["averaged"] = (32, 0.875, 0.019)
    assert Costs(**made, layers=(layer(1.0, 0.95),)).norm_methods == {}  # not clearly faster
    slow = Costs(**made, layers=(layer(1.0, 0.5),))
    assert slow.norm_methods == {"a": "materialised"}
    assert slow.every == 181 and slow.refresh / (slow.refresh + slow.every * slow.chosen) <= 0.05
    console = Console(file=io.StringIO(), width=140)
    console.print(layers_table(slow), steps_table(slow))
    text = console.file.getvalue()
    advice = _advice(slow, 50, 256)
    assert (
        "--every 181 takes 5 %" in advice
        and "--later-probe-size 32 --factor-decay 0.875 --every 37" in advice
    )
    assert "9 × 40 × 40" in text and "1.20" in text and "materialised" in text


def test_gradients_that_would_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_GRADIENT_BYTES", 1 << 10)
    assert set(measure_costs(Sequences(), kfac(), rows=4).layers[0].seconds) == {"gram"}


def test_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must be at least 1"):
        measure_costs(Sequences(), kfac(), rows=0)


def test_a_time_is_one_of_a_number_type_and_an_accelerator_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings, waits = Timings(), []
    monkeypatch.setattr(Timings, "load", classmethod(lambda cls, path: timings))
    measure_costs(Sequences(), kfac(), rows=4)
    known = set(timings.seconds)
    double = PublicData(torch.randn(16, 6, 40, dtype=torch.float64), provenance="random numbers")
    measure_costs(
        Sequences().double(), KFAC(sides="both", probe=double, probe_size=16, max_rank=8), rows=4
    )
    assert {key for key in timings.seconds if key.endswith(" float64 cpu")} == {
        f"{key} float64 cpu" for key in known
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))
    costs.measure_seconds(lambda: waits.append("work"))
    assert waits == ["wait", "work", "wait"] * 4


def test_times_of_convolutions_are_told_apart_by_groups_and_kernels() -> None:
    """All of these have 9 inputs, one output and 36 positions."""
    timings, metric = Timings(), Kronecker(Dense(torch.eye(9), 1.0), Identity())
    for channels, kernel, padding in (
        (1, (3, 3), (1, 1)),
        (4, (3, 3), (1, 1)),
        (1, (1, 9), (0, 4)),
    ):
        x = torch.randn(2, channels, 6, 6)
        block = ConvBlock(
            x,
            torch.randn(2, channels, 6, 6),
            kernel,
            (1, 1),
            padding,
            (1, 1),
            channels,
            True,
            False,
        )
        norm_seconds(block, metric, timings)
    assert len({key.partition(" ")[2] for key in timings.seconds}) == 3
