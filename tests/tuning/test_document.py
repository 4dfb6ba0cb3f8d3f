"""Sentences of docs/results.md and docs/figures.md that results could make untrue without anybody
noticing.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from dpkfc.app.html.read import best_trials
from dpkfc.app.tuning.runs import Store

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}


def part(heading: str) -> str:
    """A section of the page, on one line."""
    return " ".join(
        PAGE.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0].split()
    )


def test_cells_that_are_below_the_paper_are_counted_where_goals_are_told(benchmark_module):
    tables, told = benchmark_module("tables"), part("What was aimed at, and not reached")
    for number in (1, 2, 5, 7):
        run = [one for one in tables._published(f"dp-kfc-{number}")[1] if one.values]
        below = sum(statistics.mean(one.values) < one.cell.published.mean for one in run)
        words = re.findall(rf"({'|'.join(NUMBERS)})(?: cells)? of \[Table {number}\]", told)
        assert [NUMBERS[word] for word in words] == [below], number


def test_what_is_said_to_have_been_varied_was():
    """Each by itself, two seeds a point, on the validation split; and the best of them is no better
    than inputs alone.
    """
    assert "[root, interval of refreshes, labels and the source of G]" in part(
        "What was aimed at, and not reached"
    )
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


def rows_of(path: Path) -> list[dict]:
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
        recipe = Run.of("fashion-mnist-cnn", arm.method, arm.settings)
        if all(value == recipe.default(name) for name, value in won[arm.name].items()):
            pruned = sum(
                row["tag"].get("pruned", False) for row in rows if row["tag"]["arm"] == arm.name
            )
            assert pruned in (17, 18)
            found.append(arm.label.replace("DP-NGD, public images", "DP-NGD"))
    names = "DP-SGD, normalised DP-SGD, DiSK, DP-AdamBC and DP-NGD"
    assert sorted(found) == sorted(re.split(", | and ", names))
    assert " ".join(PAGE.read_text("utf-8").split()).count(f"{names} won at") == 2


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
