"""Commands of the application: those of runs, of reports and searches, and of own data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from click import Context
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from dpkfc.report import plain, rounded_up
from dpkfc.terminal import (
    INTERRUPTED,
    argument_text,
    make_table,
    open_console,
    print_error,
    resumable,
)
from dpkfc.torchrun import is_first, is_launched

if TYPE_CHECKING:
    # A command imports what it needs when it runs, so that help and small commands start at once.
    from dpkfc.app.recipes import Recipe
    from dpkfc.app.results import Result
    from dpkfc.app.settings import Method, RunConfig
    from dpkfc.report.verify import Card


# --------------------------------------------------------------------------------------------------
# The command `dpkfc demo-federated`.


def demo_federated(
    *,
    out: str = "",
    epsilon: float = 3.0,
    rounds: int = 40,
    engine: str = "both",
    quiet: bool = False,
) -> None:
    """Train DP-FedGD, DP-FedSOFIM and federated DP-KFC over ten clients.

    It runs in this process and on Flower's simulation. No telemetry leaves the machine: Flower's
    and Ray's are off unless the environment switches them on.

    Args:
        out: Folder of the demo; a new one below runs/ when left out.
        epsilon: ε of every method.
        rounds: Rounds of every method.
        engine: here (one process), flower (its simulation), or both.
        quiet: No progress bar.
    """
    from dpkfc.app.demos import ENGINES, federated_demo

    console = open_console()
    result = federated_demo(
        out,
        None if quiet else console,
        epsilon=epsilon,
        rounds=rounds,
        engines=ENGINES if engine == "both" else (engine,),
    )
    console.print(result.table)
    console.print("One run each, with its own noise: differences of a point or two are that noise.")
    console.print(f"pictures, ledgers and privacy cards: {result.folder}", soft_wrap=True)


# --------------------------------------------------------------------------------------------------
# The tables of `dpkfc methods`.


# Columns, and the attributes of `Method` that they hold.
_COLUMNS = {
    "acts on": "acts",
    "side data": "side_data",
    "extra privacy cost": "privacy",
    "state": "state",
    "cost of a step": "cost",
    "source": "source",
}


def methods_table() -> Table:
    """Return every method, one for each line of 80 columns: what it needs and what it costs."""
    from dpkfc.app.settings import METHODS

    table = Table(header_style="bold", show_edge=False)
    for column in ("method", "needs", "cost of a step (DP-SGD: 1)"):
        table.add_column(column, overflow="fold")
    for method in METHODS.values():
        # What follows the first clause is on the sheet of the method.
        cells = [re.split("[:;(]", text)[0] for text in (method.side_data, method.cost)]
        table.add_row(f"[bold]{method.name}[/bold]", *cells)
    return table


def method_sheet(method: Method) -> Table:
    """Return all that is known of one method."""
    table = Table(show_header=False)
    settings = [f"{name} = {value!r}" for name, value in method.settings.items()]
    rows = {
        "method": f"{method.name} ({method.label})",
        "equation": method.equation,
        **{column: getattr(method, name) for column, name in _COLUMNS.items()},
        "settings": ", ".join(settings) or "the defaults",
        "page": f"docs/methods/{method.page}",
    }
    for column, text in rows.items():
        table.add_row(column, Text(text))
    return table


# --------------------------------------------------------------------------------------------------
# The command `dpkfc report`.


def report(
    runs: list[Path],
    *,
    out: Path = Path("report.html"),
    title: str = "Report of private training runs",
) -> None:
    """Write one HTML page of run folders and results files (RUNS).

    It shows accuracy against ε, curves, curvature, privacy cards and commands, and fetches nothing.
    Files that cannot be read are named, on the page too.

    Args:
        runs: Run folders, folders of them, results files (*.json) of studies.
        out: The page; an earlier report is replaced.
        title: Heading of the page.
    """
    from dpkfc.app.html import count_text
    from dpkfc.app.html.render import write_page
    from dpkfc.app.tuning.runs import departures

    contents = write_page(runs, out, title=title, departures=departures)
    for path, why in contents.broken:
        _print_line(Console(stderr=True), f"dpkfc: not shown: {plain(path)}: {why}")
    shown = [count_text(len(contents.runs), "run"), count_text(len(contents.tables), "table")]
    if contents.charts:
        shown.append(count_text(len(contents.charts), "figure"))
    _print_line(Console(), f"report: {out} ({', '.join(shown)})")


def _print_line(console: Console, text: str) -> None:
    """Print a line as it is, without markup, colours or breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------
# The command `dpkfc card`: show the first page of a card, fill in its fields, write it anew.


def card(
    run: Path,
    *,
    owner: str | None = None,
    purpose: str | None = None,
    data_subjects: str | None = None,
    contact: str | None = None,
    region: str | None = None,
) -> None:
    """Show page one of a privacy card, after ledger, card and weights were compared.

    A flag fills in a field, and the files of the card are written anew.

    Example: dpkfc card runs/first --owner "Ward 3" --purpose "Predict readmission"

    Args:
        run: A folder with ledger and card, of any host.
        owner: Who answers for the model.
        purpose: What the model is for.
        data_subjects: Whose data it has seen.
        contact: Whom to ask.
        region: Whose law applies; for the registry.
    """
    given = {
        "owner": owner,
        "purpose": purpose,
        "data_subjects": data_subjects,
        "contact": contact,
        "region": region,
    }
    text = fill_card(run, {name: value for name, value in given.items() if value is not None})
    _print_line(open_console(), text.partition("\n# Annex\n")[0])


def fill_card(run: Path, given: Mapping[str, str]) -> str:
    """Return the text of a card, with fields filled in; files that change are written anew.

    Args:
        run: folder with ledger and card.
        given: fields of `Declared`.

    Raises:
        CardError: there is no card, or it disagrees with ledger or weights.
        ValueError: a value that a card cannot show.
    """
    from dpkfc.report.card import CARD, LEDGER, to_markdown, write_card_files
    from dpkfc.report.verify import CardError, read_card, verify_ledger

    card = read_card(run / LEDGER)
    if not run.exists():
        raise CardError(f"{run} does not exist; give the folder of a run")
    if card is None:
        raise CardError(f"{run} holds no {CARD}; call write_card(folder), or end the run first")
    verify_ledger(run / LEDGER, pages=False)
    try:
        content = _fill_content(card, given)
        text = to_markdown(content)
        stored = json.loads(json.dumps(content))
        page = (run / CARD).with_suffix(".md")
        is_current = page.is_file() and page.read_text("utf-8") == text
        if stored != card.content or not is_current:
            write_card_files(run, content)
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CardError(f"{run / CARD} is damaged ({reason:.60}); restore it") from None
    return text


def _fill_content(card: Card, given: Mapping[str, str]) -> dict[str, Any]:
    """Return a card with fields filled in, and the sections of this version."""
    from dpkfc.report.card import LAYOUT
    from dpkfc.report.officer import Declared
    from dpkfc.report.verify import explain_ledger

    content: dict[str, Any] = dict(card.content)
    known = content.get("declared") or {}
    declared = Declared(**{**known, **given})
    if content.get("layout") != LAYOUT:
        content = explain_ledger(card) | content
    return content | {"layout": LAYOUT, "declared": vars(declared)}


# --------------------------------------------------------------------------------------------------
# The command `dpkfc tune`.


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
    trials: int = 20,
    epsilon: float | None = None,
    controls: bool = True,
    search: str = "tpe",
    count: str = "geometric",
    optimizer: str = "",
    setting: Annotated[list[str] | None, typer.Option("--set")] = None,
    out: Path | None = None,
    data_dir: str = "",
    workers: int | None = None,
    budget: float | None = None,
    quiet: bool = False,
) -> None:
    """Tune methods in the same way on a validation split of the training set.

    The command also reports what the search costs in privacy.

    Every method has the same number of trials, matched controls included. A stopped study continues
    with the same --out.

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
    from dpkfc.app.owndata.recipes import own_kind
    from dpkfc.app.settings import read_choices
    from dpkfc.app.tuning.runs import worker_count
    from dpkfc.app.tuning.tune import TuneSettings
    from dpkfc.app.tuning.tune import tune as run_tuning

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
        tuned = run_tuning(
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
    from dpkfc.app.settings import flatten
    from dpkfc.app.tuning.runs import StudyError

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise StudyError(f"--set {pair!r}: write KEY=VALUE, for example --set epochs=3")
        settings[name.strip().replace("-", "_")] = _parse_value(text.strip())
    return flatten(settings, "--set")


def _parse_value(text: str) -> Any:
    known = {"true": True, "false": False}
    return known.get(text.lower(), _parse_number(text, (int, float)))


def _parse_number(text: str, kinds: Iterable[Callable[[str], Any]]) -> Any:
    """Return the number of the first kind that fits a text, or the text."""
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _tuned_table(tuned: Any) -> Table:
    from dpkfc.app.tuning.tune import percent, settings_text

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


# --------------------------------------------------------------------------------------------------

_METAVARS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int, float), "float": (float,)}
# What `--help` shows of the settings, by group; `--help-all` shows all of them by section.
_SHORT_HELP = {
    "Data": {
        "data": "CSV, Parquet, Feather, JSONL or image folder.",
        "target": "Column of the labels.",
        "schema": "Public schema; see `dpkfc schema`.",
        "text": "Column of the text.",
        "task": "Your own, as module:function.",
        "recipe": "A built-in task; see `dpkfc recipes`.",
        "data_dir": "Folder of its files; else $DPKFC_DATA.",
    },
    "Privacy": {
        "epsilon": "Target ε of the whole run.",
        "delta": "Target δ of the whole run.",
        "epochs": "Passes over the data.",
        "steps": "Steps, instead of epochs.",
        "expected_batch_size": "Mean size of a batch.",
        "max_grad_norm": "Bound C of a gradient.",
    },
    "Method": {
        "method": "See `dpkfc methods`.",
        "lr": "Learning rate.",
    },
    "Run": {
        "out": "Run folder; else a new one in runs/.",
        "seed": "Public seed of weights and probes.",
    },
}
_GROUP_OF = {name: group for group, texts in _SHORT_HELP.items() for name in texts}
_PLACES = {name: place for place, name in enumerate(_GROUP_OF)}


def _show_all_help(context: typer.Context, is_asked: bool) -> None:
    """Print the help with every setting, and end."""
    if not is_asked:
        return
    for option in context.command.params:
        if isinstance(option, TyperOption):
            option.hidden = False
    typer.echo(context.get_help())
    raise typer.Exit


_HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_all_help, help="Show every setting, and exit."
    ),
]


def _set_parameters(command: Any, parameters: list[inspect.Parameter]) -> None:
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _add_settings(command: Callable[..., None], leave_out: tuple[str, ...]) -> Callable[..., None]:
    """Return a command with one flag per field of `RunConfig`.

    The command receives `settings` with those that were given.
    """
    from dpkfc.app.settings import RunConfig

    fields = [f for f in dataclasses.fields(RunConfig) if f.name not in leave_out]
    # The settings of the short help come first, in its order.
    fields.sort(key=lambda setting: _PLACES.get(setting.name, len(_PLACES)))

    def run_command(*, help_all: bool, **arguments: Any) -> None:
        settings = {}
        for setting in fields:
            value = arguments.pop(setting.name)
            if value is not None:
                # `RunConfig` names a text that is not a number.
                kinds = _NUMBERS.get(str(setting.type), ())
                settings[setting.name] = _parse_number(value, kinds)
        command(**arguments, settings=settings)

    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "settings"]
    parameters += map(_flag, fields)
    parameters.append(
        inspect.Parameter(
            "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HelpAll
        )
    )
    _set_parameters(run_command, parameters)
    run_command.__doc__, run_command.__name__ = command.__doc__, command.__name__
    return run_command


def _flag(setting: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return the parameter of a command that stands for a setting."""
    kind, flag = str(setting.type), "--" + setting.name.replace("_", "-")
    group = _GROUP_OF.get(setting.name)
    text = setting.metadata["help"]
    choices = [choice for choice in setting.metadata["choices"] if choice]
    if group is not None:
        text = _SHORT_HELP[group][setting.name]
    elif choices:
        text += f" ({' | '.join(choices)})"
    names = [f"{flag}/--no-{flag[2:]}" if kind == "bool" else flag]
    if setting.name == "expected_batch_size":
        # `calibrate` and `epsilon` take both names too.
        names = ["--batch-size", flag]
    option = typer.Option(
        *names,
        help=text,
        rich_help_panel=group or setting.metadata["section"],
        hidden=group is None,
        show_default=False,
        metavar=_METAVARS.get(kind),
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[bool | None if kind == "bool" else str | None, option],
    )


def train(
    *,
    settings: dict[str, Any],
    config: Path | None = None,
    resume: Path | None = None,
    any_world_size: Annotated[bool, typer.Option("--any-world-size", hidden=True)] = False,
    dry_run: bool = False,
    quiet: bool = False,
) -> None:
    """Train a recipe under a privacy budget and leave a run folder.

    Every setting is a flag or a key of a TOML file; others come from the recipe.

    Args:
        settings: those that were given as flags.
        config: TOML file of settings; flags win.
        resume: Run folder to continue; --data if moved.
        any_world_size: Resume on another number of processes.
        dry_run: Show plan, time, memory; spend nothing.
        quiet: No progress bar.
    """
    from dpkfc.app.owndata.display import schema_table
    from dpkfc.app.place import MOVABLE
    from dpkfc.app.recipes.catalogue import recipe_of, run_config
    from dpkfc.app.settings import ConfigError, read_choices

    if resume is not None and (settings.keys() - set(MOVABLE) or config is not None or dry_run):
        raise ConfigError(
            "--resume continues a run with its own settings; leave out every other setting but a"
            " new place of the same data (--data, --label-file)"
        )
    from dpkfc.app.train import resume as continue_run
    from dpkfc.app.train import run

    console = None if quiet else open_console()
    if resume is not None:
        result = continue_run(resume, console, any_world_size=any_world_size, moved=settings)
    else:
        choices = read_choices(config, settings)
        run_settings = run_config(choices)
        if console is not None and is_first():
            recipe = recipe_of(run_settings)
            if recipe.columns:
                console.print(schema_table(recipe.columns))
            _print_line(console, _describe_method(recipe, choices, run_settings))
        if dry_run:
            from dpkfc.app.preview import preview

            preview(run_settings, open_console())
            return
        result = run(run_settings, console, any_world_size=any_world_size)
    _announce(result)


def _describe_method(recipe: Recipe, choices: dict[str, Any], settings: RunConfig) -> str:
    """Return which method a run takes and why, in one line."""
    reason = recipe.reason or f"the default of the recipe {settings.recipe}"
    if "method" in choices:
        reason = "as chosen"
    return f"method: {settings.method} ({reason})"


def _announce(result: Result) -> None:
    """Print the result of a run, and how to continue it."""
    from dpkfc.app.owndata.display import print_shares

    if result.interrupted:
        again = "the same command" if is_launched() else f"dpkfc train --resume {result.folder}"
        print_error(f"stopped after step {result.steps}; continue with: {again}")
        raise typer.Exit(INTERRUPTED)
    if not is_first():
        return
    console = open_console()
    console.print(_results_table({result.curve.label: result}))
    if result.stamp:
        console.print(f"[bold red]{result.stamp}[/bold red]")
    console.print(f"run folder: {result.folder}", soft_wrap=True)
    if result.errors:
        errors = ", ".join(f"{name} {value:.5g}" for name, value in result.errors.items())
        _print_line(console, f"{errors} ({result.measured_on}; ε does not cover these figures)")
    print_shares(console, result.figures)
    if result.head:
        console.print(
            f"ledger: {result.releases} releases, head {result.head} (send both to the person who"
            " will check the run)",
            soft_wrap=True,
        )


def _results_table(results: dict[str, Result]) -> Table:
    numbers = (next(iter(results.values())).score, "ε spent", "steps", "seconds")
    table = make_table("method", *numbers, right=numbers)
    for label, result in results.items():
        table.add_row(
            label,
            f"{100 * result.accuracy:.1f} % ({result.measured_on})",
            rounded_up(result.epsilon),
            f"{result.steps:,}",
            f"{result.seconds:.1f}",
        )
    return table


def demo(
    *,
    settings: dict[str, Any],
    out: str = "",
    quiet: bool = False,
) -> None:
    """Train DP-SGD and DP-KFC side by side on real digits under the same budget.

    Args:
        settings: those that were given as flags.
        out: Folder of the demo; a new one below runs/ when left out.
        quiet: No progress bar.
    """
    from dpkfc.app.demos import demo as run_demo
    from dpkfc.app.settings import METHOD_LABELS, read_choices

    console = open_console()
    result = run_demo(read_choices(None, settings), out, None if quiet else console)
    for run in result.results.values():
        if run.interrupted:
            _announce(run)
    console.print(
        _results_table({METHOD_LABELS[method]: run for method, run in result.results.items()})
    )
    console.print(f"pictures and privacy cards: {result.folder}", soft_wrap=True)


def every_setting(
    *,
    settings: dict[str, Any],
    config: Path | None = None,
) -> None:
    """Print every setting that `train` would take, as TOML.

    The values come from the recipe, its part for the method, a file, and flags.

    Nothing is trained. Save the output to a file, change it, and give it to train --config.

    Args:
        settings: those that were given as flags.
        config: TOML file of settings; flags win.
    """
    from dpkfc.app.recipes.catalogue import run_config
    from dpkfc.app.settings import read_choices, to_toml

    sys.stdout.write(to_toml(run_config(read_choices(config, settings))))


def doctor(
    model: Annotated[str, typer.Argument(metavar="[TARGET]")] = "",
    *,
    settings: dict[str, Any],
    input_shape: str = "",
) -> None:
    """Show how each layer of a model is treated.

    The table has the rule, norms, factors and damping, and marks tied, frozen and uncovered layers.

    Args:
        model: A recipe, a run folder, or module:factory; left out with --data or --task.
        settings: those that were given as flags.
        input_shape: Shape of one input of a factory's model, e.g. 3,32,32.
    """
    from dpkfc.app.doctor import doctor_report

    doctor_report(model, settings, input_shape, open_console())


def methods(
    name: str = "",
) -> None:
    """Show the methods that --method takes.

    The table says what each needs and what a step costs.

    Args:
        name: One method, with where it acts, what it keeps, its equation and its source.
    """
    from dpkfc.app.settings import METHODS, ConfigError, nearest

    if name:
        if name not in METHODS:
            raise ConfigError(f"unknown method {name!r}; {nearest(name, METHODS)}")
        open_console().print(method_sheet(METHODS[name]))
        return
    console = open_console()
    console.print(methods_table())
    console.print("The rest of one: dpkfc methods NAME. --filter, --readout and --source compose.")


def pretrain_encoder(
    out: Path,
    *,
    steps: Annotated[int, typer.Option(min=2)] = 7800,
    batch_size: Annotated[int, typer.Option(min=2)] = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Train the encoder of `SyntheticEncoder` anew, on synthetic images alone.

    A JSON file beside the weights has losses and seconds. Two cores would take days: lower --steps
    and --batch-size to try it.

    Args:
        out: The file of weights (safetensors).
        steps: Steps; the package's encoder took 7,783.
        batch_size: Images a step.
        seed: Public seed of images, views and weights.
        device: cpu or cuda.
    """
    from rich.progress import Progress

    from dpkfc.app.pretrained import pretrain_and_save
    from dpkfc.app.run_folder import write_text
    from dpkfc.app.settings import ConfigError

    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    losses: list[tuple[int, float]] = []
    with Progress(console=open_console()) as progress:
        task = progress.add_task("encoder", total=steps)

        def report(step: int, loss: float) -> None:
            losses.append((step, round(loss, 4)))
            progress.update(task, completed=step, description=f"encoder, loss {loss:.3f}")

        facts = pretrain_and_save(
            out,
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            device=device,
            report=report,
        )
    log = out.with_suffix(".json")
    write_text(log, json.dumps({**facts, "losses": losses}))
    open_console().print(f"{out}: SHA-256 {facts['sha256']}; losses in {log}", soft_wrap=True)


def audit(
    run: Path | None = None,
    *,
    settings: dict[str, Any],
    config: Path | None = None,
    kind: list[str] | None = None,
    canaries: int = 1000,
    runs: int = 1500,
    quiet: bool = False,
) -> None:
    """Try to disprove the guarantee of a run.

    The audit uses neighbouring batches, noise tests, a distinguishing test and attacks.

    Args:
        run: A run folder; left out: the settings, as of `train`.
        settings: those that were given as flags.
        config: TOML file of settings; flags win.
        kind: step, one-run, membership; may be given several times.
        canaries: Canaries of the one-run audit.
        runs: Releases of each of the two worlds.
        quiet: No progress bar.
    """
    from dpkfc.app import audit_run as audits
    from dpkfc.app.recipes.catalogue import run_config
    from dpkfc.app.settings import ConfigError, read_choices

    console = open_console()
    if run is not None and (settings or config is not None):
        raise ConfigError(
            "a run folder is audited with its own settings; leave out every other setting"
        )
    options: dict[str, Any] = {
        "kinds": kind or ["step"],
        "canaries": canaries,
        "runs": runs,
        "console": None if quiet else console,
    }
    if run is not None:
        verdict = audits.audit_folder(run, **options)
    else:
        verdict = audits.audit(run_config(read_choices(config, settings)), **options)
    console.print(audits.verdict_table(verdict))
    if not verdict.passed:
        raise ConfigError(
            "the audit FAILED: the guarantee that is claimed does not hold, or not for what lies"
            " in the folder"
        )


# --------------------------------------------------------------------------------------------------
# Commands for own data and finished models: schema, recipes, predict, evaluate and export.


def write_schema(
    data: Path,
    *,
    target: str = "",
    text: str = "text",
    label_file: Path | None = None,
    out: Path | None = None,
) -> None:
    """Write a schema to fill in, from the header of a file alone.

    Example: dpkfc schema patients.csv --target readmitted --out patients.toml

    Args:
        data: A table, a folder of images, or a JSONL file.
        target: Column (or key) that is learned.
        text: Key of the text in a JSONL file.
        label_file: Table of image files and labels.
        out: The file; left out: the terminal.
    """
    from dpkfc.app.owndata.proposals import empty_schema
    from dpkfc.app.run_folder import RunFolderError, write_text

    content = empty_schema(data, target, text, label_file)
    if out is None:
        open_console().out(content, end="", highlight=False)
        return
    if out.exists():
        raise RunFolderError(f"{out} exists and may be filled in; choose another name with --out")
    write_text(out, content)
    open_console().print(f"schema to fill in: {out}", soft_wrap=True)


def print_recipes() -> None:
    """Show the built-in tasks that --recipe takes."""
    from dpkfc.app.recipes.catalogue import RECIPES
    from dpkfc.app.settings import RunConfig

    table = make_table("recipe", "data", "input", "classes", "method")
    for recipe in RECIPES.values():
        shape = " × ".join(map(str, recipe.input_shape))
        defaults = recipe.defaults.get("run", {})
        method = defaults.get("method", RunConfig.method)
        classes = str(recipe.num_classes)
        table.add_row(recipe.name, recipe.title, shape, classes, method)
    console = open_console()
    console.print(table)
    console.print("Own data take --data FILE or --task module:function in the place of --recipe.")


def predict(
    run: Path,
    *,
    data: Path,
    out: Path = Path("predictions.csv"),
) -> None:
    """Predict the class or number of each record of a file.

    Example: dpkfc predict runs/first --data new.csv --out predictions.csv

    Args:
        run: Folder of a finished run.
        data: A file of the form that was trained on.
        out: CSV file of what is predicted.
    """
    from dpkfc.app.owndata.display import print_shares
    from dpkfc.app.owndata.predictions import load_run, read_records, write_predictions
    from dpkfc.app.settings import ConfigError

    if out.resolve() == data.resolve():
        raise ConfigError(f"--out {out} is the file of --data; choose another")
    trained = load_run(run)
    records = read_records(trained, data, run)
    count = write_predictions(trained, records, out)
    console = open_console()
    console.print(f"{count:,} predictions: {out}", soft_wrap=True)
    print_shares(console, records.figures)


def evaluate_run(
    run: Path,
    *,
    data: Path | None = None,
    label_file: Path | None = None,
    public: bool = False,
) -> None:
    """Measure accuracy, with recall and precision of each class, or the errors of a number.

    Example: dpkfc evaluate runs/first --data test.csv

    Args:
        run: Folder of a finished run.
        data: A labelled file; left out: the test split of the run.
        label_file: Table of image files and labels.
        public: Anyone may see the file and figures of it.
    """
    from dpkfc.app.owndata.predictions import (
        evaluate_examples,
        evaluate_records,
        load_run,
        read_records,
    )

    trained = load_run(run)
    if data or label_file:
        folder = data or Path(trained.config.data)
        records = read_records(trained, folder, run, label_file)
        evaluation = evaluate_records(trained, records)
    else:
        split = trained.recipe.data(trained.config)
        evaluation = evaluate_examples(trained, split.test)
    console = open_console()
    judged = evaluation.judged
    named = trained.recipe.task.figures(judged.accuracy, judged.loss)
    figures = [f"{name} {_number(value)}" for name, value in named.items()]
    line = f"{', '.join(figures)}, {evaluation.examples:,} records"
    if evaluation.unlabelled:
        line += f"; {evaluation.unlabelled:,} without a known target left out"
    console.print(line, highlight=False)
    if evaluation.classes:
        numbers = ("records", "recall", "precision")
        table = make_table("class", *numbers, right=numbers)
        for name, count, recall, precision in evaluation.classes:
            table.add_row(name, f"{count:,}", _percent(recall), _percent(precision))
        console.print(table)
    if not public:
        console.print(
            "PRIVATE: ε does not protect these figures from the records they are computed on;"
            " --public says that anyone may see the file.",
            highlight=False,
        )


def _number(value: float | None) -> str:
    """Return four places of a number below ten, five digits of a greater one."""
    if value is None:
        return "–"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def export_run(
    run: Path,
    *,
    form: Annotated[str, typer.Option("--format")] = "torch",
    out: Path | None = None,
) -> None:
    """Write the model of a run for use without this package.

    Example: dpkfc export runs/first --format onnx

    Args:
        run: Folder of a finished run.
        form: torch (a program), safetensors (weights) or onnx.
        out: The file; left out: in RUN/export.
    """
    from dpkfc.app.owndata.predictions import export_model, load_run

    trained = load_run(run)
    path = export_model(trained, run, form, out)
    console = open_console()
    console.print(f"model: {path}", soft_wrap=True)
    for name in ("classes", "target"):
        if name in trained.recipe.constants:
            meaning, _ = trained.recipe.constants[name]
            _print_line(console, f"{name}: {meaning}")


# --------------------------------------------------------------------------------------------------

# The commands, and the end of each help page. An empty line keeps two examples apart.
_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "train": (
        train,
        "dpkfc train --data patients.csv --schema patients.toml --epsilon 3\n\n"
        "torchrun --nproc-per-node=2 -m dpkfc train --recipe mnist-cnn",
    ),
    "demo": (demo, "dpkfc demo --epsilon 1"),
    "doctor": (doctor, "dpkfc doctor mnist-cnn"),
    "methods": (methods, "dpkfc methods dp-kfc-a"),
    "audit": (audit, "dpkfc audit runs/first --kind step --kind membership"),
    "report": (report, "dpkfc report runs/* --out report.html"),
    "tune": (tune, "dpkfc tune --recipe digits --method dp-kfc-a --method dp-sgd --trials 20"),
    "demo-federated": (demo_federated, "dpkfc demo-federated --rounds 40 --engine here"),
    "card": (card, "dpkfc card runs/first --owner 'Ward 3'"),
    "pretrain-encoder": (
        pretrain_encoder,
        "dpkfc pretrain-encoder encoder.safetensors --device cuda",
    ),
    "settings": (
        every_setting,
        "dpkfc settings --recipe mnist-cnn > run.toml; dpkfc train --config run.toml",
    ),
    "schema": (write_schema, "dpkfc schema patients.csv --target readmitted"),
    "recipes": (print_recipes, "dpkfc recipes"),
    "predict": (predict, "dpkfc predict runs/first --data new.csv --out predictions.csv"),
    "evaluate": (evaluate_run, "dpkfc evaluate runs/first --data test.csv"),
    "export": (export_run, "dpkfc export runs/first --format onnx"),
}


# The commands that take the settings of a run as flags, and the settings that they leave out.
_TAKE_SETTINGS: dict[str, tuple[str, ...]] = {
    "train": (),
    "demo": ("recipe", "method", "out", "optimizer"),
    "settings": ("out",),
    "doctor": ("recipe", "out", "method"),
    "audit": ("out",),
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name, (command, example) in _COMMANDS.items():
        add_command(app, name, command, example)


def add_command(
    app: typer.Typer, name: str, command: Callable[..., None], example: str | None = None
) -> None:
    """Add a command, with the help texts of its options from its docstring.

    Its options are made when it is called: those of a run need all of its settings, and so torch.

    Args:
        app: the command line.
        name: of the command.
        command: a function with a docstring that names all of its parameters.
        example: shown at the end of its help page.
    """
    text = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")[0]

    class Deferred(TyperCommand):
        def make_context(
            self,
            info_name: str | None,
            args: list[str],
            parent: Context | None = None,
            **extra: Any,
        ) -> Context:
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
            alone.command(name, help=text, epilog=example)(_with_options(name, command))
            whole = typer.main.get_command(alone)
            return whole.make_context(info_name, args, parent, **extra)

    def stand_in() -> None:
        """Stand for the command in a list of commands."""

    app.command(name, cls=Deferred, help=text, epilog=example)(stand_in)


def _with_options(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters are options, with their help texts.

    Parameters before the star are arguments. A flag that is off by default has no negation.
    """
    if name in _TAKE_SETTINGS:
        command = _add_settings(command, _TAKE_SETTINGS[name])
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *given = [parameter.annotation]
        if get_origin(kind) is Annotated:
            kind, *given = get_args(kind)
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            given = [typer.Argument()]
        elif parameter.default is False:
            given = [typer.Option("--" + parameter.name.replace("_", "-"))]
        else:
            given = [typer.Option()]
        given[0].help = given[0].help or argument_text(command, parameter.name)
        parameters.append(parameter.replace(annotation=Annotated[kind, given[0]]))
    _set_parameters(command, parameters)
    return command
