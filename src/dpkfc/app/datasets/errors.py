"""The errors of readers of data sets, which name the file and the fix."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


class DatasetError(ValueError):
    """A data set that is missing, damaged, or another than its name says."""


def damaged_error(path: Path, what: str) -> DatasetError:
    """Return the error for a file that exists and cannot be used.

    Args:
        path: the file.
        what: what is wrong with it, as the end of a sentence that begins with the file.
    """
    return DatasetError(
        f"{path}: {what}; the file is damaged or not the right one: fetch it again or replace it"
    )


def unreadable_error(path: Path, error: OSError) -> DatasetError:
    """Return the error for a file that the system cannot read."""
    if isinstance(error, FileNotFoundError):
        return DatasetError(f"{path}: does not exist; check the name")
    reason = error.strerror or error
    return DatasetError(f"{path}: cannot be read ({reason}); check the name and its permissions")


def import_optional(name: str, missing: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: of the module.
        missing: the error where it is not installed, with the command that installs it.

    Raises:
        DatasetError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DatasetError(missing) from None
