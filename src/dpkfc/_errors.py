"""Texts of errors on one line, and where in a user's code they arose."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from types import FrameType


def one_line(error: Exception) -> str:
    """Return the text of an error on one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def one_name(path: object) -> str:
    """Return the name of a file on one line, for a message; quoted if it has several."""
    name = str(path)
    return repr(name) if "\n" in name or "\r" in name else name


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error; the name of its class without one."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def find_own_line(error: BaseException) -> str:
    """Return the last line of a user's own module that an error has passed, "" without one."""
    return last_own_line(walk_tb(error.__traceback__))


def last_own_line(calls: Iterable[tuple[FrameType, int]]) -> str:
    """Return the last line of a user's own module among some calls, "" without one."""
    place = ""
    for frame, line in calls:
        package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
        file = Path(frame.f_code.co_filename)
        is_installed = {"site-packages", "dist-packages"}.intersection(file.parts)
        is_known = package in sys.stdlib_module_names or package.startswith("dpkfc")
        if not (is_installed or is_known):
            place = f"line {line} of {file.name}"
    return place
