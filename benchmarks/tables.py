"""Write the measured tables into the documents, between their markers, from
benchmarks/results/*.json.

    python benchmarks/tables.py            # README.md and docs/*.md
    python benchmarks/tables.py --check    # change nothing; fail if a table is out of date

A marker is `<!-- table: NAME -->` and ends at `<!-- end of table -->`; what stands between is never
edited by hand.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, machine, machine_of_rows, markdown, read_json

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SUMMARY = {
    "plain": "plain SGD",
    "opacus_hooks": "Opacus hooks",
    "dp_sgd": "DP-SGD here",
    "dp_kfc_inputs": "DP-KFC here",
    "dp_kfc": "DP-KFC, both sides",
}


def documents() -> list[Path]:
    return [
        path
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if path.exists()
    ]


def missing(command: str) -> str:
    return f"*Not measured in this checkout yet; `{command}` writes it.*"


def speed_summary() -> str:
    """Milliseconds and extra memory of the four contenders a reader asks for first, and where that
    was measured.
    """
    results = read_json(RESULTS / "speed.json")
    if not results:
        return missing("make bench")
    # others are in docs/speed.md
    timed = {name: entry for name, entry in results["models"].items() if entry["contenders"]}
    rows = []
    for entry in timed.values():
        times, memory = entry["contenders"], entry.get("memory", {})
        cells = [_cell(times.get(name, {}), memory.get(name, {})) for name in SUMMARY]
        rows.append([f"{entry['title']} (batch {entry['batch_size']})", *cells, _over_hooks(entry)])
    head = [
        "milliseconds a step / extra MiB (of steps; of all)",
        *SUMMARY.values(),
        "DP-KFC ÷ Opacus hooks",
    ]
    return markdown(head, rows) + "\n\n" + machine({"models": timed})


def _cell(times: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    import speed_tables

    if "median_ms" not in times:
        return "n/a" if times else "–"
    space = f" / {speed_tables.mebibytes(memory)}" if "extra_mib" in memory else ""
    return f"{times['median_ms']:,.1f}{space}"


def _over_hooks(entry: Mapping[str, Any]) -> str:
    import speed_tables

    found = ((name, speed_tables.within(entry, name, "opacus_hooks")) for name in speed_tables.OURS)
    texts = (
        f"{r['ratio']:.2f}×{'' if name == 'dp_kfc_inputs' else ' (both sides)'}"
        for name, r in found
        if r is not None
    )
    return next(texts, "–")


def speed() -> str:
    import speed_tables

    results = read_json(RESULTS / "speed.json")
    every = speed_tables.every_model()
    return (
        speed_tables.table(results, every) + "\n\n" + machine(results)
        if results
        else missing("make bench")
    )


def accuracy() -> str:
    import accuracy as study

    results = read_json(RESULTS / "accuracy.json")
    return (
        study.table() + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/accuracy.py")
    )


def studies():
    """Results of the accuracy studies, by the name of their file."""
    from dpkfc.app.tuning.runs import Store

    return {path.stem: Store(path) for path in sorted((RESULTS / "accuracy").glob("*.json"))}


def accuracy_study(recipe: str) -> str:
    """The arms of the accuracy study on one recipe."""
    from dpkfc_papers.accuracy import table

    rows = [
        row
        for store in studies().values()
        for row in store
        if row["run"]["recipe"] == recipe and "tag" in row
    ]
    if not rows:
        return _describe_unfinished(recipe) or missing("python benchmarks/accuracy_study.py")
    return table(rows, recipe) + "\n\n" + machine_of_rows(rows)


def _describe_unfinished(recipe: str) -> str:
    """Trials that lie apart because no arm has had all of its own; nothing where there are none."""
    from dpkfc.app.tuning.runs import Store

    for path in sorted((RESULTS / "trials").glob("*.json")):
        begun = [row["tag"]["arm"] for row in Store(path) if row["run"]["recipe"] == recipe]
        if begun:
            return (
                f"*Begun: {len(begun)} trials of {len(set(begun))} arms, in"
                f" `benchmarks/results/trials/{path.name}`.*"
            )
    return ""


def grid(name: str) -> str:
    """The best point of each arm of a grid, judged on the test set; `NAME-points`: all of them, on
    the validation split.
    """
    import grids
    from dpkfc.app.tuning.runs import Store

    of = name.removesuffix("-points")
    store = Store(grids.RESULTS / f"{of}.json")
    rows = list(store)
    if not rows:
        return missing(f"python benchmarks/grids.py --grid {of}")
    made = grids.table if of == name else grids.every_point
    return made(of, store) + "\n\n" + machine_of_rows(rows)


def claims() -> str:
    """What the papers say, and what was found here."""
    import claims as said
    from features_table import read_rows

    return said.table(said.measured(RESULTS), read_rows())


def verdicts() -> str:
    """The verdict on each claim alone."""
    import claims as said
    from features_table import read_rows

    return said.verdict_table(said.measured(RESULTS), read_rows())


def paper_claims() -> str:
    """What became of the claims of papers, and the controls that explain it."""
    import claims as said
    from features_table import read_rows

    return said.paper_table(said.measured(RESULTS), read_rows())


def paper_cells() -> str:
    """How the printed numbers of each paper came out."""
    import ngd_pages
    from dpkfc_papers.tables import names

    words = ("better", "reproduced", "not reproduced", "no verdict", "not run")
    counts: dict[str, list[int]] = {}
    for name in names():
        table, found = _published(name)
        of = counts.setdefault(table.title.partition(",")[0], [0] * (len(words) + 1))
        of[0] += len(found)
        for number, word in enumerate(words, start=1):
            of[number] += sum(cell.verdict.startswith(word) for cell in found)
    directions = {"DP-NGD": ngd_pages.directions_in_short()}
    rows = [[paper, *map(str, of), directions.get(paper, "–")] for paper, of in counts.items()]
    more = "direction on a small CNN: same, other, not significant"
    return markdown(["paper", "cells of its tables", *words, more], rows)


def script(name: str) -> str:
    """The table of a script with runs of its own."""
    study = import_module(name)
    text = study.table()
    if not text:
        return missing(f"python benchmarks/{name}.py")
    rows = read_json(study.PATH)["rows"].values()
    return f"{text}\n\n{machine_of_rows(list(rows))}"


def dp_ngd(part: str) -> str:
    """The variations of the DP-NGD paper on a small CNN, by the parts of their page."""
    import ngd_pages

    command = "ngd_duality.py" if part == "duality" else "ngd_ablation.py"
    return ngd_pages.page(part) or missing(f"python benchmarks/{command}")


def hessian() -> str:
    """The ends of the spectrum of the Hessian, before and after training."""
    import hessian as study

    results = read_json(study.PATH)
    if not results:
        return missing("python benchmarks/hessian.py")
    picture = f"![spectrum of the Hessian](img/{study.PICTURE})"
    return f"{study.table(results)}\n\n{picture}\n\n{machine(results)}"


def disk_figures() -> str:
    """Figures 1, 2 and 8 of the DiSK paper on the CNN of MNIST."""
    import disk_pages

    return disk_pages.page() or missing("python benchmarks/grids.py --grid disk")


def task(name: str) -> str:
    """A few methods of a task, with 95 % intervals and what papers print."""
    import result_pages

    return result_pages.task_page(name) or missing("python benchmarks/features.py")


def conditions() -> str:
    """How far from white the two factors of each network are."""
    import result_pages

    return result_pages.condition_table() or missing("dpkfc reproduce kfc-theorem-5.4")


def convergence() -> str:
    """The least gradient norm over the number of steps, beside the rate of a theorem."""
    import convergence as study

    results = read_json(RESULTS / "convergence.json")
    if not results:
        return missing("python benchmarks/convergence.py")
    return study.table() + "\n\n" + machine(results)


def rank_accuracy() -> str:
    """What low-rank sides and smaller probes cost in accuracy."""
    import rank_accuracy as study
    from dpkfc.app.tuning.runs import Store

    store = Store(study.RESULTS)
    rows = list(store)
    if not rows:
        return missing("python benchmarks/rank_accuracy.py")
    return study.table(study.runs(False, 9), store) + "\n\n" + machine_of_rows(rows)


def which_side() -> str:
    """Signal, curvature and noise of a private step, by what is whitened."""
    import which_side as study

    results = read_json(study.PATH)
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/which_side.py")
    )


def probe_whitening() -> str:
    """How white each probe makes the inputs of layers."""
    import probe_whitening as study

    results = read_json(study.PATH)
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/probe_whitening.py")
    )


@cache
def _tuning():
    from dpkfc.app.tuning.runs import Store
    from dpkfc_papers.tables import Tuning

    # Table 7 of DP-KFC has its CIFAR-10 runs from a grid.
    return Tuning([*studies().values(), Store(RESULTS / "grids" / "cifar.json")])


def _published(name: str):
    from dpkfc.app.tuning.runs import Store
    from dpkfc_papers.tables import load, outcomes

    nothing, times = Store(RESULTS / "accuracy" / "none.json"), read_json(RESULTS / "speed.json")
    return load(name), outcomes(load(name), nothing, _tuning(), range(3), times=times)


def published(name: str = "") -> str:
    """The cells of a published table beside ours, or how many of each table came out how."""
    from dpkfc_papers.tables import markdown as cells
    from dpkfc_papers.tables import names

    if name:
        return cells(*_published(name))
    rows = []
    for one in names():
        table, found = _published(one)
        words = ("reproduced", "better", "not reproduced", "no verdict", "not run")
        counts = [sum(cell.verdict.startswith(word) for cell in found) for word in words]
        rows.append([f"`{one}`", table.title, str(len(found)), *map(str, counts)])
    return markdown(
        [
            "table",
            "what it is",
            "cells",
            "reproduced",
            "better",
            "not reproduced",
            "no verdict",
            "not run",
        ],
        rows,
    )


def published_groups() -> str:
    """How the cells of the DP-KFC paper that were run came out, by table and recipe."""
    rows = []
    for number in (1, 2, 5, 6, 7):
        table, found = _published(f"dp-kfc-{number}")
        for recipe in dict.fromkeys(one.cell.recipe for one in found if one.values):
            of = [one for one in found if one.values and one.cell.recipe == recipe]
            words = ("better", "reproduced", "not reproduced")
            counts = [sum(one.verdict == word for one in of) for word in words]
            below = sum(statistics.mean(one.values) < one.cell.published.mean for one in of)
            title = table.title.partition(":")[0]
            rows.append([f"{title}, `{recipe}`", str(len(of)), *map(str, counts), str(below)])
    head = ["table, recipe", "cells run", "better", "reproduced", "not reproduced"]
    return markdown([*head, "below in the mean"], rows)


def methods(page: str = "") -> str:
    """The methods on the digits, all or those of one page of docs/methods."""
    import methods as study
    from dpkfc.app.settings import METHODS

    results = read_json(RESULTS / "methods.json")
    if not results:
        return missing("python benchmarks/methods.py")
    only = tuple(
        name
        for name, method in METHODS.items()
        if not page or method.page == f"{page}.md" or name == "dp-sgd"
    )
    return study.table(results, only) + "\n\n" + machine(results)


def method_speed(page: str = "") -> str:
    """A step of each method over the step it is built on, or of those of one page of
    docs/methods.
    """
    import method_speed as study

    results = read_json(RESULTS / "method_speed.json")
    if not results:
        return missing("python benchmarks/method_speed.py")
    return (
        study.table(results, [name for name in study.PAIRS if name.lower().startswith(page)])
        + "\n\n"
        + machine(results)
    )


def checkpoint() -> str:
    """What a checkpoint of a large session costs."""
    import checkpoint as study

    results = read_json(RESULTS / "checkpoint.json")
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/checkpoint.py")
    )


def phases() -> str:
    """Where the time of a step goes."""
    import phases as study

    results = read_json(RESULTS / "phases.json")
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/phases.py")
    )


def tracking() -> str:
    """What the proof of the batch axis costs."""
    import tracking as study

    results = read_json(RESULTS / "tracking.json")
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/tracking.py")
    )


def ranks() -> str:
    """Several processes against several threads."""
    import scale_ranks as study

    results = read_json(RESULTS / "ranks.json")
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python benchmarks/scale_ranks.py")
    )


def scale() -> str:
    """How a step grows along each axis."""
    import scale as study

    results = read_json(RESULTS / "scale.json")
    return (
        study.table(results) + "\n\n" + machine(results) if results else missing("make bench-scale")
    )


def federated_accuracy(part: str) -> str:
    """The federated study: `arms-TASK`, accuracies, `gains-TASK`, differences between arms, or
    `noise`, ε seen from two sides.
    """
    from dpkfc.app.tuning.runs import Store
    from dpkfc_papers import federated_study
    from dpkfc_papers.federated_study import STUDY

    if part == "noise":
        return federated_study.noise(STUDY)
    store = Store(RESULTS / "federated_accuracy.json")
    rows = list(store)
    if not rows:
        return missing(
            "dpkfc reproduce dp-fedsofim --results benchmarks/results/federated_accuracy.json"
        )
    kind, _, task = part.partition("-")
    if kind == "gains":
        return federated_study.second_order(STUDY, store, task)
    origin = next((row["features"] for row in rows if row["run"]["task"] == task), "")
    accuracies = federated_study.accuracies(STUDY, store, task)
    return f"{accuracies} Features: {origin}.\n\n{machine_of_rows(rows)}"


def federated(part: str) -> str:
    """What federated rounds cost: the server's step, whole runs in one process, Flower's
    simulation.
    """
    import federated as benchmark

    results = read_json(RESULTS / "federated.json")
    if part not in results:
        return missing("python benchmarks/federated.py")
    return benchmark.table({part: results[part]}) + "\n\n" + machine(results[part])


def figures(part: str) -> str:
    """What the figures of the DP-KFC paper show here, as numbers."""
    import figure_tables

    return figure_tables.PARTS[part]()


def plan_70b(part: str = "") -> str:
    """The paper-and-pencil plan, or (`check`) how its formulas do on what was measured."""
    import plan_70b as paper

    if not part:
        return paper.plan_table()
    models = read_json(RESULTS / "speed.json").get("models", {})
    of = {name: models[name] for name in paper.MEASURED if name in models}
    return paper.check_table() + "\n\n" + machine({"models": of}, memory=False)


def assurance(section: str = "summary") -> str:
    """The verdicts of the last full run of the checks, or the figures of one section."""
    import assurance as checks

    results = read_json(RESULTS / "assurance.json")
    if not results:
        return missing("make assurance")
    if section != "summary":
        return checks.evidence_table(
            results, next(name for name in checks.SECTIONS if name.replace(" ", "-") == section)
        )
    return checks.summary_table(results) + "\n\n" + machine(results, commit=False)


def headline() -> str:
    """What the methods reach on the CNN of the DP-KFC paper."""
    import headline as front

    results = read_json(RESULTS / "accuracy" / "cnn.json")
    return front.table(results) if results else missing("python benchmarks/accuracy_study.py")


def sklearn_estimators() -> str:
    """The estimators of `dpkfc.sklearn` beside a guess and a model without privacy."""
    import sklearn_estimators as study

    results = read_json(RESULTS / "sklearn.json")
    if not results:
        return missing("python benchmarks/sklearn_estimators.py")
    return study.table() + "\n\n" + machine(results)


def which_method() -> str:
    """What the methods to choose from reach on each task."""
    import which_method as page

    return page.table()


def own_data() -> str:
    """A user's own table and images by the command line."""
    import own_data as study

    results = read_json(RESULTS / "own_data.json")
    if not results:
        return missing("python benchmarks/own_data.py")
    return study.table_of_results() + "\n\n" + machine(results)


def features(part: str = "") -> str:
    """Linear heads on features: all rows, the controls, sentence vectors, or a matrix."""
    import features_table

    if part == "matrix":
        found = features_table.matrix()
    elif part == "sentences":
        found = features_table.sentence_table()
    else:
        files = {"": features_table.MEASURED, "controls": features_table.CONTROLS}
        found = features_table.table(files[part])
    return found or missing("python benchmarks/features.py")


TABLES: dict[str, Callable[[], str]] = {
    "which-method": which_method,
    "speed-summary": speed_summary,
    "speed": speed,
    "accuracy": accuracy,
    "published": published,
    "methods": methods,
    "method-speed": method_speed,
    "scale": scale,
    "checkpoint": checkpoint,
    "ranks": ranks,
    "plan-70b": plan_70b,
    "assurance": assurance,
    "rank-accuracy": rank_accuracy,
    "probe-whitening": probe_whitening,
    "which-side": which_side,
    "features": features,
    "own-data": own_data,
    "sklearn": sklearn_estimators,
    "claims": claims,
    "verdicts": verdicts,
    "conditions": conditions,
    "convergence": convergence,
    "paper-groups": published_groups,
    "paper-claims": paper_claims,
    "paper-cells": paper_cells,
    "federated-ablation": partial(script, "federated_ablation"),
    "headline": headline,
    "disk-figures": disk_figures,
    "generation": partial(script, "generation"),
    "federated-variations": partial(script, "federated_variations"),
    "hessian": hessian,
    "phases": phases,
    "tracking": tracking,
}
PARTS: dict[
    str, Callable[[str], str]
] = {  # before a dash and the name of a part: a recipe, a page, a section, ...
    "accuracy-study": accuracy_study,
    "task": task,
    "features": features,
    "published": published,
    "methods": methods,
    "method-speed": method_speed,
    "federated-accuracy": federated_accuracy,
    "federated-cost": federated,
    "plan-70b": plan_70b,
    "assurance": assurance,
    "dp-ngd": dp_ngd,
    "figures": figures,
    "grid": grid,
}


def table(name: str) -> str:
    """A table by its name, or a part of one.

    Raises:
        KeyError: there is none.
    """
    for known, made in PARTS.items():
        if name.startswith(f"{known}-"):
            return made(name.removeprefix(f"{known}-"))
    return TABLES[name]()


def filled(text: str) -> str:
    """The text with every marked table written anew.

    Raises:
        KeyError: a marker names a table that does not exist.
    """
    return MARKED.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if a document is out of date; write nothing"
    )
    arguments = parser.parse_args()
    stale = []
    for path in documents():
        text = path.read_text("utf-8")
        if (new := filled(text)) != text:
            stale.append(path)
            if not arguments.check:
                path.write_text(new, "utf-8")
    for path in stale:
        print(
            f"{path.relative_to(ROOT)}:"
            f" {'out of date, run make results' if arguments.check else 'updated'}"
        )
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
