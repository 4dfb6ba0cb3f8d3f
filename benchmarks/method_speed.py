"""Time of one step of each method beside the step it is built on: the ratios of docs/methods, in one run.

    python benchmarks/method_speed.py                    # both models, results/method_speed.json (ten minutes, two idle cores)
    python benchmarks/method_speed.py --only mnist-cnn
    python benchmarks/method_speed.py --smoke            # tiny models; prints, writes nothing

All contenders take one step a round in shuffled order, as in speed.py; the figure is the median over rounds of the ratio
within a round. Refreshes of a preconditioner are left out of the step and timed by themselves.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, hardware, load_average, markdown, now, read_json, write_json

OUTPUT = RESULTS / "method_speed.json"
# method: (what it is compared with, goal or None); goals are those of the issue that asked for the method
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


def contenders(setting: Any) -> dict[str, Callable[[], Any]]:
    """Name to a function that builds the contender."""
    import torch

    from contenders import CLIP, LR, Contender
    from dpkfc.curvature import GEP, KFAC, NGD, AdaDPS
    from dpkfc.postprocess import SOFIM, AdamBC, DiSK, LowPass

    case = setting.case
    probe = {"probe": case.probe(), "probe_size": case.probe_size}
    sgd, adam = (lambda p: torch.optim.SGD(p, LR)), (lambda p: torch.optim.AdamW(p, LR))

    def of(optimizer: Any = sgd, **settings: Any) -> Callable[[], Contender]:
        return lambda: _session(setting, optimizer, {"max_grad_norm": CLIP, **settings})

    ngd = NGD(**probe, lambda_safe=0.05, lambda_base=1e-3, steps=10_000, every=10_000)
    gep = GEP(**probe, rank=min(50, case.probe_size // 2), groups=1, every=10_000)
    return {
        "DP-SGD": of(),
        "DP-Adam": of(adam),
        "DiSK, two points": of(postprocess=(DiSK(kappa=0.7),)),
        "DiSK, one point": of(postprocess=(DiSK(kappa=0.7, mode="look_ahead"),)),
        "DOPPLER": of(postprocess=(LowPass(),)),
        "SOFIM": of(postprocess=(SOFIM(),)),
        "AdamBC": of(postprocess=(AdamBC(),)),
        "DP-KFC": of(preconditioner=KFAC(**probe, every=10_000, sides="both")),
        "DP-NGD": of(preconditioner=ngd, readout="natural"),
        "AdaDPS": of(preconditioner=AdaDPS(**probe, every=10_000)),
        "GEP": of(preconditioner=gep, clipping="embedding_residual"),
    }


def _session(setting: Any, optimizer: Any, settings: dict[str, Any]) -> Any:
    from contenders import DELTA, NOISE, Contender
    from dpkfc.config import PrivacyConfig
    from dpkfc.session import Session

    model = setting.fresh()[0]
    config = PrivacyConfig(expected_batch_size=setting.case.batch_size, steps=10_000, sampler="fixed", **settings)
    plan = config.with_noise(NOISE, DELTA, setting.size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    session = Session(plan, model, optimizer(parameters), setting.data)
    batches = session.batches()

    def step() -> None:
        session.step(next(batches), lambda m, batch: setting.case.losses(m, *batch))

    return Contender(step=step, close=session.close)


def measured(case: Any, rounds: int) -> dict[str, Any]:
    """Medians and ratios of one model; `first_ms` is the first step, the building of the preconditioner included."""
    from contenders import setting_for, timed

    live: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_for(case, Path(folder))
        for name, build in contenders(setting).items():
            live[name] = build()
            first[name] = timed(live[name].step)[0]
            live[name].step()
            seconds[name] = []
        gc.collect()
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(list(live), len(live)):
                seconds[name].append(timed(live[name].step)[0])
            gc.collect()
        for contender in live.values():
            contender.close()
    found: dict[str, Any] = {
        name: {"median_ms": round(1e3 * statistics.median(taken), 2), "first_ms": round(1e3 * first[name], 1)}
        for name, taken in seconds.items()
    }
    for name, (base, goal) in PAIRS.items():
        within = sorted(a / b for a, b in zip(seconds[name], seconds[base], strict=True))
        goal = goal if GOALS_ON.get(name, case.name) == case.name else None
        ratio = statistics.median(within)
        found[name] |= {
            "base": base,
            "ratio": round(ratio, 3),
            "quartiles": [round(within[len(within) // 4], 3), round(within[(3 * len(within)) // 4], 3)],
            "goal": goal,
            "met": None if goal is None else ratio <= goal,
        }
    return found


def table(results: dict[str, Any], only: Sequence[str] = tuple(PAIRS)) -> str:
    """One row a method, one column a model."""
    models = results["models"]
    rows = []
    for name in only:
        cells = [name, PAIRS[name][0]]
        for entry in models.values():
            found = entry["methods"][name]
            low, high = found["quartiles"]
            goal = "" if found["goal"] is None else f" (≤ {found['goal']:g} {'✓' if found['met'] else '✗'})"
            cells.append(f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}]{goal}")
        rows.append(cells)
    heads = [f"{entry['title']} (batch {entry['batch_size']})" for entry in models.values()]
    return markdown(["step of", "over that of", *heads], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    import torch

    from models import cases

    torch.set_num_threads(arguments.threads)
    known = cases(smoke=arguments.smoke)
    chosen = arguments.only or (["smoke-cnn"] if arguments.smoke else ["mnist-cnn", "wrn-16-4"])
    results: dict[str, Any] = {"models": {}} if arguments.smoke else (read_json(OUTPUT) or {"models": {}})
    for name in chosen:
        case = known[name]
        load = load_average()
        found = measured(case, 2 if arguments.smoke else arguments.rounds)
        results["models"][name] = {
            "title": case.title, "batch_size": case.batch_size, "date": now(), "load_before": load, "methods": found,
        }  # fmt: skip
        results |= {"date": now(), "hardware": hardware(arguments.threads)}
        if not arguments.smoke:
            write_json(OUTPUT, results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
