"""Run the auditors of jax-privacy and opake on the scores of `audit.py`: results/audit_peers.json.

In an environment of its own, without dpkfc: pip install jax-privacy opake opake-auditing.

    python benchmarks/audit_peers.py SCORES benchmarks/results/audit_peers.json
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor
from opake.auditing import canary_scores, one_run
from opake.auditing.types import CoinFlip

ALPHA, DELTA = 0.05, 1e-5


def audit(scores: np.ndarray, coins: np.ndarray) -> dict[str, float]:
    """Return the lower bounds on ε of each auditor."""
    theirs = CanaryScoreAuditor(scores[coins], scores[~coins])
    rows = np.arange(len(coins))
    flip = CoinFlip(len(coins), rows, coins, rows[coins], rows[~coins])
    estimate = one_run(canary_scores(scores, canary_indices=rows), coin_flip=flip)
    return {
        "jax-privacy, one run": theirs.epsilon_one_run(ALPHA, DELTA),
        "jax-privacy, one run, f-DP": theirs.epsilon_one_run_fdp(ALPHA, DELTA),
        "jax-privacy, Gaussian, all thresholds": theirs.epsilon_from_gdp(ALPHA, DELTA),
        "opake, one run": estimate.eps_delta().epsilon_at(delta=DELTA, significance=ALPHA),
        "opake, one run, Gaussian": estimate.gdp().epsilon_at(delta=DELTA, significance=ALPHA),
    }


def main() -> None:
    folder, output = map(Path, sys.argv[1:])
    rows = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            scores, coins = file["scores"], file["coins"]
        name, epsilon, kept = path.stem.rsplit("-", 2)
        begin = time.process_time()
        row = {"head": name, "target": float(epsilon), "noise_kept": float(kept)}
        row |= {"bounds": audit(scores, coins), "cpu_seconds": time.process_time() - begin}
        rows.append(row)
        print(row, flush=True)
    packages = {name: version(name) for name in ("jax-privacy", "opake", "opake-auditing")}
    content = {"packages": packages, "alpha": ALPHA, "delta": DELTA, "rows": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
