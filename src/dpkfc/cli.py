"""The command line: calibrate, epsilon and ledger, and the commands that other packages add.

A package adds commands by an entry point of the group `dpkfc.commands`. The entry point is a
function that takes the `typer.Typer` of `dpkfc`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from click import ClickException, NoSuchOption
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperGroup

from dpkfc.allocator import keep_freed_memory
from dpkfc.report import rounded_up
from dpkfc.terminal import INTERRUPTED, MEANT, open_console, print_error, quiet_libraries
from dpkfc.torchrun import check_single

# Errors whose message is written for users.
_KNOWN_ERRORS = (ValueError, RuntimeError, OSError, ImportError, ClickException)


class _Commands(TyperGroup):
    """Commands that report an error as one line on stderr and exit code 2.

    DPKFC_DEBUG=1 shows the traceback.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        quiet_libraries()
        keep_freed_memory()
        try:
            check_single((kwargs.get("args") or sys.argv[1:])[:1])
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            print_error("interrupted")
            code = INTERRUPTED
        except typer.Exit as request:
            code = request.exit_code
        except Exception as error:
            if os.environ.get("DPKFC_DEBUG") == "1":
                raise
            print_error(_describe_error(error))
            code = 2
        finally:
            logging.captureWarnings(False)
        sys.exit(code if isinstance(code, int) else 0)


def _describe_error(error: Exception) -> str:
    if isinstance(error, NoSuchOption):
        known = MEANT.get(error.option_name.lstrip("-").replace("-", "_"))
        close = [f"--{known.replace('_', '-')}"] if known else error.possibilities
        hint = f"did you mean {close[0]!r}?" if close else "see --help"
        return f"unknown option {error.option_name!r}; {hint}"
    text = error.format_message() if isinstance(error, ClickException) else str(error)
    # The group and its base class both suggest a command.
    text = text.split("? Did you mean")[0] + "?" if text.count("Did you mean") > 1 else text
    place = _find_own_line(error)
    if isinstance(error, _KNOWN_ERRORS):
        return f"{text} ({place})" if place else text
    return f"{type(error).__name__}: {text} ({place or 'DPKFC_DEBUG=1 shows where'})"


def _find_own_line(error: Exception) -> str:
    """Return the last line of a user's own module that an error has passed, "" without one."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
        file = Path(frame.f_code.co_filename)
        is_installed = {"site-packages", "dist-packages"}.intersection(file.parts)
        is_known = package in sys.stdlib_module_names or package.startswith("dpkfc")
        if not (is_installed or is_known):
            place = f"line {line} of {file.name}"
    return place


app = typer.Typer(
    cls=_Commands,
    help=(
        "Differentially private training with a K-FAC preconditioner that never sees private data."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
ledger_app = typer.Typer(help="Privacy ledgers.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")


def _print_version(wanted: bool) -> None:
    if wanted:
        open_console().print(f"dpkfc {version('dpkfc')}", highlight=False)
        raise typer.Exit


@app.callback()
def _take_version(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Differentially private training with a K-FAC preconditioner that never sees private data."""


def main() -> None:
    """Run the command line of `dpkfc`."""
    app()


_SIZE = ("--dataset-size", "-n")
_BATCH_SIZE = ("--expected-batch-size", "--batch-size", "-b")
_Size = Annotated[int, typer.Option(*_SIZE, help="Number of examples N, taken as public.")]
_Batch = Annotated[int, typer.Option(*_BATCH_SIZE, help="Expected batch size B.")]
_Delta = Annotated[float, typer.Option("--delta", "-d", help="δ of the whole run.")]
_Epochs = Annotated[float | None, typer.Option("--epochs", help="Expected passes over the data.")]
_Steps = Annotated[int | None, typer.Option("--steps", help="Number of steps, instead of epochs.")]
_Sampler = Annotated[str, typer.Option("--sampler", help="poisson or fixed.")]
_Uncertified = Annotated[
    bool, typer.Option("--uncertified", help="Take a δ that is not below 1 / N.")
]


@app.command(epilog="dpkfc calibrate -e 1 -n 60000 -b 256 --epochs 5")
def calibrate(
    *,
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="Target ε of the whole run.")],
    dataset_size: _Size,
    batch_size: _Batch,
    epochs: _Epochs = None,
    steps: _Steps = None,
    delta: _Delta = 1e-5,
    sampler: _Sampler = "poisson",
    accountant: Annotated[
        str | None, typer.Option(help="pld or rdp. Default: pld; rdp for --sampler fixed.")
    ] = None,
) -> None:
    """Compute the noise multiplier σ that spends a budget, from (ε, δ), N, B and epochs."""
    from dpkfc.config import PrivacyConfig
    from dpkfc.report.tables import plan_table

    config = PrivacyConfig(
        expected_batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        sampler=sampler,
        accountant=accountant,
    )
    open_console().print(plan_table(config.calibrate(epsilon, delta, dataset_size)))


@app.command(epilog="dpkfc epsilon -s 1.1 -n 60000 -b 256 --epochs 5")
def epsilon(
    *,
    noise_multiplier: Annotated[
        float, typer.Option("--noise-multiplier", "-s", help="σ, std ÷ sensitivity.")
    ],
    dataset_size: _Size = 0,
    batch_size: _Batch = 0,
    sample_rate: Annotated[
        float, typer.Option("--sample-rate", "-q", help="q, instead of N and B.")
    ] = 0.0,
    epochs: _Epochs = None,
    steps: _Steps = None,
    delta: _Delta = 1e-5,
    sampler: _Sampler = "poisson",
    uncertified: _Uncertified = False,
) -> None:
    """Compute the ε of a noise multiplier, by PLD and by RDP."""
    from dpkfc.config import PrivacyConfig
    from dpkfc.report.tables import plan_table, rate_table

    if sample_rate:
        if sampler != "poisson" or dataset_size or batch_size:
            raise ValueError(
                f"--sample-rate belongs to Poisson sampling: for --sampler {sampler} give "
                "--dataset-size and --batch-size only"
            )
        table = rate_table(noise_multiplier, sample_rate, epochs=epochs, steps=steps, delta=delta)
        open_console().print(table)
        return
    if not (dataset_size and batch_size):
        raise ValueError("give --dataset-size and --batch-size, or --sample-rate")
    config = PrivacyConfig(
        expected_batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        sampler=sampler,
        uncertified=uncertified,
    )
    open_console().print(plan_table(config.with_noise(noise_multiplier, delta, dataset_size)))


@ledger_app.command("verify", epilog="dpkfc ledger verify runs/first")
def ledger_verify(
    path: Annotated[Path, typer.Argument(help="A ledger.jsonl, or a run folder.")],
    delta: Annotated[
        float | None,
        typer.Option(
            "--delta", "-d", help="δ of ε. Default: from the card, else the ledger, else 1e-5."
        ),
    ] = None,
    head: Annotated[
        str, typer.Option(help="A head of this ledger that you have kept; with --releases.")
    ] = "",
    releases: Annotated[
        int | None, typer.Option(help="Number of releases after which that head was taken.")
    ] = None,
) -> None:
    """Verify a ledger with its card and weights, and report ε. The hash chain is not signed."""
    from dpkfc.report.verify import verify_ledger

    if bool(head) != (releases is not None):
        raise ValueError(
            "--head and --releases belong together: the head that you kept, and after how many "
            "releases"
        )
    copy = None if releases is None else (head, releases)
    ledger = path / "ledger.jsonl" if path.is_dir() else path
    table = Table("", Column(overflow="fold"), show_header=False)
    for name, value in verify_ledger(ledger, delta, copy=copy).items():
        text = rounded_up(value) if isinstance(value, float) else str(value)
        table.add_row(name, escape(text))
    open_console().print(table)


@app.command()
@ledger_app.command()
def total(
    runs: Annotated[
        list[Path], typer.Argument(help="Ledgers, run folders, or folders of run folders.")
    ],
    *,
    delta: Annotated[
        float | None,
        typer.Option(
            "--delta", "-d", help="δ of the total. Default: the one that all ledgers state."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compose the ledgers of runs on the same people: folds, rounds, restarts, federated runs.

    Each ledger is verified, and what was released is counted, not what was planned.
    """
    from dpkfc.report.tables import total_table
    from dpkfc.report.total import describe_total, total_of_ledgers

    composed = total_of_ledgers(runs, delta)
    console = open_console()
    if as_json:
        text = json.dumps(describe_total(composed), indent=1, ensure_ascii=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    for doubt in composed.doubts:
        console.print(doubt, markup=False, soft_wrap=True)
    console.print(total_table(composed))


@app.command()
def budget(
    path: Annotated[Path, typer.Argument(help="The TOML file of the budget.")],
    *,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="ε of all runs; begins a budget.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", "-d", help="δ of all runs; begins a budget.")
    ] = None,
    people: Annotated[str, typer.Option(help="Whose data it is; left out: the file's name.")] = "",
    moved: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="A ledger file was moved, so its charge moves too."),
    ] = None,
) -> None:
    """Show what runs were charged to the budget of a dataset, and what is left; or begin one.

    Runs charge it with `dpkfc train --budget FILE`, or with `dpkfc.privacy.Budget` in a script.
    """
    from dpkfc.report.tables import budget_table

    open_console().print(budget_table(path, epsilon, delta, people, moved))


def _add_commands() -> None:
    """Add the commands of the application and of other installed packages."""
    added = {point.name: point for point in entry_points(group="dpkfc.commands")}
    for _, point in sorted(added.items()):
        point.load()(app)


_add_commands()

if __name__ == "__main__":
    main()
