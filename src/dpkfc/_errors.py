"""Texts of errors on one line."""

from __future__ import annotations


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
