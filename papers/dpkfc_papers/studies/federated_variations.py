"""DP-FedSOFIM beside DP-FedGD at the same η/ρ, where its paper has no table: over learning rates,
with few clients a round, and on a whole network.

    python -m dpkfc_papers.studies.federated_variations --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.federated_variations --table  # the tables

Features of MNIST, ε = 10, ρ = 0.5 and β = 0.9 as in the paper. Rates: clipping norm 10. Few
clients: 200 clients, client-level ε against the released models; the server samples each of them
with rate q. There each method's rate is chosen on a validation split. The network: a CNN from
scratch on images of MNIST, 14 pixels wide; its clipping norm is the one DP-FedSOFIM prefers.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkfc_papers.store import Store, StudyRun, make_missing
from dpkfc_papers.studies.harness import (
    RESULTS,
    compare_means,
    draw_means,
    finish,
    half_interval,
    interval,
    markdown,
    run_script,
    sheet,
)

PATH = RESULTS / "federated_variations.json"
SEEDS, TUNED_WITH, DELTA, ROUNDS = (0, 1, 2), 100, 1e-5, 70
RHO, BETA, EPSILON = 0.5, 0.9, 10.0
RULES = {"sofim": "DP-FedSOFIM", "fedgd": "DP-FedGD at η/ρ"}
# Learning rates η; the step is η/ρ long where the momentum is small.
SWEPT = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CLIENTS, CLIENT_RATES, CLIP = 200, (0.1, 0.3), 0.3
GRID = (0.1, 0.3, 1.0, 3.0)
# The whole network: the first images of the training set, those among them that choose rates, and
# learning rates by clipping norm.
IMAGES, HELD_OUT = 8000, 2000
CLIPS = {1.0: (1.0, 3.0, 10.0), 10.0: GRID}
NETWORK = f"mnist-cnn-{IMAGES}"


@dataclass(frozen=True)
class Variation(StudyRun):
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

    common = {"clip": CLIP, "epsilon": EPSILON, "clients": CLIENTS, "rounds": ROUNDS}


def sweep_run(
    rule: str,
    eta: float,
    seed: int,
    clip: float = 10.0,
    rho: float = RHO,
    beta: float | None = BETA,
    **changes: Any,
) -> Any:
    """Return a run of the sweep over learning rates, or one with changes.

    Two clients, since with one trusted server the distribution of a result does not depend on
    their number.
    """
    from dpkfc_papers.federated_runs import FederatedRun

    settings = {"rate": eta / rho, "clip": clip}
    if rule == "sofim":
        settings["rho"] = rho
    if rule != "fedgd":
        settings["beta"] = beta
    run = FederatedRun(
        task="mnist",
        rule=rule,
        settings=tuple(sorted(settings.items())),
        epsilon=EPSILON,
        clients=2,
        seed=seed,
    )
    return replace(run, **changes)


def client_grid(client_rate: float, rule: str) -> list[Variation]:
    """Return runs with sampled clients that choose a rate."""
    return [Variation(rule, eta, client_rate, TUNED_WITH, "validation") for eta in GRID]


def network_grid(rule: str, clip: float) -> list[Any]:
    """Return runs of the network that choose a rate."""
    # Ten clients, since small parts fit into the cache.
    changes = {"task": NETWORK, "clients": 10, "evaluate_on": "validation"}
    return [sweep_run(rule, eta, TUNED_WITH, clip, **changes) for eta in CLIPS[clip]]


def network_grids(store: Any) -> dict[str, list[Any]]:
    """Return the grids of all rules at the norm of DP-FedSOFIM; none before that is chosen."""
    best = best_run(store, [run for clip in CLIPS for run in network_grid("sofim", clip)])
    if best is None:
        return {}
    clip = dict(best.settings)["clip"]
    return {rule: network_grid(rule, clip) for rule in ("sofim", "fedgd", "fedavgm")}


def network_tests(store: Any) -> dict[str, list[Any]]:
    """Return the tests of each row of the network's table; none before its rate is chosen."""
    grids = network_grids(store)
    if not grids:
        return {}
    return {
        "DP-FedSOFIM": test_runs(store, grids["sofim"]),
        "DP-FedGD at its η/ρ": test_runs(store, grids["fedgd"], grids["sofim"]),
        "DP-FedGD": test_runs(store, grids["fedgd"]),
        "DP-FedAvgM": test_runs(store, grids["fedavgm"]),
    }


def best_run(store: Any, grid: list[Any]) -> Any:
    """Return the run that is best on the validation split; None before all have been made."""
    if not all(map(store.get, grid)):
        return None
    return max(grid, key=lambda run: store.get(run)["accuracy"])


def test_runs(store: Any, grid: list[Any], judged: list[Any] | None = None) -> list[Any]:
    """Return the runs of the best rate on the test set; none before it is known.

    Args:
        store: of the rows.
        grid: runs of one method, by rate.
        judged: the grid whose best rate is taken; None for `grid`.
    """
    judged = judged or grid
    best = best_run(store, judged)
    if best is None:
        return []
    run = grid[judged.index(best)]
    return [replace(run, seed=seed, evaluate_on="test") for seed in SEEDS]


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield lists of runs; a list may need the results of those before it."""
    yield [sweep_run(rule, eta, seed) for seed in SEEDS for eta in SWEPT for rule in RULES]
    for client_rate in CLIENT_RATES:
        grids = [client_grid(client_rate, rule) for rule in RULES]
        yield [run for grid in grids for run in grid]
        yield [run for grid in grids for run in test_runs(store, grid)]
    yield [run for clip in CLIPS for run in network_grid("sofim", clip)]
    for grid in network_grids(store).values():
        yield grid
        yield from network_tests(store).values()


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
    from dpkfc.federated.partition import iid
    from dpkfc_papers.federated_runs import train

    (_, y), _ = features.choose_rows(run.evaluate_on)
    return train(run, _plan(run, len(y)), features, iid(len(y), CLIENTS, run.seed))


def network(channels: int, classes: int) -> Any:
    """Build the CNN for images of 14×14 pixels."""
    from dpkfc.app.models import channels_last, two_convolutions

    return channels_last(two_convolutions(channels, 32 * 3 * 3, 64, classes))


def load_images(data_dir: str) -> Any:
    """Return the first images of MNIST at half their width, with constants of a public set."""
    import torch
    from torch.nn.functional import avg_pool2d

    from dpkfc.app.datasets.examples import split
    from dpkfc.app.datasets.sources import MNIST, load_pixels
    from dpkfc_papers.federated_features import GREY, Features

    pixels = load_pixels(MNIST, data_dir or None).tensors(GREY.normalisation)
    x, y = pixels.train
    train, validation = split((avg_pool2d(x[:IMAGES], 2), y[:IMAGES]), HELD_OUT)
    return Features(
        train=train,
        validation=validation,
        test=(avg_pool2d(pixels.test[0], 2), pixels.test[1]),
        public=torch.empty(0),
        classes=10,
        origin=f"the first {IMAGES:,} images, 14 pixels wide",
    )


def execute(
    folder: Path, data_dir: str, path: Path = PATH, listed: Callable[[Any], Any] = stages
) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    import torch

    from dpkfc_papers.federated_features import load_features
    from dpkfc_papers.federated_runs import execute_run

    torch.set_num_threads(1)
    features = functools.cache(functools.partial(load_features, "mnist", folder, data_dir))
    images = functools.cache(functools.partial(load_images, data_dir))

    def execute_one(run: Any) -> dict[str, Any]:
        if isinstance(run, Variation):
            return execute_variation(run, features())
        if run.task == NETWORK:
            return execute_run(run, images(), network)
        return execute_run(run, features())

    make_missing(path, listed, execute_one)


# --------------------------------------------------------------------------------------------------
# Tables and the picture.


def read_accuracies(store: Any, runs: list[Any]) -> list[float]:
    rows = [store.get(run) for run in runs]
    return [100 * row["accuracy"] for row in rows if row]


def read_sweep(store: Any, rule: str) -> dict[float, list[float]]:
    """Return test accuracies in percent by learning rate."""
    found = {}
    for eta in SWEPT:
        runs = [sweep_run(rule, eta, seed) for seed in SEEDS]
        found[eta] = read_accuracies(store, runs)
    return found


def _rate_table(store: Any) -> str:
    found = {rule: read_sweep(store, rule) for rule in RULES}
    rows = [[label, *map(interval, found[rule].values())] for rule, label in RULES.items()]
    gains = [compare_means(found["sofim"][eta], found["fedgd"][eta]) for eta in SWEPT]
    rows.append(["difference", *(f"{gain:+.2f} ± {error:.2f}" for gain, error in gains)])
    head = ["MNIST, ε = 10: test %", *(f"η = {eta:g}" for eta in SWEPT)]
    return markdown(head, rows)


def _client_table(store: Any) -> str:
    rows = []
    for client_rate in CLIENT_RATES:
        runs = {rule: test_runs(store, client_grid(client_rate, rule)) for rule in RULES}
        values = {rule: read_accuracies(store, of) for rule, of in runs.items()}
        if not all(len(of) > 1 for of in values.values()):
            continue
        gain, error = compare_means(values["sofim"], values["fedgd"])
        cells = [interval(values[rule]) for rule in RULES]
        etas = ", ".join(f"{of[0].eta:g}" for of in runs.values())
        rows.append([f"{client_rate:g}", *cells, f"{gain:+.2f} ± {error:.2f}", etas])
    head = ["q; test %", *RULES.values(), "difference", "best η of each"]
    return markdown(head, rows)


def _network_table(store: Any) -> str:
    tests = network_tests(store)
    found = {label: read_accuracies(store, runs) for label, runs in tests.items()}
    if not found or any(len(values) < len(SEEDS) for values in found.values()):
        return ""
    rows = []
    for label, values in found.items():
        run = tests[label][0]
        chosen = store.get(replace(run, seed=TUNED_WITH, evaluate_on="validation"))
        settings = dict(run.settings)
        gains = [a - b for a, b in zip(found["DP-FedSOFIM"], values, strict=True)]
        gain, error = statistics.mean(gains), half_interval(gains)
        difference = f"{gain:+.2f} ± {error:.2f}" if label != "DP-FedSOFIM" else "–"
        cells = [f"{100 * chosen['accuracy']:.2f}", interval(values), difference]
        rows.append([label, f"{settings['rate']:g}", *cells])
    head = ["CNN, ε = 10", "η/ρ", "validation %", "test %", "DP-FedSOFIM − it"]
    return markdown(head, rows)


def table() -> str:
    """Return the tables, and the picture of the rates; "" before anything was run."""

    store = Store(PATH)
    if not all(read_sweep(store, rule)[SWEPT[-1]] for rule in RULES):
        return ""
    picture = f"![Accuracy over the learning rate](../img/{PICTURE})"
    clients = (
        f"The server samples each of {CLIENTS} clients with rate q. ε = {EPSILON:g} protects a"
        " whole client; rates were chosen on a validation split."
    )
    pieces = [_rate_table(store), picture, clients, _client_table(store), _network_table(store)]
    return "\n\n".join(filter(None, pieces))


PICTURE = "federated-rates.png"
COLOURS = {"sofim": "C1", "fedgd": "C6"}


def draw(folder: Path) -> None:
    """Draw test accuracy over the learning rate, if it was measured."""

    store = Store(PATH)
    if not all(read_sweep(store, rule)[SWEPT[-1]] for rule in RULES):
        return
    figure, ((panel,),) = sheet(height=3.2)
    for rule, label in RULES.items():
        found = read_sweep(store, rule)
        draw_means(
            panel, list(found), list(found.values()), label=label, color=COLOURS[rule], marker="o"
        )
    panel.set_xscale("log")
    panel.set_xlabel("η")
    panel.set_ylabel("test accuracy, %")
    finish(figure, folder / PICTURE, len(RULES))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, execute, table))
