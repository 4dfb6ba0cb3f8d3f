"""DP-FedSOFIM over ρ and β at ε = 2, beside DP-FedGD at the same η/ρ.

    python -m dpkfc_papers.studies.federated_ablation --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.federated_ablation --table  # the Markdown table

MNIST features, the paper's rate η = 0.1 and clipping norm 10, 70 rounds, a trusted server.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from dpkfc_papers.store import Store
from dpkfc_papers.studies.federated_variations import execute, read_accuracies, sweep_run
from dpkfc_papers.studies.harness import RESULTS, compare_means, interval, markdown, run_script

PATH = RESULTS / "federated_ablation.json"
RHOS = (0.1, 0.5, 1.0, 2.0)
BETAS = (0.7, 0.9, 0.95, 0.99)
EPSILON, ETA, SEEDS = 2.0, 0.1, (0, 1, 2)


def runs_of(rho: float, beta: float | None) -> list[Any]:
    """Return the runs of DP-FedSOFIM, or without β of DP-FedGD at its η/ρ."""
    rule = "fedgd" if beta is None else "sofim"
    return [sweep_run(rule, ETA, seed, rho=rho, beta=beta, epsilon=EPSILON) for seed in SEEDS]


def runs() -> list[Any]:
    """Return all runs."""
    return [run for rho in RHOS for beta in (None, *BETAS) for run in runs_of(rho, beta)]


def table() -> str:
    """Return test accuracies with 95 % intervals by ρ and β, and the largest gain; "" without."""
    store = Store(PATH)
    if not all(map(store.get, runs())):
        return ""
    rows = []
    for rho in RHOS:
        found = {beta: read_accuracies(store, runs_of(rho, beta)) for beta in (*BETAS, None)}
        cells = map(interval, found.values())
        gains = [compare_means(found[beta], found[None])[0] for beta in BETAS]
        rows.append([f"{rho:g}", *cells, f"{min(gains):+.2f} to {max(gains):+.2f}"])
    head = ["ρ", *(f"β = {beta:g}" for beta in BETAS), "DP-FedGD at η/ρ", "gain over it, points"]
    below = f"Test accuracy in percent at ε = {EPSILON:g}; {len(SEEDS)} seeds."
    return f"{markdown(head, rows)}\n\n{below}"


if __name__ == "__main__":
    sys.exit(run_script(__doc__, partial(execute, path=PATH, listed=lambda store: [runs()]), table))
