"""The search of one arm: trials of Optuna in an SQLite file, which a killed study continues."""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dpkfc.app.datasets import one_line
from dpkfc.app.settings import METHODS, nearest
from dpkfc.app.tuning.runs import Plain, Run, StudyError

# --------------------------------------------------------------------------------------------------
# Successive halving: after 1, 3, 9 … evaluations the best third of all trials so far goes on.
#
# A trial is compared with those that ran before it, so the order decides. A trial that was stopped
# and is in the best third at the end is therefore run once more, to its end (Li et al. 2020, "A
# System for Massively Parallel Hyperparameter Tuning", where it would only have waited). Attempts
# that were killed are compared with nothing. docs/design.md says why Optuna's pruner cannot do so.

_FIRST_RUNG = 1
_REDUCTION = 3


def is_rung(number: int) -> bool:
    """Return whether a trial is compared with others at this evaluation, counted from 1."""
    rung = _FIRST_RUNG
    while rung < number:
        rung *= _REDUCTION
    return rung == number


def is_in_best_third(value: float, others: Iterable[float]) -> bool:
    """Return whether a trial is in the best third at its rung, itself included.

    Of one or two trials the best goes on.
    """
    values = sorted([value, *others], reverse=True)
    return value >= values[max(1, len(values) // _REDUCTION) - 1]


# --------------------------------------------------------------------------------------------------
# What is compared: methods as arms of a study, each with the settings that are searched and their
# ranges, as values.


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform or uniform in the logarithm.

    With `times`, names of other ranges of the space and their powers, the bounds are those of the
    product with them. A step of DP-SGD has length lr · C where examples are clipped. Good values
    of lr and C so lie along a ridge that independent samples of both mostly miss. A step of DP-NGD
    has length lr · C / √λ_safe (Eq. 16), one of DP-AdamBC lr over the root of its floor.
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
    """One method of a comparison.

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
_TIMES_C = (("max_grad_norm", 1.0),)
_STEP = {"lr": Range(0.01, 4.0, times=_TIMES_C)}
_WITHOUT_MOMENTUM = {"lr": Range(0.03, 10.0, times=_TIMES_C)}
_NATURAL = {"lr": Range(0.03, 10.0, times=(*_TIMES_C, ("lambda_safe", -0.5)))}
_ADAM = {"lr": Range(3e-4, 3e-2)}
_ADAM_BC = {
    "lr": Range(5e-5, 2e-2, times=(("adam_bc_resolution", -0.5),)),
    "adam_bc_resolution": Range(2.0, 500.0),
}
_PINK = {"power_exponent": Range(0.0, 2.0, log=False)}
_ZIPF = {"zipf_exponent": Range(0.0, 1.5, log=False)}
_KFAC = {"damping": Range(0.01, 1.0), **_CLIP, **_PINK}
_ADADPS = {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP}
_SPACES: dict[str, Space] = {
    "dp-sgd": {**_STEP, **_CLIP},
    "dp-sgd-pt": {**_STEP, **_CLIP},
    "dp-adam": {**_ADAM, **_CLIP},
    "dp-adamw": {**_ADAM, **_CLIP, "weight_decay": Range(1e-4, 0.1)},
    # The learning rate and C are one number here.
    "dp-sgd-normalised": dict(_SGD),
    "adadps": _ADADPS,
    "pink-adadps": _ADADPS,
    "gep": {
        **_SGD,
        "gep_embedding_norm": Range(0.5, 20.0),
        "gep_residual_norm": Range(0.2, 10.0),
    },
    "b-gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0)},
    "dp-kfc": _KFAC,
    "dp-kfc-a": _KFAC,
    "dp-kfc-g": _KFAC,
    "dp-kfc-random": _KFAC,
    "dp-kfc-natural": {"lr": Range(0.002, 1.0, times=_TIMES_C), **_KFAC},
    "dp-ngd": {
        **_NATURAL,
        "lambda_safe": Range(1e-4, 0.1),
        "max_grad_norm": Range(1.0, 30.0),
    },
    "disk": {
        **_WITHOUT_MOMENTUM,
        **_CLIP,
        "filter_kappa": Range(0.1, 0.9, log=False),
        "disk_gamma": Choice((0.3, 0.5, 0.7, 1.0)),
    },
    "doppler": {**_WITHOUT_MOMENTUM, **_CLIP, "doppler_cutoff": Range(0.02, 0.5)},
    "dp-adambc": {**_ADAM_BC, **_CLIP},
    "sofim": {
        **_STEP,
        **_CLIP,
        "sofim_rho": Range(0.01, 10.0),
        "sofim_beta": Choice((0.5, 0.9, 0.99)),
    },
    "de-et-al": {"lr": Range(0.05, 10.0)},
}
# Arms that every comparison holds unless asked to leave them out. `arms_for` says when it leaves
# out the last one.
CONTROLS = ("dp-sgd-normalised", "dp-sgd-matched", "dp-kfc-a", "dp-kfc-random")


def arm_of(recipe: str, method: str, optimizer: str = "") -> Arm:
    """Return the arm of a method, with its search space for its optimizer.

    Args:
        recipe: whose file may name the optimizer of a method.
        method: as of `dpkfc train --method`, or `dp-sgd-matched`: DP-SGD with the optimizer of the
            others and one number for lr·C, at a bound that clips every example. A preconditioner
            of a large scale does the same by itself.
        optimizer: for methods that take any; empty as the method says.

    Raises:
        StudyError: an unknown method; the nearest one is named.
    """
    if method == "dp-sgd-matched":
        return Arm(
            name=method,
            label="DP-SGD, lr·C matched",
            method="dp-sgd",
            settings={"max_grad_norm": 0.05},
            space={"lr": Range(0.2, 20.0)},
            first={"lr": 2.0},
            control=True,
        )
    if method not in METHODS:
        known = [*METHODS, "dp-sgd-matched"]
        raise StudyError(f"unknown method {method!r}; {nearest(method, known)}")
    row = METHODS[method]
    arm = Arm(
        name=method,
        label=row.label,
        method=method,
        space=_search_space(recipe, method, optimizer),
        control=method in CONTROLS,
    )
    if not optimizer or row.defines_optimizer:
        return arm
    return replace(
        arm,
        name=f"{method}+{optimizer}",
        label=f"{row.label} + {optimizer}",
        settings={"optimizer": optimizer},
    )


def _search_space(recipe: str, method: str, optimizer: str) -> Space:
    run = Run.of(recipe, method)
    space: Space = _SPACES.get(method, _SGD)
    if optimizer not in ("", "sgd") and not METHODS[method].defines_optimizer:
        space = _remove(space, ["lr"])
    if "lr" not in space:
        is_clipped = "max_grad_norm" in space
        rates = _rates(optimizer or run.default("optimizer"), is_clipped)
        space = {**rates, **space}
    source = run.default("source")
    if "power_exponent" in space and source != "pink":
        space = _remove(space, _PINK)
        if source == "tokens":
            space = {**space, **_ZIPF}
    return space


def _remove(space: Space, names: Collection[str]) -> Space:
    return {name: values for name, values in space.items() if name not in names}


def _rates(optimizer: str, is_clipped: bool) -> Space:
    """Return the ranges of an optimizer; Adam's step does not grow with C."""
    if optimizer == "adam-bc":
        return _ADAM_BC
    if optimizer == "adam":
        return _ADAM
    return _STEP if is_clipped else _SGD


def _whitens_one_side(method: str) -> bool:
    row = METHODS.get(method)
    return row is not None and row.settings.get("sides") in ("input", "output")


def random_twin(arm: Arm) -> Arm:
    """Return the arm with random orthogonal directions in place of its eigenvectors.

    Spectra, sides, read-out and search stay the same.
    """
    return replace(
        arm,
        name=f"{arm.name}-random",
        label=f"{arm.label}: random, same spectrum",
        control=True,
        settings={**arm.settings, "control": "random"},
    )


def use_source(arm: Arm, source: str, name: str, label: str, **settings: Plain) -> Arm:
    """Return the arm with curvature from a source that has no exponent to search."""
    return replace(
        arm,
        name=name,
        label=label,
        settings={**arm.settings, "source": source, **settings},
        space=_remove(arm.space, [*_PINK, *_ZIPF]),
    )


def arms_for(
    recipe: str, methods: list[str], *, controls: bool = True, optimizer: str = ""
) -> list[Arm]:
    """Return the arms of methods, and the controls that belong next to them.

    A method that was asked for is no control. A method that whitens one side only has a control of
    random directions on that side (`random_twin`). That control replaces `dp-kfc-random`, which
    has random directions on both sides and stays next to `dp-kfc`.

    Raises:
        StudyError: an unknown method, or one given twice.
    """
    for method in methods:
        if methods.count(method) > 1:
            raise StudyError(f"--method {method} is given twice; every method has its trials once")
    arms = [replace(arm_of(recipe, name, optimizer), control=False) for name in methods]
    if not controls:
        return arms
    one_sided = [name for name in methods if _whitens_one_side(name)]
    for name in CONTROLS:
        is_replaced = name == "dp-kfc-random" and one_sided and "dp-kfc" not in methods
        if name not in methods and not is_replaced:
            arms.append(arm_of(recipe, name, optimizer))
    arms += [random_twin(arm_of(recipe, name, optimizer)) for name in one_sided]
    return arms


# --------------------------------------------------------------------------------------------------
# Settings of a trial and the values that Optuna samples. Where good values of several settings lie
# along a ridge, Optuna samples their product.

_DIGITS = 4


def sampled_name(name: str, values: Range | Choice) -> str:
    """Return the name by which Optuna knows a setting."""
    factors = [name]
    if isinstance(values, Range):
        factors += [f"{other}^{power:g}" for other, power in values.times]
    return " * ".join(factors)


def make_settings(space: Space, sampled: Mapping[str, Any]) -> dict[str, Plain]:
    """Return the settings of a trial: a sampled product is divided by its other factors."""
    settings = {}
    for name, values in space.items():
        settings[name] = round_value(sampled[sampled_name(name, values)])
    for name, values in space.items():
        if isinstance(values, Range) and values.times:
            product = sampled[sampled_name(name, values)]
            settings[name] = round_value(product / _other_factors(values, settings))
    return settings


def make_sample(space: Space, settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Reverse `make_settings` as far as possible: a trial of an earlier space may lack settings."""
    sampled: dict[str, Plain] = {}
    for name, values in space.items():
        if name not in settings:
            continue
        if isinstance(values, Choice):
            sampled[name] = settings[name]
        elif all(other in settings for other, _ in values.times):
            product = settings[name] * _other_factors(values, settings)
            sampled[sampled_name(name, values)] = product
    return sampled


def sample_defaults(space: Space, config: Any) -> dict[str, Plain]:
    """Return the settings of a run as Optuna would sample them, put into the ranges."""
    sampled: dict[str, Plain] = {}
    for name, values in space.items():
        value = getattr(config, name)
        if isinstance(values, Choice):
            sampled[name] = value if value in values.values else values.values[0]
            continue
        product = float(value) * _other_factors(values, vars(config))
        product = max(product, values.low)
        sampled[sampled_name(name, values)] = min(product, values.high)
    return sampled


def round_value(value: Any) -> Any:
    """Round to few digits, so that a number in a table is the number that ran."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _other_factors(values: Range, settings: Mapping[str, Any]) -> float:
    """Return what a setting is multiplied by where the product is searched."""
    return math.prod(float(settings[name]) ** power for name, power in values.times)


# --------------------------------------------------------------------------------------------------
# The search itself.

# Also the kind of rows and storages that do not say theirs.
ADAPTIVE = "tpe"
SEARCHES = (ADAPTIVE, "random")
# At the end of the name of a random search.
_RANDOM = ", random"
# The first trials of TPE are random, so that its model has data.
_RANDOM_TRIALS = 6
# Attributes of a trial in the storage: the hash and settings of its run. Of a trial that failed,
# `lost` says why it does not count and `why` says why it could not be run.
_HASH = "hash"
_SETTINGS = "settings"
_LOST = "lost"
_REASON = "why"
_MOST_RETRIES = 2
_DUPLICATE = "the same trial is running"


def load_optuna() -> ModuleType:
    """Return Optuna with its messages turned off.

    Raises:
        StudyError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise StudyError(
            "tuning needs Optuna, which is not installed: pip install '.[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    return optuna


def other_kind_error(place: Path, kind: str) -> StudyError:
    """Return an error for trials of the other kind in a folder.

    A search must not count trials of the other kind, whose distribution it does not have.
    """
    (earlier,) = set(SEARCHES) - {kind}
    return StudyError(
        f"{place} holds trials of --search {earlier}, and this is --search {kind}; "
        "choose another --out"
    )


@dataclass(eq=False)
class Search:
    """Trials of one arm, on validation accuracy.

    Attributes:
        arm: what is searched.
        common: settings that all arms share.
        recipe: the task.
        storage: an SQLite file.
        trials: how many there are.
        kind: "tpe", with successive halving, or "random", without. Halving never stops the
            recipe's own trial.
        seed: of the run: initial weights and probes of every trial.
        rows: results that are known; those that the storage lacks are added to it.
        started: trials that have ended or are running.

    Raises:
        StudyError: Optuna is not installed, or its file cannot be used.
    """

    arm: Arm
    common: Mapping[str, Plain]
    recipe: str
    storage: Path
    _: KW_ONLY
    trials: int
    kind: str = ADAPTIVE
    seed: int = 0
    rows: InitVar[Iterable[Mapping[str, Any]]] = ()

    def __post_init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._optuna = load_optuna()
        self._states = self._optuna.trial.TrialState
        # Trials that run now, by hash; those of them that run once more; losses in this process.
        self._running: dict[str, Any] = {}
        self._repeated: set[str] = set()
        self._losses: Counter[str] = Counter()
        self._default_hash = ""
        if self.kind == ADAPTIVE:
            settings = make_settings(self.arm.space, self._default())
            self._default_hash = self._validation_run(settings).hash
        self._study = self._open_storage(self.storage)
        own_rows = [row for row in rows if row.get("tag", {}).get("search") == self.name]
        with self._storage_errors():
            self._resume(own_rows)
        # A trial that runs once more counts once.
        self.started = sum(self.counts().values())

    @property
    def name(self) -> str:
        """Name of the search in its storage and in the rows of a study; it tells the kind."""
        kind = "" if self.kind == ADAPTIVE else _RANDOM
        return f"{self.recipe}/{self.arm.name}{kind}"

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended, and none was given up or is to be run once more."""
        has_more = self.started < self.trials or self._running or self._abandoned_hashes()
        return not (has_more or self._stopped_too_early())

    def counts(self) -> dict[str, int]:
        """Return the number of trials that have ended, by how."""
        states = [trial.state for trial in self._counted_trials()]
        return {
            "full": states.count(self._states.COMPLETE),
            "pruned": states.count(self._states.PRUNED),
            "failed": states.count(self._states.FAIL),
        }

    def _counted_trials(self) -> list[Any]:
        """Return trials without lost attempts and without first runs of repeated trials."""
        counted = [trial for trial in self._all_trials() if not self._is_lost(trial)]
        if self.kind != ADAPTIVE:
            return counted
        last = {}
        for trial in counted:
            key = trial.user_attrs.get(_HASH, trial.number)
            last[key] = trial
        return list(last.values())

    def _is_lost(self, trial: Any) -> bool:
        """Return whether an attempt failed through no fault of its trial.

        Attempts of an earlier version, which stored no reason, count as lost.
        """
        return bool(trial.state == self._states.FAIL and _REASON not in trial.user_attrs)

    def ask(self) -> tuple[str, Run]:
        """Return the next trial: its hash, by which its results are reported, and its run."""
        while True:
            with self._storage_errors():
                trial = self._sample_trial()
                settings = make_settings(self.arm.space, trial.params)
                run = self._validation_run(settings)
                trial.set_user_attr(_HASH, run.hash)
                trial.set_user_attr(_SETTINGS, settings)
                if run.hash not in self._running:
                    self._running[run.hash] = trial
                    self.started += 1
                    return run.hash, run
                trial.set_user_attr(_LOST, _DUPLICATE)
                self._study.tell(trial, state=self._states.FAIL)

    def ask_again(self) -> tuple[str, Run] | None:
        """Return a trial that is to be run once more, to its end, as `ask` returns it.

        Returns:
            None where there is no such trial, or other trials still run.
        """
        if self.started < self.trials or self._running.keys() - self._repeated:
            return None
        for stopped in self._stopped_too_early():
            key = stopped.user_attrs[_HASH]
            settings = _settings_of(stopped)
            if key in self._running or key in self._abandoned_hashes():
                continue
            with self._storage_errors():
                self._study.enqueue_trial(make_sample(self.arm.space, settings))
                trial = self._sample_trial()
                trial.set_user_attr(_HASH, key)
                trial.set_user_attr(_SETTINGS, settings)
            self._repeated.add(key)
            self._running[key] = trial
            return key, self._validation_run(settings)
        return None

    def _stopped_too_early(self) -> list[Any]:
        """Return stopped trials that are in the best third by now, and the recipe's own trial."""
        if self.kind != ADAPTIVE:
            return []
        evaluations = self._evaluations()
        stopped = []
        for trial in self._counted_trials():
            key = trial.user_attrs.get(_HASH)
            values = trial.intermediate_values
            if trial.state != self._states.PRUNED or key is None or not values:
                continue
            last = max(values)
            others = _other_values(evaluations, key, last)
            if key == self._default_hash or is_in_best_third(values[last], others):
                stopped.append(trial)
        return stopped

    def _evaluations(self) -> dict[str, dict[int, float]]:
        """Return the evaluations of each trial that did not fail, by hash.

        A trial that runs once more also has the evaluations of its first run.
        """
        evaluations: dict[str, dict[int, float]] = {}
        for trial in self._all_trials():
            if trial.state != self._states.FAIL:
                key = trial.user_attrs.get(_HASH, str(trial.number))
                evaluations.setdefault(key, {}).update(trial.intermediate_values)
        return evaluations

    def run(
        self, params: Mapping[str, Plain], *, seed: int, evaluate_on: str, **changed: Plain
    ) -> Run:
        """Return the arm's run with settings of a search."""
        settings = {**self.common, **self.arm.settings, **params, **changed}
        if evaluate_on == "test":
            settings.pop("validation_size", None)
        return Run.of(self.recipe, self.arm.method, settings, seed=seed, evaluate_on=evaluate_on)

    def _validation_run(self, settings: Mapping[str, Plain]) -> Run:
        return self.run(settings, seed=self.seed, evaluate_on="validation")

    def report(self, key: str, number: int, accuracy: float) -> bool:
        """Store an evaluation of a running trial, and return whether the trial goes on."""
        trial = self._running[key]
        with self._storage_errors():
            trial.report(accuracy, number)
        runs_to_its_end = key in self._repeated or key == self._default_hash
        if self.kind != ADAPTIVE or not is_rung(number) or runs_to_its_end:
            return True
        return is_in_best_third(accuracy, _other_values(self._evaluations(), key, number))

    def tell(self, key: str, accuracy: float, ended: bool = False) -> None:
        """Store the end of a trial: its accuracy; `ended` where it was pruned."""
        trial = self._running[key]
        with self._storage_errors():
            if ended:
                self._study.tell(trial, state=self._states.PRUNED)
            else:
                self._study.tell(trial, accuracy, state=self._states.COMPLETE)
        del self._running[key]

    def fail(self, key: str, reason: str) -> None:
        """Store the end of a trial that cannot be run; the trial counts."""
        self._tell_failure(key, _REASON, reason)

    def lose(self, key: str, reason: str) -> None:
        """Store a trial that the machine lost, so that `ask` returns its point again.

        The trial does not count and is compared with nothing. A point that is lost once more after
        two repetitions is given up in this process; the next process tries it again.
        """
        settings = self.params_of(key)
        self._tell_failure(key, _LOST, reason)
        self._losses[key] += 1
        if key not in self._abandoned_hashes() and key not in self._repeated:
            with self._storage_errors():
                self._study.enqueue_trial(make_sample(self.arm.space, settings))
            self.started -= 1

    def _tell_failure(self, key: str, attribute: str, reason: str) -> None:
        with self._storage_errors():
            self._running[key].set_user_attr(attribute, reason)
            self._study.tell(self._running[key], state=self._states.FAIL)
        del self._running[key]

    def _abandoned_hashes(self) -> set[str]:
        """Return points that the machine has lost too often in this process."""
        return {key for key, count in self._losses.items() if count > _MOST_RETRIES}

    def failures(self) -> dict[str, str]:
        """Return why trials could not be run, by their hash.

        They are trials that count, and lost trials that have not been repeated with success.
        """
        failures: dict[str, str] = {}
        for trial in self._all_trials():
            attributes = trial.user_attrs
            key = attributes.get(_HASH)
            if trial.state in (self._states.COMPLETE, self._states.PRUNED):
                failures.pop(key, None)
                continue
            lost = attributes.get(_LOST, "its reason was not kept")
            if trial.state == self._states.FAIL and key and lost != _DUPLICATE:
                failures[key] = attributes.get(_REASON) or f"to be tried again: {lost}"
        return failures

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Turn errors of the storage into a message.

        Raises:
            StudyError: the disk cannot store a trial.
        """
        try:
            yield
        except self._optuna.exceptions.StorageInternalError as error:
            reason = getattr(error.__cause__, "orig", None) or error.__cause__ or error
            raise StudyError(
                f"the trials in {self.storage} cannot be written ({reason}); make room or change "
                "its rights: earlier trials are kept, and the same command goes on from there"
            ) from None

    def params_of(self, key: str) -> dict[str, Plain]:
        """Return the searched settings of a running trial."""
        return dict(self._running[key].user_attrs[_SETTINGS])

    def best(self) -> tuple[dict[str, Plain], float] | None:
        """Return settings and validation accuracy of the best trial that was not pruned."""
        complete = self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE,))
        if not complete:
            return None
        best = max(complete, key=lambda trial: trial.value)
        return _settings_of(best), float(best.value)

    def _sample_trial(self) -> Any:
        """Return a trial of Optuna, with a value for all that is searched."""
        distributions = {}
        for name, values in self.arm.space.items():
            distributions[sampled_name(name, values)] = self._distribution(values)
        return self._study.ask(distributions)

    def _all_trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def _open_storage(self, storage: Path) -> Any:
        optuna = self._optuna
        try:
            storage.parent.mkdir(parents=True, exist_ok=True)
            # The file holds accuracies on private examples. SQLite keeps its mode.
            storage.touch(0o600)
            url = f"sqlite:///{storage}"
            for name in optuna.get_all_study_names(url):
                if name.endswith(_RANDOM) != self.name.endswith(_RANDOM):
                    raise other_kind_error(storage, self.kind)
            study = optuna.create_study(
                storage=url, study_name=self.name, direction="maximize", load_if_exists=True
            )
            count = len(study.get_trials(deepcopy=False))
        except StudyError:
            raise
        except Exception as error:
            # Any error of the database and its driver.
            raise StudyError(
                f"the trials in {storage} cannot be used ({one_line(error)[:200]}); move the"
                " file away: the results hold the finished ones"
            ) from None
        # The number of trials makes a restarted search sample other points than before.
        seed = zlib.crc32(f"{self.name}:{count}".encode())
        study.sampler = optuna.samplers.RandomSampler()
        if self.kind == ADAPTIVE:
            study.sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=_RANDOM_TRIALS, constant_liar=True
            )
        study.pruner = optuna.pruners.NopPruner()
        return study

    def _resume(self, rows: list[Mapping[str, Any]]) -> None:
        """Bring storage and results together: what the storage lacks is added to it."""
        finished = self._repeat_lost_trials({row["hash"] for row in rows})
        for row in rows:
            key = row["hash"]
            is_pruned = row["tag"].get("pruned")
            is_stored = key in finished if is_pruned else finished.get(key, False)
            if not is_stored:
                self._add(row)
        if not self._all_trials() and self.kind == ADAPTIVE:
            self._study.enqueue_trial(self._default())

    def _repeat_lost_trials(self, results: Collection[str]) -> Mapping[str, bool]:
        """Try trials again that were lost or that a kill left running.

        Args:
            results: hashes of results, whose trials need no repetition.

        Returns:
            Whether a trial is complete, by hash, for those that have ended.
        """
        finished: defaultdict[str, bool] = defaultdict(bool)
        lost: dict[str, dict[str, Plain]] = {}
        waiting: list[Any] = []
        for trial in self._all_trials():
            key = trial.user_attrs.get(_HASH)
            if trial.state == self._states.WAITING:
                waiting.append(trial.system_attrs.get("fixed_params"))
            elif trial.state == self._states.RUNNING:
                self._tell_interrupted(trial)
                lost[key or f"number {trial.number}"] = _settings_of(trial)
            elif not self._is_lost(trial):
                finished[key] |= trial.state == self._states.COMPLETE
            elif key and trial.user_attrs.get(_LOST) != _DUPLICATE:
                lost[key] = _settings_of(trial)
        known = finished.keys() | results
        for key, settings in lost.items():
            point = make_sample(self.arm.space, settings)
            if key not in known and point not in waiting:
                self._study.enqueue_trial(point)
        return finished

    def _tell_interrupted(self, trial: Any) -> None:
        """Store that a killed study left a trial running."""
        handle = self._optuna.trial.Trial(self._study, trial._trial_id)
        handle.set_user_attr(_LOST, "the study ended while it ran")
        self._study.tell(trial.number, state=self._states.FAIL)

    def _default(self) -> dict[str, Plain]:
        """Return what the recipe would take, put into the ranges."""
        config = self.run(self.arm.first, seed=0, evaluate_on="test").config()
        return sample_defaults(self.arm.space, config)

    def _add(self, row: Mapping[str, Any]) -> None:
        """Add a finished trial of the results to the storage.

        A trial of an earlier search space counts, and TPE learns from the settings that it shares
        with today's space.
        """
        optuna = self._optuna
        tag = row["tag"]
        is_pruned = bool(tag.get("pruned"))
        params = make_sample(self.arm.space, tag["params"])
        distributions = {}
        for name, values in self.arm.space.items():
            sampled = sampled_name(name, values)
            if sampled in params:
                distributions[sampled] = self._distribution(values, params[sampled])
        # The curve begins with the untrained model, which is no evaluation.
        evaluations = {}
        for number, (_, accuracy) in enumerate(row["curve"][1:], 1):
            evaluations[number] = accuracy
        try:
            trial = optuna.trial.create_trial(
                params=params,
                distributions=distributions,
                state=self._states.PRUNED if is_pruned else self._states.COMPLETE,
                value=None if is_pruned else row["accuracy"],
                intermediate_values=evaluations,
                user_attrs={_HASH: row["hash"], _SETTINGS: dict(tag["params"])},
            )
            self._study.add_trial(trial)
        except (TypeError, ValueError) as error:
            raise StudyError(
                f"a result of {self.name} does not fit its search space ({error}); "
                "choose another --out"
            ) from None

    def _distribution(self, values: Range | Choice, *known: Any) -> Any:
        """Return a distribution that holds known values too: they may lie outside of the range."""
        distributions = self._optuna.distributions
        if isinstance(values, Choice):
            return distributions.CategoricalDistribution(list(values.values))
        low = min([values.low, *known])
        high = max([values.high, *known])
        return distributions.FloatDistribution(low, high, log=values.log)


def _other_values(
    evaluations: Mapping[str, Mapping[int, float]], key: str, number: int
) -> list[float]:
    """Return what trials other than `key` came to at an evaluation."""
    others = [values for other, values in evaluations.items() if other != key]
    return [values[number] for values in others if number in values]


def _settings_of(trial: Any) -> dict[str, Plain]:
    """Return the settings of a trial in the storage.

    Trials of an earlier version have them as they were sampled.
    """
    settings = trial.user_attrs.get(_SETTINGS)
    if settings:
        return dict(settings)
    return {name: round_value(value) for name, value in trial.params.items()}
