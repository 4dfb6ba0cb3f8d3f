"""The accuracy study: arms tuned alike at ε = 1 on a validation split, then judged on the test set at several ε and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dpkfc.app.html.read import best_trials, winners_tests
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.tuning.pool import Task
from dpkfc.app.tuning.runs import Plain, Run, Store
from dpkfc.app.tuning.search import Arm, Range, Search, arm_of, use_public_data, use_source
from dpkfc.app.tuning.tune import Trials, percent, searches, settings_text, spread

OTHER = {"mnist-cnn": "fashion-mnist-cnn", "fashion-mnist-cnn": "mnist-cnn", "mnist-mlp": "fashion-mnist-cnn"}
PROTOCOL: Mapping[str, Plain] = {"delta": 1e-5, "epochs": 5.0, "expected_batch_size": 256, "max_rank": 64}
MLP: Mapping[str, Plain] = {"delta": 1e-5, "epochs": 5.0, "expected_batch_size": 256}
TEXT: Mapping[str, Plain] = {"delta": 1e-5, "epochs": 20.0, "expected_batch_size": 512, "evaluate_every": 156, "max_rank": 64}
PUBLIC = 500  # images of the other set, for every arm that takes public data


def arms(recipe: str, public: int = PUBLIC) -> list[Arm]:
    """The arms of the study of a recipe: methods of the papers and their controls.

    Methods that take public data take images of the other set; where there is none, the noise that DP-KFC takes.
    """
    kfc, adadps, ngd = (arm_of(recipe, name) for name in ("dp-kfc", "adadps", "dp-ngd"))
    noise = str(Run.of(recipe, "dp-kfc").default("source"))
    told = {"pink": "pink noise", "tokens": "random words"}.get(noise, noise)
    oracle = use_source(kfc, "private-oracle", "dp-kfc-oracle", "DP-KFC, private oracle (NOT PRIVATE)")
    other = f"@{OTHER[recipe]}:{public}" if recipe in OTHER else ""

    def borrowed(arm: Arm, label: str, **settings: Plain) -> Arm:
        if other:
            return use_public_data(arm, other, arm.name, f"{label}, public images")
        return use_source(arm, noise, arm.name, f"{label}, {told}", **settings)

    first = [
        arm_of(recipe, "dp-sgd"),
        replace(kfc, name=f"dp-kfc-{noise}", label=f"DP-KFC, {told}"),
        arm_of(recipe, "dp-kfc-a"),
        arm_of(recipe, "dp-adam"),
        arm_of(recipe, "dp-sgd-normalised"),
    ]
    if recipe == "mnist-mlp":
        return [*first, authors(recipe)]
    return [
        *first,
        *([use_source(arm_of(recipe, "dp-kfc-natural"), "dead-leaves", "dp-kfc-natural", "DP-KFC, natural, dead leaves")]
          if other else []),
        *([use_public_data(kfc, other, "dp-kfc-public", "DP-KFC, public images")] if other else []),
        replace(oracle, control=True),
        arm_of(recipe, "disk"),
        arm_of(recipe, "dp-adambc"),
        arm_of(recipe, "dp-kfc-random"),
        arm_of(recipe, "dp-kfc-g"),
        arm_of(recipe, "dp-kfc", "adam-bc"),
        borrowed(adadps, "AdaDPS"),
        borrowed(ngd, "DP-NGD", probe_size=64),  # it turns every gradient to all rows of its probe
    ]


def authors(recipe: str) -> Arm:
    """A only with the damping of the authors' code: a small absolute one, and no scaling of layers or of the whole.

    Rates and clips reach as far as the scale of a raw root asks for.
    """
    arm = arm_of(recipe, "dp-kfc-a")
    space = {**arm.space, "damping": Range(1e-4, 1.0), "max_grad_norm": Range(0.1, 30.0)}
    settings: dict[str, Plain] = {"damping_mode": "absolute", "scale": "raw"}
    first = {"damping": 1e-3}
    return replace(
        arm, name="dp-kfc-a-absolute", label="DP-KFC, A only, absolute damping", settings=settings, space=space, first=first
    )


@dataclass(frozen=True, kw_only=True)
class AccuracyStudy:
    """What the study is.

    Attributes:
        recipes: tasks, in the order in which they are done.
        epsilons: at which tuned arms are judged; the first is the one they are tuned at.
        seeds: of the tests, each with its own initial weights.
        trials: of every arm.
        validation: examples cut from the training set for tuning.
        public: images of the other set.
        common: settings that all arms share.
    """

    recipes: tuple[str, ...] = ("mnist-cnn", "fashion-mnist-cnn")
    epsilons: tuple[float, ...] = (1.0, 2.0, 8.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    trials: int = 20
    validation: int = 5000
    public: int = PUBLIC
    common: Mapping[str, Plain] = field(default_factory=lambda: dict(PROTOCOL))

    def check(self, data_dir: str = "") -> None:
        """Read every data set once, before anything is run.

        Raises:
            DatasetError: one is missing or damaged.
            ConfigError: an unknown recipe.
        """
        for recipe in {*self.recipes, *(OTHER[recipe] for recipe in self.recipes if recipe in OTHER)}:
            find_recipe(recipe).data(run_config({"recipe": recipe, "data_dir": data_dir}))

    def source(self, store: Store, storage: Path) -> Chain:
        """Recipe by recipe: tuning, then tests at the ε of the tuning; the other ε come last."""
        stages: list[Stage] = []
        later: list[Stage] = []
        for recipe in self.recipes:
            common = {**self.common, "epsilon": self.epsilons[0], "validation_size": self.validation}
            found = searches(arms(recipe, self.public), common, recipe, store, storage, trials=self.trials)
            stages += [Trials(found, store), Tests(found, store, self.epsilons[:1], self.seeds)]
            later.append(Tests(found, store, self.epsilons[1:], self.seeds))
        return Chain([*stages, *later])


class Stage(Protocol):
    """A source of cells that is one of several."""

    @property
    def failures(self) -> Mapping[str, str]:
        """Cells that could not be run, and why."""

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """As of `pool.Source`."""

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """As of `pool.Source`."""

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """As of `pool.Source`."""

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """As of `pool.Source`."""


class Tests:
    """Runs on the test set with the settings that won: for each seed and ε all arms that have been tuned to the end.

    Args:
        searches: of the arms.
        store: takes every run.
        epsilons: of the runs.
        seeds: of the runs.
    """

    def __init__(self, searches: Sequence[Search], store: Store, epsilons: Sequence[float], seeds: Sequence[int]) -> None:
        self._searches, self._store, self._epsilons, self._seeds = searches, store, epsilons, seeds
        self._begun: set[str] = set()
        self.failures: dict[str, str] = {}

    def _cells(self) -> Iterator[tuple[Search, Run]]:
        tuned = [(search, best[0]) for search in self._searches if search.is_over and (best := search.best()) is not None]
        for seed in self._seeds:
            for epsilon in self._epsilons:
                for search, params in tuned:
                    yield search, search.run(params, seed=seed, evaluate_on="test", epsilon=epsilon)

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """The first cell that has not run."""
        for search, run in self._cells():
            if run.hash not in self._begun and self._store.get(run) is None and fits(run):
                self._begun.add(run.hash)
                return Task(run, tag=search, label=search.arm.name)
        return None

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Nothing that was seen on the test set ends a run."""
        return True

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """Keep a run."""
        search: Search = task.tag
        best = search.best()
        tag = {"arm": search.arm.name, "search": "", "tuned": best[0] if best else {}, "validation": best[1] if best else None}
        self._store.put(task.run, {**row, "tag": tag})

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Say so; the next start of the study tries it again."""
        self.failures[f"{task.tag.arm.label}, seed {task.run.seed}"] = reason


class Chain:
    """Stages one after the other; a core that has nothing to do in one begins with the next.

    Args:
        stages: in order.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """A cell of the first stage that has one."""
        for stage in self._stages:
            task = stage.next(fits)
            if task is not None:
                return Task(task.run, tag=(stage, task), watched=task.watched, label=task.label)
        return None

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """As the stage says."""
        stage, own = task.tag
        return stage.report(own, number, accuracy)

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """To the stage."""
        stage, own = task.tag
        stage.done(own, row, ended)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """To the stage."""
        stage, own = task.tag
        stage.failed(own, reason, lost=lost)

    @property
    def failures(self) -> dict[str, str]:
        """Cells that could not be run, and why."""
        return {name: why for stage in self._stages for name, why in stage.failures.items()}


def table(rows: Iterable[Mapping[str, Any]], recipe: str) -> str:
    """What has been run of a recipe, as Markdown: an arm a line, mean ± sample standard deviation over the seeds by ε."""
    mine = [row for row in rows if row["run"]["recipe"] == recipe]
    tests, winners = winners_tests(mine), best_trials(mine)
    epsilons = sorted({row["target_epsilon"] for row in tests})
    head = ["method", "trials", "best validation %", *(f"test %, ε = {e:g} (seeds)" for e in epsilons), "tuned settings"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm in arms(recipe):
        trials = [row for row in mine if row["measured_on"] == "validation" and row["tag"]["arm"] == arm.name]
        if not trials:
            continue
        full = [row for row in trials if not row["tag"]["pruned"]]
        best = winners.get((recipe, arm.name))
        cells = [_spread(row for row in tests if row["tag"]["arm"] == arm.name and row["target_epsilon"] == e) for e in epsilons]
        optimizer = Run.of(recipe, arm.method, arm.settings).default("optimizer")
        chosen = {"optimizer": optimizer, **best["tag"]["params"]} if best else {}
        found = [percent(best["accuracy"]) if best else "–", *cells, settings_text(chosen)]
        lines.append("| " + " | ".join([arm.label, f"{len(trials)} ({len(trials) - len(full)} pruned)", *found]) + " |")
    return "\n".join(lines)


def _spread(rows: Iterable[Mapping[str, Any]]) -> str:
    values = [100 * row["accuracy"] for row in rows]
    return f"{spread(values)} ({len(values)})" if values else "–"
