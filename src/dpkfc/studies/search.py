"""The search of one arm: trials of Optuna in an SQLite file, which a killed study takes up again."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dpkfc.studies.arms import Arm, Choice, Range
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.drawn import drawn_as, drawn_of, first_of, rounded, settings_of
from dpkfc.studies.errors import StudyError
from dpkfc.studies.halving import is_rung, stands

__all__ = ["ADAPTIVE", "SEARCHES", "Search", "load_optuna", "other_kind"]

ADAPTIVE = "tpe"  # also of rows and storages that do not say their kind
SEARCHES = (ADAPTIVE, "random")
_RANDOM = ", random"  # at the end of the name of a random search
_RANDOM_FIRST = 6  # trials of TPE that are random, so that the model of it has something to stand on
_HASH, _SETTINGS = "hash", "settings"
_LOST, _WHY = "lost", "why"  # of a trial that failed: why it does not count, and why it could not be run
_AGAIN = 2  # times that a point which the machine lost is tried again in one process
_TWICE = "the same trial is running"


def load_optuna() -> ModuleType:
    """Optuna, quiet.

    Raises:
        StudyError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise StudyError("tuning needs Optuna, which is not installed: pip install 'dpkfc[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    return optuna


def other_kind(place: Path, kind: str) -> StudyError:
    """Trials of the other kind in a folder: one kind must not count those of the other, whose law it does not have."""
    (before,) = (one for one in SEARCHES if one != kind)
    return StudyError(f"{place} holds trials of --search {before}, and this is --search {kind}; choose another --out")


class Search:
    """Trials of one arm, on validation accuracy.

    Args:
        arm: what is searched.
        common: settings that all arms share.
        recipe: the task.
        storage: an SQLite file.
        trials: how many there are.
        kind: "tpe", with successive halving (`halving`), or "random", without. The recipe's own trial is never stopped.
        seed: of the run: initial weights and probes of every trial.
        rows: results that are known; trials that the storage lacks are told to it.

    Raises:
        StudyError: Optuna is not installed, or its file cannot be used.
    """

    def __init__(
        self,
        arm: Arm,
        common: Mapping[str, Plain],
        recipe: str,
        storage: Path,
        *,
        trials: int,
        kind: str = "tpe",
        seed: int = 0,
        rows: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.arm, self.recipe, self.trials, self.kind, self._seed = arm, recipe, trials, kind, seed
        self._common = dict(common)
        self._optuna = load_optuna()
        self._open: dict[str, Any] = {}
        self._again: set[str] = set()  # trials that are run once more
        self._losses: Counter[str] = Counter()  # of each point in this process
        self._storage = storage
        own = settings_of(arm.space, self._default()) if kind == "tpe" else None
        self._first = "" if own is None else self.run(own, seed=seed, evaluate_on="validation").hash
        self._study = self._opened(storage)
        with self._kept():
            self._take_up([row for row in rows if row.get("tag", {}).get("search") == self.name])
        self._begun = sum(self.counts().values())

    @property
    def name(self) -> str:
        """Of the search within its storage and in the rows of a study; it tells the kind."""
        return f"{self.recipe}/{self.arm.name}{'' if self.kind == ADAPTIVE else _RANDOM}"

    @property
    def begun(self) -> int:
        """Trials that have ended or are running; one that is run once more counts once."""
        return self._begun

    @property
    def over(self) -> bool:
        """Whether every trial has ended, and none is to be run once more or was given up in this process."""
        return self.begun >= self.trials and not (self._open or self._given_up() or self._stopped_too_early())

    def counts(self) -> dict[str, int]:
        """Trials that have ended, by how."""
        states = self._optuna.trial.TrialState
        ended = [trial.state for trial in self._own()]
        named = {"full": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        return {name: ended.count(state) for name, state in named.items()}

    def _own(self) -> list[Any]:
        """Trials that count: neither attempts that were lost nor the first run of one that ran once more."""
        counted = [trial for trial in self._all() if not self._is_lost(trial)]
        if self.kind != "tpe":
            return counted
        return list({trial.user_attrs.get(_HASH, trial.number): trial for trial in counted}.values())

    def _is_lost(self, trial: Any) -> bool:
        """Whether an attempt failed through no fault of its trial; also one of an earlier version, which kept no reason."""
        return bool(trial.state == self._optuna.trial.TrialState.FAIL and _WHY not in trial.user_attrs)

    def ask(self) -> tuple[str, Run]:
        """The next trial: its hash, by which it is told, and its run."""
        while True:
            with self._kept():
                trial = self._asked()
                settings = settings_of(self.arm.space, trial.params)
                run = self.run(settings, seed=self._seed, evaluate_on="validation")
                trial.set_user_attr(_HASH, run.hash)
                trial.set_user_attr(_SETTINGS, settings)
                if run.hash not in self._open:
                    self._open[run.hash] = trial
                    self._begun += 1
                    return run.hash, run
                trial.set_user_attr(_LOST, _TWICE)
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def ask_again(self) -> tuple[str, Run] | None:
        """A trial that is to be run once more, to its end, as of `ask`; None where there is none, or not yet."""
        if self.begun < self.trials or self._open.keys() - self._again:
            return None
        for stopped in self._stopped_too_early():
            key, settings = stopped.user_attrs[_HASH], _settings_of(stopped)
            if key not in self._open and key not in self._given_up():
                with self._kept():
                    self._study.enqueue_trial(drawn_of(self.arm.space, settings))
                    trial = self._asked()
                    trial.set_user_attr(_HASH, key)
                    trial.set_user_attr(_SETTINGS, settings)
                self._again.add(key)
                self._open[key] = trial
                return key, self.run(settings, seed=self._seed, evaluate_on="validation")
        return None

    def _stopped_too_early(self) -> list[Any]:
        """Of the trials that were stopped, those that stand where others went on by now, and the recipe's own."""
        trials = self._own() if self.kind == "tpe" else []
        pruned, evaluations = self._optuna.trial.TrialState.PRUNED, self._evaluations()
        found = []
        for trial in trials:
            if trial.state == pruned and _HASH in trial.user_attrs and trial.intermediate_values:
                key, last = trial.user_attrs[_HASH], max(trial.intermediate_values)
                others = [seen[last] for other, seen in evaluations.items() if other != key and last in seen]
                if key == self._first or stands(trial.intermediate_values[last], others):
                    found.append(trial)
        return found

    def _evaluations(self) -> dict[str, dict[int, float]]:
        """What each trial that did not fail came to on the way; of one that runs once more also what its first run had."""
        found: dict[str, dict[int, float]] = {}
        for trial in self._all():
            if trial.state != self._optuna.trial.TrialState.FAIL:
                found.setdefault(trial.user_attrs.get(_HASH, str(trial.number)), {}).update(trial.intermediate_values)
        return found

    def run(self, params: Mapping[str, Plain], *, seed: int, evaluate_on: str, **changed: Plain) -> Run:
        """The arm's run with settings of a search."""
        settings = {**self._common, **self.arm.settings, **params, **changed}
        if evaluate_on == "test":
            settings.pop("validation_size", None)
        return Run.of(self.recipe, self.arm.method, settings, seed=seed, evaluate_on=evaluate_on)

    def report(self, key: str, number: int, accuracy: float) -> bool:
        """Note an evaluation on the way, for the operator only; whether the trial is worth going on."""
        trial = self._open[key]
        with self._kept():
            trial.report(accuracy, number)
        if self.kind != "tpe" or key in self._again or key == self._first or not is_rung(number):
            return True
        others = (seen for other, seen in self._evaluations().items() if other != key)
        return stands(accuracy, [seen[number] for seen in others if number in seen])

    def tell(self, key: str, accuracy: float, ended: bool = False) -> None:
        """The end of a trial: its accuracy; `ended` where it was pruned."""
        states = self._optuna.trial.TrialState
        with self._kept():
            self._study.tell(self._open[key], None if ended else accuracy, state=states.PRUNED if ended else states.COMPLETE)
        del self._open[key]

    def fail(self, key: str, reason: str) -> None:
        """The end of a trial that cannot be run; it counts, and its reason is kept."""
        self._fail(key, _WHY, reason)

    def lose(self, key: str, reason: str) -> None:
        """A trial that the machine lost: it does not count and judges nobody, and `ask` gives its point again.

        A point that is lost once more after two repetitions is given up in this process: the next one tries it again.
        """
        settings = self.params_of(key)
        self._fail(key, _LOST, reason)
        self._losses[key] += 1
        if key not in self._given_up() and key not in self._again:
            with self._kept():
                self._study.enqueue_trial(drawn_of(self.arm.space, settings))
            self._begun -= 1

    def _fail(self, key: str, attribute: str, reason: str) -> None:
        with self._kept():
            self._open[key].set_user_attr(attribute, reason)
            self._study.tell(self._open[key], state=self._optuna.trial.TrialState.FAIL)
        del self._open[key]

    def _given_up(self) -> set[str]:
        """Points that the machine has lost too often in this process."""
        return {key for key, count in self._losses.items() if count > _AGAIN}

    def failures(self) -> dict[str, str]:
        """Why trials could not be run, by their hash: those that count, and those that were lost and not made up for."""
        states = self._optuna.trial.TrialState
        found: dict[str, str] = {}
        for trial in self._all():
            attributes = trial.user_attrs
            key, lost = attributes.get(_HASH), attributes.get(_LOST, "its reason was not kept")
            if trial.state in (states.COMPLETE, states.PRUNED):
                found.pop(key, None)
            elif trial.state == states.FAIL and key and lost != _TWICE:
                found[key] = attributes.get(_WHY) or f"to be tried again: {lost}"
        return found

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What is noted inside is on the disk.

        Raises:
            StudyError: the disk cannot take it.
        """
        try:
            yield
        except self._optuna.exceptions.StorageInternalError as error:
            reason = getattr(error.__cause__, "orig", None) or error.__cause__ or error
            raise StudyError(
                f"the trials in {self._storage} cannot be written ({reason}); make room, or change its rights: what had finished "
                "before is kept, and the same command goes on from there"
            ) from None

    def params_of(self, key: str) -> dict[str, Plain]:
        """What was drawn for a running trial."""
        return dict(self._open[key].user_attrs[_SETTINGS])

    def best(self) -> tuple[dict[str, Plain], float] | None:
        """Settings and validation accuracy of the best trial that was not pruned."""
        done = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        if not done:
            return None
        best = max(done, key=lambda trial: trial.value)
        return _settings_of(best), float(best.value)

    def _asked(self) -> Any:
        """A trial of Optuna, with a value for all that is searched."""
        trial = self._study.ask()
        for name, of in self.arm.space.items():
            if isinstance(of, Choice):
                trial.suggest_categorical(name, list(of.values))
            else:
                trial.suggest_float(drawn_as(name, of), of.low, of.high, log=of.log)
        return trial

    def _all(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def _opened(self, storage: Path) -> Any:
        optuna = self._optuna
        try:
            storage.parent.mkdir(parents=True, exist_ok=True)
            storage.touch(0o600)  # accuracies on private examples; SQLite keeps the mode
            url = f"sqlite:///{storage}"
            names = optuna.get_all_study_names(url)
            if any(name.endswith(_RANDOM) != self.name.endswith(_RANDOM) for name in names):
                raise other_kind(storage, self.kind)
            study = optuna.create_study(storage=url, study_name=self.name, direction="maximize", load_if_exists=True)
            count = len(study.get_trials(deepcopy=False))
        except StudyError:
            raise
        except Exception as error:  # of whatever the database is made of
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise StudyError(
                f"the trials in {storage} cannot be used ({reason}); move the file away: the results know finished ones"
            ) from None
        seed = zlib.crc32(f"{self.name}:{count}".encode())  # other draws after a restart than before it
        if self.kind == "random":
            study.sampler = optuna.samplers.RandomSampler()
        else:
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_FIRST, constant_liar=True)
        study.pruner = optuna.pruners.NopPruner()
        return study

    def _take_up(self, rows: list[Mapping[str, Any]]) -> None:
        """Bring storage and results together: trials that a kill left running are told or tried again, lost ones are added."""
        states = self._optuna.trial.TrialState
        known = {row["hash"] for row in rows}
        seen: dict[str, bool] = {}
        lost: dict[str, dict[str, Plain]] = {}
        waiting: list[Any] = []
        for trial in self._all():
            key = trial.user_attrs.get(_HASH)
            if trial.state == states.WAITING:
                waiting.append(trial.system_attrs.get("fixed_params"))
            elif trial.state == states.RUNNING:
                # Of a study that was killed. What its results hold is told again below, the others are tried again.
                self._optuna.trial.Trial(self._study, trial._trial_id).set_user_attr(_LOST, "the study ended while it ran")
                self._study.tell(trial.number, state=states.FAIL)
                lost[key or f"number {trial.number}"] = _settings_of(trial)
            elif not self._is_lost(trial):
                seen[key] = seen.get(key, False) or trial.state == states.COMPLETE
            elif key and trial.user_attrs.get(_LOST) != _TWICE:
                lost[key] = _settings_of(trial)
        for key, settings in lost.items():
            if key not in known | seen.keys() and drawn_of(self.arm.space, settings) not in waiting:
                self._study.enqueue_trial(drawn_of(self.arm.space, settings))
        for row in rows:
            if row["hash"] not in seen or not (row["tag"].get("pruned") or seen[row["hash"]]):
                self._add(row)
        if not self._all() and self.kind == "tpe":
            self._study.enqueue_trial(self._default())

    def _default(self) -> dict[str, Plain]:
        """What the recipe would take, drawn into the ranges."""
        return first_of(self.arm.space, self.run(self.arm.first, seed=0, evaluate_on="test").config())

    def _add(self, row: Mapping[str, Any]) -> None:
        """A finished trial, also one of an earlier space: it counts, and what it has of this one is learned from."""
        optuna, tag = self._optuna, row["tag"]
        pruned, params = bool(tag.get("pruned")), drawn_of(self.arm.space, tag["params"])
        spaces = {drawn_as(name, of): of for name, of in self.arm.space.items()}
        seen = {number: accuracy for number, (_, accuracy) in enumerate(row["curve"][1:], 1)}
        try:
            self._study.add_trial(
                optuna.trial.create_trial(
                    params=params,
                    distributions={name: self._distribution(spaces[name], value) for name, value in params.items()},
                    state=optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE,
                    value=None if pruned else row["accuracy"],
                    intermediate_values=seen,
                    user_attrs={_HASH: row["hash"], _SETTINGS: dict(tag["params"])},
                )
            )
        except (TypeError, ValueError) as error:
            raise StudyError(f"a result of {self.name} does not fit its search space ({error}); choose another --out") from None

    def _distribution(self, of: Range | Choice, value: Any) -> Any:
        """Of a value that was drawn, which may lie outside the range of today."""
        distributions = self._optuna.distributions
        if isinstance(of, Choice):
            return distributions.CategoricalDistribution(list(of.values))
        return distributions.FloatDistribution(min(of.low, value), max(of.high, value), log=of.log)


def _settings_of(trial: Any) -> dict[str, Plain]:
    """What a trial of the storage ran with; one of an earlier version has it as it was drawn."""
    told = trial.user_attrs.get(_SETTINGS)
    return dict(told) if told else {name: rounded(value) for name, value in trial.params.items()}
