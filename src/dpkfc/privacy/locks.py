"""Keep two processes from writing one file, on Linux, macOS and Windows.

The lock is the operating system's and ends with its process, however that ends; a process forked
from the holder does not have it. It lies on an empty file beside the one that it keeps: Windows
lets nobody else read a locked file, and a budget is replaced while it is locked. The empty file
stays behind, and holds nothing by itself.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def find_lock_path(path: str | os.PathLike[str]) -> Path:
    """Return the empty file beside a file that its lock lies on; links are followed."""
    place = Path(path).resolve()
    return place.with_name(place.name + ".lock")


def take_lock(path: str | os.PathLike[str], *, wait: bool = False) -> BaseFileLock:
    """Lock a file against other processes, and against other holders in this one.

    Args:
        path: the file. The lock lies on `find_lock_path(path)`.
        wait: wait for the holder to end, instead of raising.

    Returns:
        The lock. Any thread may `release()` it.

    Raises:
        BlockingIOError: another one holds it.
        OSError: the folder is missing or cannot be written, or its file system cannot lock.
    """
    place = find_lock_path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    lock = FileLock(
        place,
        thread_local=False,
        # A mark in the file would outlive a process on another machine.
        fallback_to_soft=False,
    )
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "another process holds it") from None
    return lock
