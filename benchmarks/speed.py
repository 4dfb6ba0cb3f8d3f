"""Time and memory of one whole training step, this project beside plain SGD and Opacus. How:
docs/speed.md.

python benchmarks/speed.py                     # all models (half an hour on two idle cores)
python benchmarks/speed.py --only mlp          # one model; the others keep their last results
python benchmarks/speed.py --memory-only --only llama-1b-lora  # no times; needs 24 GiB of memory
python benchmarks/speed.py --table             # the Markdown tables of what has been measured
python benchmarks/speed.py --device cuda --only vit-b16 wrn-16-4-views-16  # on a GPU
python benchmarks/speed.py --device cuda --only bert-base --batch-size 32
python benchmarks/speed.py --smoke             # tiny models; prints, writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    compare_pairs,
    load_average,
    machine,
    make_parser,
    read_json,
    stamp,
    summary,
    write_json,
)
from memory import peaks, run_alone
from rounds import take_rounds
from speed_tables import EVERY, OURS, TIMES, every_model, table

OUTPUT = RESULTS / "speed.json"

# -- measuring -------------------------------------------------------------------------------------


def measure_times(
    case: Any, names: Sequence[str], warmup: int, rounds: int, device: str = "cpu"
) -> dict[str, Any]:
    """Every contender takes one step a round, in an order that is shuffled anew each round."""
    from contenders import CONTENDERS, setting_for, time_call

    entries: dict[str, Any] = {}
    live: dict[str, Any] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_for(case, Path(folder), device)
        for name in names:
            try:
                live[name] = CONTENDERS[name](setting)
                first[name], _ = time_call(live[name].step, device)
            # A peer that refuses a model is a result, not a failure of the benchmark.
            except Exception as error:
                if name in ("plain", "dp_sgd", *OURS):
                    raise
                live.pop(name, None)
                entries[name] = {"not_available": f"{type(error).__name__}: {str(error)[:300]}"}
        taken = take_rounds(live, rounds, lambda own: time_call(own.step, device), warmup)
    seconds: dict[str, dict[int, float]] = {}
    for name, contender in live.items():
        seconds[name] = {number: clock for number, (clock, _) in taken[name].items()}
        processor = [busy for _, busy in taken[name].values()]
        entries[name] = {
            **summary(list(seconds[name].values())),
            "processor_ms": _median_ms(processor),
            "first_step_ms": round(1e3 * first[name], 1),
        }
        entries[name] |= {"note": contender.note} if contender.note else {}
    return {"contenders": {name: entries[name] for name in names}, "paired": _ratios(seconds)}


def measure_refreshes(
    case: Any, names: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the first refresh and later ones beside steps, and what the later ones take of the
    time with `EVERY` steps: of the processor's time, which other work disturbs least, or of a
    card's by the clock.
    """
    from contenders import CONTENDERS, setting_for, time_call

    found, device = {}, arguments.device
    for name in set(OURS) & set(names):
        with tempfile.TemporaryDirectory() as folder:
            own = CONTENDERS[name](setting_for(case, Path(folder), device))
            own.step()
            first = time_call(partial(own.refresh, first=True), device)
            taken = [
                (time_call(own.refresh, device), time_call(own.step, device)) for _ in range(5)
            ]
            own.close()
        clock = int(device == "cpu")
        shares = [
            refresh[clock] / (refresh[clock] + EVERY * step[clock]) for refresh, step in taken[1:]
        ]
        found[name] = {
            "first_ms": round(1e3 * first[0], 1),
            "refresh_ms": _median_ms([refresh[0] for refresh, _ in taken[1:]], 1),
            "share": round(statistics.median(shares), 4),
            "share_range": [round(end(shares), 4) for end in (min, max)],
        }
    return stamp(arguments.threads, device) | {"contenders": found}


def _median_ms(seconds: Sequence[float], digits: int = 3) -> float:
    return round(1e3 * statistics.median(seconds), digits)


def _ratios(seconds: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """The ratios of `TIMES` over the rounds in which neither contender refreshed."""
    found = {}
    for top, bottom in TIMES:
        own, base = seconds.get(top, {}), seconds.get(bottom, {})
        if both := [number for number in own if number in base]:
            found[f"{top} / {bottom}"] = compare_pairs(
                [own[number] for number in both], [base[number] for number in both]
            )
    return found


def measure_memory(
    case_name: str, names: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Each contender alone in a process of its own, one after another."""
    given = ["--only", case_name, "--threads", str(arguments.threads), "--device", arguments.device]
    given += ["--smoke"] * arguments.smoke
    given += [] if arguments.batch_size is None else ["--batch-size", str(arguments.batch_size)]
    return {name: run_alone([__file__, "--memory-of", name, *given]) for name in names}


# -- command line ----------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="MODEL",
        help="models to measure (default: all)",
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help="contenders to run (default: all)"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 15)")
    parser.add_argument("--warmup", type=int, help="rounds before timing begins (default: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--kept",
        action="store_true",
        help="with dpkfc.keep_freed_memory for every contender; time only",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="cuda: the same on a card, kept apart in the results (default: cpu)",
    )
    parser.add_argument(
        "--batch-size", type=int, help="instead of each model's own, as a card needs larger ones"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--no-memory",
        action="store_true",
        help="time only; memory stays as it was taken last, with its date",
    )
    which.add_argument(
        "--refreshes-only",
        action="store_true",
        help="refreshes only; steps and memory stay as they were taken last",
    )
    which.add_argument(
        "--memory-only",
        action="store_true",
        help="memory only, for models that are too slow or too large to time here: one contender at"
        " a time, each in a process that holds the model once; times stay as they were taken last",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models and few rounds; prints, writes only to --output",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the tables of the results and measure nothing"
    )
    parser.add_argument(
        "--output", type=Path, help=f"results file (default: {OUTPUT.name} in benchmarks/results)"
    )
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (2 if arguments.smoke else 15)
    arguments.warmup = (
        arguments.warmup if arguments.warmup is not None else (0 if arguments.smoke else 2)
    )
    arguments.no_memory |= arguments.kept
    if arguments.threads < 1 or arguments.rounds < 1 or (arguments.batch_size or 1) < 1:
        parser.error("--threads, --rounds and --batch-size must be at least 1")
    if arguments.kept and arguments.memory_only:
        parser.error("--kept is about time: leave --memory-only out")
    if arguments.kept and arguments.device != "cpu":
        parser.error("--kept is about memory of the host: leave --device out")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    path = arguments.output or OUTPUT
    if arguments.table:
        results, every = read_json(path), every_model() if path == OUTPUT else {}
        text = f"{table(results, every)}\n\n{machine(results)}"
        print(text if results else f"nothing measured yet: {path.name} does not exist")
        return 0
    import torch

    from contenders import CONTENDERS
    from dpkfc import keep_freed_memory
    from models import cases

    torch.set_num_threads(arguments.threads)
    if arguments.kept and not keep_freed_memory():
        print(
            "freed memory cannot be kept here: no glibc, or the environment has settings of its"
            " own",
            file=sys.stderr,
        )
        return 2
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no card here: leave --device out, or install a build"
            " with CUDA",
            file=sys.stderr,
        )
        return 2
    known = cases(smoke=arguments.smoke, card=arguments.device != "cpu")
    if arguments.batch_size is not None:
        known = {
            name: replace(case, batch_size=arguments.batch_size) for name, case in known.items()
        }
    chosen, names = arguments.only or list(known), arguments.contenders or list(CONTENDERS)
    for wanted, there in ((chosen, known), (names, CONTENDERS)):
        if unknown := [x for x in wanted if x not in there]:
            print(f"unknown: {', '.join(unknown)}; choose from {', '.join(there)}", file=sys.stderr)
            return 2
    if arguments.memory_of:
        print(
            json.dumps(peaks(CONTENDERS[arguments.memory_of], known[chosen[0]], arguments.device))
        )
        return 0
    writes = not arguments.smoke or arguments.output is not None
    results: dict[str, Any] = {"models": {}} | (read_json(path) if writes else {})
    part = "kept" if arguments.kept else "models" if arguments.device == "cpu" else "card"
    for name in chosen:
        before = results.setdefault(part, {}).get(name, {})
        results[part][name] = measure(known[name], names, arguments, before)
        if part != "card" and not arguments.refreshes_only:
            results |= stamp(arguments.threads)
        if writes:
            write_json(path, results)
    shown = {"models": {}, part: {name: results[part][name] for name in chosen}}
    print(table(shown), machine(shown), sep="\n\n")
    return 0


def measure(
    case: Any, names: Sequence[str], arguments: argparse.Namespace, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything about one model, with the machine and its load in it; what is not measured stays
    as it was `before`.
    """
    print(f"{case.name}: {case.title}, batch {case.batch_size}", file=sys.stderr, flush=True)
    entry: dict[str, Any] = {"title": case.title, "batch_size": case.batch_size}
    if arguments.memory_only or arguments.refreshes_only:
        entry = {"contenders": {}, **before, **entry}
    else:
        entry |= _time_entry(case, names, arguments)
    if not arguments.memory_only:
        entry["refreshes"] = measure_refreshes(case, names, arguments)
    if not arguments.no_memory and not arguments.refreshes_only:
        refused = [name for name, of in entry["contenders"].items() if "not_available" in of]
        alive = [
            n
            for n in names
            if n not in refused and (not arguments.smoke or n in ("plain", "dp_kfc_inputs"))
        ]
        return {
            **entry,
            "memory_taken": stamp(arguments.threads, arguments.device),
            "memory": measure_memory(case.name, alive, arguments),
        }
    return {
        **entry,
        **{name: before[name] for name in ("memory", "memory_taken") if name in before},
    }


def _time_entry(case: Any, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    from contenders import CLIP, NOISE

    before = stamp(arguments.threads, arguments.device)
    idle = (os.cpu_count() or 1) - (before["load_before"] or 0)
    if idle < arguments.threads - 0.5 and not arguments.smoke:
        print(
            f"warning: about {max(0.0, idle):.1f} idle cores for {arguments.threads} threads;"
            " repeat on a quiet machine",
            file=sys.stderr,
        )
    setting = {
        "sampler": "fixed",
        "optimizer": "SGD",
        "max_grad_norm": CLIP,
        "noise_multiplier": NOISE,
        "every": EVERY,
    }
    return {
        "parameters": sum(p.numel() for p in case.build().parameters()),
        **before,
        "setting": setting,
        **measure_times(case, names, arguments.warmup, arguments.rounds, arguments.device),
        "load_after": load_average(),
    }


if __name__ == "__main__":
    sys.exit(main())
