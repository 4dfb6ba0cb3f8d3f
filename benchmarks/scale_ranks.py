"""Several processes against several threads: the same logical batch, DP-KFC, on the same cores.

    python benchmarks/scale_ranks.py                    # three minutes on two idle cores
    python benchmarks/scale_ranks.py --only mnist-cnn --rounds 20
    python benchmarks/scale_ranks.py --smoke            # a tiny model; prints, writes nothing

All ways are alive at once and take one step a round in shuffled order; the figure is the median
over rounds of the ratio within a round. A step is a whole one: drawing, clipped sum, reduction
between processes (gloo), ledger, noise, update. A refresh rebuilds the preconditioner: probe and
eigenproblems.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from common import (
    RESULTS,
    compare_pairs,
    judged,
    markdown,
    measure_models,
    models_parser,
    summary,
)
from processes import seconds, start_processes

OUTPUT = RESULTS / "ranks.json"
WAYS = {
    "1 process, 1 thread": (1, 1),
    "1 process, 2 threads": (1, 2),
    "2 processes, 1 thread each": (2, 1),
}
BASE, RANKS = "1 process, 2 threads", "2 processes, 1 thread each"
GOAL = 0.9  # work per second: two processes over two threads
MODELS = ("mnist-cnn", "encoder-256", "wrn-16-4")


def make_case(name: str, smoke: bool) -> tuple[Any, Any]:
    """A model of the speed benchmark, with both sides whitened."""
    from dpkfc.curvature import KFAC
    from models import cases

    case = cases(smoke=smoke)[name]
    return case, KFAC(probe=case.probe(), probe_size=case.probe_size, every=10_000, sides="both")


def measure(name: str, case: Any, options: Namespace) -> dict[str, Any]:
    """Medians and ratios of one model."""
    taken: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in WAYS} for what in ("step", "refresh")
    }
    order = random.Random(0)
    with start_processes(WAYS, partial(make_case, name, options.smoke)) as pipes:
        for i in range(-2, options.rounds):
            for way in order.sample(list(WAYS), len(WAYS)):
                for what in ("step", "refresh") if i % 5 == 0 else ("step",):
                    found = seconds(pipes[way], what)
                    if i >= 0:
                        taken[what][way].append(found)
    found = {what: _compare(of) for what, of in taken.items()}
    return {"probe_size": case.probe_size, **found}


def _compare(taken: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians, and the work per second of each way over one process with two threads, round by
    round.
    """
    found: dict[str, Any] = {}
    for way, own in taken.items():
        within = compare_pairs(taken[BASE], own)
        found[way] = {
            **summary(own),
            "efficiency": within["ratio"],
            "quartiles": within["quartiles"],
        }
    return found


def table(results: dict[str, Any]) -> str:
    """One row a model and kind of work; steps and refreshes alike are the same work."""
    rows = []
    for name, entry in results["models"].items():
        for what in ("step", "refresh"):
            found, goal = entry[what], None if name.startswith("smoke-") else GOAL
            efficiency = judged(
                found[RANKS]["efficiency"], goal, found[RANKS]["quartiles"], least=True
            )
            rows.append(
                [
                    f"{entry['title']}, {what}",
                    *(f"{found[way]['median_ms']:.1f} ms" for way in WAYS),
                    efficiency,
                ]
            )
    return markdown(["", *WAYS, "work per second, 2 processes over 2 threads (goal)"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = models_parser(__doc__).parse_args(argv)
    return measure_models(options, MODELS, OUTPUT, measure, table)


if __name__ == "__main__":
    sys.exit(main())
