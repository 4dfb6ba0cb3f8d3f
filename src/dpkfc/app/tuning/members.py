"""The processes that work on one study side by side: on one machine, or on several with one disk.

Each holds a lock of its own until it ends, however it ends, so that the others know whose trials
still run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock

from dpkfc.app.tuning.runs import StudyError
from dpkfc.privacy.locks import find_lock_path, take_lock


class Member:
    """One of the processes of a study. Use it in a `with`.

    Args:
        folder: of the study.

    Attributes:
        name: of the process.
        is_alone: whether no other process worked on the study when this one began.
    """

    def __init__(self, folder: Path) -> None:
        self.name = secrets.token_hex(4)
        self.is_alone = True
        self._study = folder / "study"
        self._members = folder / "processes"

    def __enter__(self) -> Member:
        self._lock = take_study_lock(self._members / self.name)
        with self.turn():
            names = {path.stem for path in self._members.glob("*.lock")} - {self.name}
            self.is_alone = not any([self.is_alive(name) for name in names])
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        find_lock_path(self._members / self.name).unlink(missing_ok=True)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep the other processes from choosing a trial or writing a report meanwhile."""
        lock = take_study_lock(self._study, wait=True)
        try:
            yield
        finally:
            lock.release()

    def is_alive(self, name: str) -> bool:
        """Return whether a process of the study has not ended. Call it in a `turn`."""
        path = self._members / name
        if name == self.name:
            return True
        if not find_lock_path(path).exists():
            return False
        try:
            take_lock(path).release()
        except BlockingIOError:
            return True
        find_lock_path(path).unlink(missing_ok=True)
        return False


def take_study_lock(path: Path, *, wait: bool = False) -> BaseFileLock:
    """Lock a file of a study until the process ends, however it ends.

    Raises:
        StudyError: another process has locked it, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return take_lock(path, wait=wait)
    except BlockingIOError:
        raise StudyError(
            f"another process works on {path}; wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written or locked ({error.strerror or error}); make room, or choose"
            " another --out"
        ) from None
