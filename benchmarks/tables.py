"""Write the measured tables into the documents, between their markers, from
benchmarks/results/*.json and, for tables of studies, papers/results/*.json.

    python benchmarks/tables.py            # README.md and docs/*.md
    python benchmarks/tables.py --check    # change nothing; fail if a table is out of date

A marker is `<!-- table: NAME -->` and ends at `<!-- end of table -->`; what stands between is never
edited by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, machine, make_parser, markdown, read_json
from dpkfc_papers.studies import pages
from dpkfc_papers.studies.pages import name_missing

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


def speed_summary() -> str:
    """Milliseconds and extra memory of the four contenders a reader asks for first, and where that
    was measured.
    """
    results = read_json(RESULTS / "speed.json")
    if not results:
        return name_missing("make bench")
    # others are in docs/speed.md
    timed = {name: entry for name, entry in results["models"].items() if entry["contenders"]}
    rows = []
    for entry in timed.values():
        times, memory = entry["contenders"], entry.get("memory", {})
        cells = [_cell(times.get(name, {}), memory.get(name, {})) for name in SUMMARY]
        rows.append(
            [f"{entry['title']} (batch {entry['batch_size']})", *cells, _compare_with_hooks(entry)]
        )
    head = [
        "milliseconds a step / extra MiB (during steps; including refreshes)",
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


def _compare_with_hooks(entry: Mapping[str, Any]) -> str:
    import speed_tables

    found = (
        (name, speed_tables.find_ratio(entry, name, "opacus_hooks")) for name in speed_tables.OURS
    )
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
        else name_missing("make bench")
    )


def method_speed(page: str = "") -> str:
    """A step of each method over the step it is built on: all, or the methods of one page of
    docs/methods.
    """
    import method_speed as study

    results = read_json(RESULTS / "method_speed.json")
    if not results:
        return name_missing("python benchmarks/method_speed.py")
    return (
        study.table(results, [name for name in study.PAIRS if name.lower().startswith(page)])
        + "\n\n"
        + machine(results)
    )


def federated(part: str) -> str:
    """What federated rounds cost: the server's step, whole runs in one process, Flower's
    simulation.
    """
    import federated as benchmark

    results = read_json(RESULTS / "federated.json")
    if part not in results:
        return name_missing("python benchmarks/federated.py")
    return benchmark.table({part: results[part]}) + "\n\n" + machine(results[part])


def plan_70b(part: str = "") -> str:
    """The paper-and-pencil plan, or (`check`) how its formulas do on what was measured."""
    import plan_70b as paper

    if not part:
        return paper.plan_table()
    models = read_json(RESULTS / "speed.json").get("models", {})
    of = {name: models[name] for name in paper.MEASURED if name in models}
    return paper.check_table() + "\n\n" + machine({"models": of}, memory=False)


def plan_records() -> str:
    """Return the plan for a billion records, from slopes of growth.json."""
    import plan_records as paper

    results = read_json(RESULTS / "growth.json")
    return paper.plan_table(results) + "\n\n" + machine(results, memory=False)


def assurance(section: str = "summary") -> str:
    """The verdicts of the last full run of the checks, or the figures of one section."""
    import assurance as checks

    results = read_json(RESULTS / "assurance.json")
    if not results:
        return name_missing("make assurance")
    if section != "summary":
        return checks.evidence_table(
            results, next(name for name in checks.SECTIONS if name.replace(" ", "-") == section)
        )
    return checks.summary_table(results) + "\n\n" + machine(results, commit=False)


def public_tables(part: str) -> str:
    """Scores on seven public tables, of this library and of others."""
    import tables_page

    return tables_page.table(part)


def fill_table(name: str, file: str = "", command: str = "") -> str:
    """The table of a benchmark with one file of results, and where it was measured."""
    results = read_json(RESULTS / f"{file or name}.json")
    if not results:
        return name_missing(command or f"python benchmarks/{name}.py")
    parts = {key: x for key, x in results.items() if isinstance(x, dict) and "hardware" in x}
    where = machine({"models": parts} if parts else results)
    return import_module(name).table(results) + "\n\n" + where


def correlated_steps() -> str:
    """Return the cost of a step with correlated noise, and where it was measured."""
    import correlated_noise

    results = read_json(RESULTS / "correlated_noise.json")
    last = results["steps"][-1]
    return correlated_noise.steps_table(results) + "\n\n" + machine(last, commit=False)


TABLES: dict[str, Callable[[], str]] = {
    **pages.TABLES,
    "speed-summary": speed_summary,
    "speed": speed,
    "method-speed": method_speed,
    "scale": partial(fill_table, "scale", command="make bench-scale"),
    "ranks": partial(fill_table, "scale_ranks", "ranks"),
    "opacus-script": partial(fill_table, "opacus_script"),
    "speed-peers": partial(fill_table, "speed_peers"),
    "correlated-noise": partial(fill_table, "correlated_noise"),
    "correlated-steps": correlated_steps,
    "growth": partial(fill_table, "growth"),
    "audit": partial(fill_table, "audit_page", "audit", "python benchmarks/audit.py"),
    "startup": partial(fill_table, "startup"),
    "plan-70b": plan_70b,
    "plan-records": plan_records,
    "assurance": assurance,
}
# Before a dash and the name of a part: a recipe, a page, a section, ...
PARTS: dict[str, Callable[[str], str]] = {
    **pages.PARTS,
    "method-speed": method_speed,
    "federated-cost": federated,
    "plan-70b": plan_70b,
    "assurance": assurance,
    "tables": public_tables,
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


def fill_tables(text: str) -> str:
    """The text with every marked table written anew.

    Raises:
        KeyError: a marker names a table that does not exist.
    """
    return MARKED.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if a document is out of date; write nothing"
    )
    arguments = parser.parse_args()
    stale = []
    for path in documents():
        text = path.read_text("utf-8")
        if (new := fill_tables(text)) != text:
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
