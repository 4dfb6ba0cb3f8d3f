"""The number of forks between the first process and this one.

A process identifier does not show a fork: with PID namespaces a parent and its child can both be process 1.
"""

from __future__ import annotations

import os
import sys

__all__ = ["count_forks"]


class _Process:
    """Counts in every child that is forked from a process in which this module was imported."""

    forks = 0

    @classmethod
    def add_fork(cls) -> None:
        cls.forks += 1


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_Process.add_fork)


def count_forks() -> int:
    """Return the number of forks; an object that stores it can tell a child from the process that made the object."""
    return _Process.forks
