"""The accuracy study: arms tuned alike at ε = 1, then judged on the test set at several ε."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.tuning.arms import Arm, Range, arm_of
from dpkfc.app.tuning.runs import Plain, Run
from dpkfc.app.tuning.search import Search
from dpkfc.app.tuning.study_progress import Task
from dpkfc.app.tuning.trials import SEED, Trials
from dpkfc.app.tuning.tuned import percent, settings_text
from dpkfc_papers.store import Listed, Store, best_trials, winners_tests
from dpkfc_papers.studies.harness import markdown, seeds_cell

OTHER = {
    "mnist-cnn": "fashion-mnist-cnn",
    "fashion-mnist-cnn": "mnist-cnn",
    "mnist-mlp": "fashion-mnist-cnn",
}
PROTOCOL: Mapping[str, Plain] = {
    "delta": 1e-5,
    "epochs": 5.0,
    "expected_batch_size": 256,
    "max_rank": 64,
}
MLP: Mapping[str, Plain] = {
    "delta": 1e-5,
    "epochs": 5.0,
    "expected_batch_size": 256,
}
TEXT: Mapping[str, Plain] = {
    "delta": 1e-5,
    "epochs": 20.0,
    "expected_batch_size": 512,
    "evaluate_every": 156,
    "max_rank": 64,
}
# Images of the other set, for every arm that takes public data.
PUBLIC = 500


_EXPONENTS = ("power_exponent", "zipf_exponent")


def use_source(arm: Arm, source: str, name: str, label: str, **settings: Plain) -> Arm:
    """Return the arm with curvature from a source that has no exponent to search."""
    return replace(
        arm,
        name=name,
        label=label,
        settings={**arm.settings, "source": source, **settings},
        space={key: values for key, values in arm.space.items() if key not in _EXPONENTS},
    )


def arms(recipe: str, public: int = PUBLIC) -> list[Arm]:
    """Return the arms of the study of a recipe: methods of the papers and their controls.

    Methods that take public data take images of the other set. Where there is no other set, they
    take the noise that DP-KFC takes.
    """
    kfc = arm_of(recipe, "dp-kfc")
    noise = str(Run.make(recipe, "dp-kfc").default("source"))
    noise_label = {"pink": "pink noise", "tokens": "random words"}.get(noise, noise)
    first = [
        arm_of(recipe, "dp-sgd"),
        replace(kfc, name=f"dp-kfc-{noise}", label=f"DP-KFC, {noise_label}"),
        arm_of(recipe, "dp-kfc-a"),
        arm_of(recipe, "dp-adam"),
        arm_of(recipe, "dp-sgd-normalised"),
    ]
    if recipe == "mnist-mlp":
        return [*first, authors(recipe)]
    if recipe == "stackoverflow-head":
        news = {"public_data": f"@ag-news-sentences:{public}"}
        with_news = use_source(kfc, "public", "dp-kfc-public", "DP-KFC, AG News", **news)
        return [*first[:2], with_news]
    adadps = arm_of(recipe, "adadps")
    ngd = arm_of(recipe, "dp-ngd")
    with_public: list[Arm] = []
    if recipe in OTHER:
        images = {"public_data": f"@{OTHER[recipe]}:{public}"}
        natural = arm_of(recipe, "dp-kfc-natural")
        with_public = [
            use_source(natural, "dead-leaves", natural.name, "DP-KFC, natural, dead leaves"),
            use_source(kfc, "public", "dp-kfc-public", "DP-KFC, public images", **images),
        ]
        adadps = use_source(adadps, "public", adadps.name, "AdaDPS, public images", **images)
        ngd = use_source(ngd, "public", ngd.name, "DP-NGD, public images", **images)
    else:
        adadps = use_source(adadps, noise, adadps.name, f"AdaDPS, {noise_label}")
        # DP-NGD projects every gradient onto all rows of its probe, so the probe is small.
        ngd = use_source(ngd, noise, ngd.name, f"DP-NGD, {noise_label}", probe_size=64)
    oracle_label = "DP-KFC, private oracle (NOT PRIVATE)"
    oracle = use_source(kfc, "private-oracle", "dp-kfc-oracle", oracle_label)
    return [
        *first,
        *with_public,
        replace(oracle, control=True),
        arm_of(recipe, "disk"),
        arm_of(recipe, "dp-adambc"),
        arm_of(recipe, "dp-kfc-random"),
        arm_of(recipe, "dp-kfc-g"),
        arm_of(recipe, "dp-kfc", "adam-bc"),
        adadps,
        ngd,
    ]


def authors(recipe: str) -> Arm:
    """Return input-side K-FAC with the damping of the authors' code.

    That damping is small and absolute, and neither layers nor the whole are scaled. Rates and
    clipping norms reach as far as the scale of a raw root asks for.
    """
    arm = arm_of(recipe, "dp-kfc-a")
    return replace(
        arm,
        name="dp-kfc-a-absolute",
        label="DP-KFC, A only, absolute damping",
        settings={"damping_mode": "absolute", "scale": "raw"},
        space={
            **arm.space,
            "damping": Range(1e-4, 1.0),
            "max_grad_norm": Range(0.1, 30.0),
        },
        first={"damping": 1e-3},
    )


@dataclass(frozen=True, kw_only=True)
class AccuracyStudy:
    """What the study is.

    Attributes:
        recipes: tasks, in the order in which they are done.
        epsilons: at which tuned arms are judged; the arms are tuned at the first.
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
            DatasetError: a data set is missing or damaged.
            ConfigError: an unknown recipe.
        """
        others = {OTHER[recipe] for recipe in self.recipes if recipe in OTHER}
        for recipe in {*self.recipes, *others}:
            find_recipe(recipe).data(run_config({"recipe": recipe, "data_dir": data_dir}))

    def sources(self, store: Store, journal: Path) -> Iterator[Trials | Listed]:
        """Yield the runs: for each recipe tuning and tests at its ε, the other ε at the end."""
        later = []
        for recipe in self.recipes:
            common = {
                **self.common,
                "epsilon": self.epsilons[0],
                "validation_size": self.validation,
            }
            compared = arms(recipe, self.public)
            opened = [self._search(arm, common, recipe, journal) for arm in compared]
            for search in opened:
                take_over(search, store)
            yield Trials(opened, store.put)
            yield Listed(self._list_tests(opened, self.epsilons[:1]), store)
            later += opened
        yield Listed(self._list_tests(later, self.epsilons[1:]), store)

    def _list_tests(self, searches: Sequence[Search], epsilons: Sequence[float]) -> Iterator[Task]:
        """Yield tests of the best settings of every finished search, by seed, ε and arm."""
        tuned = [
            (search, best) for search in searches if search.is_over and (best := search.best())
        ]
        for seed, epsilon, (search, (params, accuracy)) in product(self.seeds, epsilons, tuned):
            arm = search.arm.name
            tag = {"arm": arm, "search": "", "tuned": params, "validation": accuracy}
            run = search.run(params, seed=seed, evaluate_on="test", epsilon=epsilon)
            yield Task(run, tag=tag, label=arm)

    def _search(self, arm: Arm, common: Mapping[str, Plain], recipe: str, journal: Path) -> Search:
        return Search(arm, common, recipe, journal, trials=self.trials, seed=SEED)


def take_over(search: Search, store: Store) -> None:
    """Add the trials of a store to a search whose journal is new or was lost."""
    known = search.rows()
    for row in store:
        tag = row.get("tag", {})
        if tag.get("search") == search.name and row["hash"] not in known:
            search.add(row)


def table(
    rows: Iterable[Mapping[str, Any]],
    recipe: str,
    more: Mapping[str, Mapping[float, Sequence[float]]] | None = None,
) -> str:
    """Return what has been run of a recipe, as Markdown.

    Each arm has a line with mean and 95 % interval over the seeds, by ε.

    Args:
        rows: runs.
        recipe: its name.
        more: scores in percent by arm and ε that stand for the tests of the trials: the same
            settings with more seeds.
    """
    rows = [row for row in rows if row["run"]["recipe"] == recipe]
    tests = winners_tests(rows)
    winners = best_trials(rows)
    epsilons = sorted({row["target_epsilon"] for row in tests})
    tested = [f"test %, ε = {epsilon:g} (seeds)" for epsilon in epsilons]
    head = ["method", "trials", "best validation %", *tested, "tuned settings"]
    lines = []
    validated = [row for row in rows if row["measured_on"] == "validation"]
    for arm in arms(recipe):
        trials = [row for row in validated if row["tag"]["arm"] == arm.name]
        if not trials:
            continue
        pruned = sum(bool(row["tag"]["pruned"]) for row in trials)
        best = winners.get((recipe, arm.name))
        chosen = {}
        if best:
            optimizer = Run.make(recipe, arm.method, arm.settings).default("optimizer")
            chosen = {"optimizer": optimizer, **best["tag"]["params"]}
        own_tests = [row for row in tests if row["tag"]["arm"] == arm.name]
        scores = {epsilon: _scores(own_tests, epsilon) for epsilon in epsilons}
        scores |= (more or {}).get(arm.name, {})
        cells = [
            arm.label,
            f"{len(trials)} ({pruned} pruned)",
            percent(best["accuracy"]) if best else "–",
            *(seeds_cell(scores[epsilon]) for epsilon in epsilons),
            settings_text(chosen),
        ]
        lines.append(cells)
    return markdown(head, lines)


def _scores(tests: Iterable[Mapping[str, Any]], epsilon: float) -> Sequence[float]:
    return [100 * row["accuracy"] for row in tests if row["target_epsilon"] == epsilon]
