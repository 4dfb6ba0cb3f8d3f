"""Write to the terminal: results on stdout, each error on one line of stderr."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from cyclopts import CoercionError, Parameter
from cyclopts.token import Token
from rich.console import Console
from rich.table import Table

INTERRUPTED = 130  # exit code after Ctrl-C
# Names of settings that other libraries use, and ours.
MEANT = {
    "learning_rate": "lr",
    "max_norm": "max_grad_norm",
    "clip_norm": "max_grad_norm",
    "l2_norm_clip": "max_grad_norm",
    "sigma": "noise_multiplier",
    "target_epsilon": "epsilon",
    "eps": "epsilon",
    "target_delta": "delta",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "dataset": "data",
}


def _read_whole(_: type, tokens: Sequence[Token]) -> int:
    """Return a whole number; cyclopts would round 3.7."""
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        raise CoercionError(token=token, target_type=int) from None


# The type of a flag that takes a whole number.
Whole = Annotated[int, Parameter(converter=_read_whole)]


def open_console() -> Console:
    """Return the console of results, wide enough for tables without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def make_table(*columns: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table whose cells break where a terminal is narrow.

    Args:
        columns: their headings.
        right: headings of the columns whose cells stand at the right.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, overflow="fold", justify=justify)
    return table


def print_line(text: str) -> None:
    """Print a line as it is, without markup, colours or breaks."""
    open_console().print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"dpkfc: {' '.join(text.split())}\n")


@contextmanager
def resumable(how: str) -> Iterator[None]:
    """Print how to continue if Ctrl-C stops the body, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print_line(f"stopped; {how}")
        raise SystemExit(INTERRUPTED) from None


class _OneLine(logging.Formatter):
    """Formats warnings of Python without the file and line that raised them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        text = record.getMessage()
        if record.name == "py.warnings":
            text = text.split("Warning: ", 1)[-1].split("\n", 1)[0]
        return f"dpkfc: {' '.join(text.split())}"


def quiet_libraries() -> None:
    """Show warnings of the package on one line of stderr.

    Accounting details appear with DPKFC_DEBUG=1 only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.captureWarnings(True)
    for name in ("dpkfc", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    if os.environ.get("DPKFC_DEBUG") != "1":
        logging.getLogger("dpkfc.privacy.dp_accountants").setLevel(logging.ERROR)


def argument_text(owner: Any, key: str) -> str:
    """Return what the docstring of a class or function says of an attribute or argument."""
    block = re.search(
        rf"^( +){key}: (.*?)(?=^\1\w|^ *$|\Z)",
        inspect.getdoc(owner) or "",
        re.MULTILINE | re.DOTALL,
    )
    return " ".join(block[2].split()) if block else ""
