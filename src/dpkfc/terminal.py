"""Write to the terminal, as every command does: results on stdout, each mistake on one line of stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

__all__ = ["INTERRUPTED", "open_console", "print_error", "quiet_libraries", "resumable"]

INTERRUPTED = 130  # exit code of a command that Ctrl-C has stopped


def open_console() -> Console:
    """Return the console of results; it is wide enough for tables where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_error(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"dpkfc: {' '.join(text.split())}\n")


@contextmanager
def resumable(console: Console, how: str) -> Iterator[None]:
    """Say how to go on where Ctrl-C stops the body, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"stopped; {how}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


class _OneLine(logging.Formatter):
    """Formats warnings of Python without the file and line that raised them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        text = record.getMessage()
        if record.name == "py.warnings":
            text = text.split("Warning: ", 1)[-1].split("\n", 1)[0]
        return f"dpkfc: {' '.join(text.split())}"


def quiet_libraries() -> None:
    """Show warnings of the package on one line of stderr, and accounting details only with DPKFC_DEBUG=1."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.captureWarnings(True)
    for name in ("dpkfc", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    if os.environ.get("DPKFC_DEBUG") != "1":
        logging.getLogger("dpkfc.privacy.accounting").setLevel(logging.ERROR)
