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
# δ below 1 / N of the largest file, and an accountant whose time does not depend on N.
SETTINGS = (
    "--epsilon 3 --delta 1e-7 --accountant rdp --steps 30 --expected-batch-size 256 --quiet".split()
)
PYARROW = """
import sys, numpy, pyarrow, pyarrow.csv
pyarrow.set_cpu_count(1)
table = pyarrow.csv.read_csv(sys.argv[1], pyarrow.csv.ReadOptions(use_threads=False))
columns = [table.column(x).cast(pyarrow.float32()).to_numpy() for x in table.column_names[:-1]]
numpy.stack(columns, 1)
"""


def files(_: int) -> dict[str, Any]:
    """Return seconds, peak memory and ratios of a large table and a large file of texts."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_files(Path(folder), ROWS, TEXTS)


def file_rows(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what was measured, with goals."""
    table, texts = f"{found['rows']:,} rows of CSV", f"{found['texts']:,} texts"
    beyond = "beyond a thousand ÷ pyarrow, which infers types and converts, processor seconds"
    return [
        (f"{table} {beyond}", found["csv_ratio"], 6.0),
        (f"{table}, peak GiB", found["csv_peak_gib"], 1.2),
        (f"{texts} of 40 words, peak GiB", found["texts_peak_gib"], 1.5),
        (f"{texts} of 40 words, processor seconds", found["texts_seconds"], 30.0),
    ]


def measure_files(folder: Path, rows: int, texts: int) -> dict[str, Any]:
    """Return seconds, peak memory and the ratio of both kinds of files."""
    write_schemas(folder)
    small, large = folder / "small.csv", folder / "large.csv"
    write_table(small, 1000)
    write_table(large, rows)
    lines = folder / "texts.jsonl"
    write_texts(lines, texts)
    nothing = measure(["-c", PYARROW.replace("table =", "sys.exit() #"), str(large)], folder)
    reference = measure(["-c", PYARROW, str(large)], folder)
    runs = {
        name: measure(["-m", "dpkfc", "train", *words, "--out", name, *SETTINGS], folder)
        for name, words in {
            "small": ["--data", "small.csv", "--schema", "table.toml"],
            "large": ["--data", "large.csv", "--schema", "table.toml"],
            "texts": ["--data", "texts.jsonl", "--schema", "texts.toml"],
        }.items()
    }
    pyarrow = reference["processor_seconds"] - nothing["processor_seconds"]
    beyond = runs["large"]["processor_seconds"] - runs["small"]["processor_seconds"]
    return {
        "rows": rows,
        "texts": texts,
        "table_mb": round(large.stat().st_size / 1e6),
        "texts_mb": round(lines.stat().st_size / 1e6),
        "pyarrow_seconds": round(pyarrow, 3),
        "runs": runs,
        "csv_ratio": round(beyond / pyarrow, 2),
        "csv_peak_gib": runs["large"]["peak_gib"],
        "texts_peak_gib": runs["texts"]["peak_gib"],
        "texts_seconds": runs["texts"]["processor_seconds"],
    }


def measure(words: list[str], folder: Path) -> dict[str, float]:
    """Return processor and wall seconds and the peak memory of a process."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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
