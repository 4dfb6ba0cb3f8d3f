"""Define `dpkfc tune`: tune methods in the same way, and say what the search costs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from dpkfc.app.commands.flags import SettingsOfSearch
from dpkfc.app.settings_file import read_choices
from dpkfc.report.text import round_up
from dpkfc.terminal import Whole, make_table, open_console, print_line, resumable


def tune(
    *,
    recipe: str = "",
    method: list[str],
    trials: Whole = 20,
    controls: Annotated[bool, Parameter(negative="--no-controls")] = True,
    search: str = "tpe",
    count: str = "geometric",
    optimizer: str = "",
    out: Path | None = None,
    data_dir: str = "",
    workers: Whole | None = None,
    budget: float | None = None,
    quiet: bool = False,
    settings: SettingsOfSearch = None,
) -> None:
    """Tune methods in the same way on a validation split of the training set.

    Args:
        recipe: Which recipe; left out with own data.
        method: A method of `dpkfc methods`; may be given several times.
        trials: Trials of every method; with --search random the mean of their number.
        controls: Matched controls: normalised clip, lr·C, A only, random spectrum.
        search: tpe, or random: then ε with tuning counted is known.
        count: Law of the number of random trials: geometric, poisson, or a shape.
        optimizer: For methods that take any; left out: as the recipe says.
        out: Folder of the study: goes on with an earlier one, or beside other processes.
        data_dir: Folder with the data sets; left out: $DPKFC_DATA, then Hugging Face datasets.
        workers: Cells at once, one core each; left out: every core.
        budget: Minutes; what would not end in time is not started, else stopped.
        quiet: No progress bar.
        settings: flags of settings of all trials that were given.
    """
    from dpkfc.app.owndata.sources import own_source
    from dpkfc.app.tuning import tune as tuning
    from dpkfc.app.tuning.pool import worker_count

    console = open_console()
    given = read_choices(None, settings or {})
    recipe = own_source({**given, "recipe": recipe})[0] or recipe
    folder = out or Path("runs") / f"tune-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    study = tuning.TuneSettings(
        recipe=recipe,
        methods=tuple(method),
        trials=trials,
        controls=controls,
        search=search,
        count=count,
        optimizer=optimizer,
        settings=given,
    )
    with resumable(f"go on with the same command and --out {folder}"):
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
        print_line(line)
    print_line(f"report: {folder / 'tune.md'}")


def _tuned_table(tuned: Any) -> Table:
    from dpkfc.app.tuning.tuned import percent, settings_text

    title = (
        f"{tuned.recipe}: each trial ε = {round_up(tuned.epsilon)}; accuracy on "
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
