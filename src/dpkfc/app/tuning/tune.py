"""Tune every arm with the same number of trials, in rounds.

A study that is cut short has compared all arms.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dpkfc._checks import show_value
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.app.toml import ConfigError
from dpkfc.app.tuning.arms import Arm, arms_for
from dpkfc.app.tuning.cost import StudyLedgers, TrialLaw, cost_of, draw, trial_law
from dpkfc.app.tuning.journal import load_optuna, repair_journal
from dpkfc.app.tuning.members import Member
from dpkfc.app.tuning.pool import drive, end_of
from dpkfc.app.tuning.runs import Place, Plain, Row, Run, StudyError, read_once
from dpkfc.app.tuning.search import ADAPTIVE, SEARCHES, Search
from dpkfc.app.tuning.study_progress import StudyProgress
from dpkfc.app.tuning.trials import SEED, Trials
from dpkfc.app.tuning.tuned import ArmResult, Tuned
from dpkfc.config import Plan

_MOST_VALIDATION, _SHARE = 5000, 10
MOST_TRIALS = 1_000_000
JOURNAL = "trials.log"
RESULTS = "results.json"


# --------------------------------------------------------------------------------------------------
# The report at the end of a study, however it ends.


@contextmanager
def report_at_end(write: Callable[[], object]) -> Iterator[None]:
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
        if self.trials > MOST_TRIALS:
            raise StudyError(
                f"trials = {show_value(self.trials, 20)}: a method takes at most {MOST_TRIALS:,}"
            )
        if self.search not in SEARCHES:
            raise StudyError(f"search = {self.search!r} is not known; {' | '.join(SEARCHES)}")
        searched = {name for arm in self.arms() for name in arm.space}
        for name in sorted(searched.intersection(self.settings)):
            raise StudyError(
                f"{name} is searched for one of the methods and cannot be given as well"
            )
        if self.settings.get("adam_bc_floor") and "adam_bc_resolution" in searched:
            raise StudyError(
                "adam_bc_resolution is searched for one of the methods and means nothing next to"
                " adam_bc_floor"
            )
        self.law()

    def law(self) -> TrialLaw | None:
        """Return the law of the number of trials of a random search, None for another search."""
        if self.search == ADAPTIVE:
            return None
        if self.settings.get("sampler") == "truncated_poisson":
            raise StudyError(
                "the choice of --search random cannot be counted with --sampler truncated_poisson,"
                " for lack of a theorem; take poisson, or --search tpe"
            )
        return trial_law(self.count, self.trials)

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
    config = run_config({"recipe": recipe, **settings})
    if config.data.validation_size:
        return config.data.validation_size
    return min(_MOST_VALIDATION, recipe_of(config).data(config).size // _SHARE)


def expected_seconds(rows: Callable[[], Iterable[Row]]) -> Callable[[Run], float | None]:
    """Return the seconds of a cell, from the longest run of its recipe and method.

    Without one, the longest run of its recipe counts, at equal steps.

    Args:
        rows: returns the rows that are known.
    """

    def estimate(run: Run) -> float | None:
        of_recipe = [row for row in rows() if row["run"]["recipe"] == run.recipe]
        whole = [row for row in of_recipe if not row.get("tag", {}).get("pruned")]
        same_method = [row for row in whole if row["run"]["method"] == run.method] or whole
        if not same_method:
            return None
        rate = max(row.get("wall_seconds", 0.0) / max(1, row["steps"]) for row in same_method)
        config = run.config()
        size = max(row["dataset_size"] for row in same_method)
        return rate * (
            config.privacy.steps
            or config.privacy.epochs * size / (config.privacy.expected_batch_size or size)
        )

    return estimate


def tune(
    settings: TuneSettings,
    folder: Path,
    *,
    data_dir: str = "",
    workers: int = 1,
    budget_minutes: float | None = None,
    console: Console | None = None,
) -> Tuned:
    """Tune the arms of a recipe, or continue an earlier call. Several processes may do so at once.

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
    end = end_of(budget_minutes)
    given = dict(settings.settings)
    if data_dir:
        given["data_dir"] = data_dir
    common = {**settings.settings, "validation_size": validation_size(settings.recipe, given)}
    place = Place(folder, data_dir)
    outcomes: list[Tuned] = []
    with Member(folder) as member:
        with member.turn():
            searches = _open_searches(settings, common, folder / JOURNAL, member)
        source = Trials(searches, turn=member.turn)
        total = sum(search.trials for search in source.searches)
        starts = sum(search.started for search in source.searches)

        def report() -> None:
            with member.turn():
                outcomes.append(_conclude(settings, source, place))
                outcomes[-1].write(folder)
                _write_rows(folder / RESULTS, source.rows())

        with (
            report_at_end(report),
            StudyProgress(total, done=starts, console=console) as progress,
        ):
            drive(
                source,
                place,
                workers=workers,
                end=end,
                expected=expected_seconds(lambda: source.rows().values()),
                progress=progress,
            )
    return outcomes[-1]


def _open_searches(
    settings: TuneSettings, common: Mapping[str, Plain], journal: Path, member: Member
) -> list[Search]:
    """Return a search for each arm, taken up where an earlier process left it."""
    if member.is_alone:
        repair_journal(journal)
    law = settings.law()
    searches = []
    for arm in settings.arms():
        search = Search(
            arm,
            common,
            settings.recipe,
            journal,
            trials=settings.trials,
            kind=settings.search,
            seed=SEED,
            member=member,
        )
        if law is not None:
            search.trials = _draw_count(search, law)
        searches.append(search)
    return searches


def _draw_count(search: Search, law: TrialLaw) -> int:
    """Return the number of trials of a random search, drawn once before any trial and stored."""
    stated = search.constant("law", lambda: [law.name, law.mean])
    if stated != [law.name, law.mean]:
        raise StudyError(
            f"{search.journal} holds numbers of trials drawn from another law; choose another --out"
        )
    return int(search.constant("trials", lambda: draw(law)))


def _write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """Write the rows of the trials for their owner alone, as `dpkfc reproduce` reads them."""
    content = {"kind": "dpkfc study", "version": 1, "rows": rows}
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n", private=True)


def _conclude(settings: TuneSettings, source: Trials, place: Place) -> Tuned:
    """Return the study as it stands, with its cost."""
    searches = source.searches
    law = settings.law()
    trials = _plans_of(searches, place, "validation")
    trainings = trials if law is None else _plans_of(searches, place, "test")
    pairs = [(plan, final) for plan, final in zip(trials, trainings, strict=True) if plan]
    plans = [plan for plan, _ in pairs]
    finals = [final for _, final in pairs]
    plan = plans[0]
    run = searches[0].run({}, seed=SEED, evaluate_on="validation")
    ledgers = StudyLedgers.read(place.folder / "runs")
    cost = cost_of(plans, ledgers, law, finals=finals, over=source.is_over)
    results = [_arm_result(search, settings, law) for search in searches]
    results.sort(key=lambda result: -(result.accuracy or 0.0))
    return Tuned(
        recipe=settings.recipe,
        search=settings.search,
        planned=settings.trials,
        validation=run.config().data.validation_size,
        epsilon=plan.target_epsilon or plan.epsilon(),
        delta=plan.delta,
        **vars(cost),
        runs_begun=ledgers.runs,
        arms=results,
        complete=source.is_over,
        failures=source.failures,
    )


def _plans_of(searches: Sequence[Search], place: Place, evaluate_on: str) -> list[Plan | None]:
    """Return the plan of a run of each search, None for a method that cannot be planned here.

    Raises:
        ConfigError, DatasetError: no method can be planned.
    """
    from dpkfc.app.prepare import prepare

    plans: list[Plan | None] = []
    errors = []
    for search in searches:
        run = search.run({}, seed=SEED, evaluate_on=evaluate_on)
        config = run.config(data_dir=place.data_dir)
        try:
            plans.append(prepare(config, read_once(config)).plan)
        except (ConfigError, DatasetError) as error:
            # Each trial of this method has failed for the same reason.
            errors.append(error)
            plans.append(None)
    if not any(plans):
        raise errors[0]
    return plans


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
