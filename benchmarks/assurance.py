"""Run every check of docs/assurance.md at full size, and write results/assurance.json.

python benchmarks/assurance.py                 # `make assurance`: 45 minutes on two cores
python benchmarks/assurance.py --only leaks    # one section; the others keep their figures
python benchmarks/assurance.py --table leaks   # the Markdown table of a section
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, make_parser, markdown, now, read_json, stamp, write_json

OUTPUT = RESULTS / "assurance.json"
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dpkfc"
# Section to the tests that leave its evidence.
SECTIONS: dict[str, tuple[str, ...]] = {
    "leaks": ("tests/injected_bugs",),
    "audit": (
        "tests/audit/test_audit_step.py",
        "tests/audit/test_replay.py",
        "tests/audit/test_noise_law.py",
        "tests/audit/test_two_worlds.py",
    ),
    "one-run": ("tests/audit/test_bounds.py", "tests/audit/test_one_run.py"),
    "membership": ("tests/audit/test_membership.py",),
    "accounting": (
        "tests/audit/test_accounting_grid.py",
        "tests/audit/test_accounting_integration.py",
    ),
    "samplers": ("tests/audit/test_samplers.py",),
    "noise": ("tests/audit/test_noise_streams.py", "tests/audit/test_rounded_noise.py"),
    "floating point": (
        "tests/audit/test_floating_point.py",
        "tests/gradients/test_neighbouring_sums.py",
    ),
    "crash": ("tests/audit/test_crash.py",),
    "fuzz": ("tests/audit",),
    "side doors": ("tests/audit/test_side_doors.py",),
    "verifier": ("tests/verifier",),
}
# What each section is about, and how it is shown: the first three columns of the table.
PROMISES: dict[str, tuple[str, str]] = {
    "leaks": ("a faulty build is noticed", "faults are planted"),
    "audit": ("one example moves a release by C at most", "neighbours replayed, two worlds"),
    "one-run": ("ε is not below what canaries show", "a lower bound from one run"),
    "membership": ("no attack finds more members than ε allows", "attacks on trained models"),
    "accounting": ("ε bounds the loss of its event", "an integral, a grid of settings"),
    "samplers": ("batches have the law of the event", "statistical tests of draws"),
    "noise": ("noise has its scale and never repeats", "statistical tests of draws"),
    "floating point": ("rounding moves no norm below its value", "brute force in float64"),
    "crash": ("a crash never counts too few releases", "processes killed at each step"),
    "fuzz": ("damaged files are refused", "random damage"),
    "side doors": ("no gradient leaves without noise", "each way out is tried"),
    "verifier": ("a stranger finds what was forged", "good and forged folders"),
}
# The step from a batch to the weights.
STEP = ("config.py", "session.py", "preconditioning.py", "release_pipeline.py")
STEP += ("step_record.py", "shared_ledger.py", "loss_check.py", "verification")
STEP += ("public_rows", "lazy_noise.py", "weights.py")
STEP += ("tracking", "rng_state.py", "distributed", "gradients", "graph", "linalg", "curvature")
STEP += ("postprocess", "privacy", "data")
RUN = tuple(f"app/{name}.py" for name in ("train", "processes", "metrics", "run_folder"))
# Section to the files and folders of src/dpkfc that its verdict is about. When code of one of them
# has changed since the section ran, its row of the table says so.
COVERED: dict[str, tuple[str, ...]] = {
    "leaks": (*STEP, "audit"),
    "audit": (*STEP, "audit"),
    "one-run": (*STEP, "audit"),
    "membership": (*STEP, "audit"),
    "accounting": ("config.py", "data/sampling.py", "privacy"),
    "samplers": ("config.py", "data", "privacy", "distributed", "audit"),
    "noise": (
        "config.py",
        "session.py",
        "lazy_noise.py",
        "release_pipeline.py",
        "rng_state.py",
        "privacy",
    ),
    "floating point": ("gradients", "linalg", "curvature", "privacy"),
    "crash": (*STEP, "checkpoint.py", "disk_sync.py", "resume_checks.py", *RUN),
    "fuzz": (*STEP, "checkpoint.py", "resume_checks.py", "cli.py", "report", "app"),
    "side doors": (*STEP, "checkpoint.py", "callbacks.py", "early_stopping.py", *RUN),
    "verifier": (
        "report",
        "privacy/ledger.py",
        "privacy/ledger_lines.py",
        "weights_record.py",
        "../../verifier/dpkfc_verify",
    ),
}
_LONG = 24  # rows of a folded table


def tests_of(section: str) -> list[str]:
    """Return the existing test files of a section; fuzzing has one for each kind of file."""
    if section == "fuzz":
        paths = (ROOT / "tests/audit").glob("test_fuzz*.py")
        return sorted(str(path.relative_to(ROOT)) for path in paths)
    return [name for name in SECTIONS[section] if (ROOT / name).exists()]


def run_section(section: str, workers: int) -> dict[str, Any]:
    """Run the tests of a section at full size, and return verdict, time and evidence."""
    source = source_digest(section)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "DPKFC_ASSURANCE": "1",
            "DPKFC_EVIDENCE": folder,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-n", str(workers), *tests_of(section)]
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
        paths = sorted(Path(folder).rglob("*.json"))
        rows = [json.loads(path.read_text("utf-8")) for path in paths]
    last = (done.stdout.strip().splitlines() or ["nothing ran"])[-1]
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
    return {
        "passed": done.returncode == 0,
        "summary": last.strip("= "),
        "seconds": round(seconds, 1),
        "date": now(),
        "commit": commit(),
        "source": source,
        "rows": rows,
    }


def code_of(text: str) -> str:
    """Return Python source without comments, docstrings and blank lines: a better word in one of
    them voids no evidence.
    """
    lines = text.splitlines()
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, described) and ast.get_docstring(node, clean=False) is not None:
            place = node.body[0]
            for number in range(place.lineno - 1, place.end_lineno or place.lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def covered_files(section: str, source: Path = SOURCE) -> list[Path]:
    """Return the source files that a section's verdict is about."""
    places = [source / name for name in COVERED[section]]
    files = {
        file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])
    }
    return sorted(files)


def source_digest(section: str, source: Path = SOURCE) -> str:
    """Return the SHA-256 of the code that a section's verdict is about, with the files' names."""
    digest = hashlib.sha256()
    for file in covered_files(section, source):
        code = code_of(file.read_text("utf-8"))
        name = Path(os.path.relpath(file, source)).as_posix()
        digest.update(f"{name}\n{code}\n".encode())
    return digest.hexdigest()


def commit() -> str:
    """Return the commit that is checked, with a "+" if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    mark = "+" if git("status", "--porcelain", "src", "tests") else ""
    return git("rev-parse", "--short", "HEAD") + mark


def summary_table(results: Mapping[str, Any]) -> str:
    """Return one row a section: verdict, whether its source has changed, tests, time, commit."""
    rows = []
    for name, section in results["sections"].items():
        verdict = "held" if section["passed"] else "**FAILED**"
        seconds, date = f"{section['seconds']:,.0f} s", section["date"][:10]
        is_current = section.get("source") == source_digest(name)
        state = "as tested" if is_current else "**changed since**"
        promise, how = PROMISES[name]
        tests = section["summary"].partition(" in ")[0]
        row = [promise, how, f"`--only {name!r}`".replace("'", '"'), verdict, state, tests]
        rows.append([*row, seconds, date, section["commit"]])
    titles = ["promise", "how", "section", "verdict", "source", "tests", "time", "date", "commit"]
    return markdown(titles, rows)


def evidence_table(results: Mapping[str, Any], section: str) -> str:
    """Return all rows of a section: rows with the same figures make one table.

    A long table is folded unless it is the first of the section.
    """
    rows = results["sections"].get(section, {}).get("rows", [])
    if not rows:
        return "*No figures in the last run.*"
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        keys = [key for key in row if key not in ("section", "row") and row[key] not in ([], "")]
        groups.setdefault(tuple(keys), []).append(row)
    tables: list[str] = []
    for figures, group in groups.items():
        table = _group_table(figures, group)
        if len(group) > _LONG and tables:
            summary = f"<summary>{len(group)} rows</summary>"
            table = f"<details>{summary}\n\n{table}\n\n</details>"
        tables.append(table)
    return "\n\n".join(tables)


def _group_table(figures: Sequence[str], group: Sequence[Mapping[str, Any]]) -> str:
    """Return one table of rows that have the same figures.

    A long table of one figure gets a column for each variant, the last part of a row's name, where
    all names have one.
    """
    titles = [figure.replace("_", " ") for figure in figures]
    if not figures:
        return "Checked without figures: " + ", ".join(row["row"] for row in group) + "."
    has_variants = all(", " in row["row"] for row in group)
    if len(figures) > 1 or len(group) <= _LONG or not has_variants:
        cells = [[row["row"], *(_format(row.get(key)) for key in figures)] for row in group]
        return markdown(["", *titles], cells)
    lines: dict[str, dict[str, str]] = {}
    for row in group:
        name, _, variant = row["row"].rpartition(", ")
        lines.setdefault(name, {})[variant] = _format(row[figures[0]])
    variants = sorted({variant for line in lines.values() for variant in line})
    cells = [[name, *(line.get(each, "–") for each in variants)] for name, line in lines.items()]
    return markdown([titles[0], *variants], cells)


def _format(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(_format(item) for item in value)
        case dict():
            return ", ".join(f"{key} {_format(item)}" for key, item in value.items())
    return str(value).replace("|", "¦")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="a section; may be given several times"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--table",
        choices=["summary", *SECTIONS],
        help="print a table of the last run and run nothing",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = read_json(arguments.output) or {"sections": {}}
    if arguments.table:
        if arguments.table == "summary":
            print(summary_table(results))
        else:
            print(evidence_table(results, arguments.table))
        return 0
    failed = []
    for section in arguments.only or list(SECTIONS):
        print(f"{section} …", file=sys.stderr, flush=True)
        result = run_section(section, arguments.workers)
        results["sections"][section] = result
        results |= stamp(1)
        write_json(arguments.output, results)
        print(f"{section}: {result['summary']}", file=sys.stderr, flush=True)
        if not result["passed"]:
            failed.append(section)
    print(summary_table(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
