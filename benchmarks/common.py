"""What a benchmark needs besides its subject: medians, ratios and memory watermarks; the
description of the machine and the tables come from the studies.
"""

from __future__ import annotations

import platform
import re
import resource
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import (  # noqa: F401
    hardware,
    load_average,
    machine,
    make_parser,
    markdown,
    now,
    read_json,
    stamp,
    write_json,
)

RESULTS = Path(__file__).resolve().parent / "results"


def models_parser(description: str | None) -> ArgumentParser:
    """Return the options of a benchmark that measures models one by one."""
    parser = make_parser(description)
    parser.add_argument("--only", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, nothing written")
    return parser


def measure_models(
    options: Namespace,
    default: Sequence[str],
    output: Path,
    measure: Callable[[str, Any, Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    part: str = "models",
) -> int:
    """Measure models one by one, write each as soon as it is there, and print the table.

    Args:
        options: of `models_parser`; a smoke run has two rounds.
        default: the models of a command line without `--only`; a smoke run takes `smoke-cnn`.
        output: the file of results; a smoke run writes none.
        measure: maps name, case and options to figures of a model.
        table: of the results.
        part: of the results.
    """
    import torch

    from models import cases

    torch.set_num_threads(options.threads)
    options.rounds = 2 if options.smoke else options.rounds
    results: dict[str, Any] = {"models": {}} | ({} if options.smoke else read_json(output))
    known = cases(smoke=options.smoke)
    chosen = options.only or (["smoke-cnn"] if options.smoke else default)
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    for name in chosen:
        case, before = known[name], stamp(options.threads)
        print(f"{name}: {case.title}", file=sys.stderr, flush=True)
        found = measure(name, case, options)
        entry = {"title": case.title, "batch_size": case.batch_size} | before
        results.setdefault(part, {})[name] = entry | found
        results |= before
        if not options.smoke:
            write_json(output, results)
    print(table(results), machine(results), sep="\n\n")
    return 0


def measure_once(
    description: str,
    argv: Sequence[str] | None,
    output: Path,
    measure: Callable[[Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    threads: int = 2,
) -> int:
    """Measure what has one file of results, write it with machine and day, and print its table.

    Args:
        description: of the command.
        argv: the command line.
        output: the file; a smoke run writes only to `--output`.
        measure: maps options to figures.
        table: of the results.
        threads: of torch.
    """
    parser = make_parser(description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--smoke", action="store_true", help="small; writes only to --output")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    parser.add_argument("--output", type=Path, help=f"results file (default: {output.name})")
    options = parser.parse_args(argv)
    path = options.output or output
    if options.table:
        results = read_json(path)
        print(table(results) if results else f"nothing measured yet: {path.name} does not exist")
        return 0
    import torch

    torch.set_num_threads(options.threads)
    results = stamp(options.threads, options.device) | measure(options)
    if options.output or not options.smoke:
        write_json(path, results)
    print(table(results))
    return 0


def processor_seconds(words: Sequence[str], folder: str) -> float:
    """Return what an interpreter spends, to which other work on the machine adds little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile; of one value the value."""
    low, _, high = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=4)
    return low, high


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, smallest and number of timings, in milliseconds."""
    ms = sorted(1e3 * s for s in seconds)
    low, high = _quartiles(ms)
    values = {
        "median_ms": statistics.median(ms),
        "quartile_low_ms": low,
        "quartile_high_ms": high,
        "min_ms": ms[0],
    }
    return {name: round(value, 3) for name, value in values.items()} | {"steps": len(ms)}


def compare_pairs(top: Sequence[float], bottom: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles over rounds of the ratio within a round: what a drift of the machine
    cannot move.
    """
    ratios = sorted(a / b for a, b in zip(top, bottom, strict=True))
    low, high = _quartiles(ratios)
    # of few rounds they are extrapolated
    quartiles = [
        round(max(low, ratios[0]), 4),
        round(min(high, ratios[-1]), 4),
    ]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": quartiles,
        "rounds": len(ratios),
    }


def judged(
    ratio: float,
    goal: float | None = None,
    spread: Sequence[float] | None = None,
    *,
    least: bool = False,
) -> str:
    """A ratio, its spread, its goal and whether it is met: `1.04 [1.01, 1.08] (≤ 1.05 ✓)`.

    Where two digits do not tell it from the goal it has a third.

    Args:
        ratio: what was measured.
        goal: what it may be at most, None for no goal.
        spread: its quartiles, None where there are none.
        least: the goal is what it has to be at least.
    """
    digits = 3 if goal is not None and abs(ratio - goal) < 0.01 else 2
    text = f"{ratio:.{digits}f}"
    if spread is not None:
        text += f" [{spread[0]:.2f}, {spread[1]:.2f}]"
    if goal is None:
        return text
    met = ratio >= goal if least else ratio <= goal
    return f"{text} ({'≥' if least else '≤'} {goal:g} {'✓' if met else '✗'})"


class MemoryWatch:
    """Resident memory of this process above what it was when the watch began, in MiB.

    On Linux the kernel keeps the high-water mark and lets a process reset its own; elsewhere the
    mark of the whole process is used, which can only be too high.
    """

    def __init__(self) -> None:
        import psutil

        self.start = psutil.Process().memory_info().rss
        self.resets = self.reset()

    def reset(self) -> bool:
        """Forget the peak so far; False where the system cannot."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def peak(self) -> float:
        """Highest resident memory since the last reset, above the start."""
        status = Path("/proc/self/status")
        if self.resets and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
            peak = int(found.group(1)) * 1024
        else:
            unit = 1 if platform.system() == "Darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return round((peak - self.start) / 2**20, 1)


class CardWatch:
    """Memory that torch has allocated on a card above what it was when the watch began, in MiB."""

    def __init__(self) -> None:
        import torch

        self._of = torch.cuda
        self.start = self._of.memory_allocated()
        self.reset()

    def reset(self) -> bool:
        """Forget the peak so far."""
        self._of.reset_peak_memory_stats()
        return True

    def peak(self) -> float:
        """Highest allocated memory since the last reset, above the start."""
        return round((self._of.max_memory_allocated() - self.start) / 2**20, 1)
