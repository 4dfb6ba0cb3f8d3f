"""Commands of the application: train, demo, settings, doctor, methods, audit and more."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dpkfc.launched import is_first, is_launched
from dpkfc.recipes.config import ConfigError, RunConfig, chosen, nearest
from dpkfc.recipes.federated_command import demo_federated
from dpkfc.report.commands import report
from dpkfc.report.numbers import rounded_up
from dpkfc.studies.tune_command import tune
from dpkfc.terminal import INTERRUPTED, open_console, print_error

if TYPE_CHECKING:
    from dpkfc.recipes.prepared import Result

__all__ = ["register"]

_METAVARS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}


def _with_settings(leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `RunConfig`; it receives those that were given as `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        fields = [f for f in dataclasses.fields(RunConfig) if f.name not in leave_out]

        def called(**given: Any) -> None:
            settings = {f: given.pop(f.name) for f in fields}
            command(**given, settings={f.name: _value(f, v) for f, v in settings.items() if v is not None})

        parameters = [*own, *(_flag(f) for f in fields)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__doc__, called.__name__ = command.__doc__, command.__name__
        return called

    return decorate


def _value(setting: dataclasses.Field[Any], text: str | bool) -> Any:
    """The value of a flag; a text that is no number is left for `RunConfig` to name."""
    for convert in {"int": (int, float), "float": (float,)}.get(str(setting.type), ()):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text


def _flag(setting: dataclasses.Field[Any]) -> inspect.Parameter:
    kind, flag = str(setting.type), "--" + setting.name.replace("_", "-")
    declared = f"{flag}/--no-{flag[2:]}" if kind == "bool" else flag
    choices = [choice for choice in setting.metadata["choices"] if choice]
    text = setting.metadata["help"] + (f" ({' | '.join(choices)})" if choices else "")
    panel = setting.metadata["section"]
    option = typer.Option(declared, help=text, rich_help_panel=panel, show_default=False, metavar=_METAVARS.get(kind))
    annotation = Annotated[bool | None, option] if kind == "bool" else Annotated[str | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@_with_settings()
def train(
    *,
    settings: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to continue, with a fresh noise stream.")] = None,
    any_world_size: Annotated[bool, typer.Option("--any-world-size", help="Resume on another number of processes.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a recipe under a privacy budget and leave a run folder; on several processes: torchrun … -m dpkfc train ….

    Every setting is a flag or a key of a TOML file; what is not given comes from the recipe. The seed never seeds noise.
    """
    if resume is not None and (settings or config is not None):
        raise ConfigError("--resume continues a run with its own settings; leave out every other setting")
    from dpkfc.recipes.catalogue import run_config
    from dpkfc.recipes.train import resume as continue_run
    from dpkfc.recipes.train import run

    console = None if quiet else open_console()
    if resume is not None:
        result = continue_run(resume, console, any_world_size=any_world_size)
    else:
        result = run(run_config(chosen(config, settings)), console, any_world_size=any_world_size)
    _announce(result)


def _announce(result: Result) -> None:
    """What came of a run, and how to go on."""
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
    if result.head:
        console.print(f"ledger: {result.steps} releases, head {result.head} (give both to whoever will check it)", soft_wrap=True)


def _results_table(results: dict[str, Result]) -> Table:
    table = Table(header_style="bold", title_justify="left")
    table.add_column("method")
    for name in ("accuracy", "ε spent", "steps", "seconds"):
        table.add_column(name, justify="right")
    for label, result in results.items():
        accuracy = f"{100 * result.accuracy:.1f} % ({result.measured_on})"
        table.add_row(label, accuracy, rounded_up(result.epsilon), f"{result.steps:,}", f"{result.seconds:.1f}")
    return table


@_with_settings(leave_out=("recipe", "method", "out", "optimizer"))
def demo(
    *,
    settings: dict[str, Any],
    out: Annotated[str, typer.Option(help="Folder of the demo; a new one below runs/ when left out.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train DP-SGD and DP-KFC side by side on real digits under the same budget."""
    from dpkfc.recipes.demo import demo as run_demo
    from dpkfc.recipes.prepared import LABELS

    console = open_console()
    done = run_demo(chosen(None, settings), out, None if quiet else console)
    if done.interrupted:
        stopped = next(result for result in done.results.values() if result.interrupted)
        _announce(stopped)
    console.print(_results_table({LABELS[method]: result for method, result in done.results.items()}))
    console.print(f"pictures and privacy cards: {done.folder}", soft_wrap=True)


@_with_settings(leave_out=("out",))
def every_setting(
    *,
    settings: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win.")] = None,
) -> None:
    """Every setting that `train` would take, as TOML: from the recipe, its part for the method, a file, and flags.

    Nothing is trained. Save it to a file, change what you like, and give it to train --config.
    """
    from dpkfc.recipes.catalogue import run_config
    from dpkfc.recipes.config import to_toml

    sys.stdout.write(to_toml(run_config(chosen(config, settings))))


@_with_settings(leave_out=("recipe", "out", "method"))
def doctor(
    target: Annotated[str, typer.Argument(help="A recipe, or module:factory that returns a model.")],
    *,
    settings: dict[str, Any],
    input_shape: Annotated[str, typer.Option(help="Shape of one input of a factory's model, e.g. 3,32,32.")] = "",
    cost: Annotated[bool, typer.Option("--cost", help="Measure what a step, its norms and a refresh cost here.")] = False,
    rows: Annotated[int, typer.Option(help="Examples of the step that --cost measures.")] = 32,
    again: Annotated[bool, typer.Option("--again", help="Measure what --cost has kept of this machine anew.")] = False,
) -> None:
    """What would be done with each layer of a model: rule, norms, factors, damping, tied, frozen, not covered."""
    from dpkfc.recipes.doctor_command import doctor_report

    if rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {rows}")
    doctor_report(target, settings, input_shape, rows if cost else 0, open_console(), again=again)


def methods(
    name: Annotated[str, typer.Argument(help="One method, with its equation and settings; left out: all of them.")] = "",
) -> None:
    """The methods that --method takes: where each acts in a step, what it needs, costs and keeps, and its source."""
    from dpkfc.recipes.methods import METHODS
    from dpkfc.recipes.tables import method_sheet, methods_table

    if name:
        if name not in METHODS:
            raise ConfigError(f"unknown method {name!r}; {nearest(name, METHODS)}")
        open_console().print(method_sheet(METHODS[name]))
        return
    console = open_console()
    console.print(methods_table(console.width))
    console.print("d: the number of parameters. One in full: dpkfc methods NAME. --filter, --readout and --source compose.")


@_with_settings(leave_out=("out",))
def audit(
    run: Annotated[Path | None, typer.Argument(help="A run folder; left out: the settings, as of `train`.")] = None,
    *,
    settings: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="step, one-run, membership; may be given several times.")] = None,
    canaries: Annotated[int, typer.Option(help="Canaries of the one-run audit.")] = 1000,
    runs: Annotated[int, typer.Option(help="Releases of each of the two worlds.")] = 1500,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Try to disprove the guarantee of a run: neighbours under frozen noise, the law of the noise, two worlds, one run."""
    from dpkfc.recipes import audit as audits
    from dpkfc.recipes.catalogue import run_config

    console, kinds = open_console(), kind or ["step"]
    if run is not None and (settings or config is not None):
        raise ConfigError("a run folder is audited with its own settings; leave out every other setting")
    bars = None if quiet else console
    if run is not None:
        verdict = audits.audit_folder(run, kinds, canaries=canaries, runs=runs, console=bars)
    else:
        verdict = audits.audit(run_config(chosen(config, settings)), kinds, canaries=canaries, runs=runs, console=bars)
    console.print(audits.verdict_table(verdict))
    if not verdict.passed:
        raise ConfigError("the audit FAILED: the guarantee that is claimed does not hold, or not for what lies in the folder")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (train, demo, doctor, methods, audit, report, tune, demo_federated):
        app.command()(command)
    app.command("settings")(every_setting)
