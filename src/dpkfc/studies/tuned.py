"""What came of tuning: a value, as JSON, as Markdown, and with what ε says and does not say about it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpkfc.privacy.events import EpsilonCurve
from dpkfc.report.numbers import rounded_up
from dpkfc.report.run_folder import placed
from dpkfc.studies.begun import Begun
from dpkfc.studies.cell import Plain
from dpkfc.studies.search import ADAPTIVE
from dpkfc.studies.tuning_cost import SCOPE, TrialLaw, with_selection

__all__ = ["ArmResult", "Cost", "Tuned", "cost_of", "percent", "settings_text", "spread"]


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm after its trials.

    Attributes:
        name: of the arm.
        label: in tables.
        control: whether it is a matched control.
        trials: that have ended.
        pruned: of them, ended early.
        failed: of them, could not be run.
        accuracy: of the best trial on the validation split; None without a full trial. NOT PRIVATE.
        params: its settings.
        command: that trains with them on the whole training set.
    """

    name: str
    label: str
    control: bool
    trials: int
    pruned: int
    failed: int
    accuracy: float | None
    params: Mapping[str, Plain]
    command: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What ε says about a tuning study.

    Attributes:
        statement: in words; of a random search without the number of its trials, which the figure asks to be secret.
        unpublished: what else there is to say, to the operator only; empty where the statement says it all.
        with_tuning: ε of one arm of a random search that is over, its choice counted; None where there is no such figure.
        with_training: ε of that and of one training with what it chose.
        composed: ε of all runs begun, one after the other, by RDP and their ledgers; None where it cannot be told.
    """

    statement: str
    unpublished: str = ""
    with_tuning: float | None = None
    with_training: float | None = None
    composed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuning study.

    Attributes:
        recipe: the task.
        search: "tpe" or "random".
        planned: trials of every arm; for a random search their mean.
        validation: size of the validation split.
        epsilon: of one trial.
        delta: of one trial.
        statement: what ε says about the tuning, in words.
        unpublished: what is for the operator only.
        epsilon_with_tuning: as of `Cost`.
        epsilon_with_training: as of `Cost`.
        epsilon_composed: as of `Cost`.
        runs_begun: killed ones included, as each has spent its budget.
        arms: best first.
        complete: whether every arm has had its trials.
        failures: trials that could not be run, and why.
    """

    recipe: str
    search: str
    planned: int
    validation: int
    epsilon: float
    delta: float
    statement: str
    unpublished: str
    epsilon_with_tuning: float | None
    epsilon_with_training: float | None
    epsilon_composed: float | None
    runs_begun: int
    arms: Sequence[ArmResult]
    complete: bool
    failures: Mapping[str, str]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `tune.json` and `tune.md` for their owner alone; they hold accuracies on private examples.

        Raises:
            RunFolderError: the disk cannot take them.
        """
        data, text = folder / "tune.json", folder / "tune.md"
        content = json.dumps({"version": 1, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        placed(data, lambda part: part.write_text(content, "utf-8"), private=True)
        placed(text, lambda part: part.write_text(self.markdown(), "utf-8"), private=True)
        return data, text

    def markdown(self) -> str:
        """The study for people; without the number of trials where that is secret, but for a line that says so."""
        secret = self.search != ADAPTIVE
        lines = [
            f"# Tuning of {self.recipe}",
            "",
            self.statement,
            "",
            "| method | validation % | trials | settings |",
            "|---|---|---|---|",
        ]
        for arm in self.arms:
            name = f"{arm.label} (control)" if arm.control else arm.label
            count = "secret" if secret else f"{arm.trials} ({arm.pruned} pruned, {arm.failed} failed)"
            lines.append(f"| {name} | {percent(arm.accuracy)} | {count} | {settings_text(arm.params)} |")
        if not self.complete:
            lines += ["", "Not finished: some trials are still to run, of some methods perhaps more. The same command goes on."]
        if self.failures:
            lines += ["", "Trials that could not be run" + (" (not to be published):" if secret else ":"), ""]
            lines += [f"- {name}: {why}" for name, why in self.failures.items()]
        lines += ["", "Train with what won, on the whole training set:", ""]
        lines += [f"    {arm.command}" for arm in self.arms if arm.accuracy is not None]
        if self.unpublished:
            lines += ["", self.unpublished]
        return "\n".join(lines) + "\n"


def percent(accuracy: float | None) -> str:
    """An accuracy in a table."""
    return "–" if accuracy is None else f"{100 * accuracy:.2f}"


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation of seeds in a table; a dash for none."""
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def settings_text(params: Mapping[str, Plain]) -> str:
    """Settings in a table."""
    return ", ".join(f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in params.items())


def cost_of(
    plan: Any, begun: Begun, law: TrialLaw | None = None, arms: int = 1, *, final: Any = None, over: bool = True
) -> Cost:
    """What ε says about a tuning study.

    Args:
        plan: of one trial; every trial has its event and number of steps.
        begun: runs that have begun, in this study or before it in its folder.
        law: of the number of trials of a random search, None for a search whose trials depend on one another.
        arms: that were compared.
        final: plan of a training with what the search chose; None as of a trial.
        over: whether all trials have ended; a random search is accounted for as a whole.
    """
    spent = EpsilonCurve(plan.event, plan.delta, plan.neighbouring_relation, plan.accountant).at(plan.steps)
    given = f"(ε = {rounded_up(spent)}, δ = {plan.delta:g})"
    lines = [
        f"**Tuning is NOT in ε.** A run with the chosen settings is {given} as if they had been known beforehand; the search "
        "looked at private examples for every trial.",
    ]
    total, together = _together(plan, begun)
    chosen = trained = None
    unpublished = ""
    if law is None:
        lines += [together] if together else []
        lines.append(
            "The trials of this search were chosen after those before them (TPE, pruning), so no tighter figure exists; a "
            "random search (--search random) has one."
        )
    else:
        unpublished = f"Not to be published, since the number of trials has to stay secret: {together}" if together else ""
        if over:
            chosen, trained, text = _of_the_choice(plan, final or plan, law)
            lines.append(text)
        else:
            lines.append("ε of the choice is stated once all trials that were drawn for this search have run.")
        if arms > 1:
            lines.append(f"{arms} methods were searched: what is concluded from all of them composes over them.")
    lines.append("Validation examples are private examples that no ε here protects: their accuracies are for the operator only.")
    return Cost(
        statement=" ".join(lines), unpublished=unpublished, with_tuning=chosen, with_training=trained, composed=total
    )


def _together(plan: Any, begun: Begun) -> tuple[float | None, str]:
    """ε of all runs begun where it is finite, and what there is to say of it; nothing without a run."""
    total = begun.epsilon(plan.delta, plan.neighbouring_relation)
    if total is not None:
        said = f"All {begun.runs} runs begun compose to ε = {rounded_up(total)} by RDP, if all that they showed counts."
        return total if math.isfinite(total) else None, said  # JSON holds no infinity
    if not begun.runs:
        return None, ""
    why = begun.unread[0] if begun.unread else "RDP does not compose their events"
    return None, f"What the {begun.runs} runs begun cost together cannot be told: {why}."


def _of_the_choice(plan: Any, final: Any, law: TrialLaw) -> tuple[float, float, str]:
    """ε of what a random search chose for one arm, ε of that and of a training with it, and both in words."""
    terms = (plan.event, plan.steps, plan.delta, law, plan.neighbouring_relation)
    chosen, trained = with_selection(*terms), with_selection(*terms, then=(final.event, final.steps))
    return chosen, trained, (
        f"For one method whose number of trials was drawn beforehand ({law.name}, mean {law.mean:g}) the settings of the best "
        f"trial cost ε = {rounded_up(chosen)}, and together with ONE further training with them ε = {rounded_up(trained)} "
        f"(Papernot and Steinke, RDP, δ = {plan.delta:g}), {SCOPE}. Both hold while the number of trials that were run stays "
        "secret."
    )  # fmt: skip
