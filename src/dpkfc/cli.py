"""The command line: calibrate, epsilon and ledger, and the commands that other packages add.

A package adds commands by an entry point of the group `dpkfc.commands`. The entry point is a
function that takes the `cyclopts.App` of `dpkfc`.
"""

from __future__ import annotations

import difflib
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from rich.markup import escape
from rich.table import Column, Table

from dpkfc._errors import find_own_line
from dpkfc.allocator import keep_freed_memory
from dpkfc.report.text import round_up
from dpkfc.terminal import (
    INTERRUPTED,
    MEANT,
    Whole,
    open_console,
    print_error,
    print_line,
    quiet_libraries,
)
from dpkfc.torchrun import check_single

# Commands of about a second, a tenth of which the collector took while modules were imported.
_SHORT = ("calibrate", "epsilon", "ledger", "total", "budget", "card")
# Errors whose message is written for users.
_KNOWN_ERRORS = (ValueError, RuntimeError, OSError, ImportError, CycloptsError)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit.

    An error is one line on stderr and exit code 2; DPKFC_DEBUG=1 shows the traceback.

    Args:
        words: of the command line; by default the words of the process.
    """
    words = list(sys.argv[1:] if words is None else words)
    quiet_libraries()
    keep_freed_memory()
    if words and words[0] in _SHORT:
        gc.disable()
    code = 0
    try:
        check_single(words[:1])
        app(words)
    except KeyboardInterrupt:
        print_error("interrupted")
        code = INTERRUPTED
    except Exception as error:
        if os.environ.get("DPKFC_DEBUG") == "1":
            raise
        print_error(_describe_error(error))
        code = 2
    finally:
        gc.enable()
        logging.captureWarnings(False)
    sys.exit(code)


def _describe_error(error: Exception) -> str:
    if isinstance(error, UnknownOptionError):
        flag = error.token.keyword or error.token.value
        known = [name for argument in error.argument_collection for name in argument.names]
        return f"unknown option {flag!r}; {_suggest(flag, known)}"
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        word = error.unused_tokens[0]
        return f"unknown command {word!r}; {_suggest(word, app)}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"unexpected argument {error.unused_tokens[0]!r}; see --help"
    if isinstance(error, CycloptsError):
        error.verbose = False
        # Its messages quote a number of thousands of digits in full.
        return re.sub(r"(\d{20})\d{20,}", r"\1…", str(error))
    text, place = str(error), find_own_line(error)
    if isinstance(error, _KNOWN_ERRORS):
        return f"{text} ({place})" if place else text
    # What it says may be a value of a record.
    return f"{type(error).__name__} ({place or 'DPKFC_DEBUG=1 shows where'})"


def _suggest(word: str, known: Iterable[str]) -> str:
    """Return the nearest known word, as the end of a message."""
    meant = MEANT.get(word.lstrip("-").replace("-", "_"))
    close = difflib.get_close_matches(word, known, n=1)
    if meant:
        close = [f"--{meant.replace('_', '-')}"]
    return f"did you mean {close[0]!r}?" if close else "see --help"


app = App(
    name="dpkfc",
    help=(
        "Differentially private training with a K-FAC preconditioner that never sees private data."
    ),
    help_format="plaintext",
    version=lambda: f"dpkfc {version('dpkfc')}",
    version_flags=["--version"],
    help_flags=["--help"],
    # A flag that is off by default has no negation.
    default_parameter=Parameter(negative=(), show_default=False),
    # `main` says what went wrong.
    print_error=False,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
ledger_app = App(name="ledger", help="Privacy ledgers.")
app.command(ledger_app)

_BATCH_SIZE = ("--expected-batch-size", "--batch-size", "-b")
_Size = Annotated[
    Whole, Parameter(name=("--dataset-size", "-n"), help="Number of examples N, taken as public.")
]
_Batch = Annotated[Whole, Parameter(name=_BATCH_SIZE, help="Expected batch size B.")]
_Delta = Annotated[float, Parameter(name=("--delta", "-d"), help="δ of the whole run.")]
_Epochs = Annotated[float | None, Parameter(name="--epochs", help="Expected passes over the data.")]
_Steps = Annotated[
    Whole | None, Parameter(name="--steps", help="Number of steps, instead of epochs.")
]
_Sampler = Annotated[str, Parameter(name="--sampler", help="poisson or fixed.")]
_Bands = Annotated[
    Whole | None, Parameter(name="--bands", help="Steps that share correlated noise.")
]
_Uncertified = Annotated[
    bool, Parameter(name="--uncertified", help="Take a δ that is not below 1 / N.")
]


@app.command(help_epilogue="dpkfc calibrate -e 1 -n 60000 -b 256 --epochs 5")
def calibrate(
    *,
    epsilon: Annotated[
        float, Parameter(name=("--epsilon", "-e"), help="Target ε of the whole run.")
    ],
    dataset_size: _Size,
    batch_size: _Batch,
    epochs: _Epochs = None,
    steps: _Steps = None,
    delta: _Delta = 1e-5,
    sampler: _Sampler = "poisson",
    accountant: Annotated[
        str | None, Parameter(help="pld or rdp. Default: pld; rdp for --sampler fixed.")
    ] = None,
    noise: Annotated[
        str, Parameter(help="gaussian; correlated over steps; auto: where it is better.")
    ] = "gaussian",
    bands: _Bands = None,
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
        noise=noise,
        bands=bands,
    )
    open_console().print(plan_table(config.calibrate(epsilon, delta, dataset_size)))


@app.command(help_epilogue="dpkfc epsilon -s 1.1 -n 60000 -b 256 --epochs 5")
def epsilon(
    *,
    noise_multiplier: Annotated[
        float, Parameter(name=("--noise-multiplier", "-s"), help="σ, std ÷ sensitivity.")
    ],
    dataset_size: _Size = 0,
    batch_size: _Batch = 0,
    sample_rate: Annotated[
        float, Parameter(name=("--sample-rate", "-q"), help="q, instead of N and B.")
    ] = 0.0,
    epochs: _Epochs = None,
    steps: _Steps = None,
    delta: _Delta = 1e-5,
    sampler: _Sampler = "poisson",
    uncertified: _Uncertified = False,
    bands: _Bands = None,
) -> None:
    """Compute the ε of a noise multiplier, by PLD and by RDP."""
    from dpkfc.config import PrivacyConfig
    from dpkfc.report.tables import plan_table, rate_table

    if sample_rate:
        if sampler != "poisson" or dataset_size or batch_size or bands:
            named = "--bands" if bands else f"--sampler {sampler}"
            raise ValueError(
                f"--sample-rate belongs to Poisson sampling: for {named} give --dataset-size and"
                " --batch-size only"
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
        noise="correlated" if bands else "gaussian",
        bands=bands,
    )
    open_console().print(plan_table(config.with_noise(noise_multiplier, delta, dataset_size)))


@ledger_app.command(name="verify", help_epilogue="dpkfc ledger verify runs/first")
def ledger_verify(
    path: Annotated[Path, Parameter(help="A ledger.jsonl, or a run folder.")],
    /,
    *,
    delta: Annotated[
        float | None,
        Parameter(
            name=("--delta", "-d"),
            help="δ of ε. Default: from the card, else the ledger, else 1e-5.",
        ),
    ] = None,
    head: Annotated[
        str, Parameter(help="A head of this ledger that you have kept; with --releases.")
    ] = "",
    releases: Annotated[
        Whole | None, Parameter(help="Number of releases after which that head was taken.")
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
        text = round_up(value) if isinstance(value, float) else str(value)
        table.add_row(name, escape(text))
    open_console().print(table)


@ledger_app.command(name="witness", help_epilogue="dpkfc ledger witness runs/first >> heads.txt")
def ledger_witness(
    path: Annotated[Path, Parameter(help="A ledger.jsonl, or a run folder.")],
    /,
    *,
    stamp: Annotated[
        Path | None, Parameter(help="A time stamp of the head (RFC 3161) to keep in the folder.")
    ] = None,
    tsa_root: Annotated[
        Path | None, Parameter(help="Certificate (PEM) of the authority, to check its signature.")
    ] = None,
) -> None:
    """Print the head of a ledger as a line to send away or to commit; or keep its time stamp.

    Anyone who has the line can show later that the ledger was changed. A time stamp of the head
    comes from: openssl ts -query -digest HEAD -sha256 -cert -out head.tsq, sent to an authority.
    """
    from dpkfc.report.witness import keep_stamp, witness_line

    console = open_console()
    text = witness_line(path) if stamp is None else keep_stamp(path, stamp, tsa_root)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
@ledger_app.command()
def total(
    runs: Annotated[list[Path], Parameter(help="Ledgers, run folders, or folders of run folders.")],
    /,
    *,
    delta: Annotated[
        float | None,
        Parameter(
            name=("--delta", "-d"), help="δ of the total. Default: the one that all ledgers state."
        ),
    ] = None,
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON.")] = False,
) -> None:
    """Compose the ledgers of runs on the same people: folds, rounds, restarts, federated runs.

    Each ledger is verified, and what was released is counted, not what was planned.
    """
    from dpkfc.report.tables import total_table
    from dpkfc.report.total import describe_total, total_of_ledgers

    composed = total_of_ledgers(runs, delta)
    if as_json:
        text = json.dumps(describe_total(composed), indent=1, ensure_ascii=False)
        print_line(text)
        return
    for doubt in composed.doubts:
        print_line(doubt)
    open_console().print(total_table(composed))


@app.command()
def budget(
    path: Annotated[Path, Parameter(help="The TOML file of the budget.")],
    /,
    *,
    epsilon: Annotated[
        float | None, Parameter(name=("--epsilon", "-e"), help="ε of all runs; begins a budget.")
    ] = None,
    delta: Annotated[
        float | None, Parameter(name=("--delta", "-d"), help="δ of all runs; begins a budget.")
    ] = None,
    people: Annotated[str, Parameter(help="Whose data it is; left out: the file's name.")] = "",
    moved: Annotated[
        tuple[Path, Path] | None,
        Parameter(help="OLD NEW: a ledger file was moved, so its charge moves too."),
    ] = None,
) -> None:
    """Show what runs were charged to the budget of a dataset, and what is left; or create one.

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
