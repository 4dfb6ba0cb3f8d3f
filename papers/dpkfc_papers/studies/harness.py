"""What studies share: the machine, intervals, tables, options of a command line, and pictures."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "papers" / "results"
IMAGES = ROOT / "docs" / "img"

# --------------------------------------------------------------------------------------------------
# Where and when something was measured.


def hardware(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine a measurement was made on."""
    import numpy
    import torch

    from dpkfc.app.tuning import runs

    card = (
        {}
        if device == "cpu"
        else {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    )
    return {
        **card,
        "cpu": runs.hardware()["cpu"],
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
        here: dict[str, Any] = {
            "cwd": ROOT,
            "capture_output": True,
            "text": True,
            "timeout": 30,
            "check": True,
        }
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **here).stdout.strip()  # noqa: S607
        watched = ["src", ":(glob)papers/**/*.py", ":(glob)benchmarks/*.py"]
        command = ["git", "status", "--porcelain", "--", *watched]
        changed = subprocess.run(command, **here).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return name + ("+" if changed else "")


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
        where = _describe(found, date, commit)
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
    sentences = []
    for where, titles in rows.items():
        sentences.append(where)
        if where in loads:
            sentences.append(f"Other work ran too (load average up to {loads[where]:.1f})")
        if len(rows) > 1:
            sentences.append(f"Rows: {'; '.join(_short(titles))}")
    return "*" + ". ".join(sentences) + ".*"


def machine_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the rows of a study were measured, each machine with its last day and commit."""
    days: dict[str, str] = {}
    machines: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        name = _describe(row["hardware"], None, False)
        machines[name] = row["hardware"]
        days[name] = row["date"]
    order = sorted(days, key=lambda name: days[name])
    return "*" + "; ".join(_describe(machines[name], days[name], True) for name in order) + ".*"


def _short(titles: Sequence[str]) -> list[str]:
    """Without those whose memory and times are of one set."""
    return [
        title
        for title in titles
        if not (title.startswith("memory of ") and title.removeprefix("memory of ") in titles)
    ]


def _describe(found: Mapping[str, Any], date: str | None, commit: bool) -> str:
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


def stamp(threads: int, device: str = "cpu") -> dict[str, Any]:
    """Return the day, the load and the machine of a measurement."""
    return {"date": now(), "load_before": load_average(), "hardware": hardware(threads, device)}


# --------------------------------------------------------------------------------------------------
# Intervals, tables and files.


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t over the seeds."""
    from scipy.stats import t

    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * spread


def compare_means(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and half of its 95 % interval (Welch's t, since three seeds say
    little about a variance).
    """
    from scipy.stats import ttest_ind

    gain = statistics.mean(above) - statistics.mean(below)
    if len(set(above)) == len(set(below)) == 1:
        return gain, 0.0
    low, high = ttest_ind(above, below, equal_var=False).confidence_interval()
    return gain, float(high - low) / 2


def interval(values: Sequence[float]) -> str:
    """A mean and its 95 % interval, on one line; of one value no interval, of none a dash."""
    if not values:
        return "–"
    half = f"\u00a0±\u00a0{half_interval(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{half}"


def seeds_cell(values: Sequence[float]) -> str:
    """A mean with its interval and the number of seeds; a dash without values."""
    return f"{interval(values)} ({len(values)})" if values else "–"


# A cell with a number, perhaps behind a sign, or without one.
_NUMBER = re.compile(r"\W*(\d|$)")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers behind the first are right-aligned."""
    rows = [[re.sub(r"\s*\n\s*", " ", cell) for cell in row] for row in rows]
    marks = ["---"]
    for column in list(zip(*rows, strict=True))[1:]:
        numbers = sum(_NUMBER.match(cell) is not None for cell in column)
        marks.append("--:" if 2 * numbers >= len(column) else "---")
    lines = [header, marks if rows else ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read_toml(path: Path) -> dict[str, Any]:
    from dpkfc.app.toml import tomllib

    return tomllib.loads(path.read_text("utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --------------------------------------------------------------------------------------------------
# Command lines.


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the lines of a description."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def data_parser(description: str | None) -> argparse.ArgumentParser:
    parser = make_parser(description)
    parser.add_argument(
        "--data-dir", default="", help="folder with the data sets; default: $DPKFC_DATA"
    )
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    return parser


def figures_parser(description: str | None, output: Path) -> argparse.ArgumentParser:
    """The options of a benchmark that measures once and writes one file."""
    parser = data_parser(description)
    parser.add_argument("--output", type=Path, default=output)
    return parser


def figures(
    given: argparse.Namespace, measure: Callable[[str], Any], table: Callable[[dict[str, Any]], str]
) -> int:
    """Measure and write unless only the table is asked for; print it."""
    if not given.table:
        import torch

        before = stamp(torch.get_num_threads())
        write_json(given.output, before | measure(given.data_dir))
    print(table(read_json(given.output)))
    return 0


def run_script(
    description: str | None,
    run: Callable[[Path, str], None],
    show: Callable[[], str],
    out: str = "runs/federated/features",
) -> int:
    """Read the command line of a script with a folder, run what is missing, and print the table."""
    parser = data_parser(description)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of ledgers or features")
    arguments = parser.parse_args()
    if not arguments.table:
        run(arguments.out, arguments.data_dir)
    print(show() or "nothing has been run yet")
    return 0


def cells_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark whose measurements are cells of a study."""
    parser = data_parser(description)
    parser.add_argument("--out", type=Path, help="ledgers; default: a folder below runs/")
    parser.add_argument(
        "--results", type=Path, help="file of the results; default: below papers/results/"
    )
    parser.add_argument("--workers", type=int, help="cells at once; default: every core")
    return parser


def run_cells(
    sources: Callable[[Any], Iterable[Any]], results: Path, out: Path, given: argparse.Namespace
) -> int:
    """Run the cells that a store lacks, stage by stage; 130 where it was interrupted, which loses
    no finished one.

    Args:
        sources: yields the cells of each stage from the store.
        results: the store.
        out: ledgers.
        given: of `cells_parser`.
    """
    from rich.console import Console

    from dpkfc.app.tuning.pool import drive, worker_count
    from dpkfc.app.tuning.study_progress import StudyProgress
    from dpkfc.app.tuning.tune import expected_seconds
    from dpkfc_papers.public_examples import study_place
    from dpkfc_papers.store import Store

    place, workers = study_place(out, given.data_dir), worker_count(given.workers)
    console = Console(width=140)
    try:
        with Store(results) as store:
            for source in sources(store):
                with StudyProgress(None, done=len(store), console=console) as progress:
                    drive(
                        source,
                        place,
                        workers=workers,
                        expected=expected_seconds(lambda: store),
                        progress=progress,
                    )
                for name, why in source.failures.items():
                    print(f"{name}: {why}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command continues it", file=sys.stderr)
        return 130
    return 0


# --------------------------------------------------------------------------------------------------
# Pictures of the documents, which all have one style and one width.

# In inches. At 150 dots an inch letters are read on a page of 1400 pixels and on a telephone.
WIDTH = 5.4


def sheet(rows: int = 1, columns: int = 1, *, height: float, **options: Any) -> Any:
    """Return a figure in the style of all pictures, and its panels `[rows, columns]`.

    Args:
        rows: of panels.
        columns: of panels.
        height: in inches.
        options: of `matplotlib.pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dpkfc.app.picture_style import STYLE

    # Labels of logarithmic axes are formulas; no text of a user is drawn here.
    plt.style.use([STYLE, {"text.parse_math": True}])
    return plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)


def finish(figure: Any, path: Path, columns: int = 0) -> None:
    """Write a figure, with one legend of all panels below them.

    Args:
        figure: of `sheet`.
        path: of a PNG file.
        columns: of the legend; 0 for none.
    """
    import matplotlib.pyplot as plt

    if columns:
        handles: dict[str, Any] = {}
        for panel in figure.axes:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"optimize": True})
    plt.close(figure)


def draw_means(
    panel: Any, places: Sequence[float], values: Sequence[Sequence[float]], **style: Any
) -> None:
    """Draw means with their 95 % intervals; of one value no interval.

    Args:
        panel: of `sheet`.
        places: on its horizontal axis.
        values: some for each place.
        style: of `errorbar`.
    """
    errors = [half_interval(of) if len(of) > 1 else 0.0 for of in values]
    style = {"yerr": errors, "capsize": 2, **style}
    panel.errorbar(list(places), list(map(statistics.mean, values)), **style)
