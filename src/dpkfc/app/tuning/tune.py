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
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.app.tuning.runs import (
    Clock,
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
        return _draw_poisson(law.mean, source)
    if law.mean == 1:
        # All but Poisson give at least one.
        return 1
    gamma = _gamma(law)
    count = 0
    # A negative binomial number is a Poisson number whose mean is a Gamma number.
    while count == 0:
        mean = source.gammavariate(law.shape, (1 - gamma) / gamma)
        count = _draw_poisson(mean, source)
    return count


def _draw_poisson(mean: float, source: random.Random) -> int:
    """Return the number of arrivals of rate 1 before the mean."""
    count = 0
    time = source.expovariate(1.0)
    while time < mean:
        count += 1
        time += source.expovariate(1.0)
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
    """Return ε of a random number of trials of one event whose best is released, by RDP.

    Args:
        event: of one release.
        steps: releases of one trial.
        delta: δ.
        law: of the number of trials.
        relation: "add_or_remove_one" or "replace_one".
        then: event and releases of one more run, with what the best trial shows.
    """
    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    accountant = rdp.RdpAccountant(neighboring_relation=neighbours)
    run = dp_accounting.SelfComposedDpEvent(event, steps)
    with quiet_accountants():
        accountant.compose(dp_event.RepeatAndSelectDpEvent(run, law.mean, law.shape))
        if then is not None:
            accountant.compose(*then)
        return float(accountant.get_epsilon(delta))


# --------------------------------------------------------------------------------------------------
# What the runs of a study may have released, by their ledgers.


@dataclass(frozen=True)
class StudyLedgers:
    """What the runs of a folder have released, by their ledgers.

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
        """Read the ledgers below a folder of run folders, which may be missing."""
        paths = sorted(folder.glob("*/ledger.jsonl"))
        counts: Counter[str] = Counter()
        events: dict[str, dp_accounting.DpEvent] = {}
        relations = set()
        unread = []
        for path in paths:
            try:
                verified = _read(path)
                if verified is None:
                    continue
                released = _count_events(verified)
                for text in released:
                    events[text] = event_from_dict(json.loads(text))
            except (LedgerError, OSError, ValueError) as error:
                unread.append(one_line(error))
                continue
            if "neighbouring_relation" in verified.header:
                relations.add(str(verified.header["neighbouring_relation"]))
            counts.update(released)
        releases = tuple((events[text], count) for text, count in counts.items())
        return cls(len(paths), releases, frozenset(relations), tuple(unread))

    def epsilon(self, delta: float, relation: str) -> float | None:
        """Bound ε of all runs, one after the other, by RDP; None without a run or a bound."""
        if not self.runs or self.unread or not self.relations <= {relation}:
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
    whole = content[:end]
    last = content[end:]
    if last and ledger.is_complete(last):
        whole = content + b"\n"
    if not whole and ledger.begins_a_ledger(content):
        return None
    return ledger.parse(whole or content, f"{path.parent.name}/{path.name}")


def _count_events(verified: Verified) -> Counter[str]:
    """Return how often each event counts, by its JSON.

    An early end counts as planned, because what the run showed ended it.
    What is left of the plan counts as the last release of its kind did. A run without a release
    gave nothing away.
    """
    events: dict[str, list[str]] = {}
    for release in verified.releases:
        event = json.dumps(release["event"], sort_keys=True)
        events.setdefault(release.get("purpose", ""), []).append(event)
    planned = {"": verified.header.get("steps"), **verified.planned_extra}
    counts: Counter[str] = Counter()
    for purpose, released in events.items():
        counts.update(released)
        most = planned.get(purpose)
        if isinstance(most, int):
            counts[released[-1]] += max(0, most - len(released))
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

    @property
    def title(self) -> str:
        """The label, with a mark of a control."""
        return f"{self.label} (control)" if self.control else self.label


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
        content = {"version": 1, **asdict(self)}
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        data = write_text(folder / "tune.json", text + "\n", private=True)
        page = write_text(folder / "tune.md", self.markdown(), private=True)
        return data, page

    def markdown(self) -> str:
        """Return the study for people; where the number of trials is secret, one line says so."""
        is_secret = self.search != ADAPTIVE
        lines = [
            f"# Tuning of {self.recipe}",
            "",
            self.statement,
            "",
            "| method | validation % | trials | settings |",
            "|---|---|---|---|",
        ]
        for arm in self.arms:
            count = f"{arm.trials} ({arm.pruned} pruned, {arm.failed} failed)"
            if is_secret:
                count = "secret"
            cells = [arm.title, percent(arm.accuracy), count, settings_text(arm.params)]
            lines.append(f"| {' | '.join(cells)} |")
        if not self.complete:
            lines += [
                "",
                "Not finished: some trials are still to run, of some methods perhaps more. The"
                " same command goes on.",
            ]
        if self.failures:
            publication = " (not to be published)" if is_secret else ""
            lines += ["", f"Trials that could not be run{publication}:", ""]
            lines += [f"- {name}: {why}" for name, why in self.failures.items()]
        lines += ["", "Train with what won, on the whole training set:", ""]
        lines += [f"    {arm.command}" for arm in self.arms if arm.accuracy is not None]
        if self.unpublished:
            lines += ["", self.unpublished]
        return "\n".join(lines) + "\n"


def percent(accuracy: float | None) -> str:
    """Return an accuracy as it stands in a table."""
    return "–" if accuracy is None else f"{100 * accuracy:.2f}"


def settings_text(params: Mapping[str, Plain]) -> str:
    """Return settings as they stand in a table."""
    return ", ".join(f"{name} = {plain_text(value)}" for name, value in params.items())


def plain_text(value: Plain) -> str:
    """Return a setting as a text, a number without zeros at its end."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def cost_of(
    plan: Any,
    ledgers: StudyLedgers,
    law: TrialLaw | None = None,
    arms: int = 1,
    *,
    final: Any = None,
    over: bool = True,
) -> Cost:
    """Return what ε says about a tuning study.

    Args:
        plan: of one trial; every trial has its event and number of steps.
        ledgers: of runs that have started, in this study or before it in its folder.
        law: of the number of trials of a random search, None for a search whose trials depend on
            one another.
        arms: that were compared.
        final: plan of a training with what the search chose; None as of a trial.
        over: whether all trials have ended; a random search is accounted for as a whole.
    """
    curve = EpsilonCurve(plan.event, plan.delta, plan.neighbouring_relation, plan.accountant)
    spent = curve.epsilon(plan.steps)
    given = f"(ε = {rounded_up(spent)}, δ = {plan.delta:g})"
    lines = [
        f"**Tuning is NOT in ε.** A run with the chosen settings is {given} as if they had been"
        " known beforehand; the search looked at private examples for every trial.",
    ]
    total, together = _together(plan, ledgers)
    chosen = trained = None
    unpublished = ""
    if law is None:
        lines += [
            together,
            "The trials of this search were chosen after those before them (TPE, pruning), so no"
            " tighter figure exists; a random search (--search random) has one.",
        ]
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
        statement=" ".join(filter(None, lines)),
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
        # JSON holds no infinity.
        return total if math.isfinite(total) else None, remark
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
    text = (
        f"For one method whose number of trials was drawn beforehand ({law.name}, mean"
        f" {law.mean:g}) the settings of the best trial cost ε = {rounded_up(chosen)}, and"
        f" together with ONE further training with them ε = {rounded_up(trained)} (Papernot and"
        f" Steinke, RDP, δ = {plan.delta:g}), {SCOPE}. Both hold while the number of trials"
        " that were run stays secret."
    )
    return chosen, trained, text


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

# Of tuning runs; tests have other seeds.
SEED = 100
# Trials of an arm before the next arm has its turn.
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
        self._check()
        if self.search == "random":
            trial_law(self.count, self.trials)

    def _check(self) -> None:
        if not self.methods:
            raise StudyError("which methods? give --method once or several times")
        if self.trials < 1:
            raise StudyError(f"trials = {self.trials}: every method needs one or more")
        if self.search not in SEARCHES:
            raise StudyError(f"search = {self.search!r} is not known; {' | '.join(SEARCHES)}")
        searched = {name for arm in self.arms() for name in arm.space}
        for name in sorted(searched):
            if name in self.settings:
                raise StudyError(
                    f"{name} is searched for one of the methods and cannot be given as well"
                )
        if self.settings.get("adam_bc_floor") and "adam_bc_resolution" in searched:
            raise StudyError(
                "adam_bc_resolution is searched for one of the methods and means nothing next to"
                " adam_bc_floor"
            )

    def arms(self) -> list[Arm]:
        """Return the methods that are compared, controls included."""
        return arms_for(
            self.recipe, list(self.methods), controls=self.controls, optimizer=self.optimizer
        )


def validation_size(recipe: str, settings: Mapping[str, Plain]) -> int:
    """Return the size that is given, or a tenth of the training set, at most 5,000 examples.

    Raises:
        DatasetError: missing or damaged data.
        ConfigError: an unknown recipe or setting.
    """
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
    """Return a search for each arm, taken up where an earlier process left it.

    Args:
        arms: that are compared.
        common: settings that all arms share.
        recipe: the task.
        store: with the trials of earlier processes.
        storage: the SQLite file of all searches.
        trials: of every arm, or of each arm by its name.
        kind: "tpe" or "random".
    """
    rows = list(store)
    opened = []
    for arm in arms:
        count = trials if isinstance(trials, int) else trials[arm.name]
        search = Search(arm, common, recipe, storage, trials=count, kind=kind, seed=SEED, rows=rows)
        opened.append(search)
    return opened


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
        failures = {}
        for search in self.searches:
            for key, why in search.failures().items():
                failures[f"{search.arm.label}, trial {key}"] = why
        return failures

    def next(self, fits: Fits) -> Task | None:
        """Return the next trial of the search that has started the fewest blocks.

        After them come trials that were stopped against fewer others than there are now.
        """
        waiting = [search for search in self.searches if search.started < search.trials]
        if waiting:
            search = min(waiting, key=lambda search: search.started // BLOCK)
            return _make_task(search, search.ask()) if _has_time(search, fits) else None
        for search in self.searches:
            if not search.is_over and _has_time(search, fits):
                again = search.ask_again()
                if again is not None:
                    return _make_task(search, again)
        return None

    def report(self, task: Task, number: int, accuracy: float) -> bool:
        """Return whether a trial is worth going on."""
        search, key = task.tag
        return search.report(key, number, accuracy)

    def done(self, task: Task, row: Row, ended: bool) -> None:
        """Store a trial: on the disk first, then for the search."""
        search, key = task.tag
        tag = {
            "search": search.name,
            "arm": search.arm.name,
            "params": search.params_of(key),
            "pruned": ended,
        }
        if search.kind != ADAPTIVE:
            tag["kind"] = search.kind
        self.store.put(task.run, {**row, "tag": tag})
        search.tell(key, row["accuracy"], ended)

    def failed(self, task: Task, reason: str, *, lost: bool) -> None:
        """Count a trial that cannot be run, without a word on its arm; try a lost one again."""
        search, key = task.tag
        end = search.lose if lost else search.fail
        end(key, reason)


def _make_task(search: Search, trial: tuple[str, Run]) -> Task:
    key, run = trial
    return Task(run, tag=(search, key), watched=search.kind == ADAPTIVE, label=search.arm.name)


def _has_time(search: Search, fits: Fits) -> bool:
    return fits(search.run({}, seed=SEED, evaluate_on="validation"))


def expected_seconds(store: Store) -> Callable[[Run], float | None]:
    """Return the seconds of a cell, from the longest run of its recipe and method.

    Without one, the longest run of its recipe counts, at equal steps.
    """

    def expected(run: Run) -> float | None:
        of_recipe = [row for row in store if row["run"]["recipe"] == run.recipe]
        rows = [row for row in of_recipe if not row.get("tag", {}).get("pruned")]
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
    left = Clock(budget_minutes).minutes_left
    given = dict(settings.settings)
    if data_dir:
        given["data_dir"] = data_dir
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
        trials: int | dict[str, int] = settings.trials
        if law is not None:
            trials = _draw_counts(folder / "trials.json", arms, law)
        storage = folder / "trials.sqlite3"
        opened = searches(
            arms, common, settings.recipe, store, storage, trials=trials, kind=settings.search
        )
        source = Trials(opened, store)
        place = Place(folder, data_dir)
        total = sum(search.trials for search in opened)
        starts = sum(search.started for search in opened)
        outcomes: list[Tuned] = []

        def report() -> None:
            outcomes.append(_conclude(settings, source, law, place))
            outcomes[-1].write(folder)

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
        if "params" not in tag:
            continue
        if tag.get("kind", ADAPTIVE) != study.search:
            raise other_kind_error(store.path, study.search)
        arm = known.get(tag.get("arm"))
        if arm is None or row["run"]["recipe"] != study.recipe:
            continue
        shared = sorted({*settings, *common} - {*tag["params"], *arm.settings})
        for name in shared:
            if settings.get(name) != common.get(name):
                before, now = (_describe_setting(of, name) for of in (settings, common))
                raise StudyError(
                    f"{store.path} has trials of {arm.label} with {name} = {before}, not {now};"
                    f" choose another --out, or set {name} back"
                )


def _describe_setting(settings: Mapping[str, Plain], name: str) -> str:
    return repr(settings[name]) if name in settings else "the recipe's value"


def _draw_counts(path: Path, arms: Sequence[Arm], law: TrialLaw) -> dict[str, int]:
    """Return the number of trials of every arm, drawn once before any trial and stored."""
    stated = {"law": law.name, "mean": law.mean}
    try:
        content = json.loads(path.read_text("utf-8"))
        counts = {str(name): int(count) for name, count in content["trials"].items()}
    except FileNotFoundError:
        content, counts = stated, {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StudyError(
            f"{path} is damaged ({error}); the numbers of trials were drawn in it: choose another"
            " --out"
        ) from None
    if {name: content.get(name) for name in stated} != stated:
        raise StudyError(
            f"{path} holds numbers of trials drawn from another law; choose another --out"
        )
    for arm in arms:
        if arm.name not in counts:
            counts[arm.name] = draw(law)
    text = json.dumps({**stated, "trials": counts}, indent=1) + "\n"
    write_text(path, text, private=True)
    return counts


def _conclude(settings: TuneSettings, source: Trials, law: TrialLaw | None, place: Place) -> Tuned:
    """Return the study as it stands, with its cost."""
    from dpkfc.app.train import prepare

    searches = source.searches
    run = searches[0].run({}, seed=SEED, evaluate_on="validation")
    plan = prepare(run.config(data_dir=place.data_dir)).plan
    final = None
    if law is not None:
        whole = searches[0].run({}, seed=SEED, evaluate_on="test")
        final = prepare(whole.config(data_dir=place.data_dir)).plan
    ledgers = StudyLedgers.read(place.folder / "runs")
    cost = cost_of(plan, ledgers, law, len(searches), final=final, over=source.is_over)
    results = [_arm_result(search, settings, law) for search in searches]
    results.sort(key=lambda result: -(result.accuracy or 0.0))
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
    counts = search.counts()
    trials = sum(counts.values())
    params, accuracy = search.best() or ({}, None)
    chosen_by = f"{trials} trials of dpkfc tune"
    if law is not None:
        # A card is public: it has the law of the number of trials, never the number.
        article = "a" if search.is_over else "an unfinished"
        chosen_by = f"{article} random search of dpkfc tune ({law.name}, mean {law.mean:g})"
    flags = {
        "recipe": settings.recipe,
        "method": search.arm.method,
        **settings.settings,
        **search.arm.settings,
        **params,
        "chosen_by": f"{chosen_by} on a validation split; not in ε",
    }
    # The whole training set.
    flags.pop("validation_size", None)
    words = ["dpkfc train"]
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    return ArmResult(
        name=search.arm.name,
        label=search.arm.label,
        control=search.arm.control,
        trials=trials,
        pruned=counts["pruned"],
        failed=counts["failed"],
        accuracy=accuracy,
        params=params,
        command=" ".join(words),
    )
