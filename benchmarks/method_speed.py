"""Time of one step of each method beside the step it is built on: the ratios of docs/methods, in
one run.

    python benchmarks/method_speed.py                    # both models (ten minutes, two idle cores)
    python benchmarks/method_speed.py --only mnist-cnn
    python benchmarks/method_speed.py --views            # 16 views an example, on WRN-16-4
    python benchmarks/method_speed.py --views --device cuda  # the same on a GPU
    python benchmarks/method_speed.py --smoke            # tiny models; prints, writes nothing

All contenders take one step a round in shuffled order, as in speed.py; the figure is the median
over rounds of the ratio within a round. Refreshes of a preconditioner are left out of the step and
timed by themselves.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    compare_pairs,
    hardware,
    judged,
    load_average,
    machine,
    make_parser,
    markdown,
    now,
    read_json,
    write_json,
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
VIEWS_GOALS = {"views": 1.5, "views on a card": 1.3}  # DP-NGD ÷ DP-SGD, both with so many views


def contenders(setting: Any, **common: Any) -> dict[str, Callable[[], Any]]:
    """Name to a function that builds the contender; `common` are settings of all."""
    import torch

    from contenders import CLIP, LR, Contender
    from dpkfc.curvature import GEP, KFAC, NGD, AdaDPS
    from dpkfc.postprocess import SOFIM, AdamBC, DiSK, LowPass

    case = setting.case
    probe = {"probe": case.probe(), "probe_size": case.probe_size}
    sgd, adam = (lambda p: torch.optim.SGD(p, LR)), (lambda p: torch.optim.AdamW(p, LR))

    def make(optimizer: Any = sgd, **settings: Any) -> Callable[[], Contender]:
        return lambda: _session(setting, optimizer, {"max_grad_norm": CLIP, **common, **settings})

    ngd = NGD(**probe, lambda_safe=0.05, lambda_base=1e-3, steps=10_000, every=10_000)
    gep = GEP(**probe, rank=min(50, case.probe_size // 2), groups=1, every=10_000)
    return {
        "DP-SGD": make(),
        "DP-Adam": make(adam),
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


def make_view_contenders(setting: Any, views: int, micro: int) -> dict[str, Callable[[], Any]]:
    """DP-SGD and DP-NGD whose examples count by the mean gradient of so many views."""
    several = {"augmentations": views, "max_physical_batch_size": micro}
    built = contenders(setting, **several)
    return {name: built[name] for name in ("DP-SGD", "DP-NGD")}


def _session(setting: Any, optimizer: Any, settings: dict[str, Any]) -> Any:
    from contenders import DELTA, NOISE, Contender
    from dpkfc.config import PrivacyConfig
    from dpkfc.data.augment import reflect_pad_crop_flip
    from dpkfc.session import Session

    model = setting.fresh()[0]
    config = PrivacyConfig(
        expected_batch_size=setting.case.batch_size, steps=10_000, sampler="fixed", **settings
    )
    plan = config.with_noise(NOISE, DELTA, setting.size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    augment = reflect_pad_crop_flip() if config.augmentations > 1 else None
    session = Session(plan, model, optimizer(parameters), setting.data, augment=augment)
    batches = session.batches()

    def step() -> None:
        session.step(next(batches), lambda m, batch: setting.case.losses(m, *batch))

    return Contender(step=step, close=session.close)


def measure(
    case: Any,
    rounds: int,
    pick: Callable[[Any], dict[str, Callable[[], Any]]],
    bases: Mapping[str, str],
    device: str = "cpu",
) -> dict[str, Any]:
    """Medians and ratios of one model; `first_ms` is the first step, the building of the
    preconditioner included.

    Args:
        case: the model.
        rounds: steps of each contender.
        pick: maps the setting of the model to what builds each contender.
        bases: contender to the one that it is compared with.
        device: where.
    """
    from contenders import setting_for, time_call

    live: dict[str, Any] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, build in pick(setting_for(case, Path(folder), device)).items():
            live[name] = build()
            first[name] = time_call(live[name].step, device)[0]
            live[name].step()
        taken = take_rounds(live, rounds, lambda own: time_call(own.step, device)[0])
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
    models = {
        name: entry
        for part in (*VIEWS_GOALS, "models")
        for name, entry in results.get(part, {}).items()
    }
    models = {name: models[name] for name in (*results["models"], *models)}
    rows = []
    for name in only:
        base, goal = PAIRS[name]
        goals = {
            m: goal if GOALS_ON.get(name, m) == m and not m.startswith("smoke-") else None
            for m in models
        }
        rows.append([name, base, *_cells(results, "models", models, name, goals)])
    rows = [row for row in rows if set(row[2:]) != {"–"}]
    for part, goal in VIEWS_GOALS.items() if "DP-NGD" in only else ():
        cells = _cells(
            results, part, models, "DP-NGD", {m: goal for m in models if m.startswith("wrn-16-4")}
        )
        views = next((entry["augmentations"] for entry in results.get(part, {}).values()), VIEWS)
        if part == "views" or set(cells) != {"–"}:
            where = part.removeprefix("views")
            rows.append(
                [
                    f"DP-NGD, {views} views of each example{where}",
                    f"DP-SGD, {views} views{where}",
                    *cells,
                ]
            )
    heads = [f"{entry['title']} (batch {entry['batch_size']})" for entry in models.values()]
    return markdown(["a step of", "over a step of", *heads], rows)


def _cells(
    results: Mapping[str, Any],
    part: str,
    models: Sequence[str],
    method: str,
    goals: Mapping[str, float | None],
) -> list[str]:
    found = {model: entry["methods"].get(method) for model, entry in results.get(part, {}).items()}
    return [_cell(found.get(model), goals.get(model)) for model in models]


def _cell(found: Mapping[str, Any] | None, goal: float | None) -> str:
    return "–" if found is None else judged(found["ratio"], goal, found["quartiles"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", metavar="MODEL")
    parser.add_argument(
        "--views",
        action="store_true",
        help=f"DP-NGD and DP-SGD with {VIEWS} views an example instead of all",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="cuda: with --views, kept apart in the results (default: cpu)",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.device != "cpu" and not arguments.views:
        parser.error("--device is for --views: the other pairs are measured on the CPU")
    import torch

    from models import cases

    torch.set_num_threads(arguments.threads)
    on_card = arguments.device != "cpu"
    known = cases(smoke=arguments.smoke, card=on_card)
    usual = (
        [f"wrn-16-4-views-{VIEWS}" if on_card else "wrn-16-4"]
        if arguments.views
        else ["mnist-cnn", "wrn-16-4"]
    )
    chosen = arguments.only or (["smoke-cnn"] if arguments.smoke else usual)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(known)}")
    results: dict[str, Any] = {"models": {}} | ({} if arguments.smoke else read_json(OUTPUT))
    part = ("views on a card" if on_card else "views") if arguments.views else "models"
    views, micro = (2, 4) if arguments.smoke else (VIEWS, MICRO)
    several = {"augmentations": views, "micro_batch": micro} if arguments.views else {}
    bases = (
        {"DP-NGD": "DP-SGD"}
        if arguments.views
        else {name: base for name, (base, _) in PAIRS.items()}
    )
    for name in chosen:
        case, load = known[name], load_average()
        several |= {"micro_batch": case.micro_batch or micro} if several else {}
        pick = (
            partial(make_view_contenders, views=views, micro=several["micro_batch"])
            if several
            else contenders
        )
        found = measure(
            case, 2 if arguments.smoke else arguments.rounds, pick, bases, arguments.device
        )
        entry = {
            "title": case.title,
            "batch_size": case.batch_size,
            "date": now(),
            "load_before": load,
            "hardware": hardware(arguments.threads, arguments.device),
            "methods": found,
        }
        results.setdefault(part, {})[name] = entry | several
        results |= {"date": now(), "hardware": hardware(arguments.threads)}
        if not arguments.smoke:
            write_json(OUTPUT, results)
    print(table(results), machine(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
