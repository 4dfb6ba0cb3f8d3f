"""DP-FedSOFIM beside DP-FedGD at the same η/ρ, where its paper has no table: over learning rates,
with few clients a round, and on a whole network.

    python benchmarks/federated_variations.py --data-dir DIR    # resumable
    python benchmarks/federated_variations.py --table           # the Markdown tables

Rates: features of MNIST, ε = 10, clipping norm 10, ρ = 0.5 and β = 0.9 as in the paper.
Participation: the same features, 200 clients, client-level ε = 10 against the released models; the
server samples each client with rate q. Network: the CNN of MNIST, all layers, ε = 2, examples
sampled with rate 0.05. The last two choose each method's rate on a validation split.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import claims
from common import RESULTS, hardware, interval, markdown, now

PATH = RESULTS / "federated_variations.json"
SEEDS, TUNED_WITH, DELTA, ROUNDS = (0, 1, 2), 100, 1e-5, 70
RHO, BETA = 0.5, 0.9
RULES = {"sofim": "DP-FedSOFIM", "fedgd": "DP-FedGD at η/ρ"}
# Learning rates η; the step is η/ρ long where the momentum is small.
SWEPT = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CLIENT_RATES = (1.0, 0.1)
GRIDS = {"participation": (0.1, 0.3, 1.0, 3.0), "network": (0.1, 0.2, 0.4)}
CLIPS = {"participation": 0.3, "network": 1.0}
EPSILONS = {"participation": 10.0, "network": 2.0}
CLIENTS = {"participation": 200, "network": 2}
EXAMPLE_RATE = 0.05


@dataclass(frozen=True)
class Variation:
    """A run with sampled clients, or of a whole network.

    Attributes:
        part: "participation" or "network".
        rule: in `RULES`.
        eta: learning rate; DP-FedGD has η/ρ.
        client_rate: q.
        seed: of initial weights and partition; noise is never seeded.
        evaluate_on: "validation" or "test".
    """

    part: str
    rule: str
    eta: float
    client_rate: float
    seed: int
    evaluate_on: str = "test"

    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result."""
        return {
            **asdict(self),
            "clip": CLIPS[self.part],
            "epsilon": EPSILONS[self.part],
            "clients": CLIENTS[self.part],
            "rounds": ROUNDS,
        }

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
        epsilon=10.0,
        clients=2,
        seed=seed,
    )


def places() -> Iterator[tuple[str, float]]:
    """Yield every part but the sweep with its client rates."""
    for rate in CLIENT_RATES:
        yield "participation", rate
    yield "network", 1.0


def best_eta(store: Any, part: str, client_rate: float, rule: str) -> float | None:
    """Return the rate that is best on the validation split; None before all have been run."""
    rows = {
        eta: store.get(Variation(part, rule, eta, client_rate, TUNED_WITH, "validation"))
        for eta in GRIDS[part]
    }
    if not all(rows.values()):
        return None
    return max(rows, key=lambda eta: rows[eta]["accuracy"])


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield lists of runs; a list may need the results of those before it."""
    yield [sweep_run(rule, eta, seed) for seed in SEEDS for eta in SWEPT for rule in RULES]
    for part, client_rate in places():
        yield [
            Variation(part, rule, eta, client_rate, TUNED_WITH, "validation")
            for eta in GRIDS[part]
            for rule in RULES
        ]
        tests = []
        for rule in RULES:
            eta = best_eta(store, part, client_rate, rule)
            if eta is not None:
                tests += [Variation(part, rule, eta, client_rate, seed) for seed in SEEDS]
        yield tests


def _plan(run: Variation, records: int) -> Any:
    from dpkfc.federated import ClientLevel, FederatedConfig, FedGD, FedSOFIM, TrustedServer

    trusted = TrustedServer()
    is_network = run.part == "network"
    config = FederatedConfig(
        clients=CLIENTS[run.part],
        rounds=ROUNDS,
        expected_records=records,
        privacy=trusted if is_network else ClientLevel(trusted),
        rule=FedSOFIM(run.eta, RHO, BETA) if run.rule == "sofim" else FedGD(run.eta / RHO),
        max_grad_norm=CLIPS[run.part],
        client_rate=run.client_rate,
        example_rate=EXAMPLE_RATE if is_network else 1.0,
        max_physical_batch_size=500,
    )
    return config.calibrate(EPSILONS[run.part], DELTA)


def _data(part: str, folder: Path, data_dir: str) -> tuple[Any, Any, Any]:
    """Return training, validation and test examples."""
    from dpkfc.app.datasets import split
    from dpkfc.app.recipes.images import MNIST_NORMALISATION, load_mnist
    from dpkfc_papers.federated_study import load_features

    if part == "participation":
        features = load_features("mnist", folder, data_dir)
        return features.train, features.validation, features.test
    tensors = load_mnist(data_dir or None).tensors(MNIST_NORMALISATION)
    return *split(tensors.train, 5000), tensors.test


def execute_variation(run: Variation, data: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Train, and return the record of the run as plain values."""
    import torch
    from torch import nn

    from dpkfc.app.models import mnist_cnn, seeded
    from dpkfc.federated.simulation import federate, iid, parts
    from dpkfc_papers.federated_study import loss_fn

    (x, y), validation, test = data
    evaluation = validation
    if run.evaluate_on == "test":
        x, y = torch.cat([x, validation[0]]), torch.cat([y, validation[1]])
        evaluation = test
    build = mnist_cnn if run.part == "network" else lambda: nn.Linear(x.shape[1], 10)
    plan = _plan(run, len(y))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            found = [model(rows).argmax(1) for rows in evaluation[0].split(1000)]
        return float((torch.cat(found) == evaluation[1]).float().mean())

    result = federate(
        plan,
        seeded(build, run.seed),
        loss_fn,
        parts((x, y), iid(len(y), CLIENTS[run.part], run.seed)),
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
    data: dict[str, Any] = {}
    with Store(PATH) as store:
        for runs in stages(store):
            left = [run for run in runs if store.get(run) is None]
            for number, run in enumerate(left, start=1):
                started = time.perf_counter()
                if isinstance(run, Variation):
                    if run.part not in data:
                        data[run.part] = _data(run.part, folder, data_dir)
                    record = execute_variation(run, data[run.part])
                else:
                    if "rates" not in data:
                        data["rates"] = load_features("mnist", folder, data_dir)
                    record = execute_run(run, data["rates"])
                store.put(run, record)
                seconds = time.perf_counter() - started
                print(
                    f"{number}/{len(left)} {run.describe()}: {record['accuracy']:.4f},"
                    f" {seconds:.0f} s",
                    flush=True,
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
        "The paper trains with η = 1 where DP-FedGD needs η ≤ 0.2. At equal steps DP-FedSOFIM is"
        f" ahead beyond its interval at {ahead} of {len(gains)} rates, behind at {behind}; the best"
        f" rates are {_best(found['sofim'])} and {_best(found['fedgd'])}."
    )
    return f"{markdown(head, rows)}\n\n{sentence}"


def _best(found: dict[float, list[float]]) -> str:
    return f"{max(found, key=lambda eta: sum(found[eta])):g}"


def _place_table(store: Any) -> str:
    rows = []
    for part, client_rate in places():
        values = {}
        etas = []
        for rule in RULES:
            eta = best_eta(store, part, client_rate, rule)
            if eta is None:
                break
            runs = [Variation(part, rule, eta, client_rate, seed) for seed in SEEDS]
            values[rule] = _accuracies(store, runs)
            etas.append(f"{eta:g}")
        if len(values) < len(RULES) or not all(len(of) > 1 for of in values.values()):
            continue
        gain, error = claims.compared(values["sofim"], values["fedgd"])
        name = "whole CNN" if part == "network" else f"{CLIENTS[part]} clients, q = {client_rate:g}"
        cells = [interval(values[rule]) for rule in RULES]
        rows.append([name, *cells, f"{gain:+.2f} ± {error:.2f}", ", ".join(etas)])
    head = ["MNIST: test %", *RULES.values(), "difference", "best η of each"]
    return markdown(head, rows)


def tables() -> str:
    """Return the tables, and the picture of the rates; "" before anything was run."""
    from dpkfc.app.tuning.runs import Store

    store = Store(PATH)
    if not all(swept(store, rule)[SWEPT[-1]] for rule in RULES):
        return ""
    picture = f"![Accuracy over the learning rate](../img/{PICTURE})"
    return f"{_rate_table(store)}\n\n{picture}\n\n{_place_table(store)}"


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", default="", help="folder with the data sets")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/federated/features"), help="folder of the features"
    )
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    arguments = parser.parse_args()
    if not arguments.table:
        execute(arguments.out, arguments.data_dir)
    print(tables() or "nothing has been run yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
