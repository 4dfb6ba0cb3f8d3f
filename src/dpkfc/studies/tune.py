"""Tuning: the same number of trials for every arm, in rounds, so that a study that is cut short has compared all of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc.studies.arms import Arm, arms_for
from dpkfc.studies.begun import Begun
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.clock import minutes_left
from dpkfc.studies.closing import reported
from dpkfc.studies.errors import StudyError
from dpkfc.studies.pool import Place, Task, drive
from dpkfc.studies.progress import Console, StudyProgress
from dpkfc.studies.search import ADAPTIVE, SEARCHES, Search, load_optuna, other_kind
from dpkfc.studies.store import Store
from dpkfc.studies.tuned import ArmResult, Tuned, cost_of
from dpkfc.studies.tuning_cost import TrialLaw, draw, trial_law

__all__ = ["SEED", "Trials", "TuneSettings", "expected_seconds", "searches", "tune", "validation_size"]

SEED = 100  # of tuning runs; the seeds of tests are others
BLOCK = 5
_MOST_VALIDATION, _SHARE = 5000, 10


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What a tuning study is.

    Attributes:
        recipe: the task.
        methods: that are compared.
        trials: of every arm; for a random search the mean of their number.
        controls: whether matched controls are added.
        search: "tpe", or "random" for an ε with tuning counted.
        count: law of the number of trials of a random search: "geometric", "poisson", or a shape above 0 of the truncated
            negative binomial law.
        optimizer: for methods that take any; empty as the recipe says.
        settings: laid over the recipe's for every arm, such as epsilon.

    Raises:
        StudyError: a value outside its range.
    """

    recipe: str
    methods: tuple[str, ...]
    trials: int = 20
    controls: bool = True
    search: str = "tpe"
    count: str = "geometric"
    optimizer: str = ""
    settings: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.methods:
            raise StudyError("which methods? give --method once or several times")
        if self.trials < 1:
            raise StudyError(f"trials = {self.trials}: every method needs one or more")
        if self.search not in SEARCHES:
            raise StudyError(f"search = {self.search!r} is not known; {' | '.join(SEARCHES)}")
        searched = {name for arm in self.arms() for name in arm.space} & set(self.settings)
        if searched:
            raise StudyError(f"{sorted(searched)[0]} is searched for one of the methods and cannot be given as well")
        if self.settings.get("adam_bc_floor") and any("adam_bc_resolution" in arm.space for arm in self.arms()):
            raise StudyError("adam_bc_resolution is searched for one of the methods and means nothing beside adam_bc_floor")
        if self.search == "random":
            trial_law(self.count, self.trials)

    def arms(self) -> list[Arm]:
        """What is compared, controls included."""
        return arms_for(self.recipe, list(self.methods), controls=self.controls, optimizer=self.optimizer)


def validation_size(recipe: str, settings: Mapping[str, Plain]) -> int:
    """The validation split: as given, or a tenth of the training set, at most 5,000 examples.

    Raises:
        DatasetError: missing or damaged data.
        ConfigError: an unknown recipe or setting.
    """
    from dpkfc.recipes.catalogue import find_recipe, run_config

    if given := settings.get("validation_size"):
        return int(given)
    whole = find_recipe(recipe).data(run_config({"recipe": recipe, **settings}))
    return min(_MOST_VALIDATION, len(whole.train[1]) // _SHARE)


def searches(
    arms: Sequence[Arm],
    common: Mapping[str, Plain],
    recipe: str,
    store: Store,
    storage: Path,
    *,
    trials: int | Mapping[str, int],
    kind: str = "tpe",
) -> list[Search]:
    """One search an arm, taken up where an earlier process left it."""
    rows = list(store)
    found = []
    for arm in arms:
        count = trials if isinstance(trials, int) else trials[arm.name]
        found.append(Search(arm, common, recipe, storage, trials=count, kind=kind, seed=SEED, rows=rows))
    return found


class Trials:
    """The trials of several searches as a source of cells: five of each, then five more of each, and so on.

    Args:
        searches: one an arm.
        store: takes every trial that ends.
    """

    def __init__(self, searches: Sequence[Search], store: Store) -> None:
        self._searches, self._store = list(searches), store

    @property
    def over(self) -> bool:
        """Whether every trial has ended."""
        return all(search.over for search in self._searches)

    @property
    def failures(self) -> dict[str, str]:
        """Trials that could not be run, now or in an earlier call, and why."""
        return {f"{one.arm.label}, trial {key}": why for one in self._searches for key, why in one.failures().items()}

    def next(self, fits: Callable[[Run], bool]) -> Task | None:
        """The next trial of the search that has begun the fewest blocks."""
        waiting = [search for search in self._searches if search.begun < search.trials]
        if not waiting:
            return self._once_more(fits)
        search = min(waiting, key=lambda one: one.begun // BLOCK)
        if not fits(search.run({}, seed=SEED, evaluate_on="validation")):
            return None
        key, run = search.ask()
        return Task(run, tag=(search, key), watched=search.kind == "tpe", label=search.arm.name)

    def _once_more(self, fits: Callable[[Run], bool]) -> Task | None:
        """A trial that was stopped against fewer others than there are now."""
        for search in self._searches:
            if not search.over and fits(search.run({}, seed=SEED, evaluate_on="validation")):
                again = search.ask_again()
                if again is not None:
                    return Task(again[1], tag=(search, again[0]), watched=True, label=search.arm.name)
        return None

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Whether a trial is worth going on."""
        search, key = task.tag
        return search.report(key, number, accuracy)

    def done(self, task: Task, row: dict[str, Any], ended: bool) -> None:
        """Keep a trial: on the disk first, then for the search."""
        search, key = task.tag
        tag = {"search": search.name, "arm": search.arm.name, "params": search.params_of(key), "pruned": ended}
        tag |= {} if search.kind == ADAPTIVE else {"kind": search.kind}
        self._store.put(task.run, {**row, "tag": tag})
        search.tell(key, row["accuracy"], ended)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """A trial that cannot be run counts and says nothing about its arm; one that was lost is tried again."""
        search, key = task.tag
        (search.lose if lost else search.fail)(key, reason)


def expected_seconds(store: Store) -> Callable[[Run], float | None]:
    """Seconds of a cell from those that have run: the longest of its recipe and method, else of its recipe, at equal steps."""

    def expected(run: Run) -> float | None:
        rows = [row for row in store if row["run"]["recipe"] == run.recipe and not row.get("tag", {}).get("pruned")]
        alike = [row for row in rows if row["run"]["method"] == run.method] or rows
        if not alike:
            return None
        rate = max(row.get("wall_seconds", 0.0) / max(1, row["steps"]) for row in alike)
        config = run.config()
        size = max(row["dataset_size"] for row in alike)
        return rate * (config.steps or config.epochs * size / config.expected_batch_size)

    return expected


def tune(
    settings: TuneSettings,
    folder: Path,
    *,
    data_dir: str = "",
    workers: int = 1,
    budget_minutes: float | None = None,
    console: Console | None = None,
) -> Tuned:
    """Tune the arms of a recipe, or go on where an earlier call stopped; the report is in the folder afterwards.

    Args:
        settings: what is tuned.
        folder: for results, trials, ledgers and report.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        workers: trials at once.
        budget_minutes: no trial is started that would not end in time, and those that run when it is up are stopped.
        console: where progress is drawn.

    Raises:
        StudyError: Optuna is missing, a file of the folder cannot be used, or the disk is full.
        DatasetError: missing or damaged data.
        ConfigError: settings that do not go together.
        KeyboardInterrupt: interrupted; the report of what has finished is written before.
    """
    load_optuna()
    left = minutes_left(budget_minutes)
    given = {**settings.settings, **({"data_dir": data_dir} if data_dir else {})}
    common = {**settings.settings, "validation_size": validation_size(settings.recipe, given)}
    arms = settings.arms()
    law = trial_law(settings.count, settings.trials) if settings.search == "random" else None
    if law is not None and settings.settings.get("sampler") == "truncated_poisson":
        raise StudyError(
            "the choice of a random search cannot be counted with --sampler truncated_poisson, whose law RDP does not repeat and "
            "select; take poisson, or --search tpe, which counts no choice"
        )
    with Store(folder / "results.json") as store:
        _check_terms(store, settings, arms, common)
        trials = settings.trials if law is None else _drawn(folder / "trials.json", arms, law)
        storage = folder / "trials.sqlite3"
        found = searches(arms, common, settings.recipe, store, storage, trials=trials, kind=settings.search)
        source = Trials(found, store)
        place = Place(folder, data_dir)
        total = sum(search.trials for search in found)
        made: list[Tuned] = []

        def report() -> None:
            made.append(_tuned(settings, found, source, law, place))
            made[-1].write(folder)

        begun = sum(search.begun for search in found)
        with reported(report), StudyProgress(total, done=begun, console=console) as progress:
            drive(
                source, place, workers=workers, budget_minutes=left(), expected=expected_seconds(store), watcher=progress,
            )  # fmt: skip
    return made[-1]


def _check_terms(store: Store, study: TuneSettings, arms: Sequence[Arm], common: Mapping[str, Plain]) -> None:
    """Refuse results of another kind of search, at another ε, or with other settings that all trials share.

    A random search is of trials that are independent and of a number drawn before them: one that another search chose
    must not be among them. Results of other settings cannot be compared.

    Raises:
        StudyError: naming the kind, or the first setting that differs.
    """
    known = {arm.name: arm for arm in arms}
    for row in store:
        tag, settings = row.get("tag", {}), row["run"]["settings"]
        if "params" in tag and tag.get("kind", ADAPTIVE) != study.search:
            raise other_kind(store.path, study.search)
        arm = known.get(tag.get("arm")) if row["run"]["recipe"] == study.recipe else None
        if arm is None or "params" not in tag:
            continue
        before = {name: value for name, value in settings.items() if name not in tag["params"] and name not in arm.settings}
        now = {name: value for name, value in common.items() if name not in tag["params"] and name not in arm.settings}
        other = next((name for name in sorted({*before, *now}) if before.get(name) != now.get(name)), None)
        if other is not None:
            told = ["the recipe's own" if other not in of else repr(of[other]) for of in (before, now)]
            raise StudyError(
                f"{store.path} holds trials of {arm.label} with {other} = {told[0]}, and this search has {told[1]}; choose "
                "another --out, or the settings of then"
            )


def _drawn(path: Path, arms: Sequence[Arm], law: TrialLaw) -> dict[str, int]:
    """The number of trials of every arm, drawn once before any trial and kept."""
    from dpkfc.report.run_folder import placed

    stated = {"law": law.name, "mean": law.mean}
    try:
        content = json.loads(path.read_text("utf-8"))
        kept = {str(name): int(count) for name, count in content["trials"].items()}
    except FileNotFoundError:
        content, kept = stated, {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StudyError(f"{path} is damaged ({error}); the numbers of trials were drawn in it: choose another --out") from None
    if {name: content.get(name) for name in stated} != stated:
        raise StudyError(f"{path} holds numbers of trials drawn from another law; choose another --out")
    trials = {arm.name: kept.get(arm.name, -1) for arm in arms}
    trials = {name: draw(law) if count < 0 else count for name, count in trials.items()}
    text = json.dumps({**stated, "trials": {**kept, **trials}}, indent=1) + "\n"
    placed(path, lambda part: part.write_text(text, "utf-8"), private=True)
    return trials


def _tuned(
    settings: TuneSettings, found: Sequence[Search], source: Trials, law: TrialLaw | None, place: Place
) -> Tuned:
    from dpkfc.recipes.train import prepare

    run = found[0].run({}, seed=SEED, evaluate_on="validation")
    plan = prepare(run.config(data_dir=place.data_dir)).plan
    whole = found[0].run({}, seed=SEED, evaluate_on="test")
    final = prepare(whole.config(data_dir=place.data_dir)).plan if law is not None else None
    begun = Begun.of(place.folder / "runs")
    cost = cost_of(plan, begun, law, len(found), final=final, over=source.over)
    results = sorted((_arm_result(search, settings, law) for search in found), key=lambda one: -(one.accuracy or 0.0))
    return Tuned(
        recipe=settings.recipe, search=settings.search, planned=settings.trials,
        validation=run.config().validation_size, epsilon=plan.target_epsilon or plan.epsilon(), delta=plan.delta,
        statement=cost.statement, unpublished=cost.unpublished, epsilon_with_tuning=cost.with_tuning,
        epsilon_with_training=cost.with_training, epsilon_composed=cost.composed, runs_begun=begun.runs, arms=results,
        complete=source.over, failures=source.failures,
    )  # fmt: skip


def _arm_result(search: Search, settings: TuneSettings, law: TrialLaw | None) -> ArmResult:
    best, counts = search.best(), search.counts()
    params = best[0] if best else {}
    flags = {**settings.settings, **search.arm.settings, **params}
    flags.pop("validation_size", None)  # the whole training set
    command = f"dpkfc train --recipe {settings.recipe} --method {search.arm.method}"
    command += "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items())
    found = f"{sum(counts.values())} trials of dpkfc tune" if law is None else _chosen_by(law, search.over)
    command += f" --chosen-by {shlex.quote(found + ' on a validation split; not in ε')}"
    return ArmResult(
        name=search.arm.name, label=search.arm.label, control=search.arm.control, trials=sum(counts.values()),
        pruned=counts["pruned"], failed=counts["failed"], accuracy=best[1] if best else None, params=params, command=command,
    )  # fmt: skip


def _chosen_by(law: TrialLaw, over: bool) -> str:
    """A random search on a public card: the law of its number of trials, never the number."""
    return f"{'a' if over else 'an unfinished'} random search of dpkfc tune ({law.name}, mean {law.mean:g})"
