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
from dpkfc.studies.tuning_cost import SCOPE, TrialLaw, with_selection

__all__ = ["ArmResult", "Tuned", "cost_of", "percent", "settings_text", "spread"]


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
        epsilon_with_tuning: of one arm of a random search that is over, its choice counted; None where there is no such figure.
        epsilon_composed: of all runs begun, one after the other, by RDP and their ledgers; None where it cannot be told.
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
    epsilon_with_tuning: float | None
    epsilon_composed: float | None
    runs_begun: int
    arms: Sequence[ArmResult]
    complete: bool
    failures: Mapping[str, str]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """`tune.json` and `tune.md` in a folder.

        Raises:
            RunFolderError: the disk cannot take them.
        """
        data, text = folder / "tune.json", folder / "tune.md"
        content = json.dumps({"version": 1, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        placed(data, lambda part: part.write_text(content, "utf-8"))
        placed(text, lambda part: part.write_text(self.markdown(), "utf-8"))
        return data, text

    def markdown(self) -> str:
        """The study for people."""
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
            count = f"{arm.trials} ({arm.pruned} pruned, {arm.failed} failed)"
            lines.append(f"| {name} | {percent(arm.accuracy)} | {count} | {settings_text(arm.params)} |")
        if not self.complete:
            lines += ["", "Not finished: some methods have had fewer trials than others. The same command goes on."]
        if self.failures:
            lines += ["", "Trials that could not be run:", ""]
            lines += [f"- {name}: {why}" for name, why in self.failures.items()]
        lines += ["", "Train with what won, on the whole training set:", ""]
        lines += [f"    {arm.command}" for arm in self.arms if arm.accuracy is not None]
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
    plan: Any, begun: Begun, law: TrialLaw | None, arms: int, over: bool = True
) -> tuple[str, float | None, float | None]:
    """What ε says about a tuning study: (in words, ε of one arm with its tuning or None, ε of all runs composed or None).

    Args:
        plan: of one trial; every trial has its event and number of steps.
        begun: runs that have begun, in this study or before it in its folder.
        law: of the number of trials of a random search, None for a search whose trials depend on one another.
        arms: that were compared.
        over: whether all trials have ended; a random search is accounted for as a whole.
    """
    spent = EpsilonCurve(plan.event, plan.delta, plan.neighbouring_relation, plan.accountant).at(plan.steps)
    given = f"(ε = {rounded_up(spent)}, δ = {plan.delta:g})"
    total = begun.epsilon(plan.delta, plan.neighbouring_relation)
    lines = [
        f"**Tuning is NOT in ε.** A run with the chosen settings is {given} as if they had been known beforehand; the search "
        "looked at private examples for every trial.",
    ]
    if total is not None:
        lines.append(f"All {begun.runs} runs begun compose to ε = {rounded_up(total)} by RDP, if all that they showed counts.")
    elif begun.runs:
        why = begun.unread[0] if begun.unread else "RDP does not compose their events"
        lines.append(f"What the {begun.runs} runs begun cost together cannot be told: {why}.")
    chosen = None
    if law is None:
        lines.append(
            "The trials of this search were chosen after those before them (TPE, pruning), so no tighter figure exists; a "
            "random search (--search random) has one."
        )
    elif not over:
        lines.append("ε of the choice is stated once all trials that were drawn for this search have run.")
    else:
        chosen = with_selection(plan.event, plan.steps, plan.delta, law, plan.neighbouring_relation)
        lines.append(
            f"For one method whose number of trials was drawn beforehand ({law.name}, mean {law.mean:g}) releasing the best "
            f"trial alone, its weights and settings, costs ε = {rounded_up(chosen)} (Papernot and Steinke, RDP), {SCOPE}."
        )
        if arms > 1:
            lines.append(f"{arms} methods were searched: what is concluded from all of them composes over them.")
    lines.append("Validation examples are private examples that no ε here protects: their accuracies are for the operator only.")
    return " ".join(lines), chosen, total if total is None or math.isfinite(total) else None  # JSON holds no infinity
