"""Plant small faults in the source, one at a time, and see which tests notice.

    python benchmarks/mutants.py --record             # the lines that each test reaches
    python benchmarks/mutants.py --number 10          # ten faults a file; results/mutants.json
    python benchmarks/mutants.py --file src/dpkfc/privacy/mechanism.py --list

A fault drops a check that raises, turns a comparison, an operator or a constant, or leaves out a
call. Tests that reach its line run against it in a copy of the checkout: first the tests of `make
test`, cheapest first, then the other recorded tests. `--record` needs pytest-cov (`make test-slow`
installs it). Each run is a fork of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build" / "contexts"
OUTPUT = ROOT / "benchmarks" / "results" / "mutants.json"
# Where a fault can break the privacy promise: names of files by folder of src/dpkfc.
FILES = {
    "privacy": (
        "mechanism chacha20 ledger ledger_lines accounting cross_check dp_accountants events "
        "gaussian_pairs loss_distribution loss_grid loss_masses quick_epsilon calibration rng "
        "budget"
    ),
    "data": "sampling poisson_gaps loading duplicates",
    "gradients": (
        "clip clipped_sum clipped_summer discovery fallback layer_matrices one_pass replica rules "
        "shared_uses state state_check loss_state model_checks optimizer_step value_comparison "
        "value_kinds variables tape"
    ),
    "linalg": (
        "blocks metric sides subspace norms norm_bounds linear_norms eigenbasis_norms tied_norms "
        "lookup_norms row_norms magnitudes"
    ),
    "curvature": (
        "refresh probe_pass refresh_group kfac factor_metric metric_scale probes model_inputs "
        "model_state"
    ),
    "postprocess": "pipeline readout weight_average",
    "": (
        "preconditioning release_pipeline session lazy_noise config step_record loss_check "
        "checkpoint resume_checks weights"
    ),
    "tracking": (
        "tracker batch_rules states elementwise layouts lookups losses products totals trailing"
    ),
    "verification": (
        "accepted_rows batch_comparison check differences row_functions tape_comparison"
    ),
}
TURNED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and"}
PRELOADED = ("torch", "numpy", "scipy.stats", "hypothesis", "dp_accounting", "pytest", "opacus")
PRELOADED += ("torch._dynamo", "torch.distributed.fsdp", "matplotlib.pyplot", "sklearn.datasets")


@dataclass(frozen=True)
class Mutant:
    """One fault: `new` in the place of `old`, which begins at byte `start` of a file.

    Attributes:
        file: below the root.
        line: of the first byte.
        kind: what the fault is.
    """

    file: str
    line: int
    kind: str
    start: int
    old: str
    new: str

    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.file}{self.line}{self.old}{self.new}".encode()).digest()

    def apply(self, source: bytes) -> bytes:
        old = self.old.encode()
        assert source[self.start : self.start + len(old)] == old
        return source[: self.start] + self.new.encode() + source[self.start + len(old) :]


def find_mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Yield every fault that can be planted in a file, in the order of the source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        last = last or first
        begin = starts[first.lineno - 1] + first.col_offset
        return begin, starts[last.end_lineno - 1] + last.end_col_offset

    def fault(kind: str, node: ast.AST, begin: int, end: int, new: str) -> Mutant:
        return Mutant(file, node.lineno, kind, begin, source[begin:end].decode(), new)

    def replace_between(
        kind: str, left: ast.AST, right: ast.AST, old: str, new: str
    ) -> Iterator[Mutant]:
        begin, end = span(left)[1], span(right)[0]
        at = source.find(old.encode(), begin, end)
        if at >= 0:
            yield fault(kind, left, at, at + len(old), new)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.AnnAssign(value=None):
                return
            case ast.If(body=[*_, ast.Raise()]):
                yield fault("check dropped", node, *span(node.test), "False")
            case ast.Expr(value=ast.Call()) | ast.Expr(value=ast.Yield(value=ast.Tuple())):
                kind = "call left out" if isinstance(node.value, ast.Call) else "check dropped"
                yield fault(kind, node, *span(node), "pass")
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in TURNED:
                old = " ".join(ast.unparse(node).split())
                sign = old[len(ast.unparse(left)) : -len(ast.unparse(right))].strip()
                yield from replace_between("comparison", left, right, sign, TURNED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                if not any(
                    isinstance(x, ast.Constant | ast.JoinedStr)
                    and not isinstance(getattr(x, "value", ""), int | float)
                    for x in (left, right)
                ):
                    sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(op)]
                    yield from replace_between("operator", left, right, sign, OPERATORS[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                sign = "and" if isinstance(op, ast.And) else "or"
                yield from replace_between("operator", left, right, sign, OPERATORS[type(op)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                begin, end = span(node)[0], span(operand)[0]
                new = source[begin + len("not") : end].decode().strip()
                yield fault("operator", node, begin, end, new)
            case ast.Constant(value=bool(value)):
                yield fault("constant", node, *span(node), str(not value))
            case ast.Constant(value=int() | float() as value):
                larger = value + 1 if isinstance(value, int) else 2 * value or 1.0
                yield fault("constant", node, *span(node), repr(larger))
        for name, child in ast.iter_fields(node):
            if name not in {"annotation", "returns", "decorator_list", "type_params"}:
                for inner in child if isinstance(child, list) else [child]:
                    if isinstance(inner, ast.AST):
                        yield from visit(inner)

    yield from visit(ast.parse(source))


def choose(mutants: Iterable[Mutant], number: int, lines: Mapping[int, object]) -> list[Mutant]:
    """Return a sample that is the same each time: kinds in turn, of lines that a test reaches."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        if mutant.line in lines:
            kinds[mutant.kind].append(mutant)
    for found in kinds.values():
        found.sort(key=Mutant.digest)
    chosen: list[Mutant] = []
    while len(chosen) < number and any(kinds.values()):
        chosen += [found.pop() for _, found in sorted(kinds.items()) if found]
    return sorted(chosen[:number], key=lambda x: (x.file, x.start))


@dataclass
class Record:
    """Which tests reach a line, from files of coverage with a context a test."""

    lines: dict[str, dict[int, list[str]]]

    @cached_property
    def widths(self) -> Counter[str]:
        """How many lines each test reaches: what it costs, roughly."""
        return Counter(
            test for found in self.lines.values() for tests in found.values() for test in tests
        )

    @classmethod
    def read(cls, folder: Path) -> Record:
        lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted(folder.glob("*.data*")):
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as data:
                rows = data.execute(
                    "select file.path, context.context, numbits from line_bits"
                    " join file on file.id = file_id join context on context.id = context_id"
                )
                for name, context, bits in rows:
                    if context.endswith("|run"):
                        file = name[name.rindex("/src/dpkfc/") + 1 :]
                        for byte, eight in enumerate(bits):
                            for bit in range(8):
                                if eight >> bit & 1:
                                    lines[file][byte * 8 + bit].append(context[: -len("|run")])
        return cls({file: dict(found) for file, found in lines.items()})


def record(folder: Path, tests: Sequence[str]) -> None:
    """Run tests and write which lines each reaches."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "settings"
    settings.write_text("[run]\nbranch = false\nsource = src/dpkfc\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not bench"]
    command += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", *tests]
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "all.data"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def quick_tests(root: Path) -> set[str]:
    """Return the names of the tests that `make test` runs."""
    words = ["-m", "pytest", "-q", "--collect-only", "-m", "not slow and not bench"]
    done = subprocess.run(
        [sys.executable, *words], cwd=root, capture_output=True, text=True, check=True
    )
    return {line for line in done.stdout.splitlines() if "::" in line}


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests in a fork until one fails; return its name, "" if all pass or "timeout"."""
    report = tree / "failed"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        sys.path[:0] = [str(tree / name) for name in ("src", "papers", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
        pytest = import_module("pytest")

        class FirstFailure:
            def pytest_runtest_logreport(self, report: object) -> None:
                if report.failed:
                    (tree / "failed").write_text(report.nodeid, "utf-8")

        words = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--rootdir={tree}",
            *tests,
        ]
        code = pytest.main(words, plugins=[FirstFailure()])
        if code and not report.exists():
            report.write_text(f"not collected ({int(code)})", "utf-8")
        os._exit(0)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if report.exists():
                return report.read_text("utf-8")
            return "" if status == 0 else f"died ({status})"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def copy_tree(folder: Path) -> Path:
    """Return a copy of what tests need."""
    skip = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs", ".*_cache")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=skip, symlinks=True)
    return tree


def judge(
    mutant: Mutant, tree: Path, found: Record, quick: set[str], most: int, seconds: float
) -> dict[str, object]:
    """Plant a fault, and return who notices it."""
    path = tree / mutant.file
    sound = path.read_bytes()
    # A call that spans lines belongs to the lines of its words.
    reaching = {
        test
        for line in range(mutant.line, mutant.line + 1 + mutant.old.count("\n"))
        for test in found.lines[mutant.file].get(line, ())
    }
    ordered = sorted(reaching, key=lambda test: (found.widths[test], test))
    row: dict[str, object] = asdict(mutant) | {"reached_by": len(reaching)}
    path.write_bytes(mutant.apply(sound))
    try:
        for name, tests in (
            ("quick", [test for test in ordered if test in quick]),
            ("other", [test for test in ordered if test not in quick]),
        ):
            # A few in the middle and the longest: the cheapest alone may all be alike.
            spread = tests[: most // 2] + tests[most // 2 :: max(1, len(tests) // (most // 2))]
            by = run_tests(tree, list(dict.fromkeys(spread)), seconds) if tests else ""
            if by:
                return row | {"caught": name, "by": by}
        return row | {"caught": "", "by": ""}
    finally:
        path.write_bytes(sound)


def files_of_the_promise() -> Iterator[str]:
    """Yield the files of `FILES`, below the root."""
    for folder, names in FILES.items():
        for name in names.split():
            yield str(Path("src/dpkfc", folder, f"{name}.py"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="see which lines each test reaches")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what --record runs")
    parser.add_argument("--contexts", type=Path, default=RECORD)
    parser.add_argument("--file", action="append", help="instead of the files of the promise")
    parser.add_argument("--number", type=int, default=10, help="of faults in each file")
    parser.add_argument("--most", type=int, default=200, help="tests against each fault")
    parser.add_argument("--seconds", type=float, default=240, help="until a run counts as stuck")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(argv)
    if arguments.record:
        record(arguments.contexts, arguments.tests)
        return 0
    found = Record.read(arguments.contexts)
    chosen = []
    for file in arguments.file or files_of_the_promise():
        mutants = find_mutants(file, (ROOT / file).read_bytes())
        chosen += choose(mutants, arguments.number, found.lines.get(file, {}))
    if arguments.list:
        for x in chosen:
            print(f"{x.file}:{x.line}: {x.kind}: {' '.join(x.old.split())} -> {x.new}")
        return 0
    for name in PRELOADED:
        try:
            import_module(name)
        except ImportError:
            continue
    return plant(chosen, found, arguments)


def plant(chosen: Sequence[Mutant], found: Record, arguments: argparse.Namespace) -> int:
    """Judge every fault, and write the results after each."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from common import stamp, write_json

    quick, rows = quick_tests(ROOT), []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for mutant in chosen:
            row = judge(mutant, tree, found, quick, arguments.most, arguments.seconds)
            rows.append(row)
            print(
                f"{row['caught'] or 'SURVIVED'}: {mutant.file}:{mutant.line}: {mutant.kind}: "
                f"{mutant.old!r} -> {mutant.new!r} {row['by']}",
                flush=True,
            )
            totals = Counter(str(row["caught"] or "survived") for row in rows)
            results = stamp(1) | {"totals": totals, "mutants": rows}
            write_json(arguments.output, results)
    print(dict(totals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
