"""The one error of the readers: it names the file and the fix."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DatasetError", "damaged", "unreadable"]


class DatasetError(ValueError):
    """A data set that is missing, damaged or not what its name says."""


def damaged(path: Path, what: str) -> DatasetError:
    """The error for a file that exists and cannot be used.

    Args:
        path: the file.
        what: what is wrong with it, as the end of a sentence that begins with the file.
    """
    return DatasetError(f"{path}: {what}; the file is damaged or not the right one: fetch it again or replace it")


def unreadable(path: Path, error: OSError) -> DatasetError:
    """The error for a file that the system does not hand over."""
    return DatasetError(f"{path}: cannot be read ({error.strerror or error}); check the name and its permissions")
