"""The search of one arm: trials of Optuna in an SQLite file, which a killed study takes up again."""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dpkfc.app.methods import METHODS
from dpkfc.app.settings import nearest
from dpkfc.app.tuning.runs import Plain, Run, StudyError

# --------------------------------------------------------------------------------------------------
# Successive halving: after 1, 3, 9 … evaluations the best third of all trials that came so far goes
# on.
#
# A trial is judged against those that were there before it, so whether it goes on depends on when
# it ran. One that was stopped and stands in the best third when all have run is therefore run once
# more, to its end (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", where
# it would only have waited). Attempts that were killed judge nobody.

_FIRST, _SHARE = 1, 3  # the first evaluation at which a trial is judged; of so many trials that stand there one goes on


def is_rung(number: int) -> bool:
    """Whether a trial is judged at this evaluation, counted from 1."""
    rung = _FIRST
    while rung < number:
        rung *= _SHARE
    return rung == number


def stands(value: float, others: Iterable[float]) -> bool:
    """Whether a trial is in the best third of those at its rung, itself included; of one or two the best is."""
    at = sorted([value, *others], reverse=True)
    return value >= at[max(1, len(at) // _SHARE) - 1]


# --------------------------------------------------------------------------------------------------
# What is compared: methods as arms of a study, each with the settings that are searched and their
# ranges, as values.


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform or uniform in the logarithm.

    With `times`, names of other ranges of the space and their powers, the bounds are those of the product with them. A step of
    DP-SGD is lr · C long where examples are clipped, so good values of lr and C lie along a ridge that independent draws of both
    mostly miss; one of DP-NGD is lr · C / √λ_safe (Eq. 16), and lr over the root of its floor one of DP-AdamBC.
    """

    low: float
    high: float
    log: bool = True
    times: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Plain, ...]


Space = Mapping[str, Range | Choice]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of a comparison.

    Attributes:
        name: unique within a study.
        label: in tables.
        method: as of `dpkfc train --method`.
        settings: fixed ones, over the recipe's.
        space: settings that are searched.
        first: where the search begins; empty takes what the recipe gives.
        control: a control that is matched to the other arms, not a method that is compared.
    """

    name: str
    label: str
    method: str
    settings: Mapping[str, Plain] = field(default_factory=dict)
    space: Space = field(default_factory=dict)
    first: Mapping[str, Plain] = field(default_factory=dict)
    control: bool = False


_CLIP = {"max_grad_norm": Range(0.1, 10.0)}
_SGD = {"lr": Range(0.01, 4.0)}
_STEP = {"lr": Range(0.01, 4.0, times=(("max_grad_norm", 1.0),))}
_WITHOUT_MOMENTUM = {"lr": Range(0.03, 10.0, times=(("max_grad_norm", 1.0),))}
_NATURAL = {"lr": Range(0.03, 10.0, times=(("max_grad_norm", 1.0), ("lambda_safe", -0.5)))}
_ADAM = {"lr": Range(3e-4, 3e-2)}
_ADAM_BC = {"lr": Range(5e-5, 2e-2, times=(("adam_bc_resolution", -0.5),)), "adam_bc_resolution": Range(2.0, 500.0)}
_KFAC = {"damping": Range(0.01, 1.0), **_CLIP}
_PINK = {"power_exponent": Range(0.0, 2.0, log=False)}
_ZIPF = {"zipf_exponent": Range(0.0, 1.5, log=False)}
_SPACES: dict[str, dict[str, Range | Choice]] = {
    "dp-sgd": {**_STEP, **_CLIP},
    "dp-adam": {**_ADAM, **_CLIP},
    "dp-adamw": {**_ADAM, **_CLIP, "weight_decay": Range(1e-4, 0.1)},
    "dp-sgd-normalised": dict(_SGD),  # lr and C are one number here
    "adadps": {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP},
    "pink-adadps": {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP},
    "dp2": {**_WITHOUT_MOMENTUM, **_CLIP, "dp2_phase": Choice((10, 50, 200)), "dp2_ratio": Range(0.1, 10.0)},
    "gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0), "gep_residual_norm": Range(0.2, 10.0)},
    "b-gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0)},
    "dp-kfc": {**_KFAC, **_PINK},
    "dp-kfc-a": {**_KFAC, **_PINK},
    "dp-kfc-natural": {"lr": Range(0.002, 1.0, times=(("max_grad_norm", 1.0),)), **_KFAC, **_PINK},
    "dp-kfc-g": {**_KFAC, **_PINK},
    "dp-kfc-random": {**_KFAC, **_PINK},
    "dp-ngd": {**_NATURAL, "lambda_safe": Range(1e-4, 0.1), "max_grad_norm": Range(1.0, 30.0)},
    "disk": {
        **_WITHOUT_MOMENTUM, **_CLIP, "filter_kappa": Range(0.1, 0.9, log=False), "disk_gamma": Choice((0.3, 0.5, 0.7, 1.0)),
    },
    "doppler": {**_WITHOUT_MOMENTUM, **_CLIP, "doppler_cutoff": Range(0.02, 0.5)},
    "dp-adambc": {**_ADAM_BC, **_CLIP},
    "sofim": {**_STEP, **_CLIP, "sofim_rho": Range(0.01, 10.0), "sofim_beta": Choice((0.5, 0.9, 0.99))},
    "de-et-al": {"lr": Range(0.05, 10.0)},
    "dp-sgd-pt": {**_STEP, **_CLIP},
}  # fmt: skip
CONTROLS = ("dp-sgd-normalised", "dp-sgd-matched", "dp-kfc-a", "dp-kfc-random")
"""Arms that every comparison holds unless it is asked to leave them out; see `arms_for` for the last one."""


def arm_of(recipe: str, method: str, optimizer: str = "") -> Arm:
    """The arm of a method, with its search space for the optimizer it takes.

    Args:
        recipe: whose file may name the optimizer of a method.
        method: as of `dpkfc train --method`, or `dp-sgd-matched`: DP-SGD with the optimizer of the others and one number for
            lr·C, at a bound that clips every example, which is what a preconditioner of a large scale does by itself.
        optimizer: for methods that take any; empty as the method says.

    Raises:
        StudyError: an unknown method; the nearest one is named.
    """
    if method == "dp-sgd-matched":
        return Arm(
            name=method, label="DP-SGD, lr·C matched", method="dp-sgd", settings={"max_grad_norm": 0.05},
            space={"lr": Range(0.2, 20.0)}, first={"lr": 2.0}, control=True,
        )  # fmt: skip
    if method not in METHODS:
        raise StudyError(f"unknown method {method!r}; {nearest(method, [*METHODS, 'dp-sgd-matched'])}")
    row = METHODS[method]
    space = dict(_SPACES.get(method, _SGD))
    takes = optimizer or Run.of(recipe, method).default("optimizer")
    if optimizer not in ("", "sgd") and not row.defines_optimizer:
        space.pop("lr", None)
    if "lr" not in space:
        space = {**_rates(takes, "max_grad_norm" in space), **space}
    if "power_exponent" in space and (source := Run.of(recipe, method).default("source")) != "pink":
        space = {**{key: value for key, value in space.items() if key not in _PINK}, **(_ZIPF if source == "tokens" else {})}
    settings = {"optimizer": optimizer} if optimizer and not row.defines_optimizer else {}
    name = f"{method}+{optimizer}" if settings else method
    label = f"{row.label} + {optimizer}" if settings else row.label
    return Arm(name=name, label=label, method=method, settings=settings, space=space, control=method in CONTROLS)


def _whitens_one_side(method: str) -> bool:
    return method in METHODS and METHODS[method].settings.get("sides") in ("input", "output")


def random_twin(arm: Arm) -> Arm:
    """The arm with random orthogonal directions in place of its eigenvectors: the same spectra, sides, read-out and search."""
    return replace(
        arm, name=f"{arm.name}-random", label=f"{arm.label}: random, same spectrum", control=True,
        settings={**arm.settings, "control": "random"},
    )  # fmt: skip


def _rates(optimizer: str, clipped: bool) -> Space:
    """The ranges of an optimizer; Adam's step does not grow with C."""
    if optimizer == "adam-bc":
        return _ADAM_BC
    return _ADAM if optimizer == "adam" else _STEP if clipped else _SGD


def with_public(arm: Arm, public: str, name: str, label: str) -> Arm:
    """The arm with curvature from public examples."""
    return with_source(arm, "public", name, label, public_data=public)


def with_source(arm: Arm, source: str, name: str, label: str, **settings: Plain) -> Arm:
    """The arm with curvature from a source that has no exponent to search."""
    space = {key: value for key, value in arm.space.items() if key not in {**_PINK, **_ZIPF}}
    return replace(arm, name=name, label=label, settings={**arm.settings, "source": source, **settings}, space=space)


def arms_for(recipe: str, methods: list[str], *, controls: bool = True, optimizer: str = "") -> list[Arm]:
    """The arms of a list of methods, and the controls that belong beside them; a method that was asked for is none.

    A method that whitens one side only has a control of random directions on that side (`random_twin`), in place of
    `dp-kfc-random`, which has them on both and stays beside `dp-kfc`, or where no method of DP-KFC is compared.

    Raises:
        StudyError: an unknown method, or one given twice.
    """
    twice = next((m for m in methods if methods.count(m) > 1), None)
    if twice is not None:
        raise StudyError(f"--method {twice} is given twice; every method has its trials once")
    twins = [random_twin(arm_of(recipe, name, optimizer)) for name in methods if controls and _whitens_one_side(name)]
    beside = [name for name in CONTROLS if controls and name not in methods]
    if twins and "dp-kfc" not in methods:
        beside = [name for name in beside if name != "dp-kfc-random"]
    asked = [replace(arm_of(recipe, name, optimizer), control=False) for name in methods]
    return [*asked, *(arm_of(recipe, name, optimizer) for name in beside), *twins]


# --------------------------------------------------------------------------------------------------
# Settings of a trial and what is drawn for it: a search draws the product of settings whose good
# values lie along a ridge.

_DIGITS = 4


def drawn_as(name: str, of: Range | Choice) -> str:
    """The name that a setting is drawn by."""
    return " * ".join([name, *(f"{other}^{power:g}" for other, power in of.times)]) if isinstance(of, Range) else name


def settings_of(space: Space, drawn: Mapping[str, Any]) -> dict[str, Plain]:
    """What a trial runs with, of what was drawn for it: a product is divided by its other factors."""
    found = {name: rounded(drawn[drawn_as(name, of)]) for name, of in space.items()}
    for name, of in space.items():
        if isinstance(of, Range) and of.times:
            found[name] = rounded(drawn[drawn_as(name, of)] / _others(of, found))
    return found


def drawn_of(space: Space, settings: Mapping[str, Any]) -> dict[str, Plain]:
    """The reverse of `settings_of`, of those that there are: a trial of an earlier space may lack some."""
    found: dict[str, Plain] = {}
    for name, of in space.items():
        needed = {name, *(other for other, _ in of.times)} if isinstance(of, Range) else {name}
        if needed <= settings.keys():
            found[drawn_as(name, of)] = settings[name] if isinstance(of, Choice) else settings[name] * _others(of, settings)
    return found


def first_of(space: Space, config: Any) -> dict[str, Plain]:
    """The settings of a run as they would be drawn, put into the ranges."""
    found: dict[str, Plain] = {}
    for name, of in space.items():
        value = getattr(config, name)
        if isinstance(of, Choice):
            found[name] = value if value in of.values else of.values[0]
        elif of.times:
            product = float(value) * _others(of, vars(config))
            found[drawn_as(name, of)] = min(max(product, of.low), of.high)
        else:
            found[name] = min(max(float(value), of.low), of.high)
    return found


def rounded(value: Any) -> Any:
    """Few digits, so that a number in a table is the number that ran."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _others(of: Range, settings: Mapping[str, Any]) -> float:
    """What a setting is multiplied by where the product is searched."""
    return math.prod(float(settings[name]) ** power for name, power in of.times)


# --------------------------------------------------------------------------------------------------

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
