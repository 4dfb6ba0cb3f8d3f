"""How the cost of a step grows: width, depth, batch, positions and rank, each alone, with slopes
of log-log lines.

    python benchmarks/scale.py                # every axis (a quarter of an hour)
    python benchmarks/scale.py --axis width   # one axis; the others keep their last results
    python benchmarks/scale.py --smoke        # tiny sizes; prints, writes nothing

The model is a stack of `depth` maps of `width` × `width` with a GELU between, over `positions` rows
an example, and a mean loss: nothing but what the mechanism pays for. Contenders take turns within
one run; times are medians, ratios are medians over rounds of the ratio within a round. Memory is
taken in a process of its own for every size and contender. Expected exponents belong to the dearest
term; docs/results/scaling.md derives them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    compare_pairs,
    machine,
    make_parser,
    markdown,
    read_json,
    stamp,
    write_json,
)
from dpkfc_papers.studies.harness import finish, sheet
from memory import peaks, run_alone
from rounds import take_rounds
from stack import Point, case_of, contender_of

OUTPUT = RESULTS / "scale.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "scale.png"
CONTENDERS = ("plain", "dp_sgd", "dp_kfc")
TITLES = {
    "plain": "without privacy",
    "dp_sgd": "DP-SGD",
    "dp_kfc": "DP-KFC",
    "refresh": "one refresh",
}
# Colours of the style of all pictures, and markers.
LOOKS = {
    "plain": ("C6", "o"),
    "dp_sgd": ("C0", "s"),
    "dp_kfc": ("C1", "^"),
    "refresh": ("C2", "D"),
}
PAIRS = (("dp_sgd", "plain"), ("dp_kfc", "dp_sgd"))


AXES: dict[str, tuple[int, ...]] = {
    "width": (256, 512, 1024, 2048),
    "depth": (2, 4, 8, 16),
    "batch": (8, 16, 32, 64),
    "positions": (32, 64, 128, 256),
    "rank": (16, 32, 64, 128),
}
SMOKE: dict[str, tuple[int, ...]] = {
    "width": (16, 32),
    "depth": (1, 2),
    "batch": (2, 4),
    "positions": (4, 8),
    "rank": (2, 4),
}
_ALL = (*CONTENDERS, "refresh")
# axis: what: exponent of the dearest term, of time and of memory
EXPECTED: dict[str, dict[str, float]] = {
    "width": dict.fromkeys(_ALL, 2.0),
    "depth": dict.fromkeys(_ALL, 1.0),
    "batch": {**dict.fromkeys(CONTENDERS, 1.0), "refresh": 0.0},
    "positions": dict.fromkeys(_ALL, 1.0),
    "rank": dict.fromkeys(_ALL, 0.0),
}
MEMORY: dict[str, dict[str, float]] = {
    **EXPECTED,
    "width": {"plain": 1.0, "dp_sgd": 2.0, "dp_kfc": 2.0, "refresh": 1.0},
}


def measure(point: Point, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step of each contender and of a refresh, and the ratios of
    `PAIRS`.
    """
    import contenders

    def step(own: Any) -> float:
        return contenders.time_call(own.step)[0]

    with tempfile.TemporaryDirectory() as folder:
        setting = contenders.setting_for(case_of(point), Path(folder))
        live = {name: contender_of(name, point, setting) for name in CONTENDERS}
        step(live["dp_kfc"])
        refreshes = [contenders.time_call(live["dp_kfc"].refresh)[0] for _ in range(3)]
        taken = {
            name: list(own.values()) for name, own in take_rounds(live, rounds, step, 2).items()
        }
    ratios = {f"{a} / {b}": compare_pairs(taken[a], taken[b]) for a, b in PAIRS}
    medians = {name: statistics.median(x) for name, x in {**taken, "refresh": refreshes}.items()}
    return {
        "milliseconds": {name: round(1e3 * x, 3) for name, x in medians.items()},
        "ratios": ratios,
    }


def mebibytes(name: str, point: Point, threads: int) -> dict[str, float]:
    """Peaks of one contender: of a step without a refresh and, of DP-KFC, of a refresh."""
    point = point if name == "dp_kfc" else replace(point, rank=Point().rank)
    found = _run_alone(
        "--memory-of", name, "--point", json.dumps(asdict(point)), "--threads", str(threads)
    )
    refreshed = {"refresh": found["refresh_mib"]} if "refresh_mib" in found else {}
    return {name: found["step_mib"], **refreshed}


@cache
def _run_alone(*given: str) -> dict[str, Any]:
    found = run_alone([__file__, *given])
    if "not_available" in found:
        raise RuntimeError(f"{' '.join(given)}: {found['not_available']}")
    return found


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least squares through (log size, log value)."""
    return round(
        statistics.linear_regression(
            [math.log(s) for s in sizes], [math.log(max(v, 0.1)) for v in values]
        ).slope,
        2,
    )


def peaks_at(point: Point, threads: int) -> dict[str, float]:
    """Peaks of every contender at a point."""
    return {
        what: mib for name in CONTENDERS for what, mib in mebibytes(name, point, threads).items()
    }


def sweep(
    axis: str, sizes: Sequence[int], base: Point, rounds: int, *, threads: int, memory: bool
) -> dict[str, Any]:
    """One axis, all else at the base."""
    columns: dict[str, dict[str, list[Any]]] = {"milliseconds": {}, "ratios": {}, "mebibytes": {}}
    for size in sizes:
        point = replace(base, **{axis: size})
        found = measure(point, rounds)
        found["mebibytes"] = peaks_at(point, threads) if memory else {}
        for kind, of in found.items():
            for name, value in of.items():
                columns[kind].setdefault(name, []).append(value)
        times = ", ".join(f"{TITLES[n]} {t:,.1f} ms" for n, t in found["milliseconds"].items())
        print(f"{axis} {size}: {times}", file=sys.stderr)
    return {
        **stamp(threads),
        "sizes": list(sizes),
        **{kind: of for kind, of in columns.items() if of},
        "base": asdict(base),
    }


def table(results: Mapping[str, Any]) -> str:
    """Slopes of time and of memory along every axis; an axis that was not measured has a row
    too.
    """
    axes = results.get("axes", {})
    head = ["axis", "from … to", *(f"{TITLES[n]}: slope (last two sizes; expected)" for n in _ALL)]
    rows: dict[str, list[list[str]]] = {"milliseconds": [], "mebibytes": []}
    for axis in AXES:
        found = axes.get(axis, {})
        for kind, expected in (("milliseconds", EXPECTED), ("mebibytes", MEMORY)):
            sizes = found["sizes"] if kind in found else []
            cells = [
                _slopes(sizes, found.get(kind, {}).get(name), expected[axis].get(name))
                for name in _ALL
            ]
            rows[kind].append([axis, f"{sizes[0]} … {sizes[-1]}" if sizes else "–", *cells])
        rows["milliseconds"][-1] += [_ends(found, *pair) for pair in PAIRS]
    ends = [f"{TITLES[a]} ÷ {TITLES[b]}" for a, b in PAIRS]
    times, memory = (
        markdown([*head, *ends], rows["milliseconds"]),
        markdown(head, rows["mebibytes"]),
    )
    caption = "Peak memory above the start, of a step that does not refresh, and of a refresh"
    return f"Time\n\n{times}\n\n{caption}\n\n{memory}"


def _slopes(sizes: Sequence[int], values: Sequence[float] | None, expected: float | None) -> str:
    expected_text = "–" if expected is None else f"{expected:.1f}"
    return (
        f"– ({expected_text})"
        if not values
        else f"{slope(sizes, values):.2f} ({slope(sizes[-2:], values[-2:]):.2f}; {expected_text})"
    )


def _ends(found: Mapping[str, Any], top: str, bottom: str) -> str:
    """The ratio at both ends of an axis."""
    ratios = found.get("ratios", {}).get(f"{top} / {bottom}")
    return " … ".join(f"{ratios[end]['ratio']:.2f}" for end in (0, -1)) if ratios else "–"


def plot(results: Mapping[str, Any], path: Path) -> None:
    """One small picture an axis: times over size, both logarithmic, and a dotted line of the
    expected slope.
    """
    axes = results["axes"]
    rows = math.ceil(len(axes) / 2)
    figure, panels = sheet(rows, 2, height=2.3 * rows)
    for panel in panels.flat[len(axes) :]:
        panel.set_axis_off()
    for panel, (axis, found) in zip(panels.flat, axes.items(), strict=False):
        sizes = found["sizes"]
        for name, times in found["milliseconds"].items():
            colour, marker = LOOKS[name]
            panel.plot(sizes, times, marker=marker, color=colour, label=TITLES[name])
            exponent = EXPECTED[axis].get(name)
            if exponent is not None:
                line = [times[-1] * (size / sizes[-1]) ** exponent for size in sizes]
                panel.plot(sizes, line, linestyle=":", linewidth=1, color=colour)
        panel.set(
            xscale="log",
            yscale="log",
            title=f"{axis}, milliseconds",
            xticks=sizes,
            xticklabels=[str(size) for size in sizes],
        )
        panel.minorticks_off()
    finish(figure, path, 4)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--axis", action="append", choices=list(AXES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--no-memory", action="store_true", help="times only; the axes then have no memory"
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.table:
        print(table(results := read_json(OUTPUT)), machine(results), sep="\n\n")
        return 0
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        point = Point(**arguments.point)
        print(json.dumps(peaks(partial(contender_of, arguments.memory_of, point), case_of(point))))
        return 0
    base = Point(width=16, depth=1, batch=2, positions=4, rank=2) if arguments.smoke else Point()
    rounds, sizes = (2, SMOKE) if arguments.smoke else (arguments.rounds, AXES)
    results = {} if arguments.smoke else read_json(OUTPUT)
    axes = results.get("axes", {})
    for axis in arguments.axis or list(AXES):
        memory = not arguments.no_memory
        axes[axis] = sweep(
            axis, sizes[axis], base, rounds, threads=arguments.threads, memory=memory
        )
        axes = {name: axes[name] for name in AXES if name in axes}
        results = stamp(arguments.threads) | {"axes": axes}
        if not arguments.smoke:
            write_json(OUTPUT, results)
            plot(results, PICTURE)
    print(table(results), machine(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
