"""Paper and pencil: a table of a billion records on 64 processes, from slopes that were measured.

    python benchmarks/plan_records.py     # a table of docs/scaling-plan.md

Seconds and bytes of a record are the slope from the second to the largest table in
results/growth.json; no table of this size was run.
"""

from __future__ import annotations

import sys
from typing import Any

from common import RESULTS, markdown, read_json

RECORDS, PROCESSES, STEPS, BATCH = 10**9, 64, 1000, 64_000
# Of the measured table: an encoded row has a value and a mark for each of 19 columns, its features
# are these and 15 places of a curve a column, and a test row is one in five.
WIDTH, PARAMETERS, TEST_SHARE = 38, 324, 0.2
GIB = 2**30


def plan_table(results: dict[str, Any]) -> str:
    """Return the quantities of one process, with how each is counted."""
    _, before, *_, last = results["files"]["table"]
    more = last["records"] - before["records"]
    seconds = (last["processor_seconds"] - before["processor_seconds"]) / more
    held = (last["peak_gib"] - before["peak_gib"]) / more
    line = last["bytes"] / last["records"]
    step = results["steps"]["milliseconds"]["1000000000"] / 1000
    share = RECORDS / PROCESSES
    tests = TEST_SHARE * RECORDS * (2 * 4 + 8)
    rows = [
        ("records", f"{share / 1e6:.1f} million", f"10⁹ over {PROCESSES} processes"),
        ("read", f"{line * share / GIB:.1f} GiB", f"{line:.0f} bytes a row of CSV, once"),
        (
            "read, encoded, split and scored",
            f"{seconds * share:,.0f} s",
            f"{1e6 * seconds:.0f} µs a row: slope of the whole command",
        ),
        (
            "on its disk",
            f"{WIDTH * 4 * share / GIB:.1f} GiB",
            f"{WIDTH} numbers of 4 bytes a row, mapped; only what a batch touches is read",
        ),
        (
            "held beyond the imports",
            f"{held * share:.1f} GiB",
            f"{held * GIB:.0f} bytes a row: slope of the peak, mapped pages included",
        ),
        (
            "outputs and labels of test rows, on rank 0",
            f"{tests / GIB:,.0f} GiB",
            "16 bytes for a fifth of all rows, and ten times as much while they are scored",
        ),
        (
            "sent a step",
            f"{2 * PARAMETERS * 4:,} bytes",
            f"sum and release of {PARAMETERS} weights",
        ),
        (
            f"{STEPS:,} steps",
            f"{STEPS * step:,.0f} s",
            f"{BATCH // PROCESSES:,} records of a process, drawn among 10⁹; without the exchange",
        ),
        ("ledger", f"{STEPS:,} lines", "written by the first process before each release"),
    ]
    return markdown(["quantity of a process", "value", "how"], [list(row) for row in rows])


def main() -> int:
    print(plan_table(read_json(RESULTS / "growth.json")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
