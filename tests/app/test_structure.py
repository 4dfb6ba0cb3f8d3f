"""`structure = "auto"`: measured when a run begins, written into its settings, kept by a run that
goes on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpkfc.app import train as train_module
from dpkfc.app.assembly import (
    describe_structure,
    make_kfac,
    make_plan,
    measure_structure,
    undo_measurement,
)
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.settings import ConfigError, flatten, read_toml, to_toml
from dpkfc.app.train import _has_settings, prepare, resume, run
from dpkfc.report import doctor as costs
from dpkfc.report.doctor import MeasuredStructure, SideChoice
from tests.app.accounting import remembered

QUICK = {
    "recipe": "digits",
    "steps": 4,
    "expected_batch_size": 24,
    "accountant": "rdp",
    "epsilon": 0.5,
    "probe_size": 16,
    "every": 2,
    "evaluate_every": 2,
    "structure": "auto",
}


@pytest.fixture(autouse=True, scope="module")
def _remembered_accounting():
    with remembered():
        yield


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine on which the second convolution keeps 8 eigenpairs; how often it was asked."""
    asked: list[int] = []

    def fake_measurement(model, of, *, expected_batch_size: int, cache):
        asked.append(expected_batch_size)
        sides = tuple(
            SideChoice(name=name, width=73, rank=rank, dense_seconds=1.0, low_rank_seconds=0.5)
            for name, rank in (("3.A", 8), ("7.A", 0))
        )
        return MeasuredStructure(sides=sides, norm_methods={"3": "gram"}, every=3)

    monkeypatch.setattr(costs, "measure_structure", fake_measurement)
    return asked


def test_what_was_measured_stands_in_the_settings_and_in_the_plan(measured, tmp_path: Path) -> None:
    run(run_config({**QUICK, "out": str(tmp_path / "run")}))
    written = flatten(read_toml(tmp_path / "run" / "config.toml"), "config.toml")
    assert (
        written["structure"] == "measured"
        and written["ranks"] == "3.A=8 7.A=0"
        and written["norm_methods"] == "3=gram"
    )
    assert written["every"] == 3 and measured == [24]
    plan = prepare(run_config(written)).plan
    assert plan.config.preconditioner.ranks == {
        "3.A": 8,
        "7.A": 0,
    } and plan.config.norm_methods == {"3": "gram"}
    assert measured == [24]  # a replay takes what was measured
    assert plan.hash != prepare(run_config({**QUICK, "structure": "shape"})).plan.hash


def test_a_run_that_goes_on_keeps_what_was_measured(
    measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = train_module._row

    def row(record, epsilon):
        if record.release == 2:
            raise KeyboardInterrupt
        return original(record, epsilon)

    with monkeypatch.context() as patched:
        patched.setattr(train_module, "_row", row)
        assert run(run_config({**QUICK, "out": str(tmp_path / "run")})).interrupted
    monkeypatch.setattr(costs, "measure_structure", lambda *_, **__: pytest.fail("measured again"))
    assert not resume(tmp_path / "run").interrupted


def test_a_study_measures_for_itself(measured) -> None:
    prepared = prepare(run_config({**QUICK, "out": ""}))
    assert (
        prepared.config.structure == "measured" and prepared.plan.config.preconditioner.every == 3
    )


def test_a_command_that_is_started_again_finds_its_run(measured, tmp_path: Path) -> None:
    asked = run_config({**QUICK, "out": str(tmp_path / "run")})
    folder = RunFolder.create(tmp_path / "run")
    folder.begin(to_toml(measure_structure(asked)))
    assert _has_settings(folder, asked) and not _has_settings(folder, replace(asked, lr=0.5))
    assert not _has_settings(folder, replace(asked, structure="shape"))
    assert undo_measurement(measure_structure(asked), asked) == asked
    plain = replace(asked, structure="shape")
    assert (
        undo_measurement(plain, asked) == plain
        and measure_structure(plain) is plain
        and describe_structure(plain) == ""
    )


def test_the_user_is_told_what_was_taken(measured) -> None:
    line = describe_structure(measure_structure(run_config(QUICK)))
    assert "3.A=8 7.A=0" in line and "norms by 3=gram" in line and "every 3 steps" in line


def test_what_has_no_factors_or_private_ones_is_refused(measured) -> None:
    with pytest.raises(
        ConfigError, match=r"chooses sides of K-FAC, and method = 'dp-sgd' has none"
    ):
        measure_structure(run_config({**QUICK, "method": "dp-sgd"}))
    with pytest.raises(ConfigError, match="measured on private data"):
        measure_structure(run_config({**QUICK, "source": "private-oracle"}))
    for own in ({"ranks": "3.A=8"}, {"norm_methods": "3=gram"}):
        with pytest.raises(ConfigError, match="both would be lost"):
            measure_structure(run_config({**QUICK, **own}))
    assert measured == []


def test_views_are_rows_of_a_step(measured) -> None:
    measure_structure(run_config({**QUICK, "augmentations": 4, "augment": "reflect-pad-crop-flip"}))
    assert measured == [96]


def test_a_plan_needs_what_was_measured() -> None:
    with pytest.raises(ConfigError, match="is measured when a run"):
        make_plan(run_config(QUICK), (1, 8, 8), 100)


def test_ranks_are_whole_numbers() -> None:
    assert make_kfac(run_config({**QUICK, "ranks": "a.A=3, b.G=0"}), (1, 8, 8)).ranks == {
        "a.A": 3,
        "b.G": 0,
    }
    for wrong, why in (
        ("a.A=x", "takes whole numbers"),
        ("a.A=-1", "takes whole numbers"),
        ("a=3", "ranks maps sides"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_kfac(run_config({**QUICK, "ranks": wrong}), (1, 8, 8))


def test_a_run_that_cannot_be_measured_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_, **__):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(costs, "measure_structure", broken)
    with pytest.raises(ConfigError, match="could not be measured: out of memory$"):
        run(run_config({**QUICK, "out": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()
