"""Goals, ratios and tables of what speed.py has measured.

Goals come from the tables of the issues on speed, by kind of model on a CPU, and one for all models
on a card. They are held against the results when a table is
made, so that old results are judged by today's goals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import judged, markdown
from memory import highest

EVERY = 50  # steps from one refresh to the next
OURS = ("dp_kfc_inputs", "dp_kfc")  # by default, and as in the paper
TITLES = {
    "plain": "plain SGD",
    "by_hand": "written by hand, unsafe",
    "dp_sgd": "DP-SGD",
    "dp_sgd_graph": "DP-SGD, captured",
    "dp_sgd_compiled": "DP-SGD, compiled",
    "dp_kfc_inputs": "DP-KFC",
    "dp_kfc": "DP-KFC, both sides",
    "opacus_hooks": "Opacus hooks",
    "opacus_ghost": "Opacus ghost",
    "opake": "opake",
    "materialised": "K-FAC on materialised gradients",
}

KINDS = ("cnn", "mlp", "wrn", "encoder", "large", "lora", "card")
_OWN = {**dict.fromkeys(KINDS, 1.05), "card": 1.15}
_BASE = {**dict.fromkeys(KINDS, 1.2), "large": 1.15, "lora": 1.02, "card": 1.25}
_COMPILED = {**_BASE, "cnn": 1.0}
_HOOKS = {"cnn": 0.45, "wrn": 0.45, "encoder": 0.6, "large": 0.6, "card": 0.5}
_GHOST = dict.fromkeys(KINDS, 0.7)
# (numerator, denominator) to kind of model to what the ratio may be at most; {}: no goal
TIMES: dict[tuple[str, str], dict[str, float]] = {
    **{(name, "dp_sgd"): _OWN for name in OURS},
    ("dp_sgd", "plain"): _BASE,
    ("dp_sgd_graph", "plain"): _BASE,
    ("dp_sgd_graph", "dp_sgd"): {},
    ("by_hand", "plain"): {},
    ("dp_sgd", "by_hand"): {},
    ("dp_sgd_compiled", "plain"): _COMPILED,
    **{(name, "opacus_hooks"): _HOOKS for name in OURS},
    **{(name, "opacus_ghost"): _GHOST for name in OURS},
    **{(name, "plain"): {} for name in OURS},
    ("dp_sgd", "opacus_hooks"): {},
    ("dp_sgd", "opacus_ghost"): {},
    ("dp_sgd", "opake"): {},
    ("dp_kfc", "materialised"): {},
}
REFRESH = dict.fromkeys(KINDS, 0.03)
MEMORY = dict.fromkeys(KINDS, 1.25)
FIRST_STEP = 3.0  # steps of plain SGD

Entry = Mapping[str, Any]


def kind(model: str, card: bool = False) -> str:
    """What a goal is chosen by; a smoke model has none."""
    if model.startswith("smoke-"):
        return "smoke"
    if card:
        return "card"
    if model.endswith("-lora"):
        return "lora"
    own = {"mnist-cnn": "cnn", "mlp": "mlp", "wrn-16-4": "wrn", "encoder-256": "encoder"}
    return own.get(model, "large")


def name_ratio(top: str, bottom: str) -> str:
    """A ratio in the words of the tables."""
    return f"{TITLES[top]} ÷ {TITLES[bottom]}"


def find_ratio(entry: Entry, top: str, bottom: str) -> dict[str, Any] | None:
    """Median over rounds of the ratio within one round and its quartiles; None where the pair was
    not timed in one run.
    """
    found: dict[str, Any] | None = entry.get("paired", {}).get(f"{top} / {bottom}")
    return found


def every_model() -> dict[str, tuple[str, int]]:
    """Name to title and batch of all models of the benchmark, measured or not."""
    from models import cases

    return {name: (case.title, case.batch_size) for name, case in cases().items()}


def table(results: Mapping[str, Any], expected: Mapping[str, tuple[str, int]] | None = None) -> str:
    """The Markdown tables of a results file.

    Args:
        results: of speed.py.
        expected: models of which a row is printed in any case: name to title and batch.
    """
    entries = {}
    for name, (title, size) in (expected or {}).items():
        entries[name] = {"title": title, "batch_size": size, "contenders": {}}
    parts = _tables(entries | results["models"])
    if results.get("kept"):
        parts.append(
            "**With freed memory kept by the process** (`dpkfc.keep_freed_memory`), for all"
            " contenders alike"
        )
        parts += _tables(results["kept"])
    if results.get("card"):
        found = results["card"].values()
        cards = sorted({entry["hardware"].get("card", "a card") for entry in found})
        parts += [f"**On {' and '.join(cards)}**", *_tables(results["card"], card=True)]
    return "\n\n".join(parts)


def _tables(entries: Mapping[str, Entry], card: bool = False) -> list[str]:
    """Times, their ratios, refreshes and memory of some models."""
    if not entries:
        return []
    head = ["model (batch)", *TITLES.values()]
    times, space = [], []
    for entry in entries.values():
        label = f"{entry['title']} ({entry['batch_size']})"
        taken, memory = entry["contenders"], entry.get("memory", {})
        milliseconds = [_milliseconds(taken.get(name, {})) for name in TITLES]
        times.append([label, *milliseconds, _rounds(entry)])
        space.append([label, *(mebibytes(memory.get(name, {})) for name in TITLES)])
    parts = ["Milliseconds a step (median)", markdown([*head, "rounds"], times)]
    parts += _ratios(
        entries,
        [pair for pair, goals in TIMES.items() if goals],
        card,
        "Ratios of time: median over rounds of the ratio within one [quartiles] (goal)",
    )
    without = [pair for pair, goals in TIMES.items() if not goals]
    parts += _ratios(entries, without, card, "Ratios of time without a goal")
    parts += _amortised(entries)
    parts += _first_steps(entries)
    parts += _refreshes(entries, card)
    if any(entry.get("memory") for entry in entries.values()):
        parts += [
            "Peak memory above the start, MiB: of steps; of the first step and refreshes too,"
            " where that is more",
            markdown(head, space),
        ]
        parts += _memory_ratios(entries, card)
    return parts


def _ratios(
    entries: Mapping[str, Entry], pairs: Sequence[tuple[str, str]], card: bool, heading: str
) -> list[str]:
    pairs = [pair for pair in pairs if any(find_ratio(entry, *pair) for entry in entries.values())]
    if not pairs:
        return []
    has_goal = any(TIMES[pair] for pair in pairs)
    rows = []
    for name, entry in entries.items():
        cells = []
        for pair in pairs:
            found, goal = find_ratio(entry, *pair), TIMES[pair].get(kind(name, card))
            cells.append(judged(found["ratio"], goal, found.get("quartiles")) if found else "–")
        # A goal is owed an answer.
        if has_goal or set(cells) != {"–"}:
            rows.append([entry["title"], *cells])
    return [heading, markdown(["model", *(name_ratio(*pair) for pair in pairs)], rows)]


def _amortised(entries: Mapping[str, Entry]) -> list[str]:
    """The ratios of steps to which a share of a refresh is added."""
    bottoms = ("dp_sgd", "plain", "opacus_hooks", "opacus_ghost")
    pairs = [(top, bottom) for bottom in bottoms for top in OURS]
    rows = []
    for entry in entries.values():
        cells = [_describe_refreshes(entry, *pair) for pair in pairs]
        if set(cells) != {"–"}:
            rows.append([entry["title"], *cells])
    head = ["model", *(name_ratio(*pair) for pair in pairs)]
    return [f"The same with a refresh in {EVERY} steps", markdown(head, rows)] if rows else []


def _describe_refreshes(entry: Entry, top: str, bottom: str) -> str:
    found, own = find_ratio(entry, top, bottom), _refreshes_of(entry).get(top)
    if found is None or own is None:
        return "–"
    return f"{found['ratio'] / (1 - own['share']):.2f}"


def _refreshes_of(entry: Entry) -> Mapping[str, Any]:
    found: Mapping[str, Any] = entry.get("refreshes", {}).get("contenders", {})
    return found


def _first_steps(entries: Mapping[str, Entry]) -> list[str]:
    """First steps, with checks, captures and preconditioners, in later steps of plain SGD."""
    rows = []
    for entry in entries.values():
        taken = entry["contenders"]
        firsts = {name: taken.get(name, {}).get("first_step_ms") for name in TITLES}
        if not firsts["plain"]:
            continue
        row = [entry["title"]]
        for name, first in firsts.items():
            ratio = first and first / taken["plain"]["median_ms"]
            row.append(
                judged(ratio, FIRST_STEP if name in ("dp_sgd", "dp_sgd_graph") else None)
                if ratio
                else "–"
            )
        rows.append(row)
    words = "The first step of each in this process, in later steps of plain SGD (goal)"
    return [words, markdown(["model", *TITLES.values()], rows)] if rows else []


def _refreshes(entries: Mapping[str, Entry], card: bool) -> list[str]:
    """What refreshes take of the time: the first, and each later one."""
    rows = []
    for model, entry in entries.items():
        for name, sides in zip(OURS, ("inputs", "both"), strict=True):
            own = _refreshes_of(entry).get(name)
            if own:
                goal = REFRESH.get(kind(model, card))
                met = "" if goal is None else f" {'✓' if own['share'] <= goal else '✗'}"
                low, high = (100 * end for end in own["share_range"])
                share = f"{100 * own['share']:.1f} % [{low:.1f}, {high:.1f}]{met}"
                times = (f"{own[of]:,.0f}" for of in ("first_ms", "refresh_ms"))
                rows.append(
                    [entry["title"], sides, *times, share, _describe_place(entry["refreshes"])]
                )
    head = ["model", "sides", "the first, ms", "a later one, ms"]
    head += [f"share of the time in {EVERY} steps (≤ {100 * REFRESH['cnn']:.0f} %)", "measured on"]
    return ["Refreshes of the preconditioner", markdown(head, rows)] if rows else []


def _describe_place(taken: Mapping[str, Any]) -> str:
    of, day = taken["hardware"], taken["date"][:10]
    return (
        f"{of['cpu']}, {of['torch_cpu_capability']}, threads: {of['threads']}, {day}, load"
        f" {taken['load_before']}"
    )


def _memory_ratios(entries: Mapping[str, Entry], card: bool) -> list[str]:
    private = ("dp_sgd", *OURS)
    rows, whole = [], []
    for name, entry in entries.items():
        memory, goal = entry.get("memory", {}), MEMORY.get(kind(name, card))
        cells = [_memory_ratio(memory, top, "plain", goal) for top in private]
        cells += [_memory_ratio(memory, top, "opacus_hooks", None) for top in private]
        rows.append([entry["title"], *cells])
        if name.endswith("-lora"):
            ratios = [_whole_ratio(memory, top, MEMORY["encoder"]) for top in private]
            whole.append([entry["title"], *ratios])
    over_plain = [name_ratio(top, "plain") for top in private]
    over_hooks = [name_ratio(top, "opacus_hooks") for top in private]
    parts = [
        "Ratios of memory: of steps (goal); of the highest peaks, where that is another",
        markdown(["model", *over_plain, *over_hooks], rows),
    ]
    if whole:
        parts += [
            "Adapters: the whole process at its highest, with the weights that are not trained"
            " (goal)",
            markdown(["model", *over_plain], whole),
        ]
    return parts


def _memory_ratio(memory: Mapping[str, Any], top: str, bottom: str, goal: float | None) -> str:
    if not all("extra_mib" in memory.get(name, {}) for name in (top, bottom)):
        return "–"
    own, base = memory[top], memory[bottom]
    steps = own["extra_mib"] / max(base["extra_mib"], 0.1)
    highest_peaks = f"{highest(own) / max(highest(base), 0.1):.2f}"
    text = judged(steps, goal)
    return text if highest_peaks == f"{steps:.2f}" else f"{text}; {highest_peaks}"


def _whole_ratio(memory: Mapping[str, Any], name: str, goal: float) -> str:
    """Of all that a process holds, over plain training; older results do not know what it held at
    its start.
    """
    if not all("start_mib" in memory.get(of, {}) for of in (name, "plain")):
        return "–"
    own, base = (memory[of]["start_mib"] + highest(memory[of]) for of in (name, "plain"))
    return judged(own / base, goal)


def _milliseconds(entry: Mapping[str, Any]) -> str:
    if "median_ms" not in entry:
        return "n/a" if entry else "–"
    return f"{entry['median_ms']:,.1f}"


def _rounds(entry: Entry) -> str:
    """How many steps stand behind a median."""
    steps = [timing["steps"] for timing in entry["contenders"].values() if "steps" in timing]
    if not steps:
        return "–"
    least, most = min(steps), max(steps)
    return f"{least} to {most}" if least < most else f"{least}"


def mebibytes(entry: Mapping[str, Any]) -> str:
    """Peak of steps, and of all where that is more."""
    if "extra_mib" not in entry:
        return "n/a" if entry else "–"
    steps, all_in = (f"{mib:,.0f}" for mib in (entry["extra_mib"], highest(entry)))
    return steps if steps == all_in else f"{steps}; {all_in}"
