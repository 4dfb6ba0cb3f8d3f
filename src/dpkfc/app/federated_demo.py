"""Demonstrate DP-FedGD, DP-FedSOFIM and federated DP-KFC, for ten clients with different labels.

`APP` runs inside one process, in Flower's simulation, and with `flwr run` on separate hosts
(examples/federated), unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

from dpkfc.app import picture_style, run_pictures
from dpkfc.app.datasets.digits import read_digits
from dpkfc.app.models import linear_from_zero
from dpkfc.app.picture_data import Curve
from dpkfc.app.recipes.objective import cross_entropy, evaluate
from dpkfc.app.run_folder import RunFolder, write_json
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.federated.app import App, Settings
from dpkfc.federated.partition import Partition, dirichlet, parts
from dpkfc.federated.plan import FederatedConfig, FederatedPlan
from dpkfc.federated.privacy_models import SecureAggregation
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.runs import SimulatedRun
from dpkfc.federated.server_rules import FedGD, FedSOFIM
from dpkfc.report.text import round_up

CLIENTS, ROUNDS, ALPHA, DELTA = 10, 40, 0.5, 1e-4
HERE, FLOWER = ENGINES = ("here", "flower")
METHODS: dict[str, dict[str, Any]] = {
    "dp-fedgd": {"rule": FedGD(learning_rate=4.0)},
    # η / ρ is the learning rate of the other methods.
    "dp-fedsofim": {"rule": FedSOFIM(learning_rate=2.0, rho=0.5, beta=0.9)},
    "dp-kfc": {
        "rule": FedGD(learning_rate=4.0),
        "preconditioner": KFAC(
            probe=FeatureNoise(64, mean=-0.4, std=0.75), every=ROUNDS, sides="both"
        ),
    },
}
LABELS = {"dp-fedgd": "DP-FedGD", "dp-fedsofim": "DP-FedSOFIM", "dp-kfc": "federated DP-KFC"}
_PLACES = {HERE: "one process", FLOWER: "Flower simulation"}
_SIMULATED = {
    "messages of single clients": (
        "clients and server of the demo share a machine, so the server could read the clients' keys"
    )
}
_CHOSEN_BY = "fixed in the demo; chosen by hand on these digits, which ε does not cover"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One method on one engine.

    Attributes:
        engine: in `ENGINES`.
        method: in `METHODS`.
        curve: test accuracy by round.
        epsilon: spent.
        seconds: of the rounds, the engine's start included.
        survivors: fewest in a round.
        dropped: rounds without a release.
        rejected: messages that were not valid.
    """

    engine: str
    method: str
    curve: Curve
    epsilon: float
    seconds: float
    survivors: int
    dropped: int
    rejected: int


@dataclass(frozen=True, kw_only=True)
class FederatedDemo:
    """The result of the demo.

    Attributes:
        folder: holds one folder per method, and the comparison.
        runs: of every engine and method.
    """

    folder: Path
    runs: tuple[DemoRun, ...]

    @property
    def table(self) -> Table:
        """Return a table of all runs, for a terminal."""
        names = (
            "engine",
            "method",
            "test accuracy",
            "ε spent",
            "survivors",
            "dropped",
            "rejected",
            "seconds",
        )
        table = Table(*names, header_style="bold")
        for run in self.runs:
            accuracy = f"{100 * run.curve.accuracy[-1]:.1f} %"
            table.add_row(
                _PLACES[run.engine],
                LABELS[run.method],
                accuracy,
                round_up(run.epsilon),
                str(run.survivors),
                str(run.dropped),
                str(run.rejected),
                f"{run.seconds:.1f}",
            )
        return table


@dataclass(frozen=True)
class ClientDigits:
    """The digits, divided between clients: pixels `[N, 64]` in [-1, 1] and labels.

    Attributes:
        records: of each client.
        test: images and labels that no client holds.
        labels: of all records.
        partition: indices of each client's records.
    """

    records: list[tuple[Tensor, ...]]
    test: tuple[Tensor, Tensor]
    labels: np.ndarray[Any, Any]
    partition: Partition


@lru_cache(maxsize=4)
def divide_digits(clients: int = CLIENTS, alpha: float = ALPHA) -> ClientDigits:
    """Return the digits of each client.

    Raises:
        DatasetError: scikit-learn is not installed.
    """
    pixels = read_digits()
    images, labels = pixels.train
    test_images, test_labels = pixels.test
    partition = dirichlet(labels, clients, alpha)
    return ClientDigits(
        records=parts((_scale_pixels(images), torch.from_numpy(labels)), partition),
        test=(_scale_pixels(test_images), torch.from_numpy(test_labels)),
        labels=labels,
        partition=partition,
    )


def _scale_pixels(images: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 8 - 1)


def make_plan(
    method: str, records: int, epsilon: float = 3.0, rounds: int = ROUNDS, clients: int = CLIENTS
) -> FederatedPlan:
    """Return the plan of one method of the demo.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    config = FederatedConfig(
        clients=clients,
        rounds=rounds,
        expected_records=records,
        privacy=SecureAggregation(),
        **METHODS[method],
    )
    return config.calibrate(epsilon, DELTA)


# -- the app ---------------------------------------------------------------------------------------


def _digits(settings: Settings) -> ClientDigits:
    return divide_digits(settings["clients"], settings["alpha"])


def _plan(settings: Settings) -> FederatedPlan:
    records = len(_digits(settings).labels)
    return make_plan(
        settings["method"], records, settings["epsilon"], settings["rounds"], settings["clients"]
    )


def _records(number: int, settings: Settings) -> Any:
    """Return the records of one client; a hospital would read its own records here."""
    return _digits(settings).records[number]


def _evaluate(model: nn.Module, settings: Settings) -> float:
    return evaluate(model, _digits(settings).test).accuracy


def _finish(run: SimulatedRun, settings: Settings, folder: Path) -> None:
    """Write model, privacy card and rounds of a finished run."""
    place = RunFolder(folder)
    curve = _curve(run, settings["method"])
    write_json(place.path / "rounds.json", {"rounds": [vars(record) for record in run.records]})
    images = len(_digits(settings).test[1])
    run.server.write_card(
        folder,
        run.records,
        title=f"{curve.label} on the digits",
        chosen_by=_CHOSEN_BY,
        results={
            "test accuracy": (
                f"{100 * curve.accuracy[-1]:.1f} % of {images} images that no client holds"
            )
        },
        not_private=_SIMULATED,
    )


def _curve(run: SimulatedRun, method: str) -> Curve:
    plan = run.server.plan
    rounds, _, scores = zip(*run.history, strict=True)
    return Curve(
        label=LABELS[method],
        steps=rounds,
        accuracy=scores,
        caption=f"{plan.config.clients} clients, {plan.config.privacy.name}",
    )


APP = App(
    plan=_plan,
    # A linear head of 650 parameters.
    model=lambda settings: linear_from_zero(64, 10),
    loss_fn=cross_entropy,
    records=_records,
    defaults={
        "method": "dp-fedgd",
        "epsilon": 3.0,
        "rounds": ROUNDS,
        "clients": CLIENTS,
        "alpha": ALPHA,
    },
    evaluate=_evaluate,
    finish=_finish,
)


# -- the demo --------------------------------------------------------------------------------------


def federated_demo(
    out: str = "",
    console: Console | None = None,
    *,
    methods: Sequence[str] = tuple(METHODS),
    epsilon: float = 3.0,
    rounds: int = ROUNDS,
    engines: Sequence[str] = (HERE,),
) -> FederatedDemo:
    """Train every method under the same budget on the same clients, on one machine.

    Args:
        out: folder; empty for a new one below runs/.
        console: draws progress.
        methods: names in `METHODS`.
        epsilon: of each run.
        rounds: of each run.
        engines: names in `ENGINES`; each trains every method, with its own noise.

    Raises:
        DatasetError: scikit-learn is not installed.
        ImportError: an engine needs Flower, which is not installed.
        RunFolderError: the folder cannot be written.
    """
    starts = {engine: _choose_engine(engine) for engine in engines}
    digits = divide_digits()
    folder = RunFolder.make(out, "demo-federated")
    caption = (
        f"scikit-learn's digits, {len(digits.partition)} clients, Dirichlet({ALPHA:g}) over labels"
    )
    runs = []
    for engine, start in starts.items():
        for method in methods:
            place = folder.path / method
            if engine != HERE:
                place = folder.path / engine / method
            settings = {"method": method, "epsilon": epsilon, "rounds": rounds}
            runs.append(_run(engine, start, settings, RunFolder.create(place).path, console))
    curves = [run.curve for run in runs if run.engine == runs[0].engine]
    figure = run_pictures.comparison(
        curves, "The same clients under the same budget", f"{caption}, ε = {epsilon:g}"
    )
    picture_style.save(figure, folder.path / "comparison.png")
    return FederatedDemo(folder=folder.path, runs=tuple(runs))


def _choose_engine(name: str) -> Callable[..., SimulatedRun]:
    """Return the function that runs `APP` on an engine."""
    if name == HERE:
        return APP.run_here
    if name != FLOWER:
        raise ValueError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    from dpkfc.federated.flower import check_installed, simulate

    check_installed()
    return lambda settings, **options: simulate(APP, settings, **options)


def _run(
    engine: str,
    start: Callable[..., SimulatedRun],
    settings: Settings,
    folder: Path,
    console: Console | None,
) -> DemoRun:
    """Run one method on one engine, with a line of progress."""
    method = settings["method"]
    with _progress(console) as progress:
        name = f"{LABELS[method]}, {_PLACES[engine]}"
        task = progress.add_task(f"{name:36s}", total=settings["rounds"], epsilon="–", accuracy="")

        def show_round(record: RoundRecord, run: SimulatedRun) -> None:
            _, epsilon, score = run.history[-1]
            progress.update(
                task, advance=1, epsilon=round_up(epsilon), accuracy=f"test {100 * score:.1f} %"
            )

        run = start(settings, folder=folder, on_round=show_round)
    return DemoRun(
        engine=engine,
        method=method,
        curve=_curve(run, method),
        epsilon=run.server.epsilon,
        seconds=run.seconds,
        survivors=min(record.survivors or 0 for record in run.records),
        dropped=sum(record.dropped for record in run.records),
        rejected=sum(run.server.rejected.values()),
    )


def _progress(console: Console | None) -> Progress:
    """Return a line of progress; none of its figures is computed from clients' records."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("rounds  [cyan]ε ≤ {task.fields[epsilon]}"),
        TextColumn("[green]{task.fields[accuracy]}"),
        console=console or Console(quiet=True),
        disable=console is None,
    )
