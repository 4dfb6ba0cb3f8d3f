"""What it costs to notice weights that other code has written: one digest, in one process.

    python benchmarks/weights.py                    # 64 million weights; results/weights.json
    python benchmarks/weights.py --device cuda      # the same on a card
    python benchmarks/weights.py --smoke            # a small table; writes only to --output

A plain read is `x.sum()`. The step trains a model with one embedding, which reads few of its
weights: no step has less work for each weight. Steps with digests and without take turns. Times are
medians; on a processor they are its own seconds of all threads, which other jobs disturb least.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import RESULTS, measure_once

OUTPUT = RESULTS / "weights.json"
WIDTH = 64


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the time that some work takes: of the processor, or until a card has done it."""
    import torch

    clock = time.process_time if device == "cpu" else time.perf_counter
    started = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - started


def median_seconds(work: Callable[[], Any], device: str, times: int = 7) -> float:
    """Return the median, after a first call."""
    work()
    return statistics.median(seconds(work, device) for _ in range(times))


def compare_reads(rows: int, device: str) -> dict[str, Any]:
    """Return the speed of a digest and of a sum over the same weights, in GB/s."""
    import torch

    from dpkfc.weights import digest_tensors

    x = torch.randn(rows, WIDTH, device=device)
    read = median_seconds(x.sum, device)
    digest = median_seconds(lambda: digest_tensors({"x": x}), device)
    size = x.numel() * x.element_size() / 1e9
    return {
        "weights": x.numel(),
        "sum_gb_per_s": round(size / read, 2),
        "digest_gb_per_s": round(size / digest, 2),
        "digest_over_sum": round(digest / read, 2),
    }


def compare_steps(rows: int, device: str, steps: int) -> dict[str, Any]:
    """Return the time of a step with digests and without."""
    import torch
    from torch import nn
    from torch.nn import functional

    from dpkfc import PrivacyConfig, Session, weights

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, ids: Any) -> Any:
            return self.head(self.table(ids).mean(1))

    def losses(model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model = Model().to(device)
    data = torch.randint(rows, (512, 16)), torch.randint(2, (512,))
    config = PrivacyConfig(expected_batch_size=64, steps=2 * steps, sampler="fixed")
    plan = config.with_noise(1.0, 1e-3, 512)
    digest = weights.digest_tensors
    taken: dict[bool, list[float]] = {True: [], False: []}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(plan, model, optimizer, data, verify=False) as session:
        for i, batch in enumerate(session.batches()):
            session.accept_weights()
            is_read = i % 2 == 1
            if not is_read:
                weights.digest_tensors = lambda tensors, *_: dict.fromkeys(tensors, "")
                session.accept_weights()
            time_taken = seconds(functools.partial(session.step, batch, losses), device)
            weights.digest_tensors = digest
            if i:  # the first step looks at all tensors
                taken[is_read].append(time_taken)
    found = {is_read: statistics.median(times) for is_read, times in taken.items()}
    return {
        "step_s": round(found[True], 4),
        "step_without_digests_s": round(found[False], 4),
        "ratio": round(found[True] / found[False], 3),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of digests, and what they cost a step."""
    rows, steps = (1000, 2) if options.smoke else (1_000_000, 5)
    return {
        **compare_reads(rows, options.device),
        **compare_steps(rows, options.device, steps),
    }


def table(results: dict[str, Any]) -> str:
    """Return a figure a line."""
    return "\n".join(f"{name}: {value}" for name, value in results.items())


if __name__ == "__main__":
    sys.exit(measure_once(__doc__, None, OUTPUT, measure, table))
