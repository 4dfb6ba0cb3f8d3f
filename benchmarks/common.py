"""What a benchmark needs besides its subject: the machine, medians, memory watermarks, tables."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def hardware(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine a measurement was made on."""
    import numpy
    import torch

    card = (
        {}
        if device == "cpu"
        else {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    )
    return {
        **card,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "numpy": numpy.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """What is checked out, with a + where files differ from it; None without git."""
    try:
        here = {
            "cwd": Path(__file__).parent,
            "capture_output": True,
            "text": True,
            "timeout": 30,
            "check": True,
        }
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **here).stdout.strip()  # noqa: S607
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "../src", ":(glob)*.py"], **here
        ).stdout.strip()  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+" if changed else "")


def _cpu_model() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def load_average() -> float | None:
    """Mean number of running processes of the last minute; above the threads of the benchmark the
    machine is shared.
    """
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


# Parts of a results file whose rows were measured by themselves, and what the name of such a row
# ends in.
PARTS = {
    "models": "",
    "axes": "",
    "kept": " with freed memory kept",
    "card": " on a card",
    "views": " with views",
    "views on a card": " with views on a card",
}


# load beyond the cores that the part of a benchmark that ran just before may leave by itself
_OWN = 0.25


def machine(results: Mapping[str, Any], *, memory: bool = True, commit: bool = True) -> str:
    """Where a table was measured: processor, threads, torch, day, commit and load; of several such
    sets, with their rows.

    Args:
        results: with entries in some of `PARTS`, each with its own machine and date, or one of both
            for everything.
        memory: whether the table has memory, which may have been taken at another time than times.
        commit: whether it is named here; not where the rows do that.
    """
    rows: dict[str, list[str]] = {}
    loads: dict[str, float] = {}

    def add(
        title: str, found: Mapping[str, Any], date: str | None, load: float | None = None
    ) -> None:
        where = _described(found, date, commit)
        rows.setdefault(where, []).append(title)
        if (load or 0.0) > max(found.get("threads", math.inf), found.get("cores", 0)) + _OWN:
            loads[where] = max(loads.get(where, 0.0), load or 0.0)

    last = results.get("hardware", {})
    for part, suffix in PARTS.items():
        for name, entry in results.get(part, {}).items():
            title = entry.get("title", name).partition(" (")[0] + suffix
            if entry.get("contenders") != {}:
                # the last run is not the one of this row
                own = entry.get("hardware", {**last, "commit": None})
                add(title, own, entry.get("date", results.get("date")), entry.get("load_before"))
            if memory and entry.get("memory"):
                taken = entry.get("memory_taken", {})
                add(f"memory of {title}", taken.get("hardware", {}), taken.get("date"))
    if not rows:
        add("", last, results.get("date"))
    shared = {
        where: f", shared with other work: load average up to {load:.1f}"
        for where, load in loads.items()
    }
    sets = [
        where + shared.get(where, "") + f": {'; '.join(_short(of))}" * (len(rows) > 1)
        for where, of in rows.items()
    ]
    return "*" + ". ".join(sets) + ".*"


def machine_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the rows of a study were measured, each machine with its last day and commit."""
    days: dict[str, str] = {}
    machines: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        name = _described(row["hardware"], None, False)
        machines[name] = row["hardware"]
        days[name] = row["date"]
    order = sorted(days, key=lambda name: days[name])
    return "*" + "; ".join(_described(machines[name], days[name], True) for name in order) + ".*"


def _short(titles: Sequence[str]) -> list[str]:
    """Without those whose memory and times are of one set."""
    return [
        title
        for title in titles
        if not (title.startswith("memory of ") and title.removeprefix("memory of ") in titles)
    ]


def _described(found: Mapping[str, Any], date: str | None, commit: bool) -> str:
    threads = found.get("threads", found.get("threads_a_run"))
    parts = [
        found.get("card"),
        found.get("cpu", "processor not recorded"),
        found.get("torch_cpu_capability"),
    ]
    parts += [
        threads and f"{threads} thread{'s' * (threads > 1)}",
        f"torch {found['torch']}" if "torch" in found else None,
    ]
    parts += [date[:10] if date else "date not recorded"]
    parts += [f"commit {found.get('commit') or 'not recorded'}"] if commit else []
    return ", ".join(part for part in parts if part)


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, smallest and number of timings, in milliseconds."""
    ms = sorted(1e3 * s for s in seconds)
    low, _, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms[0], ms[0], ms[0])
    values = {
        "median_ms": statistics.median(ms),
        "quartile_low_ms": low,
        "quartile_high_ms": high,
        "min_ms": ms[0],
    }
    return {name: round(value, 3) for name, value in values.items()} | {"steps": len(ms)}


def paired(top: Sequence[float], bottom: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles over rounds of the ratio within a round: what a drift of the machine
    cannot move.
    """
    ratios = sorted(a / b for a, b in zip(top, bottom, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
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
    rough: bool = False,
    least: bool = False,
) -> str:
    """A ratio, its spread, its goal and whether it is met: `1.04 [1.01, 1.08] (≤ 1.05 ✓)`.

    Where two digits do not tell it from the goal it has a third.

    Args:
        ratio: what was measured.
        goal: what it may be at most, None for no goal.
        spread: its quartiles, None where there are none.
        rough: the spread is wider than quartiles are, and marked with °.
        least: the goal is what it has to be at least.
    """
    digits = 3 if goal is not None and abs(ratio - goal) < 0.01 else 2
    text = f"{ratio:.{digits}f}"
    if spread is not None:
        text += f" [{spread[0]:.2f}, {spread[1]:.2f}]" + "°" * rough
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
            import resource

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


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t over the seeds."""
    from scipy.stats import t

    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * spread


def interval(values: Sequence[float]) -> str:
    """A mean and its 95 % interval, on one line; of one value no interval, of none a dash."""
    if not values:
        return "–"
    half = f"\u00a0±\u00a0{half_interval(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{half}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def figures_parser(description: str | None, output: Path) -> argparse.ArgumentParser:
    """The options of a benchmark that measures once and writes one file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default="", help="folder with the data sets; default: $DPKFC_DATA"
    )
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    return parser


def figures(
    given: argparse.Namespace, measure: Callable[[str], Any], table: Callable[[dict[str, Any]], str]
) -> int:
    """Measure and write unless only the table is asked for; print it."""
    if not given.table:
        write_json(given.output, measure(given.data_dir))
    print(table(read_json(given.output)))
    return 0


def cells_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark whose measurements are cells of a study."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default="", help="folder with the data sets; default: $DPKFC_DATA"
    )
    parser.add_argument("--out", type=Path, help="ledgers; default: a folder below runs/")
    parser.add_argument(
        "--results", type=Path, help="file of the results; default: below benchmarks/results/"
    )
    parser.add_argument("--workers", type=int, help="cells at once; default: every core")
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    return parser


def run_cells(
    stages: Sequence[Callable[[Any], Any]], results: Path, out: Path, given: argparse.Namespace
) -> int:
    """Run the cells that a store lacks, stage by stage; 130 where it was interrupted, which loses
    no finished one.

    Args:
        stages: each makes names and runs from the store.
        results: the store.
        out: ledgers.
        given: of `cells_parser`.
    """
    from dpkfc.app.tuning.runs import Listed, Place, Store, Task, drive, worker_count

    try:
        with Store(results) as store:
            for cells in stages:
                source = Listed(
                    [Task(run, tag=None, label=name) for name, run in cells(store)], store
                )
                drive(source, Place(out, given.data_dir), workers=worker_count(given.workers))
                for name, why in source.failures.items():
                    print(f"{name}: {why}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command continues it", file=sys.stderr)
        return 130
    return 0
