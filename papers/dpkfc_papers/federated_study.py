"""The federated study: methods tuned alike at ε = 1, then evaluated on the test set.

Every tuned method gets the same number of points of a Sobol sequence over its settings. Controls
are not tuned. They take over the settings of a second-order method and leave out its second order,
so that nothing else differs.

    fedgd-matched     θ ← θ − (η/ρ) ḡ                    control of sofim, without M Mᵀ
    fedavgm-matched   m ← β m + ḡ, θ ← θ − (η/ρ)(1−β) m  control of sofim-momentum, without ‖M‖²
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dpkfc.app.tuning.arms import Choice, Range, Space
from dpkfc.app.tuning.runs import Plain
from dpkfc_papers.federated_features import Features
from dpkfc_papers.federated_runs import (
    CLIENTS,
    IID,
    ROUNDS,
    FederatedRun,
    Record,
    Settings,
    execute_run,
)
from dpkfc_papers.store import Store

_COMMON: Space = {"rate": Range(0.03, 10.0), "clip": Range(0.3, 30.0)}
_BETA: Space = {"beta": Choice((0.5, 0.8, 0.9, 0.95))}
_SOFIM: Space = {**_COMMON, **_BETA, "rho": Range(0.01, 10.0)}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the comparison.

    Attributes:
        label: in tables.
        rule: of the runs.
        space: the settings that are searched; empty for a control.
        control_of: the method whose settings a control takes over.
        taken: names of these settings.
        fixed: settings of a method that is neither tuned nor a control, from the paper's first
            version.
        only: the one task of a method with fixed settings, which has no Dirichlet partition.
    """

    label: str
    rule: str
    space: Space = field(default_factory=dict)
    control_of: str = ""
    taken: tuple[str, ...] = ()
    fixed: Settings = field(default_factory=dict)
    only: str = ""


_PAPER: Settings = {"rate": 0.1, "clip": 10.0}
METHODS = {
    "fedgd": Method(label="DP-FedGD", rule="fedgd", space=_COMMON),
    "fedavgm": Method(label="DP-FedAvgM", rule="fedavgm", space={**_COMMON, **_BETA}),
    "sofim": Method(label="DP-FedSOFIM, gradient", rule="sofim", space=_SOFIM),
    "fedgd-matched": Method(
        label="DP-FedGD at its η/ρ (control)",
        rule="fedgd",
        control_of="sofim",
        taken=("rate", "clip"),
    ),
    "sofim-momentum": Method(label="DP-FedSOFIM, momentum", rule="sofim-momentum", space=_SOFIM),
    "fedavgm-matched": Method(
        label="DP-FedAvgM at its η/ρ, β (control)",
        rule="fedavgm",
        control_of="sofim-momentum",
        taken=("rate", "clip", "beta"),
    ),
    "dp-kfc": Method(
        label="federated DP-KFC", rule="dp-kfc", space={**_COMMON, "damping": Range(0.01, 1.0)}
    ),
    "paper-fedgd": Method(
        label="DP-FedGD, η = 0.1 (paper)",
        rule="fedgd",
        fixed=_PAPER,
        only="cifar10",
    ),
    "paper-sofim": Method(
        label="DP-FedSOFIM, η = 0.1, ρ = 0.5, β = 0.9 (paper)",
        rule="sofim",
        fixed={**_PAPER, "rate": 0.2, "rho": 0.5, "beta": 0.9},
        only="cifar10",
    ),
    "paper-matched": Method(
        label="DP-FedGD, η = 0.2 (its control)",
        rule="fedgd",
        fixed={**_PAPER, "rate": 0.2},
        only="cifar10",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Sizes of the study.

    Attributes:
        tasks: names of features.
        epsilons: of the tests.
        tuned_at: ε of the trials.
        trials: of every tuned method.
        seeds: of the tests, by task: initial weights and partition.
        alphas: of the Dirichlet partitions, which are tested at `tuned_at`.
        most_seeds: of the Dirichlet partitions.
        tuning_clients: of the trials. The distribution of a result is the same for any number of
            clients, and few clients cost less.
        rounds, clients: T and n of the tests.
    """

    tasks: tuple[str, ...] = ("cifar10", "mnist", "pneumoniamnist")
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0)
    tuned_at: float = 1.0
    trials: int = 20
    seeds: Mapping[str, int] | int = 5
    alphas: tuple[float, ...] = (0.1, 0.5)
    most_seeds: int = 3
    tuning_clients: int = 2
    rounds: int = ROUNDS
    clients: int = CLIENTS

    def trial_runs(self, task: str, name: str) -> list[FederatedRun]:
        """Return the trials of one method; none for a control."""
        method = METHODS[name]
        return [
            FederatedRun(
                task=task,
                rule=method.rule,
                settings=_sort_settings(settings),
                epsilon=self.tuned_at,
                clients=self.tuning_clients,
                rounds=self.rounds,
                seed=_TUNING_SEED,
                evaluate_on="validation",
            )
            for settings in _points(method.space, self.trials)
        ]

    def choose_settings(self, store: Store, task: str, name: str) -> Record | None:
        """Return the settings of a method's best trial, or those that a control takes over.

        Return None before all trials have run, and for a task that the method does not have.
        """
        method = METHODS[name]
        if method.fixed:
            return dict(method.fixed) if method.only == task else None
        if method.control_of:
            settings = self.choose_settings(store, task, method.control_of)
            return None if settings is None else {key: settings[key] for key in method.taken}
        records = [store.get(run) for run in self.trial_runs(task, name)]
        finished = [record for record in records if record is not None]
        if len(finished) < len(records):
            return None
        best: Mapping[str, Any] = max(finished, key=lambda record: record["accuracy"])
        return dict(best["run"]["settings"])

    def test_run(
        self,
        task: str,
        name: str,
        settings: Settings,
        *,
        epsilon: float,
        seed: int,
        partition: str = IID,
    ) -> FederatedRun:
        """Return one run on the test set."""
        return FederatedRun(
            task=task,
            rule=METHODS[name].rule,
            settings=_sort_settings(settings),
            epsilon=epsilon,
            partition=partition,
            clients=self.clients,
            rounds=self.rounds,
            seed=seed,
        )

    def count_seeds(self, task: str) -> int:
        """Return the number of seeds of a task."""
        return self.seeds if isinstance(self.seeds, int) else self.seeds[task]

    @property
    def max_runs(self) -> int:
        """Return the most trials and tests; methods with equal settings share theirs."""
        tuned = sum(bool(method.space) for method in METHODS.values())
        tests = sum(len(list(self._list_tests(task))) for task in self.tasks)
        return len(self.tasks) * tuned * self.trials + tests

    def test_runs(self, store: Store) -> list[tuple[str, FederatedRun]]:
        """Return (method, run) of all tests whose settings are known, the most important first."""
        found: list[tuple[str, FederatedRun]] = []
        for task in self.tasks:
            chosen = {name: self.choose_settings(store, task, name) for name in METHODS}
            for name, seed, partition, epsilon in self._list_tests(task):
                settings = chosen[name]
                if settings is not None:
                    run = self.test_run(
                        task, name, settings, epsilon=epsilon, seed=seed, partition=partition
                    )
                    found.append((name, run))
        return sorted(found, key=lambda pair: (self._stage(pair[1]), pair[1].seed))

    def _list_tests(self, task: str) -> Iterator[tuple[str, int, str, float]]:
        """Yield (method, seed, partition, ε) of all tests of a task."""
        for seed in range(self.count_seeds(task)):
            for partition, epsilon in self.list_places(seed):
                for name, method in METHODS.items():
                    if method.only in ("", task) and not (method.fixed and partition != IID):
                        yield name, seed, partition, epsilon

    def list_places(self, seed: int) -> list[tuple[str, float]]:
        """Return (partition, ε) of the tests with one seed."""
        places = [(IID, epsilon) for epsilon in self.epsilons]
        if seed < self.most_seeds:
            places += [(f"dirichlet-{alpha:g}", self.tuned_at) for alpha in self.alphas]
        return places

    def _stage(self, run: FederatedRun) -> int:
        """Return the place of a test in the order of the study.

        The first task with a few seeds comes first. The other tasks at the ε of the tuning,
        Dirichlet partitions, other ε and more seeds follow.
        """
        is_first_task = run.task == self.tasks[0]
        if run.partition != IID:
            return 2 if is_first_task else 3
        if run.seed >= self.most_seeds:
            return 5
        if is_first_task:
            return 0
        return 1 if run.epsilon == self.tuned_at else 4

    def remaining_runs(self, store: Store) -> Iterator[tuple[str, FederatedRun]]:
        """Yield (method, run) of all remaining runs: first all trials, then the tests."""
        for task in self.tasks:
            for name in METHODS:
                for run in self.trial_runs(task, name):
                    if store.get(run) is None:
                        yield name, run
        for name, run in self.test_runs(store):
            if store.get(run) is None:
                yield name, run


_TUNING_SEED = 1000


def _sort_settings(settings: Settings) -> tuple[tuple[str, Plain], ...]:
    return tuple(sorted(settings.items()))


def _points(space: Space, count: int) -> list[dict[str, Plain]]:
    """Return points of a scrambled Sobol sequence over the settings, to three digits."""
    if not space:
        return []
    engine = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=0)
    points = []
    for row in engine.draw(count).tolist():
        point = {}
        for (name, values), u in zip(space.items(), row, strict=True):
            point[name] = _setting(values, u)
        points.append(point)
    return points


def _setting(values: Range | Choice, u: float) -> Plain:
    """Return the value at the fraction u of a range or of choices."""
    if isinstance(values, Choice):
        count = len(values.values)
        return values.values[min(int(u * count), count - 1)]
    if values.log:
        value = math.exp(math.log(values.low) + u * math.log(values.high / values.low))
    else:
        value = values.low + u * (values.high - values.low)
    return float(f"{value:.3g}")


def run_remaining(
    study: Study,
    store: Store,
    features: Callable[[str], Features],
    on_run: Callable[[str, FederatedRun, float], None],
    fits: Callable[[FederatedRun], bool] = lambda run: True,
) -> None:
    """Execute the remaining runs of a study; each record is on the disk before the next run starts.

    Args:
        study: to run.
        store: takes every record.
        features: maps a task's name to its features; called once a task.
        on_run: called after every run with method, run and accuracy.
        fits: whether a run can still be started.
    """
    known: dict[str, Features] = {}
    for name, run in study.remaining_runs(store):
        if not fits(run):
            continue
        if run.task not in known:
            known[run.task] = features(run.task)
        record = execute_run(run, known[run.task])
        store.put(run, {**record, "tag": {"arm": name}})
        on_run(name, run, record["accuracy"])


NAME = "dp-fedsofim"
TITLE = "DP-FedSOFIM: a linear head on frozen features, 20 clients, with matched controls"
STUDY = Study(seeds={"cifar10": 5, "mnist": 3, "pneumoniamnist": 3})
SMOKE = Study(
    tasks=("cifar10", "pneumoniamnist"),
    epsilons=(1.0, 10.0),
    trials=2,
    seeds=2,
    alphas=(0.5,),
    most_seeds=1,
    rounds=3,
    clients=4,
)
