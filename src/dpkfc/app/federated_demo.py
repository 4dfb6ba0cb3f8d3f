"""DP-FedGD, DP-FedSOFIM and federated DP-KFC on the digits, ten clients of unlike labels: one app for every engine.

`APP` runs inside one process, on Flower's simulation, and with `flwr run` on hosts far apart (examples/federated), unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from dpkfc.app import plots
from dpkfc.app import plots as partition_plots
from dpkfc.app.datasets.formats import read_digits
from dpkfc.app.progress import Console
from dpkfc.app.run_folder import RunFolder, placed
from dpkfc.checkpoint import file_digest
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.probes import FeatureNoise
from dpkfc.federated.flower import App, Settings
from dpkfc.federated.options import SecureAggregation
from dpkfc.federated.plan import FederatedConfig, FederatedPlan
from dpkfc.federated.server import RoundRecord
from dpkfc.federated.server_rules import FedGD, FedSOFIM
from dpkfc.federated.simulation import Run, dirichlet, parts
from dpkfc.report.card import build_federated_card, to_markdown
from dpkfc.report.numbers import rounded_up

CLIENTS, ROUNDS, ALPHA, DELTA = 10, 40, 0.5, 1e-4
HERE, FLOWER = ENGINES = ("here", "flower")
METHODS: dict[str, dict[str, Any]] = {
    "dp-fedgd": {"rule": FedGD(learning_rate=4.0)},
    "dp-fedsofim": {"rule": FedSOFIM(learning_rate=2.0, rho=0.5, beta=0.9)},  # η / ρ is the rate of the others
    "dp-kfc": {
        "rule": FedGD(learning_rate=4.0),
        "preconditioner": KFAC(probe=FeatureNoise(64, mean=-0.4, std=0.75), every=ROUNDS, sides="both"),
    },
}
LABELS = {"dp-fedgd": "DP-FedGD", "dp-fedsofim": "DP-FedSOFIM", "dp-kfc": "federated DP-KFC"}
_PLACES = {HERE: "one process", FLOWER: "Flower simulation"}
_SIMULATED = {
    "messages of single clients": "clients and server of the demo share a machine, so the server could read the clients' keys"
}
_CHOSEN = "fixed in the demo; looked at on these digits by hand, which ε does not cover"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One method on one engine.

    Attributes:
        engine: in `ENGINES`.
        method: in `METHODS`.
        curve: test accuracy and ε by round.
        epsilon: spent.
        seconds: of the rounds, the engine's start included.
        survivors: fewest in a round.
        dropped: rounds without a release.
        rejected: messages that were not valid.
    """

    engine: str
    method: str
    curve: plots.Curve
    epsilon: float
    seconds: float
    survivors: int
    dropped: int
    rejected: int


@dataclass(frozen=True, kw_only=True)
class FederatedDemo:
    """What the demo came to.

    Attributes:
        folder: with one folder a method, the partition and the comparison below it.
        runs: of every engine and method.
    """

    folder: Path
    runs: tuple[DemoRun, ...]

    @property
    def accuracy(self) -> dict[str, float]:
        """Method to accuracy on the test set, on the first engine."""
        return {run.method: run.curve.accuracy[-1] for run in self.runs if run.engine == self.runs[0].engine}

    @property
    def epsilon(self) -> dict[str, float]:
        """Method to ε spent, on the first engine."""
        return {run.method: run.epsilon for run in self.runs if run.engine == self.runs[0].engine}

    @property
    def table(self) -> Table:
        """All runs, for a terminal."""
        names = ("engine", "method", "test accuracy", "ε spent", "survivors", "dropped", "rejected", "seconds")
        table = Table(*names, header_style="bold")
        for run in self.runs:
            accuracy = f"{100 * run.curve.accuracy[-1]:.1f} %"
            counts = (str(run.survivors), str(run.dropped), str(run.rejected), f"{run.seconds:.1f}")
            table.add_row(_PLACES[run.engine], LABELS[run.method], accuracy, rounded_up(run.epsilon), *counts)
        return table


@lru_cache(maxsize=4)
def digits_of_clients(clients: int = CLIENTS, alpha: float = ALPHA, seed: int = 0) -> tuple[Any, ...]:
    """Records of each client, test set, labels and partition: pixels `[N, 64]` in [-1, 1].

    Raises:
        DatasetError: scikit-learn is not installed.
    """
    pixels = read_digits()
    (x, y), (test_x, test_y) = (
        (_flat(images), torch.from_numpy(labels)) for images, labels in (pixels.train, pixels.test)
    )
    pieces = dirichlet(y.numpy(), clients, alpha, seed)
    return parts((x, y), pieces), (test_x, test_y), y.numpy(), pieces


def _flat(images: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 8 - 1)


def plan_of(
    method: str, records: int, epsilon: float = 3.0, rounds: int = ROUNDS, clients: int = CLIENTS
) -> FederatedPlan:
    """The plan of one method of the demo.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    sizes: dict[str, Any] = {"clients": clients, "rounds": rounds, "expected_records": records}
    return FederatedConfig(**sizes, privacy=SecureAggregation(), **METHODS[method]).calibrate(epsilon, DELTA)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def head() -> nn.Module:
    """A linear head of 650 parameters that starts at zero."""
    model = nn.Linear(64, 10)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


# -- the app -----------------------------------------------------------------------------------------------------------


def _digits(settings: Settings) -> tuple[Any, ...]:
    return digits_of_clients(settings["clients"], settings["alpha"])


def _plan(settings: Settings) -> FederatedPlan:
    records = len(_digits(settings)[2])
    return plan_of(settings["method"], records, settings["epsilon"], settings["rounds"], settings["clients"])


def _model(settings: Settings) -> nn.Module:
    return head()


def _records(number: int, settings: Settings) -> Any:
    """The piece of one client; a hospital would read its own records here."""
    return _digits(settings)[0][number]


def _evaluate(model: nn.Module, settings: Settings) -> float:
    x, y = _digits(settings)[1]
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def _finish(run: Run, settings: Settings, folder: Path) -> None:
    """Model, card, rounds and plot of a finished run."""
    place, curve = RunFolder(folder), _curve(run, settings["method"])
    plots.save(plots.history(curve), place.plots / "history.png")
    placed(place.model, lambda part: save_file(dict(run.server.model.state_dict()), part))
    place.write_json(place.path / "rounds.json", {"rounds": [vars(record) for record in run.records]})
    images = len(_digits(settings)[1][1])
    results = {"test accuracy": f"{100 * curve.accuracy[-1]:.1f} % of {images} images that no client holds"}
    title = f"{curve.label} on the digits"
    weights = {"file": place.model.name, "sha256": file_digest(place.model)}
    card = build_federated_card(
        run.server, run.records, title=title, chosen_by=_CHOSEN, results=results, not_private=_SIMULATED, weights=weights
    )
    place.write_json(place.card, card)
    place.write_text(place.card.with_suffix(".md"), to_markdown(card))


def _curve(run: Run, method: str) -> plots.Curve:
    plan = run.server.plan
    rounds, epsilons, scores = zip(*run.history, strict=True)
    return plots.Curve(
        label=LABELS[method], steps=rounds, accuracy=scores, epsilon_steps=rounds, epsilon=epsilons,
        target_epsilon=plan.target_epsilon, caption=f"{plan.config.clients} clients, {plan.config.privacy.name}",
    )  # fmt: skip


APP = App(
    plan=_plan,
    model=_model,
    loss_fn=loss_fn,
    records=_records,
    defaults={"method": "dp-fedgd", "epsilon": 3.0, "rounds": ROUNDS, "clients": CLIENTS, "alpha": ALPHA},
    evaluate=_evaluate,
    finish=_finish,
)


# -- the demo ----------------------------------------------------------------------------------------------------------


def federated_demo(
    out: str = "",
    console: Console | None = None,
    *,
    methods: Sequence[str] = tuple(METHODS),
    epsilon: float = 3.0,
    rounds: int = ROUNDS,
    engines: Sequence[str] = (HERE,),
) -> FederatedDemo:
    """Train every method under the same budget on the same clients, with secure aggregation on one machine.

    Args:
        out: folder; empty for a new one below runs/.
        console: where progress is drawn.
        methods: names in `METHODS`.
        epsilon: of each run.
        rounds: of each run.
        engines: names in `ENGINES`; each trains every method, with noise of its own.

    Raises:
        DatasetError: scikit-learn is not installed.
        ImportError: Flower is not installed and was asked for.
        RunFolderError: the folder cannot be written.
    """
    starts = {engine: _engine(engine) for engine in engines}
    _, _, labels, pieces = digits_of_clients()
    folder = RunFolder.create(out) if out else RunFolder.fresh("runs", f"demo-federated-{datetime.now():%Y%m%d-%H%M%S}")
    caption = f"scikit-learn's digits, {len(pieces)} clients, Dirichlet({ALPHA:g}) over labels"
    picture = partition_plots.partition(labels, pieces, caption=caption)
    plots.save(picture, folder.path / "partition.png")
    runs = []
    for engine, start in starts.items():
        for method in methods:
            place = folder.path / method if engine == HERE else folder.path / engine / method
            settings = {"method": method, "epsilon": epsilon, "rounds": rounds}
            runs.append(_run(engine, start, settings, RunFolder.create(place).path, console))
    curves = [run.curve for run in runs if run.engine == runs[0].engine]
    figure = plots.comparison(curves, "The same clients under the same budget", f"{caption}, ε = {epsilon:g}")
    plots.save(figure, folder.path / "comparison.png")
    return FederatedDemo(folder=folder.path, runs=tuple(runs))


def _engine(name: str) -> Callable[..., Run]:
    """The function that runs `APP` on an engine."""
    if name == HERE:
        return APP.here
    if name != FLOWER:
        raise ValueError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    from dpkfc.federated.flower import check_installed, simulate

    check_installed()
    return lambda settings, **options: simulate(APP, settings, **options)


def _run(engine: str, start: Callable[..., Run], settings: Settings, folder: Path, console: Console | None) -> DemoRun:
    """One method on one engine, with a line of progress."""
    method = settings["method"]
    with _progress(console) as progress:
        name = f"{LABELS[method]}, {_PLACES[engine]}"
        task = progress.add_task(f"{name:36s}", total=settings["rounds"], epsilon="–", accuracy="")

        def shown(record: RoundRecord, run: Run) -> None:
            _, epsilon, score = run.history[-1]
            progress.update(task, advance=1, epsilon=rounded_up(epsilon), accuracy=f"test {100 * score:.1f} %")

        run = start(settings, folder=folder, on_round=shown)
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
    """The line that a person watches: no figure of it is computed from clients' records."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("rounds  [cyan]ε ≤ {task.fields[epsilon]}"),
        TextColumn("[green]{task.fields[accuracy]}"),
        console=console or Console(quiet=True),
        disable=console is None,
    )
