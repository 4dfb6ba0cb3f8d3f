"""The journal of a study: a file of Optuna's, and what trials carry in it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dpkfc._errors import one_line
from dpkfc.app.tuning.runs import StudyError

# What a trial carries: hash and settings of its run, the row that it came to, and the process that
# runs it. Of a trial that failed, LOST says why it does not count and REASON why it could not be
# run.
HASH = "hash"
SETTINGS = "settings"
ROW = "row"
PROCESS = "process"
LOST = "lost"
REASON = "why"


def load_optuna() -> ModuleType:
    """Return Optuna with its messages turned off.

    Raises:
        StudyError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise StudyError(
            "tuning needs Optuna, which is not installed: pip install '.[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    return optuna


@functools.lru_cache(maxsize=8)
def open_journal(path: Path) -> Any:
    """Return Optuna's storage of a file, which its owner alone may read.

    Raises:
        StudyError: the file is not a journal, or cannot be used.
    """
    load_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file holds accuracies on private examples.
        path.touch(0o600)
        return JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(
            f"the trials in {path} cannot be used ({one_line(error)[:200]}); move the file away, or"
            " choose another --out"
        ) from None


def repair_journal(path: Path) -> None:
    """Remove a last line that a kill or a full disk cut short, as nothing has read it.

    Call it where no other process has the file open.
    """
    if path.is_file():
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if content[end:].startswith(b"{"):
            os.truncate(path, end)


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the journal into a message.

    Raises:
        StudyError: the disk cannot store a trial.
    """
    try:
        yield
    except OSError as error:
        raise StudyError(
            f"the trials in {path} cannot be written ({error.strerror or error}); make room or"
            " change its rights: earlier trials are kept, and the same command goes on from there"
        ) from None
