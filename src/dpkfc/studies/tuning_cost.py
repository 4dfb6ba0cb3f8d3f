"""What tuning costs: ε of a random search whose number of trials is random, and the composition of all trials otherwise."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting
from dp_accounting import dp_event, rdp

from dpkfc.privacy.events import epsilon, quiet_accountants
from dpkfc.studies.errors import StudyError

__all__ = ["SCOPE", "TrialLaw", "composed", "draw", "trial_law", "with_selection"]

SCOPE = (
    "for examples of the training part: a score on the validation part follows from private weights for them, and it is exact "
    "for validation examples, which no ε protects"
)
_LARGEST = 10_000


@dataclass(frozen=True)
class TrialLaw:
    """The law of the number of trials of a random search (Papernot and Steinke, arXiv 2110.03620).

    Attributes:
        name: for people.
        mean: expected number of trials.
        shape: infinity for Poisson, 1 for geometric, another positive number for truncated negative binomial.
    """

    name: str
    mean: float
    shape: float


def trial_law(text: str, mean: float) -> TrialLaw:
    """The law behind a name: "geometric", "poisson", or the shape of a truncated negative binomial law.

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
        raise StudyError(f"count = {text!r} is no law of the number of trials; geometric | poisson | a shape above 0")
    return TrialLaw(f"truncated negative binomial, shape {shape:g}", mean, shape)


def draw(law: TrialLaw, generator: random.Random | None = None) -> int:
    """The number of trials, from the operating system's secret randomness unless a generator is given.

    It is drawn once, before any trial, and is no public number: ε covers the choice, not the count. Zero, which only Poisson
    gives, is a search without an outcome.
    """
    source = generator or secrets.SystemRandom()
    if law.shape == math.inf:
        return _poisson(law.mean, source)
    if law.shape == 1.0:
        return _geometric(1 / law.mean, source)
    gamma = _gamma(law)
    while True:  # negative binomial as a Poisson number of a Gamma mean, until it is not zero
        count = _poisson(source.gammavariate(law.shape, (1 - gamma) / gamma), source)
        if count > 0:
            return count


def _geometric(gamma: float, source: random.Random) -> int:
    return 1 if gamma >= 1 else 1 + int(math.log(1 - source.random()) / math.log1p(-gamma))


def _poisson(mean: float, source: random.Random) -> int:
    """Arrivals of rate 1 before the mean."""
    count, time = 0, source.expovariate(1.0)
    while time < mean and count < _LARGEST:
        count, time = count + 1, time + source.expovariate(1.0)
    return count


def _gamma(law: TrialLaw) -> float:
    """The parameter of the truncated law that has the mean: shape · (1 − γ) / (γ · (1 − γ^shape)), which falls with γ."""
    low, high = 1e-12, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        mean = law.shape * (1 - middle) / (middle * (1 - middle**law.shape))
        low, high = (middle, high) if mean > law.mean else (low, middle)
    return high


def with_selection(
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
    neighbours = relations.ADD_OR_REMOVE_ONE if relation == "add_or_remove_one" else relations.REPLACE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=neighbours)
    run = dp_accounting.SelfComposedDpEvent(event, steps)
    with quiet_accountants():
        accountant.compose(dp_event.RepeatAndSelectDpEvent(run, law.mean, law.shape))
        if then is not None:
            accountant.compose(*then)
        return float(accountant.get_epsilon(delta))


def composed(runs: Sequence[tuple[dp_accounting.DpEvent, int]], delta: float, relation: str) -> float:
    """ε of runs one after the other, each chosen after those before it: what is safe to say of an adaptive search, by RDP."""
    if all(one == runs[0][0] for one, _ in runs):  # also where RDP knows the event, and not a composition of it
        return epsilon(runs[0][0], sum(count for _, count in runs), delta, "rdp", relation)
    event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(one, count) for one, count in runs])
    return epsilon(event, 1, delta, "rdp", relation)
