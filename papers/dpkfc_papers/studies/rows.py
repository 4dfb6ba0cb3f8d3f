"""Rows of a study by key, in one JSON file that is written after every row."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc_papers.studies.harness import (
    make_parser,
    read_json,
    stamp,
    write_json,
)

Row = Mapping[str, Any]


class RowFile:
    """The rows of a file.

    Args:
        path: of the file; it may be missing.

    Attributes:
        rows: by key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Row] = read_json(path).get("rows", {})

    def fill(self, key: str, make: Callable[[], Row]) -> None:
        """Make a row that is missing, with an accuracy in percent, and write the file.

        Machine and day are added. Rows that another process has written meanwhile stay.
        """
        if key in self.rows:
            return
        row = make()
        facts = stamp(torch.get_num_threads())
        written = read_json(self._path).get("rows", {})
        self.rows |= written | {key: {**row, **facts}}
        write_json(self._path, {"rows": self.rows})
        print(key, round(row["accuracy"], 2), flush=True)

    def best_rate(self, keys: Iterable[str]) -> float | None:
        """Return the rate of the most accurate row, by its loss where two are equal.

        Return None before all rows were made.
        """
        found = [self.rows.get(key) for key in keys]
        if not all(found):
            return None
        return max(found, key=lambda row: (row["accuracy"], -row.get("loss", 0.0)))["rate"]


class Stopwatch:
    """Seconds and seconds of the processor since it was made."""

    def __init__(self) -> None:
        self._start, self._processor = time.monotonic(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return both, for a row."""
        return {
            "seconds": time.monotonic() - self._start,
            "processor_seconds": time.process_time() - self._processor,
        }


def median_gradient_norm(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any]
) -> float:
    """Return the median norm of gradients of public batches of one example."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for batch in batches:
        loss = losses(model, batch).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None)))
    return statistics.median(norms)


def run_rows(
    description: str | None,
    names: Iterable[str],
    seeds: int,
    run: Callable[[str, Sequence[str], int], None],
    table: Callable[[], str],
) -> int:
    """Read the command line of a study; run what is missing, or print the table.

    Args:
        description: of the command.
        names: of what can be run alone.
        seeds: of the tests.
        run: takes the folder of the data sets, names and number of seeds.
        table: returns the Markdown table.
    """
    parser = make_parser(description)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--only", nargs="*", default=list(names), choices=list(names))
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table())
        return 0
    torch.set_num_threads(1)
    run(chosen.data_dir, chosen.only, chosen.seeds)
    return 0
