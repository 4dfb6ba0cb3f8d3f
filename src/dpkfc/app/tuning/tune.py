"""Tune every arm with the same number of trials.

Trials run in rounds, so that a study that is cut short has compared all arms.
"""

from __future__ import annotations

import json
import math
import random
import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting import dp_event, rdp

from dpkfc.app.datasets import one_line
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.app.tuning.runs import (
    Console,
    Fits,
    Place,
    Plain,
    Row,
    Run,
    Store,
    StudyError,
    StudyProgress,
    Task,
    drive,
    minutes_left,
)
from dpkfc.app.tuning.search import (
    ADAPTIVE,
    SEARCHES,
    Arm,
    Search,
    arms_for,
    load_optuna,
    other_kind_error,
)
from dpkfc.privacy import ledger
from dpkfc.privacy.accounting import EpsilonCurve, event_from_dict, quiet_accountants, total_epsilon
from dpkfc.privacy.ledger import LedgerError, Verified
from dpkfc.report import rounded_up

# --------------------------------------------------------------------------------------------------
# What tuning costs: ε of a random search whose number of trials is random, and the composition of
# all trials otherwise.

SCOPE = (
    "for examples of the training part: a score on the validation part follows from private weights"
    " for them, and it is exact for validation examples, which no ε protects"
)


@dataclass(frozen=True)
class TrialLaw:
    """The law of the number of trials of a random search (Papernot and Steinke, arXiv 2110.03620).

    Attributes:
        name: for people.
        mean: expected number of trials.
        shape: infinity for Poisson, 1 for geometric, another positive number for truncated negative
            binomial.
    """

    name: str
    mean: float
    shape: float


def trial_law(text: str, mean: float) -> TrialLaw:
    """Return the distribution behind a name.

    It is "geometric", "poisson", or the shape of a truncated negative binomial distribution.

    Raises:
        StudyError: another text, or a mean below 1.
    """
    if mean < 1:
        raise StudyError(f"the mean number of trials is {mean:g}; it must be 1 or more")
    if text == "geometric":
        return TrialLaw("geometric", mean, 1.0)
    if text == "poisson":
        return TrialLaw("Poisson", mean, math.inf)
    try:
        shape = float(text)
    except ValueError:
        shape = math.nan
    if not (shape > 0 and math.isfinite(shape)):
        raise StudyError(
            f"count = {text!r} is no law of the number of trials; geometric | poisson | a shape"
            " above 0"
        )
    return TrialLaw(f"truncated negative binomial, shape {shape:g}", mean, shape)


def draw(law: TrialLaw, generator: random.Random | None = None) -> int:
    """Draw the number of trials from the secret randomness of the system, or a generator.

    It is drawn once, before any trial, and is no public number: ε covers the choice, not the count.
    Zero, which only Poisson gives, is a search without an outcome.
    """
    source = generator or secrets.SystemRandom()
    if law.shape == math.inf:
        return _poisson(law.mean, source)
    if law.mean == 1:
        # All but Poisson give at least one.
        return 1
    if law.shape == 1.0:
        return _geometric(1 / law.mean, source)
    gamma = _gamma(law)
    while True:  # negative binomial as a Poisson number of a Gamma mean, until it is not zero
        count = _poisson(source.gammavariate(law.shape, (1 - gamma) / gamma), source)
        if count > 0:
            return count


def _geometric(gamma: float, source: random.Random) -> int:
    return 1 + int(math.log(1 - source.random()) / math.log1p(-gamma))


def _poisson(mean: float, source: random.Random) -> int:
    """Arrivals of rate 1 before the mean."""
    count, time = 0, source.expovariate(1.0)
    while time < mean:
        count, time = count + 1, time + source.expovariate(1.0)
    return count


def _gamma(law: TrialLaw) -> float:
    """Return the parameter of the truncated law that has the mean.

    The mean is shape · (1 − γ) / (γ · (1 − γ^shape)), which falls with γ.
    """
    low, high = 1e-12, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        mean = law.shape * (1 - middle) / (middle * (1 - middle**law.shape))
        low, high = (middle, high) if mean > law.mean else (low, middle)
    return high


def bound_selection(
    event: dp_accounting.DpEvent,
    steps: int,
    delta: float,
    law: TrialLaw,
    relation: str,
    *,
    then: tuple[dp_accounting.DpEvent, int] | None = None,
) -> float:
    """ε of running a random number of trials of one event and releasing the best, by RDP.

    Args:
        event: of one release.
        steps: releases of one trial.
        delta: δ.
        law: of the number of trials.
        relation: "add_or_remove_one" or "replace_one".
        then: event and releases of one more run, with what the best trial shows.
    """
    relations = dp_accounting.NeighboringRelation
    neighbours = (
        relations.ADD_OR_REMOVE_ONE if relation == "add_or_remove_one" else relations.REPLACE_ONE
    )
    accountant = rdp.RdpAccountant(neighboring_relation=neighbours)
    run = dp_accounting.SelfComposedDpEvent(event, steps)
    with quiet_accountants():
        accountant.compose(dp_event.RepeatAndSelectDpEvent(run, law.mean, law.shape))
        if then is not None:
            accountant.compose(*then)
        return float(accountant.get_epsilon(delta))


# --------------------------------------------------------------------------------------------------
# What the runs of a study may have released, by their ledgers.

_OTHER = {"add_or_remove_one": "replace_one", "replace_one": "add_or_remove_one"}


@dataclass(frozen=True)
class StudyLedgers:
    """Holds every run of a folder that has a ledger.

    Runs that ended early or were killed count too, at the ε they were begun with.

    Attributes:
        runs: how many.
        releases: pairs of an event and how often it may have been released, over all runs.
        relations: neighbouring relations that their ledgers state.
        unread: ledgers of which nothing can be said, and why.
    """

    runs: int = 0
    releases: tuple[tuple[dp_accounting.DpEvent, int], ...] = ()
    relations: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> StudyLedgers:
        """Of the folder that holds the run folders; it may be missing."""
        paths = sorted(folder.glob("*/ledger.jsonl"))
        counts: Counter[str] = Counter()
        events: dict[str, dp_accounting.DpEvent] = {}
        relations, unread = set(), []
        for path in paths:
            try:
                found = _read(path)
                released = {} if found is None else _released(found)
                events |= {
                    text: event_from_dict(json.loads(text))
                    for text in released.keys() - events.keys()
                }
            except (LedgerError, OSError, ValueError) as error:
                unread.append(one_line(error))
                continue
            if found is not None and "neighbouring_relation" in found.header:
                relations.add(str(found.header["neighbouring_relation"]))
            counts.update(released)
        releases = tuple((events[text], count) for text, count in counts.items())
        return cls(len(paths), releases, frozenset(relations), tuple(unread))

    def epsilon(self, delta: float, relation: str) -> float | None:
        """Bound ε of all runs, one after the other, by RDP; None without a run or a bound."""
        if not self.runs or self.unread or _OTHER[relation] in self.relations:
            return None
        if not self.releases:
            return 0.0
        try:
            return total_epsilon(self.releases, delta, "rdp")
        except ValueError:
            return None


def _read(path: Path) -> Verified | None:
    """Read a ledger as its run would continue it.

    A last line that a kill cut short is left out, because its release never left.

    Returns:
        None where the run was killed before its first line was written.

    Raises:
        LedgerError: a line before the end was changed, left out or damaged.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    whole = (
        content + b"\n" if content[end:] and ledger.is_complete(content[end:]) else content[:end]
    )
    if not whole and ledger.begins_a_ledger(content):
        return None
    return ledger.parse(whole or content, f"{path.parent.name}/{path.name}")


def _released(found: Verified) -> dict[str, int]:
    """Return how often each event counts.

    An early end counts as planned, because what the run showed ended it.

    What is left of the plan counts as the last release of its kind did. A run without a release
    gave nothing away.
    """
    counts: Counter[str] = Counter()
    last_events: dict[str, str] = {}
    purposes: Counter[str] = Counter()
    for release in found.releases:
        event = json.dumps(release["event"], sort_keys=True)
        counts[event] += 1
        purpose = release.get("purpose", "")
        last_events[purpose] = event
        purposes[purpose] += 1
    planned = {"": found.header.get("steps"), **found.planned_extra}
    for purpose, event in last_events.items():
        most = planned.get(purpose)
        if isinstance(most, int):
            counts[event] += max(0, most - purposes[purpose])
    return counts


# --------------------------------------------------------------------------------------------------
# What came of tuning: a value, as JSON, as Markdown, and with what ε says and does not say about
# it.


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm after its trials.

    Attributes:
        name: of the arm.
        label: in tables.
        control: whether it is a matched control.
        trials: that have ended.
        pruned: of them, ended early.
        failed: of them, could not be run.
        accuracy: of the best trial on the validation split; None without a full trial. NOT PRIVATE.
        params: its settings.
        command: that trains with them on the whole training set.
    """

    name: str
    label: str
    control: bool
    trials: int
    pruned: int
    failed: int
    accuracy: float | None
    params: Mapping[str, Plain]
    command: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What ε says about a tuning study.

    Attributes:
        statement: in words; of a random search without the number of its trials, which the figure
            asks to be secret.
        unpublished: what else there is to say, to the operator only; empty where the statement says
            it all.
        epsilon_with_tuning: ε of one arm of a random search that is over, its choice counted; None
            where there is no such figure.
        epsilon_with_training: ε of that and of one training with what it chose.
        epsilon_composed: ε of all runs started, one after the other, by RDP and their ledgers; None
            where it cannot be told.
    """

    statement: str
    unpublished: str
    epsilon_with_tuning: float | None
    epsilon_with_training: float | None
    epsilon_composed: float | None


@dataclass(frozen=True, kw_only=True)
class Tuned(Cost):
    """A tuning study, and what ε says about it.

    Attributes:
        recipe: the task.
        search: "tpe" or "random".
        planned: trials of every arm; for a random search their mean.
        validation: size of the validation split.
        epsilon: of one trial.
        delta: of one trial.
        runs_begun: killed ones included, as each has spent its budget.
        arms: best first.
        complete: whether every arm has had its trials.
        failures: trials that could not be run, and why.
    """

    recipe: str
    search: str
    planned: int
    validation: int
    epsilon: float
    delta: float
    runs_begun: int
    arms: Sequence[ArmResult]
    complete: bool
    failures: Mapping[str, str]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `tune.json` and `tune.md` for their owner alone.

        They hold accuracies on private examples.

        Raises:
            RunFolderError: the disk cannot take them.
        """
        data, text = folder / "tune.json", folder / "tune.md"
        content = (
            json.dumps(
                {"version": 1, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False
            )
            + "\n"
        )
        write_text(data, content, private=True)
        write_text(text, self.markdown(), private=True)
        return data, text

    def markdown(self) -> str:
        """Return the study for people; where the number of trials is secret, one line says so."""
        secret = self.search != ADAPTIVE
        lines = [
            f"# Tuning of {self.recipe}",
            "",
            self.statement,
            "",
            "| method | validation % | trials | settings |",
            "|---|---|---|---|",
        ]
        for arm in self.arms:
            name = f"{arm.label} (control)" if arm.control else arm.label
            count = (
                "secret" if secret else f"{arm.trials} ({arm.pruned} pruned, {arm.failed} failed)"
            )
            lines.append(
                f"| {name} | {percent(arm.accuracy)} | {count} | {settings_text(arm.params)} |"
            )
        if not self.complete:
            lines += [
                "",
                "Not finished: some trials are still to run, of some methods perhaps more. The"
                " same command goes on.",
            ]
        if self.failures:
            lines += [
                "",
                "Trials that could not be run" + (" (not to be published):" if secret else ":"),
                "",
            ]
            lines += [f"- {name}: {why}" for name, why in self.failures.items()]
        lines += ["", "Train with what won, on the whole training set:", ""]
        lines += [f"    {arm.command}" for arm in self.arms if arm.accuracy is not None]
        if self.unpublished:
            lines += ["", self.unpublished]
        return "\n".join(lines) + "\n"


def percent(accuracy: float | None) -> str:
    """An accuracy in a table."""
    return "–" if accuracy is None else f"{100 * accuracy:.2f}"


def settings_text(params: Mapping[str, Plain]) -> str:
    """Settings in a table."""
    return ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in params.items()
    )


def cost_of(
    plan: Any,
    ledgers: StudyLedgers,
    law: TrialLaw | None = None,
    arms: int = 1,
    *,
    final: Any = None,
    over: bool = True,
) -> Cost:
    """What ε says about a tuning study.

    Args:
        plan: of one trial; every trial has its event and number of steps.
        ledgers: of runs that have started, in this study or before it in its folder.
        law: of the number of trials of a random search, None for a search whose trials depend on
            one another.
        arms: that were compared.
        final: plan of a training with what the search chose; None as of a trial.
        over: whether all trials have ended; a random search is accounted for as a whole.
    """
    spent = EpsilonCurve(
        plan.event, plan.delta, plan.neighbouring_relation, plan.accountant
    ).epsilon(plan.steps)
    given = f"(ε = {rounded_up(spent)}, δ = {plan.delta:g})"
    lines = [
        f"**Tuning is NOT in ε.** A run with the chosen settings is {given} as if they had been"
        " known beforehand; the search looked at private examples for every trial.",
    ]
    total, together = _together(plan, ledgers)
    chosen = trained = None
    unpublished = ""
    if law is None:
        lines += [together] if together else []
        lines.append(
            "The trials of this search were chosen after those before them (TPE, pruning), so no"
            " tighter figure exists; a random search (--search random) has one."
        )
    else:
        if together:
            unpublished = (
                f"Not to be published, since the number of trials has to stay secret: {together}"
            )
        if over:
            chosen, trained, text = _describe_choice_cost(plan, final or plan, law)
            lines.append(text)
        else:
            lines.append(
                "ε of the choice is stated once all trials that were drawn for this search have"
                " run."
            )
        if arms > 1:
            lines.append(
                f"{arms} methods were searched: what is concluded from all of them composes over"
                " them."
            )
    lines.append(
        "Validation examples are private examples that no ε here protects: their accuracies are"
        " for the operator only."
    )
    return Cost(
        statement=" ".join(lines),
        unpublished=unpublished,
        epsilon_with_tuning=chosen,
        epsilon_with_training=trained,
        epsilon_composed=total,
    )


def _together(plan: Any, ledgers: StudyLedgers) -> tuple[float | None, str]:
    """Return ε of all runs started where it is finite, with a remark; nothing without a run."""
    total = ledgers.epsilon(plan.delta, plan.neighbouring_relation)
    if total is not None:
        remark = (
            f"All {ledgers.runs} runs started compose to ε = {rounded_up(total)} by RDP, if all"
            " that they showed counts."
        )
        return total if math.isfinite(total) else None, remark  # JSON holds no infinity
    if not ledgers.runs:
        return None, ""
    why = ledgers.unread[0] if ledgers.unread else "RDP does not compose their events"
    return None, f"What the {ledgers.runs} runs started cost together cannot be told: {why}."


def _describe_choice_cost(plan: Any, final: Any, law: TrialLaw) -> tuple[float, float, str]:
    """Return ε of what a random search chose for one arm.

    With it come ε of the choice and a training, and both in words.
    """
    terms = (plan.event, plan.steps, plan.delta, law, plan.neighbouring_relation)
    chosen = bound_selection(*terms)
    trained = bound_selection(*terms, then=(final.event, final.steps))
    return (
        chosen,
        trained,
        (
            f"For one method whose number of trials was drawn beforehand ({law.name}, mean"
            f" {law.mean:g}) the settings of the best trial cost ε = {rounded_up(chosen)}, and"
            f" together with ONE further training with them ε = {rounded_up(trained)} (Papernot and"
            f" Steinke, RDP, δ = {plan.delta:g}), {SCOPE}. Both hold while the number of trials"
            " that were run stays secret."
        ),
    )


# --------------------------------------------------------------------------------------------------
# The report at the end of a study, however it ends.


@contextmanager
def reported(write: Callable[[], object]) -> Iterator[None]:
    """Write the report when the inside has ended, also where it was interrupted.

    Args:
        write: the report. Where the inside ended with a StudyError (a full disk, say), that error
            is told and not a second one of the report, which may not fit either.

    Raises:
        RunFolderError: the disk cannot take the report.
    """
    try:
        yield
    except StudyError:
        with suppress(StudyError, RunFolderError):
            write()
        raise
    except BaseException:
        write()
        raise
    write()


# --------------------------------------------------------------------------------------------------

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
        count: law of the number of trials of a random search: "geometric", "poisson", or a shape
            above 0 of the truncated negative binomial law.
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
            raise StudyError(
                f"{sorted(searched)[0]} is searched for one of the methods and cannot be given as"
                " well"
            )
        if self.settings.get("adam_bc_floor") and any(
            "adam_bc_resolution" in arm.space for arm in self.arms()
        ):
            raise StudyError(
                "adam_bc_resolution is searched for one of the methods and means nothing next to"
                " adam_bc_floor"
            )
        if self.search == "random":
            trial_law(self.count, self.trials)

    def arms(self) -> list[Arm]:
        """What is compared, controls included."""
        return arms_for(
            self.recipe, list(self.methods), controls=self.controls, optimizer=self.optimizer
        )


def validation_size(recipe: str, settings: Mapping[str, Plain]) -> int:
    """The validation split: as given, or a tenth of the training set, at most 5,000 examples.

    Raises:
        DatasetError: missing or damaged data.
        ConfigError: an unknown recipe or setting.
    """
    from dpkfc.app.recipes.catalogue import recipe_of, run_config

    if given := settings.get("validation_size"):
        return int(given)
    config = run_config({"recipe": recipe, **settings})
    return min(_MOST_VALIDATION, recipe_of(config).data(config).size // _SHARE)


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
        found.append(
            Search(arm, common, recipe, storage, trials=count, kind=kind, seed=SEED, rows=rows)
        )
    return found


@dataclass(eq=False)
class Trials:
    """Gives the trials of several searches as cells: five of each, then five more of each.

    Attributes:
        searches: one an arm.
        store: takes every trial that ends.
    """

    searches: Sequence[Search]
    store: Store

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended."""
        return all(search.is_over for search in self.searches)

    @property
    def failures(self) -> dict[str, str]:
        """Trials that could not be run, now or in an earlier call, and why."""
        return {
            f"{one.arm.label}, trial {key}": why
            for one in self.searches
            for key, why in one.failures().items()
        }

    def next(self, fits: Fits) -> Task | None:
        """The next trial of the search that has started the fewest blocks."""
        waiting = [search for search in self.searches if search.started < search.trials]
        if not waiting:
            return self._once_more(fits)
        search = min(waiting, key=lambda one: one.started // BLOCK)
        if not fits(search.run({}, seed=SEED, evaluate_on="validation")):
            return None
        key, run = search.ask()
        return Task(run, tag=(search, key), watched=search.kind == "tpe", label=search.arm.name)

    def _once_more(self, fits: Fits) -> Task | None:
        """A trial that was stopped against fewer others than there are now."""
        for search in self.searches:
            if not search.is_over and fits(search.run({}, seed=SEED, evaluate_on="validation")):
                again = search.ask_again()
                if again is not None:
                    return Task(
                        again[1], tag=(search, again[0]), watched=True, label=search.arm.name
                    )
        return None

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Whether a trial is worth going on."""
        search, key = task.tag
        return search.report(key, number, accuracy)

    def done(self, task: Task, row: Row, ended: bool) -> None:
        """Keep a trial: on the disk first, then for the search."""
        search, key = task.tag
        tag = {
            "search": search.name,
            "arm": search.arm.name,
            "params": search.params_of(key),
            "pruned": ended,
        }
        tag |= {} if search.kind == ADAPTIVE else {"kind": search.kind}
        self.store.put(task.run, {**row, "tag": tag})
        search.tell(key, row["accuracy"], ended)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Count a trial that cannot be run, without a word on its arm; try a lost one again."""
        search, key = task.tag
        (search.lose if lost else search.fail)(key, reason)


def expected_seconds(store: Store) -> Callable[[Run], float | None]:
    """Return the seconds of a cell, from the longest run of its recipe and method.

    Without one, the longest run of its recipe counts, at equal steps.
    """

    def expected(run: Run) -> float | None:
        rows = [
            row
            for row in store
            if row["run"]["recipe"] == run.recipe and not row.get("tag", {}).get("pruned")
        ]
        same_method = [row for row in rows if row["run"]["method"] == run.method] or rows
        if not same_method:
            return None
        rate = max(row.get("wall_seconds", 0.0) / max(1, row["steps"]) for row in same_method)
        config = run.config()
        size = max(row["dataset_size"] for row in same_method)
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
    """Tune the arms of a recipe, or continue an earlier call.

    The report is in the folder afterwards.

    Args:
        settings: what is tuned.
        folder: for results, trials, ledgers and report.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        workers: trials at once.
        budget_minutes: no trial is started that would not end in time, and those that run when it
            is up are stopped.
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
            "the choice of --search random cannot be counted with --sampler truncated_poisson, for"
            " lack of a theorem; take poisson, or --search tpe"
        )
    with Store(folder / "results.json") as store:
        _check_terms(store, settings, arms, common)
        trials = settings.trials if law is None else _draw_counts(folder / "trials.json", arms, law)
        storage = folder / "trials.sqlite3"
        found = searches(
            arms, common, settings.recipe, store, storage, trials=trials, kind=settings.search
        )
        source = Trials(found, store)
        place = Place(folder, data_dir)
        total = sum(search.trials for search in found)
        outcomes: list[Tuned] = []

        def report() -> None:
            outcomes.append(_tuned(settings, found, source, law, place))
            outcomes[-1].write(folder)

        starts = sum(search.started for search in found)
        with reported(report), StudyProgress(total, done=starts, console=console) as progress:
            drive(
                source,
                place,
                workers=workers,
                budget_minutes=left(),
                expected=expected_seconds(store),
                watcher=progress,
            )
    return outcomes[-1]


def _check_terms(
    store: Store, study: TuneSettings, arms: Sequence[Arm], common: Mapping[str, Plain]
) -> None:
    """Refuse results of another kind of search, ε, or setting that all trials share.

    A random search is of trials that are independent and of a number drawn before them: one that
    another search chose must not be among them. Results of other settings cannot be compared.

    Raises:
        StudyError: naming the kind, or the first setting that differs.
    """
    known = {arm.name: arm for arm in arms}
    for row in store:
        tag, settings = row.get("tag", {}), row["run"]["settings"]
        if "params" in tag and tag.get("kind", ADAPTIVE) != study.search:
            raise other_kind_error(store.path, study.search)
        arm = known.get(tag.get("arm")) if row["run"]["recipe"] == study.recipe else None
        if arm is None or "params" not in tag:
            continue
        shared = sorted({*settings, *common} - {*tag["params"], *arm.settings})
        for name in shared:
            if settings.get(name) != common.get(name):
                before, now = (
                    repr(own[name]) if name in own else "the recipe's value"
                    for own in (settings, common)
                )
                raise StudyError(
                    f"{store.path} has trials of {arm.label} with {name} = {before}, not {now};"
                    f" choose another --out, or set {name} back"
                )


def _draw_counts(path: Path, arms: Sequence[Arm], law: TrialLaw) -> dict[str, int]:
    """The number of trials of every arm, drawn once before any trial and kept."""
    stated = {"law": law.name, "mean": law.mean}
    try:
        content = json.loads(path.read_text("utf-8"))
        kept = {str(name): int(count) for name, count in content["trials"].items()}
    except FileNotFoundError:
        content, kept = stated, {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StudyError(
            f"{path} is damaged ({error}); the numbers of trials were drawn in it: choose another"
            " --out"
        ) from None
    if {name: content.get(name) for name in stated} != stated:
        raise StudyError(
            f"{path} holds numbers of trials drawn from another law; choose another --out"
        )
    trials = {arm.name: kept.get(arm.name, -1) for arm in arms}
    trials = {name: draw(law) if count < 0 else count for name, count in trials.items()}
    text = json.dumps({**stated, "trials": {**kept, **trials}}, indent=1) + "\n"
    write_text(path, text, private=True)
    return trials


def _tuned(
    settings: TuneSettings,
    found: Sequence[Search],
    source: Trials,
    law: TrialLaw | None,
    place: Place,
) -> Tuned:
    from dpkfc.app.train import prepare

    run = found[0].run({}, seed=SEED, evaluate_on="validation")
    plan = prepare(run.config(data_dir=place.data_dir)).plan
    whole = found[0].run({}, seed=SEED, evaluate_on="test")
    final = prepare(whole.config(data_dir=place.data_dir)).plan if law is not None else None
    ledgers = StudyLedgers.read(place.folder / "runs")
    cost = cost_of(plan, ledgers, law, len(found), final=final, over=source.is_over)
    results = sorted(
        (_arm_result(search, settings, law) for search in found),
        key=lambda one: -(one.accuracy or 0.0),
    )
    return Tuned(
        recipe=settings.recipe,
        search=settings.search,
        planned=settings.trials,
        validation=run.config().validation_size,
        epsilon=plan.target_epsilon or plan.epsilon(),
        delta=plan.delta,
        **vars(cost),
        runs_begun=ledgers.runs,
        arms=results,
        complete=source.is_over,
        failures=source.failures,
    )


def _arm_result(search: Search, settings: TuneSettings, law: TrialLaw | None) -> ArmResult:
    best, counts = search.best(), search.counts()
    params = best[0] if best else {}
    flags = {**settings.settings, **search.arm.settings, **params}
    flags.pop("validation_size", None)  # the whole training set
    command = f"dpkfc train --recipe {settings.recipe} --method {search.arm.method}"
    command += "".join(
        f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items()
    )
    found = (
        f"{sum(counts.values())} trials of dpkfc tune"
        if law is None
        else _chosen_by(law, search.is_over)
    )
    command += f" --chosen-by {shlex.quote(found + ' on a validation split; not in ε')}"
    return ArmResult(
        name=search.arm.name,
        label=search.arm.label,
        control=search.arm.control,
        trials=sum(counts.values()),
        pruned=counts["pruned"],
        failed=counts["failed"],
        accuracy=best[1] if best else None,
        params=params,
        command=command,
    )


def _chosen_by(law: TrialLaw, over: bool) -> str:
    """A random search on a public card: the law of its number of trials, never the number."""
    return (
        f"{'a' if over else 'an unfinished'} random search of dpkfc tune ({law.name}, mean"
        f" {law.mean:g})"
    )
