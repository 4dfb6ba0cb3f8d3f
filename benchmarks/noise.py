"""How long a draw of noise takes: the CPU stream, and on a GPU its copy against ChaCha20 in
operations of torch.

    python benchmarks/noise.py                  # the CPU stream, and ChaCha20 on the CPU
    python benchmarks/noise.py --device cuda    # the three sources on a GPU

The mechanism copies draws of at most `rng.CHUNK` numbers to a GPU and makes larger ones there.
Medians of seven draws.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from common import hardware, markdown
from dpkfc.privacy.chacha20 import draw_normal
from dpkfc.privacy.rng import NoiseStream, draw_key

SIZES = (1000, 1 << 17, 1_000_000, 1 << 24)


def milliseconds(draw: Callable[[], object], device: torch.device) -> float:
    """Median wall time of a draw, after one that is not measured."""
    taken = []
    for _ in range(8):
        started = time.perf_counter()
        draw()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    given = parser.parse_args()
    device, stream = torch.device(given.device), NoiseStream.secure()
    rows = []
    for name in ("float32", "float64"):
        dtype = getattr(torch, name)
        for size in given.sizes:
            on_cpu = milliseconds(lambda n=size, kind=name: stream.normal(n, 0, kind), device)
            numbers = torch.from_numpy(stream.normal(size, 0, name))
            copy = milliseconds(lambda z=numbers: z.to(device, copy=True), device)
            cipher = milliseconds(
                lambda n=size, kind=dtype: draw_normal(draw_key(), n, kind, device), device
            )
            rate = numbers.numel() * numbers.element_size() / 1e3 / on_cpu
            rows.append(
                [name, f"{size:,}", f"{on_cpu:.2f}", f"{rate:.0f}", f"{copy:.2f}", f"{cipher:.2f}"]
            )
    print(
        markdown(
            ["type", "numbers", "CPU stream, ms", "MB/s", "copy, ms", f"ChaCha20 on {device}, ms"],
            rows,
        )
    )
    print(hardware(torch.get_num_threads(), device.type))


if __name__ == "__main__":
    main()
