"""Sentences of docs/results.md, its details and docs/figures.md that results could make untrue
without anybody noticing.
"""

import json
import re
import statistics
from pathlib import Path

import pytest

from dpkfc_papers.store import Store, best_trials

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "papers" / "results", ROOT / "docs" / "results.md"
DETAILS = ROOT / "docs" / "results"


def read_line(path):
    """Return a page on one line."""
    return " ".join(path.read_text("utf-8").split())


@pytest.mark.slow
def test_cells_of_the_paper_are_counted_by_recipe(study_module):
    """Of IMDB in Table 5 as in the table of its cells."""
    tables = study_module("pages")
    cells = [line for line in tables.published("dp-kfc-5").splitlines() if "| IMDB (" in line]
    run = [line for line in cells if "| not run" not in line]
    counts = [sum(f"| {word} |" in line for line in run) for word in ("better", "reproduced")]
    missed = sum("| not reproduced |" in line for line in run)
    assert (len(run), *counts, missed) == (12, 0, 3, 9)
    (row,) = [line for line in tables.published_groups().splitlines() if "5, `imdb" in line]
    assert row.startswith(f"| DP-KFC, Table 5, `imdb-logistic` | 12 | 0 | 3 | {missed} |")


def test_heads_are_ahead_of_every_network_where_the_page_says_so(study_module):
    pages = study_module("task_pages")
    assert read_line(PAGE).count("The heads are ahead of every network here.") == 2
    for name in ("mnist", "fashion-mnist"):
        at_one = {"features": [], "network": [], "here": []}
        for line in pages.TASKS[name].lines(name):
            if line.kind in at_one and 1.0 in line.cells:
                at_one[line.kind].append(statistics.mean(line.cells[1.0]))
        assert min(at_one["features"]) > max(at_one["network"] + at_one["here"])


def test_cifar_is_above_the_network_and_below_the_paper_that_tunes_all_layers(study_module):
    pages = study_module("task_pages")
    assert "above the CNN at a smaller ε, and below DP-RandP" in read_line(PAGE)
    lines = pages.TASKS["cifar10"].lines("cifar10")
    heads = [statistics.mean(one.cells[1.0]) for one in lines if one.kind == "features"]
    cnn = [statistics.mean(one.cells[2.0]) for one in lines if one.kind == "here"]
    (printed,) = [one.cells[1.0][0] for one in lines if one.label.startswith("DP-RandP")]
    assert max(cnn) < min(heads) and max(heads) < printed


def test_no_row_of_cifar_has_the_defaults_of_its_recipe():
    from dpkfc.app.tuning.runs import Run

    recipe = Run.make("cifar10-cnn", "dp-kfc-natural", {})
    defaults = [recipe.default(name) for name in ("epsilon", "epochs")]
    assert defaults == [3.0, 30.0] and "No row has the recipe's defaults" in read_line(
        DETAILS / "cifar10.md"
    )
    for row in rows_of(RESULTS / "grids" / "cifar.json"):
        settings = row["run"]["settings"]
        assert [settings["epsilon"], settings["epochs"]] != defaults


def test_no_interval_separates_the_methods_on_tables(study_module):
    half, sentence = (
        study_module("harness").half_interval,
        "no interval separates DP-KFC from DP-SGD",
    )
    assert sentence in read_line(PAGE)
    for entry in json.loads((RESULTS / "sklearn.json").read_text("utf-8"))["tables"]:
        found = {
            one["method"]: one["scores"]
            for one in entry["private"]
            if one["model"] == "logistic" and one["epsilon"] == 1.0
        }
        if found:
            gap = abs(statistics.mean(found["dp-kfc"]) - statistics.mean(found["dp-sgd"]))
            assert gap < half(found["dp-kfc"]) + half(found["dp-sgd"])


def test_outputs_are_nearer_to_white_than_inputs_on_the_network_and_not_on_the_transformer(
    study_module,
):
    """What the page gives as the reason why whitening both sides is no better."""
    rows = study_module("figure_tables").condition_table().splitlines()[2:]
    found = {}
    for row in rows:
        model, _, a, g = (cell.strip().replace(",", "") for cell in row.strip("|").split("|"))
        found.setdefault(model, []).append((float(a), float(g)))
    assert all(g < a / 30 for a, g in found["mnist-cnn"])
    assert all(g > a / 4 for a, g in found["mnist-vit"])
    assert (
        "factor G of outputs is nearly white already, and the factor A of inputs is not"
        in read_line(PAGE)
    )


def test_what_is_said_to_have_been_varied_was():
    """Each by itself, two seeds a point, on the validation split; and the best of them is no better
    than inputs alone.
    """
    page = (DETAILS / "curvature.md").read_text("utf-8")
    assert "## Root, refreshes, labels and the source of G\n" in page
    held = [
        row
        for row in rows_of(RESULTS / "grids" / "varied.json")
        if row["run"]["method"] == "dp-kfc"
    ]
    found = {}
    for name in ("exponent", "every", "labels", "output_source"):
        own = [row for row in held if name in row["run"]["settings"]]
        points = {str(row["run"]["settings"][name]) for row in own}
        assert len(own) == 2 * len(points) and {row["measured_on"] for row in own} == {"validation"}
        found |= {
            f"{name} {at}": [r["accuracy"] for r in own if str(r["run"]["settings"][name]) == at]
            for at in points
        }
    # inputs alone, pink noise
    assert len(found) == 7 and max(statistics.mean(values) for values in found.values()) < 0.9586


def rows_of(path):
    content = json.loads(path.read_text("utf-8"))
    rows = content.get("rows", {})
    return [
        row
        for row in (rows.values() if isinstance(rows, dict) else rows)
        if "settings" in row.get("run", {})
    ]


def test_arms_that_won_where_their_search_begins_are_named():
    """On Fashion-MNIST: the best trial is at the recipe's values and hardly any other ran to its
    end.
    """
    from dpkfc.app.tuning.runs import Run
    from dpkfc_papers.accuracy import arms

    rows = [
        row
        for row in Store(RESULTS / "accuracy" / "cnn.json")
        if row["run"]["recipe"] == "fashion-mnist-cnn"
    ]
    won = {arm: row["tag"]["params"] for (_, arm), row in best_trials(rows).items()}
    found = []
    for arm in arms("fashion-mnist-cnn"):
        recipe = Run.make("fashion-mnist-cnn", arm.method, arm.settings)
        if all(value == recipe.default(name) for name, value in won[arm.name].items()):
            pruned = sum(
                row["tag"].get("pruned", False) for row in rows if row["tag"]["arm"] == arm.name
            )
            assert pruned in (17, 18)
            found.append(arm.label.replace("DP-NGD, public images", "DP-NGD"))
    names = "DP-SGD, normalised DP-SGD, DiSK, DP-AdamBC and DP-NGD"
    assert sorted(found) == sorted(re.split(", | and ", names))
    assert f"{names} won at" in read_line(DETAILS / "claims.md")


def test_adambc_won_at_the_largest_floor_that_was_tried():
    floors = {}
    for row in Store(RESULTS / "accuracy" / "cnn.json"):
        tag = row.get("tag", {})
        is_trial = row["measured_on"] == "validation" and tag.get("arm") == "dp-kfc+adam-bc"
        if is_trial and row["run"]["recipe"] == "mnist-cnn" and not tag["pruned"]:
            floors[row["accuracy"]] = tag["params"].get("adam_bc_floor", 0.0)
    assert floors[max(floors)] == max(floors.values()) > 0
    assert "won at the largest absolute floor that was tried" in read_line(DETAILS / "claims.md")


def test_which_factor_does_most_of_the_realised_map():
    rows = json.loads((RESULTS / "figures" / "kfc-theorem-5.4.json").read_text("utf-8"))["rows"]
    more = {}
    for row in rows:
        for checkpoint in (row["values"][0], row["values"][-1]):
            falls = {side: 1.0 for side in "AG"}
            for layer in checkpoint["layers"].values():
                for side in falls:
                    of = [
                        layer["realised"].get(source, {}).get(side, {}).get("held")
                        for source in ("nothing", "pink noise")
                    ]
                    falls[side] *= of[0] / of[1] if all(of) else 1.0
            more.setdefault(row["run"]["recipe"], set()).add(max(falls, key=falls.__getitem__))
    assert more == {"mnist-mlp": {"A"}, "mnist-cnn": {"A"}, "mnist-vit": {"G"}}
    text = (ROOT / "docs" / "figures.md").read_text("utf-8")
    assert (
        "in MLP and CNN, most of it through A" in text
        and "in the ViT before and after training, most of it through G" in text
    )
