"""Time and memory of one whole training step, this project beside plain SGD and Opacus. How: docs/speed.md.

python benchmarks/speed.py                     # all models, results/speed.json (half an hour on two idle cores)
python benchmarks/speed.py --only mlp          # one model; the others keep their last results
python benchmarks/speed.py --table             # the Markdown tables of what has been measured
python benchmarks/speed.py --device cuda --only bert-base --batch-size 32  # on a card
python benchmarks/speed.py --smoke             # tiny models, to see that it works; prints, writes nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    CardWatch,
    MemoryWatch,
    hardware,
    load_average,
    markdown,
    now,
    read_json,
    summary,
    write_json,
)

OUTPUT = RESULTS / "speed.json"
ENCODERS, EVERY = ("encoder-256", "encoder-512"), 50
_REFRESH_SHARE = 0.05
LARGE, LORA = ("bert-base", "gpt2-small"), ("bert-base-lora", "gpt2-small-lora")
BILLION = "llama-1b-lora"

_HOOKS, _GHOST = {"mnist-cnn": 0.45, **dict.fromkeys(ENCODERS, 0.6)}, dict.fromkeys(("mnist-cnn", "mlp", *ENCODERS), 0.7)
_OWN = {"mnist-cnn": 1.05, "mlp": 1.05, **dict.fromkeys(ENCODERS, 1.15)}
_BASE = {"mnist-cnn": 1.4, **dict.fromkeys(ENCODERS, 1.2), **dict.fromkeys(LARGE, 1.35)}
_PLAIN = dict.fromkeys((*LORA, BILLION), 1.15)
OURS = ("dp_kfc_inputs", "dp_kfc")  # by default, and as in the paper

# name: (numerator, denominator, {model: target})
TIME_RATIOS: dict[str, tuple[str, str, dict[str, float]]] = {
    f"{top} / {bottom}": (top, bottom, targets)
    for top, bottom, targets in (
        *((name, "opacus_hooks", _HOOKS) for name in OURS),
        *((name, "opacus_ghost", _GHOST) for name in OURS),
        *((name, "dp_sgd", _OWN) for name in OURS),
        ("dp_sgd", "plain", _BASE),
        *((name, "plain", _PLAIN) for name in OURS),
        ("dp_sgd", "opacus_hooks", {}),
        ("dp_sgd", "opacus_ghost", dict.fromkeys(LARGE, 0.85)),
        ("dp_kfc", "materialised", {}),
    )
}
# name: (numerator, denominator, target for every model; the large ones have a target of their own beside plain)
MEMORY_RATIOS: dict[str, tuple[str, str, float | None]] = {
    f"{top} / {bottom}": (top, bottom, target)
    for top in (*OURS, "dp_sgd")
    for bottom, target in (("plain", 1.25), ("opacus_hooks", 0.5))
}

# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_times(case: Any, names: Sequence[str], warmup: int, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Every contender takes one step a round, in an order that is shuffled anew each round."""
    from contenders import CONTENDERS, setting_for, timed

    entries: dict[str, Any] = {}
    live: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_for(case, Path(folder), device)
        for name in names:
            try:
                live[name] = CONTENDERS[name][1](setting)
                live[name].step()
            except Exception as error:  # a peer that refuses a model is a result, not a failure of the benchmark
                if name in ("plain", "dp_sgd", *OURS):
                    raise
                live.pop(name, None)
                entries[name] = {"not_available": f"{type(error).__name__}: {str(error)[:300]}"}
        gc.collect()
        gc.freeze()
        seconds: dict[str, list[float]] = {name: [] for name in live}
        processor: dict[str, list[float]] = {name: [] for name in live}
        order = random.Random(0)
        for number in range(warmup + rounds):
            for name in order.sample(list(live), len(live)):
                built = live[name].built_at()
                taken = timed(live[name].step, device)
                if number >= warmup and live[name].built_at() == built:  # a step that refreshed is not a plain step
                    seconds[name].append(taken[0])
                    processor[name].append(taken[1])
            gc.collect()
        refreshes = {n: [timed(c.refresh, device)[0] for _ in range(3)] for n, c in live.items() if c.refresh is not None}
        averaged = {n: [timed(c.averaged, device)[0] for _ in range(4)][1:] for n, c in live.items() if c.averaged is not None}
        for contender in live.values():
            contender.close()
        gc.unfreeze()
    for name, contender in live.items():
        entries[name] = {**summary(seconds[name]), "processor_ms": round(1e3 * statistics.median(processor[name]), 3)}
        if contender.note:
            entries[name]["note"] = contender.note
        if name in refreshes:
            refresh = 1e3 * statistics.median(refreshes[name])
            entries[name]["refresh_ms"] = round(refresh, 1)
            entries[name]["amortised_ms"] = round(entries[name]["median_ms"] + refresh / EVERY, 3)
            entries[name]["refresh_share"] = _share(refresh, entries[name]["median_ms"])
        if name in averaged:
            refresh = 1e3 * statistics.median(averaged[name])
            entries[name]["averaged_refresh_ms"] = round(refresh, 1)
            entries[name]["averaged_refresh_share"] = _share(refresh, entries[name]["median_ms"])
    paired = _paired(seconds)
    return {"contenders": {name: entries[name] for name in names}, "paired": paired}


def _share(refresh: float, step: float) -> float:
    """Of the time, that one refresh in so many steps takes."""
    return round(refresh / (refresh + EVERY * step), 4)


def _paired(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median over rounds of the ratio within one round: what a slow drift of the machine cannot move."""
    found = {}
    for name, (top, bottom, _) in TIME_RATIOS.items():
        if seconds.get(top) and seconds.get(bottom) and len(seconds[top]) == len(seconds[bottom]):
            pairs = zip(seconds[top], seconds[bottom], strict=True)
            found[name] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def measure_memory(case_name: str, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Each contender alone in a process of its own, one after another."""
    found = {}
    for name in names:
        command = [
            sys.executable,
            __file__,
            "--memory-of",
            name,
            "--only",
            case_name,
            "--threads",
            str(arguments.threads),
        ]
        command += ["--ffn-ratio", str(arguments.ffn_ratio), "--device", arguments.device] + ["--smoke"] * arguments.smoke
        command += [] if arguments.batch_size is None else ["--batch-size", str(arguments.batch_size)]
        # Freed blocks go back to the system at once, for all alike, so that resident memory is live memory.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[name] = json.loads(done.stdout.splitlines()[-1])
        else:
            found[name] = {"not_available": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return found


def memory_of(name: str, case: Any, steps: int = 4, device: str = "cpu") -> dict[str, Any]:
    """Peak of the first step (with the first refresh, where there is one) and of the steps after it."""
    import torch

    from contenders import CONTENDERS, setting_for

    with tempfile.TemporaryDirectory() as folder:
        contender = CONTENDERS[name][1](setting_for(case, Path(folder), device))
        _wake_libraries(device)
        gc.collect()
        watch = MemoryWatch() if device == "cpu" else CardWatch()
        contender.step()
        first = watch.peak()
        gc.collect()
        watch.reset()
        for _ in range(steps):
            contender.step()
        later = watch.peak()
        contender.close()
    return {"first_step_mib": first, "extra_mib": later, "threads": torch.get_num_threads()}


def _wake_libraries(device: str) -> None:
    """Kernels and thread pools load before the watch begins."""
    import torch

    x = torch.randn(256, 256, requires_grad=True, device=device)
    image, kernel = (torch.randn(size, requires_grad=True, device=device) for size in ((2, 4, 8, 8), (4, 4, 3, 3)))
    (x @ x).sum().backward()
    torch.nn.functional.conv2d(image, kernel).sum().backward()
    torch.bmm(x.detach().view(4, 64, 256), x.detach().view(4, 256, 64))
    torch.linalg.eigh(x.detach() @ x.detach().T)
    torch.linalg.qr(x.detach())
    torch.fft.ifft2(torch.fft.fft2(image.detach()))


# -- ratios and tables -------------------------------------------------------------------------------------------------


def _judged(value: float, target: float | None) -> dict[str, Any]:
    return {"ratio": round(value, 3), "target": target, "met": None if target is None else value <= target}


def ratios(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios of a model beside their targets."""
    times, memory = entry["contenders"], entry.get("memory", {})
    found: dict[str, Any] = {"time": {}, "memory": {}}
    for ratio, (top, bottom, targets) in TIME_RATIOS.items():
        if all("median_ms" in times.get(c, {}) for c in (top, bottom)):
            base, target = times[bottom]["median_ms"], targets.get(name)
            found["time"][ratio] = _judged(times[top]["median_ms"] / base, target)
            if ratio in entry.get("paired", {}):
                found["time"][ratio]["paired"] = entry["paired"][ratio]
            if "amortised_ms" in times[top]:
                amortised = _judged(times[top]["amortised_ms"] / base, target)
                found["time"][ratio] |= {"amortised": amortised["ratio"], "amortised_met": amortised["met"]}
    for ratio, (top, bottom, limit) in MEMORY_RATIOS.items():
        if all("extra_mib" in memory.get(c, {}) for c in (top, bottom)):
            base = max(memory[bottom]["extra_mib"], 0.1)
            with_refresh = max(memory[top]["first_step_mib"], memory[top]["extra_mib"]) / base
            limit = 1.25 if bottom == "plain" and name == BILLION else limit
            limit = 1.3 if bottom == "plain" and name in LARGE + LORA else limit
            limit = None if name.startswith("smoke-") else limit
            found["memory"][ratio] = _judged(memory[top]["extra_mib"] / base, limit)
            found["memory"][ratio]["with_refresh"] = round(with_refresh, 3)
    return found


def table(results: Mapping[str, Any]) -> str:
    """The Markdown tables of a results file."""
    from contenders import CONTENDERS

    models = results["models"]
    head = ["model (batch)", *(label for label, _ in CONTENDERS.values())]
    speed, space = [], []
    for entry in models.values():
        label = f"{entry['title']} ({entry['batch_size']})"
        times, memory = entry["contenders"], entry.get("memory", {})
        speed.append([label, *(_milliseconds(times.get(name, {})) for name in CONTENDERS)])
        space.append([label, *(_mebibytes(memory.get(name, {})) for name in CONTENDERS)])
    parts = ["Milliseconds a step (median; + a refresh of the preconditioner)", markdown(head, speed)]
    refreshes = [row for entry in models.values() for name in OURS if (row := _refreshes(entry, name)) is not None]
    if refreshes:
        share = "share of the time"
        of = ["model", "sides", "the whole probe, ms", share, "an eighth of it, averaged, ms", f"{share} (≤ 5 %)"]
        parts += [f"A refresh in {EVERY} steps", markdown(of, refreshes)]
    if any(entry.get("memory") for entry in models.values()):
        parts += ["Peak memory above the start, MiB (steps; + with a refresh)", markdown(head, space)]
    kinds = {"time": TIME_RATIOS, "memory": MEMORY_RATIOS}
    for kind, names in kinds.items():
        rows = [
            [_named(*names[ratio][:2]), *(_ratio(entry["ratios"][kind].get(ratio)) for entry in models.values())]
            for ratio in names
            if any(ratio in entry["ratios"][kind] for entry in models.values())
        ]
        if rows:
            heading = f"Ratios of {kind} (target){f'; amortised over {EVERY} steps a refresh' * (kind == 'time')}"
            parts += [heading, markdown(["ratio", *(entry["title"] for entry in models.values())], rows)]
    if results.get("kept"):
        labels = [f"{entry['title']} ({entry['batch_size']})" for entry in results["kept"].values()]
        times = [[_milliseconds(entry["contenders"].get(name, {})) for name in CONTENDERS] for entry in results["kept"].values()]
        heading = "The same with freed memory kept by the process (`dpkfc.keep_freed_memory`), for all alike"
        parts += [heading, markdown(head, [[label, *row] for label, row in zip(labels, times, strict=True)])]
    if results.get("card"):
        cards = sorted({entry["hardware"].get("card", "a card") for entry in results["card"].values()})
        parts += [f"On {' and '.join(cards)}", table({"models": results["card"]})]
    return "\n\n".join(parts)


def _named(top: str, bottom: str) -> str:
    """A ratio in the words of the tables."""
    from contenders import CONTENDERS

    return f"{CONTENDERS[top][0]} ÷ {CONTENDERS[bottom][0]}"


def _refreshes(entry: Mapping[str, Any], name: str) -> list[str] | None:
    kfac = entry["contenders"].get(name, {})
    if "averaged_refresh_ms" not in kfac:
        return None
    shares = [f"{100 * kfac[name]:.1f} %" for name in ("refresh_share", "averaged_refresh_share")]
    met = "✓" if kfac["averaged_refresh_share"] <= _REFRESH_SHARE else "✗"
    sides = "inputs" if name == "dp_kfc_inputs" else "both"
    whole, part = (f"{kfac[of]:,.0f}" for of in ("refresh_ms", "averaged_refresh_ms"))
    return [entry["title"], sides, whole, shares[0], part, f"{shares[1]} {met}"]


def _milliseconds(entry: Mapping[str, Any]) -> str:
    if "median_ms" not in entry:
        return "n/a" if entry else "–"
    refresh = f" + {entry['refresh_ms']:,.0f}" if "refresh_ms" in entry else ""
    return f"{entry['median_ms']:,.1f}{refresh}"


def _mebibytes(entry: Mapping[str, Any]) -> str:
    if "extra_mib" not in entry:
        return "n/a" if entry else "–"
    more = entry["first_step_mib"] > 1.05 * entry["extra_mib"] + 1
    return f"{entry['extra_mib']:,.0f}" + (f" + {entry['first_step_mib'] - entry['extra_mib']:,.0f}" if more else "")


def _ratio(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    target = "" if entry["target"] is None else f" (≤ {entry['target']:g} {'✓' if entry['met'] else '✗'})"
    return f"{entry['ratio']:.2f}{target}" + (f"; {entry['amortised']:.2f}" if "amortised" in entry else "")


# -- command line ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="MODEL", help="a model; may be given several times")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="contenders to run (default: all)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 15)")
    parser.add_argument("--warmup", type=int, help="rounds before timing begins (default: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="with dpkfc.keep_freed_memory for every contender; time only")
    parser.add_argument("--device", default="cpu", help="cuda: the same on a card, kept apart in the results (default: cpu)")
    parser.add_argument("--batch-size", type=int, help="instead of each model's own, as a card needs larger ones")
    parser.add_argument("--ffn-ratio", type=int, default=4, help="width of the encoders' feed-forward layers over d")
    parser.add_argument("--no-memory", action="store_true", help="time only; memory stays as it was taken last")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models and few rounds; prints, writes only to --output"
    )
    parser.add_argument("--table", action="store_true", help="print the tables of the results and measure nothing")
    parser.add_argument("--output", type=Path, help=f"results file (default: {OUTPUT.name} in benchmarks/results)")
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (2 if arguments.smoke else 15)
    arguments.warmup = arguments.warmup if arguments.warmup is not None else (0 if arguments.smoke else 2)
    arguments.no_memory |= arguments.kept
    if arguments.threads < 1 or arguments.rounds < 1 or (arguments.batch_size or 1) < 1:
        parser.error("--threads, --rounds and --batch-size must be at least 1")
    if arguments.kept and arguments.device != "cpu":
        parser.error("--kept is about memory of the host: leave --device out")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    path = arguments.output or OUTPUT
    if arguments.table:
        results = read_json(path)
        print(table(results) if results else f"nothing measured yet: {path.name} does not exist")
        return 0
    import torch

    from contenders import CONTENDERS
    from dpkfc import keep_freed_memory
    from models import cases

    torch.set_num_threads(arguments.threads)
    if arguments.kept and not keep_freed_memory():
        print("freed memory cannot be kept here: no glibc, or the environment has settings of its own", file=sys.stderr)
        return 2
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no card here: leave --device out, or install a build with CUDA", file=sys.stderr)
        return 2
    known = cases(smoke=arguments.smoke, ffn_ratio=arguments.ffn_ratio)
    if arguments.batch_size is not None:
        known = {name: replace(case, batch_size=arguments.batch_size) for name, case in known.items()}
    chosen, names = arguments.only or list(known), arguments.contenders or list(CONTENDERS)
    for wanted, there in ((chosen, known), (names, CONTENDERS)):
        if unknown := [x for x in wanted if x not in there]:
            print(f"unknown: {', '.join(unknown)}; choose from {', '.join(there)}", file=sys.stderr)
            return 2
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of, known[chosen[0]], device=arguments.device)))
        return 0
    writes = not arguments.smoke or arguments.output is not None
    results: dict[str, Any] = {"models": {}} | (read_json(path) if writes else {})
    part = "kept" if arguments.kept else "models" if arguments.device == "cpu" else "card"
    for name in chosen:
        before = results.setdefault(part, {}).get(name, {})
        results[part][name] = measured(known[name], names, arguments, before.get("memory"))
        results |= {"date": now(), "hardware": hardware(arguments.threads)} if part != "card" else {}
        if writes:
            write_json(path, results)
    print(table({"models": {name: results[part][name] for name in chosen}}))
    return 0


def measured(
    case: Any, names: Sequence[str], arguments: argparse.Namespace, memory: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything about one model, with the machine and its load in it; `memory` is what an earlier run took."""
    from contenders import CLIP, NOISE

    print(f"{case.name}: {case.title}, batch {case.batch_size}", file=sys.stderr, flush=True)
    idle = (os.cpu_count() or 1) - (load_average() or 0)
    if idle < arguments.threads - 0.5 and not arguments.smoke:
        print(f"warning: about {max(0.0, idle):.1f} idle cores for {arguments.threads} threads; repeat on a quiet machine",
              file=sys.stderr)  # fmt: skip
    entry: dict[str, Any] = {
        "title": case.title,
        "batch_size": case.batch_size,
        "parameters": sum(p.numel() for p in case.build().parameters()),
        "date": now(),
        "hardware": hardware(arguments.threads, arguments.device),
        "load_before": load_average(),
        "setting": {
            "sampler": "fixed",
            "optimizer": "SGD",
            "max_grad_norm": CLIP,
            "noise_multiplier": NOISE,
            "every": EVERY,
        },
        **measure_times(case, names, arguments.warmup, arguments.rounds, arguments.device),
        "load_after": load_average(),
    }
    if not arguments.no_memory:
        alive = [n for n in names if "median_ms" in entry["contenders"][n]]
        alive = [n for n in alive if n in ("plain", "dp_kfc_inputs")] if arguments.smoke else alive
        entry["memory"] = measure_memory(case.name, alive, arguments)
    elif memory:
        entry["memory"] = memory
    return {**entry, "ratios": ratios(case.name, entry)}


if __name__ == "__main__":
    sys.exit(main())
