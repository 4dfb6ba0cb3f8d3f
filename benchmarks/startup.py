"""Measure the processor seconds of each command's start, as a ratio to `python -c "import numpy"`.

    python benchmarks/startup.py            # results/startup.json

Each command runs in a process of its own, in turn with the reference; the least of the repeats
counts, since other work can only add to it.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import RESULTS, markdown, measure_once, processor_seconds

REFERENCE, REPEATS = "python -c 'import numpy'", 5
COMMANDS = {
    "import dpkfc": ("-c", "import dpkfc"),
    "dpkfc --help": ("-m", "dpkfc", "--help"),
    "dpkfc schema": ("-m", "dpkfc", "schema", "table.csv", "--target", "died"),
    "dpkfc calibrate": "-m dpkfc calibrate -e 1 -n 60000 -b 256 --epochs 5".split(),
    "dpkfc ledger verify": ("-m", "dpkfc", "ledger", "verify", "run"),
    "dpkfc total": ("-m", "dpkfc", "total", "run"),
    "dpkfc card": ("-m", "dpkfc", "card", "run"),
    "dpkfc methods": ("-m", "dpkfc", "methods"),
    "dpkfc train --help": ("-m", "dpkfc", "train", "--help"),
}
TRAIN = "-m dpkfc train --recipe digits --method dp-sgd --steps 5 --out run --quiet".split()


def measure(options: Namespace) -> dict[str, Any]:
    """Return the least processor seconds of each start, and their ratios to the reference."""
    rows = {REFERENCE: ("-c", "import numpy"), **COMMANDS}
    least = dict.fromkeys(rows, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "table.csv").write_text("age,smoker,died\n", "utf-8")
        processor_seconds(TRAIN, folder)
        for _ in range(1 if options.smoke else REPEATS):
            for name, words in rows.items():
                least[name] = min(least[name], processor_seconds(words, folder))
    ratios = {name: round(value / least[REFERENCE], 2) for name, value in least.items()}
    seconds = {name: round(value, 3) for name, value in least.items()}
    return {"seconds": seconds, "ratio_to_numpy": ratios}


def table(results: dict[str, Any]) -> str:
    """Return the processor seconds of each start, and their ratio to the import of NumPy."""
    ratios = results["ratio_to_numpy"]
    rows = [
        [name, f"{value:.2f}", f"{ratios[name]:.1f}"] for name, value in results["seconds"].items()
    ]
    return markdown(["command", "processor seconds", "÷ import of NumPy"], rows)


if __name__ == "__main__":
    sys.exit(measure_once(__doc__, None, RESULTS / "startup.json", measure, table, threads=1))
