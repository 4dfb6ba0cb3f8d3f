"""Figures by name: one small private run measured, marked, written and drawn; mistakes are one
line.
"""

import json
import math

import pytest

from dpkfc.app.tuning.runs import Place, StudyError
from dpkfc.cli import main
from dpkfc_papers import measurements, sensitivity, tables
from dpkfc_papers.figures import FIGURE_OF, FIGURES, find, reproduce_figures
from dpkfc_papers.store import Store
from tests.tuning.rows import row_of

COURSES = [name for name, figure in FIGURES.items() if figure.runs is FIGURES["kfc-fig1"].runs]


@pytest.fixture(scope="module")
def measured_course(tmp_path_factory):
    """The cells of all figures of a run, measured without a pool; then the figures are made of what
    is stored.
    """
    folder = tmp_path_factory.mktemp("figures")
    (run,) = FIGURES["kfc-fig2"].runs(True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            measurements,
            "SMOKE",
            measurements.Sizes(probe=32, lanczos_examples=4, lanczos_steps=4, starts=1),
        )
        row = run.find_measure()(run, Place(folder))
    (theory,) = FIGURES["kfc-mean-field"].runs(True)
    with Store(folder / "results.json") as store:
        store.put(run, row)
        store.put(theory, theory.find_measure()(theory, Place(folder)))
    return folder, row, reproduce_figures([*COURSES, "kfc-mean-field"], folder, small=True)


@pytest.mark.slow
def test_every_figure_is_written_and_drawn_and_says_that_it_is_not_private(measured_course):
    folder, _, figures = measured_course
    assert not list(folder.glob("runs/*/model.safetensors"))
    for name in COURSES:
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["private"].startswith("NOT PRIVATE") and len(content["rows"]) == 1
        assert (folder / f"{name}-digits.png").read_bytes().startswith(b"\x89PNG") and not figures[
            name
        ].missing
    assert json.loads((folder / "kfc-mean-field.json").read_text())["private"].startswith("nothing")


@pytest.mark.slow
def test_the_artefact_is_there_in_a_real_network(measured_course):
    _, row, _ = measured_course
    tracking = next(iter(row["checkpoints"][-1]["layers"].values()))["tracking"]
    assert (
        tracking["authors"]["random directions"]["G"]["error"]
        < 1e-2 * tracking["undamped"]["random directions"]["G"]["error"]
    )


@pytest.mark.parametrize(
    "name, figure",
    [("kfc-fig6", "kfc-fig2"), ("kfc-fig9", "kfc-fig3"), ("kfc-fig11", "kfc-fig10")],
)
def test_a_figure_that_the_paper_shows_twice_has_both_names(name, figure):
    assert find(name).name == figure and "dp-kfc-1" not in FIGURE_OF


def test_a_missing_cell_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "drive", lambda *_, **__: None)
    (one,) = reproduce_figures(["kfc-mean-field"], tmp_path, small=True).values()
    assert not one.files and one.missing == ("digits: not yet run",)


def test_accuracy_over_settings_is_written_as_maps_that_the_report_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "drive", lambda *_, **__: None)
    runs = FIGURES["kfc-fig10"].runs(True)
    with Store(tmp_path / "results.json") as store:
        for run in runs[:-1]:
            accuracy = 0.5 + run.config().optimizer.lr * run.config().privacy.max_grad_norm
            store.put(run, row_of(run, accuracy, epsilon=1.9))
    reproduce_figures(["kfc-fig10"], tmp_path, small=True)
    content = json.loads((tmp_path / "kfc-fig10.json").read_text())
    assert content["private"].startswith(
        "NOT PRIVATE: accuracies on examples cut from the private training set"
    )
    rows = [{**row["values"], "run": row["run"]} for row in content["rows"]]
    first, last = (
        sensitivity.tabulate(row for row in rows if row["run"]["method"] == method)
        for method in ("dp-sgd", "dp-kfc")
    )
    assert first[:2] == ([0.01, 0.03], [0.1, 0.3])
    assert first[2] == [[0.501, 0.503], [0.503, pytest.approx(0.509)]]
    assert math.isnan(last[2][1][1])
    assert (
        FIGURES["kfc-mean-field"].privacy.startswith("nothing") and not FIGURES["kfc-fig3"].privacy
    )


def test_mistakes_are_one_line(capsys, tmp_path):
    with pytest.raises(StudyError, match=r"unknown figure 'kfc-fig4'.*did you mean"):
        find("kfc-fig4")
    for arguments, says in (
        (["kfc-fgi2"], "did you mean"),
        (["kfc-fig2", "--column", "a"], "--column is for tables"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", *arguments, "--out", str(tmp_path)])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and says in shown.err and shown.err.count("\n") == 1
