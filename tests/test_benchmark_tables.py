"""What the tables of the speed benchmark judge, and by which goals; the numbers are made up."""

import gzip
from pathlib import Path

import pytest

from dpkfc_papers.studies.harness import markdown

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = ("plain", "dp_sgd", "dp_kfc_inputs", "dp_kfc", "opacus_hooks", "opacus_ghost")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("speed_tables")


def make_timing(ms, **more):
    return {
        "median_ms": ms,
        "quartile_low_ms": 0.9 * ms,
        "quartile_high_ms": 1.2 * ms,
        "min_ms": ms,
        "steps": 15,
        **more,
    }


def entry(title="a model", **paired):
    pairs = {name.replace("__", " / "): {"ratio": ratio} for name, ratio in paired.items()}
    return {
        "title": title,
        "batch_size": 8,
        "contenders": {name: make_timing(10.0) for name in NAMES},
        "paired": pairs,
    }


def cells(text, heading):
    """The rows of the table below a heading, by the names of their columns."""
    lines = text.split(heading, 1)[1].split("\n\n")[1].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_missed_goal_is_marked_and_a_model_without_numbers_keeps_its_row(tables):
    models = {"wrn-16-4": entry("WRN", dp_kfc__dp_sgd=1.3, dp_sgd__plain=1.1)}
    text = tables.table({"models": models}, {"wrn-16-4": ("WRN", 8), "llama-1b-lora": ("Llama", 2)})
    wrn, llama = cells(text, "Ratios of time: ")
    assert wrn["DP-KFC, both sides ÷ DP-SGD"].endswith("(≤ 1.05 ✗)") and wrn[
        "DP-SGD ÷ plain SGD"
    ].endswith("(≤ 1.2 ✓)")
    assert llama["model"] == "Llama" and set(llama.values()) == {"Llama", "–"}
    assert cells(text, "Milliseconds")[1]["model (batch)"] == "Llama (2)"
    assert "✗" not in tables.table({"models": {"smoke-cnn": entry("tiny", dp_kfc__dp_sgd=9.0)}})


def test_a_ratio_is_the_median_over_rounds_of_the_ratio_within_a_round(tables):
    from common import compare_pairs, judged

    top, bottom = [10.0, 20.0, 33.0, 40.0, 50.0], [10.0, 10.0, 30.0, 10.0, 50.0]
    found = compare_pairs(top, bottom)
    # the medians' would be 33 / 10
    assert found == {
        "ratio": 1.1,
        "quartiles": [1.0, 3.0],
        "rounds": 5,
    }
    assert judged(1.1, 1.05, found["quartiles"]) == "1.10 [1.00, 3.00] (≤ 1.05 ✗)"
    assert (
        judged(1.0499, 1.05) == "1.050 (≤ 1.05 ✓)"
        and judged(0.9, 0.9, least=True) == "0.900 (≥ 0.9 ✓)"
    )


def test_the_summary_and_the_line_below_it_name_models_with_times_alone(tables, monkeypatch):
    import tables as documents

    here = {"cpu": "a processor", "threads": 2, "torch": "2.13", "commit": "abc"}
    memory = {
        "memory": {"plain": {"extra_mib": 7.0}},
        "memory_taken": {"date": "2026-01-01", "hardware": here},
    }
    timed, weighed = (
        entry("CNN") | {"hardware": here, "date": "2026-01-01"},
        entry("Llama") | memory | {"contenders": {}},
    )
    monkeypatch.setattr(
        documents, "read_json", lambda _: {"models": {"cnn": timed, "llama": weighed}}
    )
    assert (
        "| CNN (batch 8) | 10.0 |" in documents.speed_summary()
        and "Llama" not in documents.speed_summary()
    )


def test_the_page_of_tables_has_means_refusals_and_rows_of_files_that_exist(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = pytest.importorskip("tables_page")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "Not measured yet" in page.table("auroc")
    where = {"date": "2026-11-28T00:00:00", "hardware": {"cpu": "a processor"}}

    def row(area):
        scores = {"AUROC": area, "log loss": 0.4, "calibration error (15 bins)": None}
        return {"scores": scores, "guess": {"AUROC": 0.5, "log loss": 0.6}, "seconds": 1.0, **where}

    peers = {f"adult/dp-ebm/1/{seed}": row(0.8 + seed / 100) for seed in range(5)}
    peers |= {"bean/dp-ebm/1/0": {"error": "several classes", **where}}
    peers |= {"adult/boosting/none/0": row(0.93), "adult/dp-ebm/3/0": row(0.9)}
    page.write_json(tmp_path / "tables_peers.json", {"rows": peers})
    area = page.table("auroc").splitlines()
    assert area[2].startswith("| constant guess | 50.0 | –")
    assert area[3].startswith("| DP-EBM, interpret 0.7.8 | 82.0\u00a0±\u00a02.0 | –")
    assert area[4].startswith("| HistGradientBoosting, no privacy | 93.0 (1)")
    assert "| – | – | – | – | – |" in page.table("calibration")
    assert "| DP-EBM, interpret 0.7.8 | refuses |" in page.table("more")
    others = page.table("epsilons").splitlines()
    assert others[2].startswith("| 3 | DP-EBM, interpret 0.7.8 | 90.0 / 0.400 |")
    page.write_json(tmp_path / "tables_ours.json", {"rows": {"adult/additive/1/0": row(0.91)}})
    assert "| additive | 91.0 (1) |" in page.table("auroc")
    assert page.table("adult").count("\n") > 4 and "1.0" in page.table("seconds")


def test_rows_for_other_libraries_are_split_as_ours(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = pytest.importorskip("tables_peers")
    head = "age,sex,race,juv_fel_count,juv_misd_count,juv_other_count,priors_count"
    lines = [f"{20 + i},Male,Other,0,0,0,{i % 7},F,{i % 2}" for i in range(40)]
    folder = tmp_path / "tables"
    folder.mkdir()
    text = "\n".join([f"{head},c_charge_degree,two_year_recid", *lines])
    (folder / peers.FILES["compas"]).write_bytes(gzip.compress(text.encode()))
    rows = peers.write_rows("compas", tmp_path, 0, tmp_path / "rows.npz")
    ages = [*rows["train_numbers"][:, 0], *rows["test_numbers"][:, 0]]
    assert sorted(ages) == [20.0 + i for i in range(40)]
    assert 0 < len(rows["test_labels"]) < 20


def test_columns_of_words_are_read_from_the_left_and_no_cell_breaks_a_table():
    rows = [["a", "two\n    lines", "1.5 ± 0.1", "–"], ["b", "words", "**2.0**", "3 of 4"]]
    lines = markdown(["x", "what", "score", "seeds"], rows).splitlines()
    assert lines[1:3] == ["| --- | --- | --: | --: |", "| a | two lines | 1.5 ± 0.1 | – |"]
