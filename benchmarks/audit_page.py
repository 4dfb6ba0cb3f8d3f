"""The table of the audits of linear heads in one run, and of other auditors on the same scores."""

from __future__ import annotations

from statistics import mean
from typing import Any

from common import RESULTS, markdown, read_json

PEERS = ("jax-privacy, one run, f-DP", "opake, one run", "opake, one run, Gaussian")


def table(results: dict[str, Any]) -> str:
    """Return one row a head and ε."""
    peers = read_json(RESULTS / "audit_peers.json") or {"rows": []}
    bounds = {(x["head"], x["target"], x["noise_kept"]): x["bounds"] for x in peers["rows"]}
    weak = {(x["head"], x["target"]): x for x in results["rows"] if x["noise_kept"] < 1}
    head = ["head", "ε", "canaries", "ε ≥ (95 %)", "of ε", "ceiling", "for every mechanism"]
    head += [*PEERS, "time", "further runs", "80 % of the noise"]
    rows = []
    for row in results["rows"]:
        if row["noise_kept"] < 1:
            continue
        name, epsilon, lower = row["head"], row["target"], row["gaussian_lower"]
        theirs = bounds.get((name, epsilon, 1.0), {})
        cells = [name, f"{epsilon:g}", f"{row['canaries']:,}", f"{lower:.2f}"]
        cells += [f"{lower / row['claimed_epsilon']:.0%}", f"{row['ceiling']:.2f}"]
        cells += [f"{row['epsilon_lower']:.2f}"]
        cells += [f"{theirs[peer]:.2f}" if peer in theirs else "–" for peer in PEERS]
        cells += [f"{row['time_ratio']:.2f}×", _describe_further(row)]
        other = weak.get((name, epsilon))
        caught = "–" if other is None else _count_caught([other, *other.get("further", [])])
        rows.append([*cells, caught])
    return markdown(head, rows)


def _describe_further(row: dict[str, Any]) -> str:
    lowers = [run["gaussian_lower"] for run in row.get("further", [])]
    if not lowers:
        return "–"
    return f"{mean(lowers):.2f} ({min(lowers):.2f} to {max(lowers):.2f}, {len(lowers)})"


def _count_caught(runs: list[dict[str, Any]]) -> str:
    return f"caught in {sum(not run['passed'] for run in runs)} of {len(runs)}"
