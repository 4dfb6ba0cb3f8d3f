"""How long noise takes, in ratio to numbers of `torch.randn`, which come from no cipher.

    python benchmarks/noise.py                  # results/noise.json
    python benchmarks/noise.py --smoke          # small; writes only to --output
    python benchmarks/noise.py --device cuda    # on a GPU

A draw is what the mechanism makes for one release; a release adds it to a sum and divides, in the
kinds "gaussian" and "rounded". Beside it stand `torch.randn`, and `torch.randn` added to the sum.
Contenders take turns. Figures are medians of nine rounds: nanoseconds a number by the clock, the
ratio within a round by the clock, and the ratio of processor time, of all threads together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from operator import truediv
from typing import Any

from common import RESULTS, markdown, measure_once

OUTPUT = RESULTS / "noise.json"
SIZES = (26_010, 1_863_690, 1 << 24)  # the MNIST CNN, the MLP of the speed benchmark, more
ROUNDS = 9


def contenders(size: int, device: str) -> dict[str, Any]:
    """Return each kind of work with what it is compared with."""
    import torch

    from dpkfc.privacy import mechanism
    from dpkfc.privacy.normal_numbers import serial_operations
    from dpkfc.privacy.rng import NoiseStream

    stream, sums = NoiseStream.secure(), {"weight": torch.zeros(size, device=device)}

    def source() -> Any:
        return mechanism._choose_source(stream, 0, sums["weight"].device, size)

    def draw(kind: str) -> None:
        with serial_operations():
            for _ in stream.draw(size, 0, kind):
                pass

    def plain(kind: str = "float32") -> Any:
        return torch.randn(size, dtype=getattr(torch, kind), device=device)

    def plain_release() -> Any:
        return plain().add_(sums["weight"]).div_(8.0)

    found: dict[str, Any] = {
        f"draw {kind}": (partial(draw, kind), partial(plain, kind))
        for kind in ("float32", "float64")
    }
    if device != "cpu":
        found = {"draw float32": (lambda: source()(size, torch.float32), plain)}
    found["gaussian"] = (
        lambda: mechanism.gaussian_release(sums, 1.0, 8.0, source()),
        plain_release,
    )
    found["rounded"] = (
        lambda: mechanism.rounded_release(sums, 1.0, 8.0, source(), 2.0**-30),
        plain_release,
    )
    return found


def measure_size(size: int, device: str) -> dict[str, dict[str, float]]:
    """Return the figures of each kind for a number of numbers."""
    import torch

    found = {}
    for kind, pair in contenders(size, device).items():
        taken = []
        for _ in range(ROUNDS + 1):
            row = []
            for work in pair:
                begun, used = time.perf_counter(), time.process_time()
                work()
                if device != "cpu":
                    torch.cuda.synchronize()
                row += [time.perf_counter() - begun, time.process_time() - used]
            taken.append(row)
        own, processor, other, processor_of_other = zip(*taken[1:], strict=True)
        found[kind] = {
            "ns": 1e9 * statistics.median(own) / size,
            "ratio": statistics.median(map(truediv, own, other)),
            "processor_ratio": statistics.median(map(truediv, processor, processor_of_other)),
        }
    return {
        kind: {name: round(x, 2) for name, x in figures.items()} for kind, figures in found.items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures by size."""
    sizes = (1000,) if options.smoke else SIZES
    return {"sizes": {f"{size:,}": measure_size(size, options.device) for size in sizes}}


def table(results: dict[str, Any]) -> str:
    """Return a row for each size and kind of work."""
    rows = [
        [size, kind, *map(str, figures.values())]
        for size, kinds in results["sizes"].items()
        for kind, figures in kinds.items()
    ]
    return markdown(["numbers", "work", "ns a number", "ratio", "of processor time"], rows)


if __name__ == "__main__":
    sys.exit(measure_once(__doc__, None, OUTPUT, measure, table, threads=1))
