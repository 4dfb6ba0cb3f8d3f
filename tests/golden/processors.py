"""Compare the golden runs on this processor, or an emulated one, with what another has recorded.

    python -m tests.golden.processors NAME

The result goes to benchmarks/results/processors.json under NAME. Accounting is quick, so ε is left
out: `python -m tests.golden.record` compares it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from datetime import date
from pathlib import Path

import pytest
import torch

from tests.golden.record import PATH, RUNS, differences, record
from tests.quick import make_accounting_quick

OUTPUT = Path(__file__).parents[2] / "benchmarks" / "results" / "processors.json"


def main(name: str) -> int:
    torch.set_num_threads(1)
    stored = json.loads(PATH.read_text("utf-8"))
    start = time.process_time()
    failed = {}
    with pytest.MonkeyPatch.context() as patched:
        make_accounting_quick(patched)
        for run in sorted(RUNS):
            found = differences(stored, record([run]))
            if other := [text for text in found if ": epsilon is" not in text]:
                failed[run] = other
            print(f"{run}: {'differs' if other else 'equal'}", flush=True)
    results = json.loads(OUTPUT.read_text("utf-8")) if OUTPUT.exists() else {}
    results[name] = {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "runs": len(RUNS),
        "equal": len(RUNS) - len(failed),
        "differences": failed,
        "processor_seconds": round(time.process_time() - start, 1),
        "date": str(date.today()),
    }
    OUTPUT.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", "utf-8")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
