"""The search of one arm: trials of Optuna in a journal, which a killed study continues.

Optuna samples the trials, stops those that are behind, and stores all that is known of them. What
it does not offer is decided here: a trial that the machine lost is tried again, and the recipe's
own trial is never stopped.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from dpkfc.app.tuning.arms import Arm, Choice
from dpkfc.app.tuning.halving import Halving
from dpkfc.app.tuning.journal import (
    HASH,
    LOST,
    PROCESS,
    REASON,
    ROW,
    SETTINGS,
    explain_errors,
    load_optuna,
    open_journal,
)
from dpkfc.app.tuning.members import Member
from dpkfc.app.tuning.runs import Plain, Row, Run, StudyError
from dpkfc.app.tuning.samples import make_sample, make_settings, name_sample, sample_defaults

ADAPTIVE = "tpe"
SEARCHES = (ADAPTIVE, "random")
# At the end of the name of a random search.
_RANDOM = ", random"
# The first trials of TPE are random, so that its model has data.
_RANDOM_TRIALS = 6
# A trial that the machine loses once more after so many repetitions waits for the next call.
_MOST_RETRIES = 2
_DUPLICATE = "the same trial is running"


@dataclass(eq=False)
class Search:
    """Trials of one arm, on validation accuracy.

    Attributes:
        arm: what is searched.
        common: settings that all arms share.
        recipe: the task.
        journal: the file of the trials of all arms.
        trials: how many there are.
        kind: "tpe", with successive halving, or "random", without. Halving never stops the
            recipe's own trial.
        seed: of the run: initial weights and probes of every trial.
        member: this process among those that work on the journal; None where it is the only one.

    Raises:
        StudyError: Optuna is not installed, its file cannot be used, or it has trials of another
            kind or of other settings.
    """

    arm: Arm
    common: Mapping[str, Plain]
    recipe: str
    journal: Path
    _: KW_ONLY
    trials: int
    kind: str = ADAPTIVE
    seed: int = 0
    member: Member | None = None

    def __post_init__(self) -> None:
        self._optuna = load_optuna()
        self._states = self._optuna.trial.TrialState
        # Trials that run in this process, by number, and losses in it, by hash.
        self._running: dict[int, Any] = {}
        self._losses: Counter[str] = Counter()
        self._own_hash = ""
        if self.kind == ADAPTIVE:
            self._own_hash = self._validation_run(make_settings(self.arm.space, self._own())).hash
        with explain_errors(self.journal):
            self._study = self._open()
            self._check_terms()
        self.repeat_lost_trials()

    @property
    def name(self) -> str:
        """Name of the search in the journal and in the rows of a study; it tells the kind."""
        return f"{self.recipe}/{self.arm.name}{'' if self.kind == ADAPTIVE else _RANDOM}"

    def constant(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that is stored with the search; make it on the first call."""
        if name not in self._study.user_attrs:
            with explain_errors(self.journal):
                self._study.set_user_attr(name, make())
        return self._study.user_attrs[name]

    @property
    def started(self) -> int:
        """Trials that have ended, are running, or were given up in this process."""
        attempts = self._attempts()
        return len(attempts) + len(
            self._find_given_up() - {t.user_attrs.get(HASH) for t in attempts}
        )

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended, and none was given up."""
        has_more = self.started < self.trials or self._find_running() or self._find_given_up()
        return not has_more

    def counts(self) -> dict[str, int]:
        """Return the number of trials that have ended, by how."""
        states = [trial.state for trial in self._attempts()]
        return {
            "full": states.count(self._states.COMPLETE),
            "pruned": states.count(self._states.PRUNED),
            "failed": states.count(self._states.FAIL),
        }

    def ask(self) -> tuple[int, Run]:
        """Return the next trial: its number, by which its results are told, and its run."""
        while True:
            with explain_errors(self.journal):
                trial = self._study.ask(self._distributions())
                # A trial that was lost brings its settings.
                settings = trial.user_attrs.get(SETTINGS)
                settings = settings or make_settings(self.arm.space, trial.params)
                run = self._validation_run(settings)
                others = [x for x in self._find_running() if x.number != trial.number]
                if all(run.hash != other.user_attrs.get(HASH) for other in others):
                    return self._begin(trial, settings), run
                trial.set_user_attr(LOST, _DUPLICATE)
                self._study.tell(trial, state=self._states.FAIL)

    def _find_running(self) -> list[Any]:
        """Return the trials that run now, in any process."""
        return [trial for trial in self._all_trials() if trial.state == self._states.RUNNING]

    def _begin(self, trial: Any, settings: Mapping[str, Plain]) -> int:
        if self.member is not None:
            trial.set_user_attr(PROCESS, self.member.name)
        trial.set_user_attr(HASH, self._validation_run(settings).hash)
        trial.set_user_attr(SETTINGS, settings)
        self._running[trial.number] = trial
        return int(trial.number)

    def halving(self, number: int) -> Halving | None:
        """Return what judges a running trial; None in a random search."""
        if self.kind != ADAPTIVE:
            return None
        may_stop = self._running[number].user_attrs[HASH] != self._own_hash
        return Halving(self.journal, self.name, number, may_stop)

    def tell(self, number: int, row: Row, ended: bool = False) -> None:
        """Store the end of a trial: its row; `ended` where it was stopped."""
        trial = self._running[number]
        with explain_errors(self.journal):
            trial.set_user_attr(ROW, row)
            if ended:
                self._study.tell(trial, state=self._states.PRUNED)
            else:
                self._study.tell(trial, row["accuracy"])
        del self._running[number]

    def add(self, row: Row) -> None:
        """Add a trial whose row was kept elsewhere, such as in a table that is committed.

        Optuna learns nothing from its settings, as they may lie outside of today's ranges.
        """
        is_pruned = bool(row["tag"].get("pruned"))
        trial = self._optuna.trial.create_trial(
            state=self._states.PRUNED if is_pruned else self._states.COMPLETE,
            value=None if is_pruned else row["accuracy"],
            user_attrs={HASH: row["hash"], SETTINGS: row["tag"]["params"], ROW: row},
        )
        with explain_errors(self.journal):
            self._study.add_trial(trial)

    def fail(self, number: int, reason: str) -> None:
        """Store the end of a trial that cannot be run; the trial counts."""
        self._tell_failure(number, REASON, reason)

    def lose(self, number: int, reason: str) -> None:
        """Store a trial that the machine lost, so that it is tried again.

        The trial does not count. A trial that is lost once more after two repetitions is given up
        in this process; the next process tries it again.
        """
        trial = self._running[number]
        attributes = dict(trial.user_attrs)
        self._tell_failure(number, LOST, reason)
        self._losses[attributes[HASH]] += 1
        if attributes[HASH] not in self._find_given_up():
            self._repeat(attributes)

    def _tell_failure(self, number: int, attribute: str, reason: str) -> None:
        with explain_errors(self.journal):
            self._running[number].set_user_attr(attribute, reason)
            self._study.tell(self._running[number], state=self._states.FAIL)
        del self._running[number]

    def _repeat(self, attributes: Mapping[str, Any]) -> None:
        """Let the next `ask` return a trial with the same settings."""
        settings = attributes[SETTINGS]
        known = {HASH: attributes[HASH], SETTINGS: settings}
        with explain_errors(self.journal):
            self._study.enqueue_trial(make_sample(self.arm.space, settings), user_attrs=known)

    def _find_given_up(self) -> set[str]:
        """Return hashes of trials that the machine has lost too often in this process."""
        return {key for key, count in self._losses.items() if count > _MOST_RETRIES}

    def failures(self) -> dict[str, str]:
        """Return why trials could not be run, by their hash.

        They are trials that count, and lost trials that have not been repeated with success.
        """
        failures: dict[str, str] = {}
        for trial in self._all_trials():
            attributes = trial.user_attrs
            key = attributes.get(HASH)
            if trial.state in (self._states.COMPLETE, self._states.PRUNED):
                failures.pop(key, None)
            elif REASON in attributes:
                failures[key] = attributes[REASON]
            elif key and attributes.get(LOST, _DUPLICATE) != _DUPLICATE:
                failures[key] = f"to be tried again: {attributes[LOST]}"
        return failures

    def params_of(self, number: int) -> dict[str, Plain]:
        """Return the searched settings of a running trial."""
        return dict(self._running[number].user_attrs[SETTINGS])

    def rows(self) -> dict[str, Row]:
        """Return the rows of all trials that have ended, by the hash of their run."""
        trials = [trial for trial in self._all_trials() if ROW in trial.user_attrs]
        return {trial.user_attrs[HASH]: trial.user_attrs[ROW] for trial in trials}

    def best(self) -> tuple[dict[str, Plain], float] | None:
        """Return settings and validation accuracy of the best trial that was not stopped."""
        complete = self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE,))
        if not complete:
            return None
        best = max(complete, key=lambda trial: trial.value)
        return dict(best.user_attrs[SETTINGS]), float(best.value)

    def run(
        self, params: Mapping[str, Plain], *, seed: int, evaluate_on: str, **changed: Plain
    ) -> Run:
        """Return the arm's run with settings of a search."""
        settings = {**self.common, **self.arm.settings, **params, **changed}
        if evaluate_on == "test":
            settings.pop("validation_size", None)
        return Run.make(self.recipe, self.arm.method, settings, seed=seed, evaluate_on=evaluate_on)

    def _validation_run(self, settings: Mapping[str, Plain]) -> Run:
        return self.run(settings, seed=self.seed, evaluate_on="validation")

    def _own(self) -> dict[str, Plain]:
        """Return what the recipe would take, as Optuna samples it."""
        run = self.run(self.arm.first, seed=0, evaluate_on="test")
        return sample_defaults(self.arm.space, run.default)

    def _all_trials(self) -> list[Any]:
        trials: list[Any] = self._study.get_trials(deepcopy=False)
        return trials

    def _attempts(self) -> list[Any]:
        """Return the trials that count."""
        return [
            trial
            for trial in self._all_trials()
            if trial.state != self._states.WAITING and LOST not in trial.user_attrs
        ]

    def _open(self) -> Any:
        """Return the study of this search, made if it is missing.

        Raises:
            StudyError: the journal has trials of the other kind of search. Such a search must not
                count them, as they have another distribution.
        """
        storage = open_journal(self.journal)
        for study in storage.get_all_studies():
            if study.study_name.endswith(_RANDOM) != self.name.endswith(_RANDOM):
                (other,) = set(SEARCHES) - {self.kind}
                raise StudyError(
                    f"{self.journal} holds trials of --search {other}, and this is --search"
                    f" {self.kind}; choose another --out"
                )
        study = self._optuna.create_study(
            storage=storage,
            study_name=self.name,
            direction="maximize",
            load_if_exists=True,
        )
        count = len(study.get_trials(deepcopy=False))
        study.sampler = self._optuna.samplers.RandomSampler()
        # Another process that has joined samples other points.
        joined_as = ""
        if self.member is not None and not self.member.is_alone:
            joined_as = f":{self.member.name}"
        if self.kind == ADAPTIVE:
            study.sampler = self._optuna.samplers.TPESampler(
                # The number of trials makes a restarted search sample other points than before.
                seed=zlib.crc32(f"{self.name}:{count}{joined_as}".encode()),
                n_startup_trials=_RANDOM_TRIALS,
                constant_liar=True,
            )
            if count == 0:
                study.enqueue_trial(self._own())
        return study

    def _check_terms(self) -> None:
        """Refuse a journal whose trials had other settings than all trials share now.

        Raises:
            StudyError: naming the first setting that differs.
        """
        now = {**self.common, **self.arm.settings}
        before = self.constant("settings", lambda: now)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise StudyError(
                    f"{self.journal} has trials of {self.arm.label} with {name} ="
                    f" {_describe(before, name)}, not {_describe(now, name)}; choose another"
                    f" --out, or set {name} back"
                )

    def _is_alive(self, trial: Any) -> bool:
        """Return whether the process of a running trial has not ended."""
        if trial.number in self._running:
            return True
        process = trial.user_attrs.get(PROCESS)
        return self.member is not None and bool(process) and self.member.is_alive(process)

    def repeat_lost_trials(self) -> None:
        """Try trials again that were lost, or whose process has ended while they ran."""
        with explain_errors(self.journal):
            self._fail_dead_trials()
            lost = self._find_lost()
        for attributes in lost:
            self._repeat(attributes)

    def _fail_dead_trials(self) -> None:
        storage = open_journal(self.journal)
        for trial in self._find_running():
            if not self._is_alive(trial):
                reason = "the study ended while it ran"
                storage.set_trial_user_attr(trial._trial_id, LOST, reason)
                self._study.tell(trial.number, state=self._states.FAIL)

    def _find_lost(self) -> list[Mapping[str, Any]]:
        """Return what lost trials carry, of which no other attempt counts or waits."""
        known = {trial.user_attrs.get(HASH) for trial in self._attempts()}
        lost = {}
        for trial in self._all_trials():
            attributes = trial.user_attrs
            if trial.state == self._states.WAITING:
                known.add(attributes.get(HASH))
            elif attributes.get(LOST, _DUPLICATE) != _DUPLICATE and SETTINGS in attributes:
                lost[attributes[HASH]] = attributes
        known |= self._find_given_up()
        return [attributes for key, attributes in lost.items() if key not in known]

    def _distributions(self) -> dict[str, Any]:
        of = self._optuna.distributions
        distributions = {}
        for name, values in self.arm.space.items():
            if isinstance(values, Choice):
                distribution = of.CategoricalDistribution(list(values.values))
            else:
                distribution = of.FloatDistribution(values.low, values.high, log=values.log)
            distributions[name_sample(name, values)] = distribution
        return distributions


def _describe(settings: Mapping[str, Plain], name: str) -> str:
    return repr(settings[name]) if name in settings else "the recipe's value"
