"""What a checkpoint of a large session costs beyond writing its weights, on this disk, in one run.

    python benchmarks/checkpoint.py            # BERT-base, DP-SGD; results/checkpoint.json
    python benchmarks/checkpoint.py --smoke    # a small model; prints, writes only to --output

The weights alone are safetensors' own file of the same tensors with an fsync. A session also holds
the optimizer's buffers, which for momentum are as large as the weights: it is measured with them
and without. Times are medians of three.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, markdown, measure_once

OUTPUT = RESULTS / "checkpoint.json"
GOAL = 2.0  # seconds of a checkpoint beyond its weights


def seconds(function: Callable[[], Any], times: int = 3) -> float:
    """Median wall time."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measure_case(case: Any, momentum: float) -> dict[str, Any]:
    """Seconds of `Session.save` and of the weights alone."""
    import torch
    from safetensors.torch import save_file

    from contenders import setting_for
    from dpkfc.config import PrivacyConfig
    from dpkfc.session import Session

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setting = setting_for(case, folder)
        model = setting.fresh()[0]
        config = PrivacyConfig(expected_batch_size=case.batch_size, steps=10, sampler="fixed")
        plan = config.with_noise(1.0, 1e-6, setting.size)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], 1e-3, momentum=momentum
        )
        with Session(
            plan, model, optimizer, setting.data, ledger_path=folder / "ledger.jsonl"
        ) as session:
            session.step(next(session.batches()), lambda m, batch: case.losses(m, *batch))

            def weights() -> None:
                path = folder / "weights.safetensors"
                seen: dict[int, str] = {}
                tensors = {
                    n: x
                    for n, x in model.state_dict().items()
                    if seen.setdefault(x.data_ptr(), n) == n
                }
                save_file({n: x.contiguous() for n, x in tensors.items()}, path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())

            alone = seconds(weights)
            whole = seconds(lambda: session.save(folder / "checkpoint"))
            load = seconds(lambda: session.restore(folder / "checkpoint"))
    return {
        "model": case.title,
        "parameters": sum(p.numel() for p in model.parameters()),
        "momentum": momentum,
        "weights_s": round(alone, 2),
        "checkpoint_s": round(whole, 2),
        "beyond_s": round(whole - alone, 2),
        "restore_s": round(load, 2),
        "goal_s": GOAL,
        "met": whole - alone <= GOAL,
    }


def table(results: dict[str, Any]) -> str:
    """One row an optimizer."""
    rows = []
    for row in results["rows"]:
        optimizer = f"SGD, momentum {row['momentum']:g}" if row["momentum"] else "SGD"
        beyond = f"{row['beyond_s']:.2f} (≤ {row['goal_s']:g} {'✓' if row['met'] else '✗'})"
        times = [f"{row[name]:.2f}" for name in ("weights_s", "checkpoint_s", "restore_s")]
        rows.append(
            [
                f"{row['model']} ({row['parameters'] / 1e6:,.1f} million)",
                optimizer,
                *times[:2],
                beyond,
                times[2],
            ]
        )
    head = [
        "model (parameters)",
        "optimizer",
        "weights alone, s",
        "checkpoint, s",
        "beyond the weights, s",
        "restored, s",
    ]
    return markdown(head, rows)


def measure(options: Namespace) -> dict[str, Any]:
    """Return a row without momentum and one with it."""
    from models import cases

    case = cases(smoke=True)["smoke-mlp"] if options.smoke else cases()["bert-base"]
    return {"rows": [measure_case(case, momentum) for momentum in (0.0, 0.9)]}


if __name__ == "__main__":
    sys.exit(measure_once(__doc__, None, OUTPUT, measure, table))
