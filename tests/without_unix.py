"""Run a script in a process from which what Windows lacks has been taken.

There is no `fcntl`, no timer that sends signals, no fork, and no flag that closes files in
children. A folder cannot be opened; only what can be written is synced; a file that is open or
mapped is neither deleted nor replaced.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

GONE = {
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW fork forkpty register_at_fork fchmod chown"
    " sched_getaffinity",
    signal: "SIGALRM SIGHUP SIGKILL alarm setitimer ITIMER_REAL",
}


def take_away() -> None:
    """Take it all from this process. Torch asks for the name of the system before it uses these."""
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    import_module("torch")
    for module, names in GONE.items():
        for name in names.split():
            delattr(module, name)
    shutil._use_fd_functions = False
    os.open, os.fsync = _refuse_folders(os.open), _refuse_read_only(os.fsync)
    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, _refuse_open_files(getattr(os, name)))


def _refuse_folders(real: Any) -> Any:
    def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, flags, *rest, **options)

    return open_file


def _refuse_read_only(real: Any) -> Any:
    def sync(descriptor: int) -> None:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        flags = next(line.split()[1] for line in facts.splitlines() if line.startswith("flags"))
        if int(flags, 8) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        real(descriptor)

    return sync


def _refuse_open_files(real: Any) -> Any:
    def change(*paths: Any, **options: Any) -> None:
        if "dir_fd" not in options:
            in_use = _files_in_use()
            for path in paths:
                place = os.path.realpath(path)
                if place in in_use or any(name.startswith(place + os.sep) for name in in_use):
                    raise PermissionError(13, "The process cannot access the file", place)
        real(*paths, **options)

    return change


def _files_in_use() -> set[str]:
    """Return the paths of all files that this process has open or mapped."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    paths = {os.readlink(link) for link in links if os.path.lexists(link)}
    with open("/proc/self/maps") as lines:
        paths |= {line.split(maxsplit=5)[5].strip() for line in lines if line.count("/")}
    return paths


if __name__ == "__main__":
    take_away()
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
