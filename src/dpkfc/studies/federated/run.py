"""The study as it is run: its sizes, its files and how a cell is told of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dpkfc.report.run_folder import placed
from dpkfc.studies.clock import Clock, TimeIsUp
from dpkfc.studies.federated.cell import FederatedRun
from dpkfc.studies.federated.features import features_of, small_features
from dpkfc.studies.federated.report import figure, tables
from dpkfc.studies.federated.study import ARMS, Study, work
from dpkfc.studies.store import Store

__all__ = ["NAME", "SMOKE", "STUDY", "TITLE", "reported"]

_LOG = logging.getLogger(__name__)

NAME, TITLE = "dp-fedsofim", "DP-FedSOFIM: a linear head on frozen features, 20 clients, with matched controls"
STUDY = Study(seeds={"cifar10": 5, "mnist": 3, "pneumoniamnist": 3})
SMOKE = Study(tasks=("cifar10", "pneumoniamnist"), epsilons=(1.0, 10.0), trials=2, seeds=2, alphas=(0.5,), most_seeds=1,
              rounds=3, clients=4)  # fmt: skip


def reported(
    study: Study,
    folder: Path,
    *,
    results: Path | None = None,
    data_dir: str = "",
    budget_minutes: float | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Path:
    """Run what is left of the study, one cell after the other on one thread, and write its report and picture.

    Args:
        study: `STUDY`, or `SMOKE` on made-up features.
        folder: of networks, features, report and picture; an earlier one is taken up again.
        results: file of the rows; None for one in the folder.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        budget_minutes: no cell is started that would not end in time, and one that runs when it is up is stopped.
        told: takes a line after every cell.

    Returns:
        The path of the report.

    Raises:
        DatasetError: a set is missing or damaged.
        StudyError: the results file cannot be used.
        KeyboardInterrupt: interrupted; the report of what has finished is written before.
    """
    features = small_features if study is SMOKE else partial(features_of, folder=folder / "features", data_dir=data_dir)
    page, threads = folder / f"{NAME}.md", torch.get_num_threads()
    with Store(results or folder / f"{NAME}-results.json") as store:
        clock = Clock(budget_minutes, partial(_expected, store))
        torch.set_num_threads(1)
        begun: list[FederatedRun] = []

        def fits(run: FederatedRun) -> bool:
            begun.extend([run] if (found := clock.fits(run)) else [])
            return found

        try:
            with clock.stopping():
                work(study, store, features, lambda name, run, accuracy: told(_line(name, run, accuracy)), fits)
        except TimeIsUp:
            _LOG.warning(
                "the time given was up: stopped %s; what had finished is kept, and the same command goes on, which begins the "
                "stopped one anew", _where(begun[-1]),
            )  # fmt: skip
        finally:
            torch.set_num_threads(threads)
            placed(page, lambda part: part.write_text(f"# {TITLE}\n\n{tables(study, store)}\n", "utf-8"))
            figure(study, store, folder / f"{NAME}.png")
    return page


def _expected(store: Store, run: FederatedRun) -> float | None:
    """Seconds of a cell: the longest of its task with as many clients."""
    rows = [row for row in store if (row["run"]["task"], row["run"]["clients"]) == (run.task, run.clients)]
    return max((row["seconds"] for row in rows), default=None)


def _line(name: str, run: FederatedRun, accuracy: float) -> str:
    return f"{_where(run)}: {ARMS[name].label}: {100 * accuracy:.2f} % ({run.evaluate_on})"


def _where(run: FederatedRun) -> str:
    return f"{run.task}, {run.partition}, ε = {run.epsilon:g}, seed {run.seed}"
