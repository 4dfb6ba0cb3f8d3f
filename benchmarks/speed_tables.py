"""Goals, ratios and tables of what speed.py has measured.

Goals come from the table "Numbers to reach" of the issue that asked for this benchmark, by kind of
model on a CPU, and one for all models on a card. They are held against the results when a table is
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
    "dp_sgd": "DP-SGD",
    "dp_sgd_graph": "DP-SGD, captured",
    "dp_kfc_inputs": "DP-KFC",
    "dp_kfc": "DP-KFC, both sides",
    "opacus_hooks": "Opacus hooks",
    "opacus_ghost": "Opacus ghost",
    "materialised": "K-FAC on materialised gradients",
}

KINDS = ("cnn", "mlp", "encoder", "card")
_OWN = {"cnn": 1.05, "mlp": 1.05, "encoder": 1.15, "card": 1.15}
_BASE = {"cnn": 1.4, "encoder": 1.2, "card": 1.25}
_HOOKS = {"cnn": 0.45, "encoder": 0.6, "card": 0.5}
_GHOST = dict.fromkeys(KINDS, 0.7)
# (numerator, denominator) to kind of model to what the ratio may be at most; {}: no goal
TIMES: dict[tuple[str, str], dict[str, float]] = {
    **{(name, "dp_sgd"): _OWN for name in OURS},
    ("dp_sgd", "plain"): _BASE,
    ("dp_sgd_graph", "plain"): {},
    ("dp_sgd_graph", "dp_sgd"): {},
    **{(name, "opacus_hooks"): _HOOKS for name in OURS},
    **{(name, "opacus_ghost"): _GHOST for name in OURS},
    **{(name, "plain"): {} for name in OURS},
    ("dp_sgd", "opacus_hooks"): {},
    ("dp_sgd", "opacus_ghost"): {},
    ("dp_kfc", "materialised"): {},
}
REFRESH = dict.fromkeys(KINDS, 0.03)
MEMORY = dict.fromkeys(KINDS, 1.25)

Entry = Mapping[str, Any]


def kind(model: str, card: bool = False) -> str:
    """What a goal is chosen by; a smoke model has none."""
    if model.startswith("smoke-"):
        return "smoke"
    if card:
        return "card"
    return (
        "cnn" if model.startswith(("mnist-cnn", "wrn-")) else "mlp" if model == "mlp" else "encoder"
    )


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
    blank = {
        name: {"title": title, "batch_size": size, "contenders": {}}
        for name, (title, size) in (expected or {}).items()
    }
    parts = _tables({**blank, **results["models"]})
    if results.get("kept"):
        parts += [
            "**With freed memory kept by the process** (`dpkfc.keep_freed_memory`), for all"
            " contenders alike"
        ]
        parts += _tables(results["kept"])
    if results.get("card"):
        cards = sorted(
            {entry["hardware"].get("card", "a card") for entry in results["card"].values()}
        )
        parts += [f"**On {' and '.join(cards)}**", *_tables(results["card"], card=True)]
    return "\n\n".join(parts)


def _tables(entries: Mapping[str, Entry], card: bool = False) -> list[str]:
    """Times, their ratios, refreshes and memory of some models."""
    if not entries:
        return []
    head = ["model (batch)", *TITLES.values()]
    times = [
        [_label(e), *(_milliseconds(e["contenders"].get(name, {})) for name in TITLES), _rounds(e)]
        for e in entries.values()
    ]
    parts = [
        "Milliseconds a step (median)",
        markdown([*head, "rounds"], times),
    ]
    with_goal, without = (
        [pair for pair, goals in TIMES.items() if bool(goals) is some] for some in (True, False)
    )
    parts += _ratios(
        entries,
        with_goal,
        card,
        "Ratios of time: median over rounds of the ratio within one [quartiles] (goal)",
    )
    parts += _ratios(entries, without, card, "Ratios of time without a goal")
    parts += _amortised(entries)
    parts += _refreshes(entries, card)
    if any(entry.get("memory") for entry in entries.values()):
        space = [
            [_label(e), *(mebibytes(e.get("memory", {}).get(name, {})) for name in TITLES)]
            for e in entries.values()
        ]
        parts += [
            "Peak memory above the start, MiB: of steps; of the first step and refreshes too,"
            " where that is more"
        ]
        parts += [markdown(head, space)]
        parts += _memory_ratios(entries, card)
    return parts


def _label(entry: Entry) -> str:
    return f"{entry['title']} ({entry['batch_size']})"


def _ratios(
    entries: Mapping[str, Entry], pairs: Sequence[tuple[str, str]], card: bool, heading: str
) -> list[str]:
    pairs = [pair for pair in pairs if any(find_ratio(entry, *pair) for entry in entries.values())]
    rows = [
        [
            entry["title"],
            *(
                _ratio(find_ratio(entry, *pair), TIMES[pair].get(kind(name, card)))
                for pair in pairs
            ),
        ]
        for name, entry in entries.items()
    ]
    # a goal is owed an answer
    rows = [row for row in rows if any(TIMES[pair] for pair in pairs) or set(row[1:]) != {"–"}]
    return (
        [heading, markdown(["model", *(name_ratio(*pair) for pair in pairs)], rows)]
        if pairs
        else []
    )


def _ratio(found: Mapping[str, Any] | None, goal: float | None) -> str:
    return "–" if found is None else judged(found["ratio"], goal, found.get("quartiles"))


def _amortised(entries: Mapping[str, Entry]) -> list[str]:
    """The ratios of steps to which a share of a refresh is added."""
    bottoms = ("dp_sgd", "plain", "opacus_hooks", "opacus_ghost")
    pairs = [(top, bottom) for bottom in bottoms for top in OURS]
    rows = []
    for entry in entries.values():
        found = [_describe_refreshes(entry, *pair) for pair in pairs]
        rows += [[entry["title"], *found]] if any(cell != "–" for cell in found) else []
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
    pairs = [(top, bottom) for bottom in ("plain", "opacus_hooks") for top in ("dp_sgd", *OURS)]
    rows = []
    for name, entry in entries.items():
        goals = {"plain": MEMORY.get(kind(name, card))}
        rows.append(
            [
                entry["title"],
                *(
                    _memory_ratio(entry.get("memory", {}), *pair, goals.get(pair[1]))
                    for pair in pairs
                ),
            ]
        )
    parts = ["Ratios of memory: of steps; of the highest peaks, where that is another (goal)"]
    parts += [markdown(["model", *(name_ratio(*pair) for pair in pairs)], rows)]
    whole = [
        [
            entry["title"],
            *(
                _whole_ratio(entry.get("memory", {}), name, MEMORY["encoder"])
                for name in ("dp_sgd", *OURS)
            ),
        ]
        for model, entry in entries.items()
        if model.endswith("-lora")
    ]
    head = ["model", *(name_ratio(name, "plain") for name in ("dp_sgd", *OURS))]
    if whole:
        parts += [
            "Adapters: the whole process at its highest, with the weights that are not trained"
            " (goal)"
        ]
        parts += [markdown(head, whole)]
    return parts


def _memory_ratio(memory: Mapping[str, Any], top: str, bottom: str, goal: float | None) -> str:
    if not all("extra_mib" in memory.get(name, {}) for name in (top, bottom)):
        return "–"
    own, base = memory[top], memory[bottom]
    steps, all_in = (
        x / max(y, 0.1)
        for x, y in ((own["extra_mib"], base["extra_mib"]), (highest(own), highest(base)))
    )
    return f"{steps:.2f}; " * (f"{steps:.2f}" != f"{all_in:.2f}") + judged(all_in, goal)


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
    steps = sorted(
        {timing["steps"] for timing in entry["contenders"].values() if "steps" in timing}
    )
    return " to ".join(str(n) for n in dict.fromkeys((steps[0], steps[-1]))) if steps else "–"


def mebibytes(entry: Mapping[str, Any]) -> str:
    """Peak of steps, and of all where that is more."""
    if "extra_mib" not in entry:
        return "n/a" if entry else "–"
    steps, all_in = (f"{mib:,.0f}" for mib in (entry["extra_mib"], highest(entry)))
    return steps if steps == all_in else f"{steps}; {all_in}"
