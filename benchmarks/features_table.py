"""The table of `benchmarks/features.py`: it needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "features.json"
TITLES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "pneumoniamnist": "PneumoniaMNIST",
    "breastmnist": "BreastMNIST",
}
MAPS = {
    "scattering": "scattering",
    "encoder2": "encoder, 2 × 2",
    "encoder4": "encoder, 4 × 4",
}
SCALES = {
    "synthetic": "synthetic images",
    "leaves": "dead leaves",
    "pink": "pink noise",
    "white": "white noise",
    "none": "one number for all",
}


def row_of(found: dict[str, Any]) -> str:
    """Return one line of the table."""
    maps, scales, *method = found["arm"].split(", ")
    features = " + ".join(MAPS[part] for part in maps.split("+"))
    if "mirrored" in method:
        features += ", mean with the mirrored image"
        method.remove("mirrored")
    epsilon = "∞" if math.isinf(found["epsilon"]) else f"{found['epsilon']:g}"
    hardware = "two cores" if found["device"] == "cpu" else found["device"].replace("NVIDIA ", "")
    cells = [
        TITLES[found["data"]],
        epsilon,
        features,
        SCALES[scales],
        ", ".join(method).replace("dp-sgd", "DP-SGD").replace("dp-kfc", "DP-KFC, natural"),
        f"{100 * found['mean']:.2f} ± {100 * found['interval']:.2f}",
        f"{found['rate']:g} × {found['epochs']}",
        f"{found['seconds a run']:.0f} ({hardware})",
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Return the table, "" without results."""
    if not RESULTS.exists():
        return ""
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    order = list(TITLES)
    rows.sort(key=lambda row: (order.index(row["data"]), row["epsilon"], -row["mean"]))
    head = ["data", "ε", "features", "scales from", "method", "test % (95 % interval)"]
    head += ["rate × epochs", "seconds a run"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --: | --- | --- | --- | --: | --: | --: |"]
    return "\n".join([*lines, *map(row_of, rows)])
