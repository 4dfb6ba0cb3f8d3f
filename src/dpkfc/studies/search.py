"""The search of one arm: trials of Optuna in an SQLite file, which a killed study takes up again."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dpkfc.studies.arms import Arm, Choice, Range
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.errors import StudyError
from dpkfc.studies.halving import is_rung, stands

__all__ = ["ADAPTIVE", "SEARCHES", "Search", "load_optuna", "other_kind"]

ADAPTIVE = "tpe"  # also of rows and storages that do not say their kind
SEARCHES = (ADAPTIVE, "random")
_RANDOM = ", random"  # at the end of the name of a random search
_DIGITS = 4
_RANDOM_FIRST = 6  # trials of TPE that are random, so that the model of it has something to stand on
_HASH, _SETTINGS = "hash", "settings"


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
        own = self._settings(self._default()) if kind == "tpe" else None
        self._first = "" if own is None else self.run(own, seed=seed, evaluate_on="validation").hash
        self._study = self._opened(storage)
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
        """Whether every trial has ended, and none is to be run once more."""
        return self.begun >= self.trials and not self._open and not self._stopped_too_early()

    def counts(self) -> dict[str, int]:
        """Trials that have ended, by how."""
        states = self._optuna.trial.TrialState
        ended = [trial.state for trial in self._own()]
        named = {"full": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        return {name: ended.count(state) for name, state in named.items()}

    def _own(self) -> list[Any]:
        """Trials that count: neither those that were killed nor the first run of one that ran once more."""
        counted = [trial for trial in self._all() if not trial.user_attrs.get("lost")]
        if self.kind != "tpe":
            return counted
        return list({trial.user_attrs.get(_HASH, trial.number): trial for trial in counted}.values())

    def ask(self) -> tuple[str, Run]:
        """The next trial: its hash, by which it is told, and its run."""
        while True:
            trial = self._study.ask()
            for name in self.arm.space:
                self._suggest(trial, name)
            settings = self._settings(trial.params)
            run = self.run(settings, seed=self._seed, evaluate_on="validation")
            trial.set_user_attr(_HASH, run.hash)
            trial.set_user_attr(_SETTINGS, settings)
            if run.hash not in self._open:
                self._open[run.hash] = trial
                self._begun += 1
                return run.hash, run
            trial.set_user_attr("lost", "the same trial is running")
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def ask_again(self) -> tuple[str, Run] | None:
        """A trial that is to be run once more, to its end, as of `ask`; None where there is none, or not yet."""
        if self.begun < self.trials or self._open.keys() - self._again:
            return None
        for stopped in self._stopped_too_early():
            key, settings = stopped.user_attrs[_HASH], _settings_of(stopped)
            if key not in self._open:
                self._study.enqueue_trial(self._drawn(settings))
                trial = self._study.ask()
                for name in self.arm.space:
                    self._suggest(trial, name)
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
        """What each trial that counts came to on the way; of one that runs once more also what its first run had."""
        found: dict[str, dict[int, float]] = {}
        for trial in self._all():
            if not trial.user_attrs.get("lost"):
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
        trial.report(accuracy, number)
        if self.kind != "tpe" or key in self._again or key == self._first or not is_rung(number):
            return True
        others = (seen for other, seen in self._evaluations().items() if other != key)
        return stands(accuracy, [seen[number] for seen in others if number in seen])

    def tell(self, key: str, accuracy: float | None, ended: bool = False) -> None:
        """The end of a trial: its accuracy, None where it failed; `ended` where it was pruned."""
        states = self._optuna.trial.TrialState
        trial = self._open.pop(key)
        if accuracy is None:
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, None if ended else accuracy, state=states.PRUNED if ended else states.COMPLETE)

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

    def _suggest(self, trial: Any, name: str) -> None:
        of = self.arm.space[name]
        if isinstance(of, Choice):
            trial.suggest_categorical(name, list(of.values))
        else:
            trial.suggest_float(_drawn_as(name, of), of.low, of.high, log=of.log)

    def _settings(self, drawn: Mapping[str, Any]) -> dict[str, Plain]:
        """What a trial runs with, of what was drawn for it: a product is divided by its other factors."""
        found = {name: _rounded(drawn[_drawn_as(name, of)]) for name, of in self.arm.space.items()}
        for name, of in self.arm.space.items():
            if isinstance(of, Range) and of.times:
                found[name] = _rounded(drawn[_drawn_as(name, of)] / _others(of, found))
        return found

    def _drawn(self, settings: Mapping[str, Any]) -> dict[str, Plain]:
        """The reverse of `_settings`, of those that there are: a trial of an earlier space may lack some."""
        found: dict[str, Plain] = {}
        for name, of in self.arm.space.items():
            needed = {name, *(other for other, _ in of.times)} if isinstance(of, Range) else {name}
            if needed <= settings.keys():
                found[_drawn_as(name, of)] = settings[name] if isinstance(of, Choice) else settings[name] * _others(of, settings)
        return found

    def _all(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def _opened(self, storage: Path) -> Any:
        optuna = self._optuna
        try:
            storage.parent.mkdir(parents=True, exist_ok=True)
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
        known = {row["hash"]: row for row in rows}
        seen: dict[str, bool] = {}
        for trial in self._all():
            key = trial.user_attrs.get(_HASH)
            if trial.state != states.RUNNING:
                seen[key] = seen.get(key, False) or trial.state == states.COMPLETE
                continue
            # Of a study that was killed. What its results hold is told again below, the others are tried again.
            self._optuna.trial.Trial(self._study, trial._trial_id).set_user_attr("lost", "the study ended while it ran")
            self._study.tell(trial.number, state=states.FAIL)
            if key not in known:
                self._study.enqueue_trial(self._drawn(_settings_of(trial)))
        for row in rows:
            if row["hash"] not in seen or not (row["tag"].get("pruned") or seen[row["hash"]]):
                self._add(row)
        if not self._all() and self.kind == "tpe":
            self._study.enqueue_trial(self._default())

    def _add(self, row: Mapping[str, Any]) -> None:
        """A finished trial, also one of an earlier space: it counts, and what it has of this one is learned from."""
        optuna, tag = self._optuna, row["tag"]
        pruned, params = bool(tag.get("pruned")), self._drawn(tag["params"])
        spaces = {_drawn_as(name, of): of for name, of in self.arm.space.items()}
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

    def _default(self) -> dict[str, Plain]:
        """What the recipe would take, drawn into the ranges."""
        config = self.run(self.arm.first, seed=0, evaluate_on="test").config()
        found: dict[str, Plain] = {}
        for name, of in self.arm.space.items():
            value = getattr(config, name)
            if isinstance(of, Choice):
                found[name] = value if value in of.values else of.values[0]
            elif of.times:
                product = float(value) * _others(of, vars(config))
                found[_drawn_as(name, of)] = min(max(product, of.low), of.high)
            else:
                found[name] = min(max(float(value), of.low), of.high)
        return found


def _drawn_as(name: str, of: Range | Choice) -> str:
    """The name that Optuna knows a setting by."""
    return " * ".join([name, *(f"{other}^{power:g}" for other, power in of.times)]) if isinstance(of, Range) else name


def _others(of: Range, settings: Mapping[str, Any]) -> float:
    """What a setting is multiplied by where the product is searched."""
    return math.prod(float(settings[name]) ** power for name, power in of.times)


def _settings_of(trial: Any) -> dict[str, Plain]:
    """What a trial of the storage ran with; one of an earlier version has it as it was drawn."""
    told = trial.user_attrs.get(_SETTINGS)
    return dict(told) if told else {name: _rounded(value) for name, value in trial.params.items()}


def _rounded(value: Any) -> Any:
    """Few digits, so that a number in a table is the number that ran."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
