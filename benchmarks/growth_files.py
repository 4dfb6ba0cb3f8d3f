"""Measure what a run on a large file costs beyond a small one: a table, and texts.

    python benchmarks/growth.py --only files

A million rows of twenty columns stand beside a thousand, in processor seconds, as a ratio to
pyarrow, which reads the same file into one array of float32 numbers. Each command is a process of
its own; its seconds and peak memory are what the system counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, TEXTS, COLUMNS = 1_000_000, 300_000, 19
PAIR_ROWS = 10_000_000
# δ below 1 / N of the largest file, and an accountant whose time does not depend on N.
SETTINGS = (
    "--epsilon 3 --delta 1e-8 --accountant rdp --steps 30 --expected-batch-size 256 --quiet".split()
)
PYARROW = """
import sys, numpy, pyarrow, pyarrow.csv
pyarrow.set_cpu_count(1)
table = pyarrow.csv.read_csv(sys.argv[1], pyarrow.csv.ReadOptions(use_threads=False))
columns = [table.column(x).cast(pyarrow.float32()).to_numpy() for x in table.column_names[:-1]]
numpy.stack(columns, 1)
"""


def files(_: int) -> dict[str, Any]:
    """Return seconds and peak memory by the size of a table and of a file of texts."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_files(Path(folder), ROWS, TEXTS)


def file_rows(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what was measured, with goals."""
    small, large, texts = found["table"][0], found["table"][-1], found["texts"][-1]
    beyond = large["processor_seconds"] - small["processor_seconds"]
    rows, lines = f"{large['records']:,} rows of CSV", f"{texts['records']:,} texts of 40 words"
    against = "beyond a thousand ÷ pyarrow, which infers types and converts, processor seconds"
    return [
        (f"{rows} {against}", beyond / found["pyarrow_seconds"], 6.0),
        (f"{rows}, peak GiB", large["peak_gib"], 1.2),
        (f"{lines}, peak GiB", texts["peak_gib"], 1.5),
        (f"{lines}, processor seconds", texts["processor_seconds"], 30.0),
    ]


def pair(_: int) -> dict[str, Any]:
    """Return seconds and peak memory of a large table on one process and on two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_schemas(folder)
        command = ["-m", "dpkfc", "train", "--schema", "table.toml", *SETTINGS, "--data"]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
        found: dict[str, Any] = {"records": PAIR_ROWS}
        for rows, kind in ((1000, " of a thousand"), (PAIR_ROWS, "")):
            data = f"table{rows}.csv"
            write_table(folder / data, rows)
            # The memory of the larger process, and the seconds of all.
            for name, words in (("one", command), ("two", [*launch, *command])):
                found[name + kind] = measure([*words, data, "--out", name + kind], folder)
        return found


def pair_rows(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the memory of one process, and of a process of two over it."""
    rows = f"{found['records']:,} rows"
    one, two = found["one"]["peak_gib"], found["two"]["peak_gib"]
    beyond = two - found["two of a thousand"]["peak_gib"]
    beyond /= one - found["one of a thousand"]["peak_gib"]
    name = f"{rows} on two processes: peak memory of a process ÷ of one process"
    return [
        (f"{rows} of CSV, peak GiB", one, 1.86),
        (name, two / one, 0.6),
        (f"{name}, both beyond a thousand rows", beyond, 0.0),
    ]


def measure_files(folder: Path, rows: int, texts: int) -> dict[str, Any]:
    """Return seconds and peak memory by records, for both kinds of files."""
    write_schemas(folder)
    found: dict[str, Any] = {"table": [], "texts": []}
    for kind, most, write in (("table", rows, write_table), ("texts", texts, write_texts)):
        for size in sorted({*(10**n for n in range(3, 9) if 10**n < most), most}):
            data = folder / f"{kind}{size}{'.csv' if kind == 'table' else '.jsonl'}"
            write(data, size)
            words = ["--data", data.name, "--schema", f"{kind}.toml", *SETTINGS]
            command = ["-m", "dpkfc", "train", *words, "--out", f"{kind}{size}"]
            row = {"records": size, "bytes": data.stat().st_size, **measure(command, folder)}
            found[kind].append(row)
        if kind == "table":
            nothing = measure(["-c", PYARROW.replace("table =", "sys.exit() #"), data.name], folder)
            reference = measure(["-c", PYARROW, data.name], folder)
            seconds = reference["processor_seconds"] - nothing["processor_seconds"]
            found["pyarrow_seconds"] = round(seconds, 3)
    return found


def measure(words: list[str], folder: Path, **environment: str) -> dict[str, float]:
    """Return processor and wall seconds and the peak memory of a process."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)[:80]} ended with {status}")
    return {
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "seconds": round(time.perf_counter() - begun, 3),
        "peak_gib": round(usage.ru_maxrss / 2**20, 3),
    }


def write_table(path: Path, rows: int) -> None:
    """Write numbers of three decimals and whole ones, and a class."""
    draw = np.random.default_rng(0)
    names = ",".join(f"x{column}" for column in range(COLUMNS))
    with path.open("w") as file:
        file.write(f"{names},y\n")
        for start in range(0, rows, 10_000):
            count = min(10_000, rows - start)
            numbers = draw.normal(0, 10, (count, 12))
            whole = draw.integers(0, 10**6, (count, COLUMNS - 12))
            for some, others in zip(numbers.tolist(), whole.tolist(), strict=True):
                cells = [f"{x:.3f}" for x in some] + [str(x) for x in others]
                file.write(f"{','.join(cells)},{'yes' if some[0] > 0 else 'no'}\n")


def write_texts(path: Path, count: int) -> None:
    """Write texts of forty words by Zipf's law."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for start in range(0, count, 10_000):
            ranks = draw.zipf(1.3, (min(10_000, count - start), 40)) % 30_000
            for row in ranks.tolist():
                words = " ".join(f"w{rank}" for rank in row)
                file.write(f'{{"text": "{words}", "y": "{"yes" if row[0] < 3 else "no"}"}}\n')


def write_schemas(folder: Path) -> None:
    """Write what is public of both files."""
    classes = 'target = "y"\nclasses = ["no", "yes"]\n'
    columns = ""
    for column in range(COLUMNS):
        bounds = [-40, 40] if column < 12 else [0, 10**6]
        columns += f'[columns.x{column}]\nkind = "number"\nbounds = {bounds}\n'
    (folder / "table.toml").write_text(classes + columns)
    (folder / "texts.toml").write_text(f'{classes}[text]\nencoder = "weighted-words"\n')
