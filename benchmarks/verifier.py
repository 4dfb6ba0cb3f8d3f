"""Compare ε of `dpkfc-verify` with dp-accounting's PLD on 200 settings, and time it on 12 folders.

Writes results/verifier.json. PLD takes a finer grid than by default, on which its own error is
small. About ten minutes; PLD's values of an earlier run are kept, unless --again is given.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np

from common import RESULTS, read_json, stamp, write_json

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "verifier"), str(ROOT)]

from dpkfc_verify.accountant import Composition, epsilon, read_releases  # noqa: E402
from tests.verifier.folders import forged_folders, good_folders  # noqa: E402

OUTPUT = RESULTS / "verifier.json"
DELTA = 1e-5
MOST = 6e7  # losses on the grid of PLD


def settings(number: int = 200) -> list[tuple[float, float, int]]:
    """Return rates, noise multipliers and numbers of steps, over the whole range as logarithms."""
    draws = np.random.default_rng(56).random((number, 3))
    points = []
    for rate, noise, steps in draws:
        q = 1.0 if rate > 0.9 else 10 ** (-5 + 5 * rate / 0.9)
        points.append((float(q), float(0.3 * (100 / 0.3) ** noise), max(1, int(10 ** (6 * steps)))))
    return points


def account_by_pld(q: float, noise: float, steps: int, about: float, tilt: float) -> float | None:
    """Return ε by PLD on a grid that adds below 1e-4 (of ε above 10), None if it is too fine."""
    if q == 1:
        # Releases of everybody's data are together one release.
        noise, steps = noise / math.sqrt(steps), 1
    h = math.sqrt(8e-4 * max(1.0, about / 10) / (steps * (1 + tilt)))
    h = min(h, max(about, 1e-4) / 32)
    if (20 / noise + 1 / noise**2) / h > MOST or about / h > MOST:
        return None
    make = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism
    losses = make(noise, sampling_prob=q, value_discretization_interval=h)
    return float(losses.self_compose(steps).get_epsilon_for_delta(DELTA))


def time_folders() -> list[dict[str, Any]]:
    """Return what a process of the verifier says of each prepared folder, and how long it takes."""
    rows = []
    words, environment = [sys.executable, "-m", "dpkfc_verify"], {"PYTHONPATH": str(sys.path[0])}
    with tempfile.TemporaryDirectory() as place:
        good = good_folders(Path(place))
        forged = {name: folder for name, (folder, _) in forged_folders(Path(place), good).items()}
        for name, folder in (good | forged).items():
            before, begin = os.times(), time.perf_counter()
            done = subprocess.run([*words, folder], capture_output=True, env=environment)
            seconds, after = time.perf_counter() - begin, os.times()
            spent = after.children_user + after.children_system
            spent -= before.children_user + before.children_system
            row = {"folder": name, "is_forged": name in forged, "holds": done.returncode == 0}
            rows.append(row | {"seconds": seconds, "cpu_seconds": spent})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    known: dict[tuple[float, float, int], float | None] = {}
    if "--again" not in sys.argv:
        for row in (read_json(OUTPUT) or {"points": []})["points"]:
            if row["pld"] is not None:
                known[(row["q"], row["noise"], row["steps"])] = row["pld"]
    folders = time_folders()
    points: list[dict[str, Any]] = []
    for q, noise, steps in settings():
        event: dict[str, Any] = {"type": "GaussianDpEvent", "noise_multiplier": noise}
        if q < 1:
            event = {"type": "PoissonSampledDpEvent", "sampling_probability": q, "event": event}
        begin = time.process_time()
        found = epsilon([(event, steps)], DELTA)
        seconds = time.process_time() - begin
        row = {"q": q, "noise": noise, "steps": steps, "epsilon": found, "cpu_seconds": seconds}
        if (q, noise, steps) not in known:
            tilt = Composition(read_releases([(event, steps)]), DELTA, 1).tilt
            known[(q, noise, steps)] = account_by_pld(q, noise, steps, found, tilt)
        row["pld"] = known[(q, noise, steps)]
        points.append(row)
        print(row, flush=True)
    gaps = [(p["epsilon"] - p["pld"]) / max(1, p["pld"]) for p in points if p["pld"] is not None]
    summary = {
        "points": len(points),
        "compared": len(gaps),
        "largest_gap": max(gaps),
        "smallest_gap": min(gaps),
        "largest_epsilon": max(p["epsilon"] for p in points),
        "largest_cpu_seconds": max(p["cpu_seconds"] for p in points),
        "folders_judged_rightly": sum(x["holds"] != x["is_forged"] for x in folders),
        "largest_cpu_seconds_of_a_folder": max(x["cpu_seconds"] for x in folders),
    }
    print(summary)
    content = {"summary": summary, "folders": folders, "points": points}
    write_json(OUTPUT, stamp(1) | content)


if __name__ == "__main__":
    main()
