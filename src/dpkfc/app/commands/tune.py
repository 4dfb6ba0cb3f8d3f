"""Define `dpkfc tune`: tune methods in the same way, and say what the search costs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from dpkfc.app.commands.flags import parse_number
from dpkfc.app.owndata.recipes import own_kind
from dpkfc.app.settings_file import flatten, read_choices
from dpkfc.app.tuning import tune as tuning
from dpkfc.app.tuning.pool import worker_count
from dpkfc.app.tuning.runs import StudyError
from dpkfc.app.tuning.tune import TuneSettings, percent, settings_text
from dpkfc.report.text import rounded_up
from dpkfc.terminal import Whole, make_table, open_console, resumable


def tune(
    *,
    recipe: str = "",
    data: str = "",
    target: str = "",
    schema: str = "",
    text: str = "",
    label_file: str = "",
    task: str = "",
    method: list[str],
    trials: Whole = 20,
    epsilon: float | None = None,
    controls: Annotated[bool, Parameter(negative="--no-controls")] = True,
    search: str = "tpe",
    count: str = "geometric",
    optimizer: str = "",
    setting: Annotated[list[str] | None, Parameter(name="--set")] = None,
    out: Path | None = None,
    data_dir: str = "",
    workers: Whole | None = None,
    budget: float | None = None,
    quiet: bool = False,
) -> None:
    """Tune methods in the same way on a validation split of the training set.

    Args:
        recipe: Which recipe; left out with own data.
        data: Own data, as of `train`.
        target: Column of own data that is learned.
        schema: TOML file with what is public of own data.
        text: Key of the text in a JSONL file.
        label_file: Table of image files and labels.
        task: module:function that returns a task.
        method: A method of `dpkfc methods`; may be given several times.
        trials: Trials of every method; with --search random the mean of their number.
        epsilon: ε of every trial; left out: the recipe's.
        controls: Matched controls: normalised clip, lr·C, A only, random spectrum.
        search: tpe, or random: then ε with tuning counted is known.
        count: Law of the number of random trials: geometric, poisson, or a shape.
        optimizer: For methods that take any; left out: as the recipe says.
        setting: KEY=VALUE for all methods, as of `train`.
        out: Folder of the study; an earlier one is taken up again.
        data_dir: Folder with the data sets; left out: $DPKFC_DATA, then Hugging Face datasets.
        workers: Cells at once, one core each; left out: every core.
        budget: Minutes; what would not end in time is not started, else stopped.
        quiet: No progress bar.
    """
    console = open_console()
    own = {
        "data": data,
        "target": target,
        "schema": schema,
        "text": text,
        "label_file": label_file,
        "task": task,
    }
    settings: dict[str, Any] = {name: value for name, value in own.items() if value}
    recipe = own_kind({**settings, "recipe": recipe}) or recipe
    folder = out or Path("runs") / f"tune-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    settings |= _parse_settings(setting or [])
    if epsilon is not None:
        settings["epsilon"] = epsilon
    study = TuneSettings(
        recipe=recipe,
        methods=tuple(method),
        trials=trials,
        controls=controls,
        search=search,
        count=count,
        optimizer=optimizer,
        settings=read_choices(None, settings),
    )
    with resumable(console, f"go on with the same command and --out {folder}"):
        tuned = tuning.tune(
            study,
            folder,
            data_dir=data_dir,
            workers=worker_count(workers),
            budget_minutes=budget,
            console=None if quiet else console,
        )
    console.print(_tuned_table(tuned))
    lines = [f"{name}: {why}" for name, why in tuned.failures.items()]
    if not tuned.complete:
        lines.append(f"not finished: go on with the same command and --out {folder}")
    lines += [tuned.statement.replace("**", ""), tuned.unpublished]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"report: {folder / 'tune.md'}", soft_wrap=True)


def _parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Return KEY=VALUE texts as settings.

    Raises:
        StudyError: a text without "=".
        ConfigError: an unknown key.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise StudyError(f"--set {pair!r}: write KEY=VALUE, for example --set epochs=3")
        settings[name.strip().replace("-", "_")] = _parse_value(text.strip())
    return flatten(settings, "--set")


def _parse_value(text: str) -> Any:
    known = {"true": True, "false": False}
    return known.get(text.lower(), parse_number(text, (int, float)))


def _tuned_table(tuned: Any) -> Table:
    title = (
        f"{tuned.recipe}: each trial ε = {rounded_up(tuned.epsilon)}; accuracy on "
        f"{tuned.validation:,} validation examples"
    )
    numbers = ("validation %", "trials", "pruned")
    table = make_table("method", *numbers, "settings", right=numbers, title=title)
    for arm in tuned.arms:
        table.add_row(
            arm.title,
            percent(arm.accuracy),
            str(arm.trials),
            str(arm.pruned),
            settings_text(arm.params),
        )
    return table
