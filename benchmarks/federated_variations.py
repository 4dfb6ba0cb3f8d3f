"""DP-FedSOFIM beside DP-FedGD at the same η/ρ, where its paper has no table: over learning rates,
and with few clients a round.

    python benchmarks/federated_variations.py --data-dir DIR    # resumable
    python benchmarks/federated_variations.py --table           # the Markdown tables

Features of MNIST, ε = 10, ρ = 0.5 and β = 0.9 as in the paper. Rates: clipping norm 10. Few
clients: 200 clients, client-level ε against the released models; the server samples each of them
with rate q. There each method's rate is chosen on a validation split.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import claims
from common import RESULTS, hardware, interval, markdown, now
from federated_ablation import run_script

PATH = RESULTS / "federated_variations.json"
SEEDS, TUNED_WITH, DELTA, ROUNDS = (0, 1, 2), 100, 1e-5, 70
RHO, BETA, EPSILON = 0.5, 0.9, 10.0
RULES = {"sofim": "DP-FedSOFIM", "fedgd": "DP-FedGD at η/ρ"}
# Learning rates η; the step is η/ρ long where the momentum is small.
SWEPT = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CLIENTS, CLIENT_RATES, CLIP = 200, (0.1, 0.3), 0.3
GRID = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Variation:
    """A run with sampled clients.

    Attributes:
        rule: in `RULES`.
        eta: learning rate; DP-FedGD has η/ρ.
        client_rate: q.
        seed: of initial weights and partition; noise is never seeded.
        evaluate_on: "validation" or "test".
    """

    rule: str
    eta: float
    client_rate: float
    seed: int
    evaluate_on: str = "test"

    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result."""
        constants = {"clip": CLIP, "epsilon": EPSILON, "clients": CLIENTS, "rounds": ROUNDS}
        return asdict(self) | constants

    @functools.cached_property
    def hash(self) -> str:
        """Return sixteen hexadecimal digits of a SHA-256."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def sweep_run(rule: str, eta: float, seed: int) -> Any:
    """Return a run of the sweep over learning rates."""
    from dpkfc_papers.federated_study import FederatedRun

    settings = {"rate": eta / RHO, "clip": 10.0}
    if rule == "sofim":
        settings |= {"rho": RHO, "beta": BETA}
    return FederatedRun(
        task="mnist",
        rule=rule,
        settings=tuple(sorted(settings.items())),
        epsilon=EPSILON,
        clients=2,
        seed=seed,
    )


def best_eta(store: Any, client_rate: float, rule: str) -> float | None:
    """Return the rate that is best on the validation split; None before all have been run."""
    rows = {
        eta: store.get(Variation(rule, eta, client_rate, TUNED_WITH, "validation")) for eta in GRID
    }
    if not all(rows.values()):
        return None
    return max(rows, key=lambda eta: rows[eta]["accuracy"])


def test_runs(store: Any, client_rate: float, rule: str) -> list[Variation]:
    """Return the runs of the best rate on the test set; none before the grid is complete."""
    eta = best_eta(store, client_rate, rule)
    return [] if eta is None else [Variation(rule, eta, client_rate, seed) for seed in SEEDS]


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield lists of runs; a list may need the results of those before it."""
    yield [sweep_run(rule, eta, seed) for seed in SEEDS for eta in SWEPT for rule in RULES]
    for client_rate in CLIENT_RATES:
        yield [
            Variation(rule, eta, client_rate, TUNED_WITH, "validation")
            for eta in GRID
            for rule in RULES
        ]
        yield [run for rule in RULES for run in test_runs(store, client_rate, rule)]


def _plan(run: Variation, records: int) -> Any:
    from dpkfc.federated import ClientLevel, FederatedConfig, FedGD, FedSOFIM, TrustedServer

    config = FederatedConfig(
        clients=CLIENTS,
        rounds=ROUNDS,
        expected_records=records,
        privacy=ClientLevel(TrustedServer()),
        rule=FedSOFIM(run.eta, RHO, BETA) if run.rule == "sofim" else FedGD(run.eta / RHO),
        max_grad_norm=CLIP,
        client_rate=run.client_rate,
    )
    return config.calibrate(EPSILON, DELTA)


def execute_variation(run: Variation, features: Any) -> dict[str, Any]:
    """Train, and return the record of the run as plain values."""
    import torch
    from torch import nn

    from dpkfc.app.models import seeded
    from dpkfc.federated.simulation import federate, iid, parts
    from dpkfc_papers.federated_study import loss_fn

    x, y = features.train
    evaluation = features.validation
    if run.evaluate_on == "test":
        x = torch.cat([x, features.validation[0]])
        y = torch.cat([y, features.validation[1]])
        evaluation = features.test
    plan = _plan(run, len(y))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(evaluation[0]).argmax(1) == evaluation[1]).float().mean())

    result = federate(
        plan,
        seeded(lambda: nn.Linear(x.shape[1], 10), run.seed),
        loss_fn,
        parts((x, y), iid(len(y), CLIENTS, run.seed)),
        evaluate=accuracy,
        every=10,
    )
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": result.history[-1][2],
        "curve": [round(score, 4) for _, _, score in result.history],
        "measured_on": run.evaluate_on,
        "epsilon": result.server.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "steps": len(result.records),
        "seconds": round(result.seconds, 1),
        "hardware": hardware(1),
        "date": now(),
    }


def execute(folder: Path, data_dir: str) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    import torch

    from dpkfc.app.tuning.runs import Store
    from dpkfc_papers.federated_study import execute_run, load_features

    torch.set_num_threads(1)
    features = load_features("mnist", folder, data_dir)
    with Store(PATH) as store:
        for runs in stages(store):
            left = [run for run in runs if store.get(run) is None]
            for number, run in enumerate(left, start=1):
                is_variation = isinstance(run, Variation)
                function = execute_variation if is_variation else execute_run
                record = function(run, features)
                store.put(run, record)
                print(
                    f"{number}/{len(left)} {run.describe()}: {record['accuracy']:.4f}", flush=True
                )


# --------------------------------------------------------------------------------------------------
# Tables and the picture.


def _accuracies(store: Any, runs: list[Any]) -> list[float]:
    return [100 * row["accuracy"] for run in runs if (row := store.get(run))]


def swept(store: Any, rule: str) -> dict[float, list[float]]:
    """Return test accuracies in percent by learning rate."""
    return {
        eta: _accuracies(store, [sweep_run(rule, eta, seed) for seed in SEEDS]) for eta in SWEPT
    }


def _rate_table(store: Any) -> str:
    found = {rule: swept(store, rule) for rule in RULES}
    rows = [[label, *map(interval, found[rule].values())] for rule, label in RULES.items()]
    gains = [claims.compared(found["sofim"][eta], found["fedgd"][eta]) for eta in SWEPT]
    rows.append(["difference", *(f"{gain:+.2f} ± {error:.2f}" for gain, error in gains)])
    head = ["MNIST, ε = 10: test %", *(f"η = {eta:g}" for eta in SWEPT)]
    ahead = sum(gain > error for gain, error in gains)
    behind = sum(gain < -error for gain, error in gains)
    sentence = (
        "The paper trains with η = 1 on CIFAR-10, where DP-FedGD needs η ≤ 0.2. At the same η/ρ"
        f" DP-FedSOFIM is ahead beyond the interval at {ahead} of {len(gains)} rates, behind at"
        f" {behind}. It is best at η = {_best(found['sofim'])}, DP-FedGD at"
        f" η = {_best(found['fedgd'])}."
    )
    return f"{markdown(head, rows)}\n\n{sentence}"


def _best(found: dict[float, list[float]]) -> str:
    return f"{max(found, key=lambda eta: sum(found[eta])):g}"


def _client_table(store: Any) -> str:
    rows = []
    for client_rate in CLIENT_RATES:
        runs = {rule: test_runs(store, client_rate, rule) for rule in RULES}
        values = {rule: _accuracies(store, of) for rule, of in runs.items()}
        if not all(len(of) > 1 for of in values.values()):
            continue
        gain, error = claims.compared(values["sofim"], values["fedgd"])
        cells = [interval(values[rule]) for rule in RULES]
        etas = ", ".join(f"{of[0].eta:g}" for of in runs.values())
        rows.append([f"{client_rate:g}", *cells, f"{gain:+.2f} ± {error:.2f}", etas])
    head = ["q; test %", *RULES.values(), "difference", "best η of each"]
    return markdown(head, rows)


def table() -> str:
    """Return the tables, and the picture of the rates; "" before anything was run."""
    from dpkfc.app.tuning.runs import Store

    store = Store(PATH)
    if not all(swept(store, rule)[SWEPT[-1]] for rule in RULES):
        return ""
    picture = f"![Accuracy over the learning rate](../img/{PICTURE})"
    clients = (
        f"The server samples each of {CLIENTS} clients with rate q. ε = {EPSILON:g} protects a"
        " whole client; rates were chosen on a validation split."
    )
    return f"{_rate_table(store)}\n\n{picture}\n\n{clients}\n\n{_client_table(store)}"


PICTURE = "federated-rates.png"
COLOURS = {"sofim": "#b2182b", "fedgd": "#333333"}


def draw(folder: Path) -> None:
    """Draw test accuracy over the learning rate, if it was measured."""
    from common import half_interval
    from dpkfc.app.tuning.runs import Store
    from result_pages import _finish, _sheet

    store = Store(PATH)
    if not all(swept(store, rule)[SWEPT[-1]] for rule in RULES):
        return
    figure, panel = _sheet(3.4)
    for rule, label in RULES.items():
        found = swept(store, rule)
        means = [sum(values) / len(values) for values in found.values()]
        errors = [half_interval(values) for values in found.values()]
        panel.errorbar(
            list(found), means, yerr=errors, label=label, color=COLOURS[rule], marker="o", capsize=2
        )
    panel.set_xscale("log")
    panel.set_xlabel("η", fontsize=9)
    panel.set_ylabel("test accuracy, %", fontsize=9)
    _finish(figure, panel, len(RULES), folder / PICTURE)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, execute, table))
