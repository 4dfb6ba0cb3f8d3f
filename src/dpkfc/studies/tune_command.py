"""The command `dpkfc tune`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dpkfc.recipes.options import Budget, DataDir, Quiet, Workers
from dpkfc.report.numbers import rounded_up
from dpkfc.studies.errors import StudyError
from dpkfc.terminal import open_console, resumable

__all__ = ["tune"]


def tune(
    *,
    recipe: Annotated[str, typer.Option(help="Which recipe.")],
    method: Annotated[list[str], typer.Option(help="A method of `dpkfc methods`; may be given several times.")],
    trials: Annotated[int, typer.Option(help="Trials of every method; with --search random the mean of their number.")] = 20,
    epsilon: Annotated[float | None, typer.Option(help="ε of every trial; left out: the recipe's.")] = None,
    controls: Annotated[bool, typer.Option(help="Matched controls: normalised clip, lr·C, A only, random spectrum.")] = True,
    search: Annotated[str, typer.Option(help="tpe, or random: then ε with tuning counted is known.")] = "tpe",
    count: Annotated[str, typer.Option(help="Law of the number of random trials: geometric, poisson, or a shape.")] = "geometric",
    optimizer: Annotated[str, typer.Option(help="For methods that take any; left out: as the recipe says.")] = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE for all methods, as of `train`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; an earlier one is taken up again.")] = None,
    data_dir: DataDir = "",
    workers: Workers = None,
    budget: Budget = None,
    quiet: Quiet = False,
) -> None:
    """Tune methods alike on a validation split of the training set, and say what that costs.

    Every method has the same number of trials, matched controls included. Stopped studies go on with the same --out.
    """
    from dpkfc.recipes.config import chosen
    from dpkfc.studies.pool import worker_count
    from dpkfc.studies.tune import TuneSettings
    from dpkfc.studies.tune import tune as run_tuning

    console = open_console()
    folder = out or Path("runs") / f"tune-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    settings = chosen(None, _settings(setting or []) | ({} if epsilon is None else {"epsilon": epsilon}))
    study = TuneSettings(
        recipe=recipe, methods=tuple(method), trials=trials, controls=controls, search=search, count=count,
        optimizer=optimizer, settings=settings,
    )  # fmt: skip
    with resumable(console, f"go on with the same command and --out {folder}"):
        tuned = run_tuning(
            study, folder, data_dir=data_dir, workers=worker_count(workers), budget_minutes=budget,
            console=None if quiet else console,
        )  # fmt: skip
    console.print(_tuned_table(tuned))
    for name, why in tuned.failures.items():
        console.print(f"{name}: {why}", soft_wrap=True, highlight=False)
    if not tuned.complete:
        console.print(f"not finished: go on with the same command and --out {folder}", soft_wrap=True, highlight=False)
    for said in filter(None, (tuned.statement.replace("**", ""), tuned.unpublished)):
        console.print(said, soft_wrap=True, highlight=False)
    console.print(f"report: {folder / 'tune.md'}", soft_wrap=True)


def _settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE texts as settings.

    Raises:
        StudyError: a text without "=".
        ConfigError: an unknown key.
    """
    from dpkfc.recipes.config import flatten

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise StudyError(f"--set {pair!r}: write KEY=VALUE, for example --set epochs=3")
        found[name.strip().replace("-", "_")] = _value(text.strip())
    return flatten(found, "--set")


def _value(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _tuned_table(tuned: Any) -> Table:
    from dpkfc.studies.tuned import percent, settings_text

    title = f"{tuned.recipe}: each trial ε = {rounded_up(tuned.epsilon)}; accuracy on {tuned.validation:,} validation examples"
    table = Table(title=title, header_style="bold", title_justify="left")
    table.add_column("method")
    for name in ("validation %", "trials", "pruned"):
        table.add_column(name, justify="right")
    table.add_column("settings")
    for arm in tuned.arms:
        name = f"{arm.label} (control)" if arm.control else arm.label
        table.add_row(name, percent(arm.accuracy), str(arm.trials), str(arm.pruned), settings_text(arm.params))
    return table
