"""DP-FedSOFIM over ρ and β at ε = 2, beside DP-FedGD at the same η/ρ.

    python -m dpkfc_papers.studies.federated_ablation --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.federated_ablation --table  # the Markdown table

MNIST features, the paper's rate η = 0.1 and clipping norm 10, 70 rounds, a trusted server. With one
the distribution of a result does not depend on the number of clients, so there are two.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import RESULTS, interval, markdown, run_script

PATH = RESULTS / "federated_ablation.json"
RHOS = (0.1, 0.5, 1.0, 2.0)
BETAS = (0.7, 0.9, 0.95, 0.99)
TASK, EPSILON, ETA, CLIP, SEEDS = "mnist", 2.0, 0.1, 10.0, (0, 1, 2)


def run_of(rho: float, beta: float | None, seed: int) -> Any:
    """Return a run of DP-FedSOFIM, or without β of DP-FedGD at its η/ρ."""
    from dpkfc_papers.federated_runs import FederatedRun

    # A rate is η/ρ, the length of a step where the momentum is small.
    settings = {"rate": ETA / rho, "clip": CLIP}
    if beta is not None:
        settings |= {"rho": rho, "beta": beta}
    return FederatedRun(
        task=TASK,
        rule="fedgd" if beta is None else "sofim",
        settings=tuple(sorted(settings.items())),
        epsilon=EPSILON,
        clients=2,
        seed=seed,
    )


def runs() -> list[Any]:
    """Return all runs, one seed after the other."""
    return [run_of(rho, beta, seed) for seed in SEEDS for rho in RHOS for beta in (None, *BETAS)]


def execute(folder: Path, data_dir: str) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    import torch

    from dpkfc_papers.federated_features import load_features
    from dpkfc_papers.federated_runs import execute_run
    from dpkfc_papers.store import make_missing

    torch.set_num_threads(1)
    features = functools.cache(functools.partial(load_features, TASK, folder, data_dir))
    make_missing(PATH, lambda store: [runs()], lambda run: execute_run(run, features()))


def _values(store: Any, rho: float, beta: float | None) -> list[float]:
    records = [store.get(run_of(rho, beta, seed)) for seed in SEEDS]
    return [100 * record["accuracy"] for record in records if record]


def table() -> str:
    """Return test accuracies with 95 % intervals by ρ and β, and the largest gain; "" without."""
    from dpkfc_papers.store import Store

    store = Store(PATH)
    if not any(_values(store, rho, None) for rho in RHOS):
        return ""
    rows = []
    for rho in RHOS:
        cells = [interval(_values(store, rho, beta)) for beta in (*BETAS, None)]
        gains = [_gain(_values(store, rho, beta), _values(store, rho, None)) for beta in BETAS]
        rows.append([f"{rho:g}", *cells, f"{min(gains):+.2f} to {max(gains):+.2f}"])
    head = ["ρ", *(f"β = {beta:g}" for beta in BETAS), "DP-FedGD at η/ρ", "gain over it, points"]
    count = len(_values(store, RHOS[0], None))
    return f"{markdown(head, rows)}\n\nTest accuracy in percent at ε = {EPSILON:g}; {count} seeds."


def _gain(above: list[float], below: list[float]) -> float:
    return statistics.mean(above) - statistics.mean(below)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, execute, table))
