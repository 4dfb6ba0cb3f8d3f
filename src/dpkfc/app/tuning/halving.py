"""Successive halving: after 1, 3, 9 … evaluations the best third of all trials so far goes on.

A trial is compared with those that ran before it, so the order decides. A trial that was stopped
and is in the best third at the end is therefore run once more, to its end (Li et al. 2020, "A
System for Massively Parallel Hyperparameter Tuning", where it would only have waited).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.app.tuning.journal import AGAIN, open_journal

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


@dataclass(frozen=True)
class Halving:
    """Store the evaluations of a running trial, and stop it where it is behind.

    A worker process calls it.

    Attributes:
        journal: file of the trials.
        search: name of the search in it.
        number: of the trial.
        may_stop: whether the trial is stopped at all.
    """

    journal: Path
    search: str
    number: int
    may_stop: bool

    def __call__(self, evaluation: int, accuracy: float) -> bool:
        """Return whether the trial goes on after an evaluation, counted from 1."""
        storage = open_journal(self.journal)
        study = storage.get_study_id_from_name(self.search)
        trial = storage.get_trial_id_from_study_id_trial_number(study, self.number)
        storage.set_trial_intermediate_value(trial, evaluation, accuracy)
        if not self.may_stop or not is_rung(evaluation):
            return True
        trials = storage.get_all_trials(study, deepcopy=False)
        return is_in_best_third(accuracy, other_values(trials, self.number, evaluation))


def other_values(trials: Iterable[Any], number: int, evaluation: int) -> list[float]:
    """Return what trials other than this one came to at an evaluation.

    A trial that runs once more also has the evaluations of its first run, and an attempt that
    failed is compared with nothing.
    """
    values: dict[int, float] = {}
    for trial in trials:
        if trial.state.name != "FAIL" and evaluation in trial.intermediate_values:
            values[first_number(trial)] = trial.intermediate_values[evaluation]
    values.pop(number, None)
    return list(values.values())


def first_number(trial: Any) -> int:
    """Return the number of a trial, or of the stopped one that it runs once more."""
    return int(trial.user_attrs.get(AGAIN, trial.number))
