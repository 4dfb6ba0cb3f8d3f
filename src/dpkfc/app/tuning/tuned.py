"""What a tuning study came to, as a file and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpkfc.app.run_folder import write_text
from dpkfc.app.tuning.cost import Cost
from dpkfc.app.tuning.runs import Plain
from dpkfc.app.tuning.search import ADAPTIVE
from dpkfc.report.text import ensure_mapping, plain

# Of `tune.json`.
VERSION = 1


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

    @property
    def title(self) -> str:
        """The label, with a mark of a control."""
        return f"{self.label} (control)" if self.control else self.label


@dataclass(frozen=True, kw_only=True)
class Tuned(Cost):
    """A tuning study, and what ε says about it.

    Attributes:
        recipe: the task.
        search: "tpe" or "random".
        planned: trials of every arm; for a random search their mean.
        validation: size of the validation split.
        epsilon: of one trial.
        delta: of one trial.
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
    runs_begun: int
    arms: Sequence[ArmResult]
    complete: bool
    failures: Mapping[str, str]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `tune.json` and `tune.md` for their owner alone.

        They hold accuracies on private examples.

        Raises:
            RunFolderError: the disk cannot take them.
        """
        content = {"version": VERSION, **asdict(self)}
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        data = write_text(folder / "tune.json", text + "\n", private=True)
        page = write_text(folder / "tune.md", self.markdown(), private=True)
        return data, page

    @classmethod
    def read(cls, content: Any) -> Tuned:
        """Return the study of the parsed content of a `tune.json`.

        Raises:
            ValueError: another kind of file, another version, or a damaged file.
        """
        content = dict(ensure_mapping(content))
        if not isinstance(content.get("arms"), list):
            raise ValueError(
                "is neither a run folder nor the tune.json of a tuning study; leave it out"
            )
        version = content.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"is of version {plain(version, 20)}, this dpkfc reads {VERSION}; use the version"
                " that wrote it"
            )
        try:
            study = cls(**{**content, "arms": [ArmResult(**arm) for arm in content["arms"]]})
            study.markdown()
        except (TypeError, ValueError, AttributeError):
            raise ValueError("is damaged; the same dpkfc tune writes it again") from None
        return study

    def markdown(self, *, for_owner: bool = True) -> str:
        """Return the study for people.

        Where the number of trials is secret, one line says so.

        Args:
            for_owner: with what has to stay secret, as far as it is marked.
        """
        is_secret = self.search != ADAPTIVE
        lines = [
            f"# Tuning of {self.recipe}",
            "",
            self.statement,
            "",
            "| method | validation % | trials | settings |",
            "|---|---|---|---|",
        ]
        for arm in self.arms:
            count = f"{arm.trials} ({arm.pruned} pruned, {arm.failed} failed)"
            if is_secret:
                count = "secret"
            cells = [arm.title, percent(arm.accuracy), count, settings_text(arm.params)]
            lines.append(f"| {' | '.join(cells)} |")
        if not self.complete:
            lines += [
                "",
                "Not finished: some trials are still to run, of some methods perhaps more. The"
                " same command goes on.",
            ]
        shows_secrets = for_owner or not is_secret
        if self.failures and shows_secrets:
            publication = " (not to be published)" if is_secret else ""
            lines += ["", f"Trials that could not be run{publication}:", ""]
            lines += [f"- {name}: {why}" for name, why in self.failures.items()]
        lines += ["", "Train with what won, on the whole training set:", ""]
        lines += [f"    {arm.command}" for arm in self.arms if arm.accuracy is not None]
        if self.unpublished and shows_secrets:
            lines += ["", self.unpublished]
        return "\n".join(lines) + "\n"


def percent(accuracy: float | None) -> str:
    """Return an accuracy as it stands in a table."""
    return "–" if accuracy is None else f"{100 * accuracy:.2f}"


def settings_text(params: Mapping[str, Plain]) -> str:
    """Return settings as they stand in a table."""
    return ", ".join(f"{name} = {plain_text(value)}" for name, value in params.items())


def plain_text(value: Plain) -> str:
    """Return a setting as a text, a number without zeros at its end."""
    return f"{value:g}" if isinstance(value, float) else str(value)
