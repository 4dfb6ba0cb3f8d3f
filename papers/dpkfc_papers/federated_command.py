"""Run the federated study, as `dpkfc reproduce dp-fedsofim` does, and write its report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dpkfc.app.run_folder import write_text
from dpkfc_papers.federated_features import load_features, small_features
from dpkfc_papers.federated_runs import FederatedRun
from dpkfc_papers.federated_study import METHODS, NAME, SMOKE, TITLE, Study, run_remaining
from dpkfc_papers.federated_tables import figure, tables
from dpkfc_papers.store import Store


def run_study(
    study: Study,
    folder: Path,
    *,
    results: Path | None = None,
    data_dir: str = "",
    end: float = math.inf,
    on_line: Callable[[str], None] = lambda line: None,
) -> Path:
    """Execute the remaining runs of the study on one thread, and write its report and picture.

    Args:
        study: `STUDY`, or `SMOKE` on made-up features.
        folder: of networks, features, report and picture; an earlier folder is continued.
        results: file of the records; None for a file in the folder.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        end: of `end_of`: start no run that would not end in time.
        on_line: takes a line after every run.

    Returns:
        The path of the report.

    Raises:
        DatasetError: a set is missing or damaged.
        StudyError: the results file cannot be used.
        KeyboardInterrupt: interrupted; the report of the finished runs is written before.
    """
    features = small_features
    if study is not SMOKE:
        features = partial(load_features, folder=folder / "features", data_dir=data_dir)
    page = folder / f"{NAME}.md"
    threads = torch.get_num_threads()
    with Store(results or folder / f"{NAME}-results.json") as store:
        torch.set_num_threads(1)

        def fits(run: FederatedRun) -> bool:
            left = end - time.monotonic()
            return left > 0 and _expected_seconds(store, run) <= left

        def report_run(name: str, run: FederatedRun, accuracy: float) -> None:
            on_line(
                f"{_describe(run)}: {METHODS[name].label}: {100 * accuracy:.2f} %"
                f" ({run.evaluate_on})"
            )

        try:
            run_remaining(study, store, features, report_run, fits)
        finally:
            torch.set_num_threads(threads)
            write_text(page, f"# {TITLE}\n\n{tables(study, store)}\n")
            figure(study, store, folder / f"{NAME}.png")
    return page


def _expected_seconds(store: Store, run: FederatedRun) -> float:
    """Return the seconds of the longest run of the same task with as many clients, 0 before one."""
    seconds = [
        record["seconds"]
        for record in store
        if record["run"]["task"] == run.task and record["run"]["clients"] == run.clients
    ]
    return max(seconds, default=0.0)


def _describe(run: FederatedRun) -> str:
    return f"{run.task}, {run.partition}, ε = {run.epsilon:g}, seed {run.seed}"
