"""Successive halving by Optuna's pruner: after 1, 3, 9 … evaluations the best third goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpkfc.app.tuning.journal import load_optuna, open_journal


@dataclass(frozen=True)
class Halving:
    """Store the evaluations of a running trial, and stop it where it is behind.

    A worker process calls it. A trial is compared with those that ran before it.

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
        optuna = load_optuna()
        storage = open_journal(self.journal)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        study = optuna.load_study(study_name=self.search, storage=storage, pruner=pruner)
        number = storage.get_trial_id_from_study_id_trial_number(study._study_id, self.number)
        trial = optuna.trial.Trial(study, number)
        trial.report(accuracy, evaluation)
        is_behind: bool = trial.should_prune()
        return not (self.may_stop and is_behind)
