"""The report at the end of a study, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dpkfc.report.run_folder import RunFolderError
from dpkfc.studies.errors import StudyError

__all__ = ["reported"]


@contextmanager
def reported(write: Callable[[], object]) -> Iterator[None]:
    """Write the report when the inside has ended, also where it was interrupted.

    Args:
        write: the report. Where the inside ended with a StudyError (a full disk, say), that error is told and not a second one
            of the report, which may not fit either.

    Raises:
        RunFolderError: the disk cannot take the report.
    """
    try:
        yield
    except StudyError:
        with suppress(StudyError, RunFolderError):
            write()
        raise
    except BaseException:
        write()
        raise
    write()
