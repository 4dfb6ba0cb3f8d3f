"""Which cells the federated study is made of: arms tuned alike at ε = 1 on a validation split, then judged on the test set.

Every tuned arm gets the same number of points of a Sobol sequence over its settings. The controls are not tuned: they take over
the settings of a second-order arm and leave its second order out, so that nothing else differs.

    fedgd-matched     θ ← θ − (η/ρ) ḡ                    control of sofim            (without M Mᵀ in the step)
    fedavgm-matched   m ← β m + ḡ, θ ← θ − (η/ρ)(1−β) m  control of sofim-momentum   (without ‖M‖² in the step)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dpkfc.studies.arms import Choice, Range, Space
from dpkfc.studies.cell import Plain
from dpkfc.studies.federated.cell import CLIENTS, IID, ROUNDS, FederatedRun, run_cell
from dpkfc.studies.federated.features import Features
from dpkfc.studies.store import Store

__all__ = ["ARMS", "Arm", "Study", "work"]

_COMMON: Space = {"rate": Range(0.03, 10.0), "clip": Range(0.3, 30.0)}
_BETA: Space = {"beta": Choice((0.5, 0.8, 0.9, 0.95))}
_SOFIM: Space = {**_COMMON, **_BETA, "rho": Range(0.01, 10.0)}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the comparison.

    Attributes:
        label: in tables.
        rule: of the cells.
        space: what is searched; empty for a control.
        control_of: the arm whose settings a control takes over.
        taken: names of those settings.
        fixed: settings of an arm that is neither tuned nor a control: those of the paper's first version.
        only: the one task of such an arm; no Dirichlet partition.
    """

    label: str
    rule: str
    space: Space
    control_of: str = ""
    taken: tuple[str, ...] = ()
    fixed: Mapping[str, Plain] = field(default_factory=dict)
    only: str = ""


_PAPER: Mapping[str, Plain] = {"rate": 0.1, "clip": 10.0}
ARMS = {
    "fedgd": Arm(label="DP-FedGD", rule="fedgd", space=_COMMON),
    "fedavgm": Arm(label="DP-FedAvgM", rule="fedavgm", space={**_COMMON, **_BETA}),
    "sofim": Arm(label="DP-FedSOFIM, gradient", rule="sofim", space=_SOFIM),
    "fedgd-matched": Arm(
        label="DP-FedGD at its η/ρ (control)", rule="fedgd", space={}, control_of="sofim", taken=("rate", "clip")
    ),
    "sofim-momentum": Arm(label="DP-FedSOFIM, momentum", rule="sofim-momentum", space=_SOFIM),
    "fedavgm-matched": Arm(
        label="DP-FedAvgM at its η/ρ, β (control)", rule="fedavgm", space={}, control_of="sofim-momentum",
        taken=("rate", "clip", "beta"),
    ),
    "dp-kfc": Arm(label="federated DP-KFC", rule="dp-kfc", space={**_COMMON, "damping": Range(0.01, 1.0)}),
    "paper-fedgd": Arm(label="DP-FedGD, η = 0.1 (paper)", rule="fedgd", space={}, fixed=_PAPER, only="cifar10"),
    "paper-sofim": Arm(
        label="DP-FedSOFIM, η = 0.1, ρ = 0.5, β = 0.9 (paper)", rule="sofim", space={}, only="cifar10",
        fixed={**_PAPER, "rate": 0.2, "rho": 0.5, "beta": 0.9},
    ),
    "paper-matched": Arm(
        label="DP-FedGD, η = 0.2 (its control)", rule="fedgd", space={}, fixed={**_PAPER, "rate": 0.2}, only="cifar10"
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the study is.

    Attributes:
        tasks: names of features.
        epsilons: of the tests.
        tuned_at: ε of the trials.
        trials: of every arm that is tuned.
        seeds: of the tests, by task: initial weights and partition.
        alphas: of the Dirichlet partitions, which are tested at `tuned_at`.
        most_seeds: of the Dirichlet partitions.
        tuning_clients: of the trials. The law of a result is the same for any number of clients, and few cost less.
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

    def trials_of(self, task: str, name: str) -> list[FederatedRun]:
        """The trials of one arm; none for a control."""
        arm = ARMS[name]
        return [
            FederatedRun(
                task=task, rule=arm.rule, settings=_sorted(settings), epsilon=self.tuned_at, clients=self.tuning_clients,
                rounds=self.rounds, seed=_TUNING_SEED, evaluate_on="validation",
            )
            for settings in _points(arm.space, self.trials)
        ]  # fmt: skip

    def chosen(self, store: Store, task: str, name: str) -> dict[str, Any] | None:
        """The settings of an arm: those of its best trial, or what a control takes over; None before all trials are done."""
        arm = ARMS[name]
        if arm.fixed:
            return dict(arm.fixed) if arm.only == task else None
        if arm.control_of:
            found = self.chosen(store, task, arm.control_of)
            return None if found is None else {key: found[key] for key in arm.taken}
        rows = [store.get(run) for run in self.trials_of(task, name)]
        if any(row is None for row in rows):
            return None
        best: Mapping[str, Any] = max((row for row in rows if row is not None), key=lambda row: row["accuracy"])
        return dict(best["run"]["settings"])

    def test(
        self, task: str, name: str, settings: Mapping[str, Plain], *, epsilon: float, seed: int, partition: str = IID
    ) -> FederatedRun:
        """One run on the test set."""
        return FederatedRun(
            task=task, rule=ARMS[name].rule, settings=_sorted(settings), epsilon=epsilon, partition=partition,
            clients=self.clients, rounds=self.rounds, seed=seed,
        )  # fmt: skip

    def count(self, task: str) -> int:
        """Seeds of a task."""
        return self.seeds if isinstance(self.seeds, int) else self.seeds[task]

    @property
    def size(self) -> int:
        """Cells, trials and tests: at most, as an arm and a control that come to equal settings share theirs."""
        tuned = sum(bool(arm.space) for arm in ARMS.values())
        fixed = sum(bool(arm.fixed) and arm.only in self.tasks for arm in ARMS.values())
        arms = len(ARMS) - sum(bool(arm.fixed) for arm in ARMS.values())
        seeds = {task: self.count(task) for task in self.tasks}
        tests = sum(arms * (n * len(self.epsilons) + min(n, self.most_seeds) * len(self.alphas)) for n in seeds.values())
        extra = fixed * seeds.get("cifar10", 0) * len(self.epsilons)
        return len(self.tasks) * tuned * self.trials + tests + extra

    def tests(self, store: Store) -> list[tuple[str, FederatedRun]]:
        """(arm, run) of all tests whose settings are known, what matters most first."""
        found: list[tuple[int, int, int, str, FederatedRun]] = []
        for task in self.tasks:
            chosen = {name: settings for name in ARMS if (settings := self.chosen(store, task, name)) is not None}
            for seed in range(self.count(task)):
                few = seed < self.most_seeds
                places = [(IID, epsilon) for epsilon in self.epsilons]
                places += [(f"dirichlet-{alpha:g}", self.tuned_at) for alpha in self.alphas if few]
                for partition, epsilon in places:
                    for name, settings in chosen.items():
                        if partition == IID or not ARMS[name].fixed:
                            run = self.test(task, name, settings, epsilon=epsilon, seed=seed, partition=partition)
                            found.append((self._stage(run), seed, len(found), name, run))
        return [(name, run) for *_, name, run in sorted(found, key=lambda one: one[:3])]

    def _stage(self, run: FederatedRun) -> int:
        """The first task with a few seeds, the others at the ε of the tuning, Dirichlet partitions, other ε, more seeds."""
        first, even = run.task == self.tasks[0], run.partition == IID
        if even and run.seed >= self.most_seeds:
            return 5
        if even:
            return 0 if first else 1 if run.epsilon == self.tuned_at else 4
        return 2 if first else 3

    def cells(self, store: Store) -> Iterator[tuple[str, FederatedRun]]:
        """(arm, run) of all that is left: first the trials of all tasks, then the tests."""
        for task in self.tasks:
            for name in ARMS:
                yield from ((name, run) for run in self.trials_of(task, name) if store.get(run) is None)
        yield from ((name, run) for name, run in self.tests(store) if store.get(run) is None)


_TUNING_SEED = 1000


def _sorted(settings: Mapping[str, Plain]) -> tuple[tuple[str, Plain], ...]:
    return tuple(sorted(settings.items()))


def _points(space: Space, count: int) -> list[dict[str, Plain]]:
    """Points of a scrambled Sobol sequence over the settings, to three digits; none for no settings."""
    if not space:
        return []
    draws = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=0).draw(count).tolist()
    return [{name: _value(of, u) for (name, of), u in zip(space.items(), row, strict=True)} for row in draws]


def _value(of: Range | Choice, u: float) -> Plain:
    if isinstance(of, Choice):
        return of.values[min(int(u * len(of.values)), len(of.values) - 1)]
    value = math.exp(math.log(of.low) + u * math.log(of.high / of.low)) if of.log else of.low + u * (of.high - of.low)
    return float(f"{value:.3g}")


def work(
    study: Study,
    store: Store,
    features: Callable[[str], Features],
    told: Callable[[str, FederatedRun, float], None],
    fits: Callable[[FederatedRun], bool] = lambda run: True,
) -> None:
    """Run what is left of a study, one cell after the other; each is on the disk before the next begins.

    Args:
        study: what to run.
        store: takes every row.
        features: of a task, by its name; asked once for each.
        told: called after every cell with arm, run and accuracy.
        fits: whether a cell can still be run.
    """
    known: dict[str, Features] = {}
    for name, run in study.cells(store):
        if not fits(run):
            continue
        if run.task not in known:
            known[run.task] = features(run.task)
        row = run_cell(run, known[run.task])
        store.put(run, {**row, "tag": {"arm": name}})
        told(name, run, row["accuracy"])
