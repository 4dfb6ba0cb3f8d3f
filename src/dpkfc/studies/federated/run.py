"""The study as it is run: its sizes, its files and how a cell is told of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dpkfc.report.run_folder import placed
from dpkfc.studies.federated.cell import FederatedRun
from dpkfc.studies.federated.features import features_of, small_features
from dpkfc.studies.federated.report import figure, tables
from dpkfc.studies.federated.study import ARMS, Study, work
from dpkfc.studies.store import Store

__all__ = ["NAME", "SMOKE", "STUDY", "TITLE", "reported", "reproduce"]

NAME, TITLE = "dp-fedsofim", "DP-FedSOFIM: a linear head on frozen features, 20 clients, with matched controls"
STUDY = Study(seeds={"cifar10": 5, "mnist": 3, "pneumoniamnist": 3})
SMOKE = Study(tasks=("cifar10", "pneumoniamnist"), epsilons=(1.0, 10.0), trials=2, seeds=2, alphas=(0.5,), most_seeds=1,
              rounds=3, clients=4)  # fmt: skip


def reproduce(
    study: Study, results: Path, folder: Path, *, data_dir: str = "", told: Callable[[str], None] = lambda line: None
) -> None:
    """Run what is left of the study.

    Args:
        study: `STUDY`, or `SMOKE` on made-up features.
        results: file of the rows.
        folder: of networks and features.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        told: takes a line after every cell.

    Raises:
        DatasetError: a set is missing or damaged.
        StudyError: the results file cannot be used.
    """
    features = small_features if study is SMOKE else partial(features_of, folder=folder / "features", data_dir=data_dir)
    with Store(results) as store:
        work(study, store, features, lambda name, run, accuracy: told(_line(name, run, accuracy)))


def reported(study: Study, folder: Path, *, data_dir: str = "", told: Callable[[str], None] = lambda line: None) -> Path:
    """Run what is left of the study below a folder and write its report and picture there; the path of the report.

    Raises:
        DatasetError, StudyError: as of `reproduce`.
        KeyboardInterrupt: interrupted; the report of what has finished is written before.
    """
    results, page = folder / f"{NAME}-results.json", folder / f"{NAME}.md"
    try:
        reproduce(study, results, folder, data_dir=data_dir, told=told)
    finally:
        store = Store(results)
        placed(page, lambda part: part.write_text(f"# {TITLE}\n\n{tables(study, store)}\n", "utf-8"))
        figure(study, store, folder / f"{NAME}.png")
    return page


def _line(name: str, run: FederatedRun, accuracy: float) -> str:
    where = f"{run.task}, {run.partition}, ε = {run.epsilon:g}, seed {run.seed}"
    return f"{where}: {ARMS[name].label}: {100 * accuracy:.2f} % ({run.evaluate_on})"
