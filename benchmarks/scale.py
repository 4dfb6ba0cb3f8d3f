"""How the cost of a step grows: width, depth, batch, positions and rank, each alone, with the slope of the log-log line.

    python benchmarks/scale.py                # every axis, results/scale.json (some minutes on two idle cores)
    python benchmarks/scale.py --axis width   # one axis; the others keep their last results
    python benchmarks/scale.py --smoke        # tiny sizes; prints, writes nothing

The model is a stack of `depth` maps of `width` × `width` with a GELU between, over `positions` rows an example, and a mean loss:
nothing but what the mechanism pays for. Contenders take turns within one run; times are medians. The expected exponent is that
of the operations: B·T·d² and L for everything that is a product with a weight, T²·d for a Gram norm, T·d·k for a low-rank side.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import RESULTS, hardware, load_average, markdown, now, read_json, write_json

OUTPUT = RESULTS / "scale.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "scale.png"
CONTENDERS = ("plain", "dp_sgd", "dp_kfc")
TITLES = {"plain": "without privacy", "dp_sgd": "DP-SGD", "dp_kfc": "DP-KFC", "refresh": "one refresh"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size: width d, depth L, batch B, positions T, rank k of the low-rank sides."""

    width: int = 512
    depth: int = 4
    batch: int = 16
    positions: int = 64
    rank: int = 64


AXES: dict[str, tuple[int, ...]] = {
    "width": (256, 512, 1024, 2048),
    "depth": (2, 4, 8, 16),
    "batch": (8, 16, 32, 64),
    "positions": (32, 64, 128, 256),
    "rank": (16, 32, 64, 128),
}
SMOKE: dict[str, tuple[int, ...]] = {
    "width": (16, 32), "depth": (1, 2), "batch": (2, 4), "positions": (4, 8), "rank": (2, 4)
}  # fmt: skip
EXPECTED = {  # axis: contender: exponent of the dearest term
    "width": {"plain": 2.0, "dp_sgd": 2.0, "dp_kfc": 2.0},
    "depth": {"plain": 1.0, "dp_sgd": 1.0, "dp_kfc": 1.0, "refresh": 1.0},
    "batch": {"plain": 1.0, "dp_sgd": 1.0, "dp_kfc": 1.0, "refresh": 0.0},
    "positions": {"plain": 1.0, "dp_sgd": 1.0, "dp_kfc": 1.0},
    "rank": {"plain": 0.0, "dp_sgd": 0.0, "dp_kfc": 0.0},
}


def case_of(point: Point) -> Any:
    """The stack as a case of the speed benchmark."""
    import torch
    from torch import nn

    from models import Case

    def build() -> nn.Module:
        torch.manual_seed(0)
        maps: list[nn.Module] = []
        for _ in range(point.depth):
            maps += [nn.Linear(point.width, point.width), nn.GELU()]
        return nn.Sequential(*maps, nn.Linear(point.width, 10))

    return Case(
        name="stack", title="a stack of maps", batch_size=point.batch, shape=(point.positions, point.width), build=build,
        probe_size=64, logits=lambda model, x: model(x).mean(1),
    )  # fmt: skip


def live_contenders(point: Point, folder: Path) -> dict[str, Any]:
    """The three contenders of one size."""
    import contenders
    from dpkfc.curvature import KFAC

    case = case_of(point)
    setting = contenders.setting_for(case, folder)
    kfac = KFAC(probe=case.probe(), probe_size=case.probe_size, every=contenders.EVERY, max_rank=point.rank, sides="both")
    return {
        "plain": contenders.plain(setting),
        "dp_sgd": contenders.dp_sgd(setting),
        "dp_kfc": contenders.session_with(setting, "dp_kfc", kfac),
    }


def measure(point: Point, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of each contender, and of a refresh."""
    with tempfile.TemporaryDirectory() as folder:
        live = live_contenders(point, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in live}
        order = random.Random(0)
        for number in range(2 + rounds):
            for name in order.sample(list(live), len(live)):
                taken = _seconds(live[name].step)
                if number >= 2:
                    seconds[name].append(taken)
        seconds["refresh"] = [_seconds(live["dp_kfc"].refresh) for _ in range(3)]
        for contender in live.values():
            contender.close()
    return {name: round(1e3 * statistics.median(x), 3) for name, x in seconds.items()}


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Least squares through (log size, log time)."""
    return round(statistics.linear_regression([math.log(s) for s in sizes], [math.log(t) for t in times]).slope, 2)


def sweep(axis: str, sizes: Sequence[int], base: Point, rounds: int) -> dict[str, Any]:
    """One axis, all else at the base."""
    times = []
    for size in sizes:
        times.append(measure(replace(base, **{axis: size}), rounds))
        print(f"{axis} {size}: " + ", ".join(f"{TITLES[n]} {t:,.1f} ms" for n, t in times[-1].items()), file=sys.stderr)
    names = list(times[0])
    return {
        "sizes": list(sizes),
        "milliseconds": {name: [t[name] for t in times] for name in names},
        "slope": {name: slope(sizes, [t[name] for t in times]) for name in names},
        "last_slope": {name: slope(sizes[-2:], [t[name] for t in times[-2:]]) for name in names},
        "expected": EXPECTED[axis],
        "base": vars(base),
    }


def table(results: dict[str, Any]) -> str:
    """The slopes and the ratios at both ends of every axis."""
    header = ["axis", "from … to", *(f"{TITLES[n]}: slope (last two sizes; expected)" for n in (*CONTENDERS, "refresh")),
              "DP-SGD ÷ plain", "DP-KFC ÷ DP-SGD"]  # fmt: skip
    rows = []
    for axis, found in results["axes"].items():
        cells = [
            f"{found['slope'][n]:.2f} ({found['last_slope'][n]:.2f}; {found['expected'].get(n, '–')})"
            for n in (*CONTENDERS, "refresh")
        ]
        times = found["milliseconds"]
        ends = [
            f"{times[a][0] / times[b][0]:.2f} … {times[a][-1] / times[b][-1]:.2f}"
            for a, b in (("dp_sgd", "plain"), ("dp_kfc", "dp_sgd"))
        ]
        rows.append([axis, f"{found['sizes'][0]} … {found['sizes'][-1]}", *cells, *ends])
    return markdown(header, rows)


def plot(results: dict[str, Any], path: Path) -> None:
    """One small picture an axis: times over size, both logarithmic, and a dotted line of the expected slope."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = results["axes"]
    figure, panels = plt.subplots(1, len(axes), figsize=(3.1 * len(axes), 3.1), constrained_layout=True, squeeze=False)
    colours = {"plain": "#666666", "dp_sgd": "#1f77b4", "dp_kfc": "#d62728", "refresh": "#2ca02c"}
    for panel, (axis, found) in zip(panels[0], axes.items(), strict=True):
        sizes = found["sizes"]
        for name, times in found["milliseconds"].items():
            panel.plot(sizes, times, marker="o", markersize=4, color=colours[name], label=TITLES[name])
            exponent = found["expected"].get(name)
            if exponent is not None:
                line = [times[-1] * (size / sizes[-1]) ** exponent for size in sizes]
                panel.plot(sizes, line, linestyle=":", linewidth=1, color=colours[name])
        panel.set(xscale="log", yscale="log", title=axis, xticks=sizes, xticklabels=[str(size) for size in sizes])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("milliseconds")
    panels[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=list(AXES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read_json(OUTPUT)))
        return 0
    import torch

    torch.set_num_threads(arguments.threads)
    base = Point(width=16, depth=1, batch=2, positions=4, rank=2) if arguments.smoke else Point()
    sizes = SMOKE if arguments.smoke else AXES
    results = {} if arguments.smoke else read_json(OUTPUT)
    axes = results.get("axes", {})
    for axis in arguments.axis or list(AXES):
        axes[axis] = sweep(axis, sizes[axis], base, 2 if arguments.smoke else arguments.rounds)
        axes = {name: axes[name] for name in AXES if name in axes}
        results = {"date": now(), "hardware": hardware(arguments.threads), "load_average": load_average(), "axes": axes}
        if not arguments.smoke:
            write_json(OUTPUT, results)
            plot(results, PICTURE)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
