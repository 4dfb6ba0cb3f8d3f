"""What tuning costs: ε of a random search with its choice counted, or of all runs together."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dp_accounting
import numpy as np
from dp_accounting import dp_event, rdp
from scipy.optimize import brentq

from dpkfc._errors import one_line
from dpkfc.app.tuning.runs import StudyError
from dpkfc.config import Plan
from dpkfc.privacy import ledger_lines
from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.dp_accountants import quiet_accountants
from dpkfc.privacy.events import compose, event_from_dict
from dpkfc.privacy.ledger_lines import LedgerError, Verified
from dpkfc.report.text import round_up

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
            f"count = {text!r} is not a law of the number of trials; geometric | poisson | a shape"
            " above 0"
        )
    return TrialLaw(f"truncated negative binomial, shape {shape:g}", mean, shape)


def draw(law: TrialLaw, generator: np.random.Generator | None = None) -> int:
    """Draw the number of trials from the secret randomness of the system, or a generator.

    It is drawn once, before any trial, and is not a public number: ε covers the choice, not the
    count. Zero, which only Poisson gives, is a search without an outcome.
    """
    source = generator or np.random.default_rng(secrets.randbits(128))
    if law.shape == math.inf:
        return int(source.poisson(law.mean))
    if law.mean == 1:
        # All but Poisson give at least one.
        return 1
    gamma = _find_gamma(law)
    count = 0
    while count == 0:
        count = int(source.negative_binomial(law.shape, gamma))
    return count


def _find_gamma(law: TrialLaw) -> float:
    """Return the parameter of the truncated law that has the mean."""

    def excess(gamma: float) -> float:
        return law.shape * (1 - gamma) / (gamma * (1 - gamma**law.shape)) - law.mean

    return float(brentq(excess, 1e-12, 1 - 1e-12, xtol=1e-15))


def bound_selection(
    event: dp_accounting.DpEvent,
    count: int,
    delta: float,
    law: TrialLaw,
    relation: str,
    *,
    then: tuple[dp_accounting.DpEvent, int] | None = None,
) -> float:
    """Return ε of a random number of trials of one event whose best is released, by RDP.

    Args:
        event: of one release, or of all kinds of releases of a trial.
        count: how often a trial has it.
        delta: δ.
        law: of the number of trials.
        relation: "add_or_remove_one" or "replace_one".
        then: event and count of one more run, with what the best trial shows.
    """
    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    accountant = rdp.RdpAccountant(neighboring_relation=neighbours)
    run = dp_accounting.SelfComposedDpEvent(event, count)
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
    if last and ledger_lines.is_complete(last):
        whole = content + b"\n"
    if not whole and ledger_lines.begins_a_ledger(content):
        return None
    return ledger_lines.parse(whole or content, f"{path.parent.name}/{path.name}")


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
        if not purpose and len(set(released)) == 1:
            # So many consecutive steps cost a unit one event.
            steps = max(len(released), most or 0)
            counts[released[-1]] -= steps - math.ceil(steps / verified.groups)
    return counts


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What ε says about a tuning study.

    Attributes:
        statement: in words; of a random search without the number of its trials, which the figure
            asks to be secret.
        unpublished: what else there is to say, to the operator only; empty where the statement says
            it all.
        epsilon_with_tuning: ε of one arm of a random search that is over, its choice counted; None
            where the figure is missing.
        epsilon_with_training: ε of that and of one training with what it chose.
        epsilon_composed: ε of all runs started, one after the other, by RDP and their ledgers; None
            where it cannot be told.
    """

    statement: str
    unpublished: str
    epsilon_with_tuning: float | None
    epsilon_with_training: float | None
    epsilon_composed: float | None


def cost_of(
    plans: Sequence[Plan],
    ledgers: StudyLedgers,
    law: TrialLaw | None = None,
    *,
    finals: Sequence[Plan | None] = (),
    over: bool = True,
) -> Cost:
    """Return what ε says about a tuning study.

    Args:
        plans: of a trial of each method that was searched; all have one δ and relation. Every trial
            of a method has the releases of its plan.
        ledgers: of runs that have started, in this study or before it in its folder.
        law: of the number of trials of a random search, None for a search whose trials depend on
            one another.
        finals: plans of a training with what each search chose, None where it cannot be planned;
            empty as of a trial.
        over: whether all trials have ended; a random search is accounted for as a whole.
    """
    plan = plans[0]
    spent = max(one.epsilon() for one in plans)
    given = f"(ε = {round_up(spent)}, δ = {plan.delta:g})"
    lines = [
        f"**Tuning is NOT in ε.** A run with the chosen settings is {given} as if they had been"
        " known beforehand; the search looked at private examples for every trial.",
    ]
    total, together = _compose_runs(plan, ledgers)
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
            chosen, trained, text = _describe_choice_cost(
                plans, finals if any(finals) else plans, law
            )
            lines.append(text)
        else:
            lines.append(
                "ε of the choice is stated once all trials that were drawn for this search have"
                " run."
            )
        if len(plans) > 1:
            lines.append(
                f"{len(plans)} methods were searched: what is concluded from all of them composes"
                " over them."
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


def _compose_runs(plan: Plan, ledgers: StudyLedgers) -> tuple[float | None, str]:
    """Return ε of all runs started where it is finite, with a remark; nothing without a run."""
    total = ledgers.epsilon(plan.delta, plan.neighbouring_relation)
    if total is not None:
        remark = (
            f"All {ledgers.runs} runs started compose to ε = {round_up(total)} by RDP, if all"
            " that they showed counts."
        )
        # JSON holds no infinity.
        return total if math.isfinite(total) else None, remark
    if not ledgers.runs:
        return None, ""
    why = ledgers.unread[0] if ledgers.unread else "RDP does not compose their events"
    return None, f"What the {ledgers.runs} runs started cost together cannot be told: {why}."


def _describe_choice_cost(
    plans: Sequence[Plan], finals: Sequence[Plan | None], law: TrialLaw
) -> tuple[float, float, str]:
    """Return ε of what a random search chose for one method, whichever it is.

    With it come ε of the choice and a training, and both in words.
    """
    plan = plans[0]
    charges = [
        (_charge_of(trial), None if final is None else _charge_of(final))
        for trial, final in zip(plans, finals, strict=True)
    ]
    # A composed event has no hash.
    pairs = {repr(pair): pair for pair in charges}.values()
    relation = plan.neighbouring_relation
    chosen = trained = 0.0
    for trial, training in pairs:
        chosen = max(chosen, bound_selection(*trial, plan.delta, law, relation))
        if training is not None:
            both = bound_selection(*trial, plan.delta, law, relation, then=training)
            trained = max(trained, both)
    text = (
        f"For one method whose number of trials was drawn beforehand ({law.name}, mean"
        f" {law.mean:g}) the settings of the best trial cost ε = {round_up(chosen)}, and"
        f" together with ONE further training with them ε = {round_up(trained)} (Papernot and"
        f" Steinke, RDP, δ = {plan.delta:g}), {SCOPE}. Both hold while the number of trials"
        " that were run stays secret."
    )
    return chosen, trained, text


def _charge_of(plan: Plan) -> tuple[dp_accounting.DpEvent, int]:
    """Return one event and its number that cost what all releases of a plan cost."""
    return compose([(plan.event, plan.count_events(plan.steps)), *plan.extra_charges()])
