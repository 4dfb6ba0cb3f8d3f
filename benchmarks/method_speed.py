"""Time of one step of each method beside the step it is built on: the ratios of docs/methods, in
one run.

    python benchmarks/method_speed.py                    # both models (ten minutes, two idle cores)
    python benchmarks/method_speed.py --only mnist-cnn
    python benchmarks/method_speed.py --views            # 16 views an example, on WRN-16-4
    python benchmarks/method_speed.py --smoke            # a tiny model; prints, writes nothing

All contenders take one step a round in shuffled order, as in speed.py; the figure is the median
over rounds of the ratio within a round. Refreshes of a preconditioner are left out of the step and
timed by themselves.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    compare_pairs,
    judged,
    markdown,
    measure_models,
    models_parser,
)
from rounds import take_rounds

OUTPUT = RESULTS / "method_speed.json"
# method: (what it is compared with, goal or None); goals come from the issue that asked for the
# method
PAIRS: dict[str, tuple[str, float | None]] = {
    "DiSK, two points": ("DP-SGD", 2.05),
    "DiSK, one point": ("DP-SGD", 1.05),
    "DOPPLER": ("DP-SGD", 1.03),
    "SOFIM": ("DP-SGD", 1.03),
    "AdamBC": ("DP-Adam", 1.03),
    "DP-KFC": ("DP-SGD", None),
    "DP-NGD": ("DP-KFC", 1.8),
    "AdaDPS": ("DP-SGD", None),
    "GEP": ("DP-SGD", None),
}
GOALS_ON = {"DP-NGD": "wrn-16-4"}
VIEWS, MICRO = 16, 64  # views of an example, and rows in memory at once: four examples
VIEWS_GOAL = 1.5  # DP-NGD ÷ DP-SGD, both with so many views


def contenders(setting: Any, **common: Any) -> dict[str, Callable[[], Any]]:
    """Name to a function that builds the contender; `common` are settings of all."""
    import torch

    from contenders import Contender, open_session
    from dpkfc.curvature import GEP, KFAC, NGD, AdaDPS
    from dpkfc.postprocess import SOFIM, AdamBC, DiSK, LowPass

    case = setting.case
    probe = {"probe": case.probe(), "probe_size": case.probe_size}

    def make(optimizer: Any = torch.optim.SGD, **settings: Any) -> Callable[[], Contender]:
        def build() -> Contender:
            session, step = open_session(setting, optimizer, steps=10_000, **common, **settings)
            return Contender(step=step, close=session.close)

        return build

    ngd = NGD(**probe, lambda_safe=0.05, lambda_base=1e-3, steps=10_000, every=10_000)
    gep = GEP(**probe, rank=min(50, case.probe_size // 2), groups=1, every=10_000)
    return {
        "DP-SGD": make(),
        "DP-Adam": make(torch.optim.AdamW),
        "DiSK, two points": make(postprocess=(DiSK(kappa=0.7),)),
        "DiSK, one point": make(postprocess=(DiSK(kappa=0.7, mode="look_ahead"),)),
        "DOPPLER": make(postprocess=(LowPass(),)),
        "SOFIM": make(postprocess=(SOFIM(),)),
        "AdamBC": make(postprocess=(AdamBC(),)),
        "DP-KFC": make(preconditioner=KFAC(**probe, every=10_000, sides="both")),
        "DP-NGD": make(preconditioner=ngd, readout="natural"),
        "AdaDPS": make(preconditioner=AdaDPS(**probe, every=10_000)),
        "GEP": make(preconditioner=gep, clipping="embedding_residual"),
    }


def measure(_: str, case: Any, options: Namespace) -> dict[str, Any]:
    """Return medians and ratios of every method on one model."""
    bases = {name: base for name, (base, _) in PAIRS.items()}
    return {"methods": time_methods(case, options.rounds, contenders, bases)}


def measure_views(_: str, case: Any, options: Namespace) -> dict[str, Any]:
    """Return the same of DP-SGD and DP-NGD, whose examples count by the mean of several views."""
    from dpkfc.data.augment import reflect_pad_crop_flip

    views, micro = (2, 4) if options.smoke else (VIEWS, MICRO)

    def pick(setting: Any) -> dict[str, Callable[[], Any]]:
        augment = reflect_pad_crop_flip()
        built = contenders(
            setting, augmentations=views, max_physical_batch_size=micro, augment=augment
        )
        return {name: built[name] for name in ("DP-SGD", "DP-NGD")}

    found = time_methods(case, options.rounds, pick, {"DP-NGD": "DP-SGD"})
    return {"methods": found, "augmentations": views, "micro_batch": micro}


def time_methods(
    case: Any,
    rounds: int,
    pick: Callable[[Any], dict[str, Callable[[], Any]]],
    bases: Mapping[str, str],
) -> dict[str, Any]:
    """Medians and ratios of one model; `first_ms` is the first step, the building of the
    preconditioner included.

    Args:
        case: the model.
        rounds: steps of each contender.
        pick: maps the setting of the model to what builds each contender.
        bases: contender to the one that it is compared with.
    """
    from contenders import setting_for, time_call

    live: dict[str, Any] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, build in pick(setting_for(case, Path(folder))).items():
            live[name] = build()
            first[name] = time_call(live[name].step)[0]
            live[name].step()
        taken = take_rounds(live, rounds, lambda own: time_call(own.step)[0])
    seconds = {name: list(own.values()) for name, own in taken.items()}
    found: dict[str, Any] = {
        name: {
            "median_ms": round(1e3 * statistics.median(own), 2),
            "first_ms": round(1e3 * first[name], 1),
        }
        for name, own in seconds.items()
    }
    for name, base in bases.items():
        found[name] |= {"base": base, **compare_pairs(seconds[name], seconds[base])}
    return found


def table(results: dict[str, Any], only: Sequence[str] = tuple(PAIRS)) -> str:
    """One row a method, one column a model; the pair with views has a row in any case, as it is
    owed.
    """
    models, views = results["models"], results.get("views", {})
    known = {**models, **{name: entry for name, entry in views.items() if name not in models}}
    rows = []
    for name in only:
        base, goal = PAIRS[name]
        cells = [
            _cell(models.get(model), name, goal if GOALS_ON.get(name, model) == model else None)
            for model in known
        ]
        rows.append([name, base, *cells])
    if "DP-NGD" in only:
        cells = [_cell(views.get(model), "DP-NGD", VIEWS_GOAL) for model in known]
        rows.append([f"DP-NGD, {VIEWS} views of each example", f"DP-SGD, {VIEWS} views", *cells])
    heads = [f"{entry['title']} (batch {entry['batch_size']})" for entry in known.values()]
    return markdown(["a step of", "over a step of", *heads], rows)


def _cell(entry: Mapping[str, Any] | None, method: str, goal: float | None) -> str:
    if entry is None:
        return "–"
    found = entry["methods"][method]
    return judged(found["ratio"], goal, found["quartiles"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = models_parser(__doc__)
    parser.add_argument(
        "--views",
        action="store_true",
        help=f"DP-NGD and DP-SGD with {VIEWS} views an example instead of all",
    )
    options = parser.parse_args(argv)
    if options.views:
        return measure_models(options, ["wrn-16-4"], OUTPUT, measure_views, table, "views")
    return measure_models(options, ["mnist-cnn", "wrn-16-4"], OUTPUT, measure, table)


if __name__ == "__main__":
    sys.exit(main())
