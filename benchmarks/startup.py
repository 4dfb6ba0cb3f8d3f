"""Measure the processor seconds of each command's start, as a ratio to `python -c "import numpy"`.

    python benchmarks/startup.py --repeats 5

Each command runs in a process of its own, in turn with the reference; the least of the repeats
counts, since other work can only add to it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, hardware, markdown, now, write_json

REFERENCE = ("-c", "import numpy")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "table.csv").write_text("age,smoker,died\n", "utf-8")
        seconds_of(TRAIN, folder)
        rows = {"python -c 'import numpy'": REFERENCE, **COMMANDS}
        least = dict.fromkeys(rows, float("inf"))
        for _ in range(arguments.repeats):
            for name, words in rows.items():
                least[name] = min(least[name], seconds_of(words, folder))
    reference = least["python -c 'import numpy'"]
    for name, seconds in least.items():
        print(f"{name:28} {seconds:6.2f} s {seconds / reference:6.1f}x")
    content = {
        "hardware": hardware(1),
        "date": now(),
        "seconds": {name: round(value, 3) for name, value in least.items()},
        "ratio_to_numpy": {name: round(value / reference, 2) for name, value in least.items()},
    }
    write_json(arguments.output, content)


def table(results: dict[str, Any]) -> str:
    """Return the processor seconds of each start, and their ratio to the import of NumPy."""
    ratios = results["ratio_to_numpy"]
    rows = [
        [name, f"{value:.2f}", f"{ratios[name]:.1f}"] for name, value in results["seconds"].items()
    ]
    return markdown(["command", "processor seconds", "÷ import of NumPy"], rows)


def seconds_of(words: list[str] | tuple[str, ...], folder: str) -> float:
    """Return processor seconds, to which other work on the machine adds little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
