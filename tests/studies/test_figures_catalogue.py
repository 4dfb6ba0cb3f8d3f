"""Figures by name: one small private run measured, marked, written and drawn; mistakes are one line."""

from __future__ import annotations

import json

import pytest

from dpkfc.cli import app
from dpkfc.studies.errors import StudyError
from dpkfc.studies.figures import catalogue, course
from dpkfc.studies.figures.catalogue import FIGURES, find, reproduce_figures
from dpkfc.studies.store import Store

COURSES = [name for name, figure in FIGURES.items() if figure.drawn.startswith("draw:")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The cells of all figures of a run, measured without a pool; then the figures are made of what is stored."""
    folder = tmp_path_factory.mktemp("figures")
    (run,) = FIGURES["kfc-fig2"].runs(True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(course, "SMOKE", course.Sizes(probe=32, lanczos_examples=4, lanczos_steps=4, starts=1))
        row = run.measuring()(run, folder / "runs")
    (theory,) = FIGURES["kfc-mean-field"].runs(True)
    with Store(folder / "results.json") as store:
        store.put(run, row)
        store.put(theory, theory.measuring()(theory, folder / "runs"))
    return folder, row, reproduce_figures([*COURSES, "kfc-mean-field"], folder, small=True)


def test_every_figure_is_written_and_drawn_and_says_that_it_is_not_private(made):
    folder, _, figures = made
    assert not list(folder.glob("runs/*/model.safetensors"))
    for name in COURSES:
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["private"].startswith("NOT PRIVATE") and len(content["rows"]) == 1
        assert (folder / f"{name}-digits.png").read_bytes().startswith(b"\x89PNG") and not figures[name].missing
    assert json.loads((folder / "kfc-mean-field.json").read_text())["private"].startswith("nothing")


def test_one_course_serves_all_figures_of_a_run():
    assert len({run.hash for name in COURSES for run in FIGURES[name].runs(False)}) == len(catalogue.MODELS)


def test_a_course_looks_before_the_first_step_and_after_the_last(made):
    _, row, _ = made
    assert row["private"].startswith("NOT PRIVATE") and [c["step"] for c in row["checkpoints"]] == [0, 3]
    for checkpoint in row["checkpoints"]:
        for layer in checkpoint["layers"].values():
            assert set(layer["spectra"]["A"]) == {"pink noise", "white noise", "oracle", "oracle, other examples"}
            own, random = (layer["realised"][source]["F"] for source in ("oracle", "random directions"))
            assert own["held"] < random["held"] and own["flatness"] > random["flatness"]
            assert layer["tracking"]["undamped"]["oracle, other examples"]["F"]["cosine"] > 0.5
        assert set(checkpoint["density"]) == {"pink noise", "white noise", "oracle"}


def test_the_artefact_is_there_in_a_real_network(made):
    _, row, _ = made
    tracking = next(iter(row["checkpoints"][-1]["layers"].values()))["tracking"]
    assert tracking["authors"]["random directions"]["G"]["error"] < 1e-2 * tracking["undamped"]["random directions"]["G"]["error"]


@pytest.mark.parametrize(("name", "figure"), [("kfc-fig6", "kfc-fig2"), ("kfc-fig9", "kfc-fig3"), ("kfc-fig11", "kfc-fig10")])
def test_a_figure_that_the_paper_shows_twice_has_both_names(name, figure):
    found = find(name)
    assert found is not None and found.name == figure and find("dp-kfc-1") is None


def test_a_missing_cell_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "drive", lambda *_, **__: None)
    (one,) = reproduce_figures(["kfc-mean-field"], tmp_path, small=True).values()
    assert not one.files and one.missing == ("digits: not yet run",)


def test_mistakes_are_one_line(capsys, tmp_path):
    with pytest.raises(StudyError, match=r"unknown figure 'kfc-fig4'.*did you mean"):
        find("kfc-fig4")
    for arguments, says in ((["kfc-fgi2"], "did you mean"), (["dp-kfc-1", "--smoke"], "--smoke is for figures")):
        with pytest.raises(SystemExit) as ended:
            app(["reproduce", *arguments, "--out", str(tmp_path)])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and says in shown.err and shown.err.count("\n") == 1
