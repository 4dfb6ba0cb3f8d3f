"""Tables and pictures of docs/results/dp-ngd.md, from `ngd_ablation.py` and `ngd_duality.py` alone.

    make results    # draws docs/img/dp-ngd-fig2.png, -fig3.png and -fig4.png

The verdicts on cells are of their direction. The paper's model is not the one here, so a cell is
compared with the baseline cell of its own table, and only the signs of the two differences meet.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import ngd_ablation as study
from dpkfc_papers.studies.harness import (
    IMAGES,
    compare_means,
    draw_means,
    finish,
    interval,
    machine,
    machine_of_rows,
    markdown,
    read_json,
    sheet,
)

SAME, OTHER, LEVEL = "same direction", "other direction", "not significant"
NOT_RUN, TOO_FEW = "not run", "no verdict (one run)"
Values = Sequence[float]


@dataclass(frozen=True)
class Cell:
    """A printed cell with the variation that stands for it.

    Attributes:
        table: of the paper.
        label: the variation.
        printed: its accuracy in percent.
        baseline: accuracy of the baseline cell of the table.
        method: of the study, by its name there.
        varied: settings over the method's best point; None for the point itself.
    """

    table: str
    label: str
    printed: float
    baseline: float
    method: str
    varied: Mapping[str, Any] | None = None


def cells() -> list[Cell]:
    """Return the cells of Tables 4 (ε = 2) and 6 and of Figure 4 beside their baselines."""
    printed = _read_printed("dp-ngd-4")
    whitened = printed["Whitened-Space Clipping (Ours)", "ε = 2"]
    found = []
    for row, method in (("Pre-conditioning", "before"), ("Post-conditioning", "after")):
        number = printed[f"{row} Clipping", "ε = 2"]
        _, _, label = BASELINES[method].partition(", ")
        found.append(Cell("Table 4, ε = 2", label, number, whitened, method))
    groups = {"Tcur": study.EVERY, "p": study.POWERS, "T1": study.WARM}
    sensitivity = _read_printed("dp-ngd-6")
    baseline = sensitivity["Tcur = 1, 4, 8, 16, 32", "value 3"]
    for (row, column), number in sensitivity.items():
        name, _, values = row.partition(" = ")
        value = float(values.split(", ")[int(column.removeprefix("value ")) - 1])
        # The default of each row is the baseline itself.
        if value in groups[name]:
            label = f"{name} = {value:g}"
            found.append(Cell("Table 6", label, number, baseline, "whitened", groups[name][value]))
    floors = _read_printed("dp-ngd-fig4")
    label = "floor fixed at λ_safe"
    found.append(
        Cell(
            "Figure 4",
            label,
            floors[label, "final accuracy"],
            floors["schedule of the floor", "final accuracy"],
            "whitened",
            {**study.FIXED, **study.COURSE},
        )
    )
    return found


def _read_printed(name: str) -> dict[tuple[str, str], float]:
    from dpkfc_papers.tables import load

    return {(cell.row, cell.column): cell.published.mean for cell in load(name).cells}


def direction(printed: float, ours: Values, baseline: Values) -> str:
    """Return what our difference says about the sign of a printed one, by the rule of the page.

    Args:
        printed: difference of the printed cell from its baseline, in points.
        ours: accuracies of the variation in percent, two or more.
        baseline: accuracies of the baseline.
    """
    gain, error = compare_means(ours, baseline)
    if abs(gain) <= error:
        return LEVEL
    return SAME if (gain > 0) == (printed > 0) else OTHER


def directions(store: Any) -> list[tuple[Cell, Values, str]]:
    """Return every cell with our values and its verdict."""
    found = []
    base = study.values(store, "whitened")
    for cell in cells():
        ours = study.values(store, cell.method, cell.varied)
        said = TOO_FEW if ours else NOT_RUN
        if len(ours) > 1 and len(base) > 1:
            said = direction(cell.printed - cell.baseline, ours, base)
        found.append((cell, ours, said))
    return found


def directions_in_short() -> str:
    """Return how many cells have the same, the other and no direction."""
    from dpkfc_papers.store import Store

    verdicts = [said for _, _, said in directions(Store(study.PATH))]
    return ", ".join(str(verdicts.count(said)) for said in (SAME, OTHER, LEVEL))


def direction_table(store: Any) -> str:
    """Return Tables 4 and 6 and Figure 4: printed and own differences from the baseline cell."""
    base = study.values(store, "whitened")
    rows = [
        ["all", "baseline: clip in the whitened space, T_cur = 8, p = 10, T₁/T = 0.1", "–"]
        + [interval(base), "–", str(len(base)), "–"]
    ]
    for cell, ours, said in directions(store):
        difference = "–"
        if said not in (NOT_RUN, TOO_FEW):
            gain, error = compare_means(ours, base)
            difference = f"{gain:+.2f} ± {error:.2f}"
        printed = f"{cell.printed - cell.baseline:+.2f}"
        rows.append(
            [cell.table, cell.label, printed, interval(ours), difference, str(len(ours)), said]
        )
    head = ["of the paper", "variation", "printed − its baseline", "test %, ε = 2"]
    head += ["here − baseline", "seeds", "direction"]
    return markdown(head, rows)


def _failures(store: Any) -> str:
    """Return in how many runs the network failed without a floor."""
    runs = [
        study.test_run(store, "whitened", seed, study.NO_FLOOR, study.UNTIL_FAILURE)
        for seed in study.SEEDS
    ]
    made = [store.get(run) for run in runs if run is not None]
    rows = [row for row in made if row is not None]
    if not rows:
        return "nothing was run"
    failed = [row for row in rows if "failed" in row]
    evaluations = max((len(row["accuracies"]) for row in failed), default=0)
    steps = study.NO_FLOOR["evaluate_every"] * (evaluations + 1)
    return f"{len(failed)} of {len(rows)} runs end in NaN, within {steps} steps"


BASELINES = {
    "whitened": "DP-NGD, clip in the whitened space",
    "before": "DP-NGD, clip before the curvature",
    "after": "DP-NGD, clip the natural gradient",
    "adadps": "AdaDPS",
    "pretrained": "DP-SGD-PT",
    "dp-sgd": "DP-SGD",
}


def method_table(store: Any) -> str:
    """Return each method at its best point, and DP-NGD with private curvature."""
    rows = []
    for method, label in BASELINES.items():
        point = study.best_point(store, method)
        values = study.values(store, method)
        _, points = study.GRID.arms[method]
        setting, edge = "–", "–"
        if point is not None:
            setting = f"lr = {point['lr']:.3g}, C = {point['max_grad_norm']:g}"
            edge = _edge(points, point)
        rows.append([label, str(len(points)), setting, edge, interval(values), str(len(values))])
    private = study.values(store, "whitened", study.PRIVATE)
    label = "DP-NGD, curvature of 500 private images (NOT PRIVATE)"
    rows.append([label, "–", "as DP-NGD", "–", interval(private), str(len(private))])
    head = ["method", "points", "best on the validation split", "edge of the grid"]
    return markdown([*head, "test %, ε = 2", "seeds"], rows)


def _edge(points: Sequence[study.Settings], point: study.Settings) -> str:
    clip = point["max_grad_norm"]
    rates = [other["lr"] for other in points if other["max_grad_norm"] == clip]
    if len(rates) < 2:
        return "one rate at this C"
    return "yes" if point["lr"] in (min(rates), max(rates)) else "no"


# --------------------------------------------------------------------------------------------------
# Figures 2 and 3: accuracy over the steps of a run, and over the number of public images.

PICTURES = {
    "steps": ("dp-ngd-fig2.png", "Accuracy over the steps of a run"),
    "images": ("dp-ngd-fig3.png", "Accuracy over the number of public images"),
    "course": ("dp-ngd-fig4.png", "Accuracy through training by floor"),
}
LINES = {
    "whitened": ("DP-NGD", "C1"),
    "adadps": ("AdaDPS", "C0"),
    "pretrained": ("DP-SGD-PT", "C6"),
}


def collect_by_steps(store: Any) -> dict[str, dict[int, Values]]:
    """Return accuracies by method and number of steps; each number is a run of its own."""
    lengths = {steps: study.LENGTHS[steps] for steps in study.LENGTHS}
    return _collect(store, lengths, study.STEPS)


def collect_by_images(store: Any) -> dict[str, dict[int, Values]]:
    """Return accuracies by method and number of public images."""
    return _collect(store, study.IMAGES, study.PUBLIC)


def _collect(
    store: Any, group: Mapping[int, Mapping[str, Any]], default: int
) -> dict[str, dict[int, Values]]:
    found: dict[str, dict[int, Values]] = {}
    for method in LINES:
        of = {default: study.values(store, method)}
        of |= {value: study.values(store, method, varied) for value, varied in group.items()}
        found[method] = {value: of[value] for value in sorted(of) if of[value]}
    return found


def line_table(found: Mapping[str, Mapping[int, Values]], head: str) -> str:
    """Return a method a line and a number a column."""
    numbers = sorted({number for of in found.values() for number in of})
    rows = []
    for method, (label, _) in LINES.items():
        values = [found[method].get(number, ()) for number in numbers]
        seeds = sorted({len(of) for of in values if of})
        count = (
            "–" if not seeds else str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        )
        rows.append([label, *map(interval, values), count])
    return markdown([f"test %, ε = 2; {head}", *(f"{n:,}" for n in numbers), "seeds"], rows)


def _courses(store: Any) -> dict[str, list[list[tuple[int, float]]]]:
    """Return test accuracy through training by floor, a list of (step, percent) a seed."""
    found: dict[str, list[list[tuple[int, float]]]] = {}
    for label, varied in (
        ("schedule of the floor", None),
        ("floor fixed at λ_safe", {**study.FIXED, **study.COURSE}),
    ):
        rows = []
        for seed in study.MORE_SEEDS:
            run = study.test_run(store, "whitened", seed, varied)
            row = None if run is None else store.get(run)
            if row is not None:
                rows.append([(step, 100 * value) for step, value in row["curve"]])
        found[label] = rows
    return found


def course_table(store: Any) -> str:
    """Return test accuracy through training by floor, one column an evaluation."""
    rows = []
    steps: list[int] = []
    for label, courses in _courses(store).items():
        if not courses:
            continue
        steps = [step for step, _ in courses[0]]
        columns = zip(*([value for _, value in course] for course in courses), strict=True)
        rows.append([label, *(f"{statistics.mean(of):.2f}" for of in columns), str(len(courses))])
    rows.append([f"no floor: {_failures(store)}", *["–"] * len(steps), "–"])
    return markdown(["mean test % after steps", *map(str, steps), "seeds"], rows)


def page(part: str) -> str:
    """Return a table of the page by its name, with its picture; "" before anything was run."""
    from dpkfc_papers.store import Store

    if part == "duality":
        from dpkfc_papers.studies import ngd_duality

        results = read_json(ngd_duality.PATH)
        return f"{ngd_duality.table(results)}\n\n{machine(results)}" if results else ""
    store = Store(study.PATH)
    if not study.values(store, "whitened"):
        return ""
    made: Mapping[str, Callable[[], str]] = {
        "directions": lambda: direction_table(store),
        "methods": lambda: f"{method_table(store)}\n\n{machine_of_rows(list(store))}",
        "steps": lambda: line_table(collect_by_steps(store), "steps"),
        "images": lambda: line_table(collect_by_images(store), "images"),
        "course": lambda: course_table(store),
    }
    drawn = part in PICTURES and (IMAGES / PICTURES[part][0]).exists()
    picture = f"\n\n![{PICTURES[part][1]}](../img/{PICTURES[part][0]})" if drawn else ""
    return made[part]() + picture


# --------------------------------------------------------------------------------------------------
# Pictures.


def draw(folder: Path) -> None:
    """Draw Figures 2, 3 and 4, as far as they were measured."""
    from dpkfc_papers.store import Store

    store = Store(study.PATH)
    if not study.values(store, "whitened"):
        return
    _draw_lines(collect_by_steps(store), "steps of a run", folder / PICTURES["steps"][0])
    _draw_lines(collect_by_images(store), "public images", folder / PICTURES["images"][0])
    _draw_courses(_courses(store), folder / PICTURES["course"][0])


def _draw_lines(found: Mapping[str, Mapping[int, Values]], below: str, path: Path) -> None:
    numbers = sorted({number for of in found.values() for number in of})
    if len(numbers) < 2:
        return
    figure, ((panel,),) = sheet(height=3.2)
    for method, (label, colour) in LINES.items():
        of = found[method]
        if not of:
            continue
        draw_means(panel, list(of), list(of.values()), label=label, color=colour, marker="o")
    panel.set_xscale("log")
    panel.set_xticks(numbers, [f"{n:,}" for n in numbers])
    panel.minorticks_off()
    panel.set_xlabel(below)
    panel.set_ylabel("test accuracy, %")
    finish(figure, path, len(LINES))


def _draw_courses(found: Mapping[str, Sequence[Sequence[tuple[int, float]]]], path: Path) -> None:
    figure, ((panel,),) = sheet(height=3.2)
    for (label, rows), colour in zip(found.items(), ("C1", "C0"), strict=True):
        for number, row in enumerate(rows):
            steps, values = zip(*row, strict=True)
            panel.plot(steps, values, color=colour, label=label if number == 0 else None)
    panel.set_xlabel("step")
    panel.set_ylabel("test accuracy, %")
    finish(figure, path, 2)
