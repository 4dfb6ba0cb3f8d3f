"""Sides are chosen by what their layers cost with them; the costs here are made up, so that the
choice can be told.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpkfc import KFAC
from dpkfc.curvature import PublicData
from dpkfc.linalg.metric import Dense, LowRank
from dpkfc.report import doctor as costs
from dpkfc.report.doctor import choose_sides, measure_structure
from tests.report.test_costs import Sequences


def kfac(**fields) -> KFAC:
    probe = PublicData(
        torch.randn(16, 6, 40, generator=torch.Generator().manual_seed(0)),
        provenance="random numbers",
    )
    return KFAC(
        probe=probe, **{"probe_size": 16, "max_rank": 8, "sides": "both", "every": 3, **fields}
    )


def cost(monkeypatch: pytest.MonkeyPatch, seconds) -> list[tuple[str, str]]:
    seen = []

    def fake_seconds(block, metric, timings):
        assert timings.path is None
        kinds = tuple(type(side).__name__ for side in (metric.input, metric.output))
        seen.append(kinds)
        return {"gram": seconds(block.d_in, metric), "materialised": 9.0}

    monkeypatch.setattr(costs, "norm_seconds", fake_seconds)
    return seen


def test_a_side_keeps_few_eigenpairs_where_that_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(d_in: int, metric) -> float:
        saved = 0.5 * isinstance(metric.input, LowRank) + 0.04 * isinstance(metric.output, LowRank)
        return 1.0 - (0.0 if d_in == 49 else saved)

    cost(monkeypatch, seconds)
    found = {side.name: side for side in choose_sides(Sequences(), kfac(), rows=4)}
    assert {name: side.rank for name, side in found.items()} == {
        "first.A": 8,
        "first.G": 0,
        "second.A": 0,
        "second.G": 0,
        "head.A": 8,
    }
    # the inputs save 0.5 of 1.0, and the outputs 0.04 of the 0.5 that are left, which is less than
    # a tenth
    assert found["first.G"].dense_seconds == 0.5 and found[
        "first.G"
    ].low_rank_seconds == pytest.approx(0.46)
    assert found["second.A"].width == 49 and found["head.A"].width == 41


def test_other_sides_are_as_they_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = cost(monkeypatch, lambda d_in, metric: 0.1 if isinstance(metric.input, LowRank) else 1.0)
    choose_sides(Sequences(), kfac(), rows=4)
    assert seen[:4] == [
        ("Dense", "Dense"),
        ("LowRank", "Dense"),
        ("LowRank", "Dense"),
        ("LowRank", "LowRank"),
    ]
    seen.clear()
    choose_sides(Sequences(), kfac(sides="input"), rows=4)
    assert set(seen) == {("Dense", "Identity"), ("LowRank", "Identity")}


def test_nothing_is_chosen_where_all_pairs_are_wanted_or_no_matrix_is_formed() -> None:
    assert choose_sides(Sequences(), kfac(max_rank=None), rows=4) == ()
    narrow = choose_sides(Sequences(), kfac(max_factor_size=41), rows=4)
    assert {side.name for side in narrow} == {"first.A", "second.G", "head.A"}
    assert choose_sides(Sequences(), kfac(layer_rules=("conv",)), rows=4) == ()


def test_what_is_measured_fits_the_model_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    model = Sequences()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    state = torch.get_rng_state()
    found = measure_structure(model, kfac(), expected_batch_size=4, cache=tmp_path / "costs.json")
    assert set(found.ranks) == {"first.A", "first.G", "second.A", "second.G", "head.A"} and set(
        found.ranks.values()
    ) <= {0, 8}
    assert found.every >= 3 and set(found.norm_methods) <= {"first", "second"}
    assert all(side.dense_seconds > 0 and side.low_rank_seconds > 0 for side in found.sides)
    assert (
        all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
        and model.training
    )
    assert torch.equal(torch.get_rng_state(), state)
    again = measure_structure(model, kfac(), expected_batch_size=4, cache=tmp_path / "costs.json")
    assert again.sides == found.sides  # a machine measures a shape once


def test_refreshes_take_a_twentieth_of_the_time_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small = costs.measure_costs(Sequences(), kfac(), rows=4)
    monkeypatch.setattr(costs, "choose_sides", lambda *_, **__: ())
    asked: list[int] = []

    def measured(model, of, *, rows: int, cache):
        asked.append(rows)
        return costs.replace(small, refresh=0.95, chosen=0.1)

    monkeypatch.setattr(costs, "measure_costs", measured)
    every = [
        measure_structure(Sequences(), kfac(), expected_batch_size=size, rows=4).every
        for size in (2, 4, 8, 4000)
    ]
    assert asked == [2, 4, 4, 4]  # no more rows than a batch has
    # 19 × 0.95 / 0.1; steps of eight rows last twice as long; never below what is set
    assert every == [
        181,
        181,
        91,
        3,
    ]


def test_the_sides_that_are_timed_are_those_of_a_metric() -> None:
    low, dense = costs._low_rank(5, 2, torch.zeros(1)), costs._dense(5, torch.zeros(1))
    assert isinstance(low, LowRank) and isinstance(dense, Dense)
    assert low.apply(torch.ones(3, 5)).shape == dense.apply(torch.ones(3, 5)).shape == (3, 5)
